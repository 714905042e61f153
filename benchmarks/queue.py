# ruff: noqa: A005 - `make bench-NAME` runs the module NAME
"""Batchwright against the other durable queues for PostgreSQL: same server, same machine, same run.

    python -m benchmarks.queue [--quick] [--json] [--rounds N] [--only NAME ...] [--database-url URL]

A contestant with several settings tries each of them in a heat, with a quarter of its jobs; the best go into the
rounds. In each round every contestant runs once, in shuffled order, and Batchwright also with many finished rows and
with vacuum held back; a ratio is the median of the rounds' ratios. If the machine is too slow for all of that, later
rounds leave out the other peers first, and then the strained runs; the notes say what each contestant ran.

Every run has a database of its own and goes: migrate, (finished rows), CHECKPOINT, enqueue, VACUUM ANALYZE,
(pinned snapshot), workers. The clock runs from the first operation to the moment when the database has no
unsettled job. Processor time is PostgreSQL's (postmaster and all children, living and dead) and the worker
processes' own, both since the first operation: imports and connecting are not counted. That every job ran
exactly once is checked in every run.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tools import contest, figures, queue_results, report
from benchmarks.tools.contest import Contestant, Run, RunError
from benchmarks.tools.queue_results import FINISHED_ROWS, FRESH, OURS, PINNED, RIVAL, Results, as_json, as_text
from benchmarks.tools.server import Server, server

MODULES = tuple(f"benchmarks.peers.{name}" for name in ("batchwright", "pgqueuer", "procrastinate", "dbos", "awa"))
PHASES = ("throughput", "strain", "latency")
HEAT_SHARE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The sizes of a run. The rival is strained in one round; the others are too slow for that."""

    finished_rows: int
    has_heats: bool
    latency_jobs: int
    latency_jobs_peers: int
    rival_strained: bool
    rounds: int


