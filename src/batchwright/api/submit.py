"""Enqueue over HTTP: one job or many, once per Idempotency-Key, however often the request is sent."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from batchwright.core import Core
from batchwright.db.database import Session
from batchwright.db.retry import retry_deadlocks, retry_unavailable
from batchwright.db.statements import statements
from batchwright.engine.jobs import JobId, NewJob
from batchwright.errors import Conflict, InvalidInput

SQL = statements(__package__, "submit.sql")
_TRIES_MAX = 4


class Submitted(NamedTuple):
    """The jobs of a request; `is_new` is false if an earlier request with the same key created them."""

    ids: list[JobId]
    is_new: bool


async def submit(
    core: Core, jobs: Sequence[NewJob], *, tenant: str, key: str | None, body: Mapping[str, Any]
) -> Submitted:
    """Enqueue all jobs or none. Their ids are chosen first, so a commit whose answer was lost can be repeated."""
    places = (f"jobs.{place}." if "jobs" in body else "" for place in range(len(jobs)))
    rows = [await _prepared(core, place, job) for place, job in zip(places, jobs, strict=True)]
    began = time.monotonic()
    ids = await retry_unavailable(lambda: _once(core, rows, tenant, key, body), tries_max=_TRIES_MAX)
    core.doorbell.ring({row["queue"] for row in rows}, age_seconds=time.monotonic() - began)
    # Compare ids: the last try may have found the jobs that the try before it created.
    return Submitted(ids, not {row["id"] for row in rows}.isdisjoint(ids))


async def _prepared(core: Core, place: str, job: NewJob) -> dict[str, Any]:
    """The job's row; errors name fields as the body does."""
    try:
        (row,) = await core.catalog.prepare([job])
    except InvalidInput as error:
        field = "job_type" if error.param == "operation" else error.param
        error.param = f"{place}{field}" if field else None
        raise
    return row


async def _once(
    core: Core, rows: Sequence[dict[str, Any]], tenant: str, key: str | None, body: Mapping[str, Any]
) -> list[JobId]:
    if key is None:
        return [one.id for one in await core.queue.enqueue(rows)]

    async def enqueue(session: Session) -> list[JobId]:
        return [one.id for one in await core.queue.enqueue(rows, session=session)]

    return await once(core, enqueue, tenant=tenant, key=key, body=body)


@retry_deadlocks
async def once(
    core: Core,
    make: Callable[[Session], Awaitable[list[JobId]]],
    *,
    tenant: str,
    key: str | None,
    body: Mapping[str, Any] | None = None,
) -> list[JobId]:
    """The jobs that `make` creates, or those that it created for an earlier request with the same key."""
    database = core.queue.database
    digest = hashlib.sha256(orjson.dumps(body or {}, option=orjson.OPT_SORT_KEYS, default=str)).digest()
    async with database.transaction() as session:
        if key is not None and (known := await _known(core, session, tenant, key, digest)):
            return known
        ids = await make(session)
        if key is not None:
            answer = orjson.dumps(ids).decode()
            await database.ask(SQL["answer"], {"tenant": tenant, "key": key, "answer": answer}, session)
        return ids


async def _known(core: Core, session: Session, tenant: str, key: str, digest: bytes) -> list[JobId] | None:
    """Reserve the key, or find its jobs; waits for a request in progress that has the same key."""
    params = {"tenant": tenant, "key": key, "digest": digest}
    while not await core.queue.database.ask(SQL["take"], params, session):
        for found, answer in await core.queue.database.ask(SQL["known"], params, session):
            if bytes(found) != digest:
                raise Conflict(f"the Idempotency-Key {key!r} was used before with another body")
            return [JobId(UUID(id)) for id in answer]
        # Retention removed the key between the two statements, so we can take it now.
    return None
