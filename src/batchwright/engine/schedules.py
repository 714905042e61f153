"""Schedules: create jobs at set times, one for each tick, however many workers run.

        due: next_at ≤ now                        one commit
tick ──────────────────────▶ ticks up to now ──▶ by the missed policy: jobs ──▶ next_at = the first tick to come

There is no leader. A round locks the schedules that are due; their jobs and the new `next_at` are one commit, so a
crash neither repeats nor loses a tick. `next_at` only grows, so a clock that steps back does not do so either.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple, NewType, TypeVar
from uuid import UUID

import orjson

from batchwright.db.database import Row, Session, translate_errors
from batchwright.db.doorbell import ring_at_commit
from batchwright.db.statements import statements
from batchwright.engine.catalog import Catalog
from batchwright.engine.cron import Cron, preview
from batchwright.engine.jobs import DEFAULT_TENANT, JobId, NewJob, OnHeld, new_id
from batchwright.engine.queue import Queue
from batchwright.engine.upkeep import Round
from batchwright.errors import BatchwrightError, Conflict, DatabaseUnavailable, Deadlock, InvalidInput, NotFound

SQL = statements(__package__, "schedules.sql")
log = logging.getLogger(__name__)

T = TypeVar("T")
ScheduleId = NewType("ScheduleId", UUID)

TICKS_PER_ROUND_MAX = 1_000
LIST_MAX = 1_000
_SCHEDULES_PER_ROUND_MAX = 200
_SKIP_AFTER = timedelta(seconds=60)
_ERROR_LENGTH_MAX = 1_000
_FIELD_LENGTH_MAX = 100
_NAME = re.compile(r"\w[\w.:-]{0,199}")
_TEMPORARY = (Deadlock, DatabaseUnavailable)
_ONCE_ONLY = ("run_after", "delay_seconds", "idempotency_key", "pipeline_id", "owner")


class Missed(StrEnum):
    """What to do with ticks that passed while no worker was running to fire them."""

    SKIP = "skip"
    """Skip them: a tick is fired at most a minute late, or never."""
    LATEST = "latest"
    """Fire only the newest, however late."""
    ALL = "all"
    """Fire each of them in order, up to 1,000 in a round; `tick_field` tells the job which tick it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule's row at the time it was read."""

    id: ScheduleId
    tenant: str
    name: str
    cron: str
    timezone: str
    missed: Missed
    job: dict[str, Any]
    """The template: operation, payload, queue, priority, max_attempts, exclusive_key, on_held, deadline_seconds."""
    tick_field: str | None
    """The field of the payload that receives the tick, as ISO 8601 in UTC."""
    next_at: datetime | None
    """The next tick; None if there are no more, and `last_error` says why."""
    last_tick_at: datetime | None
    """The newest tick that was fired or refused."""
    last_job_id: JobId | None
    last_error: str | None
    fires: int
    paused_at: datetime | None
    created_at: datetime
    updated_at: datetime

    def upcoming(self, n: int = 5) -> list[datetime]:
        """The next ticks; none while the schedule is paused."""
        if self.paused_at is not None or self.next_at is None:
            return []
        return preview(self.cron, self.timezone, n, after=self.next_at - timedelta(seconds=1))


