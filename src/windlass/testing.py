"""For users' tests: run jobs here and now, without a worker process and without waiting for anything."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime
from typing import overload

from windlass.app import AsyncWindlass, Windlass
from windlass.engine.queue import Queue
from windlass.errors import WindlassError

_JOBS_MAX = 100_000


@overload
def drain(windlass: AsyncWindlass, *, fast_forward: bool = True, limit: int = _JOBS_MAX) -> Awaitable[int]: ...


@overload
def drain(windlass: Windlass, *, fast_forward: bool = True, limit: int = _JOBS_MAX) -> int: ...


def drain(
    windlass: AsyncWindlass | Windlass, *, fast_forward: bool = True, limit: int = _JOBS_MAX
) -> Awaitable[int] | int:
    """Run the client's open jobs, and those that they lead to, until none is left; answers how many ran.

    Delays, snoozes and backoffs are skipped over by moving the engine's clock, unless `fast_forward=False`. After
    `limit` runs it gives up, because an operation that always snoozes would never end.

    >>> async with AsyncWindlass(operations=[greet]) as windlass:
    ...     job = await windlass.enqueue(greet, {"name": "Ada"}, delay_seconds=3600)
    ...     await drain(windlass)
    ...     assert await windlass.wait(job) == "Hello, Ada!"
    """
    if isinstance(windlass, Windlass):
        return windlass.call(_drain(windlass.client, fast_forward, limit))
    return _drain(windlass, fast_forward, limit)


async def _drain(windlass: AsyncWindlass, fast_forward: bool, limit: int) -> int:
    time: datetime | None = None
    queue = Queue(windlass.pool, windlass.settings.engine, clock=lambda: time)
    worker = windlass.worker(queue)
    await worker.register()
    total = 0
    try:
        while True:
            ran = await worker.run_once()
            total += ran
            if total > limit:
                raise WindlassError(f"more than {limit} runs and still jobs left; does an operation snooze for ever?")
            if ran == 0:
                due = await queue.next_due(windlass.operations.names()) if fast_forward else None
                if due is None:
                    return total
                time = due
    finally:
        await queue.remove_worker(worker.id)
        await worker.close()
