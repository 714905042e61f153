"""How many requests may be in flight: slots, the limits of each model, and a circuit breaker per endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import random
from collections.abc import Callable
from typing import NamedTuple

from batchwright.inference.adaptive import AdaptiveLimit, Sent
from batchwright.inference.answers import Answer, Failure
from batchwright.inference.settings import InferenceSettings

logger = logging.getLogger(__name__)

ANSWERS_FADE = 32
"""After each smaller answer, the remembered maximum shrinks by the difference divided by this."""


class Slots:
    """Room for a fixed number at a time; a slot may weigh more than one.

    Slots of one owner are first come, first served. Between owners, the one whose slots weighed less while others
    waited goes first. A slot's mark is its weight added to its owner's last mark, or to the last mark served if that
    is higher; the lowest mark is next. So an owner that needs little overtakes one that waits for a lot, until both
    have had the same. No owner waits forever.

    A slot that weighs more than the whole capacity passes alone. A slot that is given back twice is never counted
    twice: `broken` then says so, and the process should stop taking work.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.broken: str | None = None
        self.in_use = 0
        self._capacity = capacity
        self._arrivals = 0
        self._served = 0
        self._marks: dict[str, int] = {}
        self._waiting: list[_Turn] = []

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._capacity = capacity
        self._admit()

    def take_now(self, weight: int = 1, owner: str = "") -> bool:
        """Take without waiting, which costs less than a coroutine; False means that `take` would have to wait."""
        if self.in_use and self.in_use + weight > self._capacity:
            return False
        if not self._waiting:  # while nobody waits, nothing counts towards an owner's share
            self.in_use += weight
            return True
        mark = self._mark(weight, owner)
        if mark >= self._waiting[0].mark:
            return False
        self._take(weight, owner, mark)
        return True

    async def take(self, weight: int = 1, owner: str = "") -> None:
        """Wait in line. A caller that is cancelled here has taken nothing."""
        if self.take_now(weight, owner):
            return
        self._arrivals += 1
        mark = self._marks[owner] = self._mark(weight, owner)
        turn = _Turn(mark, self._arrivals, weight, owner, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, turn)
        self._admit()
        try:
            await turn.admitted
        except asyncio.CancelledError:
            self._marks[owner] -= weight  # it gets nothing, so nothing counts towards its owner's share
            # Admitted and cancelled at the same moment: the next waiter gets the room.
            if turn.admitted.done() and not turn.admitted.cancelled():
                self.give(weight)
            else:
                with contextlib.suppress(ValueError):  # room that was given back just before has skipped this waiter
                    self._waiting.remove(turn)
                    heapq.heapify(self._waiting)
                self._admit()
            raise

    def give(self, weight: int = 1) -> None:
        self.in_use -= weight
        if self.in_use < 0:
            self.note_broken(f"{-self.in_use} more given back than taken")
            self.in_use = 0
        if self._waiting:
            self._admit()

    def note_broken(self, what: str) -> None:
        self.broken = f"the slots of {self.name} do not add up: {what}"
        logger.error(self.broken)

    def _mark(self, weight: int, owner: str) -> int:
        return max(self._served, self._marks.get(owner, 0)) + weight

    def _take(self, weight: int, owner: str, mark: int) -> None:
        self.in_use += weight
        self._served = max(self._served, mark)
        self._marks[owner] = max(mark, self._marks.get(owner, 0))

    def _fits(self, weight: int) -> bool:
        return self.in_use == 0 or self.in_use + weight <= self._capacity

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0].weight):
            turn = heapq.heappop(self._waiting)
            if not turn.admitted.done():
                self._take(turn.weight, turn.owner, turn.mark)
                turn.admitted.set_result(None)


class _Turn(NamedTuple):
    """A waiter. No two have the same arrival, so the other fields are never compared."""

    mark: int
    arrival: int
    weight: int
    owner: str
    admitted: asyncio.Future[None]


