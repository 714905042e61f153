"""Vectors that cost money: paid once, whenever a worker dies; their cost is reported; refusals and limits."""

import asyncio
import dataclasses
from decimal import Decimal

import pytest

from batchwright.engine.context import Context
from batchwright.engine.queue import Queue
from batchwright.errors import JobFailed
from batchwright.ingest.embeddings.batch import BatchRunner
from batchwright.ingest.embeddings.operations import embed_batch
from batchwright.ingest.part import IngestPart
from batchwright.operations.registry import Registry
from batchwright.states import JobStatus
from tests.ingest.embeddings.stage import embedding_stage, jsonl, rows
from tests.ingest.fake_provider import DIMENSIONS, MARKER, FakeProvider

MODEL = "some-model"


@pytest.fixture
async def provider():
    async with FakeProvider() as provider:
        yield provider


@pytest.fixture
async def stage(database_url, tmp_path, provider):
    gateway = {"url": provider.url, "max_retries": 0, "initial_backoff": 0.01}
    tables = {"global_inference_gateway": gateway, "ingest": {"prices": {MODEL: {"input": 2.0}}}}
    async with embedding_stage(database_url, tmp_path, **tables) as stage:
        yield stage


class Silent:
    """Drops the events and the progress of a worker that is to die."""

    def emit(self, claim, event):
        pass

    def progress(self, claim, current, total):
        pass


async def first_child(stage, id):
    """Run the coordinator once, and let a worker that will die claim the first batch."""
    worker = stage.batchwright.worker()
    await worker.register()
    assert await worker.run_once() == 1
    await worker.close()
    child = (await stage.children(id))[0]
    queue: Queue = stage.batchwright.queue
    claim = await queue.claim_job("mortal", child.id, ["compute_embeddings.batch"])
    assert claim is not None
    return claim


async def run_by_hand(stage, claim):
    """Do what a worker does with a batch, up to the moment before it settles."""
    worker = stage.batchwright.worker()
    operation = Registry([embed_batch]).get("compute_embeddings.batch")
    ctx = Context(claim, Silent(), worker="mortal")
    try:
        batch = operation.arguments(claim.payload)["batch"]
        return await worker._duties.service(BatchRunner).run(ctx, batch)
    finally:
        await worker.close()


async def test_the_result_says_what_it_cost(stage, provider):
    stage.work()
    result = await stage.run(jsonl(*rows(50)), model=MODEL, batch_size=10)
    assert (result["rows"], result["model"], result["dimensions"], result["calls"]) == (50, MODEL, DIMENSIONS, 5)
    assert provider.bill["requests"] == 5
    assert result["tokens"] == provider.bill["input_tokens"] > 0
    assert Decimal(str(result["cost"])) == Decimal(result["tokens"]) * 2 / 1_000_000
    assert (result["price"], result["in_doubt"], result["asked"]) == ("configuration", 0, 50)


async def test_the_history_of_each_batch_holds_tokens_and_cost(stage, provider):
    stage.work()
    id = await stage.submit(jsonl(*rows(20)), model=MODEL, batch_size=10)
    await stage.batchwright.wait(id, timeout=30)
    paid = Decimal(0)
    for child in await stage.children(id):
        (called,) = [one for one in await stage.batchwright.events(child.id) if one.event == "embedding.called"]
        assert (called.model, called.fields["inputs"]) == (MODEL, 10)
        assert called.cost == Decimal(called.prompt_tokens) * 2 / 1_000_000
        paid += called.cost
    assert paid == Decimal(provider.bill["input_tokens"]) * 2 / 1_000_000


async def test_a_model_without_a_price_has_no_cost(stage):
    stage.work()
    result = await stage.run(jsonl(*rows(3)), model="unheard-of")
    assert (result["cost"], result["price"]) == (None, None)
    assert result["tokens"] > 0


async def test_equal_texts_are_paid_once_in_a_batch_and_never_again(stage, provider):
    stage.work()
    data = jsonl(*({"id": n, "text": f"text {n % 3}"} for n in range(30)))
    first = await stage.run(data, model=MODEL)
    assert (first["rows"], first["asked"]) == (30, 3)
    assert provider.bill["requests"] == 1
    second = await stage.run(data, model=MODEL, batch_size=7)
    assert (second["rows"], second["asked"], second["calls"], second["cost"]) == (30, 0, 0, 0.0)
    assert provider.bill["requests"] == 1
    assert await stage.content(first["file_id"]) == await stage.content(second["file_id"])


