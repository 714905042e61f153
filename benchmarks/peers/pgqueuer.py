"""PgQueuer as a contestant."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from benchmarks.peers import base, noop


class PgQueuer(base.Peer):
    jobs = 200_000
    jobs_quick = 30_000
    name = "PgQueuer"
    package = "pgqueuer"
    settings = """
        Two processes on uvloop (as its own command line runs), each a QueueManager on an asyncpg pool;
        psycopg is tried as well. Durability `durable` (its default), log table on (it cannot be turned
        off), no concurrency limit, heartbeats and log aggregation at their defaults. Finished jobs are
        deleted from the queue table and appended to its log. Bulk enqueue with lists of 1,000.
    """
    variants = {
        "asyncpg b=500": {"driver": "asyncpg", "batch_size": 500},
        "asyncpg b=100": {"driver": "asyncpg", "batch_size": 100},
        "asyncpg b=1000": {"driver": "asyncpg", "batch_size": 1000},
        "psycopg b=100": {"driver": "psycopg", "batch_size": 100},
        "psycopg b=500": {"driver": "psycopg", "batch_size": 500},
    }

    async def migrate(self, url: str, options: dict[str, Any]) -> None:
        async with queries(url, "asyncpg") as install:
            await install.install()

    @asynccontextmanager
    async def producer(self, url: str, options: dict[str, Any]) -> AsyncIterator[base.Send]:
        async with queries(url, options["driver"]) as queue:

            async def send(payloads: list[base.Payload]) -> None:
                bodies = [json.dumps(payload).encode() for payload in payloads]
                await queue.enqueue([base.QUEUE] * len(bodies), bodies, [0] * len(bodies))

            yield send

    def work(self, url: str, options: dict[str, Any]) -> None:
        import uvloop

        uvloop.run(work(url, options))

    def unfinished(self, options: dict[str, Any]) -> str:
        return "SELECT count(*) FROM pgqueuer"

    def history(self, jobs: int, options: dict[str, Any]) -> list[str]:
        return [
            f"""
            INSERT INTO pgqueuer_log (job_id, status, priority, entrypoint, aggregated)
            SELECT -n, status, 0, '{base.QUEUE}', true
            FROM generate_series(1, {jobs}) AS n,
                 unnest(ARRAY['queued', 'picked', 'successful']::pgqueuer_status[]) AS status
            """
        ]


async def work(url: str, options: dict[str, Any]) -> None:
    from pgqueuer.qm import QueueManager

    async with queries(url, options["driver"]) as queue:
        manager = QueueManager(queue)

        @manager.entrypoint(base.QUEUE)
        async def run(job: Any) -> None:
            noop.started(json.loads(job.payload))

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, manager.shutdown.set)
        await manager.run(batch_size=options["batch_size"], dequeue_timeout=timedelta(seconds=30))


@asynccontextmanager
async def queries(url: str, driver: str) -> AsyncIterator[Any]:
    from pgqueuer import db
    from pgqueuer.queries import Queries

    if driver == "asyncpg":
        import asyncpg

        async with asyncpg.create_pool(url, min_size=2, max_size=5) as pool:
            yield Queries(db.AsyncpgPoolDriver(pool))
    else:
        import psycopg

        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            yield Queries(db.PsycopgDriver(connection))


if __name__ == "__main__":
    base.main(PgQueuer())
