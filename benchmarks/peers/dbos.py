"""DBOS Transact as a contestant."""

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers import base, noop

APPLICATION = "bench"
VERSION = "1"


class Dbos(base.Peer):
    jobs = 2_000
    jobs_quick = 400
    name = "DBOS"
    package = "dbos"
    settings = """
        Two executors with executor ids of their own, one queue, an async workflow without steps, pool of 20
        connections, polling interval and worker concurrency as shown (its default is 1 s and no limit).
        Enqueued by DBOSClient.enqueue_in_transaction, 1,000 workflows per commit: it has no bulk enqueue.
        Recovery across executors needs its Conductor service, which is not part of the run.
    """
    variants = {
        "100 at once, poll 0.05 s": {"worker_concurrency": 100, "polling_interval_sec": 0.05},
        "500 at once, poll 0.5 s": {"worker_concurrency": 500, "polling_interval_sec": 0.5},
        "no limit, poll 1 s": {},
    }

    async def migrate(self, url: str, options: dict[str, Any]) -> None:
        from dbos import DBOS, DBOSClient

        DBOS.migrate(url)
        client = DBOSClient(system_database_url=url)
        client.register_queue(base.QUEUE, application_name=APPLICATION, **options)
        client.destroy()

    @asynccontextmanager
    async def producer(self, url: str, options: dict[str, Any]) -> AsyncIterator[base.Send]:
        import sqlalchemy
        from dbos import DBOSClient

        client = DBOSClient(system_database_url=url)
        engine = sqlalchemy.create_engine(sqlalchemy.make_url(url).set(drivername="postgresql+psycopg"), pool_size=1)
        order = {
            "app_version": VERSION,
            "application_name": APPLICATION,
            "queue_name": base.QUEUE,
            "workflow_name": "noop",
        }

        async def send(payloads: list[base.Payload]) -> None:
            with engine.begin() as connection:
                for payload in payloads:
                    client.enqueue_in_transaction(connection, order, payload)

        yield send
        client.destroy()
        engine.dispose()

    def work(self, url: str, options: dict[str, Any]) -> None:
        from dbos import DBOS

        stopped = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        DBOS(
            config={
                "application_version": VERSION,
                "executor_id": f"bench-{os.getpid()}",
                "log_level": "ERROR",
                "name": APPLICATION,
                "system_database_url": url,
                "sys_db_pool_size": 20,
            }
        )

        @DBOS.workflow(name="noop")
        async def run(payload: dict[str, Any]) -> None:
            noop.started(payload)

        DBOS.launch()
        stopped.wait()
        DBOS.destroy()

    def unfinished(self, options: dict[str, Any]) -> str:
        return "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"

    def history(self, jobs: int, options: dict[str, Any]) -> list[str]:
        ids = f"SELECT gen_random_uuid()::text AS id FROM generate_series(1, {jobs})"
        return [
            f"""
            INSERT INTO dbos.workflow_status (
                workflow_uuid, status, name, executor_id, created_at, updated_at, application_version,
                recovery_attempts, queue_name, started_at_epoch_ms, priority, serialization, completed_at,
                application_name, creator_xid)
            SELECT id, 'SUCCESS', 'noop', 'bench-0', now, now, '{VERSION}', 1, '{base.QUEUE}', now, 0,
                   'py_pickle', now, '{APPLICATION}', id
            FROM ({ids}) AS made, CAST(extract(epoch FROM now()) * 1000 AS bigint) AS now
            """,
            *(
                f"INSERT INTO dbos.{table} (workflow_uuid, {column}) "
                f"SELECT workflow_uuid, 'gAR9lC4=' FROM dbos.workflow_status"
                for table, column in (("workflow_input", "inputs"), ("workflow_output", "output"))
            ),
        ]


if __name__ == "__main__":
    base.main(Dbos())
