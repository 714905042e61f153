"""A crowd: 1,000 batches of 20 lines by 50 clients at once, on two perturbed workers; each line is sent once.

python -m tests.chaos.crowd [--kills N] [--seed N] [--json] [--keep] [--short]

50 clients ─ upload, create, poll, read ─▶ API ─ PostgreSQL ─ 2 workers, every call delayed ─▶ simulated model server
                                                                   ▲
                                                     SIGKILL ──────┘  with --kills
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import orjson

from batchwright.db.embedded import EmbeddedPostgres
from batchwright.simulator import Remote, running_process
from tests.chaos.batch_client import CHAT, MODELS
from tests.chaos.batch_fleet import Fleet, free_port, posts
from tests.chaos.batch_verdict import unfinished
from tests.chaos.history import History, read_history
from tests.chaos.queue import Goal, breaches_as_json, breaches_as_text, goals_as_json, goals_as_text
from tests.chaos.verdict import Breach, replay

ENDED = ("completed", "failed", "expired", "cancelled")
IN_FLIGHT = 40
"""Maximum number of requests in flight of one worker."""
_LEAVE_SECONDS = 3.0
_POLL_SECONDS = 0.5
_READY_SECONDS_MAX = 60.0
_SAY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number and size of batches, the number of clients, and the number of workers that are killed."""

    batches: int
    lines: int
    clients: int
    kills: int = 0
    pause_seconds: float = 0.0
    """Maximum pause of a client before it creates the next batch."""
    seconds_max: float

    @property
    def lease_seconds(self) -> float:
        """Short if workers are killed, so that others get their shards soon; otherwise the default."""
        return 3.0 if self.kills else 30.0


LONG = Size(batches=1_000, lines=20, clients=50, seconds_max=1_800.0)
SHORT = Size(batches=24, lines=8, clients=8, seconds_max=120.0)
KILLED = Size(batches=300, lines=20, clients=30, kills=20, pause_seconds=2.0, seconds_max=1_200.0)
"""Batches begin and end at random while workers are killed."""
SHORT_KILLED = replace(SHORT, kills=2, pause_seconds=1.0)


@dataclass(slots=True)
class Run:
    """A run and its results."""

    seed: int
    size: Size
    counts: dict[str, int | float] = field(default_factory=dict)
    breaches: dict[str, list[Breach]] = field(default_factory=dict)

    @property
    def goals(self) -> list[Goal]:
        counted = [Goal(name, 0, len(found)) for name, found in self.breaches.items()]
        asked_again_max = self.counts["workers killed"] * IN_FLIGHT
        return [*counted, Goal("lines asked more than once", asked_again_max, self.counts["asked again"])]