async def test_another_tenant_pays_for_itself(stage, provider):
    stage.work()
    await stage.run(jsonl(*rows(3)), model=MODEL)
    file = await stage.upload(jsonl(*rows(3)), tenant="other")
    id = await stage.batchwright.enqueue("compute_embeddings", {"source": file, "model": MODEL}, tenant="other")
    result = await stage.batchwright.wait(id, timeout=30)
    assert (result["asked"], provider.bill["requests"]) == (3, 2)
    assert len((await stage.content(result["file_id"], tenant="other")).splitlines()) == 3
    costs = await stage.batchwright.part(IngestPart).spending.costs(None, days=1)
    assert {part.tenant: part.sums.calls for part in costs.parts} == {"default": 1, "other": 1}
    assert costs.total.cost == Decimal(provider.bill["input_tokens"]) * 2 / 1_000_000


async def test_a_worker_that_dies_between_its_part_and_its_settle_is_paid_once(stage, provider):
    id = await stage.submit(jsonl(*rows(20)), model=MODEL, batch_size=10)
    claim = await first_child(stage, id)
    await run_by_hand(stage, claim)
    assert len(await stage.parts()) == 1
    assert provider.bill["requests"] == 1
    await stage.batchwright.queue.rescue(dead=[(claim.id, claim.claim)])
    stage.work()
    result = await stage.batchwright.wait(id, timeout=30)
    assert [line["id"] for line in await stage.lines(result["file_id"])] == [f"row-{n}" for n in range(20)]
    assert provider.bill["requests"] == 2
    assert result["calls"] == 2
    assert result["tokens"] == provider.bill["input_tokens"]
    assert (await stage.children(id))[0].result["asked"] == 0


async def test_a_worker_that_lost_its_batch_and_continues_changes_nothing(stage, provider):
    id = await stage.submit(jsonl(*rows(20)), model=MODEL, batch_size=10)
    claim = await first_child(stage, id)
    await stage.batchwright.queue.rescue(dead=[(claim.id, claim.claim)])
    stage.work()
    result = await stage.batchwright.wait(id, timeout=30)
    before = await stage.content(result["file_id"])
    late = await run_by_hand(stage, claim)
    assert late["asked"] == 0
    assert provider.bill["requests"] == 2
    assert await stage.content(result["file_id"]) == before
    assert (await stage.batchwright.get(id)).result == result


async def test_a_worker_that_lost_its_batch_may_not_begin_a_paid_request(stage, provider):
    id = await stage.submit(jsonl(*rows(20)), model=MODEL, batch_size=10)
    claim = await first_child(stage, id)
    await stage.batchwright.queue.rescue(dead=[(claim.id, claim.claim)])
    with pytest.raises(Exception, match="was given to another worker"):
        await run_by_hand(stage, claim)
    assert provider.requests == []


async def test_a_request_whose_worker_died_is_reported_as_in_doubt(stage, provider):
    id = await stage.submit(jsonl(*rows(4)), model=MODEL)
    provider.set(delay_seconds=60.0)
    claim = await first_child(stage, id)
    dying = asyncio.create_task(run_by_hand(stage, claim))

    async def is_begun():
        return await stage.rows("SELECT 1 FROM batchwright.ingest_call") != []

    await stage.until(is_begun)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    provider.set(delay_seconds=0.0)
    await stage.batchwright.queue.rescue(dead=[(claim.id, claim.claim)])
    stage.work()
    result = await stage.batchwright.wait(id, timeout=30)
    assert (result["rows"], result["in_doubt"], result["calls"]) == (4, 1, 1)
    assert await stage.rows("SELECT 1 FROM batchwright.ingest_call") == []
    (child,) = await stage.children(id)
    (doubt,) = [one for one in await stage.batchwright.events(child.id) if one.event == "embedding.in_doubt"]
    assert "it may have been paid for" in doubt.message


async def test_a_refused_text_is_a_bad_row_and_the_others_get_their_vectors(stage, provider):
    stage.work()
    given = rows(16)
    given[5]["text"] = f"{MARKER} please"
    result = await stage.run(jsonl(*given), model=MODEL)
    assert (result["rows"], result["failed"]) == (15, 1)
    (bad,) = await stage.lines(result["errors_file_id"])
    assert (bad["row"], bad["id"], bad["message"]) == (6, "row-5", "the model server refused the text")
    assert "row-5" not in [line["id"] for line in await stage.lines(result["file_id"])]
    paid = [text for entry in provider.entries for text in entry["texts"]]
    assert len(paid) == len(set(paid)) == 15


