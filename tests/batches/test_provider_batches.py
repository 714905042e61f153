"""Batches whose requests are answered by outside providers; the contract server plays every provider."""

import asyncio
import signal
from contextlib import asynccontextmanager

import pytest

from batchwright.batches import progress
from batchwright.batches.plan import shards
from batchwright.batches.progress import forecast
from batchwright.batches.send import provider, runner
from batchwright.errors import ConfigurationError
from batchwright.inference import gateway
from batchwright.inference.settings import GatewaySettings, refuse_both
from batchwright.providers import jobs
from batchwright.providers.part import ProvidersPart
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from tests.batches.provider_stage import MODELS, SECRET, provider_stage
from tests.batches.stage import jsonl, request
from tests.batches.test_recovery import LEASE, doomed
from tests.support import raw, sparsely


@pytest.fixture
async def stage(database_url, tmp_path):
    async with provider_stage(database_url, tmp_path) as stage:
        yield stage


async def test_one_batch_goes_to_own_servers_and_to_three_providers(stage):
    models = ["small", "gpt", "claude", "gemini-2.5-flash"]
    stage.work()
    id = await stage.submit([request(f"r{n}", model=models[n % 4]) for n in range(20)])
    batch = await stage.finished(id, 3)
    assert batch.status is BatchStatus.COMPLETED, batch.errors
    output, errors = await stage.results(batch)
    assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(20)]
    assert errors == []
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in output)
    assert all(line["id"].startswith("batch_req_") and line["error"] is None for line in output)
    assert sorted(job.provider for job in stage.remote()) == ["anthropic", "gemini", "openai"]
    assert set(batch.usage_by_model) == set(models)
    assert [row.phase for row in await stage.rows(id)] == ["ended"] * 3
    async with stage.batchwright.queue.database.transaction() as session:
        await stage.batchwright.part(ProvidersPart).jobs.forget(id, session=session)
    assert await stage.rows(id) == []
    assert all(usage["input"] > 0 and usage["output"] > 0 for usage in batch.usage_by_model.values())


async def test_limits_of_the_provider_split_a_batch_into_several_jobs(database_url, tmp_path):
    async with provider_stage(database_url, tmp_path, tables={"openai": {"requests_max": 4}}) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}", model="gpt") for n in range(10)])
        batch = await stage.finished(id, 3)
        output, errors = await stage.results(batch)
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(10)]
        assert errors == []
        jobs = stage.remote("openai")
        assert len(jobs) == 3
        assert max(len(job.items) for job in jobs) <= 4


@pytest.mark.thorough
async def test_a_setting_splits_by_tokens(database_url, tmp_path):
    models = {"gpt": {"provider": "openai", "provider_tokens_max": 100}}
    async with provider_stage(database_url, tmp_path, models=models) as stage:
        stage.work()
        batch = await stage.finished(await stage.submit([request(f"r{n}", model="gpt") for n in range(6)]), 3)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 6)
        assert {len(job.items) for job in stage.remote()} == {2}