LONG = Size(
    finished_rows=1_000_000, has_heats=True, latency_jobs=200, latency_jobs_peers=50, rival_strained=True, rounds=3
)
QUICK = Size(
    finished_rows=50_000, has_heats=False, latency_jobs=15, latency_jobs_peers=15, rival_strained=False, rounds=1
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a round."""

    contestant: Contestant
    variant: str
    condition: str = FRESH

    @property
    def name(self) -> str:
        return f"{self.contestant.name}, {self.variant}, {self.condition}"

    @property
    def rank(self) -> int:
        """The most important entries first; later ones are left out first."""
        if self.contestant.name not in (OURS, RIVAL):
            return 2
        return 0 if self.condition == FRESH else 1


@dataclass(slots=True)
class Budget:
    """The time that is available, and how long each run took when it last ran."""

    deadline: float
    took: dict[str, float] = field(default_factory=dict)

    def afford(self, entries: Iterable[Entry], rounds_left: int) -> list[Entry]:
        """The entries that fit into this round's share of the time; all of them until durations are known."""
        left = (self.deadline - time.monotonic()) / rounds_left
        chosen = []
        for entry in sorted(entries, key=lambda entry: entry.rank):
            left -= self.took.get(entry.name, 0.0)
            if left < 0 and self.took:
                break
            chosen.append(entry)
        return chosen


def main() -> None:
    arguments, load_before = parse(), os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the server is stopped too
    with server(arguments.database_url) as running:
        results = measure(running, arguments)
    if arguments.save:
        load = f"{load_before:.1f} before and {os.getloadavg()[0]:.1f} after"
        document = as_json(results)
        document |= {"is_quick": arguments.quick, "machine": {**document["machine"], "load": load}}
        figures.save("queue", document, queue_results.kept(results))
    if arguments.json:
        print(json.dumps(as_json(results), ensure_ascii=False, indent=2))
    else:
        print(as_text(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.queue", description="Batchwright against its peers.")
    parser.add_argument("--database-url", help="server to use; by default a temporary one")
    parser.add_argument("--finished-rows", type=int, help="rows of history; default 1,000,000, quick 50,000")
    parser.add_argument("--jobs-scale", type=float, default=1.0, help="factor on every number of jobs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="time limit of a step; a slower one fails")
    parser.add_argument("--minutes", type=float, default=13.0, help="later rounds leave out what takes longer")
    parser.add_argument("--only", nargs="+", default=[], help="names of contestants, e.g. batchwright pgqueuer")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--quick", action="store_true", help="about a minute; the figures are rough")
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    parser.add_argument("--save", action="store_true", help="write the figures that docs/capacity.md needs")
    return parser.parse_args()


def measure(running: Server, arguments: argparse.Namespace) -> Results:
    began = time.monotonic()
    size = QUICK if arguments.quick else LONG
    wanted = {name.lower() for name in arguments.only}
    modules = [module for module in MODULES if not wanted or module.rpartition(".")[2] in wanted]
    results = Results(contestants=[contest.describe(module) for module in modules], server=running.describe())
    results.failures += [(each.name, each.unavailable) for each in results.contestants if each.unavailable]
    if size.has_heats and "throughput" in arguments.phases:
        hold_heats(running, arguments, results)
    if "latency" in arguments.phases:
        measure_latency(running, arguments, size, results)
    rounds = arguments.rounds or size.rounds
    budget = Budget(began + arguments.minutes * 60)
    for round_number in range(1, rounds + 1):
        entries = list_entries(arguments, size, results, round_number)
        for entry in shuffled(budget.afford(entries, rounds - round_number + 1)):
            asked = time.monotonic()
            run = run_once(running, arguments, results, entry, round_number=round_number)
            budget.took[entry.name] = time.monotonic() - asked
            if run is not None:
                results.add(run, entry.condition)
    results.seconds = time.monotonic() - began
    return results


def hold_heats(running: Server, arguments: argparse.Namespace, results: Results) -> None:
    """Every setting of the contestants that have several, with fewer jobs."""
    entries = [
        Entry(contestant, variant)
        for contestant in results.available()
        for variant in contestant.variants
        if len(contestant.variants) > 1
    ]
    for entry in shuffled(entries):
        run = run_once(running, arguments, results, entry, heat=True)
        if run is not None:
            results.heats.append(run)


def list_entries(arguments: argparse.Namespace, size: Size, results: Results, round_number: int) -> list[Entry]:
    """All contestants with their best settings, and the strained runs."""
    entries = []
    for contestant in results.available():
        variants = results.finalists(contestant)
        strained = "strain" in arguments.phases and is_strained(contestant, size, round_number)
        if strained or "throughput" in arguments.phases:
            entries += [Entry(contestant, variant) for variant in variants]
        if strained:
            entries += [Entry(contestant, variants[0], condition) for condition in (FINISHED_ROWS, PINNED)]
    return entries


def is_strained(contestant: Contestant, size: Size, round_number: int) -> bool:
    if contestant.name == RIVAL:
        return size.rival_strained and round_number == 1
    return contestant.name == OURS


def run_once(
    running: Server,
    arguments: argparse.Namespace,
    results: Results,
    entry: Entry,
    *,
    heat: bool = False,
    round_number: int = 0,
) -> Run | None:
    """A contestant that fails is a line in the report, not the end of the benchmark."""
    size = QUICK if arguments.quick else LONG
    conditions: dict[str, dict[str, Any]] = {
        FRESH: {},
        FINISHED_ROWS: {"finished_rows": arguments.finished_rows or size.finished_rows},
        PINNED: {"pinned": True},
    }
    tell(f"{'heat' if heat else f'round {round_number}'}: {entry.name}")
    with noting_failure(results, entry.name):
        run = contest.throughput(
            running,
            entry.contestant,
            entry.variant,
            jobs_of(entry.contestant, arguments) // (HEAT_SHARE if heat else 1),
            limit_seconds=arguments.limit_seconds,
            round_number=round_number,
            **conditions[entry.condition],
        )
        tell(f"    {run.rate:,.0f} jobs/s, {report.number(run.cpu_us)} µs per job")
        return run
    return None


def measure_latency(running: Server, arguments: argparse.Namespace, size: Size, results: Results) -> None:
    for contestant in shuffled(results.available()):
        variant = results.best_variant(contestant)
        tell(f"start latency: {contestant.name}, {variant}")
        with noting_failure(results, f"{contestant.name}, start latency"):
            jobs = size.latency_jobs if contestant.name == OURS else size.latency_jobs_peers
            results.latencies[contestant.name] = contest.start_latencies(
                running, contestant, variant, jobs, limit_seconds=arguments.limit_seconds
            )


def jobs_of(contestant: Contestant, arguments: argparse.Namespace) -> int:
    jobs = contestant.jobs_quick if arguments.quick else contestant.jobs
    return max(1, int(jobs * arguments.jobs_scale))


def shuffled(items: Iterable[Any]) -> list[Any]:
    listed = list(items)
    return random.sample(listed, k=len(listed))


@contextmanager
def noting_failure(results: Results, what: str) -> Iterator[None]:
    try:
        yield
    except RunError as error:
        tell(f"    {error}")
        results.failures.append((what, str(error)))


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
