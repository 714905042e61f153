"""One operation, tried until it answers or patience ends; every attempt is counted."""

from __future__ import annotations

import asyncio
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
    """Where attempts are counted: the process's Counts."""

    def add(self, name: str, n: float = 1, labels: Labels = ()) -> None: ...


class Retry:
    """Exponential backoff with full jitter, bounded by attempts and by time."""

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
        """The answer of `call`. Errors that are not the store's, such as those of a stream, pass uncounted."""
        ends = time.monotonic() + self._settings.retry_seconds_max
        for attempt in range(1, self._settings.attempts + 1):
            try:
                answer = await call()
            except (NotFound, Conflict):
                self._count(operation, "success")
                raise
            except StorageUnavailable as error:
                seconds = random.uniform(0, min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** (attempt - 1)))
                last = attempt == self._settings.attempts or time.monotonic() + seconds > ends
                if last or not may_repeat():
                    self._count(operation, "failure")
                    raise StorageUnavailable(f"{error} (attempt {attempt} of {self._settings.attempts})") from None
                self._count(operation, "retry")
                await self._pause(seconds)
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