@pytest.mark.parametrize("model", [*MODELS])
async def test_a_line_that_fails_there_is_in_the_error_file(stage, model):
    stage.work()
    lines = [request("good", model=model), request("bad", model=model, prompt="[[fail:400]]")]
    batch = await stage.finished(await stage.submit(lines))
    output, errors = await stage.results(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert [line["custom_id"] for line in output] == ["good"]
    assert [line["custom_id"] for line in errors] == ["bad"]
    assert (batch.completed, batch.failed) == (1, 1)
    assert sum(count for count, _ in batch.error_summary.values()) == 1


@pytest.mark.thorough
async def test_failed_lines_are_retried_in_a_new_job(stage):
    stage.providers.put_faults("partial:every=2:times=1")
    stage.work()
    first = await stage.finished(await stage.submit([request(f"r{n}", model="gpt") for n in range(4)]))
    assert (first.completed, first.failed) == (2, 2)
    again = await stage.finished(await stage.repeat(first), 2)
    output, errors = await stage.results(again)
    assert ([line["custom_id"] for line in output], errors) == (["r1", "r3"], [])
    assert [len(job.items) for job in stage.remote()] == [4, 2]


@pytest.mark.thorough
async def test_an_expired_job_keeps_its_results_and_the_other_lines_are_resent_once(stage):
    stage.providers.put_faults("expired:share=0.5:times=1")
    stage.work()
    id = await stage.submit([request(f"r{n}", model="gpt") for n in range(4)])
    await stage.submitted(id)
    stage.pass_time(86_400 * 2)
    await stage.until(id, lambda batch: batch.completed == 2)
    batch = await stage.finished(id, 2)
    output, errors = await stage.results(batch)
    assert ([line["custom_id"] for line in output], errors) == ([f"r{n}" for n in range(4)], [])
    assert [len(job.items) for job in stage.remote()] == [4, 2]


@pytest.mark.thorough
async def test_lines_that_expire_again_say_so(stage):
    stage.providers.put_faults("expired:share=0.5")
    stage.work()
    id = await stage.submit([request(f"r{n}", model="claude") for n in range(4)])
    await stage.submitted(id)
    stage.pass_time(86_400 * 2)
    await stage.until(id, lambda batch: batch.completed == 2)
    batch = await stage.finished(id, 2)
    output, errors = await stage.results(batch)
    assert (batch.status, batch.completed, batch.expired) == (BatchStatus.COMPLETED, 3, 1)
    assert [line["error"]["code"] for line in errors] == ["batch_expired"]
    assert len(output) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["missing:times=1", "malformed:times=1", "duplicate", "stranger", "shuffled"])
async def test_with_odd_results_every_line_still_gets_one_answer(stage, fault):
    stage.providers.put_faults(fault)
    stage.work()
    id = await stage.submit([request(f"r{n}", model="gpt") for n in range(4)])
    await stage.submitted(id)
    stage.pass_time()
    if fault.endswith("times=1"):
        await stage.until(id, lambda batch: batch.completed == 3)
        batch = await stage.finished(id, 2)
    else:
        batch = await stage.ended(id)
    output, errors = await stage.results(batch)
    assert ([line["custom_id"] for line in output], errors) == ([f"r{n}" for n in range(4)], [])


@pytest.mark.thorough
async def test_a_line_without_any_result_is_not_resent_for_ever(stage):
    """The file of its requests is gone, so it is unknown which results are missing."""
    stage.providers.put_faults("empty")
    stage.work()
    id = await stage.submit([request("a", model="gpt")])
    await stage.submitted(id)
    keys = [found.key async for found in stage.batchwright.store.list(f"batches/{id}/provider")]
    await stage.batchwright.store.delete(*keys)
    stage.pass_time()
    await stage.finished(id, 2)
    batch = await stage.ended(id)
    _, errors = await stage.results(batch)
    assert [line["error"]["code"] for line in errors] == ["missing_result"]
    assert len(stage.remote()) == 2


@pytest.mark.thorough
async def test_a_provider_that_accepts_no_more_jobs_is_tried_again_later(stage, monkeypatch):
    monkeypatch.setattr(provider, "REFUSED_SECONDS", 0.1)
    stage.providers.put_faults("failed:code=token_limit_exceeded:times=3")
    stage.work()
    id = await stage.submit([request(f"r{n}", model="gpt") for n in range(3)])
    for count in (1, 2, 3):
        async with asyncio.timeout(30):
            while len(stage.remote()) < count:
                await asyncio.sleep(0.02)
        stage.pass_time()
    batch = await stage.finished(id, 4)
    assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 3)


