"""The command line that every contestant of the queue benchmark answers to.

    python -m benchmarks.peers.pgqueuer describe
    python -m benchmarks.peers.pgqueuer migrate --url URL --variant NAME
    python -m benchmarks.peers.pgqueuer history --url URL --variant NAME --jobs N   finished rows
    python -m benchmarks.peers.pgqueuer enqueue --url URL --variant NAME --jobs N
    python -m benchmarks.peers.pgqueuer latency --url URL --variant NAME --jobs N   one at a time
    python -m benchmarks.peers.pgqueuer work    --url URL --variant NAME            until SIGTERM

Every command but `work` prints one JSON object.
"""

import argparse
import asyncio
import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from importlib import metadata
from typing import Any, ClassVar

Payload = Mapping[str, Any]
Send = Callable[[list[Payload]], Awaitable[None]]

BATCH_JOBS = 1000
GAP_SECONDS_MEAN = 0.2
GAP_SECONDS_MAX = 2.0
QUEUE = "bench"


class Peer(ABC):
    """A contestant. `variants` are the settings it is tried with; the first is the one of --quick."""

    jobs: ClassVar[int]
    jobs_quick: ClassVar[int]
    name: ClassVar[str]
    package: ClassVar[str]
    processes: ClassVar[int] = 2
    settings: ClassVar[str]
    variants: ClassVar[dict[str, dict[str, Any]]]

    @abstractmethod
    async def migrate(self, url: str, options: dict[str, Any]) -> None:
        """Creates the tables in an empty database."""

    @abstractmethod
    def producer(self, url: str, options: dict[str, Any]) -> AbstractAsyncContextManager[Send]:
        """An open connection whose value enqueues a list of payloads with the best bulk call there is."""

    @abstractmethod
    def work(self, url: str, options: dict[str, Any]) -> None:
        """One worker process; returns on SIGTERM."""

    @abstractmethod
    def unfinished(self, options: dict[str, Any]) -> str:
        """SQL for the number of jobs that are not settled."""

    def history(self, jobs: int, options: dict[str, Any]) -> list[str]:
        """SQL that creates the rows that `jobs` finished jobs leave; empty if the contestant keeps none.

        Real runs would take an hour for the slow ones. Triggers and foreign keys may be switched off for the
        session, which ends with the last statement.
        """
        raise NotImplementedError(f"{self.name} has no history statements")


def main(peer: Peer) -> None:
    parser = argparse.ArgumentParser(prog=f"benchmarks.peers.{peer.name.lower()}")
    parser.add_argument("command", choices=["describe", "migrate", "history", "enqueue", "latency", "work"])
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--url", default="")
    parser.add_argument("--variant", default=next(iter(peer.variants)), choices=list(peer.variants))
    arguments = parser.parse_args()
    options = peer.variants[arguments.variant]
    match arguments.command:
        case "describe":
            answer = describe(peer)
        case "migrate":
            answer = asyncio.run(migrate(peer, arguments.url, options))
        case "history":
            answer = history(peer, arguments.url, options, arguments.jobs)
        case "enqueue":
            answer = asyncio.run(enqueue(peer, arguments.url, options, arguments.jobs))
        case "latency":
            answer = asyncio.run(trickle(peer, arguments.url, options, arguments.jobs))
        case _:
            peer.work(arguments.url, options)
            return
    print(json.dumps(answer), flush=True)


def describe(peer: Peer) -> dict[str, Any]:
    try:
        version = metadata.version(peer.package)
    except metadata.PackageNotFoundError:
        return {"name": peer.name, "unavailable": f"{peer.package} is not installed"}
    return {
        "jobs": peer.jobs,
        "jobs_quick": peer.jobs_quick,
        "name": peer.name,
        "package": peer.package,
        "processes": peer.processes,
        "settings": " ".join(peer.settings.split()),
        "unfinished": {variant: peer.unfinished(options) for variant, options in peer.variants.items()},
        "variants": list(peer.variants),
        "version": version,
    }


async def migrate(peer: Peer, url: str, options: dict[str, Any]) -> dict[str, Any]:
    await peer.migrate(url, options)
    return {}


def history(peer: Peer, url: str, options: dict[str, Any], jobs: int) -> dict[str, Any]:
    import psycopg

    statements = peer.history(jobs, options)
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)
    return {"jobs": jobs if statements else 0}


async def enqueue(peer: Peer, url: str, options: dict[str, Any], jobs: int) -> dict[str, Any]:
    async with peer.producer(url, options) as send:
        cpu_before, before = time.process_time(), time.perf_counter()
        for batch in batches(jobs):
            await send(batch)
        seconds, cpu_seconds = time.perf_counter() - before, time.process_time() - cpu_before
    return {"jobs": jobs, "seconds": seconds, "cpu_seconds": cpu_seconds}


def batches(jobs: int) -> Iterator[list[Payload]]:
    for first in range(0, jobs, BATCH_JOBS):
        yield [{"n": number} for number in range(first, min(first + BATCH_JOBS, jobs))]


async def trickle(peer: Peer, url: str, options: dict[str, Any], jobs: int) -> dict[str, Any]:
    """Single jobs after random gaps; the gaps are short and long, so that pollers that slow down show it."""
    async with peer.producer(url, options) as send:
        for _ in range(jobs):
            await asyncio.sleep(min(random.expovariate(1 / GAP_SECONDS_MEAN), GAP_SECONDS_MAX))
            await send([{"at": time.time()}])
    return {"jobs": jobs}
