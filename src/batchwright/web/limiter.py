"""Limits the number of tries from one address in a period."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable

_ADDRESSES_MAX = 10_000


class Limiter:
    """Counts tries by address, over a sliding window."""

    def __init__(self, tries_max: int, *, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._tries_max = tries_max
        self._seconds = seconds
        self._monotonic = monotonic
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_seconds(self, address: str) -> float:
        """Count a try; returns 0 if it is allowed, otherwise how long to wait until the next one."""
        now = self._monotonic()
        tries = self._tries.setdefault(address, deque(maxlen=self._tries_max))
        self._tries.move_to_end(address)
        if len(self._tries) > _ADDRESSES_MAX:
            self._tries.popitem(last=False)
        if len(tries) == self._tries_max and now - tries[0] < self._seconds:
            return self._seconds - (now - tries[0])
        tries.append(now)
        return 0.0