async def test_a_job_that_the_provider_refuses_fails_its_lines_and_nothing_else(stage):
    stage.providers.put_faults("failed:code=invalid_model:message=No such model.")
    stage.work()
    id = await stage.submit([request("a", model="gpt"), request("b", model="small")])
    batch = await stage.finished(id)
    output, errors = await stage.results(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert [line["custom_id"] for line in output] == ["b"]
    assert errors[0]["error"] == {"code": "invalid_model", "message": "No such model."}


@pytest.mark.parametrize(("model", "done"), [("gpt", 2), ("claude", 2), ("gemini-2.5-flash", 0)])
async def test_a_cancelled_batch_has_the_results_so_far(stage, model, done):
    """Gemini has no results for a batch that was cancelled."""
    stage.work()
    id = await stage.submit([request(f"r{n}", model=model) for n in range(4)])
    await stage.submitted(id)
    stage.pass_time(stage.providers.settings.queue_seconds + stage.providers.settings.run_seconds / 2)
    await stage.batches.cancel(id, tenant="default")
    async with asyncio.timeout(30):
        while stage.remote()[0].cancelled_at is None:
            await asyncio.sleep(0.02)
    stage.pass_time(stage.providers.settings.cancel_seconds)
    batch = await stage.ended(id)
    output, errors = await stage.results(batch)
    assert (batch.status, batch.completed, batch.cancelled) == (BatchStatus.CANCELLED, done, 4 - done)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert len(output) == done
    assert len(stage.remote()) == 1


@pytest.mark.thorough
async def test_a_batch_does_not_wait_for_ever_for_a_provider_to_cancel(database_url, tmp_path):
    graces = {"cancel_grace_seconds": 0.0, "provider_grace_seconds": 6.0}  # a worker may poll only every second or two
    async with provider_stage(database_url, tmp_path, batches=graces) as stage:
        stage.work()
        id = await stage.submit([request("a", model="gpt")])
        await stage.submitted(id)
        await stage.batches.cancel(id, tenant="default")
        batch = await stage.ended(id)
        assert (batch.status, batch.cancelled) == (BatchStatus.CANCELLED, 1)
        assert stage.remote()[0].cancelled_at is not None


async def test_a_batch_that_is_cancelled_before_anything_was_sent_sends_nothing(stage):
    id = await stage.submit([request("a", model="gpt")])
    await stage.batches.pause(id, tenant="default")
    stage.work()
    await stage.until(id, lambda batch: batch.status is BatchStatus.IN_PROGRESS)
    await stage.batches.cancel(id, tenant="default")
    batch = await stage.ended(id)
    assert (batch.status, batch.cancelled) == (BatchStatus.CANCELLED, 1)
    assert stage.remote() == []


async def test_at_the_end_of_its_window_a_batch_has_the_results_so_far(stage):
    stage.work()
    id = await stage.submit([request(f"r{n}", model="gpt") for n in range(4)])
    await stage.submitted(id)
    stage.pass_time(stage.providers.settings.queue_seconds + stage.providers.settings.run_seconds / 2)
    await raw(stage.batchwright.queue, "UPDATE batchwright.batch SET expires_at = now() - interval '1 second'")
    async with asyncio.timeout(30):
        while stage.remote()[0].cancelled_at is None:
            await asyncio.sleep(0.02)
    stage.pass_time(stage.providers.settings.cancel_seconds)
    batch = await stage.ended(id)
    assert (batch.status, batch.completed, batch.expired) == (BatchStatus.EXPIRED, 2, 2)


@pytest.mark.thorough
async def test_a_paused_batch_creates_no_new_jobs_and_fetches_the_results_of_existing_ones(database_url, tmp_path):
    models = {**MODELS, "other": {"provider": "groq"}}
    async with provider_stage(database_url, tmp_path, models=models) as stage:
        id = await stage.submit([request("a", model="gpt"), request("b", model="other")])
        stage.providers.put_faults("503:route=groq")
        stage.work()
        await stage.submitted(id)
        await stage.batches.pause(id, tenant="default")
        stage.providers.put_faults()
        stage.pass_time()
        await stage.until(id, lambda batch: batch.completed == 1)
        assert [job.provider for job in stage.remote()] == ["openai"]
        await stage.batches.resume(id, tenant="default")
        batch = await stage.finished(id, 2)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 2)


