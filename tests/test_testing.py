"""The public test kit: drain()."""

import pytest

from batchwright import AsyncBatchwright, Batchwright, Context, Done, NewJob, Snooze, Transient, Wait, operation
from batchwright.errors import BatchwrightError
from batchwright.testing import drain


@operation("page")
def page(n: int) -> int:
    return n * n


@operation("report")
async def report(ctx: Context, pages: int) -> object:
    if ctx.joined is None:
        return Wait([NewJob(page, {"n": n}) for n in range(pages)], on_join="resume")
    return Done(sum([child.result async for child in ctx.joined]), then=[NewJob(page, {"n": 3})])


@operation("stubborn", backoff_seconds=3600)
async def stubborn(ctx: Context) -> int:
    if ctx.attempt < 3:
        raise Transient("not yet")
    return ctx.attempt


@operation("endless")
async def endless() -> Snooze:
    return Snooze(60)


async def test_drain_runs_parents_children_and_chained_jobs(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[page, report]) as batchwright:
        job = await batchwright.enqueue(report, {"pages": 5})
        assert await drain(batchwright) == 5 + 2 + 1
        assert await batchwright.wait(job, timeout=1) == 30


async def test_drain_skips_over_delays_and_backoffs(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[stubborn]) as batchwright:
        job = await batchwright.enqueue(stubborn, delay_seconds=86_400)
        assert await drain(batchwright) == 3
        assert await batchwright.wait(job, timeout=1) == 3


async def test_drain_leaves_the_future_alone_when_told_so(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[page]) as batchwright:
        await batchwright.enqueue(page, {"n": 1}, delay_seconds=60)
        assert await drain(batchwright, fast_forward=False) == 0


async def test_drain_gives_up_on_a_job_that_never_ends(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[endless]) as batchwright:
        await batchwright.enqueue(endless)
        with pytest.raises(BatchwrightError, match="snooze for ever"):
            await drain(batchwright, limit=20)


def test_drain_serves_plain_code_too(database_url):
    with Batchwright(database_url=database_url, operations=[page]) as batchwright:
        job = batchwright.enqueue(page, {"n": 4})
        assert drain(batchwright) == 1
        assert batchwright.wait(job) == 16
