"""How many requests may be in flight: slots, the limits of each model, and a circuit breaker per endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import random
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from batchwright.inference.adaptive import AdaptiveLimit, Sent
from batchwright.inference.answers import Answer, Failure
from batchwright.inference.settings import InferenceSettings

logger = logging.getLogger(__name__)

ANSWERS_FADE = 32
"""Of what the largest answer was longer than the last one, so small a part is forgotten."""


class Slots:
    """Room for so many at a time; a slot may weigh more than one.

    Slots of one owner are first come, first served. Between owners those go first whose slots weighed less while others
    waited: a slot's mark is its weight behind its owner's last mark, or behind the last one served, and the lowest mark
    is next. So whoever wants little passes whoever waits for much, until he has had as much, and nobody waits for ever.

    What weighs more than the whole capacity passes alone. A slot that is given back twice is never counted twice:
    `broken` then says so, and whoever owns the process should stop taking work.
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

    @property
    def free(self) -> int:
        """How much could be taken at once."""
        return 0 if self._waiting else max(0, self._capacity - self.in_use)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def slot(self, weight: int = 1, owner: str = "") -> Slot:
        """`async with slots.slot():` holds one inside the block."""
        return Slot(self, weight, owner)

    def take_now(self, weight: int, owner: str) -> bool:
        if not self._fits(weight):
            return False
        if not self._waiting:  # what keeps nobody waiting counts for nobody's share
            self.in_use += weight
            return True
        mark = self._mark(weight, owner)
        if mark >= self._waiting[0].mark:
            return False
        self._take(weight, owner, mark)
        return True

    async def take_turn(self, weight: int, owner: str) -> None:
        self._arrivals += 1
        mark = self._marks[owner] = self._mark(weight, owner)
        turn = _Turn(mark, self._arrivals, weight, owner, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, turn)
        self._admit()
        try:
            await turn.admitted
        except asyncio.CancelledError:
            self._marks[owner] -= weight  # it gets nothing, so nothing counts for its owner's share
            # Admitted and cancelled in the same moment: the room goes to the next.
            if turn.admitted.done() and not turn.admitted.cancelled():
                self.give(weight)
            else:
                with contextlib.suppress(ValueError):  # whoever gave room back just before has passed it over
                    self._waiting.remove(turn)
                    heapq.heapify(self._waiting)
                self._admit()
            raise

    def give(self, weight: int) -> None:
        self.in_use -= weight
        if self.in_use < 0:
            self.note_broken(f"{-self.in_use} more given back than taken")
            self.in_use = 0
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
    """Somebody who waits; no two have the same arrival, so the rest is never compared."""

    mark: int
    arrival: int
    weight: int
    owner: str
    admitted: asyncio.Future[None]


class Slot:
    """One place, to be entered once and left once."""

    __slots__ = ("_held", "_owner", "_slots", "_weight")

    def __init__(self, slots: Slots, weight: int, owner: str) -> None:
        self._slots = slots
        self._weight = weight
        self._owner = owner
        self._held = False

    def enter_now(self) -> bool:
        """Without waiting, which costs less than a coroutine; False means that `async with` would have to wait."""
        assert not self._held, "a slot is entered once"
        self._held = self._slots.take_now(self._weight, self._owner)
        return self._held

    def leave(self) -> None:
        if self._held:
            self._held = False
            self._slots.give(self._weight)
        else:
            self._slots.note_broken("one slot was given back twice")

    async def __aenter__(self) -> None:
        if not self.enter_now():
            await self._slots.take_turn(self._weight, self._owner)
            self._held = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class CircuitBreaker:
    """Stops asking an endpoint that cannot be reached, and lets one request at a time find out whether it is back."""

    FAILURES = 5
    OPEN_SECONDS = 1.0
    OPEN_SECONDS_MAX = 30.0
    PROBE_SECONDS = 5.0
    """A probe that has not failed so long after the time for connecting is connected, and its answer takes long."""

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
        """0 means: send now. While open this admits one probe, and the others ask again soon."""
        if not self.is_open:
            return 0.0
        if now < self._quiet_until:
            return min(self._quiet_until - now, self.OPEN_SECONDS)
        if self._is_probing:
            self._failures = self.FAILURES - 1  # it may have been cancelled instead: the next failure opens again
            return 0.0
        self._is_probing = True
        self._quiet_until = now + self._probe_seconds
        return 0.0

    def connected(self) -> None:
        """The endpoint took a request, whatever it answered."""
        self._failures = 0
        self._is_probing = False

    def failed(self, now: float) -> None:
        """There was no connection; what had been sent before it opened does not prolong the pause."""
        if self.is_open and not self._is_probing:
            return
        self._failures += 1
        self._is_probing = False
        if self.is_open:
            pause = self.OPEN_SECONDS * 2.0 ** min(self._failures - self.FAILURES, 10)
            self._quiet_until = now + min(pause, self.OPEN_SECONDS_MAX) * self._jitter()


