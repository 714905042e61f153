"""Model servers in simulated time, and a client that keeps them as busy as a limit allows."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass

from batchwright.inference.adaptive import AdaptiveLimit, Sent

REFUSAL_SECONDS = 0.03


class Refusing:
    """Runs a number of requests at a time, which may change, and refuses others at once."""

    def __init__(self, capacity, seconds=0.5, spread=0.3, seed=1):
        self._capacity = capacity
        self._seconds = seconds
        self._spread = spread
        self._random = random.Random(seed)
        self._running = 0
        self._ends = []

    def take(self, id, now):
        """(time, id, is answered) of the requests whose end is known."""
        if self._running >= self._capacity(now):
            heapq.heappush(self._ends, (now + REFUSAL_SECONDS, id, False))
        else:
            self._running += 1
            took = self._seconds * self._random.lognormvariate(0, self._spread)
            heapq.heappush(self._ends, (now + took, id, True))

    def next(self):
        return self._ends[0][0] if self._ends else float("inf")

    def pop(self):
        now, id, answered = heapq.heappop(self._ends)
        self._running -= answered
        return now, id, answered


class Queueing:
    """Like vLLM: all running requests share a step that slows with their number; others queue, and none is refused.

    Progress is counted in work that every running request has done since the beginning, so one heap is enough.
    """

    def __init__(self, running_max, step=0.5, slope=0.0, spread=0.3, seed=1):
        self._running_max = running_max
        self._step = step
        self._slope = slope
        self._spread = spread
        self._random = random.Random(seed)
        self._queue = deque()
        self._ends = []
        self._work = 0.0
        self._now = 0.0

    def take(self, id, now):
        self._advance(now)
        self._queue.append(id)
        self._start()

    def next(self):
        return self._now + (self._ends[0][0] - self._work) * self._pace() if self._ends else float("inf")

    def pop(self):
        self._advance(self.next())
        _, id = heapq.heappop(self._ends)
        self._start()
        return self._now, id, True

    def _pace(self):
        return self._step * (1 + self._slope * len(self._ends))

    def _advance(self, now):
        if self._ends:
            self._work += (now - self._now) / self._pace()
        self._now = now

    def _start(self):
        while self._queue and len(self._ends) < self._running_max:
            work = self._random.lognormvariate(0, self._spread)
            heapq.heappush(self._ends, (self._work + work, self._queue.popleft()))


class Fixed:
    def __init__(self, limit):
        self.limit = limit

    def answered(self, sent, now):
        pass

    def overloaded(self, sent, now):
        pass

    def wait_seconds(self, now):
        return 0.0


@dataclass
class Seen:
    answered: int = 0
    wasted: int = 0
    calls: int = 0
    wasted_of_all: int = 0
    limits: tuple = ()
    in_flight_max: int = 0


def run(backend, limit, *, since=60.0, until=120.0):
    """Sends requests without end; a refused one waits, and another one takes its turn."""
    ids = itertools.count()
    sent: dict[int, Sent] = {}
    seen, limits, now = Seen(), [], 0.0
    while now < until:
        if not sent:
            now += limit.wait_seconds(now)
        while len(sent) < limit.limit and not limit.wait_seconds(now):
            id = next(ids)
            sent[id] = Sent(now, len(sent) + 1)
            backend.take(id, now)
            seen.calls += 1
        seen.in_flight_max = max(seen.in_flight_max, len(sent))
        now, id, answered = backend.pop()
        ticket = sent.pop(id)
        (limit.answered if answered else limit.overloaded)(ticket, now)
        seen.wasted_of_all += not answered
        if now >= since:
            seen.answered += answered
            seen.wasted += not answered
            limits.append(limit.limit)
    seen.limits = (min(limits), sum(limits) / len(limits), max(limits))
    return seen


def adaptive(most=320):
    return AdaptiveLimit(start=10, least=1, most=most, now=0.0)