class CircuitBreaker:
    """Stops sending to an unreachable endpoint, and lets one request at a time test whether it is back."""

    FAILURES = 5
    OPEN_SECONDS = 1.0
    OPEN_SECONDS_MAX = 30.0
    PROBE_SECONDS = 5.0
    """A probe that has not failed this long after the connect timeout is connected; its answer just takes long."""

    def __init__(
        self, jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.25), *, connect_timeout: float = 10.0
    ) -> None:
        self._jitter = jitter
        self._probe_seconds = connect_timeout + self.PROBE_SECONDS
        self._failures = 0
        self._is_probing = False
        self._quiet_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= self.FAILURES

    def wait_seconds(self, now: float) -> float:
        """0 means: send now. An open breaker admits one probe; the other callers check again soon."""
        if self._failures < self.FAILURES:
            return 0.0
        if now < self._quiet_until:
            return min(self._quiet_until - now, self.OPEN_SECONDS)
        if self._is_probing:
            self._failures = self.FAILURES - 1  # it may have been cancelled instead: the next failure reopens it
            return 0.0
        self._is_probing = True
        self._quiet_until = now + self._probe_seconds
        return 0.0

    def connected(self) -> None:
        """The endpoint accepted a request, whatever it answered."""
        self._failures = 0
        self._is_probing = False

    def failed(self, now: float) -> None:
        """There was no connection. Requests sent before the breaker opened do not extend the pause."""
        if self.is_open and not self._is_probing:
            return
        self._failures += 1
        self._is_probing = False
        if self.is_open:
            pause = self.OPEN_SECONDS * 2.0 ** min(self._failures - self.FAILURES, 10)
            self._quiet_until = now + min(pause, self.OPEN_SECONDS_MAX) * self._jitter()


class ModelLimit:
    """The limits of one model at one endpoint; the breaker is the endpoint's."""

    def __init__(self, name: str, adaptive: AdaptiveLimit, breaker: CircuitBreaker) -> None:
        self.adaptive = adaptive
        self.breaker = breaker
        self.slots = Slots(name, adaptive.limit)
        self.endpoint_slots: Slots | None = None
        """This worker's share of the endpoint's limit for all workers together."""
        self.answer_bytes = 0
        """The largest answer seen; each smaller answer lowers it a little."""

    def wait_seconds(self, now: float) -> float:
        """How long to send nothing to this model; 0 means: send now, for this may be the probe of an open breaker."""
        if now < (quiet_until := self.adaptive.quiet_until):
            return quiet_until - now
        return self.breaker.wait_seconds(now)

    def sent(self, now: float) -> Sent:
        """Call this when a request is sent, while its slot is held."""
        return Sent(now, self.slots.in_use)

    def heard(self, sent: Sent, answer: Answer, now: float) -> None:
        """Apply what the answer says about the server's load and reachability."""
        if (size := len(answer.body)) > self.answer_bytes:
            self.answer_bytes = size
        elif answer.succeeded:
            self.answer_bytes -= (self.answer_bytes - size) // ANSWERS_FADE
        if answer.code is not None and answer.code == Failure.CONNECT:
            self.breaker.failed(now)
            return
        self.breaker.connected()
        if answer.is_overload:
            self.adaptive.overloaded(sent, now)
        elif answer.succeeded:
            self.adaptive.answered(sent, now)
        if self.slots.capacity != self.adaptive.limit:
            self.slots.capacity = self.adaptive.limit


