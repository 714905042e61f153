"""What everything that works for batches in one worker process shares."""

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
    """Made once by the runtime, and handed to those who plan, send and write."""

    batches: Batches
    counts: BatchCounts
    files: Files
    settings: BatchSettings
    waits: Waits
    workspace: Workspace
