"""How batches end: every transition of design §5, with the partial files that each one keeps."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from batchwright.batches.output.finalize import Finalizer
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batches
from batchwright.engine.views import Views
from batchwright.engine.workers import Workers
from batchwright.errors import Conflict, JobFailed
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus, JobStatus
from tests.batches.stage import request, staged
from tests.support import raw

SLOW = SimulatorSettings(any_model=Profile(decode_rate=20.0, output_sigma=0.0, max_running=1000))
"""Four tokens take a fifth of a second."""


def codes(errors):
    return Counter(line["error"]["code"] if line["error"] else line["response"]["status_code"] for line in errors)


async def test_a_bad_line_fails_the_batch_before_anything_is_sent(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request("a"), {"custom_id": "b"}, request("a")]))
        assert batch.status is BatchStatus.FAILED
        assert [one["code"] for one in batch.errors["data"]] == [
            "missing_required_parameter",
            "missing_required_parameter",
            "missing_required_parameter",
            "duplicate_custom_id",
        ]
        assert (batch.output_file_id, batch.error_file_id, batch.total) == (None, None, 0)
        assert stage.simulator.stats()["received"] == 0


async def test_requests_that_fail_are_in_the_error_file_and_the_batch_is_completed(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        lines = [request("good"), request("bad", prompt="[[fault:400]]"), request("gone", prompt="[[fault:500]]")]
        batch = await stage.ended(await stage.submit(lines))
        assert batch.status is BatchStatus.COMPLETED
        output, errors = await stage.results(batch)
        assert [line["custom_id"] for line in output] == ["good"]
        assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [
            ("bad", 400),
            ("gone", 500),
        ]
        assert (batch.total, batch.completed, batch.failed) == (3, 1, 2)
        assert sum(n for n, _ in batch.error_summary.values()) == 2


async def test_a_batch_without_any_success_is_completed_and_has_no_output_file(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request("bad", prompt="[[fault:404]]")]))
        assert (batch.status, batch.output_file_id, batch.failed) == (BatchStatus.COMPLETED, None, 1)
        assert batch.error_file_id is not None


async def test_waiting_for_a_busy_server_uses_no_retry(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        lines = [request(f"r{n}", prompt=f"{n} [[fault:429:times=2:retry_after=0]]") for n in range(3)]
        batch = await stage.ended(await stage.submit(lines))
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 3)


async def test_at_the_deadline_answers_are_kept_and_the_other_lines_expire(database_url, tmp_path):
    slow = SimulatorSettings(any_model=Profile(decode_rate=8.0, output_sigma=0.0, max_running=10))
    async with staged(database_url, tmp_path, simulator=slow) as stage:
        id = await stage.submit([request(f"r{n}") for n in range(200)])
        await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET expires_at = now() + interval '3 seconds'")
        stage.work()
        batch = await stage.ended(id)
        late = (batch.expired_at - batch.expires_at).total_seconds()
        assert batch.status is BatchStatus.EXPIRED
        assert 0 <= late < 2.5
        output, errors = await stage.results(batch)
        assert len(output) == batch.completed > 0
        assert set(codes(errors)) == {"batch_expired", "request_aborted"}
        assert len({line["custom_id"] for line in output + errors}) == batch.total == 200
        assert batch.completed + batch.failed + batch.expired == 200
        assert codes(errors)["request_aborted"] == batch.failed


async def test_a_batch_whose_window_was_over_before_its_start_expires_without_a_request(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a")])
        await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET expires_at = now() - interval '1 second'")
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.total, batch.output_file_id) == (BatchStatus.EXPIRED, 0, None)
        assert stage.simulator.stats()["received"] == 0


async def test_a_cancelled_batch_waits_for_requests_in_flight_and_keeps_their_answers(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=SLOW) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(500)])
        await stage.until(id, lambda batch: batch.completed > 0)
        cancelling = await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default")
        assert cancelling.status is BatchStatus.CANCELLING
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert batch.status is BatchStatus.CANCELLED
        assert set(codes(errors)) == {"batch_cancelled"}
        assert len(output) == batch.completed == stage.simulator.stats()["received"]
        assert batch.cancelled == 500 - batch.completed > 0
        assert (
            await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default")
        ).status is BatchStatus.CANCELLED


async def test_after_the_grace_requests_in_flight_are_aborted(database_url, tmp_path):
    hanging = SimulatorSettings(any_model=Profile(), faults=("hang",))
    async with staged(
        database_url, tmp_path, simulator=hanging, batches={"cancel_grace_seconds": 0.5, "checkpoint_seconds": 0.1}
    ) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(5)])
        async with asyncio.timeout(20):
            while stage.simulator.stats()["in_flight"] < 5:
                await asyncio.sleep(0.02)
        await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default")
        batch = await stage.ended(id)
        assert (batch.status, batch.cancelled) == (BatchStatus.CANCELLED, 5)
        async with asyncio.timeout(5):
            while stage.simulator.stats()["in_flight"]:
                await asyncio.sleep(0.02)


async def test_a_batch_found_in_cancelling_before_its_plan_ends_cancelled(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a")])
        await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default")
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.total) == (BatchStatus.CANCELLED, 0)


@asynccontextmanager
async def held(monkeypatch, owner, name, when="before"):
    """Hold calls of this method, before or after it runs, until the event is set."""
    reached, may_go_on = asyncio.Event(), asyncio.Event()
    original = getattr(owner, name)

    async def hold(*args, **kwargs):
        answer = await original(*args, **kwargs) if when == "after" else None
        reached.set()
        await may_go_on.wait()
        return answer if when == "after" else await original(*args, **kwargs)

    monkeypatch.setattr(owner, name, hold)
    try:
        yield reached, may_go_on
    finally:
        may_go_on.set()


@pytest.mark.parametrize(("owner", "at"), [(Finalizer, "gather"), (Finalizer, "write"), (Batches, "complete")])
async def test_a_batch_that_is_cancelled_while_finalizing_ends_cancelled_with_all_its_answers(
    database_url, tmp_path, monkeypatch, owner, at
):
    async with staged(database_url, tmp_path) as stage, held(monkeypatch, owner, at) as (reached, may_go_on):
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(20)])
        async with asyncio.timeout(30):
            await reached.wait()
        assert (await stage.get(id)).status is BatchStatus.FINALIZING
        cancelling = await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default")
        assert cancelling.status is BatchStatus.CANCELLING
        may_go_on.set()
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert (batch.status, batch.completed_at) == (BatchStatus.CANCELLED, None)
        assert batch.finalizing_at < batch.cancelling_at <= batch.cancelled_at
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(20)]
        assert (errors, batch.completed, batch.failed, batch.cancelled) == ([], 20, 0, 0)
        assert stage.simulator.stats()["received"] == 20
        job = await stage.batchwright.get(batch.job_id)
        assert (job.status, job.result) == (JobStatus.SUCCEEDED, None), (
            "the job succeeds; only the batch says how it ended"
        )
        assert (await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default")) == batch


async def test_a_cancellation_during_the_commit_of_the_end_waits_for_it_and_is_refused(
    database_url, tmp_path, monkeypatch
):
    async with (
        staged(database_url, tmp_path) as stage,
        held(monkeypatch, Batches, "complete", "after") as (reached, may_go_on),
    ):
        stage.work()
        id = await stage.submit([request("a")])
        async with asyncio.timeout(30):
            await reached.wait()
            cancelling = asyncio.create_task(stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default"))
            waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            while not await raw(stage.batchwright.queue, waiting):
                assert not cancelling.done()
                await asyncio.sleep(0.01)
        may_go_on.set()
        with pytest.raises(Conflict, match="Cannot cancel a batch with status 'completed'"):
            await cancelling
        batch = await stage.ended(id)
        assert (batch.status, batch.completed, batch.cancelling_at) == (BatchStatus.COMPLETED, 1, None)


async def test_an_ended_batch_cannot_be_cancelled_or_paused(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        id = await stage.submit([request("a")])
        await stage.ended(id)
        with pytest.raises(Conflict, match="Cannot cancel a batch with status 'completed'"):
            await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default")
        with pytest.raises(Conflict, match="Cannot pause a batch with status 'completed'"):
            await stage.batchwright.part(BatchesPart).batches.pause(id, tenant="default")


async def test_a_paused_batch_sends_nothing_until_it_is_resumed(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=SLOW) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(300)])
        await stage.until(id, lambda batch: batch.completed > 0)
        await stage.batchwright.part(BatchesPart).batches.pause(id, tenant="default")
        sql = "SELECT status::text FROM batchwright.job WHERE parent_job_id IS NOT NULL"
        async with asyncio.timeout(10):
            while await raw(stage.batchwright.queue, sql) != [("QUEUED",)]:
                await asyncio.sleep(0.02)
        before = stage.simulator.stats()["received"]
        paused = await stage.get(id)
        assert (paused.status, paused.completed) == (BatchStatus.IN_PROGRESS, before)
        assert paused.paused_at is not None
        await stage.batchwright.part(BatchesPart).batches.resume(id, tenant="default")
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 300)
        assert stage.simulator.asked(over=1)["requests"] == {}


async def test_unlisted_models_become_error_lines_where_each_model_has_its_gateway(database_url, tmp_path):
    async with staged(database_url, tmp_path) as first:
        url = first.simulator.url
        async with staged(database_url, tmp_path, model_gateways={"small": {"url": url}}) as stage:
            stage.work()
            lines = [request("a"), request("b", model="unknown"), request("c")]
            batch = await stage.ended(await stage.submit(lines))
            output, errors = await stage.results(batch)
            assert [line["custom_id"] for line in output] == ["a", "c"]
            assert codes(errors) == {"model_not_found": 1}
            assert (batch.status, batch.total, batch.failed) == (BatchStatus.COMPLETED, 3, 1)


async def test_workers_may_have_different_models_whichever_of_them_plans(database_url, tmp_path):
    async with staged(database_url, tmp_path) as backend:
        here = {"url": backend.simulator.url}
        async with (
            staged(database_url, tmp_path, model_gateways={"one": here}) as first,
            staged(database_url, tmp_path, model_gateways={"two": here}) as second,
        ):
            for stage in (first, second):
                stage.work()
            async with asyncio.timeout(20):
                while len(await first.batchwright.part(BatchesPart).batches.served_queues()) < 2:
                    await asyncio.sleep(0.02)
            lines = [request(model, model=model) for model in ("one", "two", "none")]
            batch = await first.ended(await first.submit(lines))
            output, errors = await first.results(batch)
            assert [line["custom_id"] for line in output] == ["one", "two"]
            assert codes(errors) == {"model_not_found": 1}


@pytest.mark.parametrize("how", ["left", "stopping"])
async def test_a_model_whose_only_worker_restarts_is_still_known(database_url, tmp_path, how):
    async with staged(database_url, tmp_path) as backend:
        here = {"url": backend.simulator.url}
        async with (
            staged(database_url, tmp_path, model_gateways={"one": here}) as first,
            staged(database_url, tmp_path, model_gateways={"two": here}) as second,
        ):
            if how == "left":
                worker = second.work()
                await worker.started.wait()
                worker.stop()
                await second.workers.pop()[1]
            else:
                await second.batchwright.worker().register()
                await raw(first.batchwright.queue, "UPDATE batchwright.worker SET stopping_at = now()")
            first.work()
            id = await first.submit([request(model, model=model) for model in ("one", "two", "none")])
            await first.until(id, lambda batch: batch.completed == 1)
            second.work()
            batch = await first.ended(id)
            output, errors = await first.results(batch)
            assert [line["custom_id"] for line in output] == ["one", "two"]
            assert codes(errors) == {"model_not_found": 1}


async def test_a_worker_that_left_is_not_listed_and_its_models_are_forgotten_after_minutes(queue, clock):
    """The time is the database's."""
    await clock.advance(queue, 0)
    served = {"on_demand_types": ["batch.shard"], "on_demand_queues": ["batches", "shard/two"]}
    names = {"id": "w", "host": "h", "pid": 1, "version": "0", "queues": None, "operations": ["batch.shard"]}
    await Workers(queue.database).register(**names, concurrency=7, **served)
    await Workers(queue.database).leave("w")
    batches = Batches(queue)
    assert await batches.served_queues() == {"shard/two"}
    assert await Views(queue).workers() == []
    await clock.advance(queue, 299)
    assert await batches.served_queues() == {"shard/two"}
    await clock.advance(queue, 2)
    assert await batches.served_queues() == set()
    assert await Workers(queue.database).remove_dead(300.0) == 1


