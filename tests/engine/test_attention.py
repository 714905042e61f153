"""Each problem is one sentence with a remedy, and healthy things are not mentioned."""

import shutil
from typing import NamedTuple

from batchwright import NewJob
from batchwright.engine import attention
from batchwright.engine.attention import Attention, Concern, by_urgency, disk_concern
from batchwright.engine.named_queues import NamedQueues
from batchwright.engine.views import Views
from batchwright.engine.workers import Workers
from tests.engine.planning import indexes, plan, touched, whole_table_scans
from tests.support import fail, put, put_one, succeed, take_one


class Usage(NamedTuple):
    total: int
    used: int
    free: int


async def concerns(queue, tenant=None):
    return await Attention(queue, Views(queue)).concerns(tenant)


async def live_worker(queue, name="w1", **columns):
    values = {"host": "h", "pid": 1, "version": "1", "queues": None, "operations": ["noop"], "concurrency": 1}
    await Workers(queue.database).register(id=name, **{**values, **columns})


async def test_a_queue_without_a_worker_is_named_with_its_oldest_job(queue, clock):
    (id,) = await put(queue, NewJob("noop", queue="mail"))
    assert await concerns(queue) == [], "it became due only now"
    await clock.advance(queue, 180)
    (one,) = await concerns(queue)
    assert (one.kind, one.level, one.link) == ("no_worker", "error", f"jobs/{id}")
    assert one.message == (
        "jobs wait in 'mail', the oldest for 3 minutes: "
        "no live worker knows the operation 'noop' and serves the queue 'mail'"
    )
    await live_worker(queue)
    assert await concerns(queue) == []


async def test_a_paused_queue_matters_once_jobs_wait_in_it(queue, clock):
    await live_worker(queue)
    await put(queue, NewJob("noop"))
    await succeed(queue, await take_one(queue))
    await NamedQueues(queue.database).pause("default")
    await clock.advance(queue, 120)
    await live_worker(queue)
    assert await concerns(queue) == []
    await put(queue, NewJob("noop"))
    await clock.advance(queue, 61)
    await live_worker(queue)
    (one,) = await concerns(queue)
    assert (one.kind, one.level, one.link, one.remedy) == (
        "paused",
        "warning",
        "queues?name=default",
        "resume the queue",
    )
    assert await concerns(queue, tenant="somebody else") == []


async def test_a_job_of_a_dead_worker_that_nobody_rescues_is_stuck(queue, clock):
    id = await put_one(queue)
    await take_one(queue)
    await clock.advance(queue, queue.settings.lease_seconds + 61)
    (one,) = await concerns(queue)
    assert (one.kind, one.level, one.link) == ("stuck", "error", f"jobs/{id}")
    assert "is held by w1" in one.message


async def test_parked_jobs_and_broken_and_silent_workers_are_shown(queue, clock):
    await live_worker(queue, "silent")
    await clock.advance(queue, 150)
    await live_worker(queue, "sound")
    await live_worker(queue, "broken")
    await Workers(queue.database).heartbeat("broken", running=0, stopping=False, broken="a slot was given back twice")
    await put(queue, NewJob("noop"))
    await fail(queue, await take_one(queue), code="poison")
    found = {one.kind: one for one in await concerns(queue) if one.kind != "worker"}
    assert found["parked"].link == "inbox?type=noop"
    workers = [one for one in await concerns(queue) if one.kind == "worker"]
    assert [one.level for one in workers] == ["warning", "error"]
    assert "silent has sent no heartbeat for 2 minutes" in workers[0].message
    assert "a slot was given back twice" in workers[1].message
    assert [one.kind for one in await concerns(queue, tenant="default")] == ["parked"], "only operators see workers"
    assert await concerns(queue, tenant="another") == await concerns(queue, tenant="beyond") == []


async def test_a_nearly_full_disk_is_shown(tmp_path, monkeypatch):
    assert await disk_concern(tmp_path / "absent", "it") is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 << 30, 99 << 30, 2 << 30))
    assert await disk_concern(tmp_path, "the data folder") is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 << 30, 99 << 30, 500 << 20))
    one = await disk_concern(tmp_path, "the data folder")
    assert one.message == f"the disk of the data folder ({tmp_path}) has 500 MiB of 102,400 MiB left"


def test_errors_come_first():
    mild, bad = (Concern(kind="late", level=level, message="m", remedy="r") for level in ("warning", "error"))
    assert by_urgency([mild, bad, mild]) == [bad, mild, mild]


def test_waiting_jobs_are_found_by_an_index(crowd):
    late, counts = {"late_seconds": 1.0}, {"kinds_max": 1_000, "count_max": 1_000}
    for name, values in (("late_heads", late), ("abandoned", late), ("poisoned", counts)):
        found = plan(crowd, name, source=attention.SQL, run=True, limit=50, **values)
        assert not whole_table_scans(found)
        assert touched(found) < 2000, indexes(found)
