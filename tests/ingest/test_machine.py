"""The step machine: a step is done once, branches end in any order, and the category of an error decides."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import subprocess
import sys

import pytest

from batchwright.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    Fatal,
    Fenced,
    RateLimited,
    SchemaInvalid,
    Transient,
)
from batchwright.ingest.machine import Machine, Output
from batchwright.ingest.results import Category, Deferred, result_from_exception
from batchwright.states import ItemStatus, RunStatus
from tests.engine.steps import dead
from tests.ingest.bench import BRANCHES, FIRST, LAST, Bench, Script
from tests.ingest.stage import ingest_stage
from tests.support import Clock

ERRORS = {
    Category.RATE_LIMITED: lambda: RateLimited("slow down", retry_after=0.0, code="slow"),
    Category.TRANSIENT: lambda: Transient("it hiccuped", code="hiccup"),
    Category.SCHEMA_INVALID: lambda: SchemaInvalid("this is no JSON", code="no_json"),
    Category.FATAL: lambda: Fatal("it cannot be", scope="item", code="impossible"),
}
RETRIES = 5
"""The default of the setting."""


@pytest.fixture
async def bench(database_url, tmp_path, monkeypatch):
    # A very short backoff would end within the same claim.
    monkeypatch.setattr("batchwright.ingest.machine.random.uniform", lambda low, high: high)
    async with ingest_stage(database_url, tmp_path) as stage:
        bench = Bench(stage)
        yield bench
        await bench.tools.sandboxes.close()


def calls(script, *names):
    return {name: functools.partial(script.call, name) for name in names}


async def events_of(bench, item, *names):
    return [event for event in await bench.stage.events(await bench.get(item)) if event.event in names]


# Once -----------------------------------------------------------------------------------------------------------


async def test_a_finished_step_returns_its_stored_result_and_is_not_called_again(bench):
    (item,) = await bench.put()
    script = Script({FIRST: [{"sha256": "abc", "n": 1}]})
    machine = await bench.open(item, script.graph())
    first = await machine.run_step(FIRST, functools.partial(script.call, FIRST))
    again = await machine.run_step(FIRST, functools.partial(script.call, FIRST))
    assert first.output == again.output == {"sha256": "abc", "n": 1}
    assert script.called == [FIRST]
    await bench.give_back(item)
    later = await bench.open(item, script.graph(), worker="w2")
    assert (await later.run_step(FIRST, functools.partial(script.call, FIRST))).output == first.output
    assert script.called == [FIRST]
    assert (await bench.get(item)).step == FIRST


OTHER = """
import asyncio, sys
from pathlib import Path
from tests.ingest.bench import Bench, Script, FIRST
from tests.ingest.stage import ingest_stage

async def main(url, folder, id):
    async with ingest_stage(url, Path(folder)) as stage:
        bench, script = Bench(stage), Script()
        machine = await bench.open(await bench.items.get(id, tenant=None), script.graph(), worker="other")
        result = await machine.run_step(FIRST, lambda: script.call(FIRST))
        print(dict(result.output), script.called)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_finished_step_is_not_called_in_another_process_either(bench, database_url, tmp_path):
    (item,) = await bench.put()
    script = Script({FIRST: [{"sha256": "abc"}]})
    machine = await bench.open(item, script.graph())
    await machine.run_step(FIRST, functools.partial(script.call, FIRST))
    await bench.give_back(item)
    command = [sys.executable, "-c", OTHER, database_url, str(tmp_path), item.id]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "{'sha256': 'abc'} []", done.stderr


async def test_the_row_of_a_step_forbids_a_second_completion(bench):
    (item,) = await bench.put()
    script = Script()
    machine = await bench.open(item, script.graph())
    blind = await Machine.open(bench.queue, script.graph(), machine.held, machine.run, machine.item, 2)
    await machine.run_step(FIRST, functools.partial(script.call, FIRST))
    result = await blind.run_step(FIRST, functools.partial(script.call, FIRST))
    assert (result.category, "completed by another worker" in result.message) == (Category.FATAL, True)
    assert len(await events_of(bench, item, "step_completed")) == 1


