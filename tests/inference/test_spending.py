"""Spending on models: every call is counted once, by tenant, model and day."""

import asyncio
from datetime import timedelta
from decimal import Decimal

import pytest

from batchwright.inference.spending import KEPT_DAYS, Spending, Spent, Sums
from tests.support import raw

CENT = Decimal("0.01")


@pytest.fixture
def spending(queue):
    return Spending(queue.database)


@pytest.fixture
def spend(queue, spending):
    async def spend(tenant="acme", model="small", lane="realtime", *, cost=CENT):
        sums = Sums.of_call(10, 2, cost)
        async with queue.database.transaction() as session:
            await spending.add(Spent(tenant, model, lane, sums), session=session)

    return spend


async def test_simultaneous_calls_are_all_counted(spending, spend):
    await asyncio.gather(*(spend() for _ in range(20)))
    costs = await spending.costs("acme", days=1)
    assert costs.parts == [Spent("acme", "small", "realtime", Sums(20, 0, 200, 40, 20 * CENT))]
    assert costs.total == costs.parts[0].sums


async def test_a_tenant_sees_its_own_spending_and_the_list_of_all_is_sorted_by_cost(spending, spend):
    await spend("acme", "small")
    await spend("acme", "large", cost=5 * CENT)
    await spend("acme", "large", "batch", cost=2 * CENT)
    await spend("other", "large", cost=9 * CENT)
    await spend("other", "unheard-of", cost=None)
    own = await spending.costs("acme", days=30)
    assert [(part.model, part.lane, part.sums.cost) for part in own.parts] == [
        ("large", "realtime", 5 * CENT),
        ("large", "batch", 2 * CENT),
        ("small", "realtime", CENT),
    ]
    assert own.total == Sums(3, 0, 30, 6, 8 * CENT)
    everyone = await spending.costs(None, days=30, limit=2)
    assert [part.tenant for part in everyone.parts] == ["other", "acme"]
    assert everyone.has_more
    assert (everyone.total.calls, everyone.total.unpriced, everyone.total.cost) == (5, 1, 17 * CENT)


async def test_a_tenant_without_calls_has_no_spending(spending):
    costs = await spending.costs("nobody", days=30)
    assert (costs.total, costs.parts, costs.has_more) == (Sums(), [], False)


async def test_days_are_those_of_utc_and_old_ones_are_forgotten(queue, clock, spending, spend):
    await spend()
    await clock.advance(queue, timedelta(days=2).total_seconds())
    await spend(cost=3 * CENT)
    assert (await spending.costs(None, days=1)).total.cost == 3 * CENT
    assert (await spending.costs(None, days=2)).total.cost == 3 * CENT
    assert (await spending.costs(None, days=3)).total.cost == 4 * CENT
    await clock.advance(queue, timedelta(days=KEPT_DAYS - 1).total_seconds())
    async with queue.database.transaction() as session:
        assert await spending.forget(10, session=session) == 1
        assert await spending.forget(10, session=session) == 0
    assert await raw(queue, "SELECT cost FROM batchwright.spending") == [(3 * CENT,)]
