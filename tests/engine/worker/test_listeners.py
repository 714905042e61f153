"""Of many workers that serve the same jobs, only some listen to the doorbell; the others only poll."""

import asyncio
import uuid

import pytest

from batchwright.engine.worker import worker as worker_module
from batchwright.engine.worker.worker import LISTENERS_MAX, POLL_SECONDS_LIMIT, POLLERS_MAX, fleet_pace, listens
from batchwright.engine.workers import Workers
from tests.support import noop, raw, working

LISTENING = """
SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN batchwright' AND datname = current_database()
"""


def test_all_workers_of_a_small_fleet_listen_and_about_a_fixed_number_of_a_large_one():
    names = [f"host:{n}:{uuid.UUID(int=n).hex}" for n in range(4000)]
    assert all(listens(name, LISTENERS_MAX) for name in names)
    for peers in (100, 1000, 4000):
        share = sum(listens(name, peers) for name in names) / len(names)
        assert share * peers == pytest.approx(LISTENERS_MAX, rel=0.2)


async def test_a_worker_of_a_large_fleet_stops_listening_and_one_of_a_small_one_listens_again(pool, queue, monkeypatch):
    monkeypatch.setattr(worker_module, "LISTENERS_MAX", 1)
    async with working(pool, noop) as worker, asyncio.timeout(20):
        await until(queue, 1)
        worker._note_peers(1 << 33)
        await until(queue, 0)
        worker._note_peers(1)
        await until(queue, 1)


async def until(queue, count):
    while await raw(queue, LISTENING) != [(count,)]:
        await asyncio.sleep(0.02)


async def test_a_heartbeat_returns_how_many_live_workers_serve_the_same_jobs(queue, clock):
    workers = Workers(queue.database)

    async def register(id, *, queues=None, operations=("a", "b")):
        columns = {"id": id, "host": "here", "pid": 1, "version": "1", "concurrency": 1}
        await workers.register(**columns, queues=queues, operations=list(operations))

    await register("dead")
    await clock.advance(queue, 60)
    await register("one")
    await register("two")
    await register("other queues", queues=["mail"])
    await register("other operations", operations=["a"])
    await register("stopping")
    await workers.heartbeat("stopping", running=0, stopping=True)
    assert await workers.heartbeat("one", running=0, stopping=False) == 2
    assert await workers.heartbeat("other queues", running=0, stopping=False) == 1
    assert await workers.heartbeat("unknown", running=0, stopping=False) is None


def test_a_large_fleet_polls_as_often_as_a_small_one_and_each_worker_at_least_every_ten_seconds():
    assert [fleet_pace(peers, 2.0) for peers in (0, 1, POLLERS_MAX)] == [1.0, 1.0, 1.0]
    assert fleet_pace(2 * POLLERS_MAX, 2.0) == 2.0
    assert fleet_pace(1_000, 2.0) * 2.0 == POLL_SECONDS_LIMIT
    assert fleet_pace(1_000, POLL_SECONDS_LIMIT) == 1.0


async def test_a_worker_with_many_peers_polls_less_often(pool):
    async with working(pool) as worker:
        assert worker._poll_seconds == worker.settings.poll_seconds_max
        worker._note_peers(3 * POLLERS_MAX)
        assert worker._poll_seconds == 3 * worker.settings.poll_seconds_max
        worker._note_peers(1)
        assert worker._poll_seconds == worker.settings.poll_seconds_max
