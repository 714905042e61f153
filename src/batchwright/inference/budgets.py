"""Requests and tokens per minute and calls in flight, shared by all workers through the database.

The budget of a gateway or a provider is a bucket, stored in one row. There are two ways to take from it:

    RateBudget.reserve   one request: send it now, in 3.2 s, or not yet and when to try again; one round trip
    Budget.take          a second's worth at a time, which one process spends by itself; for the dispatcher of batches

Both see what the other took. A prompt's tokens are estimated when it is sent, and corrected with the server's count.
That may leave a debt: then nothing is sent until the refill has paid it. A server that refuses stops all senders.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from batchwright.db.database import Database, Row
from batchwright.db.statements import statements
from batchwright.errors import DatabaseError, DatabaseUnavailable, Deadlock
from batchwright.inference.answers import RETRY_AFTER_SECONDS_MAX, Answer
from batchwright.inference.feedback import NO_FEEDBACK, REFUSED, Feedback, read_feedback
from batchwright.inference.settings import GatewaySettings

log = logging.getLogger(__name__)

SQL = statements(__package__, "budgets.sql")

CUT_TO = 0.7
"""After a refusal the rate is cut to this share."""
RECOVERY_PER_SECOND = 0.05 / 60
"""The share grows back by 5 % of the full rate per minute."""
SHARE_MIN = 0.1
BLOCK_SECONDS_MAX = RETRY_AFTER_SECONDS_MAX + 1.0
"""A block that ends later than this was set before the clock was turned back."""
LEASE_SECONDS = 330.0
"""A slot that was not given back is freed after this time, a little more than the time limit of a request."""
LINE_SECONDS_MAX = 300.0
"""Maximum wait that a caller gets because of others in line."""
_TOLERANCE_SECONDS = 0.001
_WAIT_SECONDS_MIN = 0.05
_STEP_SECONDS_MIN = 0.01
_HUNGRY = 6
"""After this many unsuccessful attempts (about two seconds), a process takes what it needs as a debt, as reservations
do."""
_DEBT_SECONDS_MAX = 120.0
_SECOND = 1.0
_MINUTE = 60.0
_WORKER_SILENT_SECONDS = 60.0
_UNLIMITED = 1e12

Lack = Literal["requests", "tokens", "concurrency", "blocked"]
"""What a budget lacks. Blocked means that the server refused, and said when to retry."""


@dataclass(slots=True)
class Rate:
    """The refill per second. The bucket holds this much, and at least one request."""

    requests: float
    tokens: float

    @classmethod
    def of(cls, settings: GatewaySettings) -> Rate | None:
        """None if the gateway has no limits per minute."""
        if settings.requests_per_minute is None and settings.tokens_per_minute is None:
            return None
        return RateLimits.of(settings).rate


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """The limits; None means no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int | None = None
    """Maximum number of calls in flight from all workers together."""

    @classmethod
    def of(cls, settings: GatewaySettings) -> RateLimits:
        """The limits of a gateway per minute. Workers divide its limit of requests in flight among themselves."""
        return cls(
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
        )

    @property
    def rate(self) -> Rate:
        return Rate(
            _UNLIMITED if self.requests_per_minute is None else self.requests_per_minute / _MINUTE,
            _UNLIMITED if self.tokens_per_minute is None else self.tokens_per_minute / _MINUTE,
        )


@dataclass(slots=True)
class Reservation:
    """Permission to send one request after `wait_seconds`; settle or cancel it once."""

    id: uuid.UUID
    tokens: int
    wait_seconds: float
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """A refusal: nothing was taken. Try again after this time."""

    seconds: float
    reason: Lack


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """The state of a budget, for users. A level is what is left of a second's worth; below zero it is a debt."""

    name: str
    requests: float | None = None
    """None if it has no limit."""
    tokens: float | None = None
    in_use: int = 0
    concurrency: int | None = None
    share: float = 1.0
    """The share of the rate that applies now; a refusal by the server cuts it."""
    line_seconds: float = 0.0
    """Time until the turn of the last refused caller in line."""
    blocked_until: datetime | None = None
    wait_seconds: float = 0.0
    """When the next request may be sent."""
    reason: Lack | None = None
    """What the next request waits for."""

    def __str__(self) -> str:
        if self.reason is None:
            said = "open"
        elif self.reason == "blocked" and self.blocked_until is not None:
            said = f"the server refused; nothing is sent until {self.blocked_until:%H:%M:%S} UTC"
        elif self.reason == "concurrency":
            said = f"the maximum of {self.concurrency} calls is in flight"
        else:
            said = f"its {self.reason} per minute are used up; the next may be sent in {self.wait_seconds:.1f} s"
        return said if self.share >= 1 else f"{said} (at {self.share:.0%} of the rate, after a refusal)"


