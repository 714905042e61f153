"""Fleets of 100, 300 and 1,000 idle workers in a few processes, compared with the prediction from fewer workers."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fleet.idle import GATEWAY, count, migrate
from benchmarks.tools import figures as saved
from benchmarks.tools import report
from benchmarks.tools.sections import Ground
from benchmarks.tools.workers import environment_of

NAME = "thousand"
TITLE = "A thousand idle workers"
SECONDS_MAX = 1_200.0
FLEETS = (100, 300, 1_000)
PROCESS_WORKERS_MAX = 350
START_SECONDS_MAX = 300.0
STOP_SECONDS_MAX = 20.0
OFF_MAX = 1.3
SETTLED_SECONDS = 20
MEASURED_SECONDS = 30
COMPARED = ("transactions", "core_percent")
SETTINGS = f"""
    Each simulated worker has a row and three connections of its own, and runs upkeep, heartbeat, counts and doorbell
    of a real one, at its pace; up to {PROCESS_WORKERS_MAX} of them share a process. Workers are added until there are
    100, 300 and 1,000; each time, after {SETTLED_SECONDS} s, PostgreSQL is measured for {MEASURED_SECONDS} s as in
    `make bench-idle`. What was to be expected follows from the figures that `make bench-idle ARGS=--save` has written
    down: what all workers cost together, and what each further one adds. Save those first, on the same machine.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    sizes = FLEETS[: ground.pick(len(FLEETS), 2)]
    fleets: dict[int, dict[str, float]] = {}
    with ground.server.database() as url:
        await migrate(url)
        environment = environment_of(ground.folder, url, GATEWAY, {})
        async with AsyncExitStack() as crowd:
            processes: list[psutil.Process] = []
            for before, size in pairwise((0, *sizes)):
                for part in parts_of(size - before):
                    processes.append(await crowd.enter_async_context(crowded(ground.folder, environment, part)))
                ground.tell(f"  {size} workers run")
                await asyncio.sleep(SETTLED_SECONDS)
                fleets[size] = await count(ground, url, MEASURED_SECONDS, processes)
    return {"fleets": fleets, "expected": {size: expect(saved.load("idle"), size) for size in fleets}}


def parts_of(workers: int) -> list[int]:
    """How many workers each further process has."""
    processes = -(-workers // PROCESS_WORKERS_MAX)
    return [workers // processes + (index < workers % processes) for index in range(processes)]


@asynccontextmanager
async def crowded(folder: Path, environment: dict[str, str], workers: int) -> AsyncIterator[psutil.Process]:
    with (folder / "worker.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.fleet.crowd", str(workers)),
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        assert process.stdin
        assert process.stdout
        try:
            async with asyncio.timeout(START_SECONDS_MAX):
                if not await process.stdout.readline():
                    raise RuntimeError(f"{workers} workers did not start: {(folder / 'worker.log').read_text()[-600:]}")
            yield psutil.Process(process.pid)
        finally:
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS_MAX)
            except TimeoutError:
                process.kill()
                await process.wait()


def expect(idle: dict[str, float], workers: int) -> dict[str, float | None]:
    """The predicted cost of this number of workers, from the figures of fewer."""
    return {
        name: idle[f"common_{name}"] + workers * idle[name] if name in idle and f"common_{name}" in idle else None
        for name in COMPARED
    }


def ratio(figures: dict[str, Any], name: str) -> float | None:
    """For the largest fleet, the ratio of measured and expected cost, inverted if it is below 1."""
    most = max(figures["fleets"])
    measured, expected = figures["fleets"][most][name], figures["expected"][most][name]
    return max(measured / expected, expected / measured) if measured and expected else None


def kept(figures: dict[str, Any]) -> dict[str, float | None]:
    fleets = figures["fleets"].items()
    found = {f"{name}_{size}": one[name] for size, one in fleets for name in (*COMPARED, "connections")}
    expected = {f"expected_{name}_{size}": one[name] for size, one in figures["expected"].items() for name in COMPARED}
    most = max(figures["fleets"])
    largest = figures["fleets"][most]
    return {
        **found,
        **expected,
        "workers": most,
        "connection_bytes": largest["connection_bytes"] / largest["connections"],
    }


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    names = {"transactions": "transactions/s", "core_percent": "PostgreSQL's core"}
    most = max(figures["fleets"]) if figures else FLEETS[-1]
    return [
        report.at_most(
            f"{said} of {most:,} workers, measured to expected or the reverse",
            OFF_MAX,
            ratio(figures, name) if figures else None,
            " x",
        )
        for name, said in names.items()
    ]


def tables(figures: dict[str, Any]) -> str:
    rows = []
    for size, one in figures["fleets"].items():
        expected = figures["expected"][size]
        cells = [(one[name], expected[name], one[name] / size) for name in COMPARED]
        rows.append([f"{size} workers", *(report.number(value) for three in cells for value in three)])
        rows[-1] += [report.number(one["connections"]), report.number(one["connection_bytes"] / 1e6)]
    headings = ["", "transactions/s", "expected", "each", "% of a core", "expected", "each", "connections", "their MB"]
    return report.table(headings, rows)
