"""A shard gives a part of its lines to idle workers; each line is sent once, whatever fails."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

import pytest

from batchwright.batches.part import BatchesPart
from batchwright.batches.plan.shards import BRANCH_REQUESTS_MIN
from batchwright.batches.send import sharing
from batchwright.db.database import Database
from batchwright.engine.queue import Queue
from batchwright.engine.workers import SQL as WORKER_SQL
from batchwright.errors import DatabaseUnavailable
from batchwright.inference.budgets import SQL as BUDGET_SQL
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from tests.batches.stage import request, staged
from tests.batches.test_recovery import doomed
from tests.support import raw, sparsely

ANSWERS = SimulatorSettings(any_model=Profile(decode_rate=20.0, output_sigma=0.0, max_running=1000))
"""Each takes a fifth of a second."""
REQUESTS = 2 * BRANCH_REQUESTS_MIN - 1
"""Too few for the shard to be divided when the batch is planned."""
LINES = [request(f"r{n}") for n in range(REQUESTS)]
IN_FLIGHT = 6
INFERENCE = {"inference": {"concurrency": IN_FLIGHT, "model_concurrency_start": IN_FLIGHT}}
LEASE = {"engine": {"lease_seconds": 4.0, "rescue_jitter_seconds": 0.0}}
"""Long enough for a busy machine: lines of a lost lease would be resent."""
IDLE = """
INSERT INTO batchwright.worker (id, host, pid, version, operations, concurrency, on_demand_types, on_demand_queues,
    started_at, heartbeat_at)
VALUES ('idle', 'nowhere', 1, '1', '{}', 1, '{batch.shard}', '{shard/}', now(), now() + interval '1 hour')
RETURNING id
"""
"""An idle worker that never takes a job."""
WORKERS = "SELECT DISTINCT worker FROM batchwright.job_event WHERE event = 'job.started' AND job_id = ANY(%(ids)s)"


async def shards_of(stage, batch):
    rows = await raw(
        stage.batchwright.queue,
        "SELECT id, payload FROM batchwright.job WHERE parent_job_id = %(id)s ORDER BY (payload ->> 'start')::int",
        id=batch.job_id,
    )
    return dict(rows)


async def check(stage, id, *, again=0):
    """Check that each line has one answer and at most `again` were sent twice; return the batch's shards."""
    batch = await stage.ended(id)
    output, errors = await stage.results(batch)
    assert (batch.status, errors, batch.completed) == (BatchStatus.COMPLETED, [], REQUESTS)
    assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(REQUESTS)]
    twice = stage.simulator.asked(over=1)["requests"]
    assert sum(twice.values()) - len(twice) <= again
    shards = await shards_of(stage, batch)
    covered = [at for one in shards.values() for at in range(one["start"], one["start"] + one["count"])]
    assert covered == list(range(REQUESTS)), "the shards together must be the plan, each line once"
    return shards


async def test_idle_workers_get_a_part_of_the_only_shard(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=ANSWERS, **INFERENCE) as stage:
        for _ in range(3):
            await stage.work().started.wait()
        shards = await check(stage, await stage.submit(LINES))
        workers = await raw(stage.batchwright.queue, WORKERS, ids=list(shards))
        assert len(shards) >= 3
        assert len(workers) == 3
        told = "SELECT fields ->> 'requests' FROM batchwright.job_event WHERE event = 'batch.shard_split'"
        given = sum(one["count"] for one in shards.values() if one["branch"])
        assert sum(int(requests) for (requests,) in await raw(stage.batchwright.queue, told)) >= given > REQUESTS / 3


async def test_a_small_batch_and_a_quick_batch_need_no_additional_statement(database_url, tmp_path, monkeypatch):
    sent = Counter()
    ask = Database.ask

    def count(self, sql, *args):
        sent[sql] += 1
        return ask(self, sql, *args)

    monkeypatch.setattr(Database, "ask", count)
    async with staged(database_url, tmp_path) as stage:
        for _ in range(2):
            await stage.work().started.wait()
        shards = await check(stage, await stage.submit(LINES))
    assert len(shards) == 1
    assert sent[WORKER_SQL["idle"]] == sent[BUDGET_SQL["workers"]] == 0


