"""Every kind of job, of several tenants, at once on two workers; then all promises are checked."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest

from batchwright import AsyncBatchwright, NewJob, operation
from batchwright.settings import load_settings
from tests.chaos.history import read_history
from tests.chaos.operations import EFFECTS, OPERATIONS
from tests.chaos.verdict import judge
from tests.chaos.workload import Size, Workload
from tests.perturbed.conftest import SCALE

pytestmark = pytest.mark.timeout(240)
FEED_SECONDS = 3.0 * SCALE
SIZE = Size(bulk_children=100 * SCALE, bulk_times=1, jobs_per_second=30.0, poisons=0, pace=0.3)
RERUNS = 5 * SCALE
TICKS = 10
_OPEN = "SELECT count(*) FROM batchwright.job WHERE finished_at IS NULL OR locked_by IS NOT NULL"
_SET_BACK = """
UPDATE batchwright.schedule SET next_at = date_trunc('minute', now()) - make_interval(mins => %(minutes)s)
"""


@operation("perturbed.tick")
async def tick(at: datetime) -> str:
    return at.isoformat()


@asynccontextmanager
async def two_workers(database_url):
    flags = {
        "database": {"url": database_url, "pool_size": 20},
        "engine": {"lease_seconds": 3.0},
        "worker": {"concurrency": 16, "processes_max": 1},
    }
    operations = [*OPERATIONS, tick]
    async with AsyncBatchwright(settings=load_settings(flags, environment={}), operations=operations) as batchwright:
        for statement in EFFECTS.split(";"):
            await batchwright.pool.rows(statement)
        workers = [batchwright.worker() for _ in range(2)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for worker in workers:
            await worker.started.wait()
        yield batchwright
        for worker in workers:
            worker.stop()
        assert await asyncio.gather(*running) == [True, True]


async def schedule(batchwright, tenants):
    """Create schedules that have missed ten ticks each, which the first worker will fire."""
    for tenant in tenants:
        template = NewJob(tick)
        await batchwright.schedules.create("often", "* * * * *", template, tenant=tenant, missed="all", tick_field="at")
    await batchwright.pool.rows(_SET_BACK, {"minutes": TICKS})


async def drained(batchwright):
    """Wait until no job is open; bounded by the test's timeout."""
    while (await batchwright.pool.rows(_OPEN))[0][0]:
        await asyncio.sleep(0.1)


def check_ticks(history, tenants):
    for tenant in tenants:
        jobs = [job for job in history.of_type("perturbed.tick") if job.tenant == tenant]
        ticks = sorted(datetime.fromisoformat(job.payload["at"]) for job in jobs)
        assert len(ticks) in (TICKS + 1, TICKS + 2), "a minute may end while the test runs"
        assert ticks == [ticks[0] + n * timedelta(minutes=1) for n in range(len(ticks))]


async def test_jobs_of_every_kind_at_once_keep_every_promise(database_url, chance):
    tenants = ("ada", "bob")
    async with two_workers(database_url) as batchwright:
        workload = Workload(batchwright, SIZE, chance.getrandbits(32))
        await asyncio.gather(workload.feed(FEED_SECONDS), schedule(batchwright, tenants))
        await asyncio.gather(*(workload.rerun() for _ in range(RERUNS)))
        await drained(batchwright)
        history = await asyncio.to_thread(read_history, database_url)
    assert {name: found for name, found in judge(history, workload.ledger).items() if found} == {}
    assert not [job for job in history.jobs.values() if history.count(job, "job.rescued")], "no worker has died"
    check_ticks(history, tenants)
