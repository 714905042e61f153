"""The metrics of batches: names, labels and values of llm-d's batch gateway, exact sums, and gauges of live workers."""

import asyncio
import sys
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchwright.batches import metrics
from batchwright.batches.metrics import (
    BATCH_METRICS,
    MODELS_MAX,
    OWN_METRICS,
    BatchCounts,
    Load,
    label_limits,
    load_of,
    size_bucket,
)
from batchwright.batches.part import BatchesPart
from batchwright.batches.send.disk import Disk
from batchwright.batches.send.dispatch import Dispatcher
from batchwright.batches.store import Batches
from batchwright.engine.exposition import Exposition, process_counts
from batchwright.engine.metrics import CountsWriter, WorkerCounts
from batchwright.engine.queue import Queue
from batchwright.engine.workers import Workers
from batchwright.errors import DatabaseUnavailable, Deadlock
from batchwright.inference.answers import Failure, Reply, classify
from batchwright.inference.gateway import Gateways
from batchwright.inference.limits import Limits
from batchwright.inference.settings import GatewaySettings, InferenceSettings
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from batchwright.storage.metrics import STORAGE_METRICS
from batchwright.telemetry.metrics import series
from tests.batches.stage import request, staged
from tests.batches.test_recovery import LEASE, doomed
from tests.support import raw

METRICS = (*BATCH_METRICS, *STORAGE_METRICS)
BATCH_GATEWAY = {
    "jobs_processed_total": ("counter", "result", "reason"),
    "job_processing_duration_seconds": ("histogram", "size_bucket"),
    "job_queue_wait_duration_seconds": ("histogram",),
    "total_workers": ("gauge",),
    "active_workers": ("gauge",),
    "processor_inflight_requests": ("gauge",),
    "processor_max_inflight_concurrency": ("gauge",),
    "model_inflight_requests": ("gauge", "model"),
    "plan_build_duration_seconds": ("histogram", "size_bucket"),
    "model_request_execution_duration_seconds": ("histogram", "model"),
    "request_errors_by_model_total": ("counter", "model"),
    "file_storage_operations_total": ("counter", "operation", "component", "status"),
    "batch_request_prompt_tokens_total": ("counter", "model"),
    "batch_request_generation_tokens_total": ("counter", "model"),
    "batch_job_e2e_latency_seconds": ("histogram", "status"),
    "batch_cancellation_total": ("counter", "phase"),
    "batch_startup_recovery_total": ("counter", "status", "action"),
}


def answer(status=200, body=b'{"choices": [1]}', seconds=1.0, failure=None):
    return classify(Reply(status=None if failure else status, body=body, seconds=seconds, failure=failure), now=0.0)


def usage(prompt, generated):
    return b'{"choices": [1], "usage": {"prompt_tokens": %d, "completion_tokens": %d}}' % (prompt, generated)


def load(**given):
    return Load(
        **{"shards": 0, "shards_max": 0, "requests": 0, "requests_max": 0, "in_flight": {}, "limits": {}, **given}
    )


@pytest.fixture
def counts():
    return WorkerCounts(BATCH_METRICS)


@pytest.fixture
def batches(counts):
    return BatchCounts(counts)


def numbers(counts, name):
    return series(counts.flat()).get(name, {})


def spread(counts, name):
    """The values of a histogram by labels: their number and their sum."""
    found = {}
    for (*labels, place), n in numbers(counts, name).items():
        many, total = found.get(tuple(labels), (0, 0.0))
        found[tuple(labels)] = (many, total + n) if place == "sum" else (many + n, total)
    return found


async def page(queue, models=()):
    """The samples by name and label values, in the order of the labels' names; and the metric families."""
    exposition = Exposition(queue.database, process_counts(), more=METRICS, label_limits=label_limits(models))
    families = {one.name: one for one in text_string_to_metric_families((await exposition.render()).decode())}
    samples = {
        (sample.name, *sample.labels.values()): sample.value for one in families.values() for sample in one.samples
    }
    return samples, families


