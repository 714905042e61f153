"""Calls to a provider share one budget: tasks are delayed without a call, and calls that cannot wait become a debt."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from batchwright.errors import ConfigurationError, RateLimited
from batchwright.inference.budgets import RateBudget, RateLimits
from batchwright.providers.contract import Abilities, Adapter, Cancelled, Job, Phase, PutOff, Request, Status
from batchwright.providers.metered import MeteredAdapter
from batchwright.providers.settings import ProviderSettings
from batchwright.states import TaskStatus
from tests.providers.task_stage import task_stage

JOB = Job(external_id="job-1")


class Counting(Adapter):
    """A provider without a service, which counts the calls."""

    name, title = "counting", "Counting"
    abilities = Abilities(task_types=frozenset({"completion"}), can_cancel=True, can_find=True)

    def __init__(self):
        super().__init__(None, None)
        self.service = SimpleNamespace(calls=0)
        self.error = None

    def _send(self, times=1):
        self.service.calls += times
        if self.error is not None:
            raise self.error

    async def stage(self, request, staged):
        for n in range(3):
            self._send()
            yield {"step": n}

    async def submit(self, request, staged):
        self._send()
        return JOB

    async def find(self, request, staged, since):
        self._send()
        return ()

    async def poll(self, job):
        self._send()
        return Status(phase=Phase.RUNNING, raw_status="running")

    async def results(self, request, job, status):
        for _ in range(4):
            self._send()
            yield None

    async def cancel(self, job):
        self._send()
        return Cancelled.REQUESTED

    async def check(self):
        return "well"


@pytest.fixture
async def frozen(queue, clock):
    await clock.advance(queue, 0)
    return queue


def metered(queue, *, per_minute=None, concurrency=None):
    limits = RateLimits(requests_per_minute=per_minute, concurrency=concurrency)
    return MeteredAdapter(Counting(), RateBudget(queue.database, "providers/counting", limits))


async def test_a_call_that_must_wait_is_not_made_and_says_how_long(frozen, clock):
    adapter = metered(frozen, per_minute=2)
    await adapter.poll(JOB)
    with pytest.raises(PutOff, match="rate budget") as refused:
        await adapter.poll(JOB)
    assert refused.value.seconds == pytest.approx(30)
    assert adapter.service.calls == 1
    await clock.advance(frozen, 30)
    await adapter.submit(None, {})
    assert adapter.service.calls == 2


async def test_requests_beyond_the_first_and_calls_that_cannot_wait_are_a_debt(frozen):
    adapter = metered(frozen, per_minute=60)
    assert [step async for step in adapter.stage(None, {})] == [{"step": n} for n in range(3)]
    assert (await adapter.budget.describe()).requests == pytest.approx(-2)
    with pytest.raises(PutOff):
        await adapter.find(None, {}, None)
    assert len([one async for one in adapter.results(None, JOB, None)]) == 4
    assert await adapter.cancel(JOB) is Cancelled.REQUESTED
    assert (await adapter.budget.describe()).requests == pytest.approx(-7)


async def test_after_a_rate_limit_no_worker_calls_the_provider(frozen, clock):
    one, other = metered(frozen, per_minute=600), metered(frozen, per_minute=600)
    one._adapter.error = RateLimited("slow down", retry_after=20.0)
    with pytest.raises(RateLimited, match="slow down"):
        await one.poll(JOB)
    with pytest.raises(PutOff, match="blocked") as refused:
        await other.poll(JOB)
    assert refused.value.seconds == pytest.approx(20)
    assert other.service.calls == 0
    await clock.advance(frozen, 20)
    await other.poll(JOB)


async def test_the_number_of_simultaneous_calls_is_limited(frozen):
    adapter = metered(frozen, concurrency=2)
    steps = [adapter.stage(None, {}) for _ in range(2)]
    for one in steps:
        await anext(one)
    with pytest.raises(PutOff, match="concurrency"):
        await adapter.poll(JOB)
    await steps[0].aclose()
    await adapter.poll(JOB)
    await steps[1].aclose()
    assert (await adapter.budget.describe()).in_use == 0


async def test_an_adapter_with_a_budget_is_otherwise_unchanged(frozen):
    adapter = metered(frozen, per_minute=2)
    assert (adapter.name, adapter.title, adapter.abilities.can_find) == ("counting", "Counting", True)
    assert await adapter.check() == "well"
    assert adapter.missing_credentials() is None
    assert adapter.validate(Request) == ()


@pytest.mark.parametrize("name", ["requests_per_minute", "concurrency"])
def test_a_limit_of_zero_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"{name} is 0; it must be at least 1"):
        ProviderSettings(**{name: 0})


async def test_tasks_keep_to_the_rate_of_their_provider(database_url, tmp_path):
    """Without a limit, five tasks that are polled ten times a second would make fifty calls a second."""
    tables = {"openai": {"requests_per_minute": 240, "concurrency": 2}}
    async with task_stage(database_url, tmp_path, tables=tables) as stage:
        began = time.monotonic()
        stage.work()
        tasks = [await stage.complete(["openai/gpt-5-mini"], "a") for _ in range(5)]
        for id in tasks:
            assert (await stage.ended(id)).status is TaskStatus.COMPLETED
        seconds = time.monotonic() - began
        calls = len(stage.server.requests())
        state = await stage.part.directory.budget("openai").describe()
        assert 5 * 4 <= calls <= 4 * (seconds + 1) - state.requests + 1
        events = [event.event async for event in all_events(stage, tasks)]
        assert "provider.call_failed" not in events


async def all_events(stage, tasks):
    for id in tasks:
        for event in await stage.batchwright.events((await stage.get(id)).job_id):
            yield event


async def test_a_task_whose_provider_has_no_budget_left_sleeps_and_says_why(database_url, tmp_path):
    async with task_stage(database_url, tmp_path, tables={"openai": {"requests_per_minute": 60}}) as stage:
        budget = stage.part.directory.budget("openai")
        await budget.add_debt(100)
        stage.work()
        id = await stage.complete(["openai/gpt-5-mini"], "a")
        async with asyncio.timeout(20):
            while not (jobs := await stage.jobs(id)) or jobs[0].due_seconds < 50:
                await asyncio.sleep(0.02)
            job_id = (await stage.get(id)).job_id
            while (await stage.batchwright.get(job_id)).status.value != "QUEUED":
                await asyncio.sleep(0.02)
        assert jobs[0].failures == 0
        assert stage.server.requests() == []
        assert (await budget.describe()).reason == "requests"
        last = [event for event in await stage.batchwright.events(job_id) if event.event == "job.retry_later"][-1]
        assert last.message == "openai: our rate budget for it is used up (requests)"
