"""Batchwright as a contestant, with the same command line as all others."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers import base

OPERATIONS = "benchmarks.peers.batchwright_ops"


class Batchwright(base.Peer):
    jobs = 200_000
    jobs_quick = 30_000
    name = "Batchwright"
    package = "batchwright"
    processes = 1  # one command, which starts its two processes itself
    settings = """
        `batchwright worker --processes 2 --concurrency 500`, everything else at its defaults: fence, lease,
        history and three event rows per job. Bulk enqueue with lists of 1,000.
    """
    variants = {"concurrency 500": {"concurrency": 500}}

    async def migrate(self, url: str, options: dict[str, Any]) -> None:
        process = await asyncio.create_subprocess_exec(
            executable(), "migrate", env=environment(url), stdout=asyncio.subprocess.DEVNULL
        )
        if await process.wait() != 0:
            raise SystemExit("batchwright migrate failed")

    @asynccontextmanager
    async def producer(self, url: str, options: dict[str, Any]) -> AsyncIterator[base.Send]:
        from batchwright import AsyncBatchwright, NewJob
        from benchmarks.peers.batchwright_ops import noop

        async with AsyncBatchwright(database_url=url, operations=[noop]) as batchwright:

            async def send(payloads: list[base.Payload]) -> None:
                await batchwright.enqueue([NewJob(noop, dict(payload)) for payload in payloads])

            yield send

    def work(self, url: str, options: dict[str, Any]) -> None:
        arguments = ["worker", OPERATIONS, "--processes", "2", "--concurrency", str(options["concurrency"])]
        os.execve(executable(), ["batchwright", *arguments], environment(url))

    def unfinished(self, options: dict[str, Any]) -> str:
        return """
            SELECT (SELECT count(*) FROM batchwright.job WHERE status = 'QUEUED')
                 + (SELECT count(*) FROM batchwright.job WHERE locked_by IS NOT NULL)
        """

    def history(self, jobs: int, options: dict[str, Any]) -> list[str]:
        """Ids that grow like the real ones, and are lower than all of them."""
        number = "lpad(to_hex(n), 12, '0')"
        return [
            "ALTER TABLE batchwright.job DISABLE TRIGGER legal_births",
            f"""
            INSERT INTO batchwright.job (
                id, job_type, queue, tenant, status, priority, run_after, payload, attempts, max_attempts,
                claims, pipeline_id, locked_at, created_at, started_at, finished_at)
            SELECT id, 'noop', queue, tenant, 'SUCCEEDED', priority, now(), jsonb_build_object('n', n), 1,
                   max_attempts, 1, id, now(), now(), now(), now()
            FROM generate_series(1, {jobs}) AS n,
                 CAST({number} || '70008000' || {number} AS uuid) AS id,
                 (VALUES ('default', 'default', 5, 3)) AS usual (queue, tenant, priority, max_attempts)
            """,
            "ALTER TABLE batchwright.job ENABLE TRIGGER legal_births",
            """
            INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker)
            SELECT id, now(), event, kind.status::batchwright.job_status, 1, 1, 'bench'
            FROM batchwright.job, (VALUES
                ('job.enqueued', 'QUEUED'), ('job.started', 'RUNNING'), ('job.succeeded', 'SUCCEEDED')
            ) AS kind (event, status)
            """,
        ]


def executable() -> str:
    """The command of the environment that the benchmark runs in, not whatever PATH says."""
    return str(Path(sys.executable).with_name("batchwright"))


def environment(url: str) -> dict[str, str]:
    return {**os.environ, "BATCHWRIGHT_DATABASE_URL": url}


if __name__ == "__main__":
    base.main(Batchwright())
