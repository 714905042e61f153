"""The verbs: every change of a job is one method here, one statement in jobs.sql and one move in states.py.

A verb opens its own transaction, unless it is given the session of an open one. After a deadlock the verb repeats the
transaction: the database has rolled all of it back, so nothing can happen twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, NamedTuple, cast
from uuid import UUID

import orjson

from batchwright.db.database import Database, Row, Session
from batchwright.db.retry import retry_deadlocks
from batchwright.db.statements import statements
from batchwright.engine.jobs import Claim, ClaimKey, Job, JobEvent, JobId, OnHeld
from batchwright.engine.outcomes import Settle, Wait, Write
from batchwright.errors import (
    ConfigurationError,
    Conflict,
    Deadlock,
    Fenced,
    InvalidInput,
    NotFound,
    TooLarge,
    UniqueViolation,
)
from batchwright.states import JobStatus

SQL = statements(__package__, "parts.sql", "jobs.sql")

CHILDREN_COUNTED_MAX = 50_000
_ROWS_PER_STATEMENT = 5_000
_KEYS_PER_CALL_MAX = 1_000
_CANCEL_DEPTH_MAX = 1000
_UNKNOWN_LANE_MAX = 500
_UNKNOWN_SCAN_MAX = 5_000
_BIRTH = attrgetter("id.int")
_BIRTH_OF_SETTLED = attrgetter("claim.id.int")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Leases, and when a lock is stale."""

    lease_seconds: float = 30.0
    """A worker that has not renewed its leases for this time counts as dead, and its jobs are rescued."""
    stale_job_timeout_seconds: float = 1800.0
    """A job that has been locked for longer may be recovered by hand, even while its lease is alive."""
    rescue_jitter_seconds: float = 0.5
    """Rescued jobs return to the queue spread over this time."""
    ring_at_commit: bool = True
    """Jobs enqueued in your own transaction wake a worker when it commits. PostgreSQL lets only one such transaction
    commit at a time: turn this off if you commit hundreds of them per second, and the next poll finds the jobs."""

    def __post_init__(self) -> None:
        if self.lease_seconds < 1:
            raise ConfigurationError(f"lease_seconds is {self.lease_seconds:g}; it must be at least 1")
        if self.stale_job_timeout_seconds < self.lease_seconds:
            raise ConfigurationError(
                f"stale_job_timeout_seconds is {self.stale_job_timeout_seconds:g}; it must be at least lease_seconds, "
                f"{self.lease_seconds:g}"
            )


class Watermark(NamedTuple):
    """Where the last claim of a lane ended: everything before it has been examined."""

    run_after: datetime
    id: UUID


NOWHERE = Watermark(datetime(1, 1, 1, tzinfo=UTC), UUID(int=0))


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue at one priority, how many jobs the worker can take from that queue, and where to continue the search."""

    queue: str
    priority: int
    quota: int
    after: Watermark = NOWHERE


class Enqueued(NamedTuple):
    """The job that an enqueue returned; `is_new` is false if it already existed."""

    id: JobId
    is_new: bool


class Claimed(NamedTuple):
    """The result of a claim, and the database's time of the query."""

    at: datetime
    jobs: list[Claim]
    without_keys: bool = False
    """The claim left out keyed jobs, because there was a race for a key."""


class Rescued(NamedTuple):
    id: JobId
    status: JobStatus
    was_running: bool
    is_poison: bool
    queue: str
    due_seconds: float | None
    """When the job can be claimed again, if it can."""


class _Ended(NamedTuple):
    """A job that ended, as its parent must count it."""

    parent: UUID | None
    failed: bool


