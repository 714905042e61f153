"""Chaos of links: a batch on two hosts, one of which loses its network in the middle.

python -m tests.chaos.hosts [--variant V] [--requests N] [--lease S] [--cut S] [--seed N] [--keep]

                hub: PostgreSQL, S3, simulated model server (it counts), user
                   │ link                     ✂ link
                machine-a: worker          machine-b: worker       a work folder for each
files, rows, journals ──▶ judge ──▶ goals

Hosts are network namespaces, so it needs root, Linux and `ip`. It exits with 0 if all goals are met.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

from batchwright.batches.journal.journal import scan, valid_end
from batchwright.simulator import Remote, running_process
from batchwright.states import BatchStatus
from tests.chaos.batch_client import Found, Workload, workload
from tests.chaos.batch_fleet import Fleet
from tests.chaos.failover_stage import MACHINES, Feed, Shared, User, machines, store
from tests.chaos.failover_verdict import Evidence, Known, judge, read_journals, read_known
from tests.chaos.history import History, read_history
from tests.chaos.hosts_stage import Host, Network, address, enter_hub, hosts
from tests.chaos.queue import Goal, breaches_as_text, goals_as_text
from tests.chaos.replicas import Cluster, temporary_folder
from tests.chaos.verdict import Breach

Variant = Literal["link", "link, for good", "way to the database", "way to the services"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
_CUT: dict[Variant, Sequence[Network]] = {
    "link": ("database", "services"),
    "link, for good": ("database", "services"),
    "way to the database": ("database",),
    "way to the services": ("services",),
}
_MODEL = "large"
"""Only one: a worker claims a shard of each model at once, and of one model as many as it can send."""
_TOKENS_MEAN = 20
"""Length of an answer; see `workload`."""
_IN_HUB = "--in-hub"

_BOTH_SEND = """
SELECT count(DISTINCT host) = 2 AND sum(lines) >= %(lines)s FROM batchwright.batch_segment WHERE lines > 0
"""
_IS_BACK = """
SELECT EXISTS (
    SELECT FROM batchwright.job_event
    WHERE event = 'job.started' AND worker LIKE %(host)s || ':%%' AND ts > to_timestamp(%(since)s))
"""
_IS_IDLE = "SELECT NOT EXISTS (SELECT FROM batchwright.job WHERE finished_at IS NULL OR locked_by IS NOT NULL)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the batch, the speed of its server, and how long a link is down."""

    requests: int = 3_000
    checkpoint_seconds: float = 0.5
    in_flight: int = 48
    """Maximum number of requests in flight of one host."""
    lease_seconds: float = 5.0
    """Long enough that on a busy machine the host that is not cut off keeps its leases."""
    tokens_per_second: float = 80.0
    """Of one request."""
    cut_seconds: float = 9.0
    seconds_max: float = 60.0
    """How long each part of a run may take."""

    @property
    def alone_seconds(self) -> float:
        """Seconds that one host needs for the whole batch, if it is never idle."""
        return self.requests * _TOKENS_MEAN / self.tokens_per_second / self.in_flight


@dataclass(slots=True)
class Run:
    """A run and its results."""

    variant: Variant
    seed: int
    size: Size
    counts: dict[str, int | float | str] = field(default_factory=dict)
    breaches: dict[str, list[Breach]] = field(default_factory=dict)
    timed: list[Goal] = field(default_factory=list)

    @property
    def goals(self) -> list[Goal]:
        return [*(Goal(name, 0, len(found)) for name, found in self.breaches.items()), *self.timed]


async def run(size: Size, variant: Variant, seed: int, folder: Path, say: Callable[[str], None]) -> Run:
    """The whole run in this folder; this process is in the hub."""
    (folder / "servers").mkdir()
    with contextlib.ExitStack() as stack:
        linked = stack.enter_context(hosts(MACHINES))
        # The server is not killed here, so it does not matter that commits do not wait for the disk in this mode.
        cluster = stack.enter_context(Cluster(folder / "servers", "crash", address("database")))
        simulator = stack.enter_context(_simulator(size))
        storage_url, environment = stack.enter_context(store("s3", folder, address("services")))
        shared = Shared(
            database_url=cluster.url,
            gateway_url=simulator.url,
            storage_url=storage_url,
            environment=environment,
            checkpoint_seconds=size.checkpoint_seconds,
            in_flight=size.in_flight,
            lease_seconds=size.lease_seconds,
        )
        fleet = machines(folder, shared, {name: host.launcher for name, host in linked.items()})
        stack.enter_context(patch.dict(os.environ, environment))  # this process uses the store too
        async with User.at(folder / MACHINES[0] / "batchwright.toml") as user:
            play = _Play(Run(variant, seed, size), folder, say, linked, cluster.url, fleet, user, simulator)
            return await play.run()


