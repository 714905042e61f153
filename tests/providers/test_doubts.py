"""Tasks that are in doubt, late, cancelled or abandoned at the worst moment: nothing is paid twice or lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from batchwright.errors import Conflict
from batchwright.providers import process
from batchwright.providers.contract import Cancelled, Job
from batchwright.providers.submission import WantedInput, WantedTask
from batchwright.states import TaskStatus
from tests.providers.mortal import ABANDON, ward
from tests.providers.task_stage import chat_lines, task_stage
from tests.providers.test_crashes import check, wanted_of
from tests.support import raw, sparsely

HOUR = 3600.0
SUBMITTING = 3
"""Commits after an upload: the uploaded file, the end of the staging, and the start of the create call."""
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def simulator():
    return {}


@pytest.fixture
async def hospital(database_url, tmp_path, simulator):
    tables = {name: {"settle_seconds": None} for name in ("openai", "anthropic", "azure", "aws", "sarvam")}
    tasks = {"poll_interval_seconds": 120.0}
    async with (
        task_stage(database_url, tmp_path, tables=tables, tasks=tasks, simulator=simulator) as stage,
        ward(stage, tmp_path) as one,
    ):
        yield one


def dies_at_the_create_call(mortal, *, is_sent, meanwhile=lambda: None):
    """The worker dies when it is about to send the call, or when the provider has just taken it."""
    commits = None

    def watch(name):
        nonlocal commits
        if name.endswith("/files"):
            commits = 0
        if name == "commit" and commits is not None:
            commits += 1
            if commits == SUBMITTING:
                meanwhile()
                if not is_sent:
                    mortal.die()
        if is_sent and name.endswith("/batches"):
            mortal.die()

    mortal.on_point = watch


async def test_a_task_that_is_cancelled_in_doubt_is_not_resubmitted(hospital):
    task = await hospital.submit(await wanted_of(hospital, "openai"))
    dies_at_the_create_call(hospital.mortal, is_sent=False)
    await hospital.round(task)
    assert [row.phase for row in await hospital.rows(task)] == ["submitting"]
    await hospital.tasks.cancel(task.id, tenant=None)
    task = await hospital.live(task)
    assert task.status is TaskStatus.CANCELLED
    assert hospital.started() == []


async def test_a_task_that_is_cancelled_in_doubt_is_found_and_cancelled(hospital):
    task = await hospital.submit(await wanted_of(hospital, "openai"))
    dies_at_the_create_call(hospital.mortal, is_sent=True)
    await hospital.round(task)
    await hospital.tasks.cancel(task.id, tenant=None)
    task = await hospital.live(task)
    assert task.status is TaskStatus.CANCELLED
    (job,) = hospital.started()
    assert job.cancelled_at is not None


async def test_the_time_of_a_long_upload_does_not_shorten_the_time_to_look_for_the_job(hospital):
    """The create call takes longer than lists may lag, and its answer is lost with the worker."""
    hospital.server.put_faults("lag:seconds=45")
    task = await hospital.submit(await wanted_of(hospital, "openai"))
    dies_at_the_create_call(hospital.mortal, is_sent=True, meanwhile=lambda: hospital.server.advance(600))
    await check(hospital, await hospital.live(task))
    assert hospital.deaths == 1


async def test_a_task_whose_job_is_found_only_after_the_timeout_keeps_its_results(hospital):
    task = await hospital.submit(await wanted_of(hospital, "openai", timeout_hours=2.0))
    dies_at_the_create_call(hospital.mortal, is_sent=True)
    await hospital.round(task)
    hospital.server.advance(3 * HOUR)
    await check(hospital, await hospital.live(task))


@pytest.mark.parametrize("route", ["get", "files"])
async def test_a_call_that_fails_at_the_timeout_loses_no_result(hospital, route):
    """Azure cannot cancel, so the last poll decides; a poll that fails must not decide."""
    task = await hospital.submit(await wanted_of(hospital, "azure", timeout_hours=1.0))
    await hospital.round(task)
    hospital.server.advance(2 * HOUR)
    hospital.server.put_faults(f"500:route=azure.{route}:times=1")
    task = await hospital.live(task)
    assert hospital.server.faults.fired == [1]
    await check(hospital, task)


async def test_a_job_that_cannot_be_cancelled_and_still_runs_at_the_timeout_is_abandoned(hospital):
    task = await hospital.submit(await wanted_of(hospital, "azure", timeout_hours=1.0))
    await hospital.round(task)
    hospital.server.advance(HOUR)
    for job in hospital.started():
        job.run_seconds = 9 * HOUR
    task = await hospital.live(task)
    assert task.status is TaskStatus.FAILED
    assert task.error["code"] == "timeout"


class TestALongOutage:
    @pytest.fixture
    def simulator(self):
        return {"run_seconds": 10 * HOUR}

    async def test_finished_results_are_fetched_however_late(self, hospital):
        """No worker ran from long before the timeout until long after it."""
        task = await hospital.submit(await wanted_of(hospital, "openai", timeout_hours=2.0))
        await hospital.round(task)
        hospital.server.advance(7 * HOUR)
        hospital.server.put_faults("503:route=openai.cancel:times=1")
        task = await hospital.live(task)
        assert hospital.server.faults.fired == [1]
        assert task.status is TaskStatus.PARTIAL_COMPLETE
        assert (task.succeeded, task.failed) == (1, 2)


async def test_a_task_that_is_abandoned_in_doubt_does_not_block_other_tasks(hospital):
    """Anthropic has no marker, so only one submission at a time may be in doubt."""
    lost = await hospital.submit(await wanted_of(hospital, "anthropic"))
    hospital.mortal.on_point = lambda name: hospital.mortal.die() if name.endswith("/batches") else None
    await hospital.round(lost)
    assert [row.phase for row in await hospital.rows(lost)] == ["submitting"]
    sql = "UPDATE batchwright.job SET status = 'FAILED', finished_at = now() WHERE id = %(id)s"
    await raw(hospital.queue, sql, id=lost.job_id)
    await hospital.tidy()
    assert (await hospital.tasks.get(lost.id, tenant=None)).status is TaskStatus.FAILED
    assert [row.phase for row in await hospital.rows(lost)] == ["ended"]
    hospital.server.reset()
    await check(hospital, await hospital.live(await hospital.submit(await wanted_of(hospital, "anthropic"))))


async def test_of_two_submissions_in_doubt_the_older_goes_first(hospital):
    """Otherwise each of them would adopt the other's batch."""
    tasks = [await hospital.submit(await wanted_of(hospital, "anthropic")) for _ in range(2)]
    for task in tasks:
        hospital.mortal.on_point = lambda name: hospital.mortal.die() if name.endswith("/batches") else None
        await hospital.round(task)
        await raw(
            hospital.queue, "UPDATE batchwright.provider_job SET phase = 'staged' WHERE owner = %(id)s", id=task.id
        )
    await raw(hospital.queue, "UPDATE batchwright.provider_job SET phase = 'submitting'")
    hospital.server.reset()
    for task in tasks:
        assert (await hospital.live(task)).status is TaskStatus.PARTIAL_COMPLETE
    assert len(hospital.started()) == 2


