"""Chaos for tasks: many tasks over all providers while workers and PostgreSQL are killed and the providers fail.

python -m tests.chaos.tasks [--seed N] [--json] [--keep] [--short]

users ─ submit, cancel ─▶ tasks ─▶ ┌─────────┐ ─▶ contract server (never killed: it counts what was paid for)
    SIGKILL · SIGSTOP ───────────▶ │ workers │         ▲
       monkey └─────▶ PostgreSQL   └─────────┘         └─ drops, refusals, errors, lagging lists, on and off
rows, results, and what the server was paid for ──▶ judge ──▶ goals
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psycopg

from batchwright.app import AsyncBatchwright
from batchwright.db.embedded import EmbeddedPostgres
from batchwright.errors import Conflict, DatabaseUnavailable
from batchwright.providers.jobs import RemoteJob
from batchwright.providers.tasks import Task
from batchwright.settings import load_settings
from batchwright.simulator.providers import Server
from batchwright.simulator.providers.world import ProviderSettings
from batchwright.states import TaskStatus
from tests.chaos.batch_fleet import Fleet, Post, Victim
from tests.chaos.queue import Goal, breaches_as_json, breaches_as_text, goals_as_json, goals_as_text
from tests.chaos.verdict import Breach
from tests.providers.task_stage import TaskStage as Stage
from tests.providers.task_workers import environment_of, write_config

LEASE_SECONDS = 3.0
SETTLE_SECONDS = 4.0
SPEECH = ("aws", "azure", "google", "sarvam")
COMPLETIONS = ("anthropic", "azure_openai", "gemini", "groq", "mistral", "openai", "together", "vertex")
FAULTS = (
    ("drop:route=*.create:times=4", "drop:route=*.start:times=2"),
    ("503:accepted=1:route=*.create:times=4", "lag:seconds=1.5"),
    ("429:retry_after=1:route=*.create:times=6", "429:retry_after=1:route=*.get:times=10"),
    ("500:times=10", "hang_up:times=5"),
    ("drop:times=6", "lag:seconds=1.5"),
    ("duplicate", "shuffled"),
    ("truncate:route=*.get:times=5", "not_json:route=*.list:times=3"),
)
"""Sets of fault rules, of which one applies at a time."""
_READY_SECONDS_MAX = 60.0
_WATCH_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of tasks, of kills and of faults."""

    tasks: int
    submit_seconds: float
    """Time in which they are submitted; the monkey runs that long, and for a third of that time more."""
    kills_min: int
    """On a slow machine the monkey and the faults continue until this number of workers was killed."""
    drain_seconds: float
    kill_seconds: tuple[float, float]
    """Between two deeds."""
    workers: int = 3
    postgres_every: int = 8
    """One of this many deeds hits PostgreSQL."""
    stop_every: int = 5
    """One of this many workers is not killed, but stopped for a while."""
    cancelled_every: int = 12


LONG = Size(tasks=200, submit_seconds=120.0, kills_min=10, drain_seconds=300.0, kill_seconds=(0.5, 2.5))
SHORT = Size(
    tasks=26,
    submit_seconds=12.0,
    kills_min=3,
    drain_seconds=110.0,
    kill_seconds=(0.5, 2.0),
    workers=2,
    postgres_every=5,
)


@dataclass(slots=True, kw_only=True)
class Told:
    """A task, and its expected results."""

    id: str
    provider: str
    good: int
    bad: int
    is_cancelled: bool = False


@dataclass(slots=True)
class Run:
    """A run and its results."""

    seed: int
    size: Size
    counts: dict[str, int | float] = field(default_factory=dict)
    breaches: dict[str, list[Breach]] = field(default_factory=dict)

    @property
    def goals(self) -> list[Goal]:
        return [Goal(name, 0, len(found)) for name, found in self.breaches.items()]