async def test_errors_of_the_server_are_retried_and_answered_texts_are_not_resent(stage, provider):
    provider.set(next=["error", "rate_limited", "drop"])
    stage.work()
    result = await stage.run(jsonl(*rows(12)), model=MODEL, batch_size=3)
    assert result["rows"] == 12
    events = [one for (one,) in await stage.rows("SELECT sum(prompt_tokens) FROM batchwright.job_event")]
    assert events == [provider.bill["input_tokens"]]


async def test_an_answer_that_was_lost_is_paid_again_and_reported_as_in_doubt(stage, provider):
    provider.set(next=["lost"])
    stage.work()
    result = await stage.run(jsonl(*rows(4)), model=MODEL)
    assert (result["rows"], result["calls"], result["in_doubt"]) == (4, 1, 1)
    assert provider.bill["requests"] == 2
    assert result["tokens"] * 2 == provider.bill["input_tokens"]


async def test_an_unusable_answer_fails_the_batch_and_its_cost_is_reported(stage, provider):
    provider.set(next=["invalid"])
    stage.work()
    id = await stage.submit(jsonl(*rows(4)), model=MODEL)
    with pytest.raises(JobFailed, match="1 of 1 children did not succeed"):
        await stage.batchwright.wait(id, timeout=30)
    (child,) = await stage.children(id)
    assert child.error["code"] == "wrong_count"
    (failed,) = [one for one in await stage.batchwright.events(child.id) if one.event == "embedding.failed"]
    assert failed.cost == Decimal(provider.bill["input_tokens"]) * 2 / 1_000_000


async def test_a_refused_key_fails_the_job_and_a_rerun_resumes_where_it_stopped(stage, provider):
    stage.work()
    provider.set(next=["unauthorized"])
    id = await stage.submit(jsonl(*rows(6)), model=MODEL, batch_size=2)
    with pytest.raises(JobFailed, match="1 of 3 children did not succeed"):
        await stage.batchwright.wait(id, timeout=30)
    statuses = [child.status for child in await stage.children(id)]
    assert sorted(statuses) == [JobStatus.FAILED, JobStatus.SUCCEEDED, JobStatus.SUCCEEDED]
    assert provider.bill["requests"] == 2
    await stage.batchwright.rerun(id)
    result = await stage.batchwright.wait(id, timeout=30)
    assert [line["id"] for line in await stage.lines(result["file_id"])] == [f"row-{n}" for n in range(6)]
    assert provider.bill["requests"] == 3


async def test_a_worker_with_another_embedder_leaves_the_batch_to_others(stage):
    id = await stage.submit(jsonl(*rows(2)), model=MODEL)
    claim = await first_child(stage, id)
    other = dataclasses.replace(claim, payload={**claim.payload, "fingerprint": "remote:0:other"})
    with pytest.raises(Exception, match=r"this worker has remote:\d+:some-model:own, but the job started with"):
        await run_by_hand(stage, other)


async def test_a_model_without_a_server_is_an_error_that_says_so(database_url, tmp_path):
    async with embedding_stage(database_url, tmp_path) as stage:
        stage.work()
        id = await stage.submit(jsonl(*rows(2)), model="nowhere")
        with pytest.raises(JobFailed, match="model_not_configured: there is no model server for 'nowhere'"):
            await stage.batchwright.wait(id, timeout=30)


async def test_a_repeated_assembly_writes_the_same_file(stage):
    """The coordinator dies after it has written the file and before it settles its job."""
    from batchwright.ingest.embeddings.process import EmbeddingCoordinator, derived_file_id

    id = await stage.submit(jsonl(*rows(9)), batch_size=3)
    worker = stage.batchwright.worker()
    await worker.register()
    while True:
        job = await stage.batchwright.get(id)
        if job.status is JobStatus.QUEUED and job.waits:
            break
        await worker.run_once()
    queue = stage.batchwright.queue
    claim = await queue.claim_job("mortal", id, ["compute_embeddings"])
    ctx = Context(claim, Silent(), worker="mortal", joined=await worker._runner._read_joined(claim, "async"))
    coordinator = worker._duties.service(EmbeddingCoordinator)
    operation = stage.batchwright.operations.get("compute_embeddings")
    done = await coordinator.run(ctx, operation.arguments(claim.payload)["request"])
    assert done.result["file_id"] == derived_file_id(id, "rows")
    assert await stage.files() == []
    await queue.rescue(dead=[(claim.id, claim.claim)])
    await worker.close()
    stage.work()
    result = await stage.batchwright.wait(id, timeout=30)
    assert result == done.result
    assert await stage.files() == [("embeddings", result["file_id"])]
    assert len(await stage.lines(result["file_id"])) == 9