async def living(queue, name, models=()):
    """The counts of a registered worker, and the writer of its row."""
    columns = {"host": "h", "pid": 1, "version": "0", "queues": None, "operations": [], "concurrency": 1}
    await Workers(queue.database).register(id=name, **columns)
    counts = WorkerCounts(BATCH_METRICS, label_limits(models))
    return BatchCounts(counts), CountsWriter(queue.database, name, counts)


# Names --------------------------------------------------------------------------------------------------------------


def test_every_metric_of_the_batch_gateway_is_there_by_its_name_and_labels():
    named = {one.full_name: (one.kind, *one.labels) for one in METRICS if one not in OWN_METRICS}
    assert named == BATCH_GATEWAY
    assert all(one.full_name.startswith("batchwright_") for one in OWN_METRICS)


async def test_the_page_shows_every_metric(queue):
    _, families = await page(queue)
    for metric in METRICS:
        family = families[metric.full_name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation.startswith(metric.help)


@pytest.mark.parametrize(
    ("requests", "bucket"),
    [
        (0, "100"),
        (99, "100"),
        (100, "1000"),
        (999, "1000"),
        (1_000, "10000"),
        (9_999, "10000"),
        (10_000, "30000"),
        (29_999, "30000"),
        (30_000, "large"),
        (50_000, "large"),
    ],
)
def test_sizes_fall_into_the_buckets_of_llm_ds_gateway(requests, bucket):
    assert size_bucket(requests) == bucket


async def test_series_that_alerts_may_watch_are_zero_before_anything_happens(queue):
    samples, _ = await page(queue)
    assert samples["jobs_processed_total", "system_error", "failed"] == 0
    assert samples["batch_cancellation_total", "finalizing"] == 0
    assert samples["file_storage_operations_total", "apiserver", "store", "exhausted"] == 0
    batches, row = await living(queue, "w1")
    batches.ended("failed", "system_error", total=10, seconds=5.0, since_created=9.0)
    await row.write()
    samples, _ = await page(queue)
    assert samples["jobs_processed_total", "system_error", "failed"] == 1
    assert samples["jobs_processed_total", "none", "success"] == 0


# Requests -----------------------------------------------------------------------------------------------------------


def test_answers_are_counted_with_their_time_and_tokens(counts, batches):
    batches.answered("a", answer(body=usage(10, 3), seconds=0.5))
    batches.answered("a", answer(body=usage(20, 4), seconds=1.5))
    batches.answered("b", answer(seconds=2.0))
    assert spread(counts, "model_request_execution_duration_seconds") == {("a",): (2, 2.0), ("b",): (1, 2.0)}
    assert numbers(counts, "batch_request_prompt_tokens_total") == {("a",): 30, ("b",): 0}
    assert numbers(counts, "batch_request_generation_tokens_total") == {("a",): 7, ("b",): 0}
    assert numbers(counts, "request_errors_by_model_total") == {("a",): 0, ("b",): 0}


@pytest.mark.parametrize(
    "bad",
    [
        answer(404, b'{"error": {}}'),
        answer(500, b'{"error": {}}'),
        answer(200, b"no JSON"),
        answer(200, b'{"error": {}}'),
        answer(failure=Failure.DEADLINE),
    ],
)
def test_an_unusable_answer_counts_as_an_error_of_its_model(counts, batches, bad):
    batches.answered("a", bad)
    batches.answered("a", answer())
    assert numbers(counts, "request_errors_by_model_total") == {("a",): 1}
    assert spread(counts, "model_request_execution_duration_seconds")[("a",)][0] == 2


def test_counting_keeps_no_reference_to_the_answer(batches):
    held = answer(body=usage(1, 1))
    before = sys.getrefcount(held), sys.getrefcount(held.body)
    batches.answered("a", held)
    batches.retried("a", held)
    assert (sys.getrefcount(held), sys.getrefcount(held.body)) == before


def test_noted_durations_are_counted_before_the_list_grows_large(counts, batches, monkeypatch):
    monkeypatch.setattr(metrics, "_NOTED_MAX", 10)
    for _ in range(25):
        batches.answered("a", answer(seconds=2.0))
        assert len(batches._tallies.get("a", metrics._Tally()).seconds) < 10
    assert spread(counts, "model_request_execution_duration_seconds") == {("a",): (25, 50.0)}


@pytest.mark.parametrize(
    ("repeated", "reason"),
    [
        (answer(429, b'{"error": {}}'), "429"),
        (answer(503, b"<html>busy</html>"), "503"),
        (answer(500, b'{"error": {}}'), "500"),
        (answer(200, b"no JSON"), "invalid_response"),
        (answer(200, b'{"error": {}}'), "error_in_response"),
        (answer(failure=Failure.CONNECT), "connection_failed"),
        (answer(failure=Failure.TIMEOUT), "request_timeout"),
    ],
)
def test_retries_are_counted_by_status_or_error(counts, batches, repeated, reason):
    batches.retried("a", repeated)
    batches.retried("a", repeated)
    assert numbers(counts, "batch_retries_total") == {("a", reason): 2}
    assert numbers(counts, "request_errors_by_model_total") == {}, "only a final answer counts as an error"
    assert numbers(counts, "batch_retries_total") == {("a", reason): 2}, "reading does not count again"


def test_registered_answers_are_summed(counts, batches):
    batches.registered(256)
    batches.registered(4)
    assert numbers(counts, "batch_answers_registered_total") == {(): 260}


# Batches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason", "result"),
    [
        ("completed", "none", "success"),
        ("cancelled", "none", "success"),
        ("failed", "system_error", "failed"),
        ("failed", "none", "failed"),
        ("expired", "expired_execution", "expired"),
    ],
)
def test_an_ending_is_counted_with_its_result_and_its_times(counts, batches, status, reason, result):
    batches.ended(status, reason, total=5_000, seconds=60.0, since_created=90.0)
    assert numbers(counts, "jobs_processed_total") == {(result, reason): 1}
    assert spread(counts, "job_processing_duration_seconds") == {("10000",): (1, 60.0)}
    assert spread(counts, "batch_job_e2e_latency_seconds") == {(status,): (1, 90.0)}