async def test_what_a_step_writes_and_its_completion_are_one_commit(bench):
    (item,) = await bench.put()

    async def write(session):
        sql = "UPDATE batchwright.ingest_document SET name = 'written' WHERE id = %(id)s RETURNING id"
        await session.rows(sql, {"id": item.document_id})
        raise Transient("half way")

    script = Script({FIRST: [Output(value={}, write=write)]})
    machine = await bench.open(item, script.graph())
    result = await machine.run_step(FIRST, functools.partial(script.call, FIRST))
    assert (result.category, machine.done) == (Category.TRANSIENT, set())
    assert await bench.stage.rows("SELECT name FROM batchwright.ingest_document") == [("0.txt",)]


# Branches -------------------------------------------------------------------------------------------------------


async def test_branches_may_end_in_every_order(bench):
    orders = list(itertools.permutations(BRANCHES))
    for item, order in zip(await bench.put(len(orders)), orders, strict=True):
        turns = {name: asyncio.Event() for name in BRANCHES}
        ended: list[str] = []

        async def take_turn(name, turns=turns, ended=ended):
            await turns[name].wait()
            ended.append(name)
            return {"from": name}

        script = Script({name: [functools.partial(take_turn, name)] for name in BRANCHES})
        machine = await bench.open(item, script.graph())
        await machine.run_parallel_steps(calls(script, FIRST))
        running = asyncio.create_task(machine.run_parallel_steps(calls(script, *BRANCHES)))
        for place, name in enumerate(order):
            turns[name].set()
            while len(machine.done) < 2 + place:
                await asyncio.sleep(0.001)
            assert (await bench.get(item)).step == (FIRST if place < 2 else max(BRANCHES))
        assert (await running).is_ok
        assert ended == list(order)
        told = [event.fields["step"] for event in await events_of(bench, item, "step_completed")]
        assert told == [FIRST, *order]


@pytest.mark.parametrize("category", ERRORS)
async def test_when_a_branch_fails_the_finished_branches_are_kept(bench, category):
    """Each branch fails once while the others succeed; these are kept and never called again."""
    for item, failing in zip(await bench.put(3), BRANCHES, strict=True):
        script = Script({failing: [ERRORS[category]()]})
        graph = script.graph()
        machine = await bench.open(item, graph)
        await machine.run_parallel_steps(calls(script, FIRST))
        result = await machine.run_parallel_steps(calls(script, *BRANCHES))
        assert (result.step, result.category) == (failing, category)
        assert machine.done == {FIRST, *BRANCHES} - {failing}
        await bench.give_back(item)
        if category in (Category.RATE_LIMITED, Category.TRANSIENT):
            ended = await bench.live(item, graph)
            assert (ended.status, ended.step) == (ItemStatus.DONE, "DONE")
            assert sorted(script.called) == sorted([FIRST, *BRANCHES, failing, LAST])


async def test_of_several_branches_the_worst_category_decides(bench):
    names = list(ERRORS)
    pairs = list(itertools.combinations(names, 2))
    for item, (better, worse) in zip(await bench.put(len(pairs)), pairs, strict=True):
        script = Script({"LEFT": [ERRORS[worse]()], "RIGHT": [ERRORS[better]()]})
        machine = await bench.open(item, script.graph())
        await machine.run_parallel_steps(calls(script, FIRST))
        result = await machine.run_parallel_steps(calls(script, *BRANCHES))
        assert (result.category, result.step) == (worse, "LEFT")
        assert machine.done == {FIRST, "MIDDLE"}


async def test_a_branch_whose_retries_are_used_up_is_not_called_while_a_sibling_waits(bench):
    (item,) = await bench.put()
    hiccups = [ERRORS[Category.TRANSIENT]() for _ in range(20)]
    script = Script({"LEFT": hiccups, "RIGHT": [Transient("a late hiccup")]})
    graph = script.graph()
    machine = await bench.open(item, graph, max_retries=1)
    await machine.run_parallel_steps(calls(script, FIRST))
    await machine.run_parallel_steps(calls(script, "LEFT"))
    result = await machine.run_parallel_steps(calls(script, *BRANCHES))
    assert (result.step, result.is_final) == ("LEFT", True)


