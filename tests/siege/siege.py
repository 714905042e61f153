"""A siege of the HTTP server: attackers do everything at once, beside an honest client.

python -m tests.siege.siege [--json] [--keep] [--quiet] [--short]

attackers ─ 30 MB bodies without a key · 60 MB of headers · half-sent requests   ─▶ ┌─────┐
          ├ event streams of one key · slow uploads · hostile content types      ─▶ │ API │ ─ worker ─▶ simulator
          └ thousands of requests on one connection · answers that nobody reads  ─▶ │     │
honest    ─ jobs · batches · /healthz on new connections                         ─▶ └─────┘
memory of the server, times of the honest client, its jobs and batches ──▶ goals

Everything stays on the loopback interface and ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil

from batchwright.app import AsyncBatchwright
from batchwright.db.embedded import EmbeddedPostgres
from batchwright.settings import load_settings
from batchwright.simulator import running_process
from tests.chaos.batch_fleet import Fleet, Post, free_port
from tests.chaos.monkey import environment
from tests.chaos.queue import Goal, breaches_as_json, breaches_as_text, goals_as_json, goals_as_text
from tests.chaos.recovery import percentile
from tests.chaos.verdict import Breach
from tests.siege.attackers import Orders, as_line
from tests.siege.honest import MODEL, Honest

MEGABYTE = 1024 * 1024
_READY_SECONDS_MAX = 60.0
_SAMPLE_SECONDS = 0.1
_END_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The duration and size of a siege, and its goals."""

    seconds: float
    warm_seconds: float
    """How long the honest client works alone before the attack."""
    bodies: int
    headers: int
    halves: int
    streams: int
    streams_per_key_max: int
    slow: int
    hostile: int
    piles: int
    lines: int
    """The number of lines of a batch."""
    p99_seconds: float = 1.0
    health_seconds: float = 0.5
    grown_megabytes: float = 100.0


LONG = Size(
    seconds=60.0,
    warm_seconds=8.0,
    bodies=6,
    headers=3,
    halves=3_000,
    streams=2_000,
    streams_per_key_max=500,
    slow=50,
    hostile=3,
    piles=6,
    lines=200,
)
SHORT = Size(
    seconds=4.0,
    warm_seconds=1.0,
    bodies=2,
    headers=1,
    halves=300,
    streams=100,
    streams_per_key_max=50,
    slow=5,
    hostile=1,
    piles=3,
    lines=20,
    # In its short form, other tests run at the same time on the same processors.
    p99_seconds=5.0,
    health_seconds=5.0,
)


@dataclass(slots=True)
class Run:
    """What happened in a siege, and its results."""

    size: Size
    counts: dict[str, int | float] = field(default_factory=dict)
    attacks: dict[str, int] = field(default_factory=dict)
    breaches: dict[str, list[Breach]] = field(default_factory=dict)
    p99_seconds: float | None = None
    health_seconds: float | None = None
    grown_megabytes: float | None = None

    @property
    def goals(self) -> list[Goal]:
        size = self.size
        return [
            Goal("memory of the server has grown by, MB", size.grown_megabytes, self.grown_megabytes),
            Goal("p99 of the honest client's calls, seconds", size.p99_seconds, self.p99_seconds),
            Goal("/healthz at worst, seconds", size.health_seconds, self.health_seconds),
            *(Goal(name, 0, len(found)) for name, found in self.breaches.items()),
        ]


