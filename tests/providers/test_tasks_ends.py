"""Tasks that do not simply succeed: cancelled, late, refused or abandoned ones; and their webhooks."""

import asyncio
import base64

import pytest

from batchwright.engine.jobs import JobId
from batchwright.providers import process
from batchwright.states import TaskStatus
from tests.providers.task_stage import task_stage

LATE = "UPDATE batchwright.task SET deadline_at = now() - interval '1 second' WHERE id = %(id)s RETURNING id"


@pytest.fixture
async def stage(database_url, tmp_path):
    async with task_stage(database_url, tmp_path) as stage:
        yield stage


async def make_late(stage, id):
    await stage.batchwright.pool.rows(LATE, {"id": id})
    task = await stage.get(id)
    await stage.batchwright.queue.wake([JobId(task.job_id)])
    stage.batchwright.doorbell.ring([task.queue])


async def cancel(stage, id):
    task = await stage.part.tasks.cancel(id, tenant=None)
    stage.batchwright.doorbell.ring([task.queue])


# Cancelled --------------------------------------------------------------------------------------------------------


async def test_a_cancelled_task_keeps_what_was_finished(stage):
    """The contract server has finished half of the lines when the job is cancelled half way."""
    stage.work()
    id = await stage.complete(["openai/gpt-5-mini"], *"abcdefgh")
    await stage.submitted(id)
    settings = stage.server.settings
    stage.server.advance(settings.queue_seconds + settings.run_seconds / 2)
    await cancel(stage, id)
    await stage.until(id, lambda task: task.cancel_requested_at is not None)
    async with asyncio.timeout(30):
        while (await stage.jobs(id))[0].cancelled is None:
            await asyncio.sleep(0.02)
    stage.server.advance(settings.cancel_seconds + 1)
    task = await stage.until(id, lambda task: task.has_ended)
    assert task.status is TaskStatus.CANCELLED
    assert 0 < task.succeeded < 8
    lines = await stage.result(task)
    assert len(lines) == 8
    assert sum(line["error"] is None for line in lines) == task.succeeded


async def test_if_the_provider_cannot_cancel_the_task_says_so_and_fetches_the_late_results(stage):
    stage.work()
    id = await stage.transcribe("sarvam", "one.wav")
    await stage.submitted(id)
    await cancel(stage, id)
    task = await stage.until(id, lambda task: task.cancel_note is not None)
    assert task.status is TaskStatus.IN_PROGRESS
    assert "sarvam cannot cancel a job" in task.cancel_note
    task = await stage.ended(id)
    assert task.status is TaskStatus.COMPLETED, "the job was finished before it could be stopped"
    assert (await stage.result(task))["transcriptions"][0]["transcription"]


# Late -------------------------------------------------------------------------------------------------------------


async def test_at_its_timeout_a_task_is_cancelled_at_the_provider_and_ends_with_the_finished_results(stage):
    stage.work()
    id = await stage.complete(["openai/gpt-5-mini"], *"abcdefgh")
    await stage.submitted(id)
    settings = stage.server.settings
    stage.server.advance(settings.queue_seconds + settings.run_seconds / 2)
    await make_late(stage, id)
    async with asyncio.timeout(30):
        while (await stage.jobs(id))[0].cancelled != "requested":
            await asyncio.sleep(0.02)
    stage.server.advance(settings.cancel_seconds + 1)
    task = await stage.until(id, lambda task: task.has_ended)
    assert task.status is TaskStatus.PARTIAL_COMPLETE
    assert 0 < task.succeeded < 8


async def test_a_task_that_ends_without_a_result_because_it_is_late_says_so(stage):
    stage.work()
    id = await stage.complete(["openai/gpt-5-mini"], "a")
    await stage.submitted(id)
    await make_late(stage, id)
    async with asyncio.timeout(30):
        while (await stage.jobs(id))[0].cancelled != "requested":
            await asyncio.sleep(0.02)
    stage.server.advance(stage.server.settings.cancel_seconds + 1)
    task = await stage.until(id, lambda task: task.has_ended)
    assert (task.status, task.error["code"]) == (TaskStatus.FAILED, "timeout")
    assert task.error["message"].startswith("the task timed out: ")


