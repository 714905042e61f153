"""Counts the requests that the simulator received, and their outcomes."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

_STEPS = 4


class Spread:
    """Durations in buckets, four for each doubling: precise enough for percentiles of any number of durations."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.max = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum += seconds
        if seconds > self.max:
            self.max = seconds
        share, exponent = math.frexp(seconds)  # share is from 0.5 to 1
        self._buckets[_STEPS * exponent + int(2 * _STEPS * share)] += 1

    def at(self, share: float) -> float:
        """An upper bound for this share of the durations, too high by at most a quarter."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                exponent, step = divmod(bucket - _STEPS, _STEPS)
                return min(self.max, math.ldexp(step + _STEPS + 1, exponent) / (2 * _STEPS))
        return self.max

    def summary(self) -> dict[str, float]:
        mean = self.sum / self.count if self.count else 0.0
        shown = {"mean": mean, "p50": self.at(0.5), "p95": self.at(0.95), "p99": self.at(0.99), "max": self.max}
        return {name: round(value, 6) for name, value in shown.items()}


class Asked:
    """How often each distinct request arrived, for a limited number of distinct requests."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: dict[int | str, int] = {}
        self.total = 0
        self.overflow = 0

    def add(self, key: int | str) -> int:
        """How often the request has arrived so far, including this time."""
        self.total += 1
        times = self._times.get(key, 0) + 1
        if times == 1 and len(self._times) >= self._limit:
            self.overflow += 1
            return 1
        self._times[key] = times
        return times

    @property
    def distinct(self) -> int:
        return len(self._times)

    @property
    def repeated(self) -> int:
        return self.total - self.overflow - len(self._times)

    def summary(self, over: int, limit: int) -> dict[str, Any]:
        """`requests` are those that arrived more than `over` times, the most frequent first."""
        often = sorted(((n, key) for key, n in self._times.items() if n > over), key=lambda one: -one[0])
        return {
            "total": self.total,
            "distinct": self.distinct,
            "repeated": self.repeated,
            "max": max(self._times.values(), default=0),
            "over": over,
            "count": len(often),
            "overflow": self.overflow,
            "requests": {key if isinstance(key, str) else f"{key:016x}": n for n, key in often[:limit]},
        }


class Counters:
    """The counters of the whole server."""

    def __init__(self, asked_max: int) -> None:
        self.started_at = time.time()
        self.answered: Counter[int] = Counter()
        self.aborted: Counter[str] = Counter()
        self.aborted_after = Spread()
        self.by_body = Asked(asked_max)
        self.by_request_id = Asked(asked_max)
        self.by_served = Asked(asked_max)
        self.connections_opened = 0
        self.connections_closed = 0
        self.connections_max = 0
        self.endpoints: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.in_flight = 0
        self.in_flight_max = 0
        self.last_aborted_at: float | None = None
        self.last_answered_at: float | None = None
        self.last_received_at: float | None = None
        self.received = 0

    def renewed(self, asked_max: int) -> Counters:
        """New counters that keep the open connections and the requests in flight."""
        fresh = Counters(asked_max)
        fresh.connections_opened = fresh.connections_max = self.connections_opened - self.connections_closed
        fresh.in_flight = fresh.in_flight_max = self.in_flight
        return fresh

    def connected(self) -> None:
        self.connections_opened += 1
        self.connections_max = max(self.connections_max, self.connections_opened - self.connections_closed)

    def began(self, endpoint: str) -> None:
        self.received += 1
        self.endpoints[endpoint] += 1
        self.in_flight += 1
        if self.in_flight > self.in_flight_max:
            self.in_flight_max = self.in_flight
        self.last_received_at = time.time()

    def ended(self, status: int) -> None:
        self.answered[status] += 1
        self.in_flight -= 1
        self.last_answered_at = time.time()

    def lost(self, where: str, seconds: float) -> None:
        self.aborted[where] += 1
        self.aborted_after.add(seconds)
        self.in_flight -= 1
        self.last_aborted_at = time.time()

    def summary(self) -> dict[str, Any]:
        return {
            "started_at": self.started_at,
            "seconds": round(time.time() - self.started_at, 3),
            "cpu_seconds": round(time.process_time(), 6),
            "received": self.received,
            "answered": {str(status): n for status, n in sorted(self.answered.items())},
            "aborted": {"total": self.aborted_after.count, **self.aborted},
            "aborted_after_seconds": self.aborted_after.summary(),
            "in_flight": self.in_flight,
            "in_flight_max": self.in_flight_max,
            "connections": {
                "opened": self.connections_opened,
                "closed": self.connections_closed,
                "open": self.connections_opened - self.connections_closed,
                "open_max": self.connections_max,
            },
            "endpoints": dict(self.endpoints),
            "faults": dict(self.faults),
            "distinct": self.by_body.distinct,
            "repeated": self.by_body.repeated,
            "last_received_at": self.last_received_at,
            "last_answered_at": self.last_answered_at,
            "last_aborted_at": self.last_aborted_at,
        }