async def test_a_batch_that_may_belong_to_another_task_is_not_cancelled(hospital):
    adapter = hospital.directory.get("anthropic")
    assert await adapter.cancel(Job(external_id="msgbatch_1", extra={"is_unproved": True})) is Cancelled.UNSUPPORTED
    assert hospital.server.requests() == []


async def test_a_round_over_many_jobs_ends_in_time_and_sees_a_cancel(hospital, monkeypatch):
    monkeypatch.setattr(process, "ROUND_SECONDS", 0.02)
    pytest.importorskip("aiobotocore")
    inputs = [WantedInput.of(await hospital.stage.upload(b"x", f"{n}.wav")) for n in range(60)]
    wanted = WantedTask(tenant="default", task_type="transcription", provider="aws", inputs=inputs)
    task = await hospital.submit(wanted)
    while not (begun := len(hospital.started())):
        await hospital.round(task)
    assert begun < 60
    monkeypatch.undo()
    await hospital.tasks.cancel(task.id, tenant=None)
    task = await hospital.live(task)
    assert len(hospital.started()) == begun
    assert task.succeeded == begun
    assert len(str(task.provider_state)) < 1_000_000


async def test_results_of_many_jobs_do_not_swell_the_row(hospital, monkeypatch):
    """Each result is small enough for its document, but all of them together are not."""
    monkeypatch.setattr(process, "INLINE_TASK_BYTES_MAX", 100)
    file = await hospital.stage.upload(chat_lines("a", "b"), "requests.jsonl")
    models = [f"openai/model-{n}" for n in range(4)]
    wanted = WantedTask(tenant="default", task_type="completion", inputs=[WantedInput.of(file)], models=models)
    assert (await hospital.live(await hospital.submit(wanted))).status is TaskStatus.COMPLETED
    wanted = await wanted_of(hospital, "sarvam")
    task = await hospital.live(await hospital.submit(wanted))
    assert task.status is TaskStatus.PARTIAL_COMPLETE
    assert [job["result"] for job in task.provider_state["jobs"]] == [None]