@pytest.mark.thorough
async def test_a_batch_waits_while_the_credential_is_refused(stage, monkeypatch):
    monkeypatch.setattr(jobs, "_TRY_SECONDS", 0.2)
    monkeypatch.setattr(provider, "_HELD_SECONDS_MAX", 0.2)
    monkeypatch.setattr(gateway, "KEY_SECONDS", 0.0)
    stage.key_file.write_text("wrong-key")
    stage.work()
    id = await stage.submit([request("a", model="gpt"), request("b", model="small")])
    batch = await stage.until(id, lambda batch: batch.waits and batch.completed == 1)
    assert batch.waiting_reason == "credential"
    assert batch.waits_for.startswith("a provider refuses its credential: openai: 401")
    assert stage.remote() == []
    stage.key_file.write_text(SECRET)
    batch = await stage.finished(id)
    assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 2)
    assert len(stage.remote()) == 1


async def test_lines_that_a_provider_does_not_support_are_refused_while_planning_with_line_and_field(stage):
    stage.work()
    lines = [
        request("a", model="small", logprobs=True),
        request("b", model="claude"),
        request("c", model="claude", logprobs=True),
        request("d", model="gemini-2.5-flash", logit_bias={"1": 5}),
    ]
    batch = await stage.ended(await stage.submit(b"\n" + jsonl(lines)))
    assert batch.status is BatchStatus.FAILED
    found = [(one["code"], one["line"], one["param"]) for one in batch.errors["data"]]
    assert found == [("unsupported_by_provider", 4, "body.logprobs"), ("unsupported_by_provider", 5, "body.logit_bias")]
    assert batch.errors["data"][0]["message"].startswith("anthropic does not accept this: ")
    assert stage.remote() == []


async def test_an_endpoint_that_the_provider_lacks_is_refused_while_planning(stage):
    stage.work()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "claude", "input": "x"}}
    batch = await stage.ended(await stage.submit([line], endpoint="/v1/embeddings"))
    assert batch.status is BatchStatus.FAILED
    assert batch.errors["data"][0]["param"] == "endpoint"


async def test_embeddings_can_be_answered_by_a_provider(stage):
    stage.work()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "gpt", "input": "x"}}
    batch = await stage.finished(await stage.submit([line], endpoint="/v1/embeddings"))
    output, _ = await stage.results(batch)
    assert output[0]["response"]["body"]["data"]


@pytest.mark.thorough
async def test_the_pace_of_a_batch_follows_the_progress_of_its_providers(stage):
    stage.work()
    id = await stage.submit([request(f"r{n}", model="gpt") for n in range(10)])
    await stage.submitted(id)
    stage.pass_time(stage.providers.settings.queue_seconds + stage.providers.settings.run_seconds / 2)
    async with asyncio.timeout(30):
        while not (pace := (await stage.batches.paces([id]))[id]).ahead:
            await asyncio.sleep(0.02)
    assert pace.ahead == 5
    assert pace.rate > 0
    assert forecast(await stage.get(id), pace).eta is not None
    stage.pass_time()
    assert (await stage.ended(id)).completed == 10


def test_a_model_cannot_have_a_provider_and_a_server():
    with pytest.raises(ConfigurationError, match="has the provider 'openai' and url, which are for servers"):
        GatewaySettings(url="http://h:1", provider="openai")
    with pytest.raises(ConfigurationError, match="a provider is named for each model"):
        refuse_both(GatewaySettings(provider="openai"), {})
    with pytest.raises(ConfigurationError, match="has provider_model but no provider"):
        GatewaySettings(url="http://h:1", provider_model="x")


