"""Whole runs whose requests go through batches."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from decimal import Decimal

import pytest

from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.ingest import gather
from batchwright.ingest.items import Wanted
from batchwright.simulator.providers import running as running_providers
from batchwright.states import RunStatus
from tests.ingest.fake_provider import MARKER, FakeProvider
from tests.ingest.stage import Stage, ingest_stage

PRICES = {"embedder": {"input": 1.0}, "namer": {"input": 2.0, "output": 8.0}}
SHARED = "Every paper of this library ends with the same long paragraph about Ada Lovelace of London. " * 8


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gather, "POLL_SECONDS", (0.1, 0.2))
    monkeypatch.setattr("batchwright.ingest.requests._GATHER_SECONDS", 0.1)
    monkeypatch.setattr("batchwright.ingest.requests._OTHERS_SECONDS", (1.0, 1.0))


@pytest.fixture
async def provider():
    async with FakeProvider() as provider:
        yield provider


@asynccontextmanager
async def lanes(database_url, folder, provider, **ingest):
    values = {"embedding_model": "embedder", "entities": "namer", "prices": PRICES, "lane": "batch"}
    async with ingest_stage(
        database_url,
        folder,
        global_inference_gateway={"url": provider.url, "initial_backoff": 0.05, "max_backoff": 0.2},
        batches={"checkpoint_seconds": 0.1, "cancel_grace_seconds": 0.2},
        ingest={**values, **ingest},
    ) as stage:
        yield stage


@pytest.fixture
async def stage(database_url, tmp_path, provider):
    async with lanes(database_url, tmp_path, provider) as stage:
        yield stage


def text(number: int) -> str:
    words = " ".join(f"w{number}x{place}" for place in range(40))
    return f"Report {number} by Grace Hopper.\n\n{words}\n"


def write(stage: Stage, count: int) -> None:
    for number in range(count):
        stage.write(f"{number:03}.txt", text(number))


async def events(stage: Stage) -> tuple[int, int, Decimal]:
    ((prompt, completion, cost),) = await stage.rows(
        "SELECT coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), coalesce(sum(cost), 0) "
        "FROM batchwright.job_event WHERE event IN ('model_called', 'model_failed')"
    )
    return int(prompt), int(completion), cost


async def batches(stage: Stage) -> list[tuple[str, str, int]]:
    return await stage.rows("SELECT id, status::text, total FROM batchwright.batch ORDER BY created_at, id")


async def check_books(stage: Stage, provider: FakeProvider, run_id: str) -> None:
    """Check that the provider's bill, the events, the run's spending and the costs of the items agree."""
    run = await stage.get(run_id)
    prompt, completion, cost = await events(stage)
    bill = provider.bill
    assert (prompt, completion) == (bill["input_tokens"], bill["output_tokens"])
    assert (run.prompt_tokens, run.completion_tokens, run.spent) == (prompt, completion, cost)
    items = (await stage.items(run_id)).values()
    assert sum(item.cost for item in items) == cost
    assert (sum(item.prompt_tokens for item in items), sum(item.completion_tokens for item in items)) == (
        prompt,
        completion,
    )
    assert run.reserved == 0
    assert await stage.rows("SELECT id FROM batchwright.ingest_call") == []
    spent = (await stage.part.spending.costs(run.tenant, days=1)).total
    assert (spent.calls, spent.unpriced) == (run.calls, 0)
    assert (spent.prompt_tokens, spent.completion_tokens, spent.cost) == (prompt, completion, cost)


def billed_texts(provider: FakeProvider) -> list[tuple[str, str]]:
    return [(entry["kind"], one) for entry in provider.entries for one in entry["texts"]]


async def test_thirty_documents_share_a_few_batches_and_no_text_is_paid_twice(stage, provider):
    for number in range(30):
        stage.write(f"{number:03}.txt", f"{SHARED}\n\n{text(number)}" if number % 2 else text(number))
    stage.work()
    run = await stage.succeed(overrides={"chunk_characters": 800, "chunk_overlap": 0}, seconds=60)
    assert run.item_count_done == 30
    made = await batches(stage)
    assert 2 <= len(made) <= 6
    assert {status for _, status, _ in made} == {"completed"}
    billed = billed_texts(provider)
    assert len(billed) == len(set(billed))
    assert len(provider.requests) < len(billed)  # many texts in one request
    await check_books(stage, provider, run.id)
    assert await stage.rows("SELECT hash FROM batchwright.ingest_request") == []
    assert (await stage.rows("SELECT count(*) FROM batchwright.ingest_mention"))[0][0] > 0


async def test_a_waiting_item_says_what_it_waits_for(stage, provider):
    write(stage, 1)
    provider.set(delay_seconds=1.5)
    stage.work()
    run_id = await stage.submit(lane="batch")
    await stage.until(run_id, lambda run: run.has_ended or provider.running)
    ((waits_for, message),) = await stage.rows(
        "SELECT DISTINCT waiting ->> 'for', waiting ->> 'message' FROM batchwright.ingest_step "
        "WHERE waiting IS NOT NULL AND step = 'EMBEDDED'"
    )
    assert waits_for == "batch"
    assert message.startswith("embeddings by embedder: 1 in ")
    assert " UTC" in message
    ((seconds,),) = await stage.rows(
        "SELECT max(extract(epoch FROM run_after - now())) FROM batchwright.job "
        "WHERE job_type = 'ingest.item' AND status = 'QUEUED'"
    )
    assert seconds is None or seconds <= 5, "it checks again soon, because it may have been woken too early"
    provider.set(delay_seconds=0.0)
    assert (await stage.ended(run_id)).status is RunStatus.COMPLETED


@pytest.mark.thorough
async def test_one_refused_text_among_many_is_isolated_and_the_others_are_kept(stage, provider):
    write(stage, 12)
    stage.write("bad.txt", f"This one says {MARKER} and is refused.")
    stage.work()
    run = await stage.run(seconds=60)
    assert run.status is RunStatus.COMPLETED_WITH_ERRORS
    assert (run.item_count_done, run.item_count_failed) == (12, 1)
    items = await stage.items(run.id)
    assert items["bad.txt"].last_error_kind == "SchemaInvalid"
    assert "gave nothing usable for 1 of 1 texts" in items["bad.txt"].last_error["message"]
    embedded = [request for request in provider.requests if request["path"] == "/v1/embeddings"]
    assert len(embedded) >= 3  # all thirteen, then fewer, until the bad one is alone
    await check_books(stage, provider, run.id)


@pytest.mark.thorough
async def test_if_a_server_refuses_a_field_requests_are_sent_without_it(stage, provider):
    write(stage, 3)
    provider.set(refused_fields=["encoding_format", "temperature"])
    stage.work()
    run = await stage.succeed(seconds=60)
    assert "encoding_format" not in provider.requests[-1]["body"]
    await check_books(stage, provider, run.id)


@pytest.mark.thorough
async def test_an_expired_batch_keeps_its_answers_and_the_rest_is_resent(stage, provider, monkeypatch):
    monkeypatch.setattr(gather, "ROWS_MAX", 4)
    write(stage, 4)
    stage.work()
    provider.set(delay_seconds=60.0)
    run_id = await stage.submit()
    await stage.until(run_id, lambda run: provider.running)
    expire = "UPDATE batchwright.batch SET expires_at = now() - interval '1 second' RETURNING id"
    provider.set(delay_seconds=0.0)
    assert await stage.rows(expire)
    run = await stage.ended(run_id)
    assert run.status is RunStatus.COMPLETED
    assert "expired" in {status for _, status, _ in await batches(stage)}
    told = await stage.rows("SELECT message FROM batchwright.job_event WHERE event = 'batch_lines_returned'")
    assert told
    await check_books(stage, provider, run_id)


async def test_a_budget_parks_the_run_and_resume_continues_it(stage, provider):
    write(stage, 3)
    stage.work()
    run_id = await stage.submit(budget=Decimal("0.0001"))
    parked = await stage.until(run_id, lambda run: run.status is RunStatus.PARKED or run.has_ended)
    assert (parked.status, parked.parked_reason) == (RunStatus.PARKED, "budget")
    assert "of the budget of" in parked.parked_message
    assert not [request for request in provider.requests if request["path"] == "/v1/chat/completions"]
    await stage.part.submission.resume(run_id, tenant=None, budget=Decimal(10))
    stage.batchwright.doorbell.ring(["ingest"])
    run = await stage.ended(run_id)
    assert (run.status, run.item_count_done) == (RunStatus.COMPLETED, 3)
    await check_books(stage, provider, run_id)


async def test_a_credential_that_is_refused_parks_the_run_and_fails_no_document(stage, provider):
    write(stage, 3)
    provider.set(revoked=True)
    stage.work()
    run_id = await stage.submit()
    parked = await stage.until(run_id, lambda run: run.status is RunStatus.PARKED or run.has_ended)
    assert (parked.status, parked.parked_reason, parked.item_count_failed) == (RunStatus.PARKED, "credential", 0)
    provider.set(revoked=False)
    await stage.part.submission.resume(run_id, tenant=None)
    stage.batchwright.doorbell.ring(["ingest"])
    assert (await stage.ended(run_id)).status is RunStatus.COMPLETED
    await check_books(stage, provider, run_id)


async def test_cancelling_a_run_cancels_its_batches_and_leaves_nothing_behind(stage, provider):
    write(stage, 3)
    provider.set(delay_seconds=60.0)
    stage.work()
    run_id = await stage.submit()
    await stage.until(run_id, lambda run: provider.running >= 2)
    await stage.part.submission.cancel(run_id, tenant=None)
    stage.batchwright.doorbell.ring(["ingest"])

    async def left():
        return await stage.rows(
            "SELECT 1 FROM batchwright.ingest_request UNION ALL SELECT 1 FROM batchwright.ingest_call "
            "UNION ALL SELECT 1 FROM batchwright.job WHERE finished_at IS NULL"
        )

    await until(left)
    assert {status for _, status, _ in await batches(stage)} == {"cancelled"}
    run = await stage.get(run_id)
    assert (run.status, run.spent, run.reserved) == (RunStatus.CANCELLED, 0, 0)


async def until(left, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while await left():
            await asyncio.sleep(0.05)


# auto -----------------------------------------------------------------------------------------------------------------


async def test_auto_uses_realtime_for_small_runs(database_url, tmp_path, provider):
    async with lanes(database_url, tmp_path, provider, lane="auto", entities="none") as stage:
        write(stage, 5)
        stage.work()
        run = await stage.succeed(seconds=60)
        assert await batches(stage) == []
        await check_books(stage, provider, run.id)


@pytest.mark.thorough
async def test_auto_sends_the_first_documents_of_a_large_run_ahead(database_url, tmp_path, provider, monkeypatch):
    monkeypatch.setattr("batchwright.ingest.requests.FIRST_ITEMS", 2)
    async with lanes(database_url, tmp_path, provider, lane="auto", entities="none", batch_from_documents=3) as stage:
        write(stage, 6)
        stage.work()
        run = await stage.succeed(seconds=60)
        asked = await stage.rows(
            "SELECT fields ->> 'lane', sum((fields ->> 'inputs')::integer) FROM batchwright.job_event "
            "WHERE event = 'model_called' GROUP BY 1 ORDER BY 1"
        )
        assert asked == [("batch", 4), ("realtime", 2)]
        await check_books(stage, provider, run.id)


@pytest.mark.thorough
async def test_auto_switches_to_realtime_when_the_deadline_is_near(database_url, tmp_path, provider, monkeypatch):
    monkeypatch.setattr("batchwright.ingest.requests.FIRST_ITEMS", 0)
    monkeypatch.setattr("batchwright.ingest.requests._CANCELLED_SECONDS", 0.2)
    ingest = {"lane": "auto", "entities": "none", "batch_from_documents": 0, "batch_deadline_margin_seconds": 600.0}
    async with lanes(database_url, tmp_path, provider, **ingest) as stage:
        write(stage, 3)
        provider.set(delay_seconds=60.0)
        stage.work()
        run_id = await stage.submit(deadline_seconds=3600.0)
        await stage.until(run_id, lambda run: provider.running)
        provider.set(delay_seconds=0.0)
        near = "UPDATE batchwright.ingest_run SET deadline_at = now() + interval '1 minute' RETURNING id"
        assert await stage.rows(near)
        run = await stage.ended(run_id)
        assert run.status is RunStatus.COMPLETED
        assert {status for _, status, _ in await batches(stage)} == {"cancelled"}
        told = await stage.rows(
            "SELECT DISTINCT fields ->> 'lane' FROM batchwright.job_event WHERE event = 'model_called'"
        )
        assert told == [("realtime",)]
        await check_books(stage, provider, run_id)


# A provider's batch API -----------------------------------------------------------------------------------------------


@pytest.fixture
async def at_provider(database_url, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("bw-test-secret-0123456789")
    async with (
        running_providers() as providers,
        ingest_stage(
            database_url,
            tmp_path,
            model_gateways={"embedder": {"provider": "openai", "provider_model": "text-embedding-3-small"}},
            providers={
                "openai": {"base_url": providers.urls["openai"], "api_key_file": str(key_file), "settle_seconds": 0.5}
            },
            tasks={"poll_interval_seconds": 0.1},
            batches={"checkpoint_seconds": 0.1},
            ingest={"embedding_model": "embedder", "entities": "none", "prices": PRICES, "lane": "auto"},
        ) as stage,
    ):
        yield stage, providers


async def test_a_model_that_only_a_batch_api_has_goes_through_it(at_provider):
    stage, providers = at_provider
    write(stage, 4)
    stage.work()
    run_id = await stage.submit()
    await stage.until(run_id, lambda run: providers.world.jobs)
    while not (await stage.get(run_id)).has_ended:
        providers.advance(providers.settings.queue_seconds + providers.settings.run_seconds + 1)
        await asyncio.sleep(0.1)
    run = await stage.get(run_id)
    assert (run.status, run.item_count_done) == (RunStatus.COMPLETED, 4)
    ((_, _, total),) = await batches(stage)
    assert total == 1
    prompt, _, cost = await events(stage)
    assert (run.prompt_tokens, run.spent, run.reserved) == (prompt, cost, 0)
    assert prompt > 0
    with pytest.raises(ConfigurationError, match="only a provider's batch API serves the model 'embedder'"):
        await stage.part.models.find_embedder("embedder", None).embed_query("whales")


async def test_a_model_that_only_a_batch_api_has_is_refused_in_realtime(at_provider):
    stage, _ = at_provider
    with pytest.raises(InvalidInput, match="choose the lane batch or auto"):
        await stage.submit(lane="realtime")


# Simultaneous runs, and retries -------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
async def test_two_runs_with_the_same_text_pay_for_it_once(stage, provider):
    write(stage, 3)
    stage.work()
    first = await stage.submit(collection="papers")
    second = await stage.submit(collection="copies")
    assert (await stage.ended(first, seconds=100)).status is RunStatus.COMPLETED
    assert (await stage.ended(second, seconds=100)).status is RunStatus.COMPLETED
    billed = billed_texts(provider)
    assert len(billed) == len(set(billed))
    prompt, completion, _ = await events(stage)
    assert (prompt, completion) == (provider.bill["input_tokens"], provider.bill["output_tokens"])


@pytest.mark.thorough
async def test_requests_of_a_failed_document_are_resent_when_it_is_retried(stage, provider):
    write(stage, 1)
    provider.set(next=["invalid", "invalid"])
    stage.work()
    run = await stage.run(seconds=60)
    assert (run.status, run.item_count_failed) == (RunStatus.COMPLETED_WITH_ERRORS, 1)
    await check_books(stage, provider, run.id)
    await stage.part.submission.retry(Wanted(), tenant=None, run_id=run.id)
    stage.batchwright.doorbell.ring(["ingest"])
    again = await stage.until(run.id, lambda run: run.item_count_done == 1 and run.has_ended)
    assert again.status is RunStatus.COMPLETED
    await check_books(stage, provider, run.id)
