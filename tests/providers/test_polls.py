"""Polls that are due together share list calls, and never get an answer that is older than the poll."""

import asyncio
import logging
import time
from collections import Counter

import pytest

from batchwright.errors import Fatal, RateLimited, Transient
from batchwright.inference.http import Http
from batchwright.providers.contract import Phase
from batchwright.providers.errand import Pace
from batchwright.providers.polls import SINGLE_MAX, Polls
from batchwright.simulator.providers import running
from tests.providers.conformance import World, all_cases
from tests.providers.task_stage import task_stage

CASES = {str(case): case for case in all_cases()}
MANY = 50


@pytest.fixture
async def world(tmp_path):
    async with running() as server, Http() as http:
        yield World(CASES["openai"], server, http, tmp_path)


async def make_jobs(world, count):
    return [(await world.submit(world.request("ok", key=f"bw-01k2h5q8tn3v7w9{n:03}-a1")))[0] for n in range(count)]


def asked(world):
    """The number of requests by route, since the last call."""
    found = Counter(one.route.removeprefix("openai.") for one in world.server.requests(port="api"))
    world.server.seen.clear()
    return {name: found[name] for name in ("get", "list") if found[name]}


async def poll_all(polls, world, jobs):
    return await asyncio.gather(*(polls.poll(world.adapter, job) for job in jobs), return_exceptions=True)


async def test_many_polls_are_one_list_call(world):
    jobs = await make_jobs(world, MANY)
    polls = Polls(10.0, now=lambda: 0.0)
    asked(world)
    statuses = await poll_all(polls, world, jobs)
    assert {status.phase for status in statuses} == {Phase.QUEUED}
    assert asked(world) == {"get": SINGLE_MAX, "list": 1}
    world.server.advance(world.server.settings.queue_seconds + world.server.settings.run_seconds)
    statuses = await poll_all(polls, world, jobs)
    assert {status.phase for status in statuses} == {Phase.ENDED}
    assert all(status.found["output_file_id"] for status in statuses)
    assert asked(world) == {"list": 1}


async def test_a_few_polls_are_sent_one_by_one(world):
    jobs = await make_jobs(world, SINGLE_MAX)
    asked(world)
    now = 0.0
    polls = Polls(10.0, now=lambda: now)
    for _ in range(4):
        await poll_all(polls, world, jobs)
        assert asked(world) == {"get": SINGLE_MAX}
        now += 1.1


async def test_a_provider_without_lists_is_polled_one_by_one(tmp_path):
    async with running() as server, Http() as http:
        world = World(CASES["sarvam"], server, http, tmp_path)
        jobs = await make_jobs(world, 6)
        server.seen.clear()
        await poll_all(Polls(10.0, now=lambda: 0.0), world, jobs)
        assert Counter(one.route for one in server.requests(port="api")) == {"sarvam.get": 6}


async def test_a_job_that_is_not_in_the_list_is_polled_by_itself(world):
    world.server.put_faults("lag:seconds=50")
    jobs = await make_jobs(world, 6)
    asked(world)
    statuses = await poll_all(Polls(10.0, now=lambda: 0.0), world, jobs)
    assert {status.phase for status in statuses} == {Phase.QUEUED}
    assert asked(world) == {"get": 6, "list": 1}


class Slow:
    """The adapter, but the answers of its lists, which are read at once, are held until the test releases them."""

    def __init__(self, adapter):
        self._adapter = adapter
        self.abilities = adapter.abilities
        self.name = adapter.name
        self.read = asyncio.Queue()
        self.poll = adapter.poll

    async def survey(self, jobs):
        answered = asyncio.get_running_loop().create_future()
        found = await self._adapter.survey(jobs)
        self.read.put_nowait((jobs, answered))
        await answered
        return found


async def busy(world, jobs):
    """Polls that have just made as many single calls as they may."""
    polls = Polls(10.0, now=lambda: 0.0)
    for job in jobs[:SINGLE_MAX]:
        await polls.poll(world.adapter, job)
    return polls


async def test_a_poll_during_a_list_call_waits_for_the_next_list(world):
    jobs = await make_jobs(world, 6)
    polls, slow = await busy(world, jobs), Slow(world.adapter)
    first = asyncio.create_task(polls.poll(slow, jobs[0]))
    surveyed, answered = await slow.read.get()
    assert [job.external_id for job in surveyed] == [jobs[0].external_id]
    world.server.advance(world.server.settings.queue_seconds + world.server.settings.run_seconds)
    later = [asyncio.create_task(polls.poll(slow, job)) for job in jobs]
    await asyncio.sleep(0)
    answered.set_result(None)
    assert (await first).phase is Phase.QUEUED
    surveyed, answered = await slow.read.get()
    assert len(surveyed) == 6
    answered.set_result(None)
    assert {status.phase for status in await asyncio.gather(*later)} == {Phase.ENDED}
    assert slow.read.empty()


