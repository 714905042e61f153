"""Durable batch work for AI, in Python, on PostgreSQL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchwright.app import AsyncBatchwright
    from batchwright.blocking import Batchwright
    from batchwright.engine.context import Child, Context, Joined
    from batchwright.engine.jobs import Job, JobEvent, JobId, NewJob, OnHeld
    from batchwright.engine.outcomes import Done, Snooze, Wait
    from batchwright.errors import (
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
    from batchwright.states import JobStatus

__all__ = [
    "AsyncBatchwright",
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
    "blocking": ("Batchwright",),
    "engine.context": ("Child", "Context", "Joined"),
    "engine.jobs": ("Job", "JobEvent", "JobId", "NewJob", "OnHeld"),
    "engine.outcomes": ("Done", "Snooze", "Wait"),
    "operations.decorator": ("operation",),
    "states": ("JobStatus",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: whatever is imported from this package runs this module, too."""
    if name not in __all__:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    found = getattr(import_module(f"batchwright.{_HOME_OF.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