@pytest.mark.parametrize(
    ("name", "message"), [("opanai", "did you mean 'openai'"), ("sarvam", "which does not answer such requests")]
)
async def test_a_worker_with_a_provider_that_cannot_answer_does_not_start(database_url, tmp_path, name, message):
    async with provider_stage(database_url, tmp_path, models={"x": {"provider": name}}) as stage:
        with pytest.raises(ConfigurationError, match=message):
            stage.batchwright.worker()


# Deaths ---------------------------------------------------------------------------------------------------------------

POINTS = [
    ("batchwright.batches.send.desk:Desk.write_requests", "after", 1),
    ("batchwright.batches.send.desk:Desk.prepare", "after", 1),
    ("batchwright.providers.jobs:RemoteJobs.plan", "after", 1),
    ("batchwright.providers.jobs:RemoteJobs.save_staged", "before", 1),
    ("batchwright.providers.jobs:RemoteJobs.end_staging", "after", 1),
    ("batchwright.providers.jobs:RemoteJobs.begin_submit", "after", 1),
    ("batchwright.providers.dialects.openai:OpenAIAdapter.submit", "after", 1),
    ("batchwright.providers.jobs:RemoteJobs.refer", "after", 1),
    ("batchwright.providers.errand:Errand._refer", "after", 1),
    ("batchwright.providers.jobs:RemoteJobs.note", "after", 1),
    ("batchwright.batches.journal.journal:Journal.append", "before", 1),
    ("batchwright.batches.journal.journal:Journal.append", "after", 7),
    ("batchwright.batches.store:Batches.register", "before", 1),
    ("batchwright.batches.store:Batches.register", "after", 1),
    ("batchwright.providers.jobs:RemoteJobs.end", "before", 1),
    ("batchwright.providers.jobs:RemoteJobs.end", "after", 1),
    ("batchwright.providers.jobs:RemoteJobs.clean", "after", 1),
    ("batchwright.batches.store:Batches.finalize", "after", 1),
]


@pytest.mark.parametrize(("at", "when", "call"), sparsely(POINTS, 4))
async def test_if_a_worker_dies_here_nothing_is_paid_twice_and_nothing_is_lost(database_url, tmp_path, at, when, call):
    quick = {"queue_seconds": 0.0, "run_seconds": 0.0}
    async with provider_stage(database_url, tmp_path, simulator=quick, **LEASE) as stage:
        id = await stage.submit([request(f"r{n}", model="gpt") for n in range(20)])
        async with doomed(stage, tmp_path, at=at, when=when, call=call) as process, asyncio.timeout(30):
            assert await process.wait() == -signal.SIGKILL
        stage.work()
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert batch.status is BatchStatus.COMPLETED
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(20)]
        assert errors == []
        assert (batch.total, batch.completed, batch.failed) == (20, 20, 0)
        assert len(stage.remote()) == 1


SECOND = [
    ("batchwright.providers.jobs:RemoteJobs.end", "after", 1),
    ("batchwright.batches.send.desk:Desk.write_requests", "after", 2),
    ("batchwright.providers.jobs:RemoteJobs.plan", "after", 2),
    ("batchwright.providers.jobs:RemoteJobs.begin_submit", "after", 2),
    ("batchwright.providers.dialects.openai:OpenAIAdapter.submit", "after", 2),
    ("batchwright.batches.store:Batches.register", "before", 2),
    ("batchwright.providers.jobs:RemoteJobs.end", "after", 2),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("at", "when", "call"), sparsely(SECOND, 4))
