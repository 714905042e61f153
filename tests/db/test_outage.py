"""The database becomes unavailable while a worker runs jobs, and returns: no job of a live worker is rescued."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest

from batchwright import NewJob, operation
from batchwright.app import VERSION
from batchwright.db.database import Database, Pool
from batchwright.db.embedded import EmbeddedPostgres
from batchwright.db.migrate import migrate
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.operations.registry import Registry
from batchwright.states import JobStatus
from tests.support import DATABASE, finished, put, working


@pytest.fixture
def server():
    root = Path(tempfile.mkdtemp(prefix="batchwright-outage-"))
    root.chmod(0o755)
    with EmbeddedPostgres(root / "pg") as server:
        yield server
    shutil.rmtree(root)


@pytest.fixture
async def pool(server):
    async with Pool(DATABASE, server.url) as pool:
        await migrate(pool, VERSION)
        yield pool


def held_operation():
    """An operation that reports its start, and ends when the test says so."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    @operation("held")
    async def held() -> str:
        begun.set()
        await may_end.wait()
        return "kept"

    return held, begun, may_end


async def until(condition) -> None:
    """Poll for a change by another thread or process; the test's timeout bounds it."""
    while not condition():
        await asyncio.sleep(0.02)


async def test_an_outage_shorter_than_a_lease_costs_nothing(server, pool):
    held, begun, may_end = held_operation()
    queue = Queue(Database(pool), EngineSettings(lease_seconds=30))
    async with working(pool, held, engine=queue.settings) as worker:
        (id,) = await put(queue, NewJob(held), operations=Registry([held]))
        await begun.wait()
        await asyncio.to_thread(server.pg_ctl, "stop", "-m", "immediate")
        await until(lambda: worker.lease is not None and worker.lease.failures >= 2)
        await asyncio.to_thread(server.ensure_running)
        await until(lambda: worker.lease.failures == 0)
        may_end.set()
        job = await finished(queue, id)
    assert (job.status, job.result, job.claims, job.attempts, job.rescues) == (JobStatus.SUCCEEDED, "kept", 1, 1, 0)
    assert worker.counts.total("leases_lost_total") == 0


async def test_a_worker_starts_the_embedded_server_again(server, pool):
    held, begun, may_end = held_operation()
    queue = Queue(Database(pool), EngineSettings(lease_seconds=30))
    async with working(pool, held, engine=queue.settings, revive=server.ensure_running) as worker:
        (id,) = await put(queue, NewJob(held), operations=Registry([held]))
        await begun.wait()
        await asyncio.to_thread(server.pg_ctl, "stop", "-m", "immediate")
        may_end.set()
        await until(lambda: worker.counts.total("jobs_settled_total") == 1)
        assert (await queue.get(id)).result == "kept"


async def test_no_job_is_rescued_during_the_first_lease_after_the_server_started(server, pool):
    queue = Queue(Database(pool), EngineSettings(lease_seconds=60))
    ((started, now),) = await pool.rows("SELECT pg_postmaster_start_time(), now()")
    assert (now - started).total_seconds() < 60
    held, _, _ = held_operation()
    (id,) = await put(queue, NewJob(held), operations=Registry([held]))
    assert await queue.claim_job("w1", id, ["held"])
    await pool.rows("UPDATE batchwright.job SET lease_until = now() - interval '1 hour'")
    assert await queue.rescue() == []
    assert (await queue.get(id)).status is JobStatus.RUNNING
