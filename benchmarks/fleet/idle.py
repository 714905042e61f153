"""Fleets of 10, 30 and 100 idle workers: what they cost PostgreSQL, and the machines that they run on."""

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import psycopg

from batchwright import AsyncBatchwright
from benchmarks.tools import report
from benchmarks.tools.measure import cpu_seconds
from benchmarks.tools.sections import Ground
from benchmarks.tools.workers import environment_of, running_worker

NAME = "idle"
TITLE = "Idle workers"
SECONDS_MAX = 1_500.0
FLEETS = (10, 30, 100)
STARTING_MAX = 4
TRANSACTIONS_MAX = 1.0
CORE_PERCENT_MAX = 0.05
CONNECTIONS_MAX = 3.0
ROUNDS_GROWTH_MAX = 1.25
GATEWAY = "http://127.0.0.1:9"
"""A server that gets no requests; workers with a gateway are ready for batches."""
SETTLED_SECONDS = 90
MEASURED_SECONDS = 60
SETTINGS = f"""
    `batchwright worker` processes with default settings, on a database without jobs. Workers are added: 10, 30
    and 100; each time, after {SETTLED_SECONDS} s, PostgreSQL's own counters of transactions, its processor time (of all
    its processes) and its connections are read, and again after {MEASURED_SECONDS} s. "Each further worker" is the
    difference between the smallest and the largest fleet, divided by the workers between them. Rounds are updates of
    the rows that say when upkeep is due. Memory is resident memory of a worker, and of a connection's process what it
    shares with no other.
"""
COUNTERS = """
    SELECT (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()),
           (SELECT coalesce(sum(n_tup_upd), 0)::bigint FROM pg_stat_user_tables
            WHERE schemaname = 'batchwright' AND relname = 'upkeep'),
           (SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()),
           pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint
"""


async def measure(ground: Ground) -> dict[str, Any]:
    sizes = FLEETS[: ground.pick(len(FLEETS), 2)]
    settled, measured = ground.pick(SETTLED_SECONDS, 20), ground.pick(MEASURED_SECONDS, 30)
    fleets: dict[int, dict[str, float]] = {}
    with ground.server.database() as url:
        await migrate(url)
        async with AsyncExitStack() as workers:
            processes: list[psutil.Process] = []
            for before, size in pairwise((0, *sizes)):
                processes += await start(workers, ground.folder, url, size - before)
                ground.tell(f"  {size} workers run")
                await asyncio.sleep(settled)
                fleets[size] = await count(ground, url, measured, processes)
    return {"fleets": fleets, "each": each_further(fleets)}


async def migrate(url: str) -> None:
    client = AsyncBatchwright(database_url=url)
    await client.open(migrated=False)
    try:
        await client.migrate()
    finally:
        await client.close()


async def start(workers: AsyncExitStack, folder: Path, url: str, count: int) -> list[psutil.Process]:
    environment = environment_of(folder, url, GATEWAY, {})
    turns = asyncio.Semaphore(STARTING_MAX)

    async def one() -> psutil.Process:
        async with turns:
            return await workers.enter_async_context(running_worker(folder, environment))

    return await asyncio.gather(*(one() for _ in range(count)))


async def count(ground: Ground, url: str, seconds: float, processes: list[psutil.Process]) -> dict[str, float]:
    """Figures of all workers together: per second, or the value at the end."""

    def spent() -> dict[str, float]:
        cores = {
            "core_percent": ground.server.cpu_seconds() or 0.0,
            "worker_core_percent": sum(map(cpu_seconds, processes)),
        }
        return {"at": time.monotonic(), **{name: 100 * cpu for name, cpu in cores.items()}, **read(url)}

    began = spent()
    await asyncio.sleep(seconds)
    ended = spent()
    connections = ended.pop("connections")
    lasted = ended["at"] - began["at"]
    return {
        **{name: (ended[name] - began[name]) / lasted for name in ended if name != "at"},
        "connections": connections,
        "worker_bytes": sum(process.memory_info().rss for process in processes),
        "connection_bytes": ground.server.private_bytes(),
    }


def read(url: str) -> dict[str, float]:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(COUNTERS).fetchone()
        assert row is not None
        return dict(zip(("transactions", "rounds", "connections", "wal_bytes"), row, strict=True))


def each_further(fleets: dict[int, dict[str, float]]) -> dict[str, float]:
    few, many = min(fleets), max(fleets)
    return {name: (fleets[many][name] - fleets[few][name]) / (many - few) for name in fleets[few]}


def kept(figures: dict[str, Any]) -> dict[str, float | None]:
    """The cost of each further worker; names of costs that do not depend on their number begin with `common_`."""
    fleets, each = figures["fleets"], figures["each"]
    few, many = min(fleets), max(fleets)
    common = {
        f"common_{name}": max(0.0, fleets[few][name] - few * each[name])
        for name in ("transactions", "core_percent", "wal_bytes")
    }
    names = ("transactions", "core_percent", "connections", "wal_bytes", "worker_bytes", "worker_core_percent")
    connection_bytes = fleets[many]["connection_bytes"] / fleets[many]["connections"]
    of_each = {name: max(0.0, each[name]) for name in names}  # a cost below 0 is noise
    return {**of_each, **common, "connection_bytes": connection_bytes, "workers": many}


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    each = figures["each"] if figures else {}
    growth = None
    if figures:
        few, many = (figures["fleets"][pick(figures["fleets"])]["rounds"] for pick in (min, max))
        growth = many / few if few else None
    return [
        report.at_most("transactions of each further worker", TRANSACTIONS_MAX, each.get("transactions"), "/s"),
        report.at_most("PostgreSQL's core for each further worker", CORE_PERCENT_MAX, each.get("core_percent"), " %"),
        report.at_most("connections of each further worker", CONNECTIONS_MAX, each.get("connections")),
        report.at_most("rounds of upkeep, largest fleet to smallest", ROUNDS_GROWTH_MAX, growth, " x"),
    ]


def tables(figures: dict[str, Any]) -> str:
    columns = ("transactions", "rounds", "connections", "core_percent", "worker_core_percent", "wal_bytes")
    rows = [[f"{size} workers", *(f"{one[name]:.2f}" for name in columns)] for size, one in figures["fleets"].items()]
    each = figures["each"]
    rows.append(["each further worker", *(f"{each[name]:.3f}" for name in columns)])
    headings = ["", "transactions/s", "rounds/s", "connections", "PostgreSQL, % of a core", "workers, %", "WAL B/s"]
    memory = max(one["connection_bytes"] for one in figures["fleets"].values())
    said = f"Each further worker has {each['worker_bytes'] / 1e6:.0f} MB. The connections of the largest fleet have"
    return f"{report.table(headings, rows)}\n\n{said} {memory / 1e6:.0f} MB of their own."