async def test_a_database_error_in_one_branch_is_raised_once_after_the_other_branches_have_ended(bench):
    (item,) = await bench.put()
    script = Script({"LEFT": [DatabaseUnavailable("gone")], "RIGHT": [DatabaseUnavailable("gone")]})
    machine = await bench.open(item, script.graph())
    await machine.run_parallel_steps(calls(script, FIRST))
    with pytest.raises(DatabaseUnavailable):
        await machine.run_parallel_steps(calls(script, *BRANCHES))
    assert machine.done == {FIRST, "MIDDLE"}


# The matrix -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_last_try", [False, True])
@pytest.mark.parametrize("category", ERRORS)
async def test_each_category_does_what_the_matrix_says(bench, category, is_last_try):
    (item,) = await bench.put()
    tries = RETRIES + 1 if is_last_try else 1
    script = Script({FIRST: [ERRORS[category]() for _ in range(tries)]})
    graph = script.graph()
    for _ in range(tries):
        found = await bench.drive(item, graph)
        if found.has_ended:
            break
    row = (await bench.rows_of(item))[FIRST]
    told = [event.event for event in await events_of(bench, item, "step_failed", "retry_scheduled")]
    if category is Category.RATE_LIMITED:
        assert (found.status, found.retry_count, row.retry_count) == (ItemStatus.OPEN, 0, 0)
        assert (row.error_kind, row.waiting["for"]) == ("RateLimited", "rate")
        assert told == ["step_failed", "retry_scheduled"] * tries
    elif category is Category.TRANSIENT and not is_last_try:
        assert (found.status, found.retry_count, row.retry_count) == (ItemStatus.OPEN, 1, 1)
        assert (found.last_error_kind, row.waiting["for"]) == ("Transient", "backoff")
        assert told == ["step_failed", "retry_scheduled"]
    elif category is Category.TRANSIENT:
        assert (found.status, found.last_error_kind) == (ItemStatus.FAILED, "Transient")
        assert (found.last_error["scope"], found.last_error["code"]) == ("retries", "hiccup")
        assert script.called == [FIRST] * (RETRIES + 1)
        assert told == [*["step_failed", "retry_scheduled"] * RETRIES, "step_failed"]
    else:
        assert (found.status, found.last_error_kind) == (ItemStatus.FAILED, category.value)
        assert found.cause == f"{FIRST}:{category.value}:{ERRORS[category]().code}"
        assert (script.called, told) == ([FIRST], ["step_failed"])
    if not found.has_ended:
        assert (await bench.live(item, graph)).status is ItemStatus.DONE


async def test_every_step_has_retries_of_its_own(bench):
    (item,) = await bench.put()
    names = (FIRST, *BRANCHES, LAST)
    script = Script({name: [Transient("again")] * RETRIES for name in names})
    found = await bench.live(item, script.graph(), rounds=60)
    assert (found.status, found.retry_count) == (ItemStatus.DONE, 0)
    assert {name: row.retry_count for name, row in (await bench.rows_of(item)).items()} == dict.fromkeys(names, RETRIES)


async def test_a_backoff_grows_and_is_bounded(bench):
    (item,) = await bench.put()
    script = Script({FIRST: [Transient("again")] * 40})
    machine = await bench.open(item, script.graph(), max_retries=40)
    for _ in range(40):
        await machine.run_step(FIRST, functools.partial(script.call, FIRST))
    seconds = [event.fields["seconds"] for event in await events_of(bench, item, "retry_scheduled")]
    assert len(seconds) == 40
    assert all(one <= min(300.0, 2.0**place) for place, one in enumerate(seconds))
    assert max(seconds) > 30.0


async def test_a_step_that_waits_uses_no_retry_and_says_what_for(bench):
    (item,) = await bench.put()
    waits = [Deferred("a batch of 7", 30.0, waits_for="batch"), ConfigurationError("no model server here")]
    script = Script({FIRST: [*waits, *[Deferred("a batch of 7", 30.0, waits_for="batch")] * 10]})
    graph = script.graph()
    seen = []
    for _ in range(3):
        found = await bench.drive(item, graph)
        seen.append((await bench.rows_of(item))[FIRST].waiting["for"])
        assert (found.status, found.retry_count) == (ItemStatus.OPEN, 0)
    assert seen == ["batch", "configuration", "batch"]
    assert (await bench.live(item, graph)).status is ItemStatus.DONE


