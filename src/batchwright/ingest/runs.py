"""The rows of runs: every transition is a compare-and-set.

A run is driven by its job, `ingest.run`, the parent of the jobs of its items. The commands for jobs refuse
jobs that belong to a run; use the methods here instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from batchwright.db.database import Row, Session
from batchwright.db.retry import retry_deadlocks
from batchwright.db.statements import statements
from batchwright.engine import owned
from batchwright.engine.jobs import JobId, new_id
from batchwright.engine.queue import Queue
from batchwright.errors import Conflict, NotFound
from batchwright.states import RUN, RunStatus

SQL = statements(__package__, "runs.sql", parts=owned.JOBS_VIEW)
GATHER_JOB = "ingest.gather"
RUN_JOB = "ingest.run"
QUEUE = "ingest"
"""Runs and their documents share a queue."""
_RACES_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its row was when it was read."""

    id: str
    tenant: str
    collection_id: int
    collection: str
    kind: str
    status: RunStatus
    sources: list[str]
    config: dict[str, Any]
    recipe: str
    lane: str
    priority: int
    metadata: dict[str, str] | None
    job_id: UUID
    traceparent: str | None
    estimate: dict[str, Any] | None
    budget: Decimal | None
    spent: Decimal
    reserved: Decimal
    """What requests in flight may cost."""
    has_unknown_cost: bool
    prompt_tokens: int
    completion_tokens: int
    calls: int
    item_count_total: int
    item_count_done: int
    item_count_unchanged: int
    item_count_failed: int
    item_count_cancelled: int
    retired_count: int
    skipped: dict[str, Any] | None
    listed_at: datetime | None
    is_complete: bool | None
    parked_reason: str | None
    parked_message: str | None
    error: dict[str, Any] | None
    deadline_at: datetime | None
    seconds_left: float | None
    """Seconds until its deadline, by the database's clock."""
    gather_job_ids: list[UUID]
    resumed_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None

    @property
    def has_ended(self) -> bool:
        return self.status in RUN.terminal

    @property
    def item_count_open(self) -> int:
        ended = self.item_count_done + self.item_count_unchanged + self.item_count_failed + self.item_count_cancelled
        return self.item_count_total - ended


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to create."""

    tenant: str
    collection: str
    kind: str
    sources: Sequence[str]
    config: Mapping[str, Any]
    recipe: str
    lane: str = "auto"
    priority: int = 5
    metadata: Mapping[str, str] | None = None
    budget: Decimal | None = None
    estimate: Mapping[str, Any] | None = None
    deadline_seconds: float | None = None
    idempotency_key: str | None = None
    idempotency_digest: bytes | None = None
    traceparent: str | None = None
    id: str = field(default_factory=lambda: f"run_{new_id().hex}")
    job_id: JobId = field(default_factory=lambda: new_id())


class Doubt(NamedTuple):
    """Requests whose answers were lost: they may have been paid for."""

    calls: int
    cost: Decimal
    tokens: int


class Removed(NamedTuple):
    """A removed run, and its objects in the store: copies of sources, and texts that belong to no version."""

    id: str
    object_keys: list[str]


class Runs:
    """The runs of all tenants."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._database = queue.database

    # Users ------------------------------------------------------------------------------------------------------

    @retry_deadlocks
    async def create(self, new: NewRun, job: Mapping[str, Any]) -> tuple[Run, bool]:
        """Create the run with its job, and its collection if necessary. Returns the run, and whether it is new.

        The same idempotency key with the same digest returns the first run; with another digest it is a Conflict.
        """
        params = {
            **{name: getattr(new, name) for name in NewRun.__dataclass_fields__},
            "sources": _json(list(new.sources)),
            "config": _json(new.config),
            "metadata": _json(new.metadata),
            "estimate": _json(new.estimate),
        }
        async with self._database.transaction() as session:
            params["collection_id"] = await self._ensure_collection(new, session)
            for _ in range(_RACES_MAX):
                if await self._database.ask(SQL["insert"], params, session):
                    await self.queue.enqueue([job], session=session)
                    return await self.get(new.id, tenant=None, session=session), True
                if known := await self._find_known(params, session):
                    return known, known.id == new.id
                # The key was cleared between the two statements, so this run can have it now.
        raise Conflict("other requests with this Idempotency-Key are being processed; resend the request")

    async def find_repeated(self, tenant: str, key: str | None, digest: bytes | None) -> Run | None:
        """The run that already has this idempotency key; Conflict if its digest differs."""
        params = {"id": "", "tenant": tenant, "idempotency_key": key, "idempotency_digest": digest}
        return await self._find_known(params, None) if key is not None else None

    async def get(self, id: str, *, tenant: str | None, session: Session | None = None) -> Run:
        for row in await self._database.ask(SQL["get"], {"id": id, "tenant": tenant}, session):
            return _run(row)
        raise NotFound(f"there is no run {id!r}", kind="run", id=id)

    async def lock(self, id: str, *, tenant: str | None, session: Session) -> Run:
        """The run, locked until the transaction ends."""
        for row in await self._database.ask(SQL["lock"], {"id": id, "tenant": tenant}, session):
            return _run(row)
        raise NotFound(f"there is no run {id!r}", kind="run", id=id)

    async def list(
        self,
        tenant: str | None,
        *,
        after: str | None = None,
        limit: int = 20,
        statuses: Sequence[RunStatus] | None = None,
        collection: str | None = None,
    ) -> Sequence[Run]:
        """Newest first."""
        wanted = [status.value for status in statuses or RunStatus]
        params = {"tenant": tenant, "after": after, "limit": limit, "statuses": wanted, "collection": collection}
        statement = "list" if tenant is not None else "list_everywhere"
        if collection is not None:
            statement = "list_of_collection"
        elif statuses:
            statement = "list_by_status"
        return [_run(row) for row in await self._database.ask(SQL[statement], params)]

    async def in_doubt(self, id: str) -> Doubt:
        return Doubt(*(await self._database.ask(SQL["in_doubt"], {"run_id": id}))[0])

    # Transitions: each returns the new state, or None if the run's state does not allow it ---------------------------

    async def begin(self, id: str, *, session: Session | None = None) -> RunStatus | None:
        return await self._move("begin", id, session)

    async def park(self, id: str, reason: str, message: str, *, session: Session | None = None) -> RunStatus | None:
        """Start no further steps until a user resumes the run."""
        return await self._move("park", id, session, reason=reason, message=message)

    async def resume(
        self, id: str, *, budget: Decimal | None = None, session: Session | None = None
    ) -> RunStatus | None:
        """Resume a run, optionally with a new budget. The caller wakes its items."""
        return await self._move("resume", id, session, budget=budget)

    async def complete(self, id: str, *, session: Session | None = None) -> RunStatus | None:
        return await self._move("complete", id, session)

    async def complete_with_errors(self, id: str, *, session: Session | None = None) -> RunStatus | None:
        return await self._move("complete_with_errors", id, session)

    async def fail(self, id: str, error: Mapping[str, Any], *, session: Session | None = None) -> RunStatus | None:
        return await self._move("fail", id, session, error=_json(error))

    async def cancel(self, id: str, *, session: Session | None = None) -> RunStatus | None:
        return await self._move("cancel", id, session)

    async def reopen(self, id: str, job_id: UUID, *, session: Session | None = None) -> RunStatus | None:
        return await self._move("reopen", id, session, job_id=job_id)

    async def _move(self, verb: str, id: str, session: Session | None, **values: Any) -> RunStatus | None:
        rows = await self._database.ask(SQL[verb], {"id": id, **values}, session)
        return RunStatus(rows[0][0]) if rows else None

    # Listing ----------------------------------------------------------------------------------------------------

    async def add_items(self, run: Run, listed: Sequence[Mapping[str, Any]], *, force: bool, session: Session) -> int:
        """Add listed documents, each source once. Returns how many are new to the run."""
        items = [{"id": f"item_{new_id().hex}", "job_id": new_id(), **one} for one in listed]
        params = {"run_id": run.id, "collection_id": run.collection_id, "items": _json(items), "force": force}
        await self._database.ask(SQL["add_documents"], params, session)
        ((added,),) = await self._database.ask(SQL["add_items"], params, session)
        return int(added)

    async def end_listing(self, id: str, *, is_complete: bool, skipped: Mapping[str, Any], session: Session) -> None:
        params = {"id": id, "is_complete": is_complete, "skipped": _json(skipped)}
        await self._database.ask(SQL["end_listing"], params, session)

    async def missing(
        self, id: str, prefixes: Sequence[str], limit: int, *, session: Session
    ) -> Sequence[tuple[int, int]]:
        """Live documents below these sources that a complete listing has not found, with their versions; locked."""
        params = {"run_id": id, "prefixes": list(prefixes), "limit": limit}
        return [
            (document, version)
            for document, version in await self._database.ask(SQL["retire_missing"], params, session)
        ]

    async def count_retired(self, id: str, count: int, *, session: Session) -> None:
        await self._database.ask(SQL["count_retired"], {"run_id": id, "count": count}, session)

    # Upkeep -----------------------------------------------------------------------------------------------------

    async def parked(self, tenant: str | None, limit: int = 100) -> Sequence[Row]:
        """Runs that wait for a user."""
        return await self._database.ask(SQL["parked"], {"tenant": tenant, "limit": limit})

    async def abandoned(self, limit: int, *, session: Session) -> Sequence[tuple[str, str | None]]:
        """Open runs whose job ended, but did not end the run."""
        rows = await self._database.ask(SQL["abandoned_runs"], {"limit": limit}, session)
        return [(id, status) for id, status in rows]

    async def remove_old(self, keep_seconds: float, limit: int) -> Sequence[Removed]:
        """Remove ended runs with their items; documents stay. Returns what must be removed from the store."""
        removed = []
        for id, job_id in await self._database.ask(SQL["old"], {"keep_seconds": keep_seconds, "limit": limit}):
            async with self._database.transaction() as session:
                left = await self._database.ask(SQL["objects"], {"id": id}, session)
                others = [job for (job,) in await self._database.ask(SQL["other_jobs"], {"id": id}, session)]
                for job in (job_id, *others):
                    await self.queue.disown(job, id, session=session)
                if await self._database.ask(SQL["remove"], {"id": id}, session):
                    keys = [key for (key,) in left]
                    removed.append(Removed(id, keys))
        return removed

    # ------------------------------------------------------------------------------------------------------------

    async def _ensure_collection(self, new: NewRun, session: Session) -> int:
        """Find or create the collection. A collection keeps the language that it was created with."""
        params = {"tenant": new.tenant, "name": new.collection, "language": new.config.get("language", "english")}
        for _ in range(_RACES_MAX):
            for statement in ("find_collection", "add_collection"):
                for (id,) in await self._database.ask(SQL[statement], params, session):
                    return int(id)
        raise Conflict(f"the collection {new.collection!r} is being changed by another request; retry")

    async def _find_known(self, params: Mapping[str, Any], session: Session | None) -> Run | None:
        for digest, *row in await self._database.ask(SQL["known"], params, session):
            if row[0] != params["id"] and bytes(digest or b"") != params["idempotency_digest"]:
                raise Conflict("the Idempotency-Key was used before with another body", holder=row[0])
            return _run(row)
        return None


def _run(row: Row | list[Any]) -> Run:
    values = dict(zip(Run.__dataclass_fields__, row, strict=True))
    return Run(**values | {"status": RunStatus(values["status"])})


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value, default=str).decode()