class _Bucket:
    """The row of a budget; it is created on first use."""

    def __init__(self, database: Database, name: str, rate: Rate) -> None:
        self._database = database
        self.rate = rate
        self.requests_room = max(1.0, rate.requests)
        # Models of one server may have different rates; in one row they would fill and empty each other's bucket.
        is_limited = rate.requests < _UNLIMITED or rate.tokens < _UNLIMITED
        self.name = f"{name} {rate.requests:g} {rate.tokens:g}" if is_limited else name
        self._requests_worth = rate.requests if rate.requests < _UNLIMITED else 0.0
        self._tokens_worth = rate.tokens if rate.tokens < _UNLIMITED else 0.0
        self._stored_limits: tuple[float | None, float | None] = (None, None)
        """The server's own limits when they were last stored."""
        self._params = {
            "name": self.name,
            "block_max": BLOCK_SECONDS_MAX,
            "line_max": LINE_SECONDS_MAX,
            "recovery": RECOVERY_PER_SECOND,
            "requests_rate": rate.requests,
            "requests_room": self.requests_room,
            "tokens_rate": rate.tokens,
            "tolerance": _TOLERANCE_SECONDS,
            "tokens_room": rate.tokens,
        }

    async def ask(self, statement: str, **params: Any) -> Row:
        """One round trip, except for the very first call."""
        every = {**self._params, **params}
        while not (rows := await self._database.ask(SQL[statement], every)):
            await self._database.ask(SQL["open"], self._params)
        return rows[0]

    async def describe(self) -> Row | None:
        rows = await self._database.ask(SQL["describe"], self._params)
        return rows[0] if rows else None

    async def settle(
        self,
        *,
        id: uuid.UUID | None = None,
        requests_back: float = 0.0,
        tokens_back: float = 0.0,
        feedback: Feedback = NO_FEEDBACK,
    ) -> None:
        """Correct what was taken, and apply what the server reported.

        The caller has an answer to process, so an unavailable database is logged and raises no error.
        """
        requests, tokens, retry_after = feedback.requests, feedback.tokens, feedback.retry_after
        if retry_after is not None:
            retry_after = min(retry_after, RETRY_AFTER_SECONDS_MAX)
        try:
            await self.ask(
                "settle",
                id=id,
                requests_back=requests_back,
                tokens_back=tokens_back,
                is_refused=feedback.is_refused,
                retry_after=retry_after,
                seconds_ago=feedback.seconds_ago,
                cut_to=CUT_TO,
                share_min=SHARE_MIN,
                requests_left=requests.count,
                requests_limit=requests.limit_per_second if self._requests_worth else None,
                requests_seconds=requests.seconds,
                tokens_left=tokens.count,
                tokens_limit=tokens.limit_per_second if self._tokens_worth else None,
                tokens_seconds=tokens.seconds,
            )
        except (DatabaseUnavailable, Deadlock) as error:
            log.warning("the budget %s was not corrected: %s", self.name, error)

    def feedback_of(self, answer: Answer | None) -> Feedback:
        """The feedback of an answer; NO_FEEDBACK unless it changes the bucket or its rate."""
        if answer is None or (answer.rates is None and answer.status != REFUSED):
            return NO_FEEDBACK
        found = read_feedback(answer)
        limits = (found.requests.limit_per_second, found.tokens.limit_per_second)
        is_short = found.requests.is_below(self._requests_worth) or found.tokens.is_below(self._tokens_worth)
        if found.is_refused or is_short or self._is_news(*limits):
            self._stored_limits = limits
            return found
        return NO_FEEDBACK

    def _is_news(self, requests: float | None, tokens: float | None) -> bool:
        """Whether a server newly reports that it allows less than is configured, or no longer does."""
        if (requests, tokens) in (self._stored_limits, (None, None)):
            return False
        is_lower = (requests or _UNLIMITED) < self._requests_worth or (tokens or _UNLIMITED) < self._tokens_worth
        return is_lower or self._stored_limits != (None, None)