class Limits:
    """All limits of one worker process."""

    def __init__(self, settings: InferenceSettings) -> None:
        self._settings = settings
        self._models: dict[tuple[str, str], ModelLimit] = {}
        self._breakers: dict[str, CircuitBreaker] = {}
        self._endpoints: dict[str, Slots] = {}
        self.total = Slots("all models", settings.concurrency)
        self.bytes = Slots("bytes in flight", settings.bytes_in_flight_max)

    @property
    def broken(self) -> str | None:
        """The first invariant that does not hold; from then on this process should take no more work.

        The lease thread calls this too, while the event loop may be adding models.
        """
        models = list(self._models.values())
        every = (self.total, self.bytes, *self._endpoints.values(), *(model.slots for model in models))
        return next((slots.broken for slots in every if slots.broken), None)

    def of_model(self, endpoint: str, model: str, *, now: float) -> ModelLimit:
        """The one limit of a model at an endpoint."""
        if (found := self._models.get((endpoint, model))) is None:
            settings = self._settings
            adaptive = AdaptiveLimit(
                start=settings.model_concurrency_start,
                least=settings.model_concurrency_min,
                most=settings.most_per_model,
                now=now,
            )
            new = CircuitBreaker(connect_timeout=settings.connect_timeout)
            breaker = self._breakers.setdefault(endpoint, new)
            found = self._models[endpoint, model] = ModelLimit(f"{model} at {endpoint}", adaptive, breaker)
            found.endpoint_slots = self._endpoints.get(endpoint)
        return found

    def limit_endpoint(self, endpoint: str, capacity: int) -> None:
        """Limit the requests in flight to an endpoint, over all its models."""
        if (slots := self._endpoints.get(endpoint)) is not None:
            slots.capacity = capacity
            return
        slots = self._endpoints[endpoint] = Slots(f"this worker at {endpoint}", capacity)
        for (where, _), model in self._models.items():
            if where == endpoint:
                model.endpoint_slots = slots


class Permit:
    """What one request needs to be in flight: a slot of its model first, then the rest.

    The rest is a slot of its endpoint, if that has a limit over all workers, a slot of all models, and bytes.
    """

    __slots__ = ("_bytes", "_endpoint", "_has_slot", "_limits", "_model")

    def __init__(self, limits: Limits, model: ModelLimit) -> None:
        self._limits = limits
        self._model = model
        self._has_slot = False
        self._endpoint: Slots | None = None
        self._bytes: int | None = None

    def take_slot_now(self) -> bool:
        """Take the slot without waiting; False means that `take_slot` would have to wait."""
        self._has_slot = self._model.slots.take_now()
        return self._has_slot

    async def take_slot(self) -> None:
        await self._model.slots.take()
        self._has_slot = True

    def take_rest_now(self, request_bytes: int) -> bool:
        """Take all of the rest without waiting, or nothing; False means that `take_rest` would have to wait."""
        model, limits = self._model, self._limits
        endpoint, weight = model.endpoint_slots, request_bytes + model.answer_bytes
        if endpoint is not None and not endpoint.take_now():
            return False
        if limits.total.take_now():
            if limits.bytes.take_now(weight, model.slots.name):
                self._endpoint, self._bytes = endpoint, weight
                return True
            limits.total.give()
        if endpoint is not None:
            endpoint.give()
        return False

    async def take_rest(self, request_bytes: int) -> None:
        """A caller that is cancelled while waiting keeps the slot of the model, and nothing of the rest."""
        endpoint, weight = self._model.endpoint_slots, request_bytes + self._model.answer_bytes
        taken: list[Slots] = []
        try:
            for slots in (endpoint, self._limits.total):
                if slots is not None:
                    await slots.take()
                    taken.append(slots)
            await self._limits.bytes.take(weight, self._model.slots.name)
        except BaseException:
            for slots in reversed(taken):
                slots.give()
            raise
        self._endpoint, self._bytes = endpoint, weight

    def give_back(self) -> None:
        """Give back everything that is held. A second call is not counted, but reported as `broken`."""
        if not self._has_slot:
            self._model.slots.note_broken("one slot was given back twice")
            return
        if self._bytes is not None:
            self._limits.bytes.give(self._bytes)
            self._limits.total.give()
            if self._endpoint is not None:
                self._endpoint.give()
            self._bytes = None
        self._has_slot = False
        self._model.slots.give()
