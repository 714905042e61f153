"""Chaos for batches: a batch of 20,000 requests while workers, the HTTP server and PostgreSQL are killed under it.

Then twelve workers on one batch, which give each other parts of their shards while they are killed. And many small
batches that begin and end at random on perturbed workers, which are killed as well.

python -m tests.chaos.batches [--seed N] [--json] [--keep] [--short] [--shared]

client ─ upload, create, poll, read on ─▶ ┌─────┐   ┌─────────┐
                                          │ API │ ─ │ workers │ ─▶ simulated model server (never killed: it counts)
                SIGKILL · SIGSTOP ──────▶ └─────┘   └─────────┘
                         monkey └───────────▶ PostgreSQL
files, rows, journals, and what the server was asked ──▶ judge ──▶ goals
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psycopg

from batchwright.db.embedded import EmbeddedPostgres
from batchwright.simulator import Remote, running_process
from batchwright.states import BATCH
from tests.chaos import crowd
from tests.chaos.batch_client import MODELS, Client, Workload, workload
from tests.chaos.batch_fleet import Ambushes, Deed, Fleet, Monkey, Phase, Scene, Span, free_port, posts
from tests.chaos.batch_verdict import KINDS, Evidence, Resumed, judge, read_evidence, resumed
from tests.chaos.queue import Goal, breaches_as_json, breaches_as_text, goals_as_json, goals_as_text
from tests.chaos.recovery import percentile
from tests.chaos.verdict import Breach

_IN_FLIGHT_MIN = 10
"""For each model: otherwise refusals that are not caused by load would make the workers slower and slower."""
_LEAVE_SECONDS = 3.0
_READY_SECONDS_MAX = 60.0
_SAMPLE_SECONDS = 0.1
_WATCH_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the batch, the speed of its server, and the number of kills."""

    requests: int
    lease_seconds: float
    tokens_per_second: float
    """Duration of one request until there were enough kills; then the batch may end."""
    in_flight: int
    """Maximum number of requests in flight of one worker."""
    upload_seconds: float
    ambushes: Ambushes
    deck: Mapping[Deed, int]
    draws_from: Phase
    pause_seconds: Span
    kills_min: int
    kills_max: int
    seconds_max: float
    workers: int = 2
    models: Sequence[str] = MODELS
    splits_min: int = 0
    """Minimum number of times that a shard must have given a part away."""
    hurry: float = 10.0
    """How much faster the server is after enough kills."""
    is_timed: bool = True
    """Whether the time after a kill is a goal: not if twelve workers start on two cores."""


LONG = Size(
    requests=20_000,
    lease_seconds=3.0,
    tokens_per_second=60.0,
    in_flight=40,
    upload_seconds=3.0,
    ambushes={
        "uploading": (1.0, ("api",)),
        "creating": (0.03, ("api", "postgres")),
        "validating": (0.3, ("workers",)),
        "finalizing": (0.1, ("workers", "worker")),
    },
    deck={"worker": 18, "workers": 1, "api": 7, "postgres": 4, "everything": 1, "stop": 2},
    draws_from="uploading",
    pause_seconds=(0.3, 2.7),
    kills_min=50,
    kills_max=200,
    seconds_max=900.0,
)
SHORT = Size(
    requests=600,
    lease_seconds=1.0,
    tokens_per_second=25.0,
    in_flight=30,
    upload_seconds=0.2,
    ambushes={"finalizing": (0.05, ("workers",))},
    deck={"worker": 4, "postgres": 1},
    draws_from="in_progress",
    pause_seconds=(0.3, 1.2),
    kills_min=5,
    kills_max=5,
    seconds_max=120.0,
)
SHARED = Size(
    requests=1_500,
    lease_seconds=6.0,  # PostgreSQL may need three to restart, and live workers must keep their shards meanwhile
    tokens_per_second=8.0,
    in_flight=10,
    upload_seconds=0.5,
    ambushes={"finalizing": (0.1, ("worker",))},
    deck={"worker": 20, "postgres": 1},
    draws_from="in_progress",
    pause_seconds=(1.0, 5.0),
    kills_min=8,
    kills_max=24,
    seconds_max=600.0,
    workers=12,
    models=MODELS[:1],
    splits_min=3,
    hurry=1.0,
    is_timed=False,
)


