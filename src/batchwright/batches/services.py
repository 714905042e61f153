"""The objects that the HTTP routes and pages of batches use."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.batches.inspector import Inspector
from batchwright.batches.models import Models
from batchwright.batches.output.lookup import LineSearch
from batchwright.batches.output.results import Results
from batchwright.batches.samples import BatchSamples
from batchwright.batches.seal import Seal
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batches
from batchwright.core import Core
from batchwright.files.store import Files


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServices:
    """The services of one HTTP server."""

    batches: Batches
    core: Core
    files: Files
    inspector: Inspector
    lines: LineSearch
    models: Models
    results: Results
    samples: BatchSamples
    seal: Seal
    settings: BatchSettings