async def run(size: Size, *, keep: bool = False, say: Callable[[str], None] = lambda _: None) -> Run:
    """The whole siege, on a separate PostgreSQL that is removed afterwards."""
    folder = Path(tempfile.gettempdir()) / f"batchwright-siege-{os.getpid()}"
    logs = Path(tempfile.mkdtemp(prefix="batchwright-siege-logs-"))
    result = Run(size)
    try:
        with running_process("--model", f"{MODEL}:fast") as simulator, EmbeddedPostgres(folder) as postgres:
            port = free_port()
            config = _configured(folder, simulator.url, port, size)
            keys, job = await _prepare(config)
            fleet = Fleet(_posts(config), postgres.root, logs)
            fleet.start()
            try:
                await asyncio.wait_for(fleet.ready(), _READY_SECONDS_MAX)
                await _besiege(result, fleet, port, keys, job, say)
            finally:
                await fleet.close()
    finally:
        if keep:
            say(f"kept: {folder} and {logs}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(logs, ignore_errors=True)
    return result


def _configured(folder: Path, gateway: str, port: int, size: Size) -> Path:
    path = folder / "siege.toml"
    path.write_text(
        f"""
        [database]
        folder = "{folder}"
        [api]
        port = {port}
        streams_per_key_max = {size.streams_per_key_max}
        [global_inference_gateway]
        url = "{gateway}"
        """
    )
    return path


def _posts(config: Path) -> list[Post]:
    given = ("--config", str(config))
    return [
        Post(kind="worker", command=("batchwright", "worker", "tests.siege.operations", *given)),
        Post(kind="api", command=("tests.chaos.api", *given)),
    ]


async def _prepare(config: Path) -> tuple[tuple[str, str], str]:
    """Create the schema, keys for the honest client and for the attackers, and a job that waits for ever."""
    from tests.siege.operations import echo

    settings = load_settings(environment={}, file=config)
    async with AsyncBatchwright(settings=settings, operations=[echo]) as batchwright:
        await batchwright.migrate()
        keys = [await batchwright.keys.create(name) for name in ("honest", "stolen")]
        job = await batchwright.enqueue("siege.echo", {"value": 0}, delay_seconds=86_400)
        return (keys[0].secret, keys[1].secret), str(job)


async def _besiege(
    result: Run, fleet: Fleet, port: int, keys: tuple[str, str], job: str, say: Callable[[str], None]
) -> None:
    size = result.size
    (server,) = fleet.awake("api")
    memory = Memory(server.process.pid)
    honest = Honest(f"http://127.0.0.1:{port}", keys[0], lines=size.lines)
    working = asyncio.create_task(honest.run())
    watching = asyncio.create_task(memory.watch())
    try:
        await asyncio.wait_for(honest.is_warm.wait(), _END_SECONDS_MAX)
        await asyncio.sleep(size.warm_seconds)
        result.counts |= {
            "before: p99 of calls, seconds": round(percentile(honest.seconds, 0.99) or 0, 3),
            "before: /healthz at worst, seconds": round(max(honest.health_seconds), 3),
            "before: memory of the server, MB": round(memory.now / MEGABYTE, 1),
            "load before": round(os.getloadavg()[0], 1),
        }
        honest.begin_counting()
        before, memory.most = memory.now, 0
        say("the strangers come")
        result.attacks = await _attack(_orders(size, port, keys[1], job))
        say("the strangers are gone")
        result.p99_seconds = percentile(honest.seconds, 0.99)
        result.health_seconds = max(honest.health_seconds, default=None)
        result.grown_megabytes = (memory.most - before) / MEGABYTE
        result.counts |= {
            "calls of the honest client": len(honest.seconds),
            "median of its calls, seconds": round(percentile(honest.seconds, 0.5) or 0, 3),
            "health checks": len(honest.health_seconds),
            "p99 of health checks, seconds": round(percentile(honest.health_seconds, 0.99) or 0, 3),
            "load after": round(os.getloadavg()[0], 1),
        }
        honest.leave()
        await asyncio.wait_for(working, _END_SECONDS_MAX)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    result.counts |= dict(honest.done)
    result.breaches = {
        "jobs, batches and calls disturbed": honest.breaches,
        "processes that ended by themselves": [
            (f"{one.kind} {one.process.pid}", f"exit code {one.process.returncode}")
            for one in fleet.deserters([(0, time.time())])
        ],
    }


def _orders(size: Size, port: int, key: str, job: str) -> Orders:
    return Orders(
        port=port,
        seconds=size.seconds,
        key=key,
        job=job,
        bodies=size.bodies,
        body_bytes=30 * MEGABYTE,
        headers=size.headers,
        header_bytes=60 * MEGABYTE,
        halves=size.halves,
        streams=size.streams,
        slow=size.slow,
        hostile=size.hostile,
        piles=size.piles,
    )


async def _attack(orders: Orders) -> dict[str, int]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.siege.attackers"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(as_line(orders))
        await process.stdin.drain()
        seen = await asyncio.wait_for(process.stdout.read(), orders.seconds + _END_SECONDS_MAX)
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found: dict[str, int] = orjson.loads(seen)
    return found


class Memory:
    """The resident memory of a process, and its maximum."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.most = 0

    @property
    def now(self) -> int:
        return int(self._process.memory_info().rss)

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, self.now)
            await asyncio.sleep(_SAMPLE_SECONDS)


# Output -----------------------------------------------------------------------------------------------------------


def as_json(result: Run) -> dict[str, Any]:
    return {
        "seconds": result.size.seconds,
        "counts": result.counts,
        "attacks": result.attacks,
        "breaches": breaches_as_json(result.breaches),
        "goals": goals_as_json(result.goals),
    }


def as_text(result: Run) -> str:
    lines = [f"siege of the HTTP server: {result.size.seconds:g} s", ""]
    lines += [f"  {name:<48}{value:>14,}" for name, value in {**result.counts, **result.attacks}.items()]
    return "\n".join([*lines, "", *goals_as_text(result.goals), *breaches_as_text(result.breaches)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.siege.siege", description="Strangers beside an honest client.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="leave the database and the logs behind")
    parser.add_argument("--quiet", action="store_true", help="do not tell what happens")
    parser.add_argument("--short", action="store_true", help="smaller and shorter, as in `make test`")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(words: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {words}\n")

    result = asyncio.run(run(SHORT if arguments.short else LONG, keep=arguments.keep, say=say))
    sys.stdout.write((orjson.dumps(as_json(result)).decode() if arguments.json else as_text(result)) + "\n")
    return 0 if all(goal.met for goal in result.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