def test_a_batch_that_no_worker_started_has_no_processing_time(counts, batches):
    batches.ended("expired", "expired_dequeue", total=0, seconds=0.0, since_created=90.0)
    assert numbers(counts, "jobs_processed_total") == {("expired", "expired_dequeue"): 1}
    assert spread(counts, "job_processing_duration_seconds") == {}
    assert spread(counts, "batch_job_e2e_latency_seconds") == {("expired",): (1, 90.0)}


def test_a_batch_that_has_not_ended_cannot_be_counted_as_ended(batches):
    with pytest.raises(KeyError):
        batches.ended("in_progress", "none", total=1, seconds=1.0, since_created=1.0)


def test_events_of_batches_are_counted_with_their_labels(counts, batches):
    batches.waited(3.0)
    batches.planned(99, 0.25)
    batches.recovered("in_progress", "resumed")
    batches.recovered("in_progress", "resumed")
    batches.given_back("guard_shutdown")
    batches.skipped("not_runnable_state")
    batches.cancelled("queued")
    assert spread(counts, "job_queue_wait_duration_seconds") == {(): (1, 3.0)}
    assert spread(counts, "plan_build_duration_seconds") == {("100",): (1, 0.25)}
    assert numbers(counts, "batch_startup_recovery_total") == {("in_progress", "resumed"): 2}
    assert numbers(counts, "jobs_processed_total") == {
        ("re_enqueued", "guard_shutdown"): 1,
        ("skipped", "not_runnable_state"): 1,
    }
    assert numbers(counts, "batch_cancellation_total") == {("queued",): 1}


