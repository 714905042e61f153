"""The objects that all code for batches shares in one worker process."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.batches.journal.workspace import Workspace
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batches
from batchwright.batches.waits import Waits
from batchwright.files.store import Files


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """Created once by the runtime, and passed to the code that plans, sends and writes."""

    batches: Batches
    counts: BatchCounts
    files: Files
    settings: BatchSettings
    waits: Waits
    workspace: Workspace
