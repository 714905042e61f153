"""Requests and tokens per minute, shared by all workers through the database.

A gateway's budget is a bucket in a row. A worker takes out of it, at most once a second, what it can send in that
second, so that the database is asked little and no worker hoards. A prompt's tokens are guessed when it is sent and
corrected by what the server counted, which may leave a debt: then nothing is sent until it is paid.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from batchwright.db.database import Database
from batchwright.db.statements import statements
from batchwright.errors import DatabaseError
from batchwright.inference.settings import GatewaySettings

SQL = statements(__package__, "budgets.sql")

_SECOND = 1.0
_MINUTE = 60.0
_WORKER_SILENT_SECONDS = 60.0
_UNLIMITED = 1e12


@dataclass(slots=True)
class Rate:
    """What a second brings; the bucket holds that much, and at least one request."""

    requests: float
    tokens: float

    @classmethod
    def of(cls, settings: GatewaySettings) -> Rate | None:
        """None if the gateway is not limited by the minute."""
        if settings.requests_per_minute is None and settings.tokens_per_minute is None:
            return None
        return cls(
            _UNLIMITED if settings.requests_per_minute is None else settings.requests_per_minute / _MINUTE,
            _UNLIMITED if settings.tokens_per_minute is None else settings.tokens_per_minute / _MINUTE,
        )


class Budget:
    """One gateway's budget, as one worker sees it."""

    def __init__(
        self,
        database: Database,
        name: str,
        rate: Rate,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._database = database
        # Models of one server may have rates of their own, and would fill and empty each other's bucket.
        self._name = f"{name} {rate.requests:g} {rate.tokens:g}"
        self._rate = rate
        self._pause = pause
        self._requests = 0.0
        self._tokens = 0.0
        self._turn = asyncio.Lock()

    async def take(self, tokens: int, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait until another request with so many tokens may be sent; False if it is not wanted any more."""
        async with self._turn:
            while self._lacks:
                if not is_wanted():
                    return False
                await self._refill()
                if self._lacks:
                    await self._pause(_SECOND * random.uniform(0.2, 0.5))
            self._requests -= 1
            self._tokens -= tokens
            return True

    def settle(self, guessed: int, counted: int | None) -> None:
        """The server counted its tokens; None leaves the guess."""
        if counted is not None:
            self._tokens += guessed - counted

    @property
    def _lacks(self) -> bool:
        return self._requests < 1 or self._tokens <= 0

    async def _refill(self) -> None:
        """Take what we lack of a second's worth, and pay our debt; what we have enough of stays in the bucket."""
        rate, room = self._rate, max(1.0, self._rate.requests)
        params = {
            "name": self._name,
            "requests_rate": rate.requests,
            "requests_room": room,
            "tokens_rate": rate.tokens,
            "tokens_room": rate.tokens,
        }
        try:
            async with self._database.transaction() as session:
                ((requests, tokens),) = await self._database.ask(SQL["take"], params, session)
                requests = max(0, int(min(requests, room - self._requests)))
                tokens = max(0.0, min(tokens, rate.tokens - self._tokens))
                taken = {"name": self._name, "requests": float(requests), "tokens": tokens}
                await self._database.ask(SQL["spend"], taken, session)
        except DatabaseError:
            return
        self._requests += requests
        self._tokens += tokens


async def live_workers(database: Database, operation: str) -> int:
    """Workers that run this operation now; at least one, for whoever asks is one."""
    params = {"operation": operation, "silent_seconds": _WORKER_SILENT_SECONDS}
    ((workers,),) = await database.ask(SQL["workers"], params)
    return max(1, int(workers))
