"""Workers die at every step of a batch; another one continues, nothing is lost, and few requests are resent."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from batchwright.batches.part import BatchesPart
from batchwright.settings import settings_document
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from tests.batches.stage import request, stage_settings, staged
from tests.support import raw, sparsely

LEASE = {"engine": {"lease_seconds": 1.0, "rescue_jitter_seconds": 0.0}}
QUICK = SimulatorSettings(any_model=Profile(decode_rate=200.0, output_sigma=0.0, max_running=1000))
SLOW = SimulatorSettings(any_model=Profile(decode_rate=20.0, output_sigma=0.0, max_running=1000))
REQUESTS = 60
IN_FLIGHT = 16

POINTS = [
    ("batchwright.batches.plan.plan:read", "before", 1),
    ("batchwright.batches.plan.plan:write", "after", 1),
    ("batchwright.batches.journal.workspace:Workspace.keep_plan", "after", 1),
    ("batchwright.batches.store:Batches.begin", "before", 1),
    ("batchwright.batches.store:Batches.begin", "after", 1),
    ("batchwright.engine.queue:Queue.wait", "before", 1),
    ("batchwright.engine.queue:Queue.wait", "after", 1),
    ("batchwright.batches.send.dispatch:Dispatcher.begin", "after", 1),
    ("batchwright.batches.journal.journal:Journal.append_all", "before", 2),
    ("batchwright.batches.journal.journal:Journal.append_all", "after", 2),
    ("batchwright.batches.store:Batches.register", "before", 2),
    ("batchwright.batches.store:Batches.register", "after", 2),
    ("batchwright.batches.store:Batches.finalize", "before", 1),
    ("batchwright.batches.store:Batches.finalize", "after", 1),
    ("batchwright.batches.output.finalize:Finalizer.write", "after", 1),
    ("batchwright.batches.store:Batches.complete", "after", 1),
    ("batchwright.batches.output.finalize:Finalizer.add_files", "after", 1),
    ("batchwright.engine.queue:Queue.succeed_with", "after", 1),
]


@asynccontextmanager
async def doomed(stage, folder, **fate):
    settings = settings_document(stage.batchwright.settings)
    brief = json.dumps({"settings": settings, **fate})
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.batches.doomed", brief)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("at", "when", "call"), sparsely(POINTS, 4))
async def test_if_a_worker_dies_here_nothing_is_lost(database_url, tmp_path, at, when, call):
    async with staged(database_url, tmp_path, simulator=QUICK, inference={"concurrency": IN_FLIGHT}, **LEASE) as stage:
        lines = [request(f"r{n}", model="one" if n % 2 else "two") for n in range(REQUESTS)]
        id = await stage.submit(lines)
        async with doomed(stage, tmp_path, at=at, when=when, call=call) as process, asyncio.timeout(30):
            assert await process.wait() == -signal.SIGKILL
        stage.work()
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert batch.status is BatchStatus.COMPLETED
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(REQUESTS)]
        assert errors == []
        assert (batch.total, batch.completed, batch.failed) == (REQUESTS, REQUESTS, 0)
        again = stage.simulator.asked(over=1)["requests"]
        assert sum(again.values()) - len(again) <= IN_FLIGHT


CANCEL_POINTS = [
    "",
    "batchwright.batches.output.assemble:Assembly.fill",
    "batchwright.batches.store:Batches.end_cancelled",
    "batchwright.engine.queue:Queue.succeed_with",
]
"""The first point is the moment after the cancellation, with requests in flight."""


@pytest.mark.thorough
@pytest.mark.parametrize("point", sparsely(CANCEL_POINTS, 3))
async def test_if_a_worker_dies_during_a_cancellation_the_next_one_finishes_it(database_url, tmp_path, point):
    fate = {"at": point, "when": "after", "call": 1} if point else {}
    limits = {"inference": {"concurrency": IN_FLIGHT}, **LEASE}
    async with staged(database_url, tmp_path, simulator=SLOW, **limits) as stage:
        id = await stage.submit([request(f"r{n}") for n in range(300)])
        async with doomed(stage, tmp_path, **fate) as process:
            await stage.until(id, lambda batch: batch.completed > 0)
            await stage.batchwright.part(BatchesPart).batches.cancel(id, tenant="default")
            if not point:
                process.kill()
            async with asyncio.timeout(30):
                assert await process.wait() == -signal.SIGKILL
        sent = stage.simulator.stats()["received"]
        stage.work()
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        assert batch.status is BatchStatus.CANCELLED
        assert sorted(line["custom_id"] for line in output + errors) == sorted(f"r{n}" for n in range(300))
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        assert (len(output), len(errors), batch.failed) == (batch.completed, batch.cancelled, 0)
        assert 0 < batch.completed <= sent
        assert batch.completed >= sent - (0 if point else IN_FLIGHT)
        assert stage.simulator.stats()["received"] == sent, "nothing is sent after a cancellation"


@pytest.mark.thorough
async def test_a_client_that_dies_during_its_cancellation_changes_nothing(database_url, tmp_path):
    """Its transaction has cancelled the shards and not yet moved the batch."""
    point = {"at": "batchwright.engine.owned:cancel_children", "when": "after", "call": 1}
    async with staged(database_url, tmp_path, simulator=SLOW, inference={"concurrency": IN_FLIGHT}) as stage:
        stage.work()
        id = await stage.submit([request(f"r{n}") for n in range(REQUESTS)])
        await stage.until(id, lambda batch: batch.completed > 0)
        await stage.batchwright.part(BatchesPart).batches.pause(id, tenant="default")
        sql = "SELECT status::text FROM batchwright.job WHERE parent_job_id IS NOT NULL"
        async with asyncio.timeout(30):
            while await raw(stage.batchwright.queue, sql) != [("QUEUED",)]:
                await asyncio.sleep(0.02)
        async with doomed(stage, tmp_path, cancel=id, **point) as process, asyncio.timeout(30):
            assert await process.wait() == -signal.SIGKILL
        assert (await stage.get(id)).status is BatchStatus.IN_PROGRESS
        await stage.batchwright.part(BatchesPart).batches.resume(id, tenant="default")
        batch = await stage.ended(id)
        assert (batch.status, batch.completed, batch.cancelled) == (BatchStatus.COMPLETED, REQUESTS, 0)


async def test_a_shard_that_killed_two_workers_runs_alone_and_the_batch_completes(database_url, tmp_path):
    async with staged(database_url, tmp_path, simulator=QUICK, **LEASE) as stage:
        id = await stage.submit([request(f"r{n}") for n in range(REQUESTS)])
        await raw(stage.batchwright.queue, "UPDATE batchwright.job SET rescues = 2")
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, REQUESTS)
        sql = "SELECT DISTINCT worker FROM batchwright.job_event WHERE event = 'job.started'"
        assert len(await raw(stage.batchwright.queue, sql)) == 2


async def test_answers_that_were_never_registered_are_adopted_on_the_same_machine(database_url, tmp_path):
    """The worker dies before any checkpoint has registered its journal."""
    settings = {"batches": {"checkpoint_seconds": 60.0}, "inference": {"concurrency": IN_FLIGHT}, **LEASE}
    async with staged(database_url, tmp_path, simulator=QUICK, **settings) as stage:
        id = await stage.submit([request(f"r{n}") for n in range(REQUESTS)])
        point = {"at": "batchwright.batches.journal.journal:Journal.append_all", "when": "after", "call": 3}
        async with doomed(stage, tmp_path, **point) as process, asyncio.timeout(30):
            await process.wait()
        assert (await stage.get(id)).completed == 0
        stage.work()
        batch = await stage.ended(id)
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, REQUESTS)
        ((adopted,),) = await raw(
            stage.batchwright.queue,
            "SELECT fields->>'answers' FROM batchwright.job_event WHERE event = 'batch.answers_adopted'",
        )
        assert 3 <= int(adopted) < REQUESTS
        assert len(stage.simulator.asked(over=1)["requests"]) <= REQUESTS - int(adopted)


async def test_a_worker_that_lost_its_shard_and_still_writes_changes_nothing(database_url, tmp_path):
    """A worker is suspended, loses its shard, and continues after another one has finished the batch."""
    async with staged(database_url, tmp_path, simulator=SLOW, **LEASE) as stage:
        id = await stage.submit([request(f"r{n}") for n in range(200)])
        async with doomed(stage, tmp_path) as process:
            await stage.until(id, lambda batch: batch.completed > 0)
            process.send_signal(signal.SIGSTOP)
            stage.work()
            batch = await stage.ended(id)
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                await process.wait()
        after = await stage.get(id)
        assert after == batch
        output, errors = await stage.results(batch)
        assert sorted(line["custom_id"] for line in output) == sorted(f"r{n}" for n in range(200))
        assert (errors, batch.status, batch.completed) == ([], BatchStatus.COMPLETED, 200)


def test_settings_are_unchanged_in_another_process(tmp_path):
    settings = stage_settings("postgresql://h/d", tmp_path, "http://127.0.0.1:1")
    assert json.loads(json.dumps(settings_document(settings)))["database"]["url"] == "postgresql://h/d"