@dataclass(slots=True)
class Run:
    """A run and its results."""

    seed: int
    size: Size
    counts: dict[str, int | float] = field(default_factory=dict)
    breaches: dict[str, list[Breach]] = field(default_factory=dict)
    resumed: Resumed = field(default_factory=Resumed)
    outages: list[Span] = field(default_factory=list)

    @property
    def asked_again_max(self) -> float:
        """Requests in flight on workers that were killed, or stopped until others had their shards."""
        dead = self.counts["workers killed"] + self.counts["workers stopped"]
        return dead * self.counts["in flight per worker"]

    @property
    def goals(self) -> list[Goal]:
        counted = [Goal(name, 0, len(found)) for name, found in self.breaches.items()]
        most = self.size.lease_seconds + 2.0
        timed = [
            Goal("shards free again, seconds at most", most, percentile(self.resumed.rescued, 1.0)),
            Goal("the next answer after a kill, seconds at most", most, percentile(self.resumed.answered, 1.0)),
        ]
        return [
            Goal(f"kills short of {self.size.kills_min}", 0, max(0, self.size.kills_min - self.counts["SIGKILL"])),
            *counted,
            Goal(f"splits short of {self.size.splits_min}", 0, max(0, self.size.splits_min - self.counts["splits"])),
            Goal("requests asked again", self.asked_again_max, self.counts["asked again"]),
            *(timed if self.size.is_timed else ()),
        ]


