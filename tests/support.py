"""Helpers that tests share: a clock that a test can move, small jobs, and a worker on the test's database."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import pytest

from batchwright import Job, NewJob
from batchwright.db.database import Database, DatabaseSettings, Pool
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.outcomes import Settle
from batchwright.engine.queue import EngineSettings, Lane, Queue
from batchwright.engine.views import JobFilter, Views
from batchwright.engine.worker.duty import Duty, Site
from batchwright.engine.worker.processes import ChildProgram
from batchwright.engine.worker.worker import Program, Worker, WorkerSettings
from batchwright.operations.decorator import operation
from batchwright.operations.registry import Registry
from batchwright.settings import Settings, settings_class
from batchwright.states import JobStatus, Lifecycle

DATABASE = DatabaseSettings(pool_size=6)
INTERRUPT_SECONDS_MAX = 2.0
"""The longest time from a cancel to the interruption of the operation, as docs/operations.md promises."""


def make_settings(**tables: Any) -> Settings:
    """Settings from ready-made tables; no file and no environment variable is read."""
    return settings_class()(**tables)


def allows(lifecycle: Lifecycle, source: StrEnum, target: StrEnum) -> bool:
    return any((move.source, move.target) == (source, target) for move in lifecycle.moves)


def verbs(lifecycle: Lifecycle) -> list[str]:
    return list(dict.fromkeys(move.verb for move in lifecycle.moves))


def let_children_hear_signals() -> None:
    """Let processes that tests start receive the signals that this process ignores.

    A shell makes its background processes ignore SIGINT, and their children inherit that. Children do not inherit a
    handler. So a handler that does nothing keeps ignoring the signal in this process only.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def sparsely(points: Sequence[Any], every: int) -> list[Any]:
    """Parameters of which `make test` takes every n-th one (`every`), and `make test-thorough` the others."""
    return [
        point
        if number % every == 0
        else pytest.param(*(point if isinstance(point, tuple) else (point,)), marks=pytest.mark.thorough)
        for number, point in enumerate(points)
    ]


class Clock:
    """The server's clock until the first `advance`; from then on, time stands still between calls of `advance`."""

    def __init__(self) -> None:
        self.time: datetime | None = None

    def __call__(self) -> datetime | None:
        return self.time

    async def advance(self, queue: Queue, seconds: float) -> datetime:
        if self.time is None:
            ((self.time,),) = await queue.database.rows("SELECT now()")
        assert self.time is not None
        self.time += timedelta(seconds=seconds)
        return self.time


@operation("noop")
async def noop(n: int = 0, note: str | None = None) -> int:
    return n


@operation("other")
async def other(n: int = 0) -> int:
    return n


BASIC = Registry([noop, other])


async def put(queue: Queue, *jobs: NewJob, operations: Registry = BASIC, **options: Any) -> list[JobId]:
    """Enqueue jobs; with none given, one `noop` with these options."""
    new = list(jobs) or [NewJob("noop", **options)]
    rows = await Catalog(queue.database, operations).prepare(new)
    return [enqueued.id for enqueued in await queue.enqueue(rows)]


async def put_one(queue: Queue, **options: Any) -> JobId:
    (id,) = await put(queue, **options)
    return id


async def take(
    queue: Queue, slots: int = 100, *, worker: str = "w1", queues: Sequence[str] = ("default",), **options: Any
) -> list[Claim]:
    """Claim what is due, over all priorities and without watermarks."""
    lanes = [Lane(name, priority, slots) for priority in range(10) for name in queues]
    claimed = await queue.claim(worker, lanes, options.pop("types", BASIC.names()), slots, **options)
    return claimed.jobs


async def take_one(queue: Queue, **options: Any) -> Claim:
    (claim,) = await take(queue, **options)
    return claim


async def succeed(queue: Queue, claim: Claim, result: Any = None, *, worker: str = "w1") -> bool:
    values = {"result": result, "progress_current": None, "progress_total": None}
    return claim.id in await queue.settle([Settle("succeed", claim, values)], worker)


async def fail(queue: Queue, claim: Claim, *, worker: str = "w1", code: str = "broken") -> bool:
    error = {"kind": "fatal", "code": code, "type": "Fatal", "message": "it broke"}
    return claim.id in await queue.settle([Settle("fail", claim, {"error": error})], worker)