@contextlib.contextmanager
def _simulator(size: Size) -> Iterator[Remote]:
    pace = ("--decode", str(size.tokens_per_second), "--decode-total", "0", "--max-running", "1000")
    with running_process("--model", f"{_MODEL}:fast", *pace, "--host", address("services")) as simulator:
        yield simulator


class _Play:
    """A run and its processes."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        say: Callable[[str], None],
        linked: dict[str, Host],
        database_url: str,
        fleet: Fleet,
        user: User,
        simulator: Remote,
    ) -> None:
        self._run = run
        self._size = run.size
        self._folder = folder
        self._say = say
        self._url = database_url
        self._fleet = fleet
        self._user = user
        self._simulator = simulator
        self._feed = Feed(user)
        self._random = random.Random(f"hosts {run.seed}")
        self._name = self._random.choice(MACHINES)
        """The name of the host whose link is cut."""
        self._host = linked[self._name]
        self._missed: list[Breach] = []
        self._known = Known()
        """The state of the database when the link had been down for longer than a lease."""
        self._last_answer_at = 0.0
        self._unregistered = 0
        self._cut_at = self._mended_at = self._ended_at = 0.0

    async def run(self) -> Run:
        work = workload(self._size.requests, self._random.randrange(1_000_000), [_MODEL])
        self._fleet.start()
        try:
            await self._reach("the start of its hosts", self._fleet.ready())
            await self._user.submit(work, self._folder)
            async with self._feed.running():
                both_send = self._user.until(_BOTH_SEND, lines=self._size.requests // 8)
                await self._reach("answers from both hosts", both_send)
                if not self._missed:
                    await self._cut()
                await self._reach("the end of the batch", self._user.ended())
                self._ended_at = time.time()
                self._say("the batch has ended")
                await self._reach("work on the host that is back", self._returned())
            await self._reach("the end of all jobs", self._user.until(_IS_IDLE))
        finally:
            if not self._mended_at:
                self._lose_host()
            await self._fleet.close()
        await self._judge(work)
        return self._run

    async def _reach(self, what: str, moment: Coroutine[Any, Any, object]) -> None:
        """Wait for an event; if it does not happen, that is a breach."""
        try:
            async with asyncio.timeout(self._size.seconds_max):
                await moment
        except TimeoutError:
            self._missed.append((self._run.variant, f"did not come to {what} within {self._size.seconds_max:g} s"))

    async def _cut(self) -> None:
        networks = _CUT[self._run.variant]
        batch = await self._user.batch()
        self._run.counts["lines done before the cut"] = batch.completed
        self._cut_at = time.time()
        self._host.cut(*networks)
        self._say(f"{self._name} is cut off from {' and '.join(networks)}")
        await asyncio.sleep(self._size.cut_seconds)
        self._known = await asyncio.to_thread(read_known, self._url)
        journals = self._work(self._name) / self._user.batch_id
        self._unregistered = unregistered(journals, self._known)
        self._last_answer_at = max(path.stat().st_mtime for path in journals.glob("*.seg"))
        if self._run.variant != "link, for good":
            self._host.mend(*networks)
            self._mended_at = time.time()
            self._say(f"{self._name} is linked again")

    def _lose_host(self) -> None:
        """Its worker cannot be asked to stop."""
        for victim in self._fleet.awake("worker"):
            if MACHINES[victim.place] == self._name:
                self._fleet.kill(victim, for_good=True)

    async def _returned(self) -> None:
        """Wait until the host claims jobs again."""
        if self._mended_at:
            await self._user.until(_IS_BACK, host=self._name, since=self._mended_at)

    def _work(self, name: str) -> Path:
        return self._folder / name / "work"

    # Verdict ----------------------------------------------------------------------------------------------------

    async def _judge(self, work: Workload) -> None:
        evidence = await self._evidence(work)
        run, size = self._run, self._size
        stats = self._simulator.stats()
        resent = self._simulator.asked(by="request_id")["repeated"] - stats["faults"].get("500", 0)
        resent_max = size.in_flight + self._unregistered
        run.breaches = {
            "moments that did not come": self._missed,
            **judge(evidence, wanted=BatchStatus.COMPLETED, is_lossless=True),
            "requests resent without need": [(n, "beyond those in flight there") for n in range(resent - resent_max)],
            "processes that ended by themselves": [
                (MACHINES[one.place], f"exit code {one.process.returncode}") for one in self._fleet.deserters([])
            ],
        }
        run.counts |= {
            "host": self._name,
            "lines": len(work.requests),
            "requests received by the model server": stats["received"],
            "requests resent": resent,
            "  at most, in flight on the host": size.in_flight,
            "  and answered there, not registered": self._unregistered,
            "jobs beside the batch": len(self._feed.ledger.enqueued),
            "shards and jobs picked up by others": len(self._rescues(evidence.history)),
            "shards and jobs that the other host lost": self._lost_elsewhere(evidence.history),
        }
        run.timed = list(self._time(evidence.history))

    def _time(self, history: History) -> Iterator[Goal]:
        size = self._size
        bound = size.alone_seconds + 2 * size.lease_seconds + 10.0
        yield Goal("from the cut to the end of the batch, seconds", bound, self._ended_at - self._cut_at)
        if "database" in _CUT[self._run.variant]:
            last = self._last_answer_at - self._cut_at
            yield Goal("from the cut to the last answer that the host took, seconds", size.lease_seconds + 1.0, last)
            rescued = max(self._rescues(history), default=None)
            yield Goal("from the cut until others pick up its work, seconds", 2 * size.lease_seconds + 2.0, rescued)
            if self._mended_at:
                starts = (one.ts for one in history.events if one.event == "job.started" and self._is_there(one.worker))
                first = min((at - self._mended_at for at in starts if at > self._mended_at), default=None)
                yield Goal("from the return of the link to the next job there, seconds", 15.0, first)

    def _rescues(self, history: History) -> list[float]:
        """When other workers got the jobs of the host that was cut off, in seconds after the cut."""
        rescues = (one for one in history.events if one.event == "job.rescued" and self._is_there(one.worker))
        return [one.ts - self._cut_at for one in rescues]

    def _lost_elsewhere(self, history: History) -> int:
        """Claims that the other host lost, because the machine was too busy to renew its leases."""
        return sum(one.event == "job.rescued" and not self._is_there(one.worker) for one in history.events)

    def _is_there(self, worker: str | None) -> bool:
        return (worker or "").startswith(f"{self._name}:")

    async def _evidence(self, work: Workload) -> Evidence:
        user = self._user
        batch = await user.batch()
        output, errors = await user.content(batch.output_file_id), await user.content(batch.error_file_id)
        works = {name: self._work(name) for name in MACHINES}
        return Evidence(
            requests=work.requests,
            found=Found(output=output, errors=errors),
            row={"id": batch.id, "status": batch.status.value, "errors": batch.errors},
            findings=await user.findings(batch) if batch.manifest else [],
            journaled=await asyncio.to_thread(read_journals, works, batch.id),
            history=await asyncio.to_thread(read_history, self._url),
            ledger=self._feed.ledger,
            before=self._known,
            after=await asyncio.to_thread(read_known, self._url),
        )


def unregistered(journals: Path, known: Known) -> int:
    """Answers in the journals of this batch's work folder that the database does not know."""
    host = (journals.parent / "id").read_text()
    ends: dict[str, int] = {}
    for one in known.segments:
        if one.host == host:
            name = f"{one.shard}.{one.claim}"
            ends[name] = max(ends.get(name, 0), one.end)
    unknown = (scan(path, ends.get(path.stem, 0), valid_end(path)) for path in journals.glob("*.seg"))
    return sum(1 for records in unknown for _ in records)