async def test_deaths_of_workers_are_not_counted_while_the_task_makes_progress(hospital):
    """Otherwise the third death would fail the task, and its paid results would be lost."""
    task = await hospital.submit(await wanted_of(hospital, "openai"))
    await raw(hospital.queue, "UPDATE batchwright.job SET rescues = 1 WHERE id = %(id)s", id=task.job_id)
    hospital.mortal.on_point = lambda name: hospital.mortal.die() if name.endswith("/batches") else None
    await hospital.round(task)
    sql = "SELECT rescues FROM batchwright.job WHERE id = %(id)s"
    assert await raw(hospital.queue, sql, id=task.job_id) == [(0,)]
    await check(hospital, await hospital.live(task))


@pytest.mark.parametrize("point", ["/files", "/batches", "/content"])
async def test_a_worker_that_lost_its_claim_and_continues_changes_nothing(hospital, point):
    """Its call is answered after it has lost its claim."""
    reached, go = asyncio.Event(), asyncio.Event()
    pass_point = hospital.mortal.pass_point

    async def stall(name):
        if name.endswith(point) and not reached.is_set():
            reached.set()
            await go.wait()
        await pass_point(name)

    hospital.mortal.pass_point = stall
    task = await hospital.submit(await wanted_of(hospital, "openai"))
    while not reached.is_set():
        hospital.server.advance(120)
        claim = await hospital.claim(task, "old")
        late = asyncio.create_task(hospital.run_and_settle(claim, task, "old"))
        await asyncio.wait([late, asyncio.create_task(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
    await raw(hospital.queue, ABANDON, id=task.job_id, now=hospital.now())
    ended = await hospital.live(task)
    go.set()
    await late
    await check(hospital, ended)
    assert await hospital.tasks.get(task.id, tenant=None) == ended


@pytest.mark.parametrize("provider", sparsely(["openai", "anthropic", "azure"], every=3))
async def test_a_cancel_between_any_two_steps_ends_the_task_soon_and_keeps_what_was_paid(hospital, provider):
    wanted = await wanted_of(hospital, provider)
    await hospital.live(await hospital.submit(wanted))
    points, pass_point = len(hospital.mortal.passed), hospital.mortal.pass_point
    for n in range(1, points + 1):
        hospital.server.reset()
        hospital.mortal.revive()
        task = await hospital.submit(wanted)

        async def cancel_at(name, n=n, task=task):
            await pass_point(name)
            if len(hospital.mortal.passed) == n:
                with suppress(Conflict):  # the task has just ended
                    await hospital.tasks.cancel(task.id, tenant=None)

        hospital.mortal.pass_point = cancel_at
        task = await hospital.live(task)
        assert task.status in (TaskStatus.CANCELLED, TaskStatus.PARTIAL_COMPLETE)
        assert all(row.has_ended for row in await hospital.rows(task))
        assert len(hospital.started()) <= 1
        result = await hospital.stage.result(task) or []
        lines = result["transcriptions"] if isinstance(result, dict) else result
        assert sum(line["error"] is None for line in lines) == task.succeeded
        if task.cancel_requested_at is not None:
            assert (task.ended_at - task.cancel_requested_at).total_seconds() < 300
