"""The worker: claims what it has room for, runs it, settles it, and gives everything back when it must stop.

claim ──▶ start ──▶ perform ──▶ conclude ──▶ settle ──▶ forget
                      ▲
    interrupt ────────┘   cancelled · lost · timeout · stop
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import random
import socket
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from uuid import UUID

import orjson

from windlass.db.database import Blocking, Pool, complete
from windlass.db.doorbell import Doorbell, listen
from windlass.engine import policy
from windlass.engine.catalog import Catalog
from windlass.engine.context import Child, Context, Joined
from windlass.engine.jobs import Claim, Done, JobId, Settle, Snooze, Wait
from windlass.engine.lanes import Lanes
from windlass.engine.lease import Key, Lease
from windlass.engine.operation import Operation, Operations
from windlass.engine.outbox import Outbox
from windlass.engine.outcomes import checked
from windlass.engine.processes import ChildProgram, Died, Processes
from windlass.engine.queue import EngineSettings, Queue
from windlass.engine.settler import Settler
from windlass.engine.upkeep import Round, Upkeep
from windlass.errors import ConfigurationError, DatabaseError, DatabaseUnavailable, Fatal, Fenced, Transient
from windlass.states import JobStatus

log = logging.getLogger(__name__)

T = TypeVar("T")
_WRITE_SECONDS_MAX = 5.0
_GIVE_BACK_SECONDS_MAX = 600.0
_REPEATABLE = frozenset({"40001", "40P01"})

Reason = Literal["cancelled", "lost", "timeout", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How much a worker process does at once, and how patient it is."""

    concurrency: int = 20
    """Jobs that one process runs at the same time."""
    queues: tuple[str, ...] | None = None
    """Queues to serve; unset, all of them."""
    queue_limits: Mapping[str, int] = field(default_factory=dict)
    """Jobs of one queue that one process runs at the same time."""
    processes_max: int = 0
    """Processes for `cpu=True` operations; 0 means one per core."""
    poll_seconds_min: float = 0.05
    """The safety poller's pace while work is flowing."""
    poll_seconds_max: float = 2.0
    """The safety poller's pace when idle; jobs are found after this time even if no doorbell rang."""
    run_background_poller: bool = True
    """Whether `windlass up` runs a worker at all."""
    stop_grace_seconds: float = 25.0
    """After SIGTERM, running jobs may go on so long; then they are given back."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}; it must be at least 1")
        if not 0 < self.poll_seconds_min <= self.poll_seconds_max <= 10:
            raise ConfigurationError("poll_seconds_min and poll_seconds_max must rise from above 0 to at most 10")


@dataclass(slots=True, eq=False)
class _Running:
    """A claim together with what runs for it."""

    claim: Claim
    operation: Operation
    context: Context | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    kill: Callable[[], None] | None = None
    reason: Reason | None = None
    settling: bool = False


@dataclass(slots=True)
class Counts:
    """What this process has done; metrics read it."""

    claimed: int = 0
    settled: int = 0
    fenced: int = 0
    leases_lost: int = 0
    interrupted: int = 0
    rescued: int = 0
    poisoned: int = 0


def worker_id() -> str:
    """Pod or host, process, and a boot id, because names and pids are reused."""
    host = os.environ.get("HOSTNAME") or socket.gethostname()
    return f"{host}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


class Worker:
    """Runs operations as durable jobs until `stop()`."""

    def __init__(
        self,
        pool: Pool,
        operations: Operations,
        *,
        settings: WorkerSettings | None = None,
        engine: EngineSettings | None = None,
        queue: Queue | None = None,
        child: ChildProgram | None = None,
        revive: Callable[[], object] | None = None,
        rounds: Sequence[Round] = (),
        services: Callable[[type[Any]], Any] | None = None,
        version: str = "0",
    ) -> None:
        self.id = worker_id()
        self.settings = settings or WorkerSettings()
        self.queue = queue or Queue(pool, engine)
        self.catalog = Catalog(self.queue, operations)
        self.counts = Counts()
        self.doorbell = Doorbell(pool)
        self.lease: Lease | None = None
        self.started = asyncio.Event()
        self._pool = pool
        self._operations = operations
        self._revive = revive
        self._services = services
        self._version = version
        self._held: dict[Key, _Running] = {}
        self._per_queue: Counter[str] = Counter()
        self._claims_under_way = 0
        self._claim_generation = 0
        self._freed_keys: set[tuple[str, str]] = set()
        self._has_backlog = False
        self._lanes = Lanes(self.settings.queues, self.settings.queue_limits)
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self._stopping = asyncio.Event()
        self._outbox = Outbox(self.queue, self.id)
        self._settler = Settler(self.queue, self.id, self._settled)
        self._threads = ThreadPoolExecutor(self.settings.concurrency, thread_name_prefix="windlass-operation")
        self._processes = Processes(child, self.settings.processes_max or os.cpu_count() or 1)
        self._upkeep = Upkeep(self.queue, self._processes, operations, self.counts, rounds)

    # Life -------------------------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Work until `stop()`; answers False when threads of operations would not end."""
        await self.register()
        self._outbox.start()
        lease = self.lease = self._start_lease()
        helpers = [
            asyncio.create_task(listen(self._pool.settings, self._pool.url, self._rung)),
            asyncio.create_task(self._upkeep.run()),
        ]
        claiming = asyncio.create_task(self._claim_until_stopped())
        self.started.set()
        log.info("worker %s runs %s", self.id, ", ".join(sorted(self._operations.names())) or "no operations")
        try:
            await _first(claiming, *helpers)
        finally:
            self._stopping.set()
            await _cancel(*helpers, claiming)
            clean = await self._wind_down(lease)
        return clean

    async def register(self) -> None:
        """Make this worker and its operations known; an enqueue elsewhere is checked against them."""
        names = self._operations.names()
        operations = [self._operations.get(name) for name in names]
        published = [
            {
                "name": operation.name,
                "payload_schema": operation.payload_schema,
                "defaults": operation.defaults(),
                "description": operation.description,
            }
            for operation in operations
            if operation is not None
        ]
        await self.queue.publish_operations(published, self.id)
        await self.queue.register_worker(**self._columns())

    def _columns(self) -> dict[str, Any]:
        host, pid, _ = self.id.rsplit(":", 2)
        queues = list(self.settings.queues) if self.settings.queues is not None else None
        return {
            "id": self.id,
            "host": host,
            "pid": int(pid),
            "version": self._version,
            "queues": queues,
            "operations": self._operations.names(),
            "concurrency": self.settings.concurrency,
        }

    def stop(self) -> None:
        """Claim nothing more; running jobs get the grace, then they are given back."""
        self._stopping.set()
        self._wake.set()
        for running in self._held.values():
            if running.context is not None:
                running.context.stopping = True

    async def run_once(self, *, limit: int | None = None) -> int:
        """Claim one round, run it to its end and settle it; answers how many jobs that were."""
        self._outbox.start()
        self._lanes.scan_soon()
        claimed = await self._claim(min(limit or self.settings.concurrency, self._free()))
        await self._emptied_out()
        await self.doorbell.close()
        return claimed

    async def run_job(self, id: JobId, *, suspect: bool = False) -> bool:
        """Claim one given job and run it to its end; False when the claim was refused and nothing ran."""
        self._outbox.start()
        claimed = await self._claim_one(id, suspect=suspect)
        await self._emptied_out()
        return claimed

    async def run_alone(self, id: JobId, on_claim: Callable[[Claim], None]) -> None:
        """Claim one suspect job and run it, with a lease of its own, until it ends or `stop()` is called."""
        self._outbox.start()
        lease = self._start_lease()
        try:
            if await self._claim_one(id, suspect=True, on_claim=on_claim):
                ended, stopped = map(asyncio.create_task, (self._emptied_out(), self._stopping.wait()))
                await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
        finally:
            await self._wind_down(lease)
            await self._give_back()

    async def _give_back(self) -> None:
        """Release what the database says that we hold, although we stopped it or never heard of it.

        Left to the rescue it would count as a death, and a job that runs alone is parked for that.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_SECONDS_MAX):
                held = await self._insist(lambda: self.queue.holdings(self.id))
                left = [key for key, status in held.items() if status is JobStatus.RUNNING]
                await self._insist(lambda: self.queue.release(left, self.id, "the database was away"))

    async def close(self) -> None:
        """End the helpers of a worker that was used by `run_once` and `run_job`."""
        await self._settler.idle()
        await self._processes.close()
        self._threads.shutdown(wait=False)

    async def _emptied_out(self) -> None:
        while self._held:
            self._emptied.clear()
            await self._emptied.wait()
        await self._settler.idle()

    async def _wind_down(self, lease: Lease) -> bool:
        """Let jobs end within the grace, interrupt the rest, and release what is left as the last act."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._emptied_out(), self.settings.stop_grace_seconds)
        for running in list(self._held.values()):
            self._interrupt(running, "stop")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._emptied_out(), 2.0)
        await asyncio.to_thread(lease.close)
        left = list(self._held)
        with contextlib.suppress(DatabaseError):
            await self.queue.release(left, self.id, "the worker stopped")
            await self.queue.remove_worker(self.id)
        await self._processes.close()
        await self.doorbell.close()
        self._threads.shutdown(wait=False)
        return not left

    def _start_lease(self) -> Lease:
        loop = asyncio.get_running_loop()
        database = Blocking(self._pool.settings, self._pool.url)

        def beat(queue: Queue) -> None:
            alive = queue.heartbeat(self.id, running=len(self._held), stopping=self._stopping.is_set())
            if not complete(alive):
                complete(queue.register_worker(**self._columns()))

        lease = Lease(
            Queue(database, self.queue.settings),
            self.id,
            held=lambda: list(self._held),
            claims_under_way=lambda: (self._claims_under_way, self._claim_generation),
            on_news=lambda news: _discard(loop.call_soon_threadsafe(self._heard, news)),
            beat=beat,
            close_database=database.close,
            revive=self._revive,
        )
        lease.start()
        return lease

    # Claim ------------------------------------------------------------------------------------------------------

    async def _claim_until_stopped(self) -> None:
        pause = self.settings.poll_seconds_min
        while not self._stopping.is_set():
            self._wake.clear()
            claimed, wanted = 0, self._free()
            try:
                if wanted:
                    claimed = await self._claim(wanted)
            except DatabaseUnavailable as error:
                self._outage(error)
            except DatabaseError:
                log.exception("claiming failed")
            if claimed == 0 or claimed < wanted:
                pause = self.settings.poll_seconds_min if claimed else min(self.settings.poll_seconds_max, pause * 2)
                await self._rest(pause)
            elif not self._free():
                await self._rest(self.settings.poll_seconds_max)

    async def _rest(self, seconds: float) -> None:
        """Until something happens that makes a claim worth while, but never longer than the poller allows."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.75, 1.0)):  # noqa: S311
                await self._wake.wait()

    def _outage(self, error: DatabaseUnavailable) -> None:
        log.warning("the database is away: %s", error)
        self._upkeep.reconnected()
        self._lanes.scan_soon()

    def _free(self) -> int:
        return self.settings.concurrency - len(self._held)

    async def _claim(self, slots: int) -> int:
        """One round: with the full scan also look which queues exist and which are paused."""
        began = time.monotonic()
        if self._lanes.scan_is_due:
            self._lanes.know(await self.queue.queues())
        lanes = self._lanes.open(slots, self._per_queue)
        if not lanes:
            return 0
        freed, self._freed_keys = self._freed_keys, set()
        try:
            with self._claim_under_way():
                claimed = await self.queue.claim(self.id, lanes, self._types(), slots, freed_keys=freed)
                for claim in claimed.jobs:
                    self._start(claim)
        except BaseException:
            self._freed_keys |= freed
            raise
        if claimed.without_keys:
            self._freed_keys |= freed
        self._lanes.move_on(lanes, claimed, slots, time.monotonic() - began)
        self._has_backlog = len(claimed.jobs) == slots
        self.counts.claimed += len(claimed.jobs)
        return len(claimed.jobs)

    @contextlib.contextmanager
    def _claim_under_way(self) -> Iterator[None]:
        """Until what was claimed is also started, the lease thread must not take it for forgotten."""
        self._claims_under_way += 1
        try:
            yield
        finally:
            self._claims_under_way -= 1
            self._claim_generation += 1

    async def _claim_one(self, id: JobId, *, suspect: bool, on_claim: Callable[[Claim], None] | None = None) -> bool:
        with self._claim_under_way():
            claim = await self.queue.claim_job(self.id, id, self._operations.names(), suspect=suspect)
            if claim is None:
                return False
            if on_claim is not None:
                on_claim(claim)
            self._start(claim)
            return True

    def _types(self) -> list[str]:
        """Operations that could start now: those for processes only while one is free."""
        names = self._operations.names()
        if self._processes.free > 0:
            return names
        return [name for name in names if (known := self._operations.get(name)) and known.kind != "process"]

    def _rung(self, queue: str) -> None:
        if self._lanes.serves(queue):
            self._wake.set()

    # Run --------------------------------------------------------------------------------------------------------

    def _start(self, claim: Claim) -> None:
        operation = self._operations.get(claim.job_type)
        assert operation is not None, "claim takes known types only"
        running = _Running(claim, operation)
        self._held[(claim.id, claim.claim)] = running
        self._per_queue[claim.queue] += 1
        loop = asyncio.get_running_loop()
        running.task = loop.create_task(self._run(running))
        if operation.timeout_seconds is not None:
            running.timer = loop.call_later(operation.timeout_seconds, self._interrupt, running, "timeout")

    async def _run(self, running: _Running) -> None:
        """One job from start to settle. If we fail ourselves, the job is let fall, and a rescue will find it."""
        try:
            settle = await self._perform_and_conclude(running)
            if settle is None:
                self._forget(running)
            else:
                running.settling = True
                await self._flush(running)
                self._settler.submit(settle)
        except BaseException:
            self._forget(running)
            log.exception("job %s could not be settled; its lease will run out", running.claim.id)

    async def _perform_and_conclude(self, running: _Running) -> Settle | None:
        """Whatever the operation does, exactly one of these paths is taken."""
        try:
            outcome = await self._perform(running)
            if running.reason is not None and running.reason != "timeout":
                return await self._give_up(running)
            running.settling = True
            return await self._conclude(running, outcome)
        except asyncio.CancelledError:
            return await self._give_up(running)
        except Died as death:
            return await self._mourn(running, death)
        except _WriteFailed as failed:
            return self._react(running, failed.error)
        except BaseException as error:  # an operation may even raise SystemExit; the worker goes on
            if running.reason is not None:  # it turned our interruption into an error of its own
                return await self._give_up(running)
            return self._react(running, error)

    async def _perform(self, running: _Running) -> Any:
        operation, claim = running.operation, running.claim
        context = running.context = Context(claim, self._outbox, services=self._services)
        context.stopping = self._stopping.is_set()
        if claim.waits:
            context.joined = await self._joined(claim, operation.kind)
        arguments = operation.arguments(claim.payload)
        if operation.takes_context:
            arguments = {"ctx": context, **arguments}
        match operation.kind:
            case "async":
                return await operation.function(**arguments)
            case "thread":
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, _call, operation.function, arguments)
            case "process":
                return await self._processes.perform(operation, claim, context, running)

    async def _conclude(self, running: _Running, outcome: Any) -> Settle | None:
        """Turn what the operation returned into a settle; None when it was settled here, alone."""
        claim = running.claim
        outcome = checked(outcome)
        match outcome:
            case Done(write=None, then=()):
                return policy.succeed(claim, outcome)
            case Done(then=then, write=write):
                settle = policy.succeed(claim, outcome)
                rows = await self.catalog.prepare(then, before=claim)
                bounded = None if write is None else functools.partial(_bounded, write)
                await self._flush(running)
                await self._settle_alone(
                    claim, lambda: self.queue.succeed_with(settle, self.id, write=bounded, then=rows), rows
                )
            case Snooze():
                return policy.snooze(claim, outcome)
            case Wait(children=children):
                if outcome.result is not None:
                    outcome = dataclasses.replace(outcome, result=orjson.Fragment(policy.storable(outcome.result)))
                rows = await self.catalog.prepare(children, parent=claim)
                await self._flush(running)
                await self._settle_alone(claim, lambda: self.queue.wait(claim, self.id, outcome, rows), rows)
        return None

    async def _settle_alone(
        self, claim: Claim, settle: Callable[[], Coroutine[Any, Any, None]], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Send until the database has answered; after a doubtful commit, a fence means that it had happened."""
        doubtful = False
        while True:
            try:
                await settle()
            except DatabaseUnavailable as error:
                doubtful = True
                log.warning("settling job %s must be repeated: %s", claim.id, error)
                await asyncio.sleep(random.uniform(0.05, 0.5))  # noqa: S311
            except Fenced:
                self._account(claim, False, not doubtful)
                return
            else:
                self._account(claim, True, False)
                self.doorbell.ring({row["queue"] for row in rows})
                return

    def _react(self, running: _Running, error: BaseException) -> Settle:
        try:
            settle = policy.react(running.claim, running.operation, error)
        except Exception as problem:  # its text or its delay cannot be read; the job must end all the same
            untold = Fatal(
                f"an error of type {type(error).__name__} that cannot be told: {problem!r}", code="unexpected"
            )
            settle = policy.react(running.claim, running.operation, untold)
        if settle.verb == "fail":
            log.warning(
                "job %s (%s) failed: %s",
                running.claim.id,
                running.claim.job_type,
                settle.values["error"]["message"],
            )
        return settle

    async def _give_up(self, running: _Running) -> Settle | None:
        """The operation was interrupted, or ended although it should have been."""
        self.counts.interrupted += 1
        match running.reason:
            case "timeout":
                seconds = running.operation.timeout_seconds
                return self._react(running, Transient(f"no answer within {seconds:g} seconds", code="timeout"))
            case "stop":
                return Settle("release", running.claim, {"reason": "the worker stopped"})
            case "cancelled":
                await self._insist(lambda: self.queue.let_go([(running.claim.id, running.claim.claim)]))
                self._note_freed_key(running.claim)
                return None
            case "lost":
                return None
            case None if running.task is not None and running.task.cancelling():  # the loop itself is closing
                return Settle("release", running.claim, {"reason": "the worker stopped"})
            case None:
                return self._react(running, Fatal("the operation cancelled itself", code="unexpected"))

    async def _mourn(self, running: _Running, death: Died) -> Settle | None:
        """The process of a cpu operation has died: like a worker's death, it is a rescue."""
        if running.reason is not None:
            return await self._give_up(running)
        log.warning("the process that ran job %s died: %s", running.claim.id, death)
        rescued = await self._insist(lambda: self.queue.rescue(dead=[(running.claim.id, running.claim.claim)], limit=1))
        self.counts.rescued += len(rescued)
        return None

    def _interrupt(self, running: _Running, reason: Reason) -> None:
        if running.settling or running.reason is not None:
            return
        running.reason = reason
        if running.context is not None:
            running.context.cancelled = True
        if running.kill is not None:
            running.kill()
        elif running.operation.kind == "async" and running.task is not None:
            running.task.cancel()

    def _heard(self, news: Mapping[Key, JobStatus | None]) -> None:
        """The lease thread says: these were cancelled or expired, those (None) are not ours any more."""
        for key, status in news.items():
            running = self._held.get(key)
            if running is not None and not running.settling and running.reason is None:
                if status is None:
                    self.counts.leases_lost += 1
                    log.warning("job %s was lost: another claim may have it", running.claim.id)
                self._interrupt(running, "lost" if status is None else "cancelled")

    # Afterwards -------------------------------------------------------------------------------------------------

    def _settled(self, claim: Claim, moved: bool, is_fenced: bool) -> None:
        self._account(claim, moved, is_fenced)
        running = self._held.get((claim.id, claim.claim))
        if running is not None:
            self._forget(running)

    def _account(self, claim: Claim, moved: bool, is_fenced: bool) -> None:
        if moved:
            self.counts.settled += 1
        elif is_fenced:
            self.counts.fenced += 1
            log.warning(
                "job %s: the result of claim %d was refused, a newer claim or a human has it",
                claim.id,
                claim.claim,
            )
        self._note_freed_key(claim)

    def _note_freed_key(self, claim: Claim) -> None:
        if claim.exclusive_key is not None:
            self._freed_keys.add((claim.tenant, claim.exclusive_key))

    def _forget(self, running: _Running) -> None:
        claim = running.claim
        if running.timer is not None:
            running.timer.cancel()
        if self._held.pop((claim.id, claim.claim), None) is not None:
            self._per_queue[claim.queue] -= 1
        if self._has_backlog or self._freed_keys:
            self._wake.set()
        if not self._held:
            self._emptied.set()

    async def _flush(self, running: _Running) -> None:
        if self._outbox.has(running.claim):
            await self._insist(self._outbox.flush)

    async def _joined(self, claim: Claim, kind: str) -> Joined:
        counts = await self._insist(lambda: self.queue.joined(claim.id, claim.waits))

        async def fetch(after: UUID) -> list[Child]:
            rows = await self._insist(lambda: self.queue.children_after(claim.id, claim.waits, after))
            return [Child(row[0], row[1], JobStatus(row[2]), *row[3:]) for row in rows]

        loop = asyncio.get_running_loop()

        def fetch_from_thread(after: UUID) -> list[Child]:
            return asyncio.run_coroutine_threadsafe(fetch(after), loop).result()

        return Joined(claim.waits, *counts, fetch=fetch_from_thread if kind == "thread" else fetch)

    async def _insist(self, action: Callable[[], Awaitable[T]]) -> T:
        """Repeat something harmless until the database answers."""
        while True:
            try:
                return await action()
            except DatabaseUnavailable:
                await asyncio.sleep(random.uniform(0.1, 0.5))  # noqa: S311


class _WriteFailed(Exception):
    """What `write` raised is the operation's own error, whatever its class says to our database layer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _bounded(write: Callable[[Any], Awaitable[None]], connection: Any) -> None:
    """Only a connection of ours that broke, or a deadlock, makes the commit worth repeating."""
    try:
        async with asyncio.timeout(_WRITE_SECONDS_MAX):
            await write(connection)
    except Exception as error:
        if getattr(connection, "closed", False) or getattr(error, "sqlstate", None) in _REPEATABLE:
            raise
        raise _WriteFailed(error) from error


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """In a thread; a future cannot carry StopIteration, so it goes as what Python itself makes of it."""
    try:
        return function(**arguments)
    except StopIteration as error:
        raise RuntimeError("the operation raised StopIteration") from error


def _discard(_: object) -> None:
    pass


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Until one of them ends; an error in any of them is ours."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
