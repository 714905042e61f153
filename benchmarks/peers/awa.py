"""Awa's Python SDK as a contestant."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import base, noop


class Awa(base.Peer):
    jobs = 50_000
    jobs_quick = 5_000
    name = "Awa"
    package = "awa-pg"
    settings = """
        Two processes, each with 128 workers on the queue (W=128) and a pool of 20 connections. Both of its
        engines: queue storage (append-only segments, enqueue_many_copy; finished jobs go when their
        segment is rotated away) and canonical storage (rows kept, insert_many_copy), COPY in batches of
        1,000. Poll interval, heartbeats and rotation at their defaults; no rate limits. Its worker core
        is Rust inside the Python process: the Python column holds both.
    """
    variants = {
        "canonical": {"storage": "canonical"},
        "queue storage": {"storage": "queue"},
        "queue storage, b=512": {"storage": "queue", "queue": {"claim_batch_size": 512}},
    }

    async def migrate(self, url: str, options: dict[str, Any]) -> None:
        async with client(url) as awa:
            await awa.migrate()
            if options["storage"] == "queue":
                await awa.install_queue_storage()

    @asynccontextmanager
    async def producer(self, url: str, options: dict[str, Any]) -> AsyncIterator[base.Send]:
        async with client(url) as awa:
            insert = awa.enqueue_many_copy if options["storage"] == "queue" else awa.insert_many_copy

            async def send(payloads: list[base.Payload]) -> None:
                await insert([Noop(**payload) for payload in payloads], queue=base.QUEUE)

            yield send

    def work(self, url: str, options: dict[str, Any]) -> None:
        asyncio.run(work(url, options))

    def unfinished(self, options: dict[str, Any]) -> str:
        table = "jobs" if options["storage"] == "queue" else "jobs_hot"
        return f"SELECT count(*) FROM awa.{table} WHERE state IN ('available', 'running', 'retryable')"

    def history(self, jobs: int, options: dict[str, Any]) -> list[str]:
        if options["storage"] == "queue":
            return []  # finished jobs go with their segment
        return [
            "SET session_replication_role = replica",
            f"""
            INSERT INTO awa.jobs_hot (
                kind, queue, args, state, priority, attempt, max_attempts, run_at, heartbeat_at, deadline_at,
                attempted_at, finalized_at, created_at, run_lease)
            SELECT 'noop', '{base.QUEUE}', jsonb_build_object('n', n, 'at', NULL), 'completed', 2, 1, 25,
                   now(), now(), now() + interval '5 minutes', now(), now(), now(), 1
            FROM generate_series(1, {jobs}) AS n
            """,
        ]


@dataclass
class Noop:
    at: float | None = None
    n: int | None = None


async def work(url: str, options: dict[str, Any]) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with client(url) as awa:

        @awa.task(Noop, queue=base.QUEUE)
        async def run(job: Any) -> None:
            noop.started({"at": job.args.at})

        queue = {"name": base.QUEUE, "max_workers": 128, **options.get("queue", {})}
        await awa.start([queue])
        await stopped.wait()
        await awa.shutdown()


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Any]:
    import awa

    # Its driver wants a host even when `?host=` names a socket, which then counts.
    async with awa.AsyncClient(url.replace("@/", "@localhost/"), max_connections=20) as connected:
        yield connected


if __name__ == "__main__":
    base.main(Awa())
