"""Retries one operation until it succeeds or the limits are reached; every attempt is counted."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from batchwright.errors import Conflict, NotFound, StorageError, StorageUnavailable
from batchwright.storage.settings import StorageSettings
from batchwright.telemetry.metrics import Labels, Metric

T = TypeVar("T")

OPERATIONS = Metric(
    "file_storage_operations_total",
    "Attempts at operations of the object store, by how they ended: success, retry (tried again) or failure.",
    ("operation", "component", "status"),
)
FIRST_SECONDS = 0.1
LONGEST_SECONDS = 10.0


class Counter(Protocol):
    """What counts the attempts, such as `Counts`."""

    def add(self, name: str, n: float = 1, labels: Labels = ()) -> None: ...


class Retry:
    """Exponential backoff with full jitter, bounded by time, and by attempts where those are set.

    The last attempt is made when the time limit is reached, so any shorter outage does no harm.
    """

    def __init__(
        self,
        settings: StorageSettings,
        counts: Counter | None,
        component: str,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._component = component
        self._counts = counts
        self._pause = pause
        self._settings = settings

    async def __call__(
        self, operation: str, call: Callable[[], Awaitable[T]], *, may_repeat: Callable[[], bool] = lambda: True
    ) -> T:
        """The result of `call`. Errors that are not the store's, such as those of a stream, are raised uncounted."""
        ends = time.monotonic() + self._settings.retry_seconds_max
        for attempt in itertools.count(1):
            try:
                answer = await call()
            except (NotFound, Conflict):
                self._count(operation, "success")
                raise
            except StorageUnavailable as error:
                left = ends - time.monotonic()
                if attempt == self._settings.attempts or left <= 0 or not may_repeat():
                    self._count(operation, "failure")
                    of = "" if self._settings.attempts is None else f" of {self._settings.attempts}"
                    raise StorageUnavailable(f"{error} (attempt {attempt}{of})") from None
                self._count(operation, "retry")
                longest = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(attempt - 1, 10))
                await self._pause(min(left, random.uniform(0, longest)))
            except StorageError:
                self._count(operation, "failure")
                raise
            else:
                self._count(operation, "success")
                return answer
        raise AssertionError("the last attempt answers or raises")

    def _count(self, operation: str, status: str) -> None:
        if self._counts is not None:
            self._counts.add(OPERATIONS.name, 1, (operation, self._component, status))
