# ruff: noqa: A005 - `make bench-NAME` runs the module NAME
"""Batchwright against the other durable queues for PostgreSQL: same server, same machine, same run.

    python -m benchmarks.queue [--quick] [--json] [--rounds N] [--only NAME ...] [--database-url URL]

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
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.tools import contest, figures, queue_results, report
from benchmarks.tools.contest import Contestant, RunError
from benchmarks.tools.queue_results import FINISHED_ROWS, FRESH, OURS, PINNED, Results, as_json, as_text
from benchmarks.tools.server import Server, server

MODULES = tuple(f"benchmarks.peers.{name}" for name in ("batchwright", "pgqueuer", "procrastinate", "dbos", "awa"))
PHASES = ("throughput", "latency", "strain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything; `peers_strained` says whether the peers meet old rows and pinned snapshots."""

    finished_rows: int
    latency_jobs: int
    peers_strained: bool
    variants_max: int


LONG = Size(finished_rows=1_000_000, latency_jobs=200, peers_strained=True, variants_max=10)
QUICK = Size(finished_rows=50_000, latency_jobs=15, peers_strained=False, variants_max=1)


def main() -> None:
    arguments, load_before = parse(), os.getloadavg()[0]
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
    parser.add_argument("--database-url", help="a server to use; default: one of our own, gone afterwards")
    parser.add_argument("--finished-rows", type=int, help="rows of history; default 1,000,000, quick 50,000")
    parser.add_argument("--jobs-scale", type=float, default=1.0, help="factor on every number of jobs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--limit-seconds", type=float, default=240.0, help="per step; slower is a failure")
    parser.add_argument("--only", nargs="+", default=[], help="names of contestants, e.g. batchwright pgqueuer")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--quick", action="store_true", help="about a minute; the figures are rough")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write the figures that docs/capacity.md needs")
    return parser.parse_args()


def measure(running: Server, arguments: argparse.Namespace) -> Results:
    size = QUICK if arguments.quick else LONG
    wanted = {name.lower() for name in arguments.only}
    modules = [module for module in MODULES if not wanted or module.rpartition(".")[2] in wanted]
    results = Results(contestants=[contest.describe(module) for module in modules], server=running.describe())
    results.failures += [(each.name, each.unavailable) for each in results.contestants if each.unavailable]
    for phase, step in (("throughput", measure_throughput), ("latency", measure_latency), ("strain", strain)):
        if phase in arguments.phases:
            step(running, arguments, size, results)
    return results


def measure_throughput(running: Server, arguments: argparse.Namespace, size: Size, results: Results) -> None:
    for round_number in range(1, arguments.rounds + 1):
        entries = [
            (contestant, variant)
            for contestant in results.available()
            for variant in contestant.variants[: size.variants_max]
        ]
        for contestant, variant in shuffled(entries):
            tell(f"round {round_number}: {contestant.name}, {variant}")
            with noting_failure(results, f"{contestant.name}, {variant}"):
                run = contest.throughput(
                    running,
                    contestant,
                    variant,
                    jobs_of(contestant, arguments),
                    limit_seconds=arguments.limit_seconds,
                    round_number=round_number,
                )
                results.runs.append(run)
                tell(f"    {run.rate:,.0f} jobs/s, {report.number(run.cpu_us)} µs per job")


def measure_latency(running: Server, arguments: argparse.Namespace, size: Size, results: Results) -> None:
    for contestant in shuffled(results.available()):
        variant = results.best_variant(contestant)
        tell(f"start latency: {contestant.name}, {variant}")
        with noting_failure(results, f"{contestant.name}, start latency"):
            results.latencies[contestant.name] = contest.start_latencies(
                running, contestant, variant, size.latency_jobs, limit_seconds=arguments.limit_seconds
            )


def strain(running: Server, arguments: argparse.Namespace, size: Size, results: Results) -> None:
    """The same run on a fresh database, after many finished jobs, and with vacuum held back."""
    conditions: dict[str, dict[str, Any]] = {
        FRESH: {},
        FINISHED_ROWS: {"finished_rows": arguments.finished_rows or size.finished_rows},
        PINNED: {"pinned": True},
    }
    for contestant in results.available():
        if not size.peers_strained and contestant.name != OURS:
            continue
        variant = results.best_variant(contestant)
        for round_number in range(1, arguments.rounds + 1):
            for condition in shuffled(conditions):
                tell(f"{condition}: {contestant.name}, {variant}")
                with noting_failure(results, f"{contestant.name}, {condition}"):
                    run = contest.throughput(
                        running,
                        contestant,
                        variant,
                        jobs_of(contestant, arguments),
                        limit_seconds=arguments.limit_seconds,
                        round_number=round_number,
                        **conditions[condition],
                    )
                    results.strained.setdefault((contestant.name, condition), []).append(run)
                    tell(f"    {run.rate:,.0f} jobs/s, {report.number(run.cpu_us)} µs per job")


def jobs_of(contestant: Contestant, arguments: argparse.Namespace) -> int:
    jobs = contestant.jobs_quick if arguments.quick else contestant.jobs
    return max(1, int(jobs * arguments.jobs_scale))


def shuffled(items: Iterable[Any]) -> list[Any]:
    listed = list(items)
    return random.sample(listed, k=len(listed))


@contextmanager
def noting_failure(results: Results, what: str) -> Iterator[None]:
    """A contestant that cannot do it is a line in the report, not the end of the benchmark."""
    try:
        yield
    except RunError as error:
        tell(f"    {error}")
        results.failures.append((what, str(error)))


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
