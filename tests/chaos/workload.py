"""Jobs of every kind, enqueued and cancelled while processes are killed; the ledger records what was confirmed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from batchwright import AsyncBatchwright, Conflict, JobId, NewJob, OnHeld
from batchwright.errors import DatabaseUnavailable
from tests.chaos.operations import BULK

T = TypeVar("T")
_ANSWER_SECONDS_MAX = 90.0
_BACKLOG_MAX = 50
"""Feeding pauses at this number of due jobs, about what the workers run at once: rescued jobs must not wait."""
_KEYS = 8
_RECENT_MAX = 300
_TENANTS = ("ada", "bob", "default")
_WAVE_SECONDS = 0.25
_UNSUCCESSFUL = """
SELECT id FROM batchwright.job
WHERE (id = ANY(%(ids)s) OR parent_job_id = ANY(%(ids)s)) AND status IN ('FAILED', 'CANCELLED')
ORDER BY id
"""


@dataclass(slots=True)
class Ledger:
    """What the harness requested and what was confirmed; the database must agree with all of it."""

    enqueued: set[JobId] = field(default_factory=set)
    cancelled: set[JobId] = field(default_factory=set)
    idempotent: dict[str, set[JobId]] = field(default_factory=dict)
    poisons: set[JobId] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    """Calls that were repeated because the database was unavailable."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much work there is."""

    bulk_children: int
    bulk_times: int
    jobs_per_second: float
    poisons: int
    pace: float = 1.0
    """Factor on the duration of jobs and on the time to deadlines."""


class Workload:
    """Feeds the queue until it is stopped, without building up a long backlog."""

    def __init__(self, batchwright: AsyncBatchwright, size: Size, seed: int) -> None:
        self.ledger = Ledger()
        self._batchwright = batchwright
        self._size = size
        self._random = random.Random(f"workload {seed}")
        self._recent: list[JobId] = []
        self._keys: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def feed(self, seconds: float) -> None:
        """Enqueue waves of mixed jobs for this time; returns when every call was answered."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        events = self._schedule(seconds)
        while (now := loop.time() - began) < seconds:
            while events and events[0][0] <= now:
                self._spawn(self._put([events.pop(0)[1]], keep_cancellation=False))
            if await self._backlog() < _BACKLOG_MAX and len(self._tasks) < 200:
                self._wave()
            await asyncio.sleep(_WAVE_SECONDS)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def rerun(self) -> None:
        """Rerun a job that failed or was cancelled, or such a child; a parent that waits for it must count again."""
        rows = await self._answered(lambda: self._batchwright.pool.rows(_UNSUCCESSFUL, {"ids": self._recent}))
        if rows:
            id = JobId(self._random.choice(rows)[0])
            with contextlib.suppress(Conflict):  # it is being interrupted, or its parent no longer waits
                await self._answered(lambda: self._batchwright.rerun(id))
                self.ledger.asked["accepted reruns"] += 1

    def _schedule(self, seconds: float) -> list[tuple[float, NewJob]]:
        """The few large and the few poison jobs, spread over the run."""
        size = self._size
        bulk = NewJobs.parent(width=size.bulk_children, seconds=0.005, priority=BULK, on_join="resume")
        when = [(seconds * 0.75 * n / size.bulk_times, bulk()) for n in range(size.bulk_times)]
        when += [(1.0 + seconds * 0.6 * n / size.poisons, NewJob("chaos.poison")) for n in range(size.poisons)]
        self.ledger.poisons.update(job.id for _, job in when if job.operation == "chaos.poison")
        return sorted(when, key=lambda event: event[0])

    def _wave(self) -> None:
        count = max(1, round(self._size.jobs_per_second * _WAVE_SECONDS * self._random.uniform(0.5, 1.5)))
        kinds = self._random.choices(list(_MIX), weights=list(_MIX.values()), k=count)
        together = [self._placed(_MAKERS[kind](self._random)) for kind in kinds if kind in _MAKERS]
        if together:
            self._spawn(self._put(together))
        for kind in kinds:
            if kind == "keyed":
                self._spawn(self._put([self._placed(self._keyed())]))
            elif kind == "idempotent":
                self._spawn(self._put_idempotent())
            elif kind == "cancel":
                self._spawn(self._cancel())
            elif kind == "rerun":
                self._spawn(self.rerun())
        self.ledger.asked.update(kinds)

    def _placed(self, job: NewJob) -> NewJob:
        """A job of a random tenant, with the durations of this run."""
        payload = dict(job.payload)
        if "seconds" in payload:
            payload["seconds"] *= self._size.pace
        deadline = job.deadline * self._size.pace if isinstance(job.deadline, timedelta) else None
        return dataclasses.replace(job, payload=payload, deadline=deadline, tenant=self._random.choice(_TENANTS))

    def _keyed(self) -> NewJob:
        policy = self._random.choice(list(OnHeld))
        payload = {"seconds": self._random.uniform(0.0, 0.4), "snoozes": self._random.random() < 0.2}
        key = ["chaos", self._random.randrange(_KEYS)]
        return NewJob("chaos.keyed", payload, exclusive_key=key, on_held=policy)

    async def _put(self, jobs: Sequence[NewJob], *, keep_cancellation: bool = True) -> None:
        try:
            ids = await self._answered(lambda: self._batchwright.enqueue(jobs))
        except Conflict:
            self.ledger.asked["refused: key is held"] += 1
            return
        self.ledger.enqueued.update(ids)
        if keep_cancellation:
            self._recent = [*self._recent, *ids][-_RECENT_MAX:]

    async def _put_idempotent(self) -> None:
        """Enqueue the same key repeatedly, at once and later: it must always be the same job."""
        if not self._keys or self._random.random() < 0.4:
            self._keys.append(f"key-{len(self._keys)}")
        key = self._random.choice(self._keys[-20:])
        calls = [
            self._answered(
                lambda: self._batchwright.enqueue("chaos.write", {"seconds": 0.05}, idempotency_key=key, priority=4)
            )
            for _ in range(self._random.choice((1, 1, 3)))
        ]
        ids = set(await asyncio.gather(*calls))
        self.ledger.idempotent.setdefault(key, set()).update(ids)
        self.ledger.enqueued.update(ids)

    async def _cancel(self) -> None:
        """A job that is probably still open; sometimes one of its children instead."""
        if not self._recent:
            return
        id = self._random.choice(self._recent[-60:])
        if self._random.random() < 0.3:
            sql = "SELECT id FROM batchwright.job WHERE parent_job_id = %(id)s AND finished_at IS NULL LIMIT 1"
            rows = await self._answered(lambda: self._batchwright.pool.rows(sql, {"id": id}))
            id = JobId(rows[0][0]) if rows else id
        self.ledger.cancelled.add(id)
        await self._answered(lambda: self._batchwright.cancel(id))

    async def _backlog(self) -> int:
        """Number of due jobs, without those that are meant to wait."""
        sql = "SELECT count(*) FROM batchwright.job WHERE status = 'QUEUED' AND run_after <= now() AND priority < 8"
        ((count,),) = await self._answered(lambda: self._batchwright.pool.rows(sql))
        return int(count)

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat the same call until the database has answered; that must always be safe."""
        async with asyncio.timeout(_ANSWER_SECONDS_MAX):
            while True:
                try:
                    return await call()
                except DatabaseUnavailable:
                    self.ledger.repeated += 1
                    await asyncio.sleep(0.1)

    def _spawn(self, call: Any) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        task.result()


