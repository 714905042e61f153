"""Many batches at once on a slow database, lines without an answer, and batches beside other jobs."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from batchwright.batches.part import BatchesPart
from batchwright.batches.runtime import COORDINATORS_MAX, Runtime
from batchwright.batches.send.shard import ShardRun
from batchwright.batches.store import RESENDS_MAX, Batches
from batchwright.engine.outcomes import Done
from batchwright.operations.decorator import operation
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from tests.batches.stage import request, staged
from tests.support import raw

SLOWLY = SimulatorSettings(any_model=Profile(decode_rate=50.0, output_sigma=0.0, max_running=1000))


async def test_a_batch_that_begins_while_controls_are_read_is_not_taken_for_a_lost_one(
    database_url, tmp_path, monkeypatch
):
    """Twenty batches begin one after the other, while each reading of the controls takes nearly half a second."""
    controls = Batches.controls

    async def slowly(self, ids):
        found = await controls(self, ids)
        await asyncio.sleep(0.4 if len(ids) > 1 else 0.0)
        return found

    monkeypatch.setattr(Batches, "controls", slowly)
    chance = Random(1)
    async with staged(database_url, tmp_path, simulator=SLOWLY) as stage:
        stage.work()
        ids = []
        for _ in range(20):
            ids.append(await stage.submit([request(f"{len(ids)}-{n}") for n in range(20)]))
            await asyncio.sleep(chance.uniform(0.0, 0.1))
        batches = [await stage.ended(id) for id in ids]
        assert [(batch.status, batch.completed) for batch in batches] == [(BatchStatus.COMPLETED, 20)] * 20
        assert stage.simulator.asked(over=1)["count"] == 0
        assert {batch.resends for batch in batches} == {0}


async def test_a_shard_that_was_wrongly_taken_for_lost_is_run_again(database_url, tmp_path, monkeypatch):
    controls, looks = Batches.controls, 0

    async def forgetful(self, ids):
        nonlocal looks
        found = await controls(self, ids)
        looks += 1
        return {} if looks == 2 else found

    monkeypatch.setattr(Batches, "controls", forgetful)
    async with staged(database_url, tmp_path, simulator=SLOWLY, inference={"concurrency": 10}) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request(f"r{n}") for n in range(60)]))
        assert (batch.status, batch.completed, batch.resends) == (BatchStatus.COMPLETED, 60, 0)
        assert looks > 2
        assert stage.simulator.asked(over=1)["count"] <= 10


# Lines without an answer --------------------------------------------------------------------------------------------


async def test_only_lines_that_a_shard_did_not_send_are_resent(database_url, tmp_path, monkeypatch):
    send, sends = ShardRun._send, 0

    async def half_of_it(self, pending, control):
        nonlocal sends
        sends += 1
        await send(self, pending[::2] if sends <= 2 else pending, control)

    monkeypatch.setattr(ShardRun, "_send", half_of_it)
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        models = ["one", "two", "three"]
        batch = await stage.ended(await stage.submit([request(f"r{n}", model=models[n % 3]) for n in range(30)]))
        output, errors = await stage.results(batch)
        assert (batch.status, batch.resends, errors) == (BatchStatus.COMPLETED, 1, [])
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(30)]
        assert stage.simulator.asked(over=1)["count"] == 0
        assert (sends, batch.completed, batch.usage_by_model.keys()) == (5, 30, set(models))
        sql = "SELECT message FROM batchwright.job_event WHERE event = 'batch.lines_resent'"
        assert await raw(stage.batchwright.queue, sql) == [("10 lines had no answer, and are resent",)]
        counted = stage.batchwright.part(BatchesPart).runtime.dispatcher.counts._counts
        assert counted.total("batch_lines_resent_total") == 10


async def test_a_batch_whose_lines_never_get_an_answer_fails_and_says_so(database_url, tmp_path, monkeypatch):
    runs = 0

    async def nothing(*_):
        nonlocal runs
        runs += 1
        return Done()

    monkeypatch.setattr(ShardRun, "_run", nothing)
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request("a")]))
        _, errors = await stage.results(batch)
        assert (batch.status, batch.errors["data"][0]["code"]) == (BatchStatus.FAILED, "answers_missing")
        assert [line["error"]["code"] for line in errors] == ["batch_failed"]
        assert (batch.resends, runs) == (RESENDS_MAX, RESENDS_MAX + 1)


@pytest.mark.parametrize(("how", "status"), [("cancel", BatchStatus.CANCELLED), ("deadline", BatchStatus.EXPIRED)])
async def test_a_batch_that_resends_lines_can_be_cancelled_and_expires(
    database_url, tmp_path, monkeypatch, how, status
):
    send, sends = ShardRun._send, 0

    async def none_of_it(self, pending, control):
        nonlocal sends
        sends += 1
        await send(self, [] if sends == 1 else pending, control)

    monkeypatch.setattr(ShardRun, "_send", none_of_it)
    hanging = SimulatorSettings(any_model=Profile(), faults=("hang",))
    async with staged(database_url, tmp_path, simulator=hanging, batches={"cancel_grace_seconds": 0.1}) as stage:
        stage.work()
        id = await stage.submit([request("a")])
        await stage.until(id, lambda batch: batch.resends == 1 and batch.status is BatchStatus.IN_PROGRESS)
        if how == "cancel":
            await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant=None)
        else:
            await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET expires_at = now()")
        batch = await stage.ended(id)
        assert (batch.status, batch.total, batch.done) == (status, 1, 1)


# Other work in the same worker --------------------------------------------------------------------------------------


async def test_batches_are_planned_cancelled_and_ended_while_long_jobs_of_users_fill_the_worker(database_url, tmp_path):
    release = asyncio.Event()

    @operation("linger", max_attempts=1)
    async def linger() -> None:
        await release.wait()

    hanging = SimulatorSettings(any_model=Profile(decode_rate=1000.0), faults=("hang:1:match=hang",))
    parts = {"worker": {"concurrency": 2, "stop_grace_seconds": 5.0}, "batches": {"cancel_grace_seconds": 0.1}}
    async with staged(database_url, tmp_path, simulator=hanging, **parts) as stage:
        stage.batchwright.operations.add(linger)
        for _ in range(6):
            await stage.batchwright.enqueue(linger)
        stage.work()
        busy = "SELECT count(*) FROM batchwright.job WHERE job_type = 'linger' AND status = 'RUNNING'"
        async with asyncio.timeout(20):
            while await raw(stage.batchwright.queue, busy) != [(2,)]:
                await asyncio.sleep(0.02)
        done = await stage.ended(await stage.submit([request("a")]), 20)
        cancelled, late = [await stage.submit([request("b", prompt="hang")]) for _ in range(2)]
        await stage.until(late, lambda batch: batch.status is BatchStatus.IN_PROGRESS)
        await stage.batchwright.part(BatchesPart).batches.cancel(cancelled, tenant=None)
        sql = "UPDATE batchwright.batch SET expires_at = now() WHERE id = %(id)s"
        await raw(stage.batchwright.queue, sql, id=late)
        statuses = [done.status, *[(await stage.ended(id, 20)).status for id in (cancelled, late)]]
        assert statuses == [BatchStatus.COMPLETED, BatchStatus.CANCELLED, BatchStatus.EXPIRED]
        assert await raw(stage.batchwright.queue, busy) == [(2,)], "batches take no slots from the jobs"
        release.set()


@pytest.mark.thorough
async def test_with_more_batches_than_a_worker_plans_at_once_the_next_ones_do_not_wait_for_the_poller(
    database_url, tmp_path
):
    async with staged(database_url, tmp_path, worker={"poll_seconds_max": 10.0}) as stage:
        ids = [await stage.submit([request(f"{n}")]) for n in range(3 * COORDINATORS_MAX)]
        stage.work()
        async with asyncio.timeout(30):
            batches = [await stage.ended(id) for id in ids]
        assert {batch.status for batch in batches} == {BatchStatus.COMPLETED}


async def test_the_jobs_a_worker_takes_on_demand_are_limited_and_only_from_its_queues(database_url, tmp_path):
    async with staged(database_url, tmp_path, worker={"queues": ["batches", "mail"]}) as stage:
        stage.batchwright.worker()
        runtime: Runtime = stage.batchwright.part(BatchesPart).runtime
        assert runtime.serves("batches")
        assert not runtime.serves("mail")
        assert not runtime.serves("webhooks")
        assert [runtime.wanted("batches", 5, n) for n in (0, COORDINATORS_MAX - 1, COORDINATORS_MAX + 1)] == [
            COORDINATORS_MAX,
            1,
            0,
        ]
        runtime.dispatcher.limits.total.note_broken("given back twice")
        assert runtime.wanted("batches", 5, 0) == 0
        await runtime.close()