async def test_if_a_worker_dies_while_a_line_is_resent_the_line_is_resent_only_once(
    database_url, tmp_path, at, when, call
):
    quick = {"queue_seconds": 0.0, "run_seconds": 0.0, "faults": ["missing:times=1"]}
    async with provider_stage(database_url, tmp_path, simulator=quick, **LEASE) as stage:
        id = await stage.submit([request(f"r{n}", model="gpt") for n in range(20)])
        async with doomed(stage, tmp_path, at=at, when=when, call=call) as process, asyncio.timeout(30):
            assert await process.wait() == -signal.SIGKILL
        stage.work()
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert ([line["custom_id"] for line in output], errors) == ([f"r{n}" for n in range(20)], [])
        assert [len(job.items) for job in stage.remote()] == [20, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["claude", "gemini-2.5-flash"])
async def test_if_a_worker_dies_during_its_request_the_next_one_finds_the_job(database_url, tmp_path, model):
    quick = {"queue_seconds": 0.0, "run_seconds": 0.0}
    async with provider_stage(database_url, tmp_path, simulator=quick, **LEASE) as stage:
        id = await stage.submit([request(f"r{n}", model=model) for n in range(5)])
        point = {"at": "batchwright.providers.service:HttpAdapter.pay", "when": "after", "call": 1}
        async with doomed(stage, tmp_path, **point) as process, asyncio.timeout(30):
            assert await process.wait() == -signal.SIGKILL
        assert len(stage.remote()) == 1
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 5)
        assert len(stage.remote()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("at", "when"),
    sparsely(
        [
            ("batchwright.providers.jobs:RemoteJobs.note_cancel", "before"),
            ("batchwright.providers.jobs:RemoteJobs.note_cancel", "after"),
            ("batchwright.batches.store:Batches.register", "before"),
            ("batchwright.providers.jobs:RemoteJobs.end", "after"),
        ],
        4,
    ),
)
async def test_if_a_worker_dies_during_a_cancellation_the_next_one_finishes_it(database_url, tmp_path, at, when):
    slow = {"queue_seconds": 0.0, "run_seconds": 60.0, "cancel_seconds": 0.0}
    async with provider_stage(database_url, tmp_path, simulator=slow, **LEASE) as stage:
        id = await stage.submit([request(f"r{n}", model="gpt") for n in range(4)])
        async with doomed(stage, tmp_path, at=at, when=when, call=1) as process:
            await stage.submitted(id)
            stage.pass_time(30)
            await stage.batches.cancel(id, tenant="default")
            async with asyncio.timeout(30):
                assert await process.wait() == -signal.SIGKILL
        stage.work()
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert (batch.status, batch.completed, batch.cancelled) == (BatchStatus.CANCELLED, 2, 2)
        assert sorted(line["custom_id"] for line in output + errors) == ["r0", "r1", "r2", "r3"]


# Overflow -------------------------------------------------------------------------------------------------------------

SLOW = SimulatorSettings(any_model=Profile(decode_rate=4.0, output_sigma=0.0, max_running=1000))
PRICES = {"*": {"input": 1.0, "output": 2.0}}
FEW = {"concurrency": 2, "model_concurrency_start": 2, "model_concurrency_max": 2}


@asynccontextmanager
async def overflow_stage(database_url, folder, monkeypatch, *, cost_max=1.0, provider="openai", prices=PRICES):
    """A stage whose own servers are too slow for the batch, which is noticed at once; shards have ten requests."""
    monkeypatch.setattr(progress, "_RECENT_SECONDS", 0.3)
    monkeypatch.setattr(runner, "RELIEVE_SECONDS", 0.3)
    monkeypatch.setattr(shards.cut, "__kwdefaults__", {**shards.cut.__kwdefaults__, "requests_max": 10})
    overflow = {"overflow_provider": provider, "overflow_cost_max": cost_max, "provider_model": "there"}
    tables = {provider: {"prices": prices}}
    quick = {"speed": 1.0, "queue_seconds": 0.0, "run_seconds": 0.5, "cancel_seconds": 0.0}
    options = {"simulator": quick, "tables": tables, "own_simulator": SLOW, "own": overflow, "models": {}}
    options["inference"] = FEW
    async with provider_stage(database_url, folder, **options) as stage:
        yield stage