async def snooze(queue: Queue, claim: Claim, seconds: float = 0.0, *, worker: str = "w1") -> bool:
    values = {"delay_seconds": seconds, "reason": "later", "error_kind": None}
    return claim.id in await queue.settle([Settle("snooze", claim, values)], worker)


async def emit(queue: Queue, claim: Claim, n: int = 1, **event: Any) -> None:
    """Events of a running job, as its worker would write them."""
    common = {"id": claim.id, "claim": claim.claim, "event": "step", "level": "info", "worker": "w1", **event}
    await queue.emit([{**common, "place": place} for place in range(n)])


async def event_names(queue: Queue, id: JobId) -> list[str]:
    return [event.event for event in await queue.events(id)]


async def listed(queue: Queue, *, status: JobStatus | None = None, limit: int = 50, **wanted: Any) -> list[Job]:
    """The newest jobs that match."""
    statuses = (status,) if status else ()
    return (await Views(queue).page(JobFilter(statuses=statuses, **wanted), limit=limit)).jobs


async def raw(queue: Queue, sql: str, **params: Any) -> list[Any]:
    """Run SQL of the test itself, to read what the verbs do not show, or to damage rows on purpose."""
    return await queue.database.rows(sql, params or None)


@contextlib.asynccontextmanager
async def working(
    pool: Pool,
    *functions: Callable[..., Any],
    queue: Queue | None = None,
    engine: EngineSettings | None = None,
    child: ChildProgram | None = None,
    revive: Callable[[], object] | None = None,
    **settings: Any,
) -> AsyncIterator[Worker]:
    """A worker that runs in the background until the block ends."""
    import asyncio

    worker = make_worker(pool, *functions, queue=queue, engine=engine, child=child, revive=revive, **settings)
    running = asyncio.create_task(worker.run())
    await asyncio.wait([running, asyncio.create_task(worker.started.wait())], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield worker
    finally:
        worker.stop()
        await running


def make_worker(
    pool: Pool,
    *functions: Callable[..., Any],
    queue: Queue | None = None,
    engine: EngineSettings | None = None,
    child: ChildProgram | None = None,
    revive: Callable[[], object] | None = None,
    **settings: Any,
) -> Worker:
    """A worker for `run_once()` and `run_job`; close it afterwards."""
    quick = dataclasses.replace(WorkerSettings(stop_grace_seconds=2.0), **settings)
    registry = Registry(functions or [noop, other])
    queue = queue or Queue(Database(pool), engine)
    return Worker(pool, registry, program=Program(child=child, revive=revive), queue=queue, settings=quick)


async def run_job(worker: Worker, id: JobId) -> bool:
    """Let the worker claim this job and run it to its end; False if the claim was refused and nothing ran."""
    worker._runner.open()
    asked = time.monotonic()
    claim = await worker.queue.claim_job(worker.id, id, worker._operations.names())
    has_started = claim is not None and worker._start([claim], asked)
    await worker._runner.wait_until_empty()
    return has_started


class OneDuty:
    """A part whose only content is this duty of a worker."""

    metrics = ()

    def __init__(self, **duty: Any) -> None:
        self._duty = Duty(**duty)

    def label_limits(self) -> dict[str, Any]:
        return {}

    def work(self, site: Site) -> Duty:
        return self._duty


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Check that the block takes no longer, not counting the time for which the machine was too busy to run us."""
    import asyncio

    late = 0.0

    async def measure() -> None:
        nonlocal late
        while True:
            asked = time.monotonic()
            await asyncio.sleep(0.02)
            late += time.monotonic() - asked - 0.02

    measuring = asyncio.create_task(measure())
    began = time.monotonic()
    try:
        async with asyncio.timeout(30):
            yield
    finally:
        took = time.monotonic() - began
        measuring.cancel()
    assert took - late <= seconds, f"it took {took:.2f} s, of which the machine was busy for {late:.2f} s"


async def finished(queue: Queue, id: JobId) -> Job:
    """Wait until the job has ended, by polling, bounded by the test's timeout."""
    import asyncio

    while (job := await queue.get(id)).finished_at is None:
        await asyncio.sleep(0.01)
    return job
