"""Spending on models: summed by tenant, day, model and lane, in the commit that records the cost of a call.

>>> one = Spent("acme", "small", "realtime", Sums.of_call(120, None, Decimal("0.02")))
>>> await spending.add(one, session=session)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Self

from batchwright.db.database import Database, Session
from batchwright.db.statements import statements

SQL = statements(__package__, "spending.sql")
KEPT_DAYS = 400
"""A year, and some time to bill its last month."""
LIST_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Sums:
    """Total usage and cost of calls."""

    calls: int = 0
    unpriced: int = 0
    """Number of calls whose cost is unknown."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: Decimal = Decimal(0)

    @classmethod
    def of_call(cls, prompt_tokens: int | None, completion_tokens: int | None, cost: Decimal | None) -> Self:
        return cls(1, int(cost is None), prompt_tokens or 0, completion_tokens or 0, cost or Decimal(0))


@dataclass(frozen=True, slots=True)
class Spent:
    """What one tenant has spent on one model in one lane."""

    tenant: str
    model: str
    lane: str
    sums: Sums


@dataclass(frozen=True, slots=True)
class Costs:
    """Spending within a period: in total, and by tenant, model and lane, the most expensive first."""

    days: int
    total: Sums
    parts: Sequence[Spent]
    has_more: bool


class Spending:
    """The sums of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, spent: Spent, *, session: Session) -> None:
        """Call this at the end of a transaction, because all calls of a tenant on one day update the same row."""
        sums = spent.sums
        params = {
            "tenant": spent.tenant,
            "model": spent.model,
            "lane": spent.lane,
            "calls": sums.calls,
            "unpriced": sums.unpriced,
            "prompt_tokens": sums.prompt_tokens,
            "completion_tokens": sums.completion_tokens,
            "cost": sums.cost,
        }
        await self._database.ask(SQL["add"], params, session)

    async def costs(self, tenant: str | None, *, days: int, limit: int = 100) -> Costs:
        """Spending of one tenant, or of all. The period ends today; days are in UTC."""
        params = {"tenant": tenant, "days": days}
        ((*sums,),) = await self._database.ask(SQL["total"], params)
        rows = await self._database.ask(SQL["by_model"], {**params, "limit": limit + 1})
        parts = [Spent(tenant, model, lane, Sums(*sums)) for tenant, model, lane, *sums in rows[:limit]]
        return Costs(days, Sums(*sums), parts, has_more=len(rows) > limit)

    async def forget(self, limit: int, *, session: Session) -> int:
        """Remove the sums of old days; returns how many."""
        return len(await self._database.ask(SQL["forget"], {"days": KEPT_DAYS, "limit": limit}, session))
