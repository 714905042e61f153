"""Chaos: 4 workers under SIGKILL and SIGSTOP on a PostgreSQL that is cut off, and then every promise is counted.

python -m tests.chaos.queue [--seconds 300] [--seed N] [--json] [--keep]

feed ─▶ ┌────────┐   kill · stop · terminate · restart
        │ workers│ ◀── monkey
        └────────┘
drain ──▶ read the history ──▶ judge ──▶ goals
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from batchwright.app import AsyncBatchwright
from batchwright.errors import DatabaseUnavailable
from tests.chaos.history import History, read_history
from tests.chaos.monkey import Fleet, Monkey
from tests.chaos.operations import EFFECTS, OPERATIONS
from tests.chaos.recovery import KINDS, Recoveries, percentile, recoveries
from tests.chaos.verdict import Breach, judge
from tests.chaos.worker import settings
from tests.chaos.workload import Ledger, Size, Workload

LEASE_SECONDS = 3.0
RECOVERY_SECONDS_MAX = LEASE_SECONDS + 2.0
WORKERS = 4
LONG = Size(bulk_children=10_000, bulk_times=2, jobs_per_second=30.0, poisons=3)
SHORT = Size(bulk_children=1_000, bulk_times=1, jobs_per_second=25.0, poisons=1)
_BREACHES_SHOWN = 10
_SAMPLE_SECONDS = 0.2


@dataclass(slots=True)
class Goal:
    """One line of the result, as every benchmark of Batchwright prints it."""

    name: str
    goal: float
    value: float | None

    @property
    def met(self) -> bool:
        return self.value is not None and self.value <= self.goal


@dataclass(slots=True)
class Run:
    """A run and its results."""

    seed: int
    seconds: float
    counts: dict[str, int | float] = field(default_factory=dict)
    breaches: dict[str, list[Breach]] = field(default_factory=dict)
    recoveries: Recoveries = field(default_factory=Recoveries)

    @property
    def goals(self) -> list[Goal]:
        counted = [Goal(name, 0, len(found)) for name, found in self.breaches.items()]
        p99 = percentile(self.recoveries.started["plain"], 0.99)
        return [*counted, Goal("recovery p99 after SIGKILL, seconds", RECOVERY_SECONDS_MAX, p99)]


async def run(
    *,
    seconds: float,
    seed: int,
    size: Size,
    drain_seconds: float,
    keep: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Run:
    """The whole run on its own PostgreSQL, which is removed afterwards."""
    folder = Path(tempfile.gettempdir()) / f"batchwright-chaos-{os.getpid()}"
    logs = Path(tempfile.mkdtemp(prefix="batchwright-chaos-logs-"))
    result = Run(seed, seconds)
    try:
        async with _batchwright(folder) as batchwright:
            await _play(batchwright, result, folder=folder, logs=logs, size=size, drain_seconds=drain_seconds, say=say)
    finally:
        if keep:
            say(f"kept: {folder} and {logs}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(logs, ignore_errors=True)
    return result


@contextlib.asynccontextmanager
async def _batchwright(folder: Path) -> AsyncIterator[AsyncBatchwright]:
    async with AsyncBatchwright(settings=settings(str(folder), LEASE_SECONDS), operations=OPERATIONS) as batchwright:
        for statement in EFFECTS.split(";"):
            await batchwright.pool.rows(statement)
        yield batchwright


async def _play(
    batchwright: AsyncBatchwright,
    result: Run,
    *,
    folder: Path,
    logs: Path,
    size: Size,
    drain_seconds: float,
    say: Callable[[str], None],
) -> None:
    assert batchwright.embedded is not None
    fleet = Fleet(folder, logs, lease_seconds=LEASE_SECONDS, size=WORKERS)
    monkey = Monkey(fleet, batchwright.embedded, lease_seconds=LEASE_SECONDS, seed=result.seed, say=say)
    workload = Workload(batchwright, size, result.seed)
    sampler = Sampler(batchwright)
    sampling = asyncio.create_task(sampler.watch())
    began = time.monotonic()
    try:
        fleet.start()
        await asyncio.gather(workload.feed(result.seconds), monkey.play(result.seconds))
        say("the monkey sleeps; the workers clear up")
        drained = await _drain(batchwright, drain_seconds)
        took = time.monotonic() - began
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await fleet.close()
    history = await asyncio.to_thread(read_history, batchwright.pool.url)
    _judge(result, history, workload.ledger, fleet, sampler)
    _measure(result, history, fleet, monkey, sampler)
    result.counts |= _counts(history, workload.ledger, fleet, monkey, took)
    result.counts["drain seconds"] = round(drained, 1)


async def _drain(batchwright: AsyncBatchwright, seconds: float) -> float:
    """Wait until every job has ended and every lock is free, up to this limit; returns how long it took."""
    began = time.monotonic()
    sql = "SELECT count(*) FROM batchwright.job WHERE finished_at IS NULL OR locked_by IS NOT NULL"
    while time.monotonic() - began < seconds:
        with contextlib.suppress(DatabaseUnavailable):
            ((open,),) = await batchwright.pool.rows(sql)
            if open == 0:
                break
        await asyncio.sleep(0.25)
    return time.monotonic() - began


_DOUBLES = """
SELECT exclusive_key, count(*) FROM batchwright.job
WHERE status = 'RUNNING' AND exclusive_key IS NOT NULL AND finished_at IS NULL
GROUP BY tenant, exclusive_key HAVING count(*) > 1
"""
_STALLS = """
SELECT extract(epoch FROM state_change)::float8, extract(epoch FROM clock_timestamp())::float8 FROM pg_stat_activity
WHERE application_name = 'batchwright' AND state LIKE 'idle in transaction%'
    AND clock_timestamp() - state_change > '0.5 s'