async def test_a_cancelled_poll_does_not_cancel_the_others(world):
    jobs = await make_jobs(world, 6)
    polls, slow = await busy(world, jobs), Slow(world.adapter)
    tasks = [asyncio.create_task(polls.poll(slow, job)) for job in jobs]
    await slow.read.get()
    tasks[0].cancel()
    tasks[3].cancel()
    surveyed, answered = await slow.read.get()
    assert len(surveyed) == 4
    answered.set_result(None)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in found] == [True, False, False, True, False, False]


async def test_after_a_list_fails_no_list_is_requested_for_a_while(world, caplog):
    caplog.set_level(logging.WARNING)
    jobs = await make_jobs(world, 8)
    now = 0.0
    polls = Polls(10.0, now=lambda: now)
    world.server.put_faults("500:route=openai.list")
    asked(world)
    statuses = await poll_all(polls, world, jobs)
    assert {status.phase for status in statuses} == {Phase.QUEUED}
    assert asked(world) == {"get": 8, "list": 1}
    now += 10
    await poll_all(polls, world, jobs)
    assert asked(world) == {"get": 8}
    world.server.put_faults()
    now += 50
    await poll_all(polls, world, jobs)
    assert asked(world) == {"get": SINGLE_MAX, "list": 1}
    assert caplog.text.count("its list failed") == 1


async def test_a_list_without_permission_does_not_count_as_a_refused_credential(world):
    jobs = await make_jobs(world, 5)
    world.server.put_faults("auth:route=openai.list")
    statuses = await poll_all(Polls(10.0, now=lambda: 0.0), world, jobs)
    assert {status.phase for status in statuses} == {Phase.QUEUED}
    world.server.put_faults("auth")
    assert all(isinstance(one, Fatal) for one in await poll_all(Polls(10.0, now=lambda: 0.0), world, jobs))


async def test_a_rate_limit_of_the_list_applies_to_all_polls(world):
    jobs = await make_jobs(world, 8)
    polls = await busy(world, jobs)
    world.server.put_faults("429:route=openai.list:retry_after=9")
    asked(world)
    errors = await poll_all(polls, world, jobs)
    assert all(isinstance(one, RateLimited) and one.retry_after == 9 for one in errors)
    assert asked(world) == {"list": 1}


async def test_a_single_poll_that_fails_affects_only_its_own_job(world):
    jobs = await make_jobs(world, 4)
    world.server.put_faults("503:route=openai.get:times=1")
    found = await poll_all(Polls(10.0, now=lambda: 0.0), world, jobs)
    assert Counter(type(one) for one in found)[Transient] == 1


@pytest.mark.parametrize("now", [1_000.0, 1_029.9, 1_059.0, 1_119.9])
@pytest.mark.parametrize("hint", [None, 5.0, 130.0])
def test_polls_of_a_provider_are_due_at_the_same_moments(monkeypatch, now, hint):
    monkeypatch.setattr(time, "time", lambda: now)
    pace = Pace(poll_seconds=120.0, settle_seconds=0.0, offset_seconds=30.0)
    seconds = pace.until_poll(hint)
    assert (now + seconds - 30.0) % 120.0 == pytest.approx(0.0, abs=1e-6)
    assert 60.0 <= seconds <= 180.0 + (hint or 0)
    assert seconds >= (hint or 0)
    assert Pace(poll_seconds=120.0, settle_seconds=0.0).until_poll(hint) == max(120.0, hint or 0)


@pytest.mark.thorough
async def test_many_tasks_of_one_provider_cost_few_requests(database_url, tmp_path):
    pace = {"poll_interval_seconds": 2.0, "jobs_at_once": MANY}
    async with task_stage(database_url, tmp_path, tasks=pace) as stage:
        stage.work()
        ids = [await stage.complete(["openai/gpt-5-mini"], "a") for _ in range(MANY)]
        for id in ids:
            await stage.submitted(id)
        stage.server.seen.clear()
        tasks = [await stage.ended(id) for id in ids]
        assert {task.status.value for task in tasks} == {"COMPLETED"}
        routes = Counter(one.route for one in stage.server.requests(port="api"))
        assert routes["openai.list"] >= 1
        assert routes["openai.list"] + routes["openai.get"] < MANY / 2, routes
