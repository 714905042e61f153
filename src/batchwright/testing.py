"""For users' tests: a throwaway database, and jobs that run in the test itself, without a worker process.

The package is a pytest plugin, so the fixtures are available without an import:

    batchwright_client        a `Batchwright` on a database of the test's own
    batchwright_async_client  the same for async tests: `async with batchwright_async_client as batchwright:`
    batchwright_database      the URL of that database, with Batchwright's schema
    batchwright_operations    override it: the operations that both clients know
    batchwright_settings      override it: tables of the configuration, such as {"worker": {"concurrency": 2}}
    batchwright_server        once per run: the server that these databases are on

The server is an embedded PostgreSQL of the test run, or the one that BATCHWRIGHT_TEST_DATABASE_URL names. The clients
read neither `batchwright.toml` nor the environment, so that a test never reaches the systems configured there.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime
from typing import overload

from batchwright.app import AsyncBatchwright
from batchwright.blocking import Batchwright
from batchwright.db.database import Database
from batchwright.engine.queue import Queue
from batchwright.engine.workers import Workers
from batchwright.errors import BatchwrightError, Conflict, UnknownOperation

_JOBS_MAX = 100_000


@overload
def drain(batchwright: AsyncBatchwright, *, fast_forward: bool = False, limit: int = _JOBS_MAX) -> Awaitable[int]: ...


@overload
def drain(batchwright: Batchwright, *, fast_forward: bool = False, limit: int = _JOBS_MAX) -> int: ...


def drain(
    batchwright: AsyncBatchwright | Batchwright, *, fast_forward: bool = False, limit: int = _JOBS_MAX
) -> Awaitable[int] | int:
    """Run the client's jobs that are due, and those that they lead to, until none is left; returns how many ran.

    With `fast_forward=True`, also jobs that are due later: the engine's clock skips delays, snoozes and backoffs. A
    database with a live worker is refused, because it is not a test database. A due job of an operation that the
    client does not know is an error. `drain` fails after `limit` runs, because an operation that always snoozes would
    never end.

    >>> def test_ada_is_greeted(batchwright_client):
    ...     job = batchwright_client.enqueue(greet, {"name": "Ada"}, delay_seconds=3600)
    ...     assert drain(batchwright_client) == 0
    ...     drain(batchwright_client, fast_forward=True)
    ...     assert batchwright_client.wait(job) == "Hello, Ada!"
    """
    if isinstance(batchwright, Batchwright):
        return batchwright.call(_drain(batchwright.client, fast_forward, limit))
    return _drain(batchwright, fast_forward, limit)


async def _drain(batchwright: AsyncBatchwright, fast_forward: bool, limit: int) -> int:
    time: datetime | None = None
    queue = Queue(Database(batchwright.pool, clock=lambda: time), batchwright.settings.engine)
    await _refuse_live_workers(batchwright)
    worker = batchwright.worker(queue)
    await worker.register()
    total = 0
    try:
        while True:
            ran = await worker.run_once()
            total += ran
            if total > limit:
                raise BatchwrightError(
                    f"drain() ran {limit} jobs and there are more; does an operation snooze forever?"
                )
            if ran == 0:
                due = await queue.next_due(batchwright.operations.names()) if fast_forward else None
                if due is None:
                    await _refuse_unknown_jobs(batchwright, queue)
                    return total
                await _refuse_live_workers(batchwright, besides=worker.id)
                time = due
    finally:
        await Workers(queue.database).leave(worker.id)
        await worker.close()


async def _refuse_unknown_jobs(batchwright: AsyncBatchwright, queue: Queue) -> None:
    """A test that waits for such a job would wait for ever."""
    if unknown := await queue.unknown_types(batchwright.operations.names()):
        names = ", ".join(map(repr, unknown))
        raise UnknownOperation(
            f"there are due jobs of {names}, which this client does not know: return the operations from the fixture "
            "batchwright_operations, or pass them as Batchwright(operations=[...])"
        )


async def _refuse_live_workers(batchwright: AsyncBatchwright, *, besides: str | None = None) -> None:
    """Refuse a database that workers serve: its jobs are real."""
    for worker in await batchwright.views.workers():
        if worker.is_alive and worker.id != besides:
            raise Conflict(
                f"drain() is for tests, and the worker {worker.id} serves this database: use the fixture "
                "batchwright_client, which has a database of its own, or stop that worker",
                holder=worker.id,
            )