async def run(size: Size, seed: int, *, keep: bool = False, say: Callable[[str], None] = lambda _: None) -> Run:
    """The whole run on its own PostgreSQL, which is removed afterwards."""
    folder = Path(tempfile.gettempdir()) / f"batchwright-chaos-batches-{os.getpid()}"
    logs = Path(tempfile.mkdtemp(prefix="batchwright-chaos-logs-"))
    result = Run(seed, size)
    try:
        with _simulator(size) as simulator, EmbeddedPostgres(folder) as postgres:
            await _play(result, postgres, simulator, logs, say)
    finally:
        if keep:
            say(f"kept: {folder} and {logs}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(logs, ignore_errors=True)
    return result


def _simulator(size: Size) -> contextlib.AbstractContextManager[Remote]:
    models = [word for model in MODELS for word in ("--model", f"{model}:fast")]
    pace = ["--decode", str(size.tokens_per_second), "--max-running", "1000"]
    return running_process(*models, *pace, "--fault", "429:0.02:retry_after=0.2")


async def _play(
    result: Run, postgres: EmbeddedPostgres, simulator: Remote, logs: Path, say: Callable[[str], None]
) -> None:
    size = result.size
    port = free_port()
    config = _configured(postgres.root, size, simulator.url, port)
    fleet = Fleet(posts(config, workers=size.workers), postgres.root, logs)
    scene = Scene()
    monkey = Monkey(
        fleet,
        postgres,
        scene,
        ambushes=size.ambushes,
        deck=[deed for deed, cards in size.deck.items() for _ in range(cards)],
        draws_from=size.draws_from,
        kills_max=size.kills_max,
        lease_seconds=size.lease_seconds,
        pause_seconds=size.pause_seconds,
        seed=result.seed,
        say=say,
    )
    work = workload(size.requests, result.seed, size.models)
    client = Client(f"http://127.0.0.1:{port}", work, scene, upload_seconds=size.upload_seconds)
    sampler = Sampler(simulator)
    watches = [asyncio.create_task(sampler.watch()), asyncio.create_task(_watch(scene, postgres.url, say))]
    try:
        fleet.start()
        async with asyncio.timeout(_READY_SECONDS_MAX):
            await fleet.ready()
        scene.begin()
        with contextlib.suppress(TimeoutError):  # the judge reports what is missing
            async with asyncio.timeout(size.seconds_max), asyncio.TaskGroup() as group:
                for part in (client.run(), monkey.play(), _hurry(monkey, simulator, size)):
                    group.create_task(part)
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await fleet.close()
    evidence = await asyncio.to_thread(_read, postgres, work, client)
    _judge(result, evidence, fleet, monkey, sampler)
    result.counts |= _counts(result, evidence, monkey, scene, simulator)


async def _hurry(monkey: Monkey, simulator: Remote, size: Size) -> None:
    """The monkey must finish before the batch ends, even on a slow machine."""
    while monkey.is_playing and len(monkey.kills) < size.kills_min:
        await asyncio.sleep(_SAMPLE_SECONDS)
    for model in size.models:
        await asyncio.to_thread(simulator.change, model, decode_rate=size.hurry * size.tokens_per_second)


def _configured(folder: Path, size: Size, url: str, port: int) -> Path:
    path = folder / "chaos.toml"
    path.write_text(
        f"""
        [database]
        folder = "{folder}"
        [engine]
        lease_seconds = {size.lease_seconds}
        [worker]
        stop_grace_seconds = {_LEAVE_SECONDS}
        [api]
        port = {port}
        [log]
        form = "json"
        [inference]
        concurrency = {size.in_flight}
        model_concurrency_min = {_IN_FLIGHT_MIN}
        model_concurrency_start = {_IN_FLIGHT_MIN}
        [global_inference_gateway]
        url = "{url}"
        initial_backoff = 0.1
        max_backoff = 1.0
        """
    )
    return path


def _read(postgres: EmbeddedPostgres, work: Workload, client: Client) -> Evidence:
    postgres.ensure_running()
    return read_evidence(postgres.url, postgres.root / "work", work.requests, client.found)


async def _watch(scene: Scene, url: str, say: Callable[[str], None]) -> None:
    """Reads the batch's row often: the monkey waits for phases that are too short for polls over HTTP."""
    phases: dict[str, Phase] = {"validating": "validating", "in_progress": "in_progress", "finalizing": "finalizing"}
    while not scene.is_over:
        with contextlib.suppress(psycopg.Error):
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                while not scene.is_over:
                    sql = "SELECT status::text, completed + failed FROM batchwright.batch"
                    for status, done in await (await connection.execute(sql)).fetchall():
                        phase: Phase = "ended" if status in BATCH.terminal else phases[status]
                        if phase != scene.phase:
                            say(f"the batch is {status}, {done} lines are done")
                        await scene.enter(phase)
                    await asyncio.sleep(_WATCH_SECONDS)
        await asyncio.sleep(_WATCH_SECONDS)


class Sampler:
    """Reads continuously how many requests the model server has answered."""

    def __init__(self, simulator: Remote) -> None:
        self.samples: list[tuple[float, int]] = []
        self._simulator = simulator

    async def watch(self) -> None:
        while True:
            stats = await asyncio.to_thread(self._simulator.stats)
            self.samples.append((time.time(), stats["answered"].get("200", 0)))
            await asyncio.sleep(_SAMPLE_SECONDS)


def _judge(result: Run, evidence: Evidence, fleet: Fleet, monkey: Monkey, sampler: Sampler) -> None:
    result.breaches = judge(evidence)
    result.breaches["processes that ended by themselves"] = [
        (f"{victim.kind} {victim.process.pid}", f"exit code {victim.process.returncode}")
        for victim in fleet.deserters(monkey.outages)
    ]
    result.resumed = resumed(evidence.history, fleet, monkey, sampler.samples, result.size.lease_seconds)
    result.outages = monkey.outages


def _counts(result: Run, evidence: Evidence, monkey: Monkey, scene: Scene, simulator: Remote) -> dict[str, int | float]:
    stats = simulator.stats()
    asked = simulator.asked(by="request_id")
    faults = stats["faults"]
    phases = Counter(kill.phase for kill in monkey.kills)
    events = Counter(event.event for event in evidence.history.events)
    seconds = scene.since.get("ended", time.time()) - scene.since["uploading"]
    return {
        "requests": len(evidence.requests),
        "seconds": round(seconds, 1),
        "SIGKILL": len(monkey.kills),
        "workers killed": monkey.counted["worker"],
        "API killed": monkey.counted["api"],
        "PostgreSQL killed": monkey.counted["postgres"],
        "of these started again by others": monkey.revived_by_others,
        "workers stopped": monkey.stopped,
        **{f"killed while {phase}": phases[phase] for phase in _PHASES},
        "shards": sum(job.job_type == "batch.shard" for job in evidence.history.jobs.values()),
        "splits": events["job.split"],
        "claims": events["job.started"],
        "rescues": events["job.rescued"],
        "segments": len(evidence.segments),
        "calls of the model server": stats["received"],
        "of these failed on purpose": sum(faults.values()),
        "of these broken off": stats["aborted"]["total"],
        "asked again": asked["repeated"] - faults.get("429", 0) - faults.get("500", 0),
        "answered again": simulator.asked(by="served")["repeated"],
        "in flight at most": stats["in_flight_max"],
        "in flight per worker": min(stats["in_flight_max"], result.size.in_flight),
        "lines read by the cursor": len(evidence.found.shown),
        "calls repeated by the client": evidence.found.repeated,
    }


_PHASES: tuple[Phase, ...] = ("uploading", "creating", "validating", "in_progress", "finalizing")


# Output -----------------------------------------------------------------------------------------------------------


def as_json(result: Run) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "counts": result.counts,
        "resumed": {name: dict(zip(("n", "p50", "p99", "max"), row, strict=True)) for name, *row in _times(result)},
        "breaches": breaches_as_json(result.breaches),
        "goals": goals_as_json(result.goals),
    }


