"""The rows of batches: every transition is a compare-and-set, and what is not registered here does not exist.

A batch is driven by its job, `batch.process`. The job verbs refuse jobs that belong to a batch; the verbs here take
their place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar
from uuid import UUID

import orjson

from batchwright.batches.plan.shards import Shard
from batchwright.batches.tally import Tally
from batchwright.db.database import Row, Session
from batchwright.db.retry import retry_deadlocks
from batchwright.db.statements import statements
from batchwright.durations import parse_duration
from batchwright.engine import owned
from batchwright.engine.context import Context
from batchwright.engine.jobs import JobId, new_id
from batchwright.engine.queue import Queue
from batchwright.engine.worker.lanes import PRIVATE
from batchwright.errors import Conflict, Fatal, InvalidInput, NotFound
from batchwright.providers.jobs import AtWork, RemoteJobs
from batchwright.states import BATCH, BatchStatus, JobStatus

SQL = statements(__package__, "batches.sql", parts=owned.JOBS_VIEW)

P = ParamSpec("P")
T = TypeVar("T")
QUEUE = "batches"
SHARD_QUEUE = "shard/"
PROVIDER_QUEUE = "provider/"
PROCESS = "batch.process"
SHARD = "batch.shard"
PROVIDER_SHARD = "batch.provider_shard"
WINDOW_SECONDS = (60, 30 * 24 * 3600)
_WINDOW = re.compile(r"(?:[0-9]+[smhd])+")
AWAY_SECONDS = 10.0
"""How long a job of a batch waits before it tries an unavailable store again."""
_WAITS = {
    "credential": "a provider refuses its credential",
    "disk": "no room on the disk",
    "key": "no key for the headers of its creator",
    "store": "the store is unavailable",
}
_RACES_MAX = 10
_UNFINISHED_MAX = 10
PATIENCE_SECONDS = 3600.0
"""A batch whose files are left to write waits at least this long for the store, even after its window."""
RESENDS_MAX = 3
"""How often lines that have no answer are resent when the files must be written."""
_IDLE = AtWork(0, 0.0)
_RATE_SECONDS = 60.0
_SERVED_SECONDS = 300.0
"""A worker that was seen within this time counts as serving its models: it may be restarting."""
_ALIVE_SECONDS = 30.0
"""A worker without a heartbeat for longer is dead."""
_RATE_SEGMENTS = 500
STALLED_SECONDS = 10.0
"""Without an answer for this long, a batch shows that it waits for one."""
_STALLED_GAPS = 3.0
"""A slow batch, e.g. with an answer a minute, may wait this many times as long."""
_ENDED_TODAY_MAX = 5_000
_SEGMENTS_PER_PAGE = 5_000
SMALL_MAX = 1_000
"""The progress of a batch with no more requests than this is sampled only if it takes longer than ten seconds."""
SHARDS_GRACE_SECONDS = 1.5
"""After the deadline, or after the grace of a cancellation, shards have this long to end by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as its row was when it was read."""

    id: str
    tenant: str
    status: BatchStatus
    job_id: UUID
    queue: str
    priority: int
    endpoint: str
    input_file_id: str
    completion_window: str
    output_expires_seconds: int | None
    metadata: dict[str, str] | None
    limits: dict[str, Any]
    traceparent: str | None
    retry_of: str | None
    retry_codes: list[str] | None
    family: str
    models: list[str] | None
    total: int
    input_sha256: str | None
    errors: dict[str, Any] | None
    completed: int
    failed: int
    expired: int
    cancelled: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    usage_by_model: dict[str, Any]
    progress_by_model: dict[str, dict[str, int]] = field(default_factory=dict)
    """Requests of each model: `total`, as planned, and `completed` and `failed` so far."""
    error_summary: Any
    resends: int
    """How often lines without an answer were resent."""
    overflow_cost: float = 0.0
    """Estimated cost of the shards that went to a provider because the batch would be late."""
    stop_reason: str | None
    stop_at: datetime | None
    stop_error: dict[str, Any] | None
    output_file_id: str | None
    error_file_id: str | None
    manifest: dict[str, Any] | None
    segments_gone_at: datetime | None
    created_at: datetime
    expires_at: datetime
    paused_at: datetime | None
    taken_up_at: datetime | None
    """When a worker first picked it up."""
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None
    waiting_reason: str | None
    """What it waited for when a worker last checked: `store`, `disk`, `key` or `credential`."""
    waiting_message: str | None
    origin: dict[str, Any] | None
    """For a batch of `batch run`: the file, the server and other values that the command needs to resume it."""
    waits: bool
    """Whether that was in the last minutes."""

    @property
    def waits_for(self) -> str | None:
        """What it waits for, as text; None if it makes progress, as far as is known."""
        if not self.waits or self.has_ended:
            return None
        return f"{_WAITS[self.waiting_reason or '']}: {self.waiting_message}"

    @property
    def done(self) -> int:
        return self.completed + self.failed + self.expired + self.cancelled

    @property
    def is_private(self) -> bool:
        """Whether only the process that created it works on it."""
        return self.queue.startswith(PRIVATE)

    @property
    def has_ended(self) -> bool:
        return self.status in BATCH.terminal

    @property
    def ended_at(self) -> datetime | None:
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch to create."""

    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_expires_seconds: int | None = None
    priority: int = 5
    queue: str = QUEUE
    limits: Mapping[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None
    idempotency_digest: bytes | None = None
    traceparent: str | None = None
    retry_of: str | None = None
    retry_codes: Sequence[str] | None = None
    family: str | None = None
    origin: Mapping[str, Any] | None = None
    """What a command needs to resume it, if it is private to one."""
    sealed_headers: bytes | None = field(default=None, repr=False)
    """Encrypted; a retry without any uses those of the batch that it retries."""
    id: str = field(default_factory=lambda: f"batch_{new_id().hex}")
    job_id: JobId = field(default_factory=lambda: new_id())


class Pace(NamedTuple):
    """Recent answers per second, None if there were none; and when that was, by the database's clock."""

    rate: float | None
    now: datetime
    ahead: int = 0
    """Answers that a provider reports as ready; they are fetched when its job has ended."""
    silent_seconds: float = 0.0
    """Seconds since the last answer, counting only time in which a worker could get one."""

    @property
    def is_stalled(self) -> bool:
        """Whether answers have stopped arriving, so that the rate does not predict the end."""
        return self.silent_seconds > max(STALLED_SECONDS, _STALLED_GAPS / self.rate if self.rate else 0.0)


class Control(NamedTuple):
    """What workers must know about a batch while they send it; seconds are counted from now by the database's clock."""

    id: str
    status: str
    stop_reason: str | None
    stopped_seconds: float | None
    paused_seconds: float | None
    priority: int
    limits: dict[str, Any]
    total: int
    done: int
    seconds_left: float
    job_id: UUID

    @property
    def is_paused(self) -> bool:
        return self.paused_seconds is not None


class Stalled(NamedTuple):
    """An open batch whose window is over, that was ordered to stop, or whose job is gone."""

    id: str
    status: str
    stop_reason: str | None
    stopped_seconds: float | None
    late_seconds: float
    """Seconds since its window ended; below 0 it has not."""
    job_status: str | None
    job_id: UUID
    tenant: str
    expires_at: datetime


class OpenShard(NamedTuple):
    """A shard that has not ended."""

    job_id: UUID
    shard: Shard
    is_untouched: bool
    """No worker has ever had it."""


class Segment(NamedTuple):
    """A registered range of a journal."""

    id: int
    batch_id: str
    shard: int
    claim: int
    seq: int
    host: str
    key: str | None
    start: int
    end: int
    lines: int


Name = tuple[str, int, int, int]
"""The name of a registered range: batch, shard, claim, and its number in the journal."""


class Position(NamedTuple):
    """How far a journal is registered: the number of the next range, and the byte at which it must begin."""

    seq: int = 0
    byte: int = 0


class Registered(NamedTuple):
    """The outcome of registering ranges; a range in neither list belongs to a lost claim."""

    taken: set[Name]
    behind: dict[Name, Position]
    """Refused, because less of their journal is registered than their writer assumes: where it must continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A range of a journal that is synced, and the claim under which it is registered."""

    batch_id: str
    shard: int
    claim: int
    """The number of the journal."""
    seq: int
    host: str
    key: str | None
    start: int
    end: int
    tally: Tally
    model: str
    job_id: UUID
    job_claim: int
    worker: str
    load: tuple[int, int] | None = None
    """The limit of requests in flight to this model in the worker, and how many are; None at a provider."""

    @property
    def name(self) -> Name:
        return self.batch_id, self.shard, self.claim, self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known about a batch when it ends; counts and errors that are None stay unchanged."""

    counts: Mapping[str, int] = field(default_factory=dict)
    error_summary: Any = None
    errors: Mapping[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    manifest: Mapping[str, Any] | None = None

    def as_params(self) -> dict[str, Any]:
        return {
            **{name: self.counts.get(name) for name in ("completed", "failed", "expired", "cancelled")},
            "error_summary": _json(self.error_summary),
            "errors": _json(self.errors),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "manifest": _json(self.manifest),
        }


class WrongJob(Fatal):
    """The job was enqueued manually; it would resend every line of the batch."""


def require_own_job(ctx: Context, batch_id: str, job_id: UUID) -> None:
    """Only the job that was created with a batch, and its children, run the batch."""
    if ctx.pipeline_id != job_id:
        raise WrongJob(f"{ctx.job_type} belongs to {batch_id}, whose own job runs it; enqueue nothing for it")


def later_priority(priority: int) -> int:
    """The priority of all shards of a batch but the first, so that the first shards of other batches go before them."""
    return min(9, priority + 1)


def window_seconds(window: str) -> int:
    """`24h`, `90m`, `7d`, `1h30m`: from one minute to thirty days. Like OpenAI's API, it accepts no bare numbers."""
    seconds = int(parse_duration(window) or 0) if _WINDOW.fullmatch(window) else 0
    least, most = WINDOW_SECONDS
    if not least <= seconds <= most:
        raise InvalidInput(
            f"Invalid value: '{window[:40]}'. Supported values are: '24h', and any time from '1m' to '30d'.",
            param="completion_window",
        )
    return seconds


def shard_queue(queue: str, model: str) -> str:
    """Shards of ordinary batches wait in one queue per model, those of a private queue in queues below it."""
    return f"{SHARD_QUEUE}{model}" if queue == QUEUE else f"{queue}/{SHARD_QUEUE}{model}"


def provider_queue(queue: str, provider: str) -> str:
    """Shards at outside providers wait in one queue per provider, those of a private queue in queues below it."""
    return f"{PROVIDER_QUEUE}{provider}" if queue == QUEUE else f"{queue}/{PROVIDER_QUEUE}{provider}"


class Batches:
    """The batches of all tenants."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    # Users ------------------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def create(
        self, new: NewBatch, job: Mapping[str, Any], *, instead_of: str | None = None
    ) -> tuple[Batch, bool]:
        """Create the batch together with its job; returns it and whether it is new. After a lost answer, call it again.

        The same idempotency key with the same digest returns the first batch; another digest is a Conflict. If
        `instead_of` names an ended batch, the new batch takes over its key.
        """
        async with self.queue.database.transaction() as session:
            if instead_of is not None:
                await self.queue.database.ask(SQL["free_idempotency_key"], {"id": instead_of}, session)
            params = {
                **{name: getattr(new, name) for name in NewBatch.__dataclass_fields__},
                "metadata": _json(new.metadata),
                "limits": _json(new.limits),
                "origin": _json(new.origin),
                "retry_codes": list(new.retry_codes) if new.retry_codes else None,
                "family": new.family or new.id,
                "window_seconds": window_seconds(new.completion_window),
            }
            for _ in range(_RACES_MAX):
                if rows := await self.queue.database.ask(SQL["insert"], params, session):
                    await self.queue.enqueue([job], session=session)
                    return _batch(rows[0]), True
                if known := await self._find_known(params, session):
                    return known, known.id == new.id
                # The key was cleared between the two statements, so it is free now.
        raise Conflict("other requests are using this Idempotency-Key at this moment; send the request again")

    async def find_repeated(self, new: NewBatch) -> Batch | None:
        """The existing batch with this idempotency key; with another digest it is a Conflict."""
        params = {name: getattr(new, name) for name in ("id", "tenant", "idempotency_key", "idempotency_digest")}
        return await self._find_known(params, None) if new.idempotency_key is not None else None

    async def find_unfinished(self, file: str) -> list[Batch]:
        """Batches of `batch run` with the file at this path that have not ended, the newest first."""
        params = {"file": file, "limit": _UNFINISHED_MAX}
        return [_batch(row) for row in await self.queue.database.ask(SQL["unfinished"], params)]

    async def forget_queue(self, batch: Batch) -> int:
        """Remove what is left of a batch's private queue; returns how many queues there were."""
        assert batch.is_private, f"{batch.queue} is not {batch.id}'s own"
        return len(await self.queue.database.ask(SQL["forget_queue"], {"queue": batch.queue}))

    async def _find_known(self, params: Mapping[str, Any], session: Session | None) -> Batch | None:
        for digest, *row in await self.queue.database.ask(SQL["known"], params, session):
            if row[0] != params["id"] and bytes(digest or b"") != params["idempotency_digest"]:
                raise Conflict("the Idempotency-Key was used before with another body", holder=row[0])
            return _batch(row)
        return None

    async def get(self, id: str, *, tenant: str | None) -> Batch:
        for row in await self.queue.database.ask(SQL["get"], {"id": id, "tenant": tenant}):
            return _batch(row)
        raise NotFound(f"there is no batch {id!r}", kind="batch", id=id)

    async def sealed_headers(self, id: str) -> bytes | None:
        """The headers of its creator, encrypted. No view of a batch has them."""
        rows = await self.queue.database.ask(SQL["sealed_headers"], {"id": id})
        return bytes(rows[0][0]) if rows and rows[0][0] is not None else None

    async def list(
        self,
        tenant: str | None,
        *,
        after: str | None = None,
        limit: int = 20,
        statuses: Sequence[BatchStatus] | None = None,
    ) -> list[Batch]:
        """Newest first."""
        wanted = [status.value for status in statuses] if statuses else None
        params = {"tenant": tenant, "after": after, "limit": limit, "statuses": wanted}
        by_tenant = "list" if tenant is not None else "list_everywhere"
        statement = "list_by_status" if statuses else by_tenant
        return [_batch(row) for row in await self.queue.database.ask(SQL[statement], params)]

    async def paces(self, ids: Sequence[str]) -> dict[str, Pace]:
        """How fast these batches are being answered."""
        if not ids:
            return {}
        params = {
            "ids": list(ids),
            "seconds": _RATE_SECONDS,
            "segments": _RATE_SEGMENTS,
            "silent_seconds": _ALIVE_SECONDS,
        }
        there = await RemoteJobs(self.queue).at_work(ids)
        found = {}
        for id, lines, seconds, now, silent in await self.queue.database.ask(SQL["paces"], params):
            at_work = there.get(id, _IDLE)
            silent = 0.0 if at_work.rate else silent or 0.0
            found[id] = Pace(lines / max(seconds, 1.0) + at_work.rate or None, now, at_work.done, silent)
        return found

    async def used_today(self, tenant: str | None) -> Sequence[Row]:
        """Tokens of today (UTC): tenant, model, input, cached and output; without those of documents."""
        return await self.queue.database.ask(SQL["used_today"], {"tenant": tenant, "limit": _ENDED_TODAY_MAX})

    @retry_deadlocks
    async def cancel(self, id: str, *, tenant: str | None) -> Batch:
        """Order the batch to end; a batch that is cancelling or cancelled is returned unchanged."""
        async with self.queue.database.transaction() as session:
            batch = await self._lock(session, id, tenant)
            if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                return batch
            if batch.has_ended:
                raise Conflict(f"Cannot cancel a batch with status '{batch.status.value}'.")
            reason = "the batch was cancelled"
            await self._stop_shards(batch.job_id, reason, session)
            (row,) = await self.queue.database.ask(SQL["cancel"], {"id": id}, session)
            await self.queue.wake([batch.job_id], session=session)
            return _batch(row)

    @retry_deadlocks
    async def pause(self, id: str, *, tenant: str | None) -> Batch:
        """Send nothing more until it is resumed; requests in flight end, and its window keeps running."""
        return await self._while_open("pause", id, tenant, "pause", {})

    @retry_deadlocks
    async def resume(self, id: str, *, tenant: str | None) -> Batch:
        async with self.queue.database.transaction() as session:
            batch = await self._lock_open(session, "resume", id, tenant)
            (row,) = await self.queue.database.ask(SQL["resume"], {"id": id}, session)
            shards = await owned.children(self.queue, batch.job_id, JobStatus.QUEUED, session=session)
            await self.queue.wake(shards, session=session)
            return _batch(row)

    @retry_deadlocks
    async def set_priority(self, id: str, priority: int, *, tenant: str | None) -> Batch:
        """Change the priority of the batch and of the shards that no worker has yet."""
        if not 0 <= priority <= 9:
            raise InvalidInput(f"priority is {priority}; it goes from 0 (first) to 9 (last)", param="priority")
        async with self.queue.database.transaction() as session:
            batch = await self._lock_open(session, "change the priority of", id, tenant)
            (row,) = await self.queue.database.ask(SQL["set_priority"], {"id": id, "priority": priority}, session)
            shards = await owned.children(self.queue, batch.job_id, JobStatus.QUEUED, session=session)
            await self.queue.shift_priority([*shards, batch.job_id], priority - batch.priority, session=session)
            return _batch(row)

    @retry_deadlocks
    async def set_limits(self, id: str, limits: Mapping[str, Any], *, tenant: str | None) -> Batch:
        return await self._while_open("limit", id, tenant, "set_limits", {"limits": _json(limits)})

    async def _while_open(
        self, verb: str, id: str, tenant: str | None, statement: str, params: Mapping[str, Any]
    ) -> Batch:
        async with self.queue.database.transaction() as session:
            await self._lock_open(session, verb, id, tenant)
            (row,) = await self.queue.database.ask(SQL[statement], {"id": id, **params}, session)
            return _batch(row)

    async def _lock_open(self, session: Session, verb: str, id: str, tenant: str | None) -> Batch:
        batch = await self._lock(session, id, tenant)
        if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            raise Conflict(f"Cannot {verb} a batch with status '{batch.status.value}'.")
        return batch

    # Workers ----------------------------------------------------------------------------------------------------

    async def pick_up(self, id: str) -> tuple[Batch, bool] | None:
        """A worker has picked it up; returns whether its window had ended by then. None if another process moved it."""
        rows = await self.queue.database.ask(SQL["pick_up"], {"id": id})
        return (_batch(rows[0][:-1]), bool(rows[0][-1])) if rows else None

    async def served_queues(self) -> set[str]:
        """The queues of shards that workers claim from, or did in the last minutes. A name that ends in a slash means
        all queues below it."""
        params = {"shard": SHARD, "below": SHARD_QUEUE, "silent_seconds": _SERVED_SECONDS}
        return {queue for (queue,) in await self.queue.database.ask(SQL["served"], params)}

    async def begin(
        self,
        id: str,
        *,
        total: int,
        models: Sequence[str],
        input_sha256: str,
        requests: Mapping[str, int] = MappingProxyType({}),
    ) -> Batch | None:
        """From validating to in_progress; None if another process moved it. `requests` are those of each model."""
        progress = _json({model: {"total": n, "completed": 0, "failed": 0} for model, n in requests.items()})
        params = {"id": id, "total": total, "models": list(models), "input_sha256": input_sha256, "progress": progress}
        rows = await self.queue.database.ask(SQL["begin"], params)
        return _batch(rows[0]) if rows else None

    async def finalize(self, id: str) -> Batch | None:
        """From in_progress to finalizing, unless it was ordered to stop; None if its status has changed."""
        rows = await self.queue.database.ask(SQL["finalize"], {"id": id})
        return _batch(rows[0]) if rows else None

    async def resend(self, id: str) -> int | None:
        """From finalizing back to in_progress, because lines have no answer; None if that has happened too often."""
        rows = await self.queue.database.ask(SQL["resend"], {"id": id, "resends_max": RESENDS_MAX})
        return int(rows[0][0]) if rows else None

    async def note_wait(self, id: str, reason: str, message: str) -> bool:
        """Record what the batch waits for; returns whether it may keep waiting."""
        params = {"id": id, "reason": reason, "message": message, "patience_seconds": PATIENCE_SECONDS}
        rows = await self.queue.database.ask(SQL["note_wait"], params)
        return bool(rows and rows[0][0])

    # The last transition: freezes the counts; returns the new state, or None if another process moved the batch ----

    async def complete(self, id: str, ending: Ending, *, session: Session | None = None) -> BatchStatus | None:
        """A batch that a user cancelled meanwhile ends cancelled."""
        return await self._end("complete", id, ending, session) or await self.end_cancelled(id, ending, session=session)

    async def fail(self, id: str, ending: Ending, *, session: Session | None = None) -> BatchStatus | None:
        return await self._end("fail", id, ending, session)

    async def expire(self, id: str, ending: Ending, *, session: Session | None = None) -> BatchStatus | None:
        """A batch that a user cancelled meanwhile ends cancelled."""
        return await self._end("expire", id, ending, session) or await self.end_cancelled(id, ending, session=session)

    async def expire_unstarted(self, id: str, *, session: Session | None = None) -> BatchStatus | None:
        """The window ended before a worker picked it up."""
        rows = await self.queue.database.ask(SQL["expire_unstarted"], {"id": id}, session)
        return BatchStatus.EXPIRED if rows else None

    async def end_cancelled(self, id: str, ending: Ending, *, session: Session | None = None) -> BatchStatus | None:
        return await self._end("end_cancelled", id, ending, session)

    async def _end(self, verb: str, id: str, ending: Ending, session: Session | None) -> BatchStatus | None:
        rows = await self.queue.database.ask(SQL[verb], {"id": id, **ending.as_params()}, session)
        return BatchStatus(rows[0][0]) if rows else None

    async def repair(self, batch: Batch, ending: Ending, *, session: Session | None = None) -> bool:
        """Set the files of an ended batch, unless another process has done that since it was read."""
        params = {"id": batch.id, "manifest_before": _json(batch.manifest), **ending.as_params()}
        return bool(await self.queue.database.ask(SQL["repair"], params, session))

    # Control and registrations ----------------------------------------------------------------------------------

    @retry_deadlocks
    async def stop(self, id: str, reason: str, error: Mapping[str, Any] | None = None) -> bool:
        """Order the batch to end; shards that no worker has are cancelled, or cancel their jobs at their provider.
        False if it was stopping already."""
        async with self.queue.database.transaction() as session:
            params = {"id": id, "reason": reason, "error": _json(error)}
            for (job_id,) in await self.queue.database.ask(SQL["stop"], params, session):
                why = f"the batch stops: {reason}"
                await self._stop_shards(job_id, why, session)
                return True
        return False

    async def _stop_shards(self, job_id: UUID, reason: str, session: Session, *, wake: bool = True) -> None:
        """Cancel the shards that no worker has; those at a provider are woken, to cancel their jobs there."""
        await owned.cancel_children(
            self.queue, job_id, JobStatus.QUEUED, job_type=SHARD, reason=reason, session=session
        )
        if wake:
            there = await owned.children(self.queue, job_id, JobStatus.QUEUED, job_type=PROVIDER_SHARD, session=session)
            await self.queue.wake(there, session=session)

    async def controls(self, ids: Sequence[str]) -> dict[str, Control]:
        return {row[0]: Control(*row) for row in await self.queue.database.ask(SQL["controls"], {"ids": list(ids)})}

    @retry_deadlocks
    async def register(self, registrations: Sequence[Registration]) -> Registered:
        """Make written ranges part of their batches, at most one of each journal.

        A repeated call after a doubtful commit returns the same and counts nothing twice.
        """
        claims = {one.job_id: owned.Held(one.job_id, one.job_claim, one.worker) for one in registrations}
        async with self.queue.database.transaction() as session:
            alive = await owned.lock_held(self.queue, list(claims.values()), session=session)
            held = [one for one in registrations if one.job_id in alive]
            return await self._insert(session, held) if held else Registered(set(), {})

    async def _insert(self, session: Session, held: Sequence[Registration]) -> Registered:
        ids = sorted({one.batch_id for one in held})
        sums = {row[0]: _Sums(*row) for row in await self.queue.database.ask(SQL["lock_sums"], {"ids": ids}, session)}
        segments = _json([_segment_row(place, one) for place, one in enumerate(held)])
        rows = await self.queue.database.ask(SQL["insert_segments"], {"segments": segments}, session)
        new = {(batch, shard, claim, seq) for batch, shard, claim, seq in rows}
        for one in held:
            if one.name in new:
                sums[one.batch_id].add(one)
        changed = [one.as_row() for one in sums.values() if one.tally.lines]
        if changed:
            samples = [row for one in sums.values() for row in one.sample_rows()]
            params = {"sums": _json(changed), "samples": _json(samples), "small_max": SMALL_MAX}
            await self.queue.database.ask(SQL["add_sums"], params, session)
        behind = await self._find_positions(session, [one for one in held if one.name not in new])
        return Registered({one.name for one in held} - behind.keys(), behind)

    async def _find_positions(self, session: Session, refused: Sequence[Registration]) -> dict[Name, Position]:
        """Where the journals of ranges that were not inserted must continue; without those that were registered."""
        if not refused:
            return {}
        segments = _json([_segment_row(place, one) for place, one in enumerate(refused)])
        positions = dict.fromkeys((one.name for one in refused), Position())
        rows = await self.queue.database.ask(SQL["positions"], {"segments": segments}, session)
        for batch, shard, claim, seq, last, end, is_known in rows:
            if is_known:
                del positions[batch, shard, claim, seq]
            else:
                positions[batch, shard, claim, seq] = Position(last + 1, end)
        return positions

    async def segments(
        self, id: str, *, shard: int | None = None, after: int = 0, limit: int | None = None
    ) -> Sequence[Segment]:
        """Registered ranges in the order of their registration."""
        found: list[Segment] = []
        while limit is None or len(found) < limit:
            room = _SEGMENTS_PER_PAGE if limit is None else min(limit - len(found), _SEGMENTS_PER_PAGE)
            params = {"batch_id": id, "shard": shard, "after": after, "limit": room}
            rows = await self.queue.database.ask(SQL["segments"], params)
            found += [Segment(*row) for row in rows]
            if len(rows) < room:
                break
            after = found[-1].id
        return found

    # Shards that are split or redirected ------------------------------------------------------------------------

    async def open_shards(self, job_id: UUID) -> Sequence[OpenShard]:
        """In the order of their numbers."""
        children = await owned.open_children(self.queue, job_id)
        return [OpenShard(one.id, Shard(**one.payload), one.is_untouched) for one in children]

    async def split(self, held: owned.Held, kept: Shard, given: Mapping[UUID, Shard], *, batch_priority: int) -> bool:
        """Give branches of a shard to other workers; False if the shard is lost. After a lost answer, call it again."""
        return await self.queue.split(
            (held.id, held.claim),
            held.worker,
            kept=asdict(kept),
            given={id: asdict(one) for id, one in given.items()},
            priority=later_priority(batch_priority),
        )

    @retry_deadlocks
    async def redirect(self, batch: Batch, one: OpenShard, shard: Shard, cost: float, *, cost_max: float) -> bool:
        """Give a shard that no worker has started to its provider; False if that costs too much, or it was started."""
        assert shard.provider is not None
        to = provider_queue(batch.queue, shard.provider)
        params = {"id": batch.id, "cost": cost, "cost_max": cost_max}
        async with self.queue.database.transaction() as session:
            if not await self.queue.database.ask(SQL["spend_on_overflow"], params, session):
                return False
            is_moved = await self.queue.redirect(
                one.job_id, job_type=PROVIDER_SHARD, queue=to, payload=asdict(shard), session=session
            )
            if not is_moved:
                await self.queue.database.ask(SQL["spend_on_overflow"], {**params, "cost": -cost}, session)
            return is_moved

    # Upkeep -----------------------------------------------------------------------------------------------------

    async def stalled(
        self, after: tuple[datetime, str], *, limit: int, session: Session | None = None
    ) -> Sequence[Stalled]:
        """One page of batches that need the watchdog, by the end of their window and their id."""
        params = {"after_time": after[0], "after_id": after[1], "limit": limit}
        return [Stalled(*row) for row in await self.queue.database.ask(SQL["stalled"], params, session)]

    @retry_deadlocks
    async def stop_queued_shards(self, job_id: UUID, reason: str, *, wake: bool) -> None:
        """Cancel the shards that no worker has; workers may have returned some since the batch began to stop.

        `wake` makes those at a provider run at once: a shard that was just being snoozed has missed the order to stop.
        """
        async with self.queue.database.transaction() as session:
            await self._stop_shards(job_id, reason, session, wake=wake)

    @retry_deadlocks
    async def cancel_open_shards(self, job_id: UUID, reason: str, *, also_at_providers: bool = True) -> int:
        """Cancel the shards that are still open; what their workers write from now on is not registered."""
        statuses = (JobStatus.QUEUED, JobStatus.RUNNING)
        job_type = None if also_at_providers else SHARD
        async with self.queue.database.transaction() as session:
            return await owned.cancel_children(
                self.queue, job_id, *statuses, job_type=job_type, reason=reason, session=session
            )

    # ------------------------------------------------------------------------------------------------------------

    async def _lock(self, session: Session, id: str, tenant: str | None) -> Batch:
        for row in await self.queue.database.ask(SQL["lock"], {"id": id, "tenant": tenant}, session):
            return _batch(row)
        raise NotFound(f"there is no batch {id!r}", kind="batch", id=id)


class _Sums:
    """What a batch's row will hold once these registrations are added."""

    def __init__(
        self,
        id: str,
        usage_by_model: dict[str, Any],
        error_summary: dict[str, Any],
        progress_by_model: dict[str, dict[str, int]],
    ) -> None:
        self.id = id
        self.tally = Tally()
        self.usage_by_model = usage_by_model
        self.progress_by_model = progress_by_model
        self.samples: dict[str, tuple[Tally, dict[str, tuple[int, int]]]] = {}
        """By model: what is added now, and the load of the worker that adds it."""
        self.errors = Tally.from_json({"errors": error_summary})

    def add(self, one: Registration) -> None:
        self.tally += one.tally
        self.errors.add_errors(one.tally)
        usage = self.usage_by_model.setdefault(one.model, {})
        for name, n in one.tally.usage().items():
            usage[name] = usage.get(name, 0) + n
        progress = self.progress_by_model.setdefault(one.model, {"total": 0, "completed": 0, "failed": 0})
        progress["completed"] += one.tally.completed
        progress["failed"] += one.tally.lines - one.tally.completed
        tally, load = self.samples.setdefault(one.model, (Tally(), {}))
        tally += one.tally
        if one.load is not None:
            load[one.worker] = one.load

    def as_row(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "id": self.id,
            "completed": tally.completed,
            "failed": tally.failed,
            "expired": tally.expired,
            "cancelled": tally.cancelled,
            **{f"{name}_tokens": n for name, n in tally.usage().items()},
            "usage_by_model": self.usage_by_model,
            "progress_by_model": self.progress_by_model,
            "error_summary": self.errors.errors,
        }

    def sample_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "id": self.id,
                "model": model,
                "completed": tally.completed,
                "failed": tally.lines - tally.completed,
                "input_tokens": tally.input_tokens,
                "cached_tokens": tally.cached_tokens,
                "output_tokens": tally.output_tokens,
                "load": load,
            }
            for model, (tally, load) in self.samples.items()
        ]


def _segment_row(place: int, one: Registration) -> dict[str, Any]:
    return {
        "place": place,
        "batch_id": one.batch_id,
        "shard": one.shard,
        "claim": one.claim,
        "seq": one.seq,
        "host": one.host,
        "key": one.key,
        "start_byte": one.start,
        "end_byte": one.end,
        "lines": one.tally.lines,
        "tally": one.tally.as_json(),
    }


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


_FIELDS = tuple(Batch.__dataclass_fields__)


def _batch(row: Row | Sequence[Any]) -> Batch:
    values = dict(zip(_FIELDS, row, strict=True))
    values["status"] = BatchStatus(values["status"])
    return Batch(**values)
