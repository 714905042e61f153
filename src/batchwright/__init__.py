"""Durable batch work for AI, in Python, on PostgreSQL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchwright.app import AsyncBatchwright
    from batchwright.batches.answers import BatchResult, RequestError
    from batchwright.batches.blocking import Batch, Batches
    from batchwright.batches.client import AsyncBatch, AsyncBatches
    from batchwright.batches.submitting import BatchOptions
    from batchwright.batches.watching import BatchProgress
    from batchwright.blocking import Batchwright
    from batchwright.engine.context import Child, Context, Joined
    from batchwright.engine.jobs import Job, JobEvent, JobId, NewJob, OnHeld
    from batchwright.engine.outcomes import Done, Snooze, Wait
    from batchwright.errors import (
        BatchFailed,
        BatchwrightError,
        Conflict,
        Fatal,
        JobCancelled,
        JobFailed,
        NotFound,
        RateLimited,
        RetryLater,
        SchemaInvalid,
        Transient,
        WaitTimeout,
    )
    from batchwright.operations.decorator import operation
    from batchwright.states import BatchStatus, JobStatus

__all__ = [
    "AsyncBatch",
    "AsyncBatches",
    "AsyncBatchwright",
    "Batch",
    "BatchFailed",
    "BatchOptions",
    "BatchProgress",
    "BatchResult",
    "BatchStatus",
    "Batches",
    "Batchwright",
    "BatchwrightError",
    "Child",
    "Conflict",
    "Context",
    "Done",
    "Fatal",
    "Job",
    "JobCancelled",
    "JobEvent",
    "JobFailed",
    "JobId",
    "JobStatus",
    "Joined",
    "NewJob",
    "NotFound",
    "OnHeld",
    "RateLimited",
    "RequestError",
    "RetryLater",
    "SchemaInvalid",
    "Snooze",
    "Transient",
    "Wait",
    "WaitTimeout",
    "operation",
]

_HOMES = {
    "app": ("AsyncBatchwright",),
    "batches.answers": ("BatchResult", "RequestError"),
    "batches.blocking": ("Batch", "Batches"),
    "batches.client": ("AsyncBatch", "AsyncBatches"),
    "batches.submitting": ("BatchOptions",),
    "batches.watching": ("BatchProgress",),
    "blocking": ("Batchwright",),
    "engine.context": ("Child", "Context", "Joined"),
    "engine.jobs": ("Job", "JobEvent", "JobId", "NewJob", "OnHeld"),
    "engine.outcomes": ("Done", "Snooze", "Wait"),
    "operations.decorator": ("operation",),
    "states": ("BatchStatus", "JobStatus"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, because importing any module of the package runs this module too."""
    if name not in __all__:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    found = getattr(import_module(f"batchwright.{_HOME_OF.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
