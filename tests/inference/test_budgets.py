"""Requests and tokens per minute: workers share a bucket, none takes more than its rate, and debts are paid."""

from __future__ import annotations

import asyncio

import pytest

from batchwright.engine.workers import Workers
from batchwright.inference.budgets import Budget, Rate, live_workers
from batchwright.inference.settings import GatewaySettings
from tests.support import raw


async def test_two_workers_together_keep_to_the_rate(queue, clock):
    rate = Rate(requests=10.0, tokens=1e9)
    await clock.advance(queue, 0)
    waited = 0.0

    async def pause(seconds):
        nonlocal waited
        waited += seconds
        await clock.advance(queue, seconds)

    budgets = [Budget(queue.database, "gateway", rate, pause) for _ in range(2)]
    for n in range(60):
        await budgets[n % 2].take(1)
    # A second's worth is there from the start, and each worker may have taken one more for later.
    assert 60 / 10 - 2 <= waited + 1 <= 60 / 10 + 3


async def test_a_rate_below_one_a_second_still_lets_single_requests_pass(queue, clock):
    await clock.advance(queue, 0)
    pauses = 0

    async def pause(seconds):
        nonlocal pauses
        pauses += 1
        await clock.advance(queue, 30)

    settings = GatewaySettings(url="http://h:1", requests_per_minute=2)
    budget = Budget(queue.database, "slow", Rate.of(settings), pause)
    for _ in range(3):
        assert await budget.take(1)
    assert pauses == 2


async def test_tokens_beyond_the_estimate_are_a_debt(queue, clock):
    await clock.advance(queue, 0)
    moments = []

    async def pause(seconds):
        moments.append(seconds)
        await clock.advance(queue, 1)

    settings = GatewaySettings(url="http://h:1", tokens_per_minute=6000)
    budget = Budget(queue.database, "tokens", Rate.of(settings), pause)
    await budget.take(10)
    budget.settle(10, 510)
    await budget.take(10)
    assert 4 <= len(moments) <= 6


async def test_paying_a_debt_needs_few_statements(queue):
    pauses = 0

    async def pause(seconds):
        nonlocal pauses
        pauses += 1
        assert pauses < 4, "enough was seen"

    budget = Budget(queue.database, "debtor", Rate(requests=1e12, tokens=1e6), pause)
    await budget.take(10)
    budget.settle(10, 10**9)
    with pytest.raises(AssertionError, match="enough was seen"):
        async with asyncio.timeout(5):
            await budget.take(10)


async def test_requests_and_tokens_that_are_not_needed_stay_in_the_bucket(queue, clock):
    """The worker collects no requests while it pays a debt of tokens, and no tokens while it waits for requests."""
    await clock.advance(queue, 0)
    waited = 0

    async def pause(seconds):
        nonlocal waited
        waited += 1
        await clock.advance(queue, 1)

    budget = Budget(queue.database, "both", Rate(requests=10.0, tokens=100.0), pause)
    await budget.take(1)
    budget.settle(1, 10_000)
    await budget.take(0)
    waited = 0
    for _ in range(100):
        await budget.take(0)
    assert waited >= 8
    waited = 0
    for _ in range(5):
        await budget.take(200)
    assert waited >= 7


async def test_a_clock_that_was_set_back_delays_requests_only_shortly(queue, clock):
    await clock.advance(queue, 3600)
    pauses = 0

    async def pause(seconds):
        nonlocal pauses
        pauses += 1
        await clock.advance(queue, 1)

    budget = Budget(queue.database, "gateway", Rate(requests=1.0, tokens=1e9), pause)
    await budget.take(1)
    await clock.advance(queue, -3600)
    async with asyncio.timeout(5):
        await budget.take(1)
    assert pauses <= 3


async def test_a_cancelled_request_stops_waiting(queue, clock):
    await clock.advance(queue, 0)
    budget = Budget(queue.database, "gateway", Rate(requests=0.01, tokens=1e9), lambda _: asyncio.sleep(0))
    assert await budget.take(1)
    answers = iter([True, True, False])
    assert not await budget.take(1, lambda: next(answers))


async def test_other_rates_at_the_same_server_make_a_separate_budget(queue, clock):
    await clock.advance(queue, 0)
    pauses = 0

    async def pause(seconds):
        nonlocal pauses
        pauses += 1
        await clock.advance(queue, 1)

    slow = Budget(queue.database, "server", Rate(requests=1.0, tokens=1e9), pause)
    fast = Budget(queue.database, "server", Rate(requests=50.0, tokens=1e9), pause)
    await slow.take(1)
    for _ in range(50):
        await fast.take(1)
    assert pauses == 0
    await slow.take(1)
    assert pauses == 1


async def test_a_gateway_without_rates_has_no_budget():
    assert Rate.of(GatewaySettings(url="http://h:1")) is None


async def test_only_live_workers_that_run_the_operation_share_a_gateway(queue):
    assert await live_workers(queue.database, "batch.shard") == 1
    columns = {"host": "h", "pid": 1, "version": "0", "queues": None, "concurrency": 1}
    for id, operations in (("a", ["batch.shard"]), ("b", ["batch.shard"]), ("c", ["noop"]), ("d", ["batch.shard"])):
        await Workers(queue.database).register(id=id, operations=operations, **columns)
    await raw(queue, "UPDATE batchwright.worker SET heartbeat_at = now() - interval '2 minutes' WHERE id = 'd'")
    assert await live_workers(queue.database, "batch.shard") == 2
