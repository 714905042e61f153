"""Durable batch work for AI, in Python, on PostgreSQL."""

from typing import TYPE_CHECKING, Any

from batchwright.engine.context import Child, Context, Joined
from batchwright.engine.jobs import Done, Job, JobEvent, JobId, NewJob, OnHeld, Snooze, Wait
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

if TYPE_CHECKING:
    from batchwright.app import AsyncBatchwright, Batchwright

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


def __getattr__(name: str) -> Any:
    """The two clients load everything there is; a command or a child process often needs neither."""
    if name not in ("AsyncBatchwright", "Batchwright"):
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    from batchwright import app

    return getattr(app, name)
