"""Fleets of 10, 30 and 100 idle workers: transactions, processor time and connections of PostgreSQL."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg

from batchwright import AsyncBatchwright
from benchmarks.tools import report
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
"""A server that nobody asks anything; workers that have one are ready for batches."""
SETTLED_SECONDS = 90
MEASURED_SECONDS = 60
SETTINGS = f"""
    `batchwright worker` processes as they come, on a database without jobs. Workers are added until there are 10, 30
    and 100; each time, after {SETTLED_SECONDS} s, PostgreSQL's own counters of transactions, its processor time (of all
    its processes) and its connections are read, and again after {MEASURED_SECONDS} s. "Each further worker" is the
    difference between the smallest and the largest fleet, divided by the workers between them. Rounds are updates of
    the rows that say when upkeep is due.
"""
COUNTERS = """
    SELECT (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()),
           (SELECT n_tup_upd FROM pg_stat_user_tables WHERE schemaname = 'batchwright' AND relname = 'upkeep'),
           (SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid())
"""


async def measure(ground: Ground) -> dict[str, Any]:
    sizes = FLEETS[: ground.pick(len(FLEETS), 2)]
    settled, measured = ground.pick(SETTLED_SECONDS, 20), ground.pick(MEASURED_SECONDS, 30)
    fleets: dict[int, dict[str, float]] = {}
    with ground.server.database() as url:
        await migrate(url)
        async with AsyncExitStack() as workers:
            for before, size in pairwise((0, *sizes)):
                await start(workers, ground.folder, url, size - before)
                ground.tell(f"  {size} workers run")
                await asyncio.sleep(settled)
                fleets[size] = await count(ground, url, measured)
    return {"fleets": fleets, "each": each_further(fleets)}


async def migrate(url: str) -> None:
    client = AsyncBatchwright(database_url=url)
    await client.open(migrated=False)
    try:
        await client.migrate()
    finally:
        await client.close()


async def start(workers: AsyncExitStack, folder: Path, url: str, count: int) -> None:
    environment = environment_of(folder, url, GATEWAY, {})
    turns = asyncio.Semaphore(STARTING_MAX)

    async def one() -> None:
        async with turns:
            await workers.enter_async_context(running_worker(folder, environment))

    await asyncio.gather(*(one() for _ in range(count)))


async def count(ground: Ground, url: str, seconds: float) -> dict[str, float]:
    began, cpu = read(url), ground.server.cpu_seconds()
    await asyncio.sleep(seconds)
    ended, cpu_after = read(url), ground.server.cpu_seconds()
    transactions, rounds, _ = ((after - before) / seconds for before, after in zip(began, ended, strict=True))
    percent = None if cpu is None or cpu_after is None else 100 * (cpu_after - cpu) / seconds
    return {"transactions": transactions, "rounds": rounds, "connections": ended[2], "core_percent": percent or 0.0}


def read(url: str) -> tuple[int, int, int]:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(COUNTERS).fetchone()
        assert row is not None
        return row[0], row[1] or 0, row[2]


def each_further(fleets: dict[int, dict[str, float]]) -> dict[str, float]:
    few, many = min(fleets), max(fleets)
    return {name: (fleets[many][name] - fleets[few][name]) / (many - few) for name in fleets[few]}


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
    columns = ("transactions", "rounds", "connections", "core_percent")
    rows = [[f"{size} workers", *(f"{one[name]:.2f}" for name in columns)] for size, one in figures["fleets"].items()]
    each = figures["each"]
    rows.append(["each further worker", *(f"{each[name]:.3f}" for name in columns)])
    return report.table(["", "transactions/s", "rounds/s", "connections", "PostgreSQL, % of a core"], rows)
