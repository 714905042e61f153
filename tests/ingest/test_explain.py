"""Every waiting document says what it waits for."""

from __future__ import annotations

import pytest

from batchwright.ingest.explain import Waits, explain_item, explain_run
from batchwright.ingest.runs import QUEUE
from tests.ingest.stage import Stage, ingest_stage

STEPS = """
from batchwright.errors import RateLimited, Transient
from batchwright.ingest.pipeline import step
from batchwright.ingest.results import Deferred


@step("SLOW", after="CONTENT_EXTRACTED", before="PERSISTED")
async def slow(ctx):
    match ctx.item.name:
        case "batch.txt":
            raise Deferred("a batch of 1,200 embeddings", 600, waits_for="batch")
        case "rate.txt":
            raise RateLimited("the token limit of this minute is used up", retry_after=600, code="rate_budget")
        case "retry.txt":
            raise Transient("HTTP 503", code="server_error")
"""


@pytest.fixture
async def stage(database_url, tmp_path):
    (tmp_path / "slow_steps.py").write_text(STEPS)
    settings = {"steps": [str(tmp_path / "slow_steps.py")], "max_retries": 50}
    async with ingest_stage(database_url, tmp_path, ingest=settings) as stage:
        yield stage


async def explained(stage: Stage, run_id: str, name: str) -> list[Waits]:
    return await explain_item(stage.part, (await stage.items(run_id))[name])


async def explained_run(stage: Stage, run_id: str) -> dict[str, Waits]:
    return {one.reason: one for one in await explain_run(stage.part, await stage.get(run_id))}


async def test_a_run_without_a_worker_says_how_to_start_one(stage):
    stage.write("a.txt", "Rivers.")
    id = await stage.submit()
    found = (await explained_run(stage, id))["no_worker"]
    assert found.message == "no live worker runs documents"
    assert found.remedy == "start one: batchwright worker, or batchwright up"


async def test_waiting_steps_say_what_they_wait_for_and_until_when(stage):
    for name in ("batch.txt", "rate.txt", "retry.txt", "good.txt"):
        stage.write(name, f"Rivers of {name}.")
    stage.work()
    id = await stage.submit()
    await stage.until(id, lambda run: run.item_count_done == 1)
    while len(waits := await explained_run(stage, id)) < 3 or waits["backoff"].until is None:
        pass
    assert {reason: one.count for reason, one in waits.items()} == {"batch": 1, "rate": 1, "backoff": 1}
    (batch,) = await explained(stage, id, "batch.txt")
    assert (batch.reason, batch.step) == ("batch", "SLOW")
    assert batch.message == "waits for a batch: a batch of 1,200 embeddings"
    assert batch.until is not None
    (rate,) = await explained(stage, id, "rate.txt")
    assert rate.message == "waits for the rate limit: the token limit of this minute is used up"
    assert "of 50 after: HTTP 503" in waits["backoff"].message
    assert await explained(stage, id, "good.txt") == []
    run = await stage.part.submission.cancel(id, tenant=None)
    assert await explain_run(stage.part, run) == []
    assert await explained(stage, id, "batch.txt") == []


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("user", "resume it: batchwright ingest resume {id}"),
        ("budget", "raise the budget: batchwright ingest resume {id} --budget AMOUNT"),
        ("credential", "replace the credential, then resume: batchwright ingest resume {id}"),
    ],
)
async def test_a_parked_run_says_why_once_and_what_to_do(stage, reason, remedy):
    stage.write("batch.txt", "Rivers.")
    stage.work()
    id = await stage.submit()
    await stage.until(id, lambda run: run.item_count_total == 1)
    await stage.part.runs.park(id, reason, "that is why")
    (of_run,) = await explain_run(stage.part, await stage.get(id))
    assert (of_run.reason, of_run.message) == (reason, "the run is parked: that is why")
    assert of_run.remedy == remedy.format(id=id)
    of_item = await explained(stage, id, "batch.txt")
    assert of_item[0] == of_run


async def test_a_paused_queue_and_a_missing_worker_are_named(stage):
    stage.write("batch.txt", "Rivers.")
    worker = stage.work()
    id = await stage.submit()
    await stage.until(id, lambda run: run.item_count_total == 1)
    while [one.reason for one in await explained(stage, id, "batch.txt")] != ["batch"]:
        pass
    await stage.close()
    await stage.batchwright.named_queues.pause(QUEUE)
    found = {one.reason: one for one in await explained(stage, id, "batch.txt")}
    assert set(found) == {"batch", "paused_queue", "no_worker"}
    assert found["paused_queue"].remedy == "resume it: batchwright queue resume ingest"
    item = (await stage.items(id))["batch.txt"]
    await stage.rows(
        "UPDATE batchwright.job SET status = 'RUNNING', locked_by = %(worker)s, locked_at = now(),"
        " lease_until = now() - interval '1 minute' WHERE id = %(id)s RETURNING id",
        worker=worker.id,
        id=item.job_id,
    )
    lease = (await explained(stage, id, "batch.txt"))[-1]
    assert lease.reason == "lease"
    assert lease.message == f"its worker {worker.id} has stopped renewing the lease; another one picks it up soon"