def test_every_exception_has_a_category():
    found = {
        error: result_from_exception("X", error).category
        for error in (*(make() for make in ERRORS.values()), ValueError("?"), TimeoutError(), ConnectionResetError())
    }
    assert list(found.values()) == [*ERRORS, Category.FATAL, Category.TRANSIENT, Category.TRANSIENT]


async def test_an_output_that_is_too_long_is_refused_with_what_to_do(bench):
    (item,) = await bench.put()
    script = Script({FIRST: [{"text": "x" * 300_000}]})
    found = await bench.drive(item, script.graph())
    assert (found.status, found.last_error["code"]) == (ItemStatus.FAILED, "output_too_large")
    assert "put it into the store" in found.last_error["message"]


# Parking --------------------------------------------------------------------------------------------------------


async def test_a_refused_credential_parks_the_run_and_fails_nothing(bench):
    items = await bench.put(10)
    refused = Fatal("the key is wrong", scope="credential", code="invalid_api_key")
    script = Script({"LEFT": [refused]})
    graph = script.graph()
    for item in items:
        found = await bench.drive(item, graph)
        assert found.status is ItemStatus.OPEN
    run = await bench.stage.get(items[0].run_id)
    assert (run.status, run.parked_reason, run.parked_message) == (RunStatus.PARKED, "credential", "the key is wrong")
    assert script.called.count(FIRST) == 1  # no other step began
    await bench.stage.part.submission.resume(run.id, tenant=None)
    ended = [await bench.live(item, graph) for item in items]
    assert {item.status for item in ended} == {ItemStatus.DONE}
    assert script.called.count("LEFT") == 11
    assert script.called.count("MIDDLE") == 10


async def test_a_sibling_that_fails_for_good_fails_its_item_though_the_run_is_parked(bench):
    (item,) = await bench.put()
    script = Script({"RIGHT": [ERRORS[Category.FATAL]()]})

    async def refuse():
        while "RIGHT" not in script.called:  # RIGHT does not start once the run is parked
            await asyncio.sleep(0.001)
        raise Fatal("the key is wrong", scope="credential", code="invalid_api_key")

    script.answers["LEFT"] = [refuse]
    found = await bench.drive(item, script.graph())
    assert (found.status, found.cause) == (ItemStatus.FAILED, "RIGHT:Fatal:impossible")
    assert (await bench.stage.get(item.run_id)).status is RunStatus.PARKED


async def test_no_step_starts_while_the_run_is_parked(bench):
    (item,) = await bench.put()

    async def park():
        await bench.stage.part.submission.park(item.run_id, tenant=None)
        return {"sha256": "1"}

    script = Script({FIRST: [park]})
    found = await bench.drive(item, script.graph())
    assert (found.status, script.called) == (ItemStatus.OPEN, [FIRST])
    assert (await bench.rows_of(item))["LEFT"].waiting == {"for": "user", "message": "the run is PARKED"}


# Lost claims ----------------------------------------------------------------------------------------------------


async def test_a_worker_that_has_lost_the_job_completes_nothing(bench):
    (item,) = await bench.put()
    clock, script = Clock(), Script()
    graph = script.graph()
    late = bench.at(clock)
    zombie = await bench.open(item, graph)
    await zombie.run_step(FIRST, functools.partial(script.call, FIRST))
    await dead(late, clock, await bench.queue.get(item.job_id))
    claim = await late.claim_job("w2", item.job_id, ["ingest.item"])
    with pytest.raises(Fenced):
        await zombie.run_parallel_steps(calls(script, *BRANCHES))
    assert script.called == [FIRST]
    for reaction in (zombie._react, zombie._fail):
        with pytest.raises(Fenced):
            await reaction(result_from_exception("LEFT", Fatal("too late", scope="item")))
    with pytest.raises(Fenced):
        await zombie._complete("LEFT", Output(value={}))
    await bench.run_and_settle(claim, item, graph, worker="w2")
    assert (await bench.get(item)).status is ItemStatus.DONE
    assert sorted(script.called) == sorted([FIRST, *BRANCHES, LAST])
