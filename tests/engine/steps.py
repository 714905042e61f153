"""Steps that the engine's tests share: waiting for children, ending jobs, rescues and locks."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from batchwright import JobStatus, NewJob, Wait
from batchwright.db.database import Database, Pool
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.outcomes import Settle
from batchwright.engine.queue import Queue
from tests.support import BASIC, DATABASE, Clock, fail, succeed


async def hand_over(queue: Queue, claim: Claim, children: int | list[NewJob], **wait: Any) -> list[JobId]:
    """Let a held job wait for children; a number means this many `noop` jobs."""
    new = [NewJob("noop", {"n": n}) for n in range(children)] if isinstance(children, int) else children
    rows = await Catalog(queue.database, BASIC).prepare(new, parent=claim)
    await queue.wait(claim, "w1", Wait(new, **wait), rows)
    return [job.id for job in new]


async def retry(queue: Queue, claim: Claim, seconds: float = 0.0, *, worker: str = "w1") -> bool:
    error = {"kind": "transient", "code": "transient", "type": "Transient", "message": "not now"}
    settle = Settle("retry", claim, {"error": error, "delay_seconds": seconds})
    return claim.id in await queue.settle([settle], worker)


async def release(queue: Queue, claim: Claim, *, worker: str = "w1") -> bool:
    return await queue.release([(claim.id, claim.claim)], worker, "the worker stopped") == 1


async def claim_one(queue: Queue, id: JobId, *, worker: str = "w1", **options: Any) -> Claim:
    """Claim this job, which must be claimable."""
    claim = await queue.claim_job(worker, id, BASIC.names(), **options)
    assert claim is not None
    return claim


async def status(queue: Queue, id: JobId) -> JobStatus:
    return (await queue.get(id)).status


async def end(queue: Queue, claim: Claim, how: JobStatus) -> None:
    """End a held job in this status."""
    if how is JobStatus.SUCCEEDED:
        assert await succeed(queue, claim)
    elif how is JobStatus.FAILED:
        assert await fail(queue, claim)
    else:
        assert await queue.cancel([claim.id]) == 1
        await queue.let_go([(claim.id, claim.claim)])


async def snapshot(queue: Queue, id: JobId) -> tuple[Any, Any]:
    """The whole row and its whole history, to check that nothing has changed."""
    return await queue.get(id), await queue.events(id)


async def dead(queue: Queue, clock: Clock, claim: Claim) -> Any:
    """Let the lease of a claim expire, and rescue the job."""
    await clock.advance(queue, queue.settings.lease_seconds + 1)
    await clock.advance(queue, max(0.0, 60 - await _age_of_server(queue, clock)))
    (rescued,) = await queue.rescue()
    assert rescued.id == claim.id
    await clock.advance(queue, queue.settings.rescue_jitter_seconds)
    return rescued


async def _age_of_server(queue: Queue, clock: Clock) -> float:
    ((started,),) = await queue.database.rows("SELECT pg_postmaster_start_time()")
    assert clock.time is not None
    return (clock.time - started).total_seconds()


@contextlib.asynccontextmanager
async def another(queue: Queue, pool: Pool) -> AsyncIterator[Queue]:
    """A queue on the same tables with its own connections."""
    async with Pool(dataclasses.replace(DATABASE, pool_size=2), pool.url) as second:
        yield Queue(Database(second, clock=queue.database.clock), queue.settings)


async def blocked(queue: Queue, n: int) -> None:
    """Wait until this number of statements wait for a lock in this database."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    while (await queue.database.rows(waiting))[0][0] < n:
        await asyncio.sleep(0.005)


async def pause(queue: Queue, name: str = "default", paused: bool = True) -> None:
    await queue.database.rows(
        "UPDATE batchwright.queue SET paused_at = CASE WHEN %(paused)s THEN now() END WHERE name = %(name)s",
        {"paused": paused, "name": name},
    )
