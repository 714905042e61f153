"""Views for people: lists with a cursor, why a job waits, the inbox, pipelines, queues, workers and operations."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID

from batchwright.db.database import Row
from batchwright.db.statements import statements
from batchwright.engine.jobs import Job, JobId
from batchwright.engine.queue import Queue
from batchwright.engine.work import why_no_worker
from batchwright.errors import InvalidInput, NotFound
from batchwright.states import JOB, JobStatus

SQL = statements(__package__, "parts.sql", "views.sql")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SCAN_MAX = 10_000
_SILENT_SECONDS = 30.0
INBOX_COUNT_MAX = 20_000
"""Maximum number of failed jobs that the inbox examines: each group has its share, and says if it has more."""
_INBOX_GROUPS_MAX = 1_000
_PIPELINE_COUNT_MAX = 10_000
_QUEUE_COUNT_MAX = 10_000
_QUEUES_COUNT_MAX = 100_000
"""Of all queues together; with more than 1,000 queues, 100 of each."""
_QUEUE_COUNT_MAX_OF_TENANT = 1_000
_LISTED_MAX_OF_TENANT = 5_000
_INBOX_SAMPLES = 3
_RETRYABLE = frozenset({"transient", "rate_limited", "deadline"})


class Cursor(NamedTuple):
    """A position in the list of jobs: the next page begins after it. Its text form is opaque to clients."""

    created_at: datetime
    id: UUID

    def __str__(self) -> str:
        microseconds = (self.created_at - _EPOCH) // _MICROSECOND
        return base64.urlsafe_b64encode(f"{microseconds:x}.{self.id.hex}".encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Cursor:
        try:
            padded = text + "=" * (-len(text) % 4)
            microseconds, _, id = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii").partition(".")
            return cls(_EPOCH + int(microseconds, 16) * _MICROSECOND, UUID(id))
        except (ValueError, OverflowError) as error:
            raise InvalidInput(f"{text!r} is not a cursor; use the next_cursor of a list", param="cursor") from error


_START = Cursor(datetime.max.replace(tzinfo=UTC), UUID(int=2**128 - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Selects jobs; a field that is not given matches all."""

    tenant: str | None = None
    statuses: tuple[JobStatus, ...] = ()
    job_type: str | None = None
    queue: str | None = None
    pipeline_id: UUID | None = None
    parent_job_id: UUID | None = None
    error_code: str | None = None
    dismissed: bool | None = None
    owned: bool | None = None
    """Whether the jobs belong to an object such as a batch, which has its own verbs."""
    created_from: datetime | None = None
    created_to: datetime | None = None
    payload_path: tuple[str, ...] | None = None
    """The path of a payload field, from the outside in, whose text is `payload_value`."""
    payload_value: str | None = None

    def params(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        path = None if self.payload_path is None else list(self.payload_path)
        return {**values, "statuses": [status.value for status in self.statuses], "payload_path": path}


class Page(NamedTuple):
    """Some jobs, newest first, and where to continue; nothing is left when `next` is None.

    A page may be short or empty and still have a next one: a list examines a bounded number of rows.
    """

    jobs: list[Job]
    next: Cursor | None


Reason = Literal["run_after", "exclusive_key", "paused_queue", "no_worker", "isolation", "children", "no_free_slot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingOn:
    """One reason why a job does not run."""

    reason: Reason
    message: str
    until: datetime | None = None
    job_id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxGroup:
    """Failed jobs of one type with one cause."""

    job_type: str
    code: str | None
    kind: str | None
    count: int
    first_at: datetime
    last_at: datetime
    samples: list[UUID]
    message: str | None
    has_more: bool = False
    """Whether it has more jobs than were examined; then `count` is a minimum."""

    @property
    def is_retryable(self) -> bool:
        """Whether a rerun of the same job is likely to succeed."""
        return self.kind in _RETRYABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A root job with all its descendants."""

    id: UUID
    status: JobStatus
    counts: dict[JobStatus, int]
    steps: list[Step]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    has_more: bool = False
    """Whether it has more jobs than were counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The jobs of one type in a pipeline."""

    job_type: str
    counts: dict[JobStatus, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The numbers of waiting and running jobs in a queue."""

    name: str
    paused_at: datetime | None
    due: int
    scheduled: int
    running: int
    oldest_due_seconds: float | None
    has_more: bool
    """Whether more jobs wait than were examined; then the counts are minimums."""


class QueuesOfTenant(NamedTuple):
    """The queues in which a tenant has open jobs."""

    queues: list[QueueView]
    is_complete: bool
    """False if the tenant may have jobs in other queues, or more in these: it has many jobs, and some queue is long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker process at its last heartbeat."""

    id: str
    host: str
    pid: int
    version: str
    queues: list[str] | None
    """The queues that it serves; None means all."""
    operations: list[str]
    concurrency: int
    running: int
    started_at: datetime
    heartbeat_at: datetime
    stopping_at: datetime | None
    is_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationView:
    """An operation that some worker has published."""

    name: str
    description: str | None
    payload_schema: dict[str, Any]
    defaults: dict[str, Any]
    published_at: datetime
    workers: int


class Views:
    """Read-only queries about the queue, each with a bounded number of rows."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    # Jobs -------------------------------------------------------------------------------------------------------

    async def page(self, wanted: JobFilter, *, limit: int = 50, after: Cursor | None = None) -> Page:
        ids, next = await self.ids(wanted, limit=limit, after=after)
        return Page(await self._queue.get_many(ids, tenant=wanted.tenant), next)

    async def ids(
        self, wanted: JobFilter, *, limit: int, after: Cursor | None = None
    ) -> tuple[list[JobId], Cursor | None]:
        """Only the ids of a page's jobs."""
        start = _first_place(wanted, after)
        params = {**wanted.params(), "before_time": start.created_at, "before_id": start.id, "scan_max": _SCAN_MAX}
        rows = await self._find(wanted, {**params, "limit": limit + 1})
        found = [Cursor(created_at, id) for id, created_at, is_stop in rows if not is_stop]
        next = found[limit - 1] if len(found) > limit else None
        for stop in (Cursor(created_at, id) for id, created_at, is_stop in rows if is_stop):
            next = None if wanted.created_from and stop.created_at < wanted.created_from else stop
        return [JobId(one.id) for one in found[:limit]], next

    async def _find(self, wanted: JobFilter, params: Mapping[str, Any]) -> list[Row]:
        """Few jobs are found by an index of their common property and sorted; many are found by walking the list."""
        is_failed = wanted.statuses == (JobStatus.FAILED,)
        narrow = _narrow_statement(wanted, is_failed)
        rows = [] if narrow is None else await self._run(narrow, **params)
        if narrow is not None and not (rows and rows[0][0] is None):
            return rows
        ended_at = rows[0][1] if rows else None
        if ended_at is not None and ended_at < params["before_time"]:
            params = {**params, "before_time": ended_at, "before_id": _START.id}
        return await self._run("list_jobs", **params, is_failed=is_failed)

    async def with_ancestors(self, ids: Sequence[JobId], wanted: JobFilter) -> list[JobId]:
        """These jobs, and those of their ancestors that match as well."""
        if wanted.parent_job_id is not None:  # siblings: none is an ancestor of another
            return list(ids)
        return [JobId(id) for (id,) in await self._run("with_ancestors", ids=list(ids), **wanted.params())]

    async def waiting_on(self, jobs: Sequence[Job]) -> dict[UUID, list[WaitingOn]]:
        """Why each of these jobs does not run; nothing for a job that runs or has ended."""
        reasons: dict[UUID, list[WaitingOn]] = {job.id: [] for job in jobs}
        for job in jobs:
            if job.is_waiting:
                reasons[job.id].append(
                    WaitingOn(reason="children", message=f"{job.children_open} of its children have not ended")
                )
        queued = {job.id: job for job in jobs if job.status is JobStatus.QUEUED}
        if queued:
            for row in await self._run("waiting_on", ids=list(queued), silent_seconds=_SILENT_SECONDS):
                reasons[row[0]] += _reasons(queued[row[0]], _Facts(*row[1:]))
        return reasons

    async def inbox(
        self, *, tenant: str | None = None, job_type: str | None = None, limit: int = 100
    ) -> list[InboxGroup]:
        """Failed jobs that were not dismissed, by type and cause, largest group first."""
        rows = await self._run(
            "inbox",
            tenant=tenant,
            job_type=job_type,
            limit=limit,
            count_max=INBOX_COUNT_MAX,
            groups_max=_INBOX_GROUPS_MAX,
            samples=_INBOX_SAMPLES,
        )
        return [InboxGroup(**_named(InboxGroup, row)) for row in rows]

    async def pipeline(self, id: UUID, *, tenant: str | None = None) -> Pipeline:
        rows = await self._run("pipeline", pipeline_id=id, tenant=tenant, count_max=_PIPELINE_COUNT_MAX + 1)
        if not rows:
            raise NotFound(f"there is no pipeline {id}")
        steps: dict[str, dict[JobStatus, int]] = {}
        counts: Counter[JobStatus] = Counter()
        tops: Counter[JobStatus] = Counter()
        for job_type, status, n, without_parent, *_ in rows:
            steps.setdefault(job_type, {})[JobStatus(status)] = n
            counts[JobStatus(status)] += n
            tops[JobStatus(status)] += without_parent
        status = _pipeline_status(counts, tops, is_open=rows[0][7])
        is_open = status not in JOB.terminal
        return Pipeline(
            id=id,
            status=status,
            counts=dict(counts),
            steps=[Step(job_type=job_type, counts=of_type) for job_type, of_type in steps.items()],
            created_at=min(row[4] for row in rows),
            started_at=min((row[5] for row in rows if row[5]), default=None),
            finished_at=None if is_open else max(row[6] for row in rows),
            has_more=counts.total() > _PIPELINE_COUNT_MAX,
        )

    async def open_members(self, id: UUID, *, tenant: str | None = None, limit: int) -> list[JobId]:
        """Jobs of a pipeline that have not ended, without those that belong to an object.

        While any of them have no parent, only those: cancelling them also cancels their descendants.
        """
        rows = await self._run("open_members", pipeline_id=id, tenant=tenant, limit=limit, scan_max=_SCAN_MAX)
        return [JobId(id) for (id,) in rows]

    # Queues, workers and operations -----------------------------------------------------------------------------

    async def queues(self, *, name: str | None = None, limit: int = 1000) -> list[QueueView]:
        limits = {"count_max": _QUEUE_COUNT_MAX, "total_max": _QUEUES_COUNT_MAX, "limit": limit}
        rows = await self._run("queue_depths", name=name, **limits)
        return [QueueView(**_named(QueueView, row)) for row in rows]

    async def queues_of_tenant(self, tenant: str, *, limit: int = 1000) -> QueuesOfTenant:
        """Queues in which the tenant has open jobs, with only its own jobs."""
        limits = {"listed_max": _LISTED_MAX_OF_TENANT, "count_max": _QUEUE_COUNT_MAX_OF_TENANT, "limit": limit}
        rows = await self._run("queues_of_tenant", tenant=tenant, **limits)
        found = [QueueView(**_named(QueueView, row)) for row in rows if row[0] is not None]
        return QueuesOfTenant(found, is_complete=len(found) == len(rows))

    async def workers(self, *, limit: int = 1000) -> list[WorkerView]:
        rows = await self._run("workers", silent_seconds=_SILENT_SECONDS, limit=limit)
        return [WorkerView(**_named(WorkerView, row)) for row in rows]

    async def operations(self, *, limit: int = 1000) -> list[OperationView]:
        rows = await self._run("operations", silent_seconds=_SILENT_SECONDS, limit=limit)
        return [OperationView(**_named(OperationView, row)) for row in rows]

    def _run(self, name: str, /, **params: Any) -> Awaitable[list[Row]]:
        return self._queue.database.ask(SQL[name], params)


class _Facts(NamedTuple):
    """What the database knows about why a queued job has not started."""

    is_later: bool
    is_paused: bool
    holder: UUID | None
    holder_status: str | None
    rival: UUID | None
    is_suspect: bool
    workers: int
    has_free_slot: bool


def _reasons(job: Job, facts: _Facts) -> list[WaitingOn]:
    found = []
    if facts.is_later:
        found.append(
            WaitingOn(
                reason="run_after", message=f"it is not due before {job.run_after.isoformat()}", until=job.run_after
            )
        )
    if facts.is_paused:
        found.append(WaitingOn(reason="paused_queue", message=f"the queue {job.queue!r} is paused"))
    if ahead := facts.holder or facts.rival:
        how = f"is held by job {ahead} ({facts.holder_status})" if facts.holder else f"goes to job {ahead} first"
        found.append(WaitingOn(reason="exclusive_key", message=f"its key {job.exclusive_key} {how}", job_id=ahead))
    if facts.workers == 0:
        found.append(WaitingOn(reason="no_worker", message=why_no_worker(job.job_type, job.queue)))
    if facts.is_suspect:
        found.append(WaitingOn(reason="isolation", message="its worker died twice, so it runs alone next"))
    if not found and not facts.has_free_slot:
        found.append(WaitingOn(reason="no_free_slot", message="every worker that could run it is busy"))
    return found


def _pipeline_status(counts: Mapping[JobStatus, int], tops: Mapping[JobStatus, int], *, is_open: bool) -> JobStatus:
    """RUNNING while any job is open; then the worst status of jobs without a parent: parents decide about children."""
    if is_open or any(status not in JOB.terminal for status in counts):
        return JobStatus.QUEUED if set(counts) == {JobStatus.QUEUED} else JobStatus.RUNNING
    return next((status for status in (JobStatus.FAILED, JobStatus.CANCELLED) if tops.get(status)), JobStatus.SUCCEEDED)


def _first_place(wanted: JobFilter, after: Cursor | None) -> Cursor:
    start = after or _START
    return start if wanted.created_to is None else min(start, Cursor(wanted.created_to, UUID(int=0)))


def _narrow_statement(wanted: JobFilter, is_failed: bool) -> str | None:
    """The statement that finds these jobs if they are few; failed jobs have their own list."""
    if wanted.parent_job_id is not None:
        return "list_children"
    if wanted.pipeline_id is not None:
        return "list_pipeline"
    return "list_by_status" if wanted.statuses and not is_failed else None


def _named(kind: type[Any], row: Row) -> dict[str, Any]:
    return dict(zip(kind.__dataclass_fields__, row, strict=True))
