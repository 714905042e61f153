"""One round of the failover chaos: a batch and jobs run, commits are held back, the server dies, work continues."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

from batchwright.simulator import Remote, running_process
from batchwright.states import BatchStatus
from tests.chaos.batch_client import Found, Workload, workload
from tests.chaos.batch_fleet import Fleet, Span, Victim
from tests.chaos.failover_stage import MACHINES, Feed, Shared, StoreKind, User, machines, store
from tests.chaos.failover_verdict import Evidence, Known, judge, losses, read_journals, read_known
from tests.chaos.history import read_history
from tests.chaos.replicas import Cluster, Mode
from tests.chaos.verdict import Breach

Variant = Literal[
    "claims survive", "claims lost", "worker killed", "machine lost", "planning", "finalizing", "ended", "cancelling"
]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

_HURRY = 20
_NOTICE_SECONDS = 2.0
"""After this time, machines know which claims they have lost in a failover."""
_READY_SECONDS_MAX = 60.0

_IS_DONE = "SELECT total > 0 AND completed + failed >= %(share)s * total FROM batchwright.batch"
_REGISTERED = "SELECT count(*) >= 3 FROM batchwright.batch_segment WHERE registered_at > %(held)s"
_CLAIMED = """
SELECT EXISTS (
    SELECT FROM batchwright.job_event JOIN batchwright.job ON job.id = job_event.job_id
    JOIN batchwright.batch_segment ON batch_segment.shard = (job.payload ->> 'number')::integer
        AND batch_segment.claim = job_event.claim
    WHERE job.job_type = 'batch.shard' AND job_event.event = 'job.started' AND job_event.ts > %(held)s)
