"""Chaos for documents: workers are killed while a run goes through its steps and the model server fails.

python -m tests.chaos.documents [--seed N] [--json] [--keep] [--short]

folder of documents ─▶ run ─▶ ┌─────────┐ ─▶ fake provider (never killed: it keeps the bill)
          SIGKILL ──────────▶ │ workers │        429 · 5xx · dropped · lost · invalid · refused
                              └─────────┘
steps, events, counters and the provider's bill ──▶ judge ──▶ goals
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from batchwright.app import AsyncBatchwright
from batchwright.ingest.config import Overrides
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import QUEUE, Run
from batchwright.ingest.sources import local_roots
from batchwright.ingest.submission import WantedRun
from batchwright.settings import load_settings
from tests.chaos.batch_fleet import Fleet, Post
from tests.chaos.document_verdict import Evidence, judge
from tests.chaos.monkey import environment
from tests.chaos.queue import Goal, breaches_as_json, breaches_as_text, goals_as_json, goals_as_text
from tests.chaos.verdict import Breach
from tests.ingest.documents import make_scan
from tests.ingest.fake_provider import MARKER

LEASE_SECONDS = 6.0
FAULTS = {"rate_limited": 0.02, "error": 0.03, "drop": 0.02, "lost": 0.02, "invalid": 0.01}
_READY_SECONDS_MAX = 90.0
_WATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of documents, of failures and of kills."""

    items: int
    kill_seconds: tuple[float, float]
    """Between two kills."""
    kills_max: int
    run_seconds_max: float
    workers: int = 4
    bad_every: int = 20
    """One of this many documents cannot be read."""
    refused_every: int = 33
    """The model server refuses one of this many documents."""


LONG = Size(items=1_500, kill_seconds=(0.5, 3.0), kills_max=60, run_seconds_max=600.0)
SHORT = Size(items=300, kill_seconds=(1.0, 2.5), kills_max=7, run_seconds_max=150.0)


@dataclass(slots=True)
class Result:
    """A run and its results."""

    seed: int
    size: Size
    counts: dict[str, int | float] = field(default_factory=dict)
    breaches: dict[str, list[Breach]] = field(default_factory=dict)

    @property
    def goals(self) -> list[Goal]:
        return [Goal(name, 0, len(found)) for name, found in self.breaches.items()]


async def run(size: Size, seed: int, *, keep: bool = False, say: Callable[[str], None] = lambda _: None) -> Result:
    """The whole run on its own PostgreSQL, which is removed afterwards."""
    folder = Path(tempfile.gettempdir()) / f"batchwright-chaos-documents-{os.getpid()}"
    folder.mkdir(parents=True)
    result = Result(seed, size)
    try:
        async with provider_process() as url:
            await Play(result, url, folder, say).play()
    finally:
        if keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return result