class Queue:
    """The job table, as verbs."""

    def __init__(
        self,
        database: Database,
        settings: EngineSettings | None = None,
    ) -> None:
        self.database = database
        self.settings = settings or EngineSettings()

    # Enqueue ----------------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def enqueue(self, rows: Sequence[Mapping[str, Any]], *, session: Session | None = None) -> list[Enqueued]:
        """Insert prepared rows (see `Catalog.prepare`) in few statements; all or none.

        The caller creates the ids, so a call whose answer was lost can simply be repeated. The same idempotency
        key returns the first job; with another body it raises `Conflict`.
        """
        if not rows:
            return []
        is_plain = all(row["on_held"] is OnHeld.QUEUE for row in rows)
        if is_plain and len(rows) <= _ROWS_PER_STATEMENT and all(row["idempotency_key"] is None for row in rows):
            return await self._insert(session, rows)
        async with self.database.within(session) as session:
            if not is_plain:
                return await self._enqueue_by_policy(session, rows)
            answers = []
            for start in range(0, len(rows), _ROWS_PER_STATEMENT):
                answers += await self._insert(session, rows[start : start + _ROWS_PER_STATEMENT])
            return answers

    async def _enqueue_by_policy(self, session: Session, rows: Sequence[Mapping[str, Any]]) -> list[Enqueued]:
        keyed = [row for row in rows if row["exclusive_key"] is not None]
        if len(keyed) > _KEYS_PER_CALL_MAX:
            raise TooLarge(
                f"{len(keyed)} jobs with an exclusive key in one call with on_held; the limit is {_KEYS_PER_CALL_MAX}",
                param="jobs",
            )
        await self._run(
            session,
            "lock_keys",
            tenants=[row["tenant"] for row in keyed],
            keys=[row["exclusive_key"] for row in keyed],
        )
        answers = []
        for row in rows:
            standing = await self._find_stand_in(session, row)
            answers.append(Enqueued(standing, False) if standing else (await self._insert(session, [row]))[0])
        return answers

    async def _find_stand_in(self, session: Session, row: Mapping[str, Any]) -> JobId | None:
        """Apply the policy to the open jobs of the key; returns the id of a job to use instead, or None."""
        policy: OnHeld = row["on_held"]
        if policy is OnHeld.QUEUE or row["exclusive_key"] is None:
            return None
        if known := await self._find_enqueued(session, [row]):
            return known[row["id"]]
        others = await self._run(session, "open_jobs_of_key", tenant=row["tenant"], key=row["exclusive_key"])
        if policy is OnHeld.REJECT and others:
            raise Conflict(
                f"the key {row['exclusive_key']} is held by job {others[0][0]} ({others[0][1]}); "
                "wait for it, cancel it, or enqueue with on_held='queue'",
                holder=str(others[0][0]),
            )
        if policy is OnHeld.COALESCE:
            return next((JobId(id) for id, _, started in others if not started), None)
        if policy is OnHeld.SUPERSEDE and others:
            reason = f"superseded by job {row['id']}"
            await self.cancel([JobId(id) for id, _, _ in others], reason=reason, session=session, owned=True)
        return None

    async def _insert(self, session: Session | None, rows: Sequence[Mapping[str, Any]]) -> list[Enqueued]:
        document = orjson.dumps(rows, default=str).decode()
        new = {id for (id,) in await self._run(session, "enqueue", jobs=document)}
        if len(new) == len(rows):
            return [Enqueued(row["id"], True) for row in rows]
        found = await self._find_enqueued(session, [row for row in rows if row["id"] not in new])
        if gone := [row for row in rows if row["id"] not in new and row["id"] not in found]:
            # The first job of the key blocked the insert, and retention has just removed it.
            again = await self._insert(session, gone)
            found |= {row["id"]: enqueued.id for row, enqueued in zip(gone, again, strict=True)}
            new |= {enqueued.id for enqueued in again if enqueued.is_new}
        return [Enqueued(found.get(row["id"], row["id"]), row["id"] in new) for row in rows]

    async def _find_enqueued(self, session: Session | None, rows: Sequence[Mapping[str, Any]]) -> dict[UUID, JobId]:
        """The existing jobs for these rows, by the row's id; raises `Conflict` for one with another body."""
        document = orjson.dumps(rows, default=str).decode()
        found = {}
        for asked, id, same in await self._run(session, "find_enqueued", jobs=document):
            if not same:
                key = next(row["idempotency_key"] for row in rows if row["id"] == asked)
                raise Conflict(
                    f"the idempotency key {key!r} was used before with another body, by job {id}",
                    holder=str(id),
                )
            found[asked] = JobId(id)
        return found

    # Claims -----------------------------------------------------------------------------------------------------

    async def claim(
        self,
        worker: str,
        lanes: Sequence[Lane],
        job_types: Sequence[str],
        slots: int,
        *,
        freed_keys: Iterable[tuple[str, str]] = (),
    ) -> Claimed:
        """Claim up to `slots` due jobs; after a race for a key, tries again without keyed jobs."""
        freed = list(freed_keys)
        try:
            return await self._claim(worker, lanes, job_types, slots, freed=freed)
        except (UniqueViolation, Deadlock):
            claimed = await self._claim(worker, lanes, job_types, slots, keyed=False)
            return claimed._replace(without_keys=True)

    async def claim_job(
        self, worker: str, id: JobId, job_types: Sequence[str], *, suspect: bool = False
    ) -> Claim | None:
        """Claim one given job; None if another worker has it, it is not due, or its attempts are used up."""
        try:
            claimed = await self._claim(worker, (), job_types, 1, ids=[id], suspect=suspect)
        except (UniqueViolation, Deadlock):
            return None
        return claimed.jobs[0] if claimed.jobs else None

    async def _claim(
        self,
        worker: str,
        lanes: Sequence[Lane],
        job_types: Sequence[str],
        slots: int,
        *,
        keyed: bool = True,
        freed: Sequence[tuple[str, str]] = (),
        ids: Sequence[UUID] = (),
        suspect: bool = False,
    ) -> Claimed:
        rows = await self._run(
            None,
            "claim",
            worker=worker,
            lease_seconds=self.settings.lease_seconds,
            queues=[lane.queue for lane in lanes],
            priorities=[lane.priority for lane in lanes],
            quotas=[lane.quota for lane in lanes],
            after_times=[lane.after.run_after for lane in lanes],
            after_ids=[lane.after.id for lane in lanes],
            job_types=list(job_types),
            slots=slots,
            keyed=keyed,
            freed_tenants=[tenant for tenant, _ in freed],
            freed_keys=[key for _, key in freed],
            ids=list(ids),
            suspect=suspect,
        )
        jobs = [Claim(*row) for row in rows if row[0] is not None]
        jobs.sort(key=_BIRTH)  # in order of creation, not of position on disk
        for job in jobs:
            job.payload = orjson.loads(job.payload)  # the driver's loader for JSON takes twice as long
            job.pipeline_id = job.pipeline_id or job.id  # most jobs are their own pipeline, and do not repeat the id
        return Claimed(rows[0][-1], jobs)

    async def suspects(
        self, job_types: Sequence[str], limit: int, *, private: Sequence[str] | None = None
    ) -> list[JobId]:
        """Due jobs whose worker died twice: each must run alone. From private queues only if they are named."""
        params = {"job_types": list(job_types), "limit": limit, "private": list(private or ())}
        return [JobId(id) for (id,) in await self._run(None, "suspects", **params)]

    async def unknown_types(self, job_types: Sequence[str]) -> dict[str, int]:
        """Types of due jobs that are not among these, and how many of the first jobs in the queues have each type."""
        bounds = {"lane_max": _UNKNOWN_LANE_MAX, "scan_max": _UNKNOWN_SCAN_MAX}
        return dict(await self._run(None, "unknown_types", job_types=list(job_types), **bounds))

    async def renew(self, held: Sequence[ClaimKey]) -> set[UUID]:
        """Renew the leases of these claims; returns those that were renewed."""
        if not held:
            return set()
        ids, claims = zip(*sorted(held), strict=True)
        rows = await self._run(
            None,
            "renew",
            ids=list(ids),
            claims=list(claims),
            lease_seconds=self.settings.lease_seconds,
        )
        return {id for (id,) in rows}

    async def holdings(self, worker: str) -> dict[ClaimKey, JobStatus]:
        """The claims that this worker holds, according to the database."""
        rows = await self._run(None, "holdings", worker=worker)
        return {(id, claim): JobStatus(status) for id, claim, status in rows}

    # Settles ----------------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def settle(self, settles: Sequence[Settle], worker: str) -> set[UUID]:
        """Make many fenced moves in one commit; returns the ids that moved. The others were fenced."""
        by_verb: dict[str, list[dict[str, Any]]] = {}
        is_child = False
        for settle in sorted(settles, key=_BIRTH_OF_SETTLED):  # the order in which rows are locked
            claim = settle.claim
            is_child = is_child or claim.parent_job_id is not None
            by_verb.setdefault(settle.verb, []).append({"id": claim.id, "claim": claim.claim, **settle.values})
        if len(by_verb) == 1 and not is_child:
            ((verb, rows),) = by_verb.items()
            return {row[0] for row in await self._settle_verb(None, verb, rows, worker)}
        moved = set()
        async with self.database.transaction() as session:
            ended = []
            for verb, rows in by_verb.items():
                for id, parent, failed in await self._settle_verb(session, verb, rows, worker):
                    moved.add(id)
                    ended.append(_Ended(parent, failed))
            await self._join(session, ended)
        return moved

    async def _settle_verb(
        self, session: Session | None, verb: str, rows: list[dict[str, Any]], worker: str
    ) -> list[Row]:
        return await self._run(session, verb, settles=orjson.dumps(rows).decode(), worker=worker)

    async def release(self, held: Sequence[ClaimKey], worker: str, reason: str) -> int:
        """Return unfinished jobs to the queue; no attempt is used."""
        rows = [{"id": id, "claim": claim, "reason": reason} for id, claim in sorted(held)]
        return len(await self._settle_verb(None, "release", rows, worker)) if rows else 0

    @retry_deadlocks
    async def succeed_with(
        self, settle: Settle, worker: str, *, write: Write | None, then: Sequence[Mapping[str, Any]]
    ) -> None:
        """Success together with the operation's own rows and the jobs that follow: one commit or nothing."""
        async with self.database.transaction() as session:
            row = {"id": settle.claim.id, "claim": settle.claim.claim, **settle.values}
            moved = await self._settle_verb(session, "succeed", [row], worker)
            if not moved:
                raise Fenced(f"job {settle.claim.id} is no longer held by claim {settle.claim.claim}")
            if write is not None:
                await write(getattr(session, "driver", session))
            await self.enqueue(then, session=session)
            await self._join(session, [_Ended(parent, failed) for _, parent, failed in moved])

    @retry_deadlocks
    async def wait(self, claim: Claim, worker: str, outcome: Wait, children: Sequence[Mapping[str, Any]]) -> None:
        """Insert the children and give up the lease in one commit, so that none can end before it is counted."""
        allowed = None if outcome.allow_failures is True else int(outcome.allow_failures)
        async with self.database.transaction() as session:
            await self._refuse_keys_of_ancestors(session, claim, children)
            moved = await self._run(
                session,
                "wait",
                id=claim.id,
                claim=claim.claim,
                worker=worker,
                children=len(children),
                on_join=outcome.on_join,
                allow_failures=allowed,
                result=None if outcome.result is None else orjson.dumps(outcome.result).decode(),
            )
            if not moved:
                raise Fenced(f"job {claim.id} is no longer held by claim {claim.claim}")
            ((_, parent, failed, status, waits),) = moved
            born = await self.enqueue([{**child, "round": waits} for child in children], session=session)
            if len({one.id for one in born if one.is_new}) < len(children):
                raise InvalidInput(
                    f"job {claim.id} cannot wait for a job that is not its own new child: the same NewJob is twice "
                    "in the list, its idempotency key was used before, or on_held='coalesce' found another job",
                    param="children",
                )
            if status == JobStatus.SUCCEEDED:
                await self._join(session, [_Ended(parent, failed)])

    async def _refuse_keys_of_ancestors(
        self, session: Session, claim: Claim, children: Sequence[Mapping[str, Any]]
    ) -> None:
        """A parent keeps its key while it waits, so a descendant with the same key could never start."""
        keys = {row["exclusive_key"] for row in children} - {None}
        if not keys:
            return
        for id, key in await self._run(session, "keys_of_ancestors", id=claim.id):
            if key in keys:
                raise InvalidInput(
                    f"a child has the exclusive key {key} of job {id}, which keeps it while it waits", param="children"
                )

    async def _join(self, session: Session, ended: Sequence[_Ended]) -> None:
        """Count ended children for their parents, level by level up the tree."""
        while counted := [one for one in ended if one.parent is not None]:
            rows = await self._run(
                session,
                "join",
                parents=[one.parent for one in counted],
                failed=[one.failed for one in counted],
            )
            ended = [_Ended(parent, failed) for _, parent, failed, status in rows if status != JobStatus.QUEUED]

    @retry_deadlocks
    async def emit(self, events: Sequence[Mapping[str, Any]]) -> set[UUID]:
        """Append events of held jobs; returns the jobs whose fence held."""
        rows = await self._run(None, "emit", events=orjson.dumps(events, default=str).decode())
        return {id for (id,) in rows}

    @retry_deadlocks
    async def progress(self, steps: Sequence[tuple[UUID, int, int | None, int | None]]) -> set[UUID]:
        """Write `(id, claim, current, total)`; growth proves that the job is alive and resets earlier worker deaths."""
        ids, claims, currents, totals = zip(*sorted(steps, key=lambda step: step[0]), strict=True)
        rows = await self._run(
            None,
            "progress",
            ids=list(ids),
            claims=list(claims),
            currents=list(currents),
            totals=list(totals),
        )
        return {id for (id,) in rows}

    @retry_deadlocks
    async def let_go(self, held: Sequence[ClaimKey]) -> None:
        """The operations of these cancelled or expired jobs have ended: their keys are free."""
        await self._run(None, "let_go", ids=[id for id, _ in held], claims=[claim for _, claim in held])

    # Operator verbs ---------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def cancel(
        self,
        ids: Sequence[JobId],
        *,
        reason: str = "cancelled by request",
        tenant: str | None = None,
        owned: bool = False,
        session: Session | None = None,
    ) -> int:
        """Cancel jobs with their descendants; returns how many were open. Ended jobs do not change."""
        async with self.database.within(session) as session:
            owners: dict[UUID, str | None] = dict(await self._run(session, "owners", ids=list(ids), tenant=tenant))
            for id in ids:
                if id not in owners:
                    raise NotFound(f"there is no job {id}")
                if not owned:
                    self._refuse_owned("cancel", id, owners[id])
            return await self._cancel(session, ids, reason)

    async def _cancel(self, session: Session, ids: Sequence[UUID], reason: str) -> int:
        total = 0
        roots: Sequence[UUID] = ids
        for _ in range(_CANCEL_DEPTH_MAX):
            cancelled = await self._run(session, "cancel", ids=list(roots), reason=reason)
            total += len(cancelled)
            inside = {id for id, _ in cancelled}
            ended = [_Ended(parent, True) for _, parent in cancelled if parent not in inside]
            await self._join(session, ended)
            # A job that was creating its children while the tree was read has children that the tree lacks.
            roots = [id for (id,) in await self._run(session, "open_children", ids=list(inside))] if inside else []
            if not roots:
                break
        return total

    async def wake(self, ids: Sequence[UUID], *, session: Session | None = None) -> int:
        """Make queued jobs due now, such as snoozed ones; returns how many had been waiting."""
        return len(await self._run(session, "wake", ids=list(ids)))

    async def absolve(self, id: UUID, claim: int, *, session: Session) -> None:
        """Reset the count of a held job's worker deaths."""
        await self._run(session, "absolve", id=id, claim=claim)

    async def redirect(
        self, id: UUID, *, job_type: str, queue: str, payload: Mapping[str, Any], session: Session | None = None
    ) -> bool:
        """Move a job to another operation and queue; False if a worker ever claimed it, or it was already moved."""
        document = orjson.dumps(payload).decode()
        return bool(await self._run(session, "redirect", id=id, job_type=job_type, queue=queue, payload=document))

    @retry_deadlocks
    async def split(
        self,
        claim: ClaimKey,
        worker: str,
        *,
        kept: Mapping[str, Any],
        given: Mapping[UUID, Mapping[str, Any]],
        priority: int,
    ) -> bool:
        """Split the work of a held child: it keeps one payload, and each of the others becomes a child of its parent.

        False if the claim is lost, or the parent no longer waits. After a lost answer, call it again with the same ids.
        """
        id, number = claim
        try:
            rows = await self._run(
                None,
                "split",
                id=id,
                claim=number,
                worker=worker,
                kept=orjson.dumps(kept).decode(),
                ids=list(given),
                payloads=[orjson.dumps(payload).decode() for payload in given.values()],
                priority=priority,
            )
        except UniqueViolation:  # an earlier call, whose answer was lost, has done it
            return True
        return bool(rows)

    async def shift_priority(self, ids: Sequence[UUID], by: int, *, session: Session | None = None) -> int:
        """Add `by` to the priority of open jobs (below 0: run earlier); returns how many changed."""
        return len(await self._run(session, "shift_priority", ids=list(ids), by=by))

    @retry_deadlocks
    async def disown(self, id: UUID, owner: str, *, session: Session | None = None) -> int:
        """Let retention remove a job of a deleted object, with its descendants; returns how many jobs those are."""
        return len(await self._run(session, "disown", id=id, owner=owner))

    @retry_deadlocks
    async def recover(self, id: JobId, *, tenant: str | None = None) -> None:
        """Release a job whose lease has expired or whose lock is older than `stale_job_timeout_seconds`."""
        stale = self.settings.stale_job_timeout_seconds
        async with self.database.transaction() as session:
            found = await self._lock(session, id, tenant)
            self._refuse_owned("recover", id, found.owner)
            if not await self._run(session, "recover", id=id, stale_seconds=stale):
                raise Conflict(f"job {id} cannot be recovered: {_why_not_stale(found, stale)}")

    @retry_deadlocks
    async def rerun(self, id: JobId, *, tenant: str | None = None) -> None:
        """Rerun a FAILED or CANCELLED job; a parent waits again for its unsuccessful children."""
        try:
            async with self.database.transaction() as session:
                found = await self._lock(session, id, tenant)
                self._refuse_owned("rerun", id, found.owner)
                await self._rerun(session, id, found)
        except UniqueViolation as error:
            raise Conflict(f"job {id} cannot wait again: another job holds its exclusive key") from error

    async def _rerun(self, session: Session, id: UUID, found: _Found) -> None:
        if found.status not in (JobStatus.FAILED, JobStatus.CANCELLED):
            raise Conflict(f"job {id} is {found.status}; only a FAILED or CANCELLED job can be rerun")
        self._refuse_held(id, found)
        if found.parent is not None and not await self._uncount(session, found):
            raise Conflict(
                f"job {id} is a child of job {found.parent}, which is {found.parent_status} and no longer "
                f"waits for it; rerun job {found.parent} instead",
                holder=str(found.parent),
            )
        await self._revive(session, id, found.was_waiting, found.waits)

    async def _uncount(self, session: Session, found: _Found) -> bool:
        """Have the parent count this child again; False if the parent does not wait for it."""
        return bool(found.parent_waits and await self._run(session, "uncount", id=found.parent, round=found.round))

    async def _revive(self, session: Session, id: UUID, was_waiting: bool, waits: int) -> None:
        children: list[UUID] = []
        if was_waiting:
            rows = await self._run(session, "unsuccessful_children", id=id, round=waits)
            children = [child for (child,) in rows]
        await self._run(session, "rerun", id=id, children=len(children))
        for child in children:
            below = await self._lock(session, JobId(child), None)
            self._refuse_held(child, below)
            await self._revive(session, child, below.was_waiting, below.waits)

    @retry_deadlocks
    async def dismiss(self, ids: Sequence[JobId]) -> int:
        """Remove FAILED jobs from the inbox; returns how many were in it."""
        return len(await self._run(None, "dismiss", ids=sorted(ids)))

    # Upkeep -----------------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def rescue(
        self, *, dead: Sequence[ClaimKey] = (), limit: int = 1000, session: Session | None = None
    ) -> list[Rescued]:
        """Rescue jobs whose lease has expired, and those whose process the caller saw die."""
        async with self.database.within(session) as session:
            rows = await self._run(
                session,
                "rescue",
                lease_seconds=self.settings.lease_seconds,
                jitter_seconds=self.settings.rescue_jitter_seconds,
                ids=[id for id, _ in dead],
                claims=[claim for _, claim in dead],
                limit=limit,
            )
            await self._join(session, [_Ended(parent, failed) for _, parent, failed, *_ in rows])
        return [Rescued(JobId(id), JobStatus(status), *rest) for id, _, _, status, *rest in rows]

    async def forgive(self, lost: Sequence[ClaimKey]) -> int:
        """Undo the worker deaths counted for these claims, because the worker is alive. Returns how many."""
        ids, claims = [id for id, _ in lost], [claim for _, claim in lost]
        return len(await self._run(None, "forgive", ids=ids, claims=claims)) if lost else 0

    @retry_deadlocks
    async def expire(self, *, limit: int = 1000, session: Session | None = None) -> int:
        """End jobs that are past their deadline. For waiting parents, cancel their open children and then join."""
        async with self.database.within(session) as session:
            overdue = [id for (id,) in await self._run(session, "overdue_parents", limit=limit)]
            rows = await self._run(session, "expire", limit=limit)
            await self._join(session, [_Ended(parent, failed) for _, parent, failed in rows])
            children = await self._run(session, "open_children", ids=overdue) if overdue else []
            reason = "the deadline of the parent has passed"
            return len(rows) + await self._cancel(session, [id for (id,) in children], reason)

    # Reading ----------------------------------------------------------------------------------------------------

    async def get(self, id: JobId, *, tenant: str | None = None) -> Job:
        jobs = await self.get_many([id], tenant=tenant)
        if not jobs:
            raise NotFound(f"there is no job {id}")
        return jobs[0]

    async def get_many(self, ids: Sequence[JobId], *, tenant: str | None = None) -> list[Job]:
        rows = await self._run(None, "get", ids=list(ids), tenant=tenant)
        jobs = {job.id: job for job in map(_as_job, rows)}
        return [jobs[id] for id in ids if id in jobs]

    async def next_due(self, job_types: Sequence[str]) -> datetime | None:
        """When the next job of these types becomes due."""
        ((moment,),) = await self._run(None, "next_due", job_types=list(job_types))
        return cast("datetime | None", moment)

    async def outcome(self, id: JobId) -> tuple[JobStatus, Any, dict[str, Any] | None]:
        rows = await self._run(None, "outcome", id=id)
        if not rows:
            raise NotFound(f"there is no job {id}")
        status, result, error = rows[0]
        return JobStatus(status), result, error

    async def count_children(self, id: JobId, *, limit: int = CHILDREN_COUNTED_MAX) -> dict[JobStatus, int]:
        """By status; at most `limit` are counted."""
        rows = await self._run(None, "count_children", id=id, count_max=limit)
        return {JobStatus(status): n for status, n in rows}

    async def joined(self, id: UUID, round: int) -> tuple[int, int, int, int]:
        """Children of one wait: all, succeeded, failed, cancelled."""
        ((total, succeeded, failed, cancelled),) = await self._run(None, "joined", id=id, round=round)
        return total, succeeded, failed, cancelled

    async def children_after(self, id: UUID, round: int, after: UUID, limit: int = 500) -> list[Row]:
        return await self._run(None, "children_after", id=id, round=round, after=after, limit=limit)

    async def events(self, id: JobId, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        rows = await self._run(None, "events", id=id, after=after, limit=limit)
        return [as_event(row) for row in rows]

    async def events_of_many(self, ids: Sequence[JobId], *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """The events of some jobs as one history."""
        rows = await self._run(None, "events_of_many", ids=list(ids), after=after, limit=limit)
        return [as_event(row) for row in rows]

    async def latest_events(self, id: JobId, *, limit: int) -> list[JobEvent]:
        rows = await self._run(None, "latest_events", id=id, limit=limit)
        return [as_event(row) for row in reversed(rows)]

    # ------------------------------------------------------------------------------------------------------------

    def _run(self, session: Session | None, name: str, **params: Any) -> Awaitable[list[Row]]:
        return self.database.ask(SQL[name], params, session)

    async def _lock(self, session: Session, id: JobId, tenant: str | None) -> _Found:
        rows = await self._run(session, "lock_job", id=id, tenant=tenant)
        if not rows:
            raise NotFound(f"there is no job {id}")
        return _Found(*rows[0])

    @staticmethod
    def _refuse_held(id: UUID, found: _Found) -> None:
        if found.is_held:
            raise Conflict(f"the operation of job {id} is still being interrupted; try again in a moment")

    @staticmethod
    def _refuse_owned(verb: str, id: UUID, owner: str | None) -> None:
        if owner is not None:
            raise Conflict(f"job {id} belongs to {owner}; {_INSTEAD[verb]}", holder=owner)


_INSTEAD = {
    "cancel": "cancel that instead of its job",
    "recover": "no action is needed, because its job is rescued when the lease of its worker expires",
    "rerun": "retry that instead of its job",
}
"""What to do instead, for a job that belongs to another object."""


class _Found(NamedTuple):
    """What an operator's verb must know of a job before it decides."""

    status: str
    owner: str | None
    is_held: bool
    was_waiting: bool
    waits: int
    round: int | None
    locked_by: str | None
    locked_at: datetime | None
    parent: UUID | None
    parent_status: str | None
    parent_waits: bool | None


def _why_not_stale(found: _Found, stale_seconds: float) -> str:
    if found.status != JobStatus.RUNNING:
        return f"it is {found.status}, not RUNNING"
    if found.locked_by is None:
        return "it waits for its children"
    return (
        f"its lease is alive, held by {found.locked_by} since {found.locked_at:%Y-%m-%d %H:%M:%S} UTC; "
        f"a lock is stale when its lease has expired, or after {stale_seconds:g} seconds"
    )


_JOB_FIELDS = tuple(Job.__dataclass_fields__)
_EVENT_FIELDS = tuple(JobEvent.__dataclass_fields__)


def _as_job(row: Row) -> Job:
    values = dict(zip(_JOB_FIELDS, row, strict=True))
    values["status"] = JobStatus(values["status"])
    return Job(**values)


def as_event(row: Row) -> JobEvent:
    values = dict(zip(_EVENT_FIELDS, row, strict=True))
    values["status"] = None if values["status"] is None else JobStatus(values["status"])
    return JobEvent(**values)
