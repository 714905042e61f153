"""Durable batch work for AI, in Python, on PostgreSQL."""

from windlass.app import AsyncWindlass, Windlass
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