async def run(size: Size, seed: int, *, keep: bool = False, say: Callable[[str], None] = lambda _: None) -> Run:
    """The whole run on its own PostgreSQL, which is removed afterwards."""
    folder = Path(tempfile.gettempdir()) / f"batchwright-chaos-crowd-{os.getpid()}"
    logs = Path(tempfile.mkdtemp(prefix="batchwright-chaos-logs-"))
    result = Run(seed, size)
    models = [word for model in MODELS for word in ("--model", f"{model}:fast")]
    try:
        with running_process(*models, "--max-running", "10000") as simulator, EmbeddedPostgres(folder) as postgres:
            await _play(result, postgres, simulator, logs, say)
    finally:
        if keep:
            say(f"kept: {folder} and {logs}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(logs, ignore_errors=True)
    return result


async def _play(
    result: Run, postgres: EmbeddedPostgres, simulator: Remote, logs: Path, say: Callable[[str], None]
) -> None:
    port = free_port()
    config = _configured(postgres.root, result.size, simulator.url, port)
    fleet = Fleet(posts(config, perturbed=result.seed), postgres.root, logs)
    crowd = Crowd(f"http://127.0.0.1:{port}/v1", result.size, result.seed)
    killer = Killer(fleet, crowd, result.size, result.seed, say)
    try:
        fleet.start()
        async with asyncio.timeout(_READY_SECONDS_MAX):
            await fleet.ready()
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):  # the judge reports what is missing
            async with asyncio.timeout(result.size.seconds_max), asyncio.TaskGroup() as group:
                for part in (crowd.run(), killer.play(), _tell(crowd, say)):
                    group.create_task(part)
        seconds = time.monotonic() - began
    finally:
        await fleet.close()
    history = await asyncio.to_thread(read_history, postgres.url, has_effects=False)
    asked = simulator.asked(by="request_id")
    result.breaches = _judge(crowd, history, fleet)
    result.counts = {
        "batches": len(crowd.ended),
        "lines": sum(len(one.lines) for one in crowd.ended),
        "clients": result.size.clients,
        "seconds": round(seconds, 1),
        "batches per second": round(len(crowd.ended) / seconds, 2),
        "workers killed": killer.kills,
        "calls of the model server": asked["total"],
        "asked again": asked["repeated"],
        "API calls": crowd.calls,
        "claims": sum(event.event == "job.started" for event in history.events),
        "rescues": sum(event.event == "job.rescued" for event in history.events),
    }


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
        concurrency = {IN_FLIGHT}
        [global_inference_gateway]
        url = "{url}"
        """
    )
    return path


async def _tell(crowd: Crowd, say: Callable[[str], None]) -> None:
    while not crowd.over.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(crowd.over.wait(), _SAY_SECONDS)
        say(f"{len(crowd.ended)} of {crowd.size.batches} batches have ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A batch as its client found it."""

    id: str
    status: str
    counts: tuple[int, int, int]
    lines: Sequence[str]
    """The custom ids of its lines."""
    output: Sequence[str]
    """The custom ids of the answers in the output file."""


