"""A held child gives parts of its work to new jobs of the same parent, completely or not at all, and once."""

import pytest

from batchwright import JobStatus, NewJob
from batchwright.engine.jobs import new_id
from batchwright.engine.workers import Workers
from tests.engine.steps import dead, hand_over, snapshot, status
from tests.support import event_names, put, put_one, succeed, take, take_one

QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobStatus
PRIORITY = 6


async def child_of_a_waiting_parent(queue):
    parent = await put_one(queue, priority=3)
    await hand_over(queue, await take_one(queue), [NewJob("noop", {"n": 10})], on_join="close", result="all")
    return parent, await take_one(queue)


async def split(queue, claim, *, worker="w1", parts=2, ids=None):
    given = {id: {"n": 100 + n} for n, id in enumerate(ids or [new_id() for _ in range(parts)])}
    return await queue.split((claim.id, claim.claim), worker, kept={"n": 1}, given=given, priority=PRIORITY)


async def test_parts_become_children_and_the_parent_waits_for_them_too(queue):
    parent, claim = await child_of_a_waiting_parent(queue)
    ids = [new_id(), new_id()]
    assert await split(queue, claim, ids=ids)
    waiting, kept = await queue.get(parent), await queue.get(claim.id)
    assert (waiting.children_open, waiting.progress_total, waiting.status) == (3, 3, RUNNING)
    assert (kept.payload, kept.status, kept.claims) == ({"n": 1}, RUNNING, claim.claim)
    for number, given in enumerate(await queue.get_many(ids)):
        assert (given.payload, given.status, given.priority) == ({"n": 100 + number}, QUEUED, PRIORITY)
        assert (given.parent_job_id, given.pipeline_id, given.round) == (parent, parent, kept.round)
        assert (given.queue, given.tenant, given.max_attempts) == (kept.queue, kept.tenant, kept.max_attempts)
        assert await event_names(queue, given.id) == ["job.enqueued"]
    *_, event = await queue.events(claim.id)
    assert (event.event, event.fields) == ("job.split", {"jobs": [str(id) for id in ids]})
    for one in [claim, *await take(queue)]:
        assert await status(queue, parent) is RUNNING
        assert await succeed(queue, one)
    assert await status(queue, parent) is SUCCEEDED


async def test_a_call_whose_answer_was_lost_is_repeated_without_effect(queue):
    parent, claim = await child_of_a_waiting_parent(queue)
    ids = [new_id()]
    assert await split(queue, claim, ids=ids)
    before = [await snapshot(queue, id) for id in (parent, claim.id, *ids)]
    assert await split(queue, claim, ids=ids)
    assert [await snapshot(queue, id) for id in (parent, claim.id, *ids)] == before


@pytest.mark.parametrize("how", ["worker", "claim", "rescued", "settled", "cancelled"])
async def test_a_worker_that_does_not_hold_the_child_cannot_split_it(queue, clock, how):
    parent, claim = await child_of_a_waiting_parent(queue)
    worker = "w1"
    match how:
        case "worker":
            worker = "w2"
        case "claim":
            claim.claim += 1
        case "rescued":
            await dead(queue, clock, claim)
        case "settled":
            await succeed(queue, claim)
        case "cancelled":
            await queue.cancel([parent])
    before = [await snapshot(queue, id) for id in (parent, claim.id)]
    ids = [new_id()]
    assert not await split(queue, claim, worker=worker, ids=ids)
    assert [await snapshot(queue, id) for id in (parent, claim.id)] == before
    assert await queue.get_many(ids) == []


async def test_a_job_without_a_parent_cannot_be_split(queue):
    id = await put_one(queue)
    claim = await take_one(queue)
    before = await snapshot(queue, id)
    assert not await split(queue, claim)
    assert await snapshot(queue, id) == before


async def test_after_a_split_the_next_worker_gets_only_the_kept_part(queue, clock):
    _, claim = await child_of_a_waiting_parent(queue)
    assert await split(queue, claim, parts=1)
    await dead(queue, clock, claim)
    again = next(one for one in await take(queue, worker="w2") if one.id == claim.id)
    assert again.payload == {"n": 1}


# Idle workers ---------------------------------------------------------------------------------------------------------


async def register(queue, id, *queues, types=("noop",), **columns):
    await Workers(queue.database).register(
        id=id,
        host="here",
        pid=1,
        version="1",
        queues=None,
        operations=["noop"],
        concurrency=1,
        on_demand_types=list(types),
        on_demand_queues=list(queues),
        **columns,
    )


async def test_idle_workers_are_live_ones_that_serve_the_queue_and_hold_none_of_its_jobs(queue, clock):
    workers = Workers(queue.database)
    await register(queue, "gone", "shard/small")
    await clock.advance(queue, 60)
    await register(queue, "w1", "shard/small")
    await register(queue, "by prefix", "shard/")
    await register(queue, "stopping", "shard/")
    await workers.heartbeat("stopping", running=0, stopping=True)
    await register(queue, "broken", "shard/")
    await workers.heartbeat("broken", running=0, stopping=False, broken="a slot was given back twice")
    await register(queue, "left", "shard/")
    await workers.leave("left")
    await register(queue, "other model", "shard/smaller")
    await register(queue, "other jobs", "shard/small", types=["other"])
    assert await workers.count_idle("shard/small", "noop") == 2

    await put(queue, NewJob("noop", queue="shard/small"))
    assert await workers.count_idle("shard/small", "noop") == 0, "a job of the queue is due"
    claim = await take_one(queue, queues=["shard/small"])
    assert await workers.count_idle("shard/small", "noop") == 1, "one of the workers holds the job"
    await put(queue, NewJob("noop", queue="shard/small", delay_seconds=60))
    assert await workers.count_idle("shard/small", "noop") == 1, "the new job is not due yet"
    await succeed(queue, claim)
    assert await workers.count_idle("shard/small", "noop") == 2