class RateBudget:
    """A budget in which every request is reserved by itself."""

    def __init__(self, database: Database, name: str, limits: RateLimits) -> None:
        self._bucket = _Bucket(database, name, limits.rate)
        self._limits = limits

    @classmethod
    def of(cls, database: Database, settings: GatewaySettings, *, concurrency: int | None = None) -> RateBudget:
        """The budget of a gateway, the same that its batches take from."""
        limits = RateLimits.of(settings)
        return cls(database, settings.endpoint, replace(limits, concurrency=concurrency))

    @property
    def name(self) -> str:
        """The key of its row: the name and the rates, because other rates mean another budget."""
        return self._bucket.name

    async def reserve(
        self, tokens: int, *, holder: str, max_wait_seconds: float = 0.0, lease_seconds: float = LEASE_SECONDS
    ) -> Reservation | Wait:
        """Reserve one request with these tokens, if it may be sent within `max_wait_seconds`; otherwise take nothing.

        A slot of `concurrency` is held until the reservation is settled, or `lease_seconds` after it may be sent.
        """
        id = uuid.uuid4()
        is_granted, seconds, reason = await self._bucket.ask(
            "reserve",
            id=id,
            holder=holder,
            tokens=float(tokens),
            concurrency=self._limits.concurrency,
            max_wait=max_wait_seconds,
            lease=lease_seconds,
            wait_min=_WAIT_SECONDS_MIN,
            step_min=_STEP_SECONDS_MIN,
        )
        if is_granted:
            return Reservation(id, tokens, seconds if seconds > _TOLERANCE_SECONDS else 0.0)
        return Wait(seconds, reason)

    async def settle(
        self,
        reservation: Reservation,
        tokens: int | None,
        answer: Answer | None = None,
        *,
        requests: int = 1,
        feedback: Feedback | None = None,
    ) -> None:
        """The request was answered, with this number of tokens as the server counted them (None keeps the estimate).

        The limits that the answer reports are applied. If it took more than one request, the others become a debt.
        """
        if feedback is None:
            feedback = self._bucket.feedback_of(answer)
        back = 0 if tokens is None else reservation.tokens - tokens
        await self._end(reservation, 1 - requests, back, feedback)

    async def cancel(self, reservation: Reservation) -> None:
        """The request was not sent: return everything to the budget."""
        await self._end(reservation, 1, reservation.tokens, NO_FEEDBACK)

    async def add_debt(self, requests: int, feedback: Feedback = NO_FEEDBACK) -> None:
        """Record what was sent without a reservation, because it could not wait."""
        if requests or feedback is not NO_FEEDBACK:
            await self._bucket.settle(requests_back=-requests, feedback=feedback)

    async def describe(self) -> BudgetState:
        """Its levels, what blocks it, and until when."""
        limits = self._limits
        if (row := await self._bucket.describe()) is None:
            return BudgetState(name=self.name, concurrency=limits.concurrency)
        requests, tokens, share, requests_wait, tokens_wait, blocked, in_use, line, until = row
        waits: dict[Lack, float] = {"blocked": blocked, "requests": requests_wait, "tokens": tokens_wait}
        wait = max(waits.values())
        lack: Lack | None = next(one for one, seconds in waits.items() if seconds == wait)
        if wait <= _TOLERANCE_SECONDS:
            is_full = limits.concurrency is not None and in_use >= limits.concurrency
            lack, wait = "concurrency" if is_full else None, 0.0
        return BudgetState(
            name=self.name,
            requests=None if limits.requests_per_minute is None else requests,
            tokens=None if limits.tokens_per_minute is None else tokens,
            in_use=in_use,
            concurrency=limits.concurrency,
            share=share,
            line_seconds=line,
            blocked_until=until,
            wait_seconds=wait,
            reason=lack,
        )

    async def _end(self, reservation: Reservation, requests: int, tokens: int, feedback: Feedback) -> None:
        if not reservation.is_open:
            return
        reservation.is_open = False
        has_slot = self._limits.concurrency is not None
        if has_slot or requests or tokens or feedback is not NO_FEEDBACK:
            id = reservation.id if has_slot else None
            await self._bucket.settle(id=id, requests_back=requests, tokens_back=tokens, feedback=feedback)