class Crowd:
    """Clients, each of which creates one batch after the other and reads its results."""

    def __init__(self, url: str, size: Size, seed: int) -> None:
        self.size = size
        self.ended: list[Ended] = []
        self.calls = 0
        self.refused: list[Breach] = []
        """Answers that a client must never get."""
        self.over = asyncio.Event()
        self._chance = random.Random(f"crowd {seed}")
        self._left = iter(range(size.batches))
        self._url = url

    async def run(self) -> None:
        try:
            await asyncio.gather(*(self._use() for _ in range(self.size.clients)))
        finally:
            self.over.set()

    async def _use(self) -> None:
        client = openai.AsyncOpenAI(base_url=self._url, api_key="none", timeout=60, max_retries=0)
        async with client:
            for place in self._left:
                await asyncio.sleep(self._chance.uniform(0.0, self.size.pause_seconds))
                try:
                    self.ended.append(await self._live(client, place))
                except openai.OpenAIError as error:
                    self.refused.append((f"batch {place}", repr(error)))

    async def _live(self, client: openai.AsyncOpenAI, place: int) -> Ended:
        lines = self._lines(place)
        data = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        self.calls += 2
        while batch.status not in ENDED:
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * _POLL_SECONDS)
            batch = await client.batches.retrieve(batch.id)
            self.calls += 1
        output = (await client.files.content(batch.output_file_id)).content if batch.output_file_id else b""
        counts = batch.request_counts
        return Ended(
            id=batch.id,
            status=batch.status,
            counts=(counts.total, counts.completed, counts.failed) if counts else (0, 0, 0),
            lines=[line["custom_id"] for line in lines],
            output=[orjson.loads(line)["custom_id"] for line in output.splitlines()],
        )

    def _lines(self, place: int) -> list[dict[str, Any]]:
        models = self._chance.sample(MODELS, self._chance.randint(1, len(MODELS)))
        bodies = [
            {
                "model": models[n % len(models)],
                "messages": [{"role": "user", "content": f"Batch {place}, line {n}."}],
                "max_tokens": self._chance.randint(4, 40),
            }
            for n in range(self.size.lines)
        ]
        return [
            {"custom_id": f"{place}-{n}", "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(bodies)
        ]


class Killer:
    """Kills workers while batches begin and end; the fleet replaces them."""

    def __init__(self, fleet: Fleet, crowd: Crowd, size: Size, seed: int, say: Callable[[str], None]) -> None:
        self.kills = 0
        self._chance = random.Random(f"killer {seed}")
        self._crowd = crowd
        self._fleet = fleet
        self._say = say
        self._size = size

    async def play(self) -> None:
        """Kill after equal shares of the batches, so that every run has its kills however fast it is."""
        while self.kills < self._size.kills and not self._crowd.over.is_set():
            share = (self.kills + self._chance.random()) / self._size.kills
            workers = self._fleet.awake("worker")
            if len(self._crowd.ended) >= share * 0.8 * self._size.batches and len(workers) > 1:
                self._kill(self._chance.choice(workers))
            await asyncio.sleep(0.05)

    def _kill(self, victim: Any) -> None:
        victim.killed_at = time.time()
        victim.signal(signal.SIGKILL)
        self.kills += 1
        self._say(f"SIGKILL {self.kills}: worker {victim.process.pid}")


# Verdict ----------------------------------------------------------------------------------------------------------


def _judge(crowd: Crowd, history: History, fleet: Fleet) -> dict[str, list[Breach]]:
    replays = [replay(history.of_job[job.id], job) for job in history.jobs.values()]
    return {
        "batches not completed": list(not_completed(crowd)),
        "lines without an answer, or with two": list(not_answered_once(crowd)),
        "counts that differ": list(miscounted(crowd)),
        "answers that nobody should get": crowd.refused,
        "jobs not terminal, or failed": list(unfinished(history)),
        "zombie writes accepted": [breach for one in replays for breach in one.zombies],
        "histories that are no legal path to their row": [breach for one in replays for breach in one.illegal],
        "processes that ended by themselves": [
            (f"{victim.kind} {victim.process.pid}", f"exit code {victim.process.returncode}")
            for victim in fleet.deserters([])
        ],
    }


def not_completed(crowd: Crowd) -> Iterator[Breach]:
    for one in crowd.ended:
        if one.status != "completed":
            yield one.id, f"is {one.status}, with {len(one.output)} of {len(one.lines)} answers"
    if missing := crowd.size.batches - len(crowd.ended):
        yield "the others", f"{missing} batches have not ended"


def not_answered_once(crowd: Crowd) -> Iterator[Breach]:
    for one in crowd.ended:
        found = Counter(one.output)
        for custom_id in {*one.lines, *found}:
            if found[custom_id] != int(custom_id in one.lines):
                yield one.id, f"{custom_id} is there {found[custom_id]} times"


def miscounted(crowd: Crowd) -> Iterator[Breach]:
    for one in crowd.ended:
        if one.counts != (len(one.lines), len(one.output), 0):
            yield one.id, f"says {one.counts} for all, completed and failed; its output has {len(one.output)}"


# Output -----------------------------------------------------------------------------------------------------------


def as_json(result: Run) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "counts": result.counts,
        "breaches": breaches_as_json(result.breaches),
        "goals": goals_as_json(result.goals),
    }


def as_text(result: Run) -> str:
    size = result.size
    lines = [f"crowd: {size.batches:,} batches of {size.lines} lines by {size.clients} clients, 2 perturbed workers"]
    lines += [f"seed {result.seed}", ""]
    lines += [f"  {name:<36}{value:>10,}" for name, value in result.counts.items()]
    return "\n".join([*lines, "", *goals_as_text(result.goals), *breaches_as_text(result.breaches)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.crowd", description="Many small batches at once.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="leave the database, the files and the logs behind")
    parser.add_argument("--kills", type=int, default=0, help="how many workers to kill meanwhile")
    parser.add_argument("--quiet", action="store_true", help="do not tell how far it is")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--short", action="store_true", help="fewer batches")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(words: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {words}\n")

    logging.getLogger("httpx").setLevel(logging.WARNING)
    say(f"seed {arguments.seed}")
    size = replace(SHORT if arguments.short else LONG, kills=arguments.kills)
    result = asyncio.run(run(size, arguments.seed, keep=arguments.keep, say=say))
    sys.stdout.write((orjson.dumps(as_json(result)).decode() if arguments.json else as_text(result)) + "\n")
    return 0 if all(goal.met for goal in result.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
