"""Procrastinate as a contestant."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers import base, noop


class Procrastinate(base.Peer):
    jobs = 3_000
    jobs_quick = 800
    name = "Procrastinate"
    package = "procrastinate"
    settings = """
        Two processes on uvloop, each one worker with the concurrency shown and a pool of as many
        connections, at most 20. LISTEN/NOTIFY on, event rows by its triggers (always on), finished jobs kept
        (its default), no locks. Bulk enqueue with batch_defer_async in lists of 1,000. It fetches and
        finishes one job per call; there is no batch size to set.
    """
    variants = {
        "concurrency 10": {"concurrency": 10},
        "concurrency 30": {"concurrency": 30},
        "concurrency 50": {"concurrency": 50},
    }

    async def migrate(self, url: str, options: dict[str, Any]) -> None:
        app, _ = application(url, options)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def producer(self, url: str, options: dict[str, Any]) -> AsyncIterator[base.Send]:
        app, task = application(url, options)
        async with app.open_async():

            async def send(payloads: list[base.Payload]) -> None:
                await task.batch_defer_async(*payloads)

            yield send

    def work(self, url: str, options: dict[str, Any]) -> None:
        import uvloop

        uvloop.run(work(url, options))

    def unfinished(self, options: dict[str, Any]) -> str:
        return "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"

    def history(self, jobs: int, options: dict[str, Any]) -> list[str]:
        return [
            "SET session_replication_role = replica",
            f"""
            INSERT INTO procrastinate_jobs (queue_name, task_name, args, status, attempts)
            SELECT '{base.QUEUE}', 'noop', jsonb_build_object('n', n), 'succeeded', 1
            FROM generate_series(1, {jobs}) AS n
            """,
            """
            INSERT INTO procrastinate_events (job_id, type)
            SELECT id, type
            FROM procrastinate_jobs,
                 unnest(ARRAY['deferred', 'started', 'succeeded']::procrastinate_job_event_type[]) AS type
            """,
        ]


async def work(url: str, options: dict[str, Any]) -> None:
    app, _ = application(url, options)
    async with app.open_async():
        await app.run_worker_async(queues=[base.QUEUE], concurrency=options["concurrency"])


def application(url: str, options: dict[str, Any]) -> tuple[Any, Any]:
    import procrastinate

    connections = min(options["concurrency"], 20)
    connector = procrastinate.PsycopgConnector(conninfo=url, min_size=1, max_size=connections)
    app = procrastinate.App(connector=connector)

    @app.task(name="noop", queue=base.QUEUE)
    async def run(**payload: Any) -> None:
        noop.started(payload)

    return app, run


if __name__ == "__main__":
    base.main(Procrastinate())