async def test_counts_are_summed_over_workers_and_kept_after_their_end(queue, clock):
    await clock.advance(queue, 0)
    for name in ("w1", "w2"):
        batches, row = await living(queue, name)
        batches.ended("completed", "none", total=10, seconds=5.0, since_created=9.0)
        batches.answered("a", answer(body=usage(10, 1), seconds=0.3))
        await row.write()
    await clock.advance(queue, 61)
    samples, _ = await page(queue)
    assert samples["batchwright_workers",] == 0
    assert samples["jobs_processed_total", "none", "success"] == 2
    assert samples["batch_request_prompt_tokens_total", "a"] == 20
    assert samples["model_request_execution_duration_seconds_count", "a"] == 2
    assert samples["job_processing_duration_seconds_bucket", "5.0", "100"] == 2


# Load ---------------------------------------------------------------------------------------------------------------


async def test_the_load_is_summed_over_live_processes(queue, clock):
    await clock.advance(queue, 0)
    given = {
        "dead": load(shards=9, shards_max=99, requests=9, requests_max=99, in_flight={"a": 9}, limits={"a": 9}),
        "w1": load(shards=2, shards_max=256, requests=7, requests_max=100, in_flight={"a": 5, "b": 2}, limits={"a": 8}),
        "w2": load(shards=1, shards_max=256, requests=4, requests_max=50, in_flight={"a": 4}, limits={"a": 4, "b": 10}),
    }
    for name, one in given.items():
        batches, row = await living(queue, name)
        batches.watch(lambda one=one: one)
        await row.write()
        await clock.advance(queue, 61 if name == "dead" else 0)
    samples, _ = await page(queue)
    assert (samples["total_workers",], samples["active_workers",]) == (512, 3)
    assert (samples["processor_inflight_requests",], samples["processor_max_inflight_concurrency",]) == (11, 150)
    assert (samples["model_inflight_requests", "a"], samples["model_inflight_requests", "b"]) == (9, 2)
    assert (samples["batchwright_model_limit", "a"], samples["batchwright_model_limit", "b"]) == (12, 10)


async def test_the_load_is_read_at_each_write(queue):
    batches, row = await living(queue, "w1")
    requests = iter([3, 3, 0, 0])
    batches.watch(lambda: load(requests=next(requests)))
    for expected in (3, 0):
        await row.write()
        samples, _ = await page(queue)
        assert samples["processor_inflight_requests",] == expected


async def test_a_process_without_batches_has_no_gauges(queue):
    _, row = await living(queue, "w1")
    await row.write()
    assert await queue.database.rows("SELECT gauges FROM batchwright.worker") == [(None,)]
    samples, _ = await page(queue)
    assert samples["total_workers",] == 0


async def test_the_load_of_a_dispatcher_is_read_from_its_limits(tmp_path):
    gateways = Gateways(GatewaySettings(url="http://127.0.0.1:9"), {})
    dispatcher = Dispatcher(gateways, Limits(InferenceSettings(concurrency=40)), BatchCounts(), Disk(tmp_path))
    sender = dispatcher._sender("a")
    assert dispatcher.limits.total.take_now(3, "a")
    found = load_of(dispatcher, shards=2, shards_max=256)
    assert found == load(
        shards=2,
        shards_max=256,
        requests=3,
        requests_max=40,
        in_flight={"a": 0},
        limits={"a": sender.limit.adaptive.limit},
    )
    assert found.limits["a"] == 10
    dispatcher.limits.total.note_broken("given back twice")
    assert load_of(dispatcher, shards=2, shards_max=256).shards_max == 0, "it takes no more shards"
    await dispatcher.close()


# Models -------------------------------------------------------------------------------------------------------------


