"""The rate budgets of model servers for documents. All workers share them, and no worker sleeps for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from batchwright.db.database import Database
from batchwright.errors import RateLimited
from batchwright.inference.answers import Answer
from batchwright.inference.budgets import RateBudget, Reservation, Wait
from batchwright.inference.gateway import Gateway

_WAIT_IN_PLACE_SECONDS = 2.0
"""For a wait up to this time, sleeping costs less than putting the job back."""
_SAYS = {
    "requests": "the request limit of this minute is used up",
    "tokens": "the token limit of this minute is used up",
    "concurrency": "the maximum number of requests is in flight",
    "blocked": "the server asked to wait",
}


class Rates:
    """The budgets of all gateways of this process, and what it has reserved of them."""

    def __init__(self, database: Database, gateway_of: Callable[[str], Gateway | None]) -> None:
        self._database = database
        self._gateway_of = gateway_of
        self._budgets: dict[str, RateBudget] = {}
        self._open: dict[str, tuple[RateBudget, Reservation]] = {}

    async def reserve(self, model: str, tokens: int, *, holder: str) -> None:
        """Reserve one request, or raise RateLimited with the time until there is room."""
        gateway = self._gateway_of(model)
        if gateway is None:
            return
        budget = self._budget(gateway)
        found = await budget.reserve(tokens, holder=holder, max_wait_seconds=_WAIT_IN_PLACE_SECONDS)
        if isinstance(found, Wait):
            message = f"{_SAYS[found.reason]} at {gateway.endpoint}"
            raise RateLimited(message, retry_after=found.seconds, code="rate_budget")
        self._open[holder] = (budget, found)

    async def wait(self, holder: str) -> None:
        """Sleep until the request may be sent, which is soon."""
        if (open := self._open.get(holder)) is not None and open[1].wait_seconds > 0:
            await asyncio.sleep(open[1].wait_seconds)

    async def settle(self, holder: str, tokens: int | None, answer: Answer) -> None:
        """Correct the budget by what the server counted, and by the limits that it reports."""
        if (open := self._open.pop(holder, None)) is not None:
            await open[0].settle(open[1], tokens, answer)

    async def cancel(self, holder: str) -> None:
        if (open := self._open.pop(holder, None)) is not None:
            await open[0].cancel(open[1])

    def _budget(self, gateway: Gateway) -> RateBudget:
        if gateway.endpoint not in self._budgets:
            self._budgets[gateway.endpoint] = RateBudget.of(self._database, gateway.settings)
        return self._budgets[gateway.endpoint]