async def test_a_late_job_that_cannot_be_cancelled_fails_its_task(stage):
    stage.work()
    id = await stage.transcribe("sarvam", "one.wav")
    await stage.submitted(id)
    await make_late(stage, id)
    task = await stage.until(id, lambda task: task.has_ended)
    assert task.status is TaskStatus.FAILED
    assert task.error["code"] == "timeout"
    assert task.provider_state["jobs"][0]["status"] == "FAILED"


async def test_a_job_that_does_not_stop_is_abandoned_ten_minutes_after_the_timeout(stage, monkeypatch):
    monkeypatch.setattr(process, "HARVEST_SECONDS", 0.0)
    stage.server.put_faults("503:route=openai.cancel")
    stage.work()
    id = await stage.complete(["openai/gpt-5-mini"], "a")
    await stage.submitted(id)
    await make_late(stage, id)
    task = await stage.until(id, lambda task: task.has_ended)
    assert (task.status, task.error["code"]) == (TaskStatus.FAILED, "timeout")


@pytest.mark.thorough
async def test_a_task_that_could_not_be_submitted_in_time_fails_without_being_paid(stage):
    stage.server.put_faults("503:route=openai")
    stage.work()
    id = await stage.complete(["openai/gpt-5-mini"], "a")
    async with asyncio.timeout(30):
        while not (jobs := await stage.jobs(id)) or not jobs[0].failures:
            await asyncio.sleep(0.02)
    assert "503" in jobs[0].call_error
    await make_late(stage, id)
    task = await stage.until(id, lambda task: task.has_ended)
    assert (task.status, task.error["code"]) == (TaskStatus.FAILED, "timeout")
    assert stage.server.jobs() == []


async def test_a_task_that_no_worker_starts_does_not_stay_pending_for_ever(stage):
    id = await stage.transcribe("sarvam", "one.wav")
    sql = "UPDATE batchwright.task SET deadline_at = now() - interval '11 minutes' WHERE id = %(id)s RETURNING id"
    await stage.batchwright.pool.rows(sql, {"id": id})
    (round,) = (one for one in stage.batchwright.worker()._duties.rounds if one.name == "tasks")
    async with stage.batchwright.pool.transaction() as session:
        await round.run(session)
    task = await stage.get(id)
    assert (task.status, task.error["code"]) == (TaskStatus.FAILED, "abandoned")


async def test_a_task_of_an_unknown_type_fails_and_says_so(stage):
    """A newer version may have created it."""
    id = await stage.transcribe("sarvam", "one.wav")
    sql = "UPDATE batchwright.task SET task_type = 'translation' WHERE id = %(id)s RETURNING id"
    await stage.batchwright.pool.rows(sql, {"id": id})
    stage.work()
    task = await stage.until(id, lambda task: task.has_ended)
    assert task.status is TaskStatus.FAILED
    assert task.error["message"] == "no configured provider supports tasks of the type 'translation'"


# Credentials ------------------------------------------------------------------------------------------------------


async def test_a_refused_credential_parks_its_tasks_until_it_works_again(stage):
    stage.server.put_faults("auth:route=openai")
    stage.work()
    ids = [await stage.complete(["openai/gpt-5-mini"], "a") for _ in range(3)]
    for id in ids:
        task = await stage.until(id, lambda task: task.waits_for is not None)
        assert task.status is TaskStatus.PENDING
        assert "the credential of openai" in task.waits_for
    assert len(stage.server.requests()) <= len(ids), "later tasks do not call the provider"
    (group,) = await stage.batchwright.inbox(tenant="default")
    assert (group.job_type, group.count, group.kind) == ("provider.task", 3, "fatal")
    assert "openai refuses its credential, and 3 tasks wait for it" in group.message
    assert await stage.batchwright.inbox(tenant="other") == []
    hold = (await stage.part.jobs.holds())["openai"]
    assert hold.try_seconds > 0
    stage.server.put_faults()
    sql = "UPDATE batchwright.provider_hold SET next_try_at = now() RETURNING provider"
    await stage.batchwright.pool.rows(sql)
    jobs = [JobId((await stage.get(id)).job_id) for id in ids]
    await stage.batchwright.queue.wake(jobs[:1])
    stage.batchwright.doorbell.ring(["tasks/openai"])
    for id in ids:
        assert (await stage.ended(id)).status is TaskStatus.COMPLETED
    assert await stage.part.jobs.holds() == {}
    assert len(stage.server.jobs()) == 3