async def test_configured_models_and_the_first_other_ones_have_series_of_their_own(queue):
    configured = [f"configured {n}" for n in range(150)]
    batches, row = await living(queue, "w1", configured)
    others = [f"other {n:03}" for n in range(MODELS_MAX + 20)]
    for model in (*others, *configured):
        batches.answered(model, answer(body=usage(1, 1)))
    batches.watch(lambda: load(in_flight=dict.fromkeys((*others, *configured), 1)))
    await row.write()
    samples, _ = await page(queue, configured)
    for name in ("batch_request_prompt_tokens_total", "model_inflight_requests"):
        found = {key[1]: n for key, n in samples.items() if key[0] == name}
        assert found == dict.fromkeys((*configured, *others[:MODELS_MAX]), 1) | {"other": 20}


async def test_processes_count_a_model_under_the_same_name(queue):
    models = [f"m{n:03}" for n in range(MODELS_MAX + 50)]
    for name, asked in (("w1", models), ("w2", models[::-1])):
        batches, row = await living(queue, name)
        await row.learn()
        for model in asked:
            batches.answered(model, answer(body=usage(1, 1)))
        await row.write()
    samples, _ = await page(queue)
    found = {key[1]: n for key, n in samples.items() if key[0] == "batch_request_prompt_tokens_total"}
    assert found == dict.fromkeys(models[:MODELS_MAX], 2) | {"other": 100}


# Whole batches ------------------------------------------------------------------------------------------------------


async def scraped(stage):
    """The samples of /metrics, once the workers have written their last counts."""
    for worker, _ in stage.workers:
        worker.stop()
    for _, task in stage.workers:
        await task
    server = await stage.batchwright.server()
    server.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            page = (await http.get(f"{server.url}/metrics")).text
    finally:
        await server.close()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {(one.name, *sorted(one.labels.values())): one.value for one in samples if one.value}


async def test_every_ending_is_counted_once_and_only_when_it_is_committed(database_url, tmp_path, monkeypatch):
    """The first commit of each ending fails with a deadlock, and once the answer to a commit is lost."""
    hanging = SimulatorSettings(any_model=Profile(decode_rate=1000.0), faults=("hang:1:match=hang",))
    succeed_with, tries = Queue.succeed_with, Counter()

    async def troubled(self, settle, worker, *, write, then):
        tries[settle.claim.id] += 1
        await succeed_with(self, settle, worker, write=write, then=then)
        if settle.claim.job_type == "batch.process" and tries[settle.claim.id] == 1:
            raise DatabaseUnavailable("the answer is lost")

    end = Batches._end

    async def victim(self, verb, id, ending, session):
        status = await end(self, verb, id, ending, session)
        tries[id] += 1
        if tries[id] == 1:
            raise Deadlock("another one was chosen")
        return status

    monkeypatch.setattr(Queue, "succeed_with", troubled)
    monkeypatch.setattr(Batches, "_end", victim)
    async with staged(database_url, tmp_path, simulator=hanging, batches={"cancel_grace_seconds": 0.1}) as stage:
        stage.work()
        batches = stage.batchwright.part(BatchesPart).batches
        await stage.ended(await stage.submit([request("a")]))
        await stage.ended(await stage.submit(b"no json\n"))
        late, cancelled = [await stage.submit([request("b", prompt="hang")]) for _ in range(2)]
        for id in (late, cancelled):
            await stage.until(id, lambda batch: batch.status is BatchStatus.IN_PROGRESS)
        await raw(batches.queue, "UPDATE batchwright.batch SET expires_at = now() WHERE id = %(id)s", id=late)
        await batches.cancel(cancelled, tenant=None)
        for id in (late, cancelled):
            await stage.ended(id)
        found = await scraped(stage)
    processed = {key[1:]: n for key, n in found.items() if key[0] == "jobs_processed_total"}
    assert processed == {
        ("none", "success"): 2,
        ("failed", "none"): 1,
        ("expired", "expired_execution"): 1,
    }
    assert {key[1:]: n for key, n in found.items() if key[0] == "batch_cancellation_total"} == {("in_progress",): 1}
    lived = {key[1:]: n for key, n in found.items() if key[0] == "batch_job_e2e_latency_seconds_count"}
    assert lived == {("completed",): 1, ("failed",): 1, ("expired",): 1, ("cancelled",): 1}
    assert not [key for key in found if key[0] == "batch_startup_recovery_total"]