async def test_if_another_worker_serves_any_model_no_model_is_unknown(database_url, tmp_path):
    async with staged(database_url, tmp_path, model_gateways={"one": {"url": "http://127.0.0.1:9"}}) as stage:
        queues = {"queues": [], "on_demand_types": ["batch.shard"], "on_demand_queues": ["shard/"]}
        await Workers(stage.batchwright.queue.database).register(
            id="w", host="h", pid=1, version="0", operations=["batch.shard"], concurrency=1, **queues
        )
        stage.work()
        batch = await stage.until(await stage.submit([request("a")]), lambda batch: batch.models is not None)
        assert (batch.status, batch.models) == (BatchStatus.IN_PROGRESS, ["small"])


async def test_two_workers_share_one_batch(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=SLOW) as stage:
        first, second = stage.work(), stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(3500)])
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 3500)
        sql = (
            "SELECT DISTINCT worker FROM batchwright.job_event AS event JOIN batchwright.job ON job.id = event.job_id "
            "WHERE event.event = 'job.started' AND job.job_type = 'batch.shard'"
        )
        assert {worker for (worker,) in await raw(stage.batchwright.queue, sql)} == {first.id, second.id}
        assert stage.simulator.asked(over=1)["requests"] == {}


async def test_after_a_graceful_stop_the_next_worker_does_the_rest_and_no_request_is_sent_twice(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=SLOW) as stage:
        first = stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(400)])
        await stage.until(id, lambda batch: batch.completed > 0)
        first.stop()
        _, task = stage.workers.pop()
        await task
        assert (await stage.get(id)).status is BatchStatus.IN_PROGRESS
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 400)
        assert stage.simulator.asked(over=1)["requests"] == {}