class NewJobs:
    """Functions that create a random job of each kind."""

    @staticmethod
    def parent(**options: Any) -> Callable[[], NewJob]:
        extra = {name: options.pop(name) for name in ("priority", "deadline") if name in options}
        return lambda: NewJob("chaos.parent", options, **extra)

    @staticmethod
    def chain(random: random.Random) -> NewJob:
        name = str(UUID(int=random.getrandbits(128)))
        steps = random.randint(2, 5)
        return NewJob("chaos.chain", {"chain": name, "step": 1, "steps": steps, "seconds": random.uniform(0, 0.2)})

    @staticmethod
    def family(random: random.Random) -> NewJob:
        failures = random.choice((0, 0, 1, 2))
        payload = {
            "width": random.randint(3, 15),
            "seconds": random.uniform(0.0, 0.3),
            "rounds": random.choice((1, 1, 2)),
            "on_join": random.choice(("close", "resume")),
            "allow_failures": random.choice((0, 1, True)),
            "failures": failures,
        }
        return NewJob("chaos.parent", payload)

    @staticmethod
    def nested(random: random.Random) -> NewJob:
        on_join = random.choice(("close", "resume"))
        return NewJob("chaos.parent", {"width": 3, "levels": 3, "on_join": on_join, "allow_failures": True})

    @staticmethod
    def overdue(random: random.Random) -> NewJob:
        """A deadline that passes while it runs, or while it waits for children that are too slow."""
        deadline = timedelta(seconds=random.uniform(0.5, 2.0))
        if random.random() < 0.5:
            return NewJob("chaos.plain", {"seconds": 4.0}, deadline=deadline)
        payload = {"width": 4, "seconds": 4.0, "on_join": random.choice(("close", "resume"))}
        return NewJob("chaos.parent", payload, deadline=deadline)


def _seconds(random: random.Random) -> float:
    """Mostly short; one in fifty lasts longer than a lease, which must then be renewed."""
    return random.uniform(3.5, 5.0) if random.random() < 0.02 else min(1.5, random.expovariate(5.0))


_MAKERS: dict[str, Callable[[random.Random], NewJob]] = {
    "plain": lambda random: NewJob("chaos.plain", {"seconds": _seconds(random)}, priority=random.randint(3, 6)),
    "once": lambda random: NewJob("chaos.once", {"seconds": _seconds(random)}),
    "thread": lambda random: NewJob("chaos.thread", {"seconds": _seconds(random)}),
    "cpu": lambda random: NewJob("chaos.cpu", {"rounds": random.randint(1, 20)}),
    "write": lambda random: NewJob("chaos.write", {"seconds": _seconds(random)}),
    "chain": NewJobs.chain,
    "snooze": lambda random: NewJob("chaos.snooze", {"times": random.randint(1, 3), "seconds": random.uniform(0, 1)}),
    "later": lambda random: NewJob("chaos.later", {"probability": 0.5}),
    "flaky": lambda random: NewJob("chaos.flaky", {"failures": random.choice((1, 1, 2, 3, 4))}),
    "family": NewJobs.family,
    "nested": NewJobs.nested,
    "overdue": NewJobs.overdue,
}

_MIX = {
    "plain": 24,
    "once": 4,
    "thread": 8,
    "cpu": 1,
    "write": 14,
    "chain": 8,
    "snooze": 7,
    "later": 4,
    "flaky": 6,
    "family": 3,
    "nested": 1,
    "overdue": 2,
    "keyed": 14,
    "idempotent": 5,
    "cancel": 4,
    "rerun": 4,
}