async def test_cancelled_and_expired_batches_are_counted_by_phase(database_url, tmp_path, monkeypatch):
    finalize = Batches.finalize

    async def then_cancel(self, id):
        moved = await finalize(self, id)
        await self.cancel(id, tenant=None)
        return moved

    monkeypatch.setattr(Batches, "finalize", then_cancel)
    async with staged(database_url, tmp_path) as stage:
        batches = stage.batchwright.part(BatchesPart).batches
        queued, late = [await stage.submit([request("a")]) for _ in range(2)]
        await batches.cancel(queued, tenant=None)
        await raw(batches.queue, "UPDATE batchwright.batch SET expires_at = now() WHERE id = %(id)s", id=late)
        stage.work()
        finishing = await stage.submit([request("a")])
        statuses = [(await stage.ended(id)).status.value for id in (queued, late, finishing)]
        found = await scraped(stage)
    assert statuses == ["cancelled", "expired", "cancelled"]
    phases = {key[1:]: n for key, n in found.items() if key[0] == "batch_cancellation_total"}
    assert phases == {("queued",): 1, ("finalizing",): 1}
    assert found["jobs_processed_total", "expired", "expired_dequeue"] == 1


async def test_a_shard_that_another_worker_holds_is_not_counted_as_re_enqueued(database_url, tmp_path):
    hanging = SimulatorSettings(any_model=Profile(decode_rate=1000.0), faults=("hang:1:match=hang",))
    async with staged(database_url, tmp_path, simulator=hanging) as stage:
        stage.work()
        id = await stage.submit([request("a"), request("b", prompt="hang")])
        await stage.until(id, lambda batch: batch.completed == 1)
        taken = "UPDATE batchwright.job SET claims = claims + 1 WHERE job_type = 'batch.shard' RETURNING id"
        assert await raw(stage.batchwright.queue, taken)
        found = await scraped(stage)
    assert found["batchwright_leases_lost_total",] >= 1
    assert not [key for key in found if key[0] == "jobs_processed_total"]


@pytest.mark.thorough
async def test_only_the_death_of_a_worker_counts_as_a_recovery(database_url, tmp_path):
    slow = SimulatorSettings(any_model=Profile(decode_rate=50.0, output_sigma=0.0, max_running=1000))
    async with staged(database_url, tmp_path, simulator=slow, inference={"concurrency": 10}, **LEASE) as stage:
        batches = stage.batchwright.part(BatchesPart).batches
        id = await stage.submit([request(f"r{n}") for n in range(150)])
        async with doomed(stage, tmp_path) as process:
            await stage.until(id, lambda batch: batch.completed > 0)
            process.kill()
            await process.wait()
        stage.work()
        before = (await stage.get(id)).completed
        await stage.until(id, lambda batch: batch.completed > before)
        await batches.pause(id, tenant=None)
        asleep = "SELECT FROM batchwright.job WHERE job_type = 'batch.shard' AND status = 'QUEUED'"
        async with asyncio.timeout(20):
            while not await raw(batches.queue, asleep):
                await asyncio.sleep(0.02)
        await batches.resume(id, tenant=None)
        assert (await stage.ended(id)).status is BatchStatus.COMPLETED
        found = await scraped(stage)
    recovered = {key[1:]: n for key, n in found.items() if key[0] == "batch_startup_recovery_total"}
    assert recovered == {("in_progress", "resumed"): 1}