# Output -----------------------------------------------------------------------------------------------------------


def as_text(result: Run) -> str:
    size = result.size
    lines = [
        f"chaos of links: {size.requests:,} requests, 2 hosts, lease {size.lease_seconds:g} s",
        f"cut: {result.variant}, {size.cut_seconds:g} s; seed {result.seed}",
        "",
        *(f"  {name:<58}{value:>12}" for name, value in result.counts.items()),
        *breaches_as_text(result.breaches),
    ]
    return "\n".join([*lines, "", *goals_as_text(result.goals)])


def main() -> int:
    usual = Size()
    parser = argparse.ArgumentParser(prog="tests.chaos.hosts", description="Chaos of links.")
    parser.add_argument("--cut", type=float, default=usual.cut_seconds, help="seconds for which the link is down")
    parser.add_argument("--keep", action="store_true", help="leave databases, files and logs behind")
    parser.add_argument("--lease", type=float, default=usual.lease_seconds, help="engine.lease_seconds")
    parser.add_argument("--requests", type=int, default=usual.requests, help="lines of the batch")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--variant", choices=VARIANTS, default="link", help="what is cut")
    parser.add_argument(_IN_HUB, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.in_hub:
        enter_hub("tests.chaos.hosts", _IN_HUB, *sys.argv[1:])
    began = time.monotonic()

    def say(words: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {words}\n")

    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)
    size = Size(requests=arguments.requests, lease_seconds=arguments.lease, cut_seconds=arguments.cut)
    with temporary_folder(keep=arguments.keep) as folder:
        result = asyncio.run(run(size, arguments.variant, arguments.seed, folder, say))
    if arguments.keep:
        say(f"kept: {folder}")
    sys.stdout.write(as_text(result) + "\n")
    return 0 if all(goal.met for goal in result.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
