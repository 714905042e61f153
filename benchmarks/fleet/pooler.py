"""The same jobs directly and through PgBouncer in transaction mode, in turns."""

import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from batchwright import AsyncBatchwright, NewJob, operation
from batchwright.db.database import DatabaseSettings, session_settings
from batchwright.settings import load_settings
from benchmarks.tools import measure as measures
from benchmarks.tools import report
from benchmarks.tools.sections import Ground

NAME = "pooler"
TITLE = "A pooler in transaction mode"
SECONDS_MAX = 900.0
CONCURRENCIES = (20, 500)
WAYS = ("direct", "pooler")
LISTEN_SECONDS_MAX = 10.0
SETTINGS = """
    One worker in this process takes noop jobs from a filled queue, with 20 slots (few jobs for each statement) and
    with 500 (many), by turns directly and through PgBouncer with pool_mode = transaction, whose pool sets our planner
    settings and timeouts by connect_query. The median of the runs. PostgreSQL: processor time of all its processes.
"""


@operation("noop")
async def noop(n: int) -> None:
    pass


async def measure(ground: Ground) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {}
    prepares = {}
    for _ in range(ground.pick(3, 2)):
        for concurrency in CONCURRENCIES:
            for way in WAYS:
                jobs = ground.pick(20_000, 4_000)
                name = f"{way}, {concurrency} slots"
                figures, prepares[way] = await run(ground, way, concurrency, jobs)
                runs.setdefault(name, []).append(figures)
                ground.tell(f"  {name}: {figures}")
    medians = {
        name: {key: statistics.median(one[key] for one in each) for key in each[0]} for name, each in runs.items()
    }
    return {"runs": medians, "prepares": prepares, "pgbouncer": version()}


async def run(ground: Ground, way: str, concurrency: int, jobs: int) -> tuple[dict[str, float], bool]:
    with ground.server.database() as url, pgbouncer(ground.folder, url) as (pooled, pooler):
        await migrate(url)
        async with client(pooled if way == "pooler" else url, concurrency) as batchwright:
            worker = batchwright.worker()
            await worker.register()
            for start in range(0, jobs, 1_000):
                await batchwright.enqueue([NewJob(noop, {"n": n}) for n in range(start, start + 1_000)])
            server, bouncer = ground.server.cpu_seconds() or 0.0, measures.cpu_seconds(pooler)
            began = time.monotonic()
            running = asyncio.create_task(worker.run())
            while (await batchwright.pool.rows("SELECT FROM batchwright.job WHERE finished_at IS NULL LIMIT 1")) != []:
                await asyncio.sleep(0.1)
            took = time.monotonic() - began
            spent = (ground.server.cpu_seconds() or 0.0) - server
            relayed = measures.cpu_seconds(pooler) - bouncer
            worker.stop()
            await running
            figures = {"postgres_us": spent * 1e6 / jobs, "pgbouncer_us": relayed * 1e6 / jobs, "jobs_s": jobs / took}
            return figures, batchwright.pool.route.prepares


def client(url: str, concurrency: int) -> AsyncBatchwright:
    flags = {"database": {"url": url}, "worker": {"concurrency": concurrency}}
    return AsyncBatchwright(operations=[noop], settings=load_settings(flags, environment={}))


async def migrate(url: str) -> None:
    batchwright = await AsyncBatchwright(database_url=url).open(migrated=False)
    await batchwright.migrate()
    await batchwright.close()


@contextmanager
def pgbouncer(folder: Path, url: str, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start PgBouncer in front of that database; its pool applies our settings, as docs/operating.md advises."""
    parts = conninfo_to_dict(url)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    query = "; ".join(f"SET {name} = ''{value}''" for name, value in session_settings(DatabaseSettings()).items())
    target = " ".join(f"{name}={parts[name]}" for name in ("host", "port", "user", "password") if parts.get(name))
    lines = "\n".join(options)
    text = f"""
[databases]
* = {target} connect_query='{query}'
[pgbouncer]
auth_type = any
ignore_startup_parameters = options
listen_addr = 127.0.0.1
listen_port = {port}
pool_mode = transaction
unix_socket_dir =
{lines}
"""
    folder.chmod(0o755)
    (file := folder / "pgbouncer.ini").write_text(text)
    host = Path(str(parts.get("host") or "localhost"))
    user = ["-u", host.owner() if host.is_absolute() else "nobody"] if os.geteuid() == 0 else []
    process = subprocess.Popen([program(), "-q", *user, str(file)], stderr=subprocess.DEVNULL)
    try:
        wait_listening(port)
        pooled = make_conninfo(host="127.0.0.1", port=port, user="bench", dbname=str(parts["dbname"]))
        yield pooled, psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def wait_listening(port: int) -> None:
    deadline = time.monotonic() + LISTEN_SECONDS_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def program() -> str:
    found = os.environ.get("BENCH_PGBOUNCER") or shutil.which(
        "pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin"
    )
    if found is None:
        raise RuntimeError("pgbouncer is not installed")
    return found


def version() -> str:
    said = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True).stdout
    return said.splitlines()[0]


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    return []


def tables(figures: dict[str, Any]) -> str:
    headings = ["way", "PostgreSQL µs/job", "PgBouncer µs/job", "jobs/s"]
    rows = [
        [name, f"{run['postgres_us']:.0f}", f"{run['pgbouncer_us']:.0f}", f"{run['jobs_s']:.0f}"]
        for name, run in figures["runs"].items()
    ]
    kept = "statements stay prepared" if figures["prepares"]["pooler"] else "statements are not prepared"
    return f"{report.table(headings, rows)}\n{figures['pgbouncer']}: {kept} through it"
