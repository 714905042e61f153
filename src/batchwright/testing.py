"""For users' tests: run jobs here and now, without a worker process and without waiting for anything."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime
from typing import overload

from batchwright.app import AsyncBatchwright
from batchwright.blocking import Batchwright
from batchwright.db.database import Database
from batchwright.engine.queue import Queue
from batchwright.engine.workers import Workers
from batchwright.errors import BatchwrightError

_JOBS_MAX = 100_000


@overload
def drain(batchwright: AsyncBatchwright, *, fast_forward: bool = True, limit: int = _JOBS_MAX) -> Awaitable[int]: ...


@overload
def drain(batchwright: Batchwright, *, fast_forward: bool = True, limit: int = _JOBS_MAX) -> int: ...


def drain(
    batchwright: AsyncBatchwright | Batchwright, *, fast_forward: bool = True, limit: int = _JOBS_MAX
) -> Awaitable[int] | int:
    """Run the client's open jobs, and those that they lead to, until none is left; answers how many ran.

    Delays, snoozes and backoffs are skipped over by moving the engine's clock, unless `fast_forward=False`. After
    `limit` runs it gives up, because an operation that always snoozes would never end.

    >>> async with AsyncBatchwright(operations=[greet]) as batchwright:
    ...     job = await batchwright.enqueue(greet, {"name": "Ada"}, delay_seconds=3600)
    ...     await drain(batchwright)
    ...     assert await batchwright.wait(job) == "Hello, Ada!"
    """
    if isinstance(batchwright, Batchwright):
        return batchwright.call(_drain(batchwright.client, fast_forward, limit))
    return _drain(batchwright, fast_forward, limit)


async def _drain(batchwright: AsyncBatchwright, fast_forward: bool, limit: int) -> int:
    time: datetime | None = None
    queue = Queue(Database(batchwright.pool, clock=lambda: time), batchwright.settings.engine)
    worker = batchwright.worker(queue)
    await worker.register()
    total = 0
    try:
        while True:
            ran = await worker.run_once()
            total += ran
            if total > limit:
                raise BatchwrightError(
                    f"more than {limit} runs and still jobs left; does an operation snooze for ever?"
                )
            if ran == 0:
                due = await queue.next_due(batchwright.operations.names()) if fast_forward else None
                if due is None:
                    return total
                time = due
    finally:
        await Workers(queue.database).leave(worker.id)
        await worker.close()