class Ledger(dict[str, Any]):
    """The remote jobs of the contract server, including deleted ones."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def __setitem__(self, id: str, job: Any) -> None:
        super().__setitem__(id, job)
        self.all.append(job)

    def paid(self) -> list[Any]:
        return [job for job in self.all if job.begun_at is not None]


def providers() -> list[str]:
    """AWS needs a library that is optional."""
    has_aws = importlib.util.find_spec("aiobotocore") is not None
    return [name for name in sorted((*SPEECH, *COMPLETIONS)) if name != "aws" or has_aws]


async def run(size: Size, seed: int, *, keep: bool = False, say: Callable[[str], None] = lambda _: None) -> Run:
    """The whole run on its own PostgreSQL, which is removed afterwards."""
    folder = Path(tempfile.gettempdir()) / f"batchwright-chaos-tasks-{os.getpid()}"
    logs = Path(tempfile.mkdtemp(prefix="batchwright-chaos-logs-"))
    result = Run(seed, size)
    server = await Server(ProviderSettings(queue_seconds=0.5, run_seconds=3.0, cancel_seconds=0.5)).open()
    server.world.jobs = Ledger()
    try:
        await Play(result, server, folder, logs, say).play()
    finally:
        await server.close()
        if keep:
            say(f"kept: {folder} and {logs}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(logs, ignore_errors=True)
    return result


class Play:
    """One run: users, workers, the monkey, and the faults of providers."""

    def __init__(self, result: Run, server: Server, folder: Path, logs: Path, say: Callable[[str], None]) -> None:
        self.result = result
        self.size = result.size
        self.server = server
        self.told: list[Told] = []
        self.deeds: Counter[str] = Counter()
        self._folder = folder
        self._logs = logs
        self._say = say
        self._environment = environment_of(server)

    async def play(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = write_config(
            self._folder / "chaos.toml",
            self.server,
            settle_seconds=SETTLE_SECONDS,
            database={"folder": str(self._folder)},
            engine={"lease_seconds": LEASE_SECONDS},
            tasks={"poll_interval_seconds": 0.5},
        )
        os.environ.update(self._environment)  # our own submissions check credentials too
        async with AsyncBatchwright(settings=load_settings(environment={}, file=config)) as batchwright:
            assert batchwright.embedded is not None
            stage = Stage(batchwright=batchwright, server=self.server, environment={})
            post = Post(
                kind="worker",
                command=("batchwright", "worker", "--config", str(config)),
                environment=self._environment,
            )
            fleet = Fleet([post] * self.size.workers, self._folder, self._logs)
            fleet.start()
            began = time.monotonic()
            try:
                await asyncio.wait_for(fleet.ready(), _READY_SECONDS_MAX)
                await self._storm(stage, fleet, batchwright.embedded)
                self._say("the storm is over; the workers clear up")
                await self._drain(stage)
            finally:
                await fleet.close()
            await self._judge(stage, fleet)
            self.result.counts["seconds"] = round(time.monotonic() - began, 1)

    async def _storm(self, stage: Stage, fleet: Fleet, postgres: EmbeddedPostgres) -> None:
        seconds = self.size.submit_seconds * 4 / 3
        async with asyncio.timeout(seconds + 120):
            await asyncio.gather(
                self._submit_all(stage), self._kill(fleet, postgres, seconds), self._fail_calls(seconds)
            )

    # Users ------------------------------------------------------------------------------------------------------

    async def _submit_all(self, stage: Stage) -> None:
        chance = random.Random(f"users {self.result.seed}")
        names = providers()
        for number in range(self.size.tasks):
            await asyncio.sleep(chance.uniform(0.0, 2.0) * self.size.submit_seconds / self.size.tasks)
            submit = functools.partial(self._submit, stage, names[number % len(names)], number, chance.random())
            told = await _insist(submit)
            self.told.append(told)
            if number % self.size.cancelled_every == self.size.cancelled_every - 1:
                await asyncio.sleep(chance.uniform(0.0, 1.5))
                with contextlib.suppress(Conflict):  # it has ended
                    await _insist(functools.partial(stage.part.tasks.cancel, told.id, tenant=None))
                    told.is_cancelled = True

    async def _submit(self, stage: Stage, provider: str, number: int, luck: float) -> Told:
        good, bad = 1 + int(luck * 3), int(luck * 10) % 2
        if provider in COMPLETIONS:
            words = [*(f"{number} {n}" for n in range(good)), *["fail"] * bad]
            models = ["gemini-2.5-flash"] if number % 5 else ["gemini-2.5-flash", "gemini-2.5-pro"]
            targets = [f"{provider}/{model}" for model in models]
            id = await stage.complete(targets, *words, idempotency_key=f"task-{number}")
            return Told(id=id, provider=provider, good=good * len(models), bad=bad * len(models))
        names = [*(f"{number}-{n}.wav" for n in range(good)), *["bad__fail_400__.wav"] * bad]
        if provider == "azure":
            inputs = [f"https://audio.example.com/{name}" for name in names]
            id = await stage.submit("transcription", inputs, provider=provider, idempotency_key=f"task-{number}")
        else:
            id = await stage.transcribe(provider, *names, idempotency_key=f"task-{number}")
        return Told(id=id, provider=provider, good=good, bad=bad)

    # The monkey, and faults of providers --------------------------------------------------------------------------

    async def _kill(self, fleet: Fleet, postgres: EmbeddedPostgres, seconds: float) -> None:
        chance = random.Random(f"monkey {self.result.seed}")
        until = time.monotonic() + seconds
        while time.monotonic() < until or not self._was_wild:
            await asyncio.sleep(chance.uniform(*self.size.kill_seconds))
            if chance.randrange(self.size.postgres_every) == 0:
                await asyncio.to_thread(_restart, postgres, chance.uniform(0.0, 1.0))
                self.deeds["PostgreSQL killed"] += 1
                self._say("PostgreSQL killed and started again")
            elif awake := fleet.awake("worker"):
                victim = chance.choice(awake)
                if len(awake) > 1 and chance.randrange(self.size.stop_every) == 0:
                    self._stop(victim, LEASE_SECONDS * chance.uniform(1.2, 2.0))
                    continue
                fleet.kill(victim)
                self.deeds["workers killed"] += 1
                self._say(f"SIGKILL {victim.process.pid}")

    @property
    def _was_wild(self) -> bool:
        return self.deeds["workers killed"] >= self.size.kills_min and self.deeds["PostgreSQL killed"] > 0

    def _stop(self, victim: Victim, seconds: float) -> None:
        """Stop it for longer than a lease: when it continues, others have its tasks."""
        victim.stops.append((time.time(), time.time() + seconds))
        victim.signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(seconds, victim.signal, signal.SIGCONT)
        self.deeds["workers stopped for a while"] += 1
        self._say(f"SIGSTOP {victim.process.pid} for {seconds:.1f} s")

    async def _fail_calls(self, seconds: float) -> None:
        chance = random.Random(f"faults {self.result.seed}")
        until = time.monotonic() + seconds
        while time.monotonic() < until or not self._was_wild:
            rules = chance.choice(FAULTS)
            self.server.put_faults(*rules)
            await asyncio.sleep(chance.uniform(1.0, 4.0))
            self.deeds["faults"] += sum(self.server.faults.fired)
        self.server.put_faults()

    async def _drain(self, stage: Stage) -> None:
        """Wait until every task has ended and nothing is left at the providers, up to this limit."""
        until = time.monotonic() + self.size.drain_seconds
        sql = """
            SELECT (SELECT count(*) FROM batchwright.task WHERE ended_at IS NULL)
                + (SELECT count(*) FROM batchwright.provider_job WHERE cleaned_at IS NULL)
        """
        while time.monotonic() < until:
            with contextlib.suppress(DatabaseUnavailable):
                ((open,),) = await stage.batchwright.pool.rows(sql)
                if open == 0:
                    return
            await asyncio.sleep(_WATCH_SECONDS)

    # The verdict --------------------------------------------------------------------------------------------------

    async def _judge(self, stage: Stage, fleet: Fleet) -> None:
        breaches: dict[str, list[Breach]] = {name: [] for name in _GOALS}
        statuses: Counter[str] = Counter()
        rows: list[RemoteJob] = []
        for told in self.told:
            task = await stage.get(told.id)
            statuses[task.status.value] += 1
            jobs = await stage.jobs(told.id)
            rows += jobs
            for name, words in await _judge_task(stage, told, task, jobs):
                breaches[name].append((f"{told.id} ({told.provider})", words))
        ledger = self.server.world.jobs
        assert isinstance(ledger, Ledger)
        breaches["remote jobs that were paid for twice"] += _find_doubles(rows, ledger.paid())
        breaches["workers that ended by themselves"] += [
            (str(one.process.pid), f"exit code {one.process.returncode}") for one in fleet.deserters([(0, time.time())])
        ]
        self.result.breaches = breaches
        self.result.counts |= {
            "tasks": len(self.told),
            "remote jobs": len(ledger.paid()),
            **{f"tasks {status}": n for status, n in sorted(statuses.items())},
            **dict(sorted(self.deeds.items())),
            **await _count_events(stage),
        }


_GOALS = (
    "remote jobs that were paid for twice",
    "results lost or doubled",
    "tasks that have not ended",
    "tasks whose provider_state is wrong",
    "inputs left at providers",
    "workers that ended by themselves",
)
_EVENTS = ("provider.adopted", "provider.call_failed", "provider.in_doubt", "job.rescued")


async def _count_events(stage: Stage) -> dict[str, int]:
    sql = (
        "SELECT event, count(*) FROM batchwright.job_event WHERE event = ANY(%(events)s) GROUP BY event ORDER BY event"
    )
    return {str(event): int(n) for event, n in await stage.batchwright.pool.rows(sql, {"events": list(_EVENTS)})}


async def _judge_task(stage: Stage, told: Told, task: Task, rows: Sequence[RemoteJob]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if not task.has_ended:
        return [("tasks that have not ended", f"{task.status.value}: {[row.phase for row in rows]}")]
    if left := [row.key for row in rows if row.cleaned_at is None]:
        found.append(("inputs left at providers", ", ".join(left)))
    wanted = TaskStatus.PARTIAL_COMPLETE if told.bad else TaskStatus.COMPLETED
    state = task.provider_state or {"jobs": []}
    ids = [job["external_job_id"] for job in state["jobs"]]
    is_wrong = bool(task.provider_state) and ids != [row.external_id for row in rows]
    if is_wrong or (not told.is_cancelled and None in ids):
        found.append(("tasks whose provider_state is wrong", f"{ids} instead of {[row.external_id for row in rows]}"))
    result = await stage.result(task)
    good, bad = _count(task, result)
    if told.is_cancelled:
        if good > told.good or (task.succeeded, good) != (good, task.succeeded):
            found.append(("results lost or doubled", f"{good} in the file, {task.succeeded} counted"))
    elif (task.status, good, bad, task.succeeded, task.failed) != (wanted, told.good, told.bad, told.good, told.bad):
        words = f"{task.status.value} with {good} and {bad} instead of {told.good} and {told.bad}: {task.error}"
        found.append(("results lost or doubled", words))
    return found


def _count(task: Task, result: Any) -> tuple[int, int]:
    """Good and bad results in the file; a result that occurs twice counts as bad."""
    if result is None:
        return 0, 0
    if task.task_type == "completion":
        keys = {(line["model"], line["custom_id"]): line["error"] is None for line in result}
        doubled = len(result) - len(keys)
        return sum(keys.values()), len(keys) - sum(keys.values()) + doubled
    entries = [
        entry
        for part in ([result] if "transcriptions" in result else result.values())
        for entry in part["transcriptions"]
    ]
    inputs = {entry["input_id"]: entry["error"] is None for entry in entries}
    return sum(inputs.values()), len(inputs) - sum(inputs.values()) + len(entries) - len(inputs)


def _find_doubles(rows: Sequence[RemoteJob], paid: Sequence[Any]) -> list[Breach]:
    """Jobs that were paid for and that no row knows, and rows whose key was paid for twice."""
    known: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.external_id is not None:
            known[row.provider].add(row.external_id)
    found: list[Breach] = []
    for provider, ids in known.items():
        jobs = [job for job in paid if job.provider == provider]
        if len(jobs) != len(ids):
            strange = [job.id for job in jobs if not any(str(job.id) in id for id in ids)]
            found.append((provider, f"{len(jobs)} jobs for {len(ids)} references; unknown: {strange[:5]}"))
    for row in rows:
        if (n := sum(row.key in job.trace for job in paid)) > 1:
            found.append((row.key, f"{n} jobs at {row.provider}"))
    return found


async def _insist(call: Callable[[], Any]) -> Any:
    """Users retry while the database is unavailable; a task has a key, so that it is created once."""
    while True:
        try:
            return await call()
        except DatabaseUnavailable:
            await asyncio.sleep(0.1)


def _restart(postgres: EmbeddedPostgres, pause: float) -> None:
    with contextlib.suppress(DatabaseUnavailable):  # a worker was just starting it
        postgres.pg_ctl("stop", "-m", "immediate", "-w", "-t", "20")
    time.sleep(pause)
    postgres.ensure_running()
    for _ in range(500):
        with contextlib.suppress(psycopg.Error):
            psycopg.connect(postgres.url, connect_timeout=5).close()
            return
        time.sleep(0.02)


# Output -----------------------------------------------------------------------------------------------------------


def as_json(result: Run) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "counts": result.counts,
        "breaches": breaches_as_json(result.breaches),
        "goals": goals_as_json(result.goals),
    }


def as_text(result: Run) -> str:
    lines = [f"chaos of tasks: {result.size.tasks} tasks, {result.size.workers} workers", f"seed {result.seed}", ""]
    lines += [f"  {name:<36}{value:>10,}" for name, value in result.counts.items()]
    return "\n".join([*lines, "", *goals_as_text(result.goals), *breaches_as_text(result.breaches)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.tasks", description="Chaos for tasks of outside providers.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="leave the database and the workers' logs behind")
    parser.add_argument("--quiet", action="store_true", help="do not tell what the monkey does")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--short", action="store_true", help="fewer tasks, as in `make test`")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(words: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {words}\n")

    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # it is expected that the database is unavailable
    say(f"seed {arguments.seed}")
    result = asyncio.run(run(SHORT if arguments.short else LONG, arguments.seed, keep=arguments.keep, say=say))
    sys.stdout.write((orjson.dumps(as_json(result)).decode() if arguments.json else as_text(result)) + "\n")
    return 0 if all(goal.met for goal in result.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
