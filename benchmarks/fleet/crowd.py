"""Many idle workers in one process: only the parts of a worker that send statements while it is idle.

    python -m benchmarks.fleet.crowd COUNT

Each has a row and three connections of its own, as an idle worker keeps them, and runs the real upkeep, heartbeat and
counts. Behind a pooler in transaction mode it has two connections and no doorbell, as a real one has there. Threads,
pools and everything that waits for jobs are left out, so that a thousand of them take part of a core. The settings
come from the environment. It prints a line when all workers have started, and ends when its standard input does,
without cleaning up: the database is removed then.
"""

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator
from typing import Any

import psycopg

from batchwright import AsyncBatchwright
from batchwright.db.database import Database, Row, Transaction, connect_arguments
from batchwright.db.doorbell import CHANNEL
from batchwright.engine.metrics import CountsWriter
from batchwright.engine.queue import Queue
from batchwright.engine.upkeep import Upkeep
from batchwright.engine.worker.worker import Worker, fleet_pace, worker_id
from batchwright.engine.workers import Workers
from batchwright.settings import load_settings

STARTING_MAX = 4
BEAT_SECONDS = 10.0


async def main(count: int) -> None:
    client = await AsyncBatchwright(settings=load_settings()).open()
    like, turns = client.worker(), asyncio.Semaphore(STARTING_MAX)

    async def start() -> list[asyncio.Task[None]]:
        async with turns:
            return await start_idle(client, like)

    tasks = [task for some in await asyncio.gather(*(start() for _ in range(count))) for task in some]
    print("ready", flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for broken in (task for task in tasks if task.done()):
        print(repr(broken.exception()), file=sys.stderr, flush=True)
    os._exit(0 if ended.done() else 1)


async def start_idle(client: AsyncBatchwright, like: Worker) -> list[asyncio.Task[None]]:
    """Add a worker with the operations and rounds of `like`."""
    id = worker_id()
    statements, lease = [await connect(client) for _ in range(2)]
    database = Database(Single(statements))
    workers, leased = Workers(database), Workers(Database(Single(lease)))
    upkeep = Upkeep(Queue(database), like._processes, like._operations, like._duties.rounds, name=id)
    await workers.register(**{**like._columns(), "id": id})
    rings = asyncio.Event()
    running = [
        upkeep.run(),
        look(upkeep, like, rings),
        beat(leased, id, upkeep, like),
        CountsWriter(database, id, like.counts).run(),
    ]
    if client.pool.route.keeps_sessions:
        bell = await connect(client)
        await bell.execute(f"LISTEN {CHANNEL}")
        running.append(hear(bell, rings))
    return [asyncio.create_task(each) for each in running]


async def look(upkeep: Upkeep, like: Worker, rings: asyncio.Event) -> None:
    """Poll at the pace of an idle worker, and at once after a doorbell."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(like.settings.poll_seconds_max * upkeep.pace * random.uniform(0.75, 1.0)):
                await rings.wait()
        rings.clear()
        await upkeep.look()


async def beat(workers: Workers, id: str, upkeep: Upkeep, like: Worker) -> None:
    await asyncio.sleep(random.uniform(0, BEAT_SECONDS))
    while True:
        peers = await workers.heartbeat(id, running=0, stopping=False)
        upkeep.pace = fleet_pace(peers or 1, like.settings.poll_seconds_max)
        await asyncio.sleep(BEAT_SECONDS)


async def hear(bell: psycopg.AsyncConnection[Row], rings: asyncio.Event) -> None:
    async for _ in bell.notifies():
        rings.set()


async def connect(client: AsyncBatchwright) -> psycopg.AsyncConnection[Row]:
    arguments = connect_arguments(client.settings.database)
    threshold = 0 if client.pool.route.prepares else None
    return await psycopg.AsyncConnection.connect(
        client.pool.url, autocommit=True, prepare_threshold=threshold, **arguments
    )


class Single:
    """A source of statements with one connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Row]) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()

    async def rows(self, sql: str, params: Any = None) -> list[Row]:
        async with self._lock:
            return await Transaction(self._connection).rows(sql, params)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        async with self._lock, self._connection.transaction():
            yield Transaction(self._connection)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