@contextlib.asynccontextmanager
async def provider_process() -> AsyncIterator[str]:
    """The fake provider in its own process, which runs as long as this one."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.ingest.fake_provider"), stdout=asyncio.subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


class Play:
    """One run over a folder, its workers, and the monkey."""

    def __init__(self, result: Result, url: str, folder: Path, say: Callable[[str], None]) -> None:
        self.result = result
        self.size = result.size
        self._folder = folder
        self._papers = folder / "papers"
        self._say = say
        self._url = url

    async def play(self) -> None:
        (logs := self._folder / "logs").mkdir()
        bad = write_documents(self._papers, self.size, self.result.seed)
        config = self._write_config()
        began = time.monotonic()
        async with AsyncBatchwright(settings=load_settings(environment={}, file=config)) as batchwright:
            post = Post(kind="worker", command=("batchwright", "worker", "--config", str(config)))
            fleet = Fleet([post] * self.size.workers, self._folder, logs)
            fleet.start()
            try:
                await asyncio.wait_for(fleet.ready(), _READY_SECONDS_MAX)
                run = await self._storm(batchwright, fleet)
            finally:
                await fleet.close()
            bill = await self._read_bill()
            evidence = await Evidence.collect(batchwright, run, bill, bad)
        self.result.breaches = judge(evidence)
        self.result.breaches["workers that ended by themselves"] = [
            (str(one.process.pid), f"exit code {one.process.returncode}") for one in fleet.deserters([])
        ]
        self.result.counts |= {**evidence.counts, "seconds": round(time.monotonic() - began, 1)}

    async def _storm(self, batchwright: AsyncBatchwright, fleet: Fleet) -> Run:
        part = batchwright.part(IngestPart)
        sources = [str(self._papers)]
        overrides = Overrides(roots=local_roots(sources))
        wanted = WantedRun(tenant="default", collection="papers", sources=sources, overrides=overrides)
        run, _ = await part.submission.create(wanted)
        batchwright.doorbell.ring([QUEUE])
        began = time.monotonic()
        killing = asyncio.create_task(self._kill(fleet))
        try:
            while not run.has_ended and time.monotonic() - began < self.size.run_seconds_max:
                await asyncio.sleep(_WATCH_SECONDS)
                run = await part.runs.get(run.id, tenant=None)
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        self.result.counts["run_seconds"] = round(time.monotonic() - began, 1)
        return run

    async def _kill(self, fleet: Fleet) -> None:
        chance = random.Random(f"monkey {self.result.seed}")
        kills = 0
        while kills < self.size.kills_max:
            await asyncio.sleep(chance.uniform(*self.size.kill_seconds))
            if awake := fleet.awake("worker"):
                victim = chance.choice(awake)
                fleet.kill(victim)
                kills += 1
                self.result.counts["workers_killed"] = kills
                self._say(f"SIGKILL {victim.process.pid}")

    async def _read_bill(self) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(trust_env=False) as http:
            bill = (await http.get(f"{self._url}/bill")).raise_for_status().json()
        entries: list[dict[str, Any]] = bill["entries"]
        return entries

    def _write_config(self) -> Path:
        httpx.post(
            f"{self._url}/faults",
            json={"rates": FAULTS, "seed": self.result.seed, "delay_seconds": 0.02},
            trust_env=False,
        ).raise_for_status()
        gateway = {"url": self._url, "max_retries": 0}
        tables: dict[str, Mapping[str, Any]] = {
            "database": {"folder": str(self._folder / "home")},
            "engine": {"lease_seconds": LEASE_SECONDS},
            "worker": {"stop_grace_seconds": 5.0, "concurrency": 6},
            "ingest": {
                "chunk_characters": 200,
                "chunk_overlap": 20,
                "embedding_model": "embedder",
                "entities": "reader",
                "lane": "realtime",
                "max_retries": 8,
                "sandboxes": 1,
            },
            'model_gateways."embedder"': gateway,
            'model_gateways."reader"': gateway,
            'ingest.prices."embedder"': {"input": 1.0, "output": 0.0},
            'ingest.prices."reader"': {"input": 2.0, "output": 8.0},
        }
        lines = [
            line
            for name, values in tables.items()
            for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), "")
        ]
        path = self._folder / "chaos.toml"
        path.write_text("\n".join(lines))
        return path


def write_documents(folder: Path, size: Size, seed: int) -> set[str]:
    """No two share a passage. Returns the names of those that must fail: unreadable, or refused by the model server."""
    chance = random.Random(f"documents {seed}")
    folder.mkdir()
    bad = set()
    kinds = [("empty.txt", b""), ("scan.pdf", make_scan()), ("image.txt", b"\x89PNG\r\n\x1a\n" + bytes(64))]
    for number in range(size.items):
        if number % size.bad_every == size.bad_every - 1:
            ending, data = kinds[number // size.bad_every % len(kinds)]
        else:
            words = [f"{chance.choice(('Anna', 'river', 'Berlin', 'stone'))}{number}x{n}" for n in range(40)]
            is_refused = number % size.refused_every == size.refused_every - 1
            ending, data = ("refused.txt" if is_refused else "txt"), " ".join(words).encode()
            data += f" {MARKER}".encode() if is_refused else b""
        path = folder / f"{number:04d}.{ending}"
        path.write_bytes(data)
        if ending != "txt":
            bad.add(path.name)
    return bad


# Output -----------------------------------------------------------------------------------------------------------


def as_json(result: Result) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "counts": result.counts,
        "breaches": breaches_as_json(result.breaches),
        "goals": goals_as_json(result.goals),
    }


def as_text(result: Result) -> str:
    size = result.size
    lines = [f"chaos of documents: {size.items} documents, {size.workers} workers", f"seed {result.seed}", ""]
    lines += [f"  {name:<36}{value:>10,}" for name, value in result.counts.items()]
    return "\n".join([*lines, "", *goals_as_text(result.goals), *breaches_as_text(result.breaches)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.documents", description="Chaos for documents.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="leave the database and the workers' logs behind")
    parser.add_argument("--quiet", action="store_true", help="do not tell what the monkey does")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--short", action="store_true", help="fewer documents, as in `make test`")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(words: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {words}\n")

    say(f"seed {arguments.seed}, pid {os.getpid()}")
    result = asyncio.run(run(SHORT if arguments.short else LONG, arguments.seed, keep=arguments.keep, say=say))
    sys.stdout.write((orjson.dumps(as_json(result)).decode() if arguments.json else as_text(result)) + "\n")
    return 0 if all(goal.met for goal in result.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