async def events(stage, name):
    sql = "SELECT message, cost::float8 FROM batchwright.job_event WHERE event = %(name)s ORDER BY id"
    return await stage.batchwright.pool.rows(sql, {"name": name})


@pytest.mark.thorough
async def test_shards_of_a_late_batch_that_have_not_begun_go_to_the_provider(database_url, tmp_path, monkeypatch):
    async with overflow_stage(database_url, tmp_path, monkeypatch) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}", model="small") for n in range(120)], completion_window="60s")
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert batch.status is BatchStatus.COMPLETED
        assert ([line["custom_id"] for line in output], errors) == ([f"r{n}" for n in range(120)], [])
        sent = sum(len(job.items) for job in stage.remote())
        assert 0 < sent < 120
        assert stage.simulator.stats()["received"] == 120 - sent
        told = await events(stage, "batch.overflowed")
        assert len(told) == len(stage.remote())
        assert all(cost > 0 for _, cost in told)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cost_max": 1e-9}, "the overflow would cost more than 1e-09"),
        ({"prices": {}}, "the price of there at openai is unknown"),
        ({"provider": "anthropic"}, "anthropic does not accept this"),
    ],
)
async def test_shards_are_not_moved_to_a_provider_that_is_too_expensive_or_cannot_answer(
    database_url, tmp_path, monkeypatch, options, reason
):
    async with overflow_stage(database_url, tmp_path, monkeypatch, **options) as stage:
        stage.work()
        lines = [request(f"r{n}", model="small", logprobs=True) for n in range(60)]
        id = await stage.submit(lines, completion_window="60s")
        async with asyncio.timeout(30):
            while not (told := await events(stage, "batch.overflow_refused")):
                await asyncio.sleep(0.05)
        assert reason in told[0][0]
        assert stage.remote() == []
        await stage.batches.cancel(id, tenant="default")
        await stage.ended(id)


@pytest.mark.thorough
@pytest.mark.parametrize(("is_there", "reason"), [(False, "cannot be read"), (True, "openai refuses its credential")])
async def test_shards_are_not_moved_to_a_provider_that_refuses_the_credential(
    database_url, tmp_path, monkeypatch, is_there, reason
):
    async with overflow_stage(database_url, tmp_path, monkeypatch) as stage:
        stage.key_file.unlink()
        if is_there:
            stage.key_file.write_text("wrong-key")
            await stage.batchwright.part(ProvidersPart).jobs.hold("openai", "invalid_api_key", "401")
        stage.work()
        id = await stage.submit([request(f"r{n}", model="small") for n in range(60)], completion_window="60s")
        async with asyncio.timeout(30):
            while not (told := await events(stage, "batch.overflow_refused")):
                await asyncio.sleep(0.05)
        assert reason in told[0][0]
        await stage.batches.cancel(id, tenant="default")
        await stage.ended(id)


async def test_all_overflow_together_costs_no_more_than_its_limit(database_url, tmp_path, monkeypatch):
    async with overflow_stage(database_url, tmp_path, monkeypatch, cost_max=0.001) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}", model="small") for n in range(120)], completion_window="60s")
        async with asyncio.timeout(30):
            while not await events(stage, "batch.overflow_refused"):
                await asyncio.sleep(0.05)
        ((spent,),) = await raw(stage.batchwright.queue, "SELECT overflow_cost FROM batchwright.batch")
        assert 0 < spent <= 0.001
        assert spent == pytest.approx(sum(cost for _, cost in await events(stage, "batch.overflowed")))
        await stage.batches.cancel(id, tenant="default")
        assert (await stage.ended(id)).status is BatchStatus.CANCELLED


def test_an_overflow_needs_a_limit():
    with pytest.raises(ConfigurationError, match="overflow_provider and overflow_cost_max belong together"):
        GatewaySettings(url="http://h:1", overflow_provider="openai")
