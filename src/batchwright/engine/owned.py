"""Jobs that belong to an object of a part, such as a batch: what the part may read and change.

The job verbs refuse such jobs; use the verbs of the part instead. Only the engine reads the table of jobs: a part calls
the functions here, or joins `:jobs` in its own statement.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from batchwright.db.database import Session
from batchwright.db.statements import shared_parts, statements
from batchwright.engine.jobs import JobId
from batchwright.engine.queue import Queue
from batchwright.errors import Fenced
from batchwright.states import JobStatus

SQL = statements(__package__, "owned.sql")
JOBS_VIEW = shared_parts(__package__, "owned.sql")
"""For `statements(…, parts=JOBS_VIEW)`: `:jobs` is like a view of id, parent_job_id, status, run_after and is_open."""


class OpenChild(NamedTuple):
    """A child that has not ended."""

    id: UUID
    payload: Any
    is_untouched: bool
    """No worker has ever had it."""


class Held(NamedTuple):
    """A claim of a job, under which a worker wants to write."""

    id: UUID
    claim: int
    worker: str


async def lock_held(queue: Queue, claims: Sequence[Held], *, session: Session) -> set[UUID]:
    """The jobs whose claims are still held; they stay held until the transaction ends."""
    params = {
        "ids": [one.id for one in claims],
        "claims": [one.claim for one in claims],
        "workers": [one.worker for one in claims],
    }
    return {id for (id,) in await queue.database.ask(SQL["lock_held"], params, session)}


async def lock(queue: Queue, id: UUID, *, session: Session) -> None:
    """Lock a job, whoever holds it. Lock it first if you write to a part's rows and then to the job's history."""
    await queue.database.ask(SQL["lock"], {"id": id}, session)


async def note(queue: Queue, held: Held, *events: Mapping[str, Any], session: Session) -> None:
    """Add to a job's history in the caller's transaction, so that the events and the changes are one commit.

    Nothing is fenced: even a worker that has lost the job reports what was paid for.
    """
    document = orjson.dumps(events, default=str).decode()
    params = {"id": held.id, "claim": held.claim, "worker": held.worker, "events": document}
    await queue.database.ask(SQL["note"], params, session)


async def children(
    queue: Queue, id: UUID, *statuses: JobStatus, job_type: str | None = None, session: Session
) -> list[JobId]:
    """The children of a job that have one of these statuses and this type."""
    params = {"id": id, "statuses": [status.value for status in statuses], "job_type": job_type}
    return [JobId(child) for (child,) in await queue.database.ask(SQL["children"], params, session)]


async def cancel_children(
    queue: Queue, id: UUID, *statuses: JobStatus, job_type: str | None = None, reason: str, session: Session
) -> int:
    """Cancel the children that have one of these statuses and this type; returns how many."""
    found = await children(queue, id, *statuses, job_type=job_type, session=session)
    return await queue.cancel(found, reason=reason, owned=True, session=session) if found else 0


async def open_children(queue: Queue, id: UUID) -> list[OpenChild]:
    """The children of a job that have not ended, in the order of their list."""
    return [OpenChild(*row) for row in await queue.database.ask(SQL["open_children"], {"id": id})]


async def absolve(queue: Queue, held: Held, *, session: Session) -> None:
    """Reset the count of a job's worker deaths, because it got further than before: it is not what kills them.

    Call this only for a step that a job takes once; otherwise a job that does kill its workers would never run alone.
    """
    await queue.absolve(held.id, held.claim, session=session)


@asynccontextmanager
async def fenced(queue: Queue, held: Held) -> AsyncIterator[Session]:
    """A transaction under a claim; raises Fenced if another worker has the job by now."""
    async with queue.database.transaction() as session:
        if not await lock_held(queue, [held], session=session):
            raise Fenced(f"job {held.id} was given to another worker")
        yield session
