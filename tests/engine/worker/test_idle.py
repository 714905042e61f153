"""An idle worker only runs one cheap query from time to time, and still finds every job."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from batchwright.db.doorbell import Doorbell, ring_at_commit
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import NewJob
from batchwright.engine.named_queues import NamedQueues
from batchwright.engine.queue import Queue
from batchwright.engine.worker import lanes
from batchwright.engine.worker.lease import Holder, Lease
from batchwright.states import JobStatus
from tests.support import BASIC, DATABASE, make_worker, noop, put, put_one, raw, working

NOTHING_TO_HOLD = (0, 7)


class Looks:
    """Counts the queries of an idle worker, and can wait until it has looked a number of times."""

    def __init__(self, worker):
        self.worker, self.looks, self.claims = worker, 0, 0
        self._look, self._claim = worker._upkeep.look, worker.queue.claim
        worker._upkeep.look, worker.queue.claim = self.look, self.claim

    async def look(self):
        self.looks += 1
        return await self._look()

    async def claim(self, *args, **options):
        self.claims += 1
        return await self._claim(*args, **options)

    async def more(self, n):
        wanted = self.looks + n
        while self.looks < wanted:
            await asyncio.sleep(0.01)


@pytest.fixture
async def idle(pool, queue):
    async with working(pool, noop, poll_seconds_min=0.01, poll_seconds_max=0.02) as worker, asyncio.timeout(30):
        looks = Looks(worker)
        await looks.more(5)
        looks.claims = 0
        yield looks


async def test_an_idle_worker_does_not_claim(idle):
    await idle.more(20)
    assert idle.claims == 0


async def put_in(queue, name, **options):
    (id,) = await put(queue, NewJob("noop", queue=name, **options))
    return id


async def success(queue, id):
    while (await queue.get(id)).status is not JobStatus.SUCCEEDED:
        await asyncio.sleep(0.01)


async def test_a_job_without_a_ring_of_the_doorbell_is_found(idle, queue):
    id = await put_one(queue)
    await success(queue, id)
    await idle.more(3)
    claimed = idle.claims
    await idle.more(20)
    assert idle.claims == claimed, "with nothing more to do, it does not claim"


async def test_a_job_of_a_new_queue_is_found(idle, queue):
    id = await put_in(queue, "never seen before")
    await success(queue, id)


@pytest.mark.direct("the doorbell needs a session")
@pytest.mark.parametrize("rings", ["with the commit", "after it"])
async def test_a_job_that_is_committed_late_starts_when_its_ring_is_heard(pool, queue, monkeypatch, rings):
    """It was written before other jobs that are claimed until it is committed; the next full scan is an hour away."""
    monkeypatch.setattr(lanes, "_SCAN_SECONDS_MIN", 3600.0)
    monkeypatch.setattr(lanes, "_SCAN_SECONDS_MAX", 3600.0)
    doorbell = Doorbell(pool)
    async with working(pool, noop, poll_seconds_min=0.01, poll_seconds_max=0.02) as worker, asyncio.timeout(20):
        await success(queue, await put_one(queue))
        async with queue.database.transaction() as session:
            rows = await Catalog(queue.database, BASIC).prepare([NewJob("noop")])
            began = time.monotonic()
            ((late, _),) = await queue.enqueue(rows, session=session)
            ((written,),) = await session.rows("SELECT clock_timestamp()")
            if rings == "with the commit":
                await ring_at_commit(session, ["default"])
            while worker._lanes._marks["default", 5].run_after <= written:
                await success(queue, await put_one(queue))
        if rings == "after it":
            doorbell.ring(["default"], age_seconds=time.monotonic() - began)
        await success(queue, late)
    await doorbell.close()


async def test_jobs_that_are_paused_private_or_not_due_cause_no_claim(idle, queue):
    await put_in(queue, "later", delay_seconds=3600)
    await put_in(queue, "~of others")
    await put_in(queue, "paused", delay_seconds=3600)
    await NamedQueues(queue.database).pause("paused")
    await raw(queue, "UPDATE batchwright.job SET run_after = now() WHERE queue = 'paused' RETURNING id")
    await idle.more(20)
    assert idle.claims == 0
    await NamedQueues(queue.database).resume("paused")
    await idle.more(5)
    assert idle.claims > 0


async def test_a_look_finds_every_queue_with_due_jobs_behind_any_other_jobs(pool, queue, clock):
    await clock.advance(queue, 0)
    for name, priority, delay in [("a", 5, 0), ("a", 1, 900), ("b", 3, 900), ("c", 9, 0), ("d", 0, 900), ("d", 2, 0)]:
        await put_in(queue, name, priority=priority, delay_seconds=delay)
    worker = make_worker(pool, queue=queue)
    seen = await worker._upkeep.look()
    assert (sorted(seen.due_queues), seen.has_suspects) == (["a", "c", "d"], False)
    await raw(queue, "UPDATE batchwright.job SET rescues = 2 WHERE queue = 'c' RETURNING id")
    assert (await worker._upkeep.look()).has_suspects
    await clock.advance(queue, 1000)
    assert sorted((await worker._upkeep.look()).due_queues) == ["a", "b", "c", "d"]
    await worker.close()


class Held:
    """A worker as its lease thread sees it; counts the queries of that thread."""

    def __init__(self, queue):
        self.held, self.busy, self.doubts, self.asked = {}, NOTHING_TO_HOLD, 0, 0
        self.queue = queue
        self.lease = Lease(
            Queue(SimpleNamespace(ask=self.ask)),
            "w1",
            Holder(
                held=lambda: dict(self.held),
                claims_under_way=lambda: self.busy,
                claims_in_doubt=lambda: self.doubts,
                on_news=lambda news: None,
            ),
            close_database=lambda: None,
        )
        self.rows = []

    async def ask(self, sql, params, session=None):
        self.asked += 1
        return self.rows

    def looks(self):
        """Let the lease look; return whether it has asked the database."""
        before = self.asked
        self.lease.look()
        return self.asked > before


@pytest.fixture
def holder(queue):
    return Held(queue)


def test_the_lease_asks_until_the_database_says_that_nothing_is_held(holder):
    assert [holder.looks() for _ in range(3)] == [True, False, False]


def test_the_lease_asks_while_something_is_held_or_claimed_and_once_more_after_it(holder):
    holder.looks()
    key = (object(), 1)
    holder.held, holder.rows = {key: SimpleNamespace(leased_until=0.0)}, [(*key, "RUNNING")]
    holder.busy = (0, 8)
    assert holder.looks()
    holder.held, holder.rows = {}, []
    assert [holder.looks() for _ in range(2)] == [True, False]
    holder.busy = (1, 8)
    assert [holder.looks() for _ in range(2)] == [True, True]
    holder.busy = (0, 9)
    assert [holder.looks() for _ in range(2)] == [True, False], "a job claimed meanwhile may have been cancelled"


def test_the_lease_asks_for_a_while_after_a_claim_whose_answer_was_lost(holder):
    """The server may commit the claim later, and the worker would not know."""
    holder.looks()
    holder.doubts += 1
    assert [holder.looks() for _ in range(3)] == [True] * 3
    assert holder.lease._doubted_until > time.monotonic() + DATABASE.statement_timeout_seconds
    holder.lease._doubted_until = time.monotonic()
    assert [holder.looks() for _ in range(2)] == [True, False]


async def test_a_claim_that_fails_is_in_doubt(pool, queue):
    worker = make_worker(pool, queue=queue)
    with pytest.raises(ZeroDivisionError), worker._claim_under_way():
        raise ZeroDivisionError
    assert worker._claims_in_doubt == 1
    await worker.close()
