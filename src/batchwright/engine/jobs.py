"""The data types of the engine: new jobs, stored jobs, and claimed jobs."""

from __future__ import annotations

import dataclasses
import difflib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Literal, NewType
from uuid import UUID

from batchwright.errors import InvalidInput
from batchwright.states import JobStatus

JobId = NewType("JobId", uuid.UUID)
ClaimKey = tuple[uuid.UUID, int]
"""A job's id and claim number: together they fence every write of a worker."""

PAYLOAD_BYTES_MAX = 1024 * 1024
RESULT_BYTES_MAX = 1024 * 1024
JOBS_PER_CALL_MAX = 100_000
CHILDREN_MAX = 100_000
MAX_ATTEMPTS = 3
PRIORITY = 5
DEFAULT_QUEUE = "default"
DEFAULT_TENANT = "default"


class OnHeld(StrEnum):
    """What enqueue does when its exclusive key already has open jobs."""

    QUEUE = "queue"
    """Wait in line: the jobs of a key run one after the other."""
    REJECT = "reject"
    """Refuse with `Conflict`, which names the job that holds the key."""
    COALESCE = "coalesce"
    """Return the job of the key that has not started yet; add one only when there is none."""
    SUPERSEDE = "supersede"
    """Cancel every open job of the key, then add this one."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A new job: an operation (the function, or its name), its payload, and how it should run.

    >>> NewJob("greet", {"name": "Ada"}, priority=2, delay_seconds=60)
    """

    operation: str | Callable[..., Any]
    payload: Any = None
    _: dataclasses.KW_ONLY
    queue: str | None = None
    tenant: str = DEFAULT_TENANT
    priority: int | None = None
    delay_seconds: float = 0.0
    run_after: datetime | None = None
    deadline: datetime | timedelta | None = None
    max_attempts: int | None = None
    exclusive_key: str | Sequence[Any] | None = None
    on_held: OnHeld | Literal["queue", "reject", "coalesce", "supersede"] | None = None
    idempotency_key: str | None = None
    pipeline_id: uuid.UUID | None = None
    traceparent: str | None = None
    owner: str | None = None
    id: JobId = field(default_factory=lambda: new_id())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's row at the time it was read."""

    id: JobId
    job_type: str
    queue: str
    tenant: str
    owner: str | None
    status: JobStatus
    priority: int
    run_after: datetime
    deadline: datetime | None
    payload: Any
    result: Any
    error: dict[str, Any] | None
    attempts: int
    max_attempts: int
    rescues: int
    claims: int
    locked_by: str | None
    locked_at: datetime | None
    lease_until: datetime | None
    exclusive_key: str | None
    is_current: bool
    pipeline_id: uuid.UUID
    parent_job_id: JobId | None
    round: int | None
    waits: int
    children_open: int
    children_failed: int
    progress_current: int | None
    progress_total: int | None
    message: str | None
    idempotency_key: str | None
    traceparent: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    dismissed_at: datetime | None
    """When a person removed the failed job from the inbox."""

    @property
    def is_waiting(self) -> bool:
        """RUNNING without a lease: it waits for its children."""
        return self.status is JobStatus.RUNNING and self.lease_until is None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """One entry in a job's history."""

    id: int
    job_id: JobId
    ts: datetime
    event: str
    level: str
    status: JobStatus | None
    claim: int | None
    attempt: int | None
    worker: str | None
    message: str | None
    fields: dict[str, Any] | None
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cost: Any
    error_kind: str | None


@dataclass(slots=True)
class Claim:
    """A job that a worker holds. `(id, claim)` is the fence: every write of the worker carries both."""

    id: JobId
    claim: int
    job_type: str
    queue: str
    tenant: str
    priority: int
    payload: Any
    attempts: int
    max_attempts: int
    exclusive_key: str | None
    pipeline_id: uuid.UUID
    parent_job_id: JobId | None
    deadline: datetime | None
    deadline_passed: bool
    waits: int
    traceparent: str | None
    progress_current: int | None
    progress_total: int | None
    run_after: datetime
    after_death: bool
    """Whether its previous worker died."""
    claimed_at: datetime


_clock = threading.Lock()
_last = 0


def new_id() -> JobId:
    """A uuid v7 that grows within this process, so that jobs enqueued together run in the order of the list."""
    global _last
    now = time.time_ns()
    milliseconds, rest = divmod(now, 1_000_000)
    stamp = (milliseconds << 12) | (rest * 4096 // 1_000_000)
    with _clock:
        _last = stamp = max(stamp, _last + 1)
    random = int.from_bytes(os.urandom(8)) >> 2
    high = ((stamp >> 12) << 16) | 0x7000 | (stamp & 0xFFF)
    return JobId(uuid.UUID(int=(high << 64) | (0b10 << 62) | random))


def new_jobs(operation: Any, payload: Any, options: Mapping[str, Any]) -> list[NewJob]:
    """One NewJob or a list of them, from the arguments of enqueue."""
    if isinstance(operation, (list, tuple)):
        if payload is not None or options:
            raise InvalidInput("for a list of jobs, give payload and options in each NewJob", param="payload")
        return list(operation)
    if isinstance(operation, NewJob) and payload is not None:
        raise InvalidInput("a NewJob has its own payload; do not give another one", param="payload")
    _refuse_unknown_options(options)
    try:
        if isinstance(operation, NewJob):
            return [dataclasses.replace(operation, **options)]
        return [NewJob(operation, payload, **options)]
    except TypeError as error:
        raise InvalidInput(f"enqueue: {error}") from error


def _refuse_unknown_options(options: Mapping[str, Any]) -> None:
    """The usual cause is a field of the payload that was given as a keyword."""
    known = {field.name for field in dataclasses.fields(NewJob) if field.init} - {"operation", "payload"}
    for name in options.keys() - known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        payload = f"a field of the payload goes into the payload, as in enqueue(operation, {{{name!r}: ...}})"
        hint = (
            f"did you mean {close[0]!r}? Or, if it is for the operation: {payload}"
            if close
            else f"{payload}; options are {', '.join(sorted(known))}"
        )
        raise InvalidInput(f"enqueue has no option {name!r}; {hint}", param=name)


def job_id(job: JobId | UUID | str) -> JobId:
    try:
        return JobId(job if isinstance(job, UUID) else UUID(str(job)))
    except ValueError as error:
        raise InvalidInput(f"{job!r} is not a job id", param="job") from error