"""
_FINALIZED = "SELECT status IN ('finalizing', 'completed') AND finalizing_at > %(held)s FROM batchwright.batch"
_ENDED = "SELECT status = 'completed' AND completed_at > %(held)s FROM batchwright.batch"
_CANCELLED = """
SELECT coalesce(cancelling_at BETWEEN %(held)s AND clock_timestamp() - interval '1 s', false) FROM batchwright.batch
"""
_LOST: Mapping[Variant, str] = {
    "claims lost": _CLAIMED,
    "finalizing": _FINALIZED,
    "ended": _ENDED,
    "cancelling": _CANCELLED,
}
"""Commits that must happen while they are held back, so that the failover loses them."""
_IS_IDLE = "SELECT NOT EXISTS (SELECT FROM batchwright.job WHERE finished_at IS NULL OR locked_by IS NOT NULL)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the batch, the speed of its server, and how much is lost."""

    requests: int
    models: Sequence[str]
    checkpoint_seconds: float
    in_flight: int
    """Maximum number of requests in flight of one machine."""
    lease_seconds: float
    tokens_per_second: float
    """Duration of one request until the failover is over; after that the batch may end quickly."""
    held_seconds: Span
    """How long commits are held back before the server is killed."""
    away_seconds: Span
    """How long no server is available after that."""
    seconds_max: float
    """How long each part of a round may take."""

    @property
    def outage_seconds_max(self) -> float:
        return self.held_seconds[1] + self.away_seconds[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """The mode and variant of a round."""

    mode: Mode
    variant: Variant
    store: StoreKind = "folder"

    def __str__(self) -> str:
        return f"{self.mode}, {self.variant}" + (", s3" if self.store == "s3" else "")

    @property
    def is_lossless(self) -> bool:
        """Whether every confirmed commit survives the failover."""
        return self.mode == "synchronous"

    @property
    def kills(self) -> bool:
        return self.variant in ("worker killed", "machine lost")

    @property
    def wanted(self) -> BatchStatus:
        return BatchStatus.CANCELLED if self.variant == "cancelling" else BatchStatus.COMPLETED


@dataclass(slots=True)
class Round:
    """A round and its results."""

    plan: Plan
    counts: dict[str, int | float | str] = field(default_factory=dict)
    breaches: dict[str, list[Breach]] = field(default_factory=dict)


async def play(size: Size, plan: Plan, seed: str, folder: Path, say: Callable[[str], None]) -> Round:
    """The whole round in this folder."""
    models = [word for model in size.models for word in ("--model", f"{model}:fast")]
    pace = ["--decode", str(size.tokens_per_second), "--max-running", "1000"]
    (folder / "servers").mkdir()
    with (
        running_process(*models, *pace) as simulator,
        store(plan.store, folder) as (storage_url, environment),
        Cluster(folder / "servers", plan.mode) as cluster,
    ):
        shared = Shared(
            database_url=cluster.url,
            gateway_url=simulator.url,
            storage_url=storage_url,
            environment=environment,
            checkpoint_seconds=size.checkpoint_seconds,
            in_flight=size.in_flight,
            # While commits are held back, none is confirmed in synchronous mode; a lease must last longer than that.
            lease_seconds=size.lease_seconds + (size.outage_seconds_max if plan.is_lossless else 0.0),
        )
        fleet = machines(folder, shared)
        with patch.dict(os.environ, environment):  # this process uses the store too
            async with User.at(folder / MACHINES[0] / "batchwright.toml") as user:
                return await _Play(size, plan, seed, folder, say, cluster, fleet, user, simulator).run()


class _Play:
    """A round and its processes."""

    def __init__(
        self,
        size: Size,
        plan: Plan,
        seed: str,
        folder: Path,
        say: Callable[[str], None],
        cluster: Cluster,
        fleet: Fleet,
        user: User,
        simulator: Remote,
    ) -> None:
        self._size = size
        self._plan = plan
        self._folder = folder
        self._say = say
        self._cluster = cluster
        self._fleet = fleet
        self._user = user
        self._simulator = simulator
        self._random = random.Random(f"failover {seed}")
        self._feed = Feed(user)
        self._before = Known()
        self._request: asyncio.Task[None] | None = None
        self._missed: list[Breach] = []
        self._unregistered = 0
        """Number of answers since the last registration that is safe."""
        self._outage: Span = (0.0, 0.0)

    async def run(self) -> Round:
        work = workload(self._size.requests, self._random.randrange(1_000_000), self._size.models)
        try:
            if self._plan.variant == "claims lost":
                await self._user.pause(self._size.models[-1])
            if self._plan.variant != "planning":
                self._fleet.start()
            await self._user.submit(work, self._folder)
            async with self._feed.running():
                await self._lose_commits()
                await self._reach("the end of the batch", self._user.ended())
            await self._reach("the end of all jobs", self._user.until(_IS_IDLE))
        finally:
            await self._fleet.close()
        return await self._verdict(work)

    async def _reach(self, what: str, moment: Coroutine[Any, Any, object]) -> None:
        """Wait for an event; if it does not happen, that is a breach, because the round has not tested its case."""
        try:
            async with asyncio.timeout(self._size.seconds_max):
                await moment
        except TimeoutError:
            self._missed.append((str(self._plan), f"did not come to {what} within {self._size.seconds_max:g} s"))

    # Failover ---------------------------------------------------------------------------------------------------

    async def _lose_commits(self) -> None:
        registered = await self._hold()
        began = time.time()
        self._before = await asyncio.to_thread(read_known, self._cluster.primary.url)
        if self._plan.kills:
            self._kill_a_worker()
        away = await asyncio.to_thread(self._cluster.fail_over, self._random.uniform(*self._size.away_seconds))
        self._outage = (began, time.time())
        self._say(f"the server was killed, and writes are possible again after {away:.1f} s")
        if self._request is not None:
            await self._request
            await self._ask()  # a commit that the old server confirmed may be lost; a user would notice and repeat it
        await asyncio.sleep(_NOTICE_SECONDS)
        self._unregistered = int(self._simulator.stats()["answered"].get("200", 0)) - registered
        self._hurry()

    def _hurry(self) -> None:
        for model in self._size.models:
            self._simulator.change(model, decode_rate=_HURRY * self._size.tokens_per_second)

    async def _hold(self) -> int:
        """Hold commits back for the chosen time, and until the commits that the failover must lose have happened.

        Returns how many answers of the batch are registered and safe.
        """
        plan, size = self._plan, self._size
        if plan.variant != "planning":
            share = 0.85 if plan.variant == "finalizing" else 0.2
            await self._reach("its first answers", self._user.until(_IS_DONE, share=share))
            await self._reach("the start of its machines", self._fleet.ready())
        async with self._feed.between_calls:
            await asyncio.to_thread(self._cluster.catch_up)
            await asyncio.to_thread(self._cluster.hold)
            self._feed.ledger.held_at = time.time()
        sql = "SELECT clock_timestamp(), completed FROM batchwright.batch"
        ((held, registered),) = await self._user.answered(lambda: self._user.batchwright.pool.rows(sql))
        until = time.monotonic() + self._random.uniform(*size.held_seconds)
        self._say(f"commits are held back; {registered} answers are registered")
        if plan.variant == "planning":
            self._fleet.start()
        if plan.variant == "ended":
            self._hurry()
        if plan.variant in ("cancelling", "claims lost"):
            self._request = asyncio.create_task(self._ask())  # not confirmed if commits are synchronous
        if not plan.is_lossless:
            await self._reach("what is to be lost", self._user.until(_LOST.get(plan.variant, _REGISTERED), held=held))
        if plan.variant != "finalizing":
            await asyncio.sleep(until - time.monotonic())
        return int(registered)

    async def _ask(self) -> None:
        """The user's action in this round, which the failover undoes."""
        if self._plan.variant == "cancelling":
            await self._user.cancel()
        else:
            await self._user.resume(self._size.models[-1])

    def _kill_a_worker(self) -> None:
        """The one with the most answers."""
        victim = max(self._fleet.awake("worker"), key=self._journaled_bytes)
        self._fleet.kill(victim, for_good=self._plan.variant == "machine lost")
        self._say(f"SIGKILL {MACHINES[victim.place]}")

    def _journaled_bytes(self, victim: Victim) -> int:
        folder = self._folder / MACHINES[victim.place] / "work" / self._user.batch_id
        return sum(path.stat().st_size for path in folder.glob("*.seg"))

    # Verdict ----------------------------------------------------------------------------------------------------

    async def _verdict(self, work: Workload) -> Round:
        evidence = await self._evidence(work)
        lost = losses(evidence, self._hosts())
        sent = self._resent(lost)
        breaches = {
            "rounds that have shown nothing": self._missed + self._nothing_lost(lost),
            **judge(evidence, wanted=self._plan.wanted, is_lossless=self._plan.is_lossless),
            "requests resent without need": [
                (n, "beyond those in flight, or lost") for n in range(sent["requests resent"] - sent["at most"])
            ],
            "processes that ended by themselves": [
                (MACHINES[one.place], f"exit code {one.process.returncode}")
                for one in self._fleet.deserters([self._outage])
            ],
        }
        counts = {
            "PostgreSQL": self._cluster.version,
            "status": str(evidence.row["status"]),
            "lines": len(work.requests),
            "answers lost from the files": len(breaches["answers lost from the files"]),
            **sent,
            **lost,
            "outage, seconds": round(self._outage[1] - self._outage[0], 1),
        }
        return Round(self._plan, counts, breaches)

    async def _evidence(self, work: Workload) -> Evidence:
        user, url = self._user, self._cluster.primary.url
        batch = await user.batch()
        works = {name: self._folder / name / "work" for name in MACHINES}
        return Evidence(
            requests=work.requests,
            found=Found(
                output=await user.content(batch.output_file_id), errors=await user.content(batch.error_file_id)
            ),
            row={"id": batch.id, "status": batch.status.value, "errors": batch.errors},
            findings=await user.findings(batch) if batch.manifest else [],
            journaled=await asyncio.to_thread(read_journals, works, batch.id),
            history=await asyncio.to_thread(read_history, url),
            ledger=self._feed.ledger,
            before=self._before,
            after=await asyncio.to_thread(read_known, url),
        )

    def _hosts(self) -> dict[str, str]:
        """Machines by the names of their work folders."""
        ids = {name: self._folder / name / "work" / "id" for name in MACHINES}
        return {path.read_text(): name for name, path in ids.items() if path.exists()}

    def _resent(self, lost: Mapping[str, int]) -> dict[str, int]:
        """Requests in flight may be resent, and so may those whose registration was lost, or is still missing.

        But not if the worker that has the answers is alive and still has its claims.
        """
        plan = self._plan
        are_kept = plan.is_lossless or (plan.variant == "claims survive" and not lost["of these of shards"])
        stats = self._simulator.stats()
        repeated = self._simulator.asked(by="request_id")["repeated"] - stats["faults"].get("500", 0)
        return {
            "requests resent": max(0, repeated),  # a cancelled batch does not retry what failed
            "at most": stats["in_flight_max"] + (0 if are_kept and not plan.kills else self._unregistered),
        }

    def _nothing_lost(self, lost: Mapping[str, int]) -> list[Breach]:
        if self._plan.is_lossless or lost["segments lost"]:
            return []
        return [(str(self._plan), "lost no answer of the batch from the database")]