async def test_a_larger_batch_is_divided_among_the_live_workers(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        for _ in range(2):
            await stage.work().started.wait()
        lines = [request(f"r{n}") for n in range(300)]
        batch = await stage.ended(await stage.submit(lines))
        shards = await shards_of(stage, batch)
        assert [one["count"] for one in shards.values()] == [75, 64, 64, 64, 33]
        assert (batch.completed, stage.simulator.asked(over=1)["count"]) == (300, 0)


@pytest.mark.parametrize("fate", sparsely(["answer lost", "lost before", "refused", "slow and refused", "slow"], 3))
async def test_each_line_is_sent_once_whether_the_split_succeeds_or_fails(database_url, tmp_path, monkeypatch, fate):
    split, calls = Queue.split, 0

    async def doubtful(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if fate.startswith("slow"):
            await asyncio.sleep(1.0)  # meanwhile, the lines that it keeps are answered
        if "refused" in fate and calls <= 2:
            return False
        if calls == 1 and fate == "lost before":
            raise DatabaseUnavailable("the connection broke")
        done = await split(self, *args, **kwargs)
        if calls == 1 and fate == "answer lost":
            raise DatabaseUnavailable("the connection broke")
        return done

    monkeypatch.setattr(Queue, "split", doubtful)
    async with staged(database_url, tmp_path, simulator=ANSWERS, **INFERENCE) as stage:
        for _ in range(2):
            await stage.work().started.wait()
        await check(stage, await stage.submit(LINES))
        assert calls >= (2 if "lost" in fate else 1)


async def test_a_part_that_no_worker_takes_is_run_by_the_worker_that_split_it_off(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=ANSWERS, **INFERENCE) as stage:
        await raw(stage.batchwright.queue, IDLE)
        stage.work()
        shards = await check(stage, await stage.submit(LINES))
        assert len(shards) >= 2


@pytest.mark.parametrize("when", sparsely(["after", "before"], 2))
async def test_if_a_worker_dies_during_the_split_nothing_is_lost(database_url, tmp_path, when):
    async with staged(database_url, tmp_path, simulator=ANSWERS, **INFERENCE, **LEASE) as stage:
        await raw(stage.batchwright.queue, IDLE)
        id = await stage.submit(LINES)
        fate = {"at": "batchwright.engine.queue:Queue.split", "when": when, "call": 1}
        async with doomed(stage, tmp_path, **fate) as process, asyncio.timeout(30):
            assert await process.wait() == -signal.SIGKILL
        stage.work()
        shards = await check(stage, id, again=IN_FLIGHT)
        assert len(shards) >= 2


async def test_adopted_answers_are_registered_before_their_shard_is_split(database_url, tmp_path, monkeypatch):
    """Otherwise a worker that gets a part of their lines would adopt them as well, and they would be counted twice."""
    split, registered = Queue.split, []

    async def look_first(self, *args, **kwargs):
        registered.append(await raw(self, "SELECT coalesce(sum(lines), 0) FROM batchwright.batch_segment"))
        return await split(self, *args, **kwargs)

    late = {"batches": {"checkpoint_seconds": 60.0}}
    async with staged(database_url, tmp_path, simulator=ANSWERS, **INFERENCE, **LEASE, **late) as first:
        id = await first.submit(LINES)
        fate = {"at": "batchwright.batches.journal.journal:Journal.append_all", "when": "after", "call": 5}
        async with doomed(first, tmp_path, **fate) as process, asyncio.timeout(30):
            assert await process.wait() == -signal.SIGKILL
        await raw(first.batchwright.queue, IDLE)
        monkeypatch.setattr(Queue, "split", look_first)
        parts = {"global_inference_gateway": {"url": first.simulator.url}, "batches": {"checkpoint_seconds": 1.5}}
        async with staged(database_url, tmp_path, **INFERENCE, **LEASE, **parts) as second:
            second.work()
            batch = await second.ended(id)
            told = "SELECT fields ->> 'answers' FROM batchwright.job_event WHERE event = 'batch.answers_adopted'"
            ((adopted,),) = await raw(second.batchwright.queue, told)
        assert registered
        assert all(lines >= int(adopted) >= 5 for ((lines,),) in registered)
        assert (batch.completed, batch.output_tokens) == (REQUESTS, 4 * REQUESTS)


async def test_a_batch_that_is_stopped_during_the_split_ends(database_url, tmp_path, monkeypatch):
    split, reached, go_on = Queue.split, asyncio.Event(), asyncio.Event()

    async def held(self, *args, **kwargs):
        reached.set()
        await go_on.wait()
        return await split(self, *args, **kwargs)

    monkeypatch.setattr(Queue, "split", held)
    async with staged(database_url, tmp_path, simulator=ANSWERS, **INFERENCE) as stage:
        await raw(stage.batchwright.queue, IDLE)
        stage.work()
        id = await stage.submit(LINES)
        async with asyncio.timeout(30):
            await reached.wait()
        await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant=None)
        go_on.set()
        batch = await stage.ended(id)
        assert batch.status is BatchStatus.CANCELLED
        assert batch.completed + batch.cancelled == REQUESTS


def test_a_shard_keeps_as_many_lines_as_it_gives_to_each_worker():
    class Run:
        queue = "shard/small"

        def __init__(self, spare, unsent):
            self.spare = spare
            self.sender = type("Sender", (), {"schedule": type("Schedule", (), {"unsent": unsent})})

    choose = sharing._choose_gift
    run = Run(spare=300, unsent=400)
    assert choose([Run(10, 400), run], 3) == (run, 300, 3)
    assert choose([run], 1) == (run, 200, 1)
    assert choose([Run(40, 40)], 9)[1:] == (36, 2)
    assert choose([Run(300, 30)], 1) is None
    assert choose([], 1) is None