class Schedules:
    """The schedule table, as verbs; `fire_due` is the round that any worker runs every second.

    Refer to a schedule by its name or its id.
    """

    def __init__(self, queue: Queue, catalog: Catalog) -> None:
        self._queue = queue
        self._catalog = catalog

    def rounds(self) -> list[Round]:
        """For `Worker(rounds=…)`."""
        return [Round("schedules", 1.0, self.fire_due)]

    # Verbs for people -------------------------------------------------------------------------------------------

    async def create(
        self,
        name: str,
        cron: str,
        job: NewJob,
        *,
        timezone: str = "UTC",
        missed: Missed | str = Missed.LATEST,
        tick_field: str | None = None,
        tenant: str = DEFAULT_TENANT,
        replace: bool = False,
    ) -> Schedule:
        """Create a schedule. If the name exists, raises `Conflict`, or with `replace` replaces that schedule.

        A replaced schedule keeps its id, its history and its pause; its next tick moves only if cron or time zone
        changed. Cron, time zone, operation and payload are checked here, so that ticks can be fired.

        >>> await schedules.create("report", "0 6 * * MON-FRI", NewJob("report"), timezone="Europe/Berlin")
        """
        when = Cron.parse(cron, timezone)
        ((now,),) = await self._run(None, "now")
        draft = {
            "id": new_id(),
            "tenant": tenant,
            "name": _checked_name(name),
            "cron": when.expression,
            "timezone": when.timezone,
            "missed": _check_missed(missed),
            "tick_field": tick_field,
            "next_at": when.first_after(now),
            "job": orjson.dumps(await self._template(job, tick_field, tenant, now), default=str).decode(),
        }
        async with self._queue.database.transaction() as session:
            rows = await self._run(session, "create", **draft)
            if not rows and not replace:
                raise Conflict(f"a schedule {name!r} exists already; delete it, or replace it")
            return _schedule(rows[0]) if rows else await self._replace(session, draft, when, now)

    async def get(self, schedule: str | UUID, *, tenant: str = DEFAULT_TENANT) -> Schedule:
        return await self._one(None, "get", schedule, tenant)

    async def list(
        self, *, tenant: str = DEFAULT_TENANT, limit: int = 100, after: str | None = None
    ) -> Sequence[Schedule]:
        """Sorted by name; pass the last name as `after` for the next page."""
        if not 1 <= limit <= LIST_MAX:
            raise InvalidInput(f"limit is {limit}; use 1 to {LIST_MAX}", param="limit")
        if after is not None and not _NAME.fullmatch(after):
            raise InvalidInput(f"{after[:200]!r} is not a schedule name; use the last name of a list", param="after")
        rows = await self._run(None, "list", tenant=tenant, limit=limit, after=after or "")
        return [_schedule(row) for row in rows]

    async def list_everywhere(self, *, limit: int = 100, after: Schedule | None = None) -> Sequence[Schedule]:
        """Schedules of all tenants, sorted by tenant and name; pass the last one as `after` for the next page."""
        place = {"after_tenant": after.tenant, "after": after.name} if after else {"after_tenant": "", "after": ""}
        rows = await self._run(None, "list_everywhere", limit=min(limit, LIST_MAX), **place)
        return [_schedule(row) for row in rows]

    async def pause(self, schedule: str | UUID, *, tenant: str = DEFAULT_TENANT) -> Schedule:
        """Fire no tick until the schedule is resumed."""
        return await self._one(None, "pause", schedule, tenant)

    async def resume(self, schedule: str | UUID, *, tenant: str = DEFAULT_TENANT) -> Schedule:
        """Resume with the next tick: ticks during the pause are not fired."""
        async with self._queue.database.transaction() as session:
            found = await self._one(session, "lock", schedule, tenant)
            if found.paused_at is None:
                return found
            ((now,),) = await self._run(session, "now")
            next_at = found.next_at
            if next_at is None or next_at <= now:
                next_at = Cron.parse(found.cron, found.timezone).first_after(now)
            (row,) = await self._run(session, "resume", id=found.id, next_at=next_at)
            return _schedule(row)

    async def delete(self, schedule: str | UUID, *, tenant: str = DEFAULT_TENANT) -> Schedule:
        """Delete a schedule but not its jobs; returns the deleted schedule."""
        return await self._one(None, "delete", schedule, tenant)

    async def fire_now(
        self, schedule: str | UUID, *, tenant: str = DEFAULT_TENANT, session: Session | None = None
    ) -> JobId:
        """Create one job now, paused or not; the ticks do not change."""
        if session is None:
            async with self._queue.database.transaction() as session:
                return await self.fire_now(schedule, tenant=tenant, session=session)
        found = await self._one(session, "get", schedule, tenant)
        ((now,),) = await self._run(session, "now")
        (fired,) = await self._enqueue(session, [_new_job(found, now)])
        await self._run(session, "run", id=found.id, job_id=fired.id)
        await ring_at_commit(session, [fired.queue])
        return fired.id

    async def _template(self, job: NewJob, tick_field: str | None, tenant: str, now: datetime) -> dict[str, Any]:
        """The template for each tick's job, after checking that such a job is valid."""
        for field in _ONCE_ONLY:
            if getattr(job, field):
                raise InvalidInput(
                    f"a schedule's job cannot have {field}, because every tick creates a job", param=field
                )
        if isinstance(job.deadline, datetime):
            raise InvalidInput(
                "a schedule's deadline counts from the creation of each job; give a timedelta", param="deadline"
            )
        if tick_field is not None and not 1 <= len(tick_field) <= _FIELD_LENGTH_MAX:
            raise InvalidInput(
                f"tick_field must have 1 to {_FIELD_LENGTH_MAX} characters, not {len(tick_field)}", param="tick_field"
            )
        like = dataclasses.replace(job, payload=_with_tick(job.payload, tick_field, now), tenant=tenant)
        (row,) = await self._catalog.prepare([like])
        return {
            "operation": row["job_type"],
            "payload": _plain(job.payload, row["payload"]),
            "queue": job.queue,
            "priority": job.priority,
            "max_attempts": job.max_attempts,
            "exclusive_key": job.exclusive_key,
            "on_held": None if job.on_held is None else OnHeld(job.on_held),
            "deadline_seconds": None if job.deadline is None else job.deadline.total_seconds(),
        }

    async def _replace(self, session: Session, draft: Mapping[str, Any], when: Cron, now: datetime) -> Schedule:
        name = draft["name"]
        old = await self._one(session, "lock", name, draft["tenant"])
        next_at = old.next_at
        if next_at is None or (old.cron, old.timezone) != (when.expression, when.timezone):
            next_at = when.first_after(max(now, old.last_tick_at or now))
        (row,) = await self._run(session, "replace", **{**draft, "id": old.id, "next_at": next_at})
        return _schedule(row)

    # Ticks ------------------------------------------------------------------------------------------------------

    async def fire_due(self, session: Session) -> int:
        """Fire due schedules inside the given transaction; returns how many jobs the ticks have.

        A schedule that cannot fire does not affect the others: only its ticks are rolled back.
        """
        rows = await self._run(session, "due", limit=_SCHEDULES_PER_ROUND_MAX)
        if not rows:
            return 0
        await self._run(session, "limit_lock_wait")
        share = max(1, TICKS_PER_ROUND_MAX // len(rows))
        fires: list[_Fire] = []
        for *row, now in rows:
            fires += await self._fire(session, _schedule(row), now, share)
        await ring_at_commit(session, (fire.queue for fire in fires))
        return len(fires)

    async def _fire(self, session: Session, schedule: Schedule, now: datetime, limit: int) -> Sequence[_Fire]:
        try:
            ticks, next_at = _ticks_due(schedule, now, limit)
        except InvalidInput as error:  # its time zone no longer exists, or it has no more ticks
            ticks, next_at = [], None
            fired = _Fired(error=_message_of(error))
            log.warning("schedule %r of tenant %s no longer fires: %s", schedule.name, schedule.tenant, error)
        else:
            fired = await self._fire_ticks(session, schedule, ticks)
        await self._run(
            session,
            "move",
            id=schedule.id,
            next_at=fired.stuck_at or next_at,
            last_tick_at=fired.last_tick_at,
            last_job_id=fired.fires[-1].id if fired.fires else None,
            last_error=fired.error if fired.last_tick_at or next_at is None else schedule.last_error,
            fires=len(fired.fires),
        )
        return fired.fires

    async def _fire_ticks(self, session: Session, schedule: Schedule, ticks: Sequence[datetime]) -> _Fired:
        """Fire all ticks at once; if that is refused, one by one, so that only the invalid ones are left out."""
        if not ticks:
            return _Fired()
        answer = await _attempt(
            session, lambda: self._enqueue(session, [_new_job(schedule, tick, is_tick=True) for tick in ticks])
        )
        if not isinstance(answer, Exception):
            return _Fired(fires=answer, last_tick_at=ticks[-1])
        if isinstance(answer, _TEMPORARY):
            log.warning(
                "schedule %r of tenant %s cannot fire now and is retried: %s", schedule.name, schedule.tenant, answer
            )
            return _Fired(stuck_at=ticks[0])
        if len(ticks) == 1:
            return _refuse(schedule, ticks[0], answer)
        fired = _Fired()
        for tick in ticks:
            fired = fired.then(await self._fire_ticks(session, schedule, [tick]))
            if fired.stuck_at is not None:
                break
        return fired

    async def _enqueue(self, session: Session, jobs: Sequence[NewJob]) -> Sequence[_Fire]:
        rows = await self._catalog.prepare(jobs, session=session)
        enqueued = await self._queue.enqueue(rows, session=session)
        return [_Fire(one.id, row["queue"]) for one, row in zip(enqueued, rows, strict=True)]

    # ------------------------------------------------------------------------------------------------------------

    def _run(self, session: Session | None, statement: str, **params: Any) -> Awaitable[Sequence[Row]]:
        return self._queue.database.ask(SQL[statement], params, session)

    async def _one(self, session: Session | None, statement: str, schedule: str | UUID, tenant: str) -> Schedule:
        """Run a statement on the schedule of this name or id."""
        id = _as_id(schedule)
        if id is not None or _NAME.fullmatch(str(schedule)):
            for row in await self._run(session, statement, id=id, name=None if id else schedule, tenant=tenant):
                return _schedule(row)
        raise NotFound(f"there is no schedule {str(schedule)[:200]!r}")


class _Fire(NamedTuple):
    """The job of a tick, and the queue in which it waits."""

    id: JobId
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fired:
    """The outcome of some ticks; `stuck_at` is the first one that must be retried."""

    fires: Sequence[_Fire] = ()
    last_tick_at: datetime | None = None
    error: str | None = None
    stuck_at: datetime | None = None

    def then(self, later: _Fired) -> _Fired:
        return _Fired(
            fires=[*self.fires, *later.fires],
            last_tick_at=later.last_tick_at or self.last_tick_at,
            error=later.error or self.error,
            stuck_at=later.stuck_at,
        )


async def _attempt(session: Session, work: Callable[[], Awaitable[T]]) -> T | Exception:
    """The result of the work, or the error, after which everything is rolled back; a lost connection is raised."""
    await session.rows("SAVEPOINT attempt")
    try:
        with translate_errors():
            answer = await work()
    except Exception as error:
        await session.rows("ROLLBACK TO SAVEPOINT attempt")
        return error
    await session.rows("RELEASE SAVEPOINT attempt")
    return answer


def _ticks_due(schedule: Schedule, now: datetime, limit: int) -> tuple[Sequence[datetime], datetime]:
    """The ticks to fire, and the one after them."""
    cron = Cron.parse(schedule.cron, schedule.timezone)
    first = schedule.next_at
    assert first is not None, "only schedules with a next tick are due"
    if schedule.missed is Missed.ALL:
        passed = itertools.takewhile(lambda tick: tick <= now, cron.ticks(first))
        ticks = [first, *itertools.islice(passed, limit - 1)]
        return ticks, cron.first_after(ticks[-1])
    newest = cron.newest(first, now)
    is_late = now - newest > _SKIP_AFTER
    ticks = [] if schedule.missed is Missed.SKIP and is_late else [newest]
    return ticks, cron.first_after(now)


def _new_job(schedule: Schedule, tick: datetime, *, is_tick: bool = False) -> NewJob:
    template = schedule.job
    seconds = template["deadline_seconds"]
    return NewJob(
        template["operation"],
        _with_tick(template["payload"], schedule.tick_field, tick),
        queue=template["queue"],
        tenant=schedule.tenant,
        priority=template["priority"],
        deadline=None if seconds is None else timedelta(seconds=seconds),
        max_attempts=template["max_attempts"],
        exclusive_key=template["exclusive_key"],
        on_held=template["on_held"],
        # next_at guarantees one job per tick; with this key that holds even if a person moves next_at back.
        idempotency_key=f"schedule/{schedule.id}/{tick.isoformat()}" if is_tick else None,
    )


def _with_tick(payload: Any, tick_field: str | None, tick: datetime) -> Any:
    if tick_field is None:
        return payload
    if payload is not None and not isinstance(payload, Mapping):
        raise InvalidInput("with tick_field the payload must be an object", param="payload")
    return {**(payload or {}), tick_field: tick.isoformat()}


def _plain(payload: Any, encoded: orjson.Fragment) -> Any:
    """The payload as it was given: each tick fills in the operation's defaults of that time."""
    try:
        return orjson.loads(orjson.dumps({} if payload is None else payload))
    except TypeError:  # models that only their operation can turn into JSON
        return orjson.loads(orjson.dumps(encoded))


def _refuse(schedule: Schedule, tick: datetime, error: Exception) -> _Fired:
    """Log only the class of the error: its message may contain parts of the payload."""
    log.warning(
        "schedule %r of tenant %s: the tick %s was refused (%s); see its last_error",
        schedule.name,
        schedule.tenant,
        tick.isoformat(),
        type(error).__name__,
    )
    return _Fired(last_tick_at=tick, error=f"{tick.isoformat()}: {_message_of(error)}")


def _message_of(error: Exception) -> str:
    message = str(error) if isinstance(error, BatchwrightError) else f"{type(error).__name__}: {error}"
    return message.replace("\0", "")[:_ERROR_LENGTH_MAX]


def _schedule(row: Sequence[Any]) -> Schedule:
    values = dict(zip(Schedule.__dataclass_fields__, row, strict=True))
    return Schedule(**{**values, "missed": Missed(values["missed"])})


def _as_id(schedule: str | UUID) -> UUID | None:
    if isinstance(schedule, UUID):
        return schedule
    try:
        return UUID(schedule)
    except ValueError:
        return None


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or _as_id(name) is not None:
        raise InvalidInput(
            f"{name[:200]!r} is not a schedule name: use 1 to 200 letters, digits, '_', '.', ':' and '-', "
            "beginning with a letter, a digit or '_'; it must not look like an id",
            param="name",
        )
    return name


def _check_missed(missed: Missed | str) -> Missed:
    try:
        return Missed(missed)
    except ValueError as error:
        raise InvalidInput(f"missed is {missed!r}; use skip, latest or all", param="missed") from error
