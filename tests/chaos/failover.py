"""Chaos of failovers: a batch, and jobs beside it, while PostgreSQL loses its last commits and fails over.

python -m tests.chaos.failover [--mode M] [--variant V] [--requests N] [--seconds S] [--rounds N] [--seed N] [--json]

user ─ batch, jobs ─▶ ┌──────────┐ ── held back ──▶ ┌─────────┐
                      │ primary  │                  │ standby │    SIGKILL, promote
machine-a, machine-b ▶└──────────┘                  └─────────┘
        └─▶ simulated model server (it counts)      one store for both machines, a work folder for each
files, rows, journals, and what was known before ──▶ judge ──▶ goals
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.chaos.batch_client import MODELS
from tests.chaos.failover_play import VARIANTS, Plan, Round, Size, play
from tests.chaos.queue import Goal, breaches_as_json, breaches_as_text, goals_as_json, goals_as_text
from tests.chaos.replicas import MODES, temporary_folder

LONG = Size(
    requests=5_000,
    models=MODELS[:2],
    checkpoint_seconds=2.0,
    in_flight=40,
    lease_seconds=8.0,
    tokens_per_second=40.0,
    held_seconds=(5.0, 12.0),
    away_seconds=(0.0, 3.0),
    seconds_max=120.0,
)
SHORT = Size(
    requests=500,
    models=MODELS,
    checkpoint_seconds=0.3,
    in_flight=30,
    lease_seconds=6.0,
    tokens_per_second=25.0,
    held_seconds=(1.5, 1.5),
    away_seconds=(0.0, 0.0),
    seconds_max=60.0,
)
PLANS = [*itertools.starmap(Plan, itertools.product(MODES, VARIANTS)), Plan("asynchronous", "claims survive", "s3")]


@dataclass(slots=True)
class Run:
    """All rounds."""

    seed: int
    size: Size
    rounds: list[Round] = field(default_factory=list)

    @property
    def goals(self) -> list[Goal]:
        """One goal for each promise, over all rounds of a mode."""
        found: Counter[str] = Counter()
        for one in self.rounds:
            for name, breaches in one.breaches.items():
                found[f"{one.plan.mode}: {name}"] += len(breaches)
        return [Goal(name, 0, count) for name, count in found.items()]


async def run(
    size: Size, plans: Sequence[Plan], seed: int, *, keep: bool = False, say: Callable[[str], None] = lambda _: None
) -> Run:
    """Run the rounds one after the other, each with its own servers, machines and store."""
    result = Run(seed, size)
    for number, plan in enumerate(plans, 1):
        say(f"round {number} of {len(plans)}: {plan}")
        played = plans[:number].count(plan)  # a round makes the same random choices, whatever ran before it
        with temporary_folder(keep=keep) as folder:
            result.rounds.append(await play(size, plan, f"{seed} {plan} {played}", folder, say))
        if keep:
            say(f"kept: {folder}")
    return result


# Output -----------------------------------------------------------------------------------------------------------


def as_json(result: Run) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "rounds": [
            {
                "mode": one.plan.mode,
                "variant": one.plan.variant,
                "store": one.plan.store,
                "counts": one.counts,
                "breaches": breaches_as_json(one.breaches),
            }
            for one in result.rounds
        ],
        "goals": goals_as_json(result.goals),
    }


def as_text(result: Run) -> str:
    size = result.size
    lines = [f"chaos of failovers: {size.requests:,} requests, 2 machines, lease {size.lease_seconds:g} s"]
    lines.append(f"seed {result.seed}")
    for one in result.rounds:
        lines += ["", f"  {one.plan}"]
        lines += [f"    {name:<40}{value:>12}" for name, value in one.counts.items()]
        lines += breaches_as_text(one.breaches)
    return "\n".join([*lines, "", *goals_as_text(result.goals)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.failover", description="Chaos of failovers.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="leave databases, files and logs behind")
    parser.add_argument("--mode", choices=MODES, action="append", help="play only this mode; repeat it")
    parser.add_argument("--quiet", action="store_true", help="do not tell what happens")
    parser.add_argument("--requests", type=int, help="lines of the batch")
    parser.add_argument("--rounds", type=int, help="play so many rounds, drawn at random")
    parser.add_argument("--seconds", type=float, help="hold commits back for so long, instead of 5 to 12 s")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--short", action="store_true", help="small batches, as in `make test`")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="play only this variant; repeat it")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(words: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {words}\n")

    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # it is expected that the database is unavailable
    say(f"seed {arguments.seed}")
    result = asyncio.run(run(_size(arguments), _plans(arguments), arguments.seed, keep=arguments.keep, say=say))
    sys.stdout.write((orjson.dumps(as_json(result)).decode() if arguments.json else as_text(result)) + "\n")
    return 0 if all(goal.met for goal in result.goals) else 1


def _size(arguments: argparse.Namespace) -> Size:
    size = SHORT if arguments.short else LONG
    if arguments.requests:
        size = dataclasses.replace(size, requests=arguments.requests)
    if arguments.seconds:
        size = dataclasses.replace(size, held_seconds=(arguments.seconds, arguments.seconds))
    return size


def _plans(arguments: argparse.Namespace) -> list[Plan]:
    modes, variants = arguments.mode or MODES, arguments.variant or VARIANTS
    chosen = [plan for plan in PLANS if plan.mode in modes and plan.variant in variants]
    if arguments.rounds:
        return random.Random(f"rounds {arguments.seed}").choices(chosen, k=arguments.rounds)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
