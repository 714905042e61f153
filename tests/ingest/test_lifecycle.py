"""The life of runs: cancel, park, resume, retry, dismiss, changed and removed sources, and upkeep."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from decimal import Decimal

import pytest

from batchwright.db.database import Database
from batchwright.engine.jobs import JobId
from batchwright.engine.queue import Queue
from batchwright.errors import Conflict
from batchwright.ingest.items import ITEM_JOB, Wanted
from batchwright.ingest.sources.folders import DEPTH_MAX
from batchwright.ingest.upkeep import DocumentUpkeep
from batchwright.states import ItemStatus, RunStatus
from tests.chaos.document_verdict import COUNTS
from tests.ingest.bench import Bench, Script, remote
from tests.ingest.fake_provider import MARKER, FakeProvider
from tests.ingest.stage import ingest_stage
from tests.support import Clock

LIVE = """
SELECT document.name, chunk.text FROM batchwright.ingest_document AS document
JOIN batchwright.ingest_chunk AS chunk ON chunk.version_id = document.live_version AND chunk.words IS NOT NULL
ORDER BY document.name
"""


@pytest.fixture
async def stage(database_url, tmp_path):
    async with ingest_stage(database_url, tmp_path) as stage:
        yield stage


@pytest.fixture
async def provider():
    async with FakeProvider() as provider:
        yield provider


@pytest.fixture
async def remote_stage(database_url, tmp_path, provider):
    async with ingest_stage(database_url, tmp_path, **remote(provider, max_retries=0)) as stage:
        yield stage


async def live(stage):
    return dict(await stage.rows(LIVE))


async def check_counters(stage, id):
    run = await stage.get(id)
    counted = (
        run.item_count_total,
        run.item_count_done,
        run.item_count_unchanged,
        run.item_count_failed,
        run.item_count_cancelled,
    )
    assert counted == tuple((await stage.rows(COUNTS, id=id))[0])
    return run


# Cancel, park, resume -------------------------------------------------------------------------------------------


async def test_a_cancelled_run_ends_with_its_open_documents_and_can_be_retried(stage):
    bench = Bench(stage)
    items = await bench.put(3)
    await bench.drive(items[0])
    run = await stage.part.submission.cancel(items[0].run_id, tenant=None)
    assert (run.status, run.item_count_done, run.item_count_cancelled) == (RunStatus.CANCELLED, 1, 2)
    await check_counters(stage, run.id)
    with pytest.raises(Conflict, match="is already CANCELLED, and cannot be cancelled"):
        await stage.part.submission.cancel(run.id, tenant=None)
    for item in items[1:]:
        assert await bench.queue.claim_job("w", JobId(item.job_id), [ITEM_JOB]) is None
    assert await stage.part.submission.retry(Wanted(), tenant=None, run_id=run.id) == {run.id: 2}
    stage.work()
    run = await stage.ended(run.id)
    assert (run.status, run.item_count_done, run.item_count_cancelled) == (RunStatus.COMPLETED, 3, 0)
    await check_counters(stage, run.id)
    await bench.tools.sandboxes.close()


async def test_a_run_can_be_cancelled_before_it_begins_and_while_it_is_parked(stage):
    stage.write("a.txt", "Anna.")
    for is_parked in (False, True):
        id = await stage.submit()
        if is_parked:
            await stage.part.submission.park(id, tenant=None)
            with pytest.raises(Conflict, match="is PARKED; only a PENDING or RUNNING one"):
                await stage.part.submission.park(id, tenant=None)
        assert (await stage.part.submission.cancel(id, tenant=None)).status is RunStatus.CANCELLED
        with pytest.raises(Conflict, match="only a PARKED one can be resumed"):
            await stage.part.submission.resume(id, tenant=None)


async def test_a_run_that_is_parked_before_it_begins_runs_when_it_is_resumed(stage):
    stage.write("a.txt", "Anna.")
    id = await stage.submit()
    await stage.part.submission.park(id, tenant=None)
    stage.work()
    job = (await stage.get(id)).job_id
    while (await stage.batchwright.queue.get(JobId(job))).claims < 1:
        await stage.until(id, lambda run: True)
    assert (await stage.get(id)).status is RunStatus.PARKED
    while (await stage.batchwright.queue.get(JobId(job))).status.value != "QUEUED":
        await stage.until(id, lambda run: True)
    await stage.part.submission.resume(id, tenant=None)
    assert (await stage.ended(id)).status is RunStatus.COMPLETED


async def test_a_budget_parks_the_run_and_a_larger_one_lets_it_continue(remote_stage, provider):
    stage, bench = remote_stage, Bench(remote_stage)
    items = await bench.put(3, budget=Decimal("0.00001"))
    for item in items:
        assert (await bench.drive(item)).status is ItemStatus.OPEN
    run = await check_counters(stage, items[0].run_id)
    assert (run.status, run.parked_reason) == (RunStatus.PARKED, "budget")
    assert "of the budget of" in run.parked_message
    assert run.spent + run.reserved <= run.budget
    await stage.part.submission.resume(run.id, tenant=None, budget=Decimal(10))
    for item in items:
        assert (await bench.live(item)).status is ItemStatus.DONE
    run = await stage.get(run.id)
    assert run.spent == sum([(await bench.get(item)).cost for item in items]) > 0
    assert run.reserved == 0
    assert len({entry["id"] for entry in provider.entries}) == len(provider.entries) == 6
    await bench.tools.sandboxes.close()


async def test_a_refused_key_parks_the_run_and_nothing_is_paid_twice(remote_stage, provider):
    stage, bench = remote_stage, Bench(remote_stage)
    items = await bench.put(10)
    provider.set(next=["unauthorized"])
    for item in items:
        assert (await bench.drive(item)).status is ItemStatus.OPEN
    run = await check_counters(stage, items[0].run_id)
    assert (run.status, run.parked_reason, run.item_count_failed) == (RunStatus.PARKED, "credential", 0)
    assert "correct the key" in run.parked_message
    await stage.part.submission.resume(run.id, tenant=None)
    for item in items:
        assert (await bench.live(item)).status is ItemStatus.DONE
    assert len(provider.entries) == 20
    await bench.tools.sandboxes.close()


async def test_answers_that_a_worker_has_paid_for_are_kept_although_it_lost_the_job(remote_stage, provider):
    stage, bench = remote_stage, Bench(remote_stage)
    (item,) = await bench.put()
    provider.set(delay_seconds=0.5)
    zombie = asyncio.create_task(bench.run_and_settle(await bench.claim(item), item))
    while provider.running_max < 2:
        await asyncio.sleep(0.01)
    await bench.give_back(item)
    await zombie
    found = await bench.get(item)
    told = [event.event for event in await stage.events(found)]
    assert (found.status, told.count("model_called")) == (ItemStatus.OPEN, 2)
    assert ("step_completed", "EMBEDDED") not in await stage.step_events(found)
    assert (await bench.live(item)).status is ItemStatus.DONE
    run = await stage.get(item.run_id)
    assert (len(provider.entries), run.calls, run.reserved) == (2, 2, 0)
    assert run.spent > 0
    await bench.tools.sandboxes.close()


# Retry and dismiss ----------------------------------------------------------------------------------------------


async def test_failed_documents_are_retried_one_by_cause_or_all_and_dismissed(remote_stage, provider):
    stage = remote_stage
    stage.write("bad.txt", f"Anna. {MARKER}")
    stage.write("empty.txt", "")
    stage.write("good.txt", "Berta.")
    stage.work()
    run = await stage.run()
    assert (run.status, run.item_count_failed) == (RunStatus.COMPLETED_WITH_ERRORS, 2)
    causes = {cause.cause: cause for cause in await stage.part.items.inbox("default")}
    assert {name: one.names for name, one in causes.items()} == {
        "CONTENT_EXTRACTED:SchemaInvalid:empty_document": ["empty.txt"],
        "EMBEDDED:SchemaInvalid:invalid_value": ["bad.txt"],
    }
    paid = len(provider.entries)
    items = await stage.items(run.id)

    again = await stage.part.submission.retry_item(items["bad.txt"].id, tenant=None)
    assert (again.status, len(again.job_ids)) == (ItemStatus.OPEN, 2)
    run = await stage.ended(run.id)
    await check_counters(stage, run.id)
    assert (run.status, run.item_count_failed) == (RunStatus.COMPLETED_WITH_ERRORS, 2)
    told = await stage.step_events((await stage.items(run.id))["bad.txt"])
    assert told.count(("step_completed", "CONTENT_EXTRACTED")) == 1  # finished steps are kept

    cause = "CONTENT_EXTRACTED:SchemaInvalid:empty_document"
    assert await stage.part.submission.retry(Wanted(cause=cause), tenant=None) == {run.id: 1}
    await stage.ended(run.id)

    stage.write("bad.txt", "Anna.")
    stage.write("empty.txt", "Carl.")
    assert await stage.part.submission.retry(Wanted(), tenant=None, run_id=run.id, anew=True) == {run.id: 2}
    run = await stage.ended(run.id)
    await check_counters(stage, run.id)
    assert (run.status, run.item_count_done) == (RunStatus.COMPLETED, 3)
    assert sorted(await live(stage)) == ["bad.txt", "empty.txt", "good.txt"]
    assert len(provider.entries) == paid + 4
    with pytest.raises(Conflict, match="is DONE; only a FAILED or CANCELLED one can be retried"):
        await stage.part.submission.retry_item(items["good.txt"].id, tenant=None)


async def test_a_document_is_retried_while_its_run_goes_on(stage):
    bench = Bench(stage)
    script = Script({"LEFT": [ValueError("no")]})
    items = await bench.put(2)
    assert (await bench.drive(items[0], script.graph())).status is ItemStatus.FAILED
    again = await stage.part.submission.retry_item(items[0].id, tenant=None)
    run = await check_counters(stage, again.run_id)
    assert (run.status, run.item_count_failed) == (RunStatus.RUNNING, 0)
    assert (await bench.live(again, script.graph())).status is ItemStatus.DONE
    assert script.called.count("FETCHED") == 1
    await check_counters(stage, run.id)
    await bench.tools.sandboxes.close()


async def test_dismissed_documents_are_not_in_the_inbox_and_still_count_as_failed(stage):
    stage.write("empty.txt", "")
    stage.work()
    run = await stage.run()
    assert await stage.part.items.dismiss("default", Wanted()) == 1
    assert await stage.part.items.dismiss("default", Wanted()) == 0
    assert await stage.part.items.inbox("default") == []
    assert (await check_counters(stage, run.id)).item_count_failed == 1
    assert await stage.part.submission.retry(Wanted(), tenant="default") == {}


# Sources that change --------------------------------------------------------------------------------------------


async def test_a_changed_document_is_seen_and_replaces_the_old_version_in_one_step(stage):
    stage.write("a.txt", "The old words.")
    stage.work()
    await stage.succeed()
    assert await live(stage) == {"a.txt": "The old words."}
    stage.write("a.txt", "The new and longer words.")
    run = await stage.succeed()
    assert run.item_count_done == 1
    assert await live(stage) == {"a.txt": "The new and longer words."}
    states = await stage.rows("SELECT state, count(*) FROM batchwright.ingest_version GROUP BY 1 ORDER BY 1")
    assert states == [("live", 1), ("retired", 1)]


async def test_an_update_that_fails_leaves_the_old_version_searchable(stage):
    stage.write("a.txt", "The old words.")
    stage.work()
    await stage.succeed()
    stage.write("a.txt", "")
    run = await stage.run()
    assert run.status is RunStatus.COMPLETED_WITH_ERRORS
    assert await live(stage) == {"a.txt": "The old words."}
    stage.write("a.txt", "The old words.")
    assert (await stage.succeed()).item_count_unchanged == 1


async def test_a_document_whose_source_is_gone_is_retired_after_a_complete_listing(stage):
    for name in ("a", "b", "c"):
        stage.write(f"{name}.txt", f"Words of {name}.")
    stage.work()
    await stage.succeed()
    (stage.folder / "b.txt").unlink()
    run = await stage.succeed()
    assert (run.is_complete, run.retired_count) == (True, 1)
    assert sorted(await live(stage)) == ["a.txt", "c.txt"]
    stage.write("b.txt", "Words of b.")
    assert (await stage.succeed()).item_count_done == 1
    assert sorted(await live(stage)) == ["a.txt", "b.txt", "c.txt"]


async def test_nothing_is_retired_after_an_incomplete_listing(stage):
    stage.write("a.txt", "Words of a.")
    stage.write("b.txt", "Words of b.")
    stage.work()
    await stage.succeed()
    (stage.folder / "a.txt").unlink()
    deep = stage.folder.joinpath("deep", *["d"] * (DEPTH_MAX + 1))
    deep.mkdir(parents=True)  # this folder is not listed, so it may contain anything
    run = await stage.succeed()
    assert (run.is_complete, run.retired_count) == (False, 0)
    assert sorted(await live(stage)) == ["a.txt", "b.txt"]
    shutil.rmtree(stage.folder / "deep")
    assert (await stage.succeed()).retired_count == 1
    assert sorted(await live(stage)) == ["b.txt"]


async def test_a_run_does_not_retire_what_a_later_run_has_found(stage):
    stage.write("a.txt", "Words of a.")
    stage.write("bad.txt", "")
    stage.work()
    first = await stage.run()
    stage.write("new.txt", "Words that came later.")
    await stage.run()
    await stage.part.submission.retry(Wanted(), tenant=None, run_id=first.id)
    run = await stage.ended(first.id)
    assert (run.status, run.retired_count) == (RunStatus.COMPLETED_WITH_ERRORS, 0)
    assert sorted(await live(stage)) == ["a.txt", "new.txt"]


async def test_of_two_simultaneous_runs_the_stored_etag_is_that_of_the_live_version(stage):
    """Otherwise an old version could stay live for ever with the etag of the new one."""
    bench = Bench(stage)
    stage.write("0.txt", "The old words.")
    (old,) = await bench.put()
    claim = await bench.claim(old)
    stage.write("0.txt", "The new and longer words.")
    (new,) = await bench.put()
    assert (await bench.drive(new)).status is ItemStatus.DONE
    etags = await stage.rows("SELECT etag FROM batchwright.ingest_document")
    stage.write("0.txt", "The old words.")
    await bench.run_and_settle(claim, old)
    assert await live(stage) == {"0.txt": "The old words."}
    assert await stage.rows("SELECT etag FROM batchwright.ingest_document") != etags
    stage.write("0.txt", "The new and longer words.")
    stage.work()
    assert (await stage.succeed()).item_count_done == 1
    assert await live(stage) == {"0.txt": "The new and longer words."}
    await bench.tools.sandboxes.close()


# Upkeep ---------------------------------------------------------------------------------------------------------


def upkeep_at(stage, clock):
    part = stage.part
    queue = Queue(Database(stage.batchwright.pool, clock=clock), stage.batchwright.queue.settings)
    tools = part.make_tools(stage.batchwright.store)
    library = type(tools.library)(queue.database, type(tools.spaces)(queue.database))
    at_clock = dataclasses.replace(tools, queue=queue, answers=type(tools.answers)(queue.database), library=library)
    upkeep = DocumentUpkeep(at_clock, part.collections, part.settings, stage.batchwright.settings.retention)
    return queue, upkeep


async def keep(queue, do):
    async with queue.database.transaction() as session:
        return await do(session)


def objects(stage):
    home = stage.folder.parent / "home"
    return sorted(path.suffix for path in home.rglob("*") if path.is_file() and path.suffix in (".text", ".source"))


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_document_that_snoozes_just_after_its_run_was_resumed_is_woken(stage, has_begun):
    bench, clock = Bench(stage), Clock()
    (item,) = await bench.put()
    queue, upkeep = upkeep_at(stage, clock)
    if has_begun:
        machine = await bench.open(item, stage.part.graph)
        await stage.part.submission.park(item.run_id, tenant=None)
        await machine.run_step("FETCHED", None)  # it sees that the run is parked, and does not make the call
        assert machine.parked == "the run is PARKED"
        await bench.give_back(item)
    else:
        await stage.part.submission.park(item.run_id, tenant=None)
    await bench.drive(item)
    asleep = (await queue.get(JobId(item.job_id))).run_after
    await keep(queue, upkeep.wake_resumed)
    assert (await queue.get(JobId(item.job_id))).run_after == asleep
    await stage.part.runs.resume(item.run_id)  # the resume wakes documents before the worker snoozes this one
    await keep(queue, upkeep.wake_resumed)
    assert (await queue.get(JobId(item.job_id))).run_after < asleep
    waits = await stage.rows("SELECT step FROM batchwright.ingest_step WHERE waiting IS NOT NULL")
    assert waits == []
    assert (await bench.live(item)).status is ItemStatus.DONE
    await bench.tools.sandboxes.close()


async def test_items_and_runs_whose_job_is_gone_fail(stage):
    bench, clock = Bench(stage), Clock()
    (item,) = await bench.put()
    queue, upkeep = upkeep_at(stage, clock)
    await keep(queue, upkeep.end_abandoned)
    assert (await bench.get(item)).status is ItemStatus.OPEN
    await bench.queue.cancel([JobId(item.job_id)], reason="by hand", owned=True)
    await keep(queue, upkeep.end_abandoned)
    found = await bench.get(item)
    assert (found.status, found.last_error["code"]) == (ItemStatus.FAILED, "job_lost")
    run = await check_counters(stage, item.run_id)
    await bench.queue.cancel([JobId(run.job_id)], reason="by hand", owned=True)
    await keep(queue, upkeep.end_abandoned)
    run = await stage.get(run.id)
    assert (run.status, run.error["code"]) == (RunStatus.FAILED, "job_lost")


async def test_a_request_whose_job_has_ended_is_in_doubt_some_time_later(remote_stage, provider):
    stage, bench, clock = remote_stage, Bench(remote_stage), Clock()
    (item,) = await bench.put()
    sql = """
        INSERT INTO batchwright.ingest_call
            (id, tenant, run_id, item_id, job_id, claim, kind, model, lane, inputs, tokens, cost, began_at)
        VALUES ('call_1', 'default', %(run)s, %(item)s, %(job)s, 1, 'embedding', 'embedder', 'realtime', 1, 9, 1, now())
        RETURNING id
    """
    await stage.rows(sql, run=item.run_id, item=item.id, job=item.job_id)
    queue, upkeep = upkeep_at(stage, clock)
    await clock.advance(queue, 3600)
    await keep(queue, upkeep.end_abandoned)
    assert (await stage.part.runs.in_doubt(item.run_id)).calls == 0  # its job is still open
    await stage.part.submission.cancel(item.run_id, tenant=None)
    await keep(queue, upkeep.end_abandoned)
    assert (await stage.part.runs.in_doubt(item.run_id)).calls == 1
    told = [event.event for event in await stage.events(item)]
    assert told.count("model_call_in_doubt") == 1


async def test_versions_that_nobody_uses_go_with_their_texts(stage):
    clock = Clock()
    stage.write("a.txt", "The old words.")
    stage.work()
    await stage.succeed()
    stage.write("a.txt", "The new and longer words.")
    await stage.succeed()
    assert objects(stage).count(".text") == 2
    queue, upkeep = upkeep_at(stage, clock)
    await keep(queue, upkeep.remove_versions)
    assert objects(stage).count(".text") == 2  # a reader may still use the old one
    await clock.advance(queue, 4000)
    await keep(queue, upkeep.remove_versions)
    assert objects(stage).count(".text") == 1
    assert await stage.rows("SELECT state FROM batchwright.ingest_version") == [("live",)]
    assert await live(stage) == {"a.txt": "The new and longer words."}


async def test_ended_runs_are_removed_with_what_their_failed_documents_left_behind(remote_stage):
    stage, clock = remote_stage, Clock()
    stage.write("bad.txt", f"Anna. {MARKER}")
    stage.write("good.txt", "Berta.")
    stage.work()
    run = await stage.run()
    await stage.close()
    assert objects(stage).count(".text") == 2
    assert ".source" in objects(stage)
    queue, upkeep = upkeep_at(stage, clock)
    await keep(queue, upkeep.remove_runs)
    assert (await stage.get(run.id)).has_ended
    await clock.advance(queue, 86_400 * 400)
    await keep(queue, upkeep.remove_runs)
    assert await stage.rows("SELECT id FROM batchwright.ingest_run") == []
    assert await stage.rows("SELECT count(*) FROM batchwright.ingest_item") == [(0,)]
    assert objects(stage) == [".text"]
    assert sorted(await live(stage)) == ["good.txt"]


async def test_a_staged_version_whose_item_is_gone_is_removed(stage):
    bench, clock = Bench(stage), Clock()
    (item,) = await bench.put()
    machine = await bench.open(item, stage.part.graph)
    await bench.give_back(item)
    del machine
    real = stage.part.graph.steps["INDEXED"]
    failing = type(stage.part.graph)(
        [*(one for name, one in stage.part.graph.steps.items() if name != "INDEXED"), _failing(real)]
    )
    assert (await bench.drive(item, failing)).status is ItemStatus.FAILED
    queue, upkeep = upkeep_at(stage, clock)
    await clock.advance(queue, 4000)
    await keep(queue, upkeep.remove_versions)
    assert await stage.rows("SELECT state FROM batchwright.ingest_version") == [("staged",)]  # the item may be retried
    again = await stage.part.submission.retry_item(item.id, tenant=None, anew=True)
    assert (await bench.drive(again, failing)).status is ItemStatus.FAILED
    await keep(queue, upkeep.remove_versions)
    assert await stage.rows("SELECT generation FROM batchwright.ingest_version") == [(2,)]
    await bench.tools.sandboxes.close()


def _failing(step):
    async def fail(ctx):
        raise ValueError("no index today")

    return dataclasses.replace(step, run=fail)


async def test_an_answer_that_was_removed_is_requested_again_when_it_is_needed(remote_stage, provider):
    """An answer is removed between EMBEDDED and INDEXED: the step is undone, and the answer is paid again."""
    stage, bench, clock = remote_stage, Bench(remote_stage), Clock()
    (item,) = await bench.put()
    queue, upkeep = upkeep_at(stage, clock)
    await clock.advance(queue, 86_400 * 1000)
    evicted = []

    async def evict_first(ctx):
        if not evicted:
            evicted.append(await keep(queue, upkeep.evict_answers))
        return {}

    graph = stage.part.graph
    late = dataclasses.replace(
        graph.steps["CHUNKED"], name="LATE", after=("PERSISTED",), before=("INDEXED",), run=evict_first
    )
    found = await bench.live(item, type(graph)([*graph.steps.values(), late]))
    assert found.status is ItemStatus.DONE, found.last_error
    told = await stage.step_events(found)
    assert told.count(("step_undone", "EMBEDDED")) == 1
    assert told.count(("step_completed", "EMBEDDED")) == 2
    assert [one["kind"] for one in provider.entries].count("embedding") == 2
    await bench.tools.sandboxes.close()


@pytest.mark.parametrize("is_changed", [False, True])
async def test_a_lost_text_and_a_lost_copy_are_made_again(stage, is_changed):
    """If the source has changed meanwhile, nothing of the old content is used."""
    bench = Bench(stage)
    stage.write("0.txt", "The old words.")
    (item,) = await bench.put()

    async def lose(ctx):
        if not lost:
            lost.append(True)
            for path in (stage.folder.parent / "home").rglob("*"):
                if path.suffix in (".text", ".source"):
                    path.unlink()
            if is_changed:
                stage.write("0.txt", "The new and longer words.")
            ctx._texts.clear()
        return {}

    lost: list[bool] = []
    graph = stage.part.graph
    branches = ("CHUNKED", "EMBEDDED", "ENTITY_EXTRACTED")
    late = dataclasses.replace(graph.steps["CHUNKED"], name="LATE", after=branches, before=("PERSISTED",), run=lose)
    found = await bench.live(item, type(graph)([*graph.steps.values(), late]))
    assert found.status is ItemStatus.DONE, found.last_error
    assert await live(stage) == {"0.txt": "The new and longer words." if is_changed else "The old words."}
    await bench.tools.sandboxes.close()