class Lane:
    """The limits of one model at one endpoint; the breaker is the endpoint's."""

    def __init__(self, name: str, adaptive: AdaptiveLimit, breaker: CircuitBreaker) -> None:
        self.adaptive = adaptive
        self.breaker = breaker
        self.slots = Slots(name, adaptive.limit)
        self.endpoint_slots: Slots | None = None
        """This worker's share of what the endpoint takes from all workers together."""
        self.answer_bytes = 0
        """The largest answer seen; with each smaller one it fades towards that."""

    def wait_seconds(self, now: float) -> float:
        """How long to send nothing to this lane; 0 means: send now, for this may be the probe of an open breaker."""
        return self.adaptive.wait_seconds(now) or self.breaker.wait_seconds(now)

    def sent(self, now: float) -> Sent:
        """To be called when a request leaves, with its slot held."""
        return Sent(now, self.slots.in_use)

    def heard(self, sent: Sent, answer: Answer, now: float) -> None:
        """What the answer says about the server's load and reachability."""
        if (size := len(answer.body)) > self.answer_bytes:
            self.answer_bytes = size
        elif answer.succeeded:
            self.answer_bytes -= (self.answer_bytes - size) // ANSWERS_FADE
        if answer.code == Failure.CONNECT:
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
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._breakers: dict[str, CircuitBreaker] = {}
        self._shares: dict[str, Slots] = {}
        self.total = Slots("all models", settings.concurrency)
        self.bytes = Slots("bytes in flight", settings.bytes_in_flight_max)

    @property
    def broken(self) -> str | None:
        """The first invariant that does not hold; from then on this process should take no more work.

        The lease thread asks too, while lanes are added.
        """
        every = (self.total, self.bytes, *self._shares.values(), *(lane.slots for lane in list(self._lanes.values())))
        return next((slots.broken for slots in every if slots.broken), None)

    def lane(self, endpoint: str, model: str, *, now: float) -> Lane:
        """The one lane of a model at an endpoint."""
        if (found := self._lanes.get((endpoint, model))) is None:
            settings = self._settings
            adaptive = AdaptiveLimit(
                start=settings.model_concurrency_start,
                least=settings.model_concurrency_min,
                most=settings.most_per_model,
                now=now,
            )
            new = CircuitBreaker(connect_timeout=settings.connect_timeout)
            breaker = self._breakers.setdefault(endpoint, new)
            found = self._lanes[endpoint, model] = Lane(f"{model} at {endpoint}", adaptive, breaker)
            found.endpoint_slots = self._shares.get(endpoint)
        return found

    def share(self, endpoint: str, capacity: int) -> None:
        """At most so many requests in flight to an endpoint, over all its models."""
        if (slots := self._shares.get(endpoint)) is not None:
            slots.capacity = capacity
            return
        slots = self._shares[endpoint] = Slots(f"this worker at {endpoint}", capacity)
        for (where, _), lane in self._lanes.items():
            if where == endpoint:
                lane.endpoint_slots = slots

    def slot(self, lane: Lane, request_bytes: int) -> Hold:
        """`async with limits.slot(lane, len(body)):` holds room of the model first, then of all models, then bytes."""
        return Hold(lane.slots.slot(), *self._rest(lane, request_bytes))

    def rest(self, lane: Lane, request_bytes: int) -> Hold:
        """What a request needs when it has the slot of its model already."""
        return Hold(*self._rest(lane, request_bytes))

    def _rest(self, lane: Lane, request_bytes: int) -> tuple[Slot, ...]:
        rest = self.total.slot(), self.bytes.slot(request_bytes + lane.answer_bytes, lane.slots.name)
        return rest if lane.endpoint_slots is None else (lane.endpoint_slots.slot(), *rest)


class Hold:
    """Several slots, taken in order and given back in reverse."""

    __slots__ = ("_slots",)

    def __init__(self, *slots: Slot) -> None:
        self._slots = slots

    def enter_now(self) -> bool:
        """All of them without waiting, or none; False means that `async with` would have to wait."""
        for place, slot in enumerate(self._slots):
            if not slot.enter_now():
                for taken in reversed(self._slots[:place]):
                    taken.leave()
                return False
        return True

    async def __aenter__(self) -> None:
        taken: list[Slot] = []
        try:
            for slot in self._slots:
                if not slot.enter_now():
                    await slot.__aenter__()
                taken.append(slot)
        except BaseException:
            for slot in reversed(taken):
                slot.leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        for slot in reversed(self._slots):
            slot.leave()