async def test_a_retry_repeats_only_what_failed(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        lines = [request(f"r{n}", prompt=f"{n} [[fault:400:times=1]]" if n % 4 == 0 else f"{n}") for n in range(20)]
        first = await stage.ended(await stage.submit(lines))
        assert (first.completed, first.failed) == (15, 5)
        again = await stage.repeat(first)
        batch = await stage.ended(again)
        output, _ = await stage.results(batch)
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(0, 20, 4)]
        assert (batch.status, batch.total, batch.retry_of, batch.family) == (
            BatchStatus.COMPLETED,
            5,
            first.id,
            first.id,
        )


async def test_a_retry_by_an_error_code_of_the_server_repeats_the_lines_with_that_code(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        faults = {1: "[[fault:400:times=1]]", 2: "[[fault:404:times=1]]"}
        first = await stage.ended(
            await stage.submit([request(f"r{n}", prompt=f"{n} {faults.get(n, '')}") for n in range(4)])
        )
        (code,) = [code for code, (_, sample) in first.error_summary.items() if sample == "r1"]
        assert not code.startswith("http_"), "the simulator sends an error code, as servers do"
        batch = await stage.ended(await stage.repeat(first, [code]))
        output, errors = await stage.results(batch)
        assert ([line["custom_id"] for line in output], errors, batch.total) == (["r1"], [], 1)


async def test_jobs_that_a_user_enqueues_for_a_batch_by_hand_do_nothing(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=SLOW, inference={"concurrency": 10}) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(100)])
        await stage.until(id, lambda batch: batch.completed > 0)
        shard = {"batch_id": id, "model": "small", "number": 7, "start": 0, "count": 100}
        for job_type, payload in (("batch.process", {"batch_id": id}), ("batch.shard", shard)):
            job = await stage.batchwright.enqueue(job_type, payload, queue=None if shard != payload else "shard/small")
            with pytest.raises(JobFailed, match=f"belongs to {id}"):
                await stage.batchwright.wait(job, timeout=20)
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 100)
        assert stage.simulator.asked(over=1)["count"] == 0


async def test_a_batch_whose_job_is_gone_fails_and_says_so(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([request("a")])
        await raw(stage.batchwright.queue, "DELETE FROM batchwright.job")
        stage.work()
        batch = await stage.ended(id)
        assert batch.status is BatchStatus.FAILED
        assert batch.errors["data"][0]["code"] == "system_error"
        assert batch.errors["data"][0]["message"].endswith("nothing was sent.")


async def test_an_input_that_is_deleted_while_the_batch_runs_is_read_to_the_end(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=SLOW) as stage:
        id = await stage.submit([request(f"r{n}") for n in range(50)])
        stage.work()
        batch = await stage.until(id, lambda batch: batch.completed > 0)
        await stage.batchwright.part(BatchesPart).files.delete(batch.input_file_id, tenant="default")
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 50)