async def test_a_credential_that_is_refused_again_is_tried_less_and_less_often(stage):
    """For example, if a quota is used up, lists are answered, but new jobs are refused."""
    jobs, waits = stage.part.jobs, []
    for _ in range(8):
        await jobs.hold("openai", "insufficient_quota", "no money")
        hold = (await jobs.holds())["openai"]
        waits.append(round(hold.try_seconds))
        await stage.batchwright.pool.rows("UPDATE batchwright.provider_hold SET next_try_at = now() RETURNING provider")
        assert await jobs.may_try("openai")
        assert not await jobs.may_try("openai"), "only one process at a time tries the credential"
        assert await jobs.release("openai")
        assert await jobs.holds() == {}
    assert waits == [30, 60, 120, 240, 480, 900, 900, 900]
    sql = "UPDATE batchwright.provider_hold SET released_at = now() - interval '2 hours' RETURNING provider"
    await stage.batchwright.pool.rows(sql)
    await jobs.hold("openai", "insufficient_quota", "no money")
    assert round((await jobs.holds())["openai"].try_seconds) == 30


async def test_a_provider_that_refuses_does_not_delay_other_providers(stage):
    stage.server.put_faults("auth:route=openai")
    stage.work()
    mixed = await stage.complete(["openai/m", "mistral/m"], "a")
    async with asyncio.timeout(30):
        while {job.provider: job.phase for job in await stage.jobs(mixed)}.get("mistral") != "submitted":
            await asyncio.sleep(0.02)
    task = await stage.get(mixed)
    assert task.status is TaskStatus.IN_PROGRESS


# Webhooks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "event"), [("one.wav", "task.completed"), ("bad__fail_400__.wav", "task.failed")])
async def test_the_end_of_a_task_is_sent_to_webhooks(database_url, tmp_path, name, event):
    secret = tmp_path / "secret"
    secret.write_text("whsec_" + base64.b64encode(bytes(32)).decode())
    hook = {"url": "https://127.0.0.1:9/hooks", "secret_file": str(secret)}
    async with task_stage(database_url, tmp_path, webhooks={"default": [hook]}) as stage:
        stage.work()
        task = await stage.ended(await stage.transcribe("sarvam", name))
        told = "SELECT payload -> 'event' FROM batchwright.job WHERE job_type = 'batch.webhook'"
        ((said,),) = await stage.batchwright.pool.rows(told)
        assert (said["type"], said["batch_id"]) == (event, task.id)


async def test_a_task_that_is_cancelled_while_its_inputs_are_staged_is_not_submitted(stage, monkeypatch):
    """Staging may take minutes, so the task must be read again after it."""
    adapter = stage.part.directory.get("openai")
    stage_really = adapter.stage

    async def cancel_meanwhile(request, staged):
        async for step in stage_really(request, staged):
            yield step
        await stage.part.tasks.cancel(id, tenant=None)

    monkeypatch.setattr(adapter, "stage", cancel_meanwhile)
    id = await stage.complete(["openai/gpt-5-mini"], "a")
    stage.work()
    task = await stage.until(id, lambda task: task.has_ended)
    assert task.status is TaskStatus.CANCELLED
    assert stage.server.jobs() == []
    assert stage.server.requests("openai.create") == []
