"""A thousand idle workers behind a pooler in transaction mode, which shares a hundred sessions among them."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from benchmarks.fleet.idle import GATEWAY, count, migrate
from benchmarks.fleet.pooler import pgbouncer, version
from benchmarks.fleet.thousand import MEASURED_SECONDS, SETTLED_SECONDS, crowded, parts_of
from benchmarks.tools import measure as measures
from benchmarks.tools import report
from benchmarks.tools.sections import Ground
from benchmarks.tools.workers import environment_of

NAME = "behind"
TITLE = "A thousand idle workers behind PgBouncer"
SECONDS_MAX = 600.0
WORKERS = 1_000
SESSIONS_MAX = 100
WAIT_MS_MAX = 10.0
SETTINGS = f"""
    Simulated workers as in the section `thousand`, but all statements and leases go through one PgBouncer with
    pool_mode = transaction and default_pool_size = {SESSIONS_MAX}: each worker has two connections to PgBouncer and no
    doorbell. Sessions are what PostgreSQL has then. The wait is the time that a transaction waits for a session: the
    mean of all transactions while PostgreSQL is measured, by PgBouncer's own count.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    workers = ground.pick(WORKERS, 100)
    options = (f"default_pool_size = {SESSIONS_MAX}", f"max_client_conn = {3 * workers + 100}", "stats_users = bench")
    with ground.server.database() as url, pgbouncer(ground.folder, url, *options) as (pooled, pooler):
        await migrate(url)
        environment = environment_of(ground.folder, pooled, GATEWAY, {})
        async with AsyncExitStack() as crowd:
            processes = [
                await crowd.enter_async_context(crowded(ground.folder, environment, part)) for part in parts_of(workers)
            ]
            ground.tell(f"  {workers} workers run behind PgBouncer")
            await asyncio.sleep(SETTLED_SECONDS)
            before, spent = counters(pooled), measures.cpu_seconds(pooler)
            figures = await count(ground, url, MEASURED_SECONDS, processes)
            after, spent = counters(pooled), measures.cpu_seconds(pooler) - spent
    transactions = after["total_xact_count"] - before["total_xact_count"]
    return {
        **{name: figures[name] for name in ("transactions", "core_percent", "connections")},
        "clients": after["clients"],
        "pgbouncer": version(),
        "pooler_core_percent": 100 * spent / MEASURED_SECONDS,
        "wait_ms": (after["total_wait_time"] - before["total_wait_time"]) / 1000 / transactions,
        "workers": workers,
    }


def counters(pooled: str) -> dict[str, int]:
    """What PgBouncer has counted for all databases, in microseconds, and its clients."""
    console = make_conninfo(pooled, dbname="pgbouncer")
    with psycopg.connect(console, autocommit=True, row_factory=dict_row) as connection:
        databases = connection.execute("SHOW STATS").fetchall()
        lists = {row["list"]: row["items"] for row in connection.execute("SHOW LISTS").fetchall()}
    totals = {name: sum(row[name] for row in databases) for name in ("total_xact_count", "total_wait_time")}
    return {**totals, "clients": lists["used_clients"]}


def kept(figures: dict[str, Any]) -> dict[str, float | None]:
    names = ("clients", "connections", "core_percent", "pooler_core_percent", "transactions", "wait_ms", "workers")
    return {f"behind_{name}": figures[name] for name in names}


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    found = figures or {"workers": WORKERS}
    fleet = f"{found['workers']:,} workers behind PgBouncer"
    return [
        report.at_most(f"sessions of PostgreSQL, {fleet}", SESSIONS_MAX, found.get("connections")),
        report.at_most(f"mean wait for a session, {fleet}", WAIT_MS_MAX, found.get("wait_ms"), " ms"),
    ]


def tables(figures: dict[str, Any]) -> str:
    names = {
        "clients": "connections to PgBouncer",
        "connections": "sessions of PostgreSQL",
        "wait_ms": "mean wait for a session, ms",
        "transactions": "transactions/s",
        "core_percent": "PostgreSQL, % of a core",
        "pooler_core_percent": "PgBouncer, % of a core",
    }
    rows = [[label, report.number(figures[name])] for name, label in names.items()]
    return report.table([f"{figures['workers']:,} workers, {figures['pgbouncer']}", ""], rows)