def as_text(result: Run) -> str:
    size = result.size
    lines = [f"chaos of batches: {size.requests:,} requests, {size.workers} workers, lease {size.lease_seconds:g} s"]
    lines += [f"seed {result.seed}", ""]
    lines += [f"  {name:<36}{value:>10,}" for name, value in result.counts.items()]
    lines += ["", f"  {'seconds after the SIGKILL of a worker until':<64}{'n':>6}{'p50':>7}{'p99':>7}{'max':>7}"]
    for name, n, *times in _times(result):
        lines.append(
            f"  {name:<64}{n:>6}" + "".join(f"{'-':>7}" if time is None else f"{time:>7.2f}" for time in times)
        )
    return "\n".join([*lines, "", *goals_as_text(result.goals), *breaches_as_text(result.breaches)])


def _times(result: Run) -> list[tuple[str, int, float | None, float | None, float | None]]:
    found = result.resumed
    rows = [
        ("the next answer of the model server", found.answered),
        ("its shards are free again", found.rescued),
        *((f"its shards are started again{text}", found.started[kind]) for kind, text in KINDS.items()),
        ("PostgreSQL answers again, after its own SIGKILL", [until - since for since, until in result.outages]),
    ]
    return [(name, len(times), _at(times, 0.5), _at(times, 0.99), _at(times, 1.0)) for name, times in rows]


def _at(times: Sequence[float], share: float) -> float | None:
    seconds = percentile(times, share)
    return None if seconds is None else round(seconds, 3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.batches", description="Chaos for batches.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="leave the database, the files and the logs behind")
    parser.add_argument("--quiet", action="store_true", help="do not tell what the monkey does")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--shared", action="store_true", help="only the batch on twelve workers")
    parser.add_argument("--short", action="store_true", help="a small batch, as in `make test`")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(words: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {words}\n")

    logging.getLogger("httpx").setLevel(logging.WARNING)
    say(f"seed {arguments.seed}")
    sizes = [SHORT] if arguments.short else [SHARED] if arguments.shared else [LONG, SHARED]
    results = [asyncio.run(run(size, arguments.seed, keep=arguments.keep, say=say)) for size in sizes]
    others = None
    if not arguments.shared:
        say("a crowd of small batches")
        many = crowd.SHORT_KILLED if arguments.short else crowd.KILLED
        others = asyncio.run(crowd.run(many, arguments.seed, keep=arguments.keep, say=say))
    sys.stdout.write(_told(results, others, as_document=arguments.json) + "\n")
    goals = [goal for one in [*results, *filter(None, [others])] for goal in one.goals]
    return 0 if all(goal.met for goal in goals) else 1


def _told(results: Sequence[Run], others: crowd.Run | None, *, as_document: bool) -> str:
    if not as_document:
        return "\n\n".join([*map(as_text, results), *([crowd.as_text(others)] if others else [])])
    document = {f"{one.size.workers} workers": as_json(one) for one in results}
    document |= {"crowd": crowd.as_json(others)} if others else {}
    goals = [{**goal, "name": f"{part}: {goal['name']}"} for part, one in document.items() for goal in one["goals"]]
    return orjson.dumps({**document, "goals": goals}).decode()


if __name__ == "__main__":
    sys.exit(main())
