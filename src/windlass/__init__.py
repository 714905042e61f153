"""Durable batch work for AI, in Python, on PostgreSQL."""

from typing import TYPE_CHECKING, Any

from windlass.engine.context import Child, Context, Joined
from windlass.engine.jobs import Done, Job, JobEvent, JobId, NewJob, OnHeld, Snooze, Wait
from windlass.errors import (
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
    WindlassError,
)
from windlass.operations.decorator import operation
from windlass.states import JobStatus

if TYPE_CHECKING:
    from windlass.app import AsyncWindlass, Windlass

__all__ = [
    "AsyncWindlass",
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
    "Windlass",
    "WindlassError",
    "operation",
]


def __getattr__(name: str) -> Any:
    """The two clients load everything there is; a command or a child process often needs neither."""
    if name not in ("AsyncWindlass", "Windlass"):
        raise AttributeError(f"module 'windlass' has no attribute {name!r}")
    from windlass import app

    return getattr(app, name)