@dataclass(slots=True)
class _Purse:
    """What one process has taken but not spent; below zero it is a debt."""

    requests: float = 0.0
    tokens: float = 0.0
    wait_seconds: float = 0.0
    """It was taken as a debt, and may be spent after this time."""
    hunger: int = 0
    """How often in a row the budget was empty."""

    @property
    def is_short(self) -> bool:
        return self.requests < 1 or self.tokens <= 0


class Budget:
    """One gateway's budget, from which this process takes a second's worth at a time."""

    def __init__(
        self,
        database: Database,
        name: str,
        rate: Rate,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bucket = _Bucket(database, name, rate)
        self._pause = pause
        self._purse = _Purse()
        self._turn = asyncio.Lock()
        self._heard: Feedback | None = None
        self._telling: asyncio.Task[None] | None = None

    async def take(self, tokens: int, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait until another request with this number of tokens may be sent; False if it is no longer wanted."""
        purse = self._purse
        async with self._turn:
            while purse.is_short or purse.wait_seconds > 0:
                if not is_wanted():
                    return False
                if purse.is_short:
                    await self._refill()
                if purse.is_short or purse.wait_seconds > 0:
                    seconds = _SECOND * random.uniform(0.2, 0.5)
                    await self._pause(min(seconds, purse.wait_seconds or seconds))
                    purse.wait_seconds = max(0.0, purse.wait_seconds - seconds)
            purse.requests -= 1
            purse.tokens -= tokens
            return True

    def settle(self, guessed: int, counted: int | None, answer: Answer | None = None) -> None:
        """Apply the server's token count (None keeps the estimate), and share its limits with all workers."""
        if counted is not None:
            self._purse.tokens += guessed - counted
        if (feedback := self._bucket.feedback_of(answer)) is not NO_FEEDBACK:
            self._tell(feedback)

    def _tell(self, feedback: Feedback) -> None:
        """Slow down this process to the server's limits, and share them with all other workers."""
        purse = self._purse
        left = (0.0, None) if feedback.is_refused else (feedback.requests.count, feedback.tokens.count)
        purse.requests = min(purse.requests, purse.requests if left[0] is None else left[0])
        purse.tokens = min(purse.tokens, purse.tokens if left[1] is None else left[1])
        if (
            self._heard is None
            or not self._heard.is_refused
            or (feedback.retry_after or 0.0) > (self._heard.retry_after or 0.0)
        ):
            self._heard = feedback
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_all())

    async def _tell_all(self) -> None:
        while (feedback := self._heard) is not None:
            self._heard = None
            await self._bucket.settle(feedback=feedback)

    async def _refill(self) -> None:
        """Take what is missing to a second's worth, and pay our debt. Leave in the bucket what we have enough of."""
        purse, bucket = self._purse, self._bucket
        if self._telling is not None:
            await asyncio.wait([self._telling])
        try:
            requests, tokens, wait = await bucket.ask(
                "take",
                requests=bucket.requests_room - purse.requests,
                tokens=bucket.rate.tokens - purse.tokens,
                debt_max=_DEBT_SECONDS_MAX if purse.hunger >= _HUNGRY else 0.0,
            )
        except DatabaseError:
            return
        purse.hunger = 0 if requests or tokens else purse.hunger + 1
        purse.requests += requests
        purse.tokens += tokens
        purse.wait_seconds = wait


async def live_workers(database: Database, operation: str) -> int:
    """Number of workers that run this operation now; at least one, because the caller is one."""
    params = {"operation": operation, "silent_seconds": _WORKER_SILENT_SECONDS}
    ((workers,),) = await database.ask(SQL["workers"], params)
    return max(1, int(workers))