"""


class Sampler:
    """Checks the table during the run: never two RUNNING jobs of one key; and which transactions stay open."""

    def __init__(self, batchwright: AsyncBatchwright) -> None:
        self.breaches: list[Breach] = []
        self.stalls: list[tuple[float, float]] = []
        self._batchwright = batchwright

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                rows = await self._batchwright.pool.rows(_DOUBLES)
                self.breaches += [(key, f"{count} jobs RUNNING at once") for key, count in rows]
                self.stalls += await self._batchwright.pool.rows(_STALLS)
            await asyncio.sleep(_SAMPLE_SECONDS)


def _judge(result: Run, history: History, ledger: Ledger, fleet: Fleet, sampler: Sampler) -> None:
    result.breaches = judge(history, ledger)
    result.breaches["two jobs of one key at a time"] += sampler.breaches
    result.breaches["workers that ended by themselves"] = [
        (victim.id or "a worker that never spoke", f"exit code {victim.process.returncode}")
        for victim in fleet.deserters()
    ]


def _measure(result: Run, history: History, fleet: Fleet, monkey: Monkey, sampler: Sampler) -> None:
    killed = {
        victim.id: victim.killed_at or victim.ended_at or 0.0
        for victim in fleet.everybody
        if victim.id is not None and not victim.is_dismissed
    }
    result.recoveries = recoveries(
        history, killed, outages=monkey.outages, stalls=sampler.stalls, lease_seconds=LEASE_SECONDS
    )
    stalled = {since: until - since for since, until in sorted(sampler.stalls)}
    result.counts["stops in the middle of a transaction"] = len(stalled)
    result.counts["longest of these, seconds"] = round(max(stalled.values(), default=0.0), 1)


def _counts(history: History, ledger: Ledger, fleet: Fleet, monkey: Monkey, seconds: float) -> dict[str, int | float]:
    statuses = Counter(job.status for job in history.jobs.values())
    events = Counter(event.event for event in history.events)
    counted = fleet.counted()
    suicides = sum(victim.process.returncode == -9 and victim.killed_at is None for victim in fleet.everybody)
    return {
        "SIGKILL": monkey.done["kill"],
        "SIGSTOP longer than a lease": monkey.done["stop"],
        "connections terminated": monkey.done["terminate"],
        "PostgreSQL restarted": monkey.done["restart"],
        "of these by the workers": monkey.revived_by_workers,
        "workers killed by a poison job": suicides,
        "jobs": len(history.jobs),
        **{f"jobs {status}": statuses[status] for status in ("SUCCEEDED", "FAILED", "CANCELLED")},
        "jobs/s": round(len(history.jobs) / seconds, 1),
        "claims": events["job.started"],
        "rescues": events["job.rescued"],
        "released": events["job.released"],
        "fenced writes": counted["fenced"],
        "leases lost": counted["leases_lost"],
        "calls repeated by the harness": ledger.repeated,
        "enqueues refused, key is held": ledger.asked["refused: key is held"],
        "effects": history.effects.total(),
    }


# Output -----------------------------------------------------------------------------------------------------------


def as_json(result: Run) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "seconds": result.seconds,
        "counts": result.counts,
        "recovery": {name: dict(zip(("n", "p50", "p99", "max"), row, strict=True)) for name, *row in _times(result)},
        "breaches": breaches_as_json(result.breaches),
        "goals": goals_as_json(result.goals),
    }


def as_text(result: Run) -> str:
    lines = [f"chaos of the queue: {result.seconds:g} s, {WORKERS} workers, lease {LEASE_SECONDS:g} s"]
    lines += [f"seed {result.seed}", ""]
    lines += [f"  {name:<36}{value:>10,}" for name, value in result.counts.items()]
    lines += ["", f"  {'seconds after SIGKILL until jobs are':<52}{'n':>6}{'p50':>7}{'p99':>7}{'max':>7}"]
    for name, n, *times in _times(result):
        lines.append(f"  {name:<52}{n:>6}" + "".join(f"{time:>7.2f}" if n else f"{'-':>7}" for time in times))
    return "\n".join([*lines, "", *goals_as_text(result.goals), *breaches_as_text(result.breaches)])


def goals_as_json(goals: Sequence[Goal]) -> list[dict[str, Any]]:
    return [{"name": goal.name, "goal": goal.goal, "value": goal.value, "met": goal.met} for goal in goals]


def breaches_as_json(breaches: Mapping[str, Sequence[Breach]]) -> dict[str, list[str]]:
    return {
        name: [f"{who}: {what}" for who, what in found[:_BREACHES_SHOWN]] for name, found in breaches.items() if found
    }


def goals_as_text(goals: Sequence[Goal]) -> Iterator[str]:
    yield f"  {'goal':<58}{'wanted':>8}{'found':>9}"
    for goal in goals:
        value = "-" if goal.value is None else f"{goal.value:,.4g}"
        yield f"  {goal.name:<58}{f'≤ {goal.goal:g}':>8}{value:>9}  {'✓' if goal.met else '✗ MISSED'}"


def breaches_as_text(breaches: Mapping[str, Sequence[Breach]]) -> Iterator[str]:
    for name, found in breaches.items():
        if found:
            yield f"\n  {name}: {len(found)}"
            yield from (f"    {who}: {what}" for who, what in found[:_BREACHES_SHOWN])


def _times(result: Run) -> list[tuple[str, int, float | None, float | None, float | None]]:
    found = result.recoveries
    rows = [("rescued", found.rescued), *((text, found.started[kind]) for kind, text in KINDS.items())]
    return [
        (
            name,
            len(times),
            _rounded(percentile(times, 0.5)),
            _rounded(percentile(times, 0.99)),
            _rounded(percentile(times, 1.0)),
        )
        for name, times in rows
    ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.queue", description="Chaos for the job queue.")
    parser.add_argument("--drain-seconds", type=float, default=120.0, help="how long clearing up may take")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="leave the database and the workers' logs behind")
    parser.add_argument("--quiet", action="store_true", help="do not tell what the monkey does")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the monkey plays")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--short", action="store_true", help="fewer jobs, as in `make test`")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(words: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {words}\n")

    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # it is expected that the database is unavailable
    say(f"seed {arguments.seed}")
    result = asyncio.run(
        run(
            seconds=arguments.seconds,
            seed=arguments.seed,
            size=SHORT if arguments.short else LONG,
            drain_seconds=arguments.drain_seconds,
            keep=arguments.keep,
            say=say,
        )
    )
    sys.stdout.write((orjson.dumps(as_json(result)).decode() if arguments.json else as_text(result)) + "\n")
    return 0 if all(goal.met for goal in result.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
