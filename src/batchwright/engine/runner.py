"""Runs claimed jobs: performs the operation, turns what it did into a settle, and interrupts it when it must.

start ──▶ perform ──▶ conclude ──▶ settle ──▶ forget
            ▲
interrupt ──┘   cancelled · lost · timeout · stop
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from uuid import UUID

import orjson

from batchwright.db.doorbell import Doorbell
from batchwright.engine import policy
from batchwright.engine.catalog import Catalog
from batchwright.engine.context import Child, Context, Joined
from batchwright.engine.counts import WorkerCounts
from batchwright.engine.jobs import Claim, Done, Settle, Snooze, Verb, Wait
from batchwright.engine.lease import Key
from batchwright.engine.operation import Operation, Operations
from batchwright.engine.outbox import Outbox
from batchwright.engine.outcomes import checked
from batchwright.engine.processes import Died, Processes
from batchwright.engine.queue import Queue
from batchwright.engine.settler import Settler
from batchwright.engine.upkeep import Wake, wake_when_due
from batchwright.errors import DatabaseUnavailable, Deadlock, Fatal, Fenced, Transient
from batchwright.states import JobStatus
from batchwright.telemetry.logs import about, job_in_hand

log = logging.getLogger(__name__)

T = TypeVar("T")
_WRITE_SECONDS_MAX = 5.0
_REPEATABLE = frozenset({"40001", "40P01"})

Reason = Literal["cancelled", "lost", "timeout", "stop"]


@dataclass(slots=True, eq=False)
class Running:
    """A claim together with what runs for it."""

    claim: Claim
    operation: Operation
    leased_until: float
    """By the monotonic clock; the lease thread moves it on."""
    context: Context | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    kill: Callable[[], object] | None = None
    reason: Reason | None = None
    ended: float | None = None
    """When the operation returned; what it raised or was interrupted by is dealt with at once."""
    settling: bool = False
    settled_by: Verb | None = None
    """The verb that was committed for it."""


class Runner:
    """The jobs in this worker's hands, from `start` until they are settled and forgotten."""

    def __init__(
        self,
        queue: Queue,
        worker: str,
        operations: Operations,
        *,
        doorbell: Doorbell,
        processes: Processes,
        threads_max: int,
        on_slot_free: Callable[[], None],
        wake: Wake,
        services: Callable[[type[Any]], Any] | None,
        counts: WorkerCounts,
    ) -> None:
        self.held: dict[Key, Running] = {}
        self.per_queue: Counter[str] = Counter()
        self.per_parent: Counter[UUID] = Counter()
        """Children in our hands, by their parent."""
        self.parents_left: bool = False
        """We hold no child of some parent any more: it may have been joined, and wait to be resumed."""
        self.freed_keys: set[tuple[str, str]] = set()
        """Exclusive keys whose job we have just settled: the next claim looks for their next jobs."""
        self.counts = counts
        self._queue = queue
        self._worker = worker
        self._operations = operations
        self._catalog = Catalog(queue, operations)
        self._doorbell = doorbell
        self._processes = processes
        self._on_slot_free = on_slot_free
        self._wake = wake
        self._services = services
        self._is_stopping = False
        self._emptied = asyncio.Event()
        self._outbox = Outbox(queue, worker)
        self._settler = Settler(queue, worker, self._settled, functools.partial(self.counts.observe, "settle_seconds"))
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="batchwright-operation")

    def open(self) -> None:
        self._outbox.start()

    def say_stopping(self) -> None:
        """Tell every operation, now and later, that the worker wants to stop."""
        self._is_stopping = True
        for running in self.held.values():
            if running.context is not None:
                running.context.stopping = True

    def interrupt_all(self, reason: Reason) -> None:
        for running in list(self.held.values()):
            self.interrupt(running, reason)

    async def emptied(self) -> None:
        """Wait until nothing runs and nothing is left to settle."""
        while self.held:
            self._emptied.clear()
            await self._emptied.wait()
        await self._settler.idle()

    async def close(self) -> None:
        await self._processes.close()
        await self._doorbell.close()
        self._threads.shutdown(wait=False)

    def start(self, claim: Claim, leased_until: float) -> None:
        operation = self._operations.get(claim.job_type)
        assert operation is not None, "claim takes known types only"
        running = Running(claim, operation, leased_until)
        if (older := self.held.get((claim.id, claim.claim))) is not None:
            self._drop(older)
        self.held[(claim.id, claim.claim)] = running
        self.per_queue[claim.queue] += 1
        if claim.parent_job_id is not None:
            self.per_parent[claim.parent_job_id] += 1
        loop = asyncio.get_running_loop()
        running.task = loop.create_task(self._run(running))
        if operation.timeout_seconds is not None:
            running.timer = loop.call_later(operation.timeout_seconds, self.interrupt, running, "timeout")

    def _drop(self, older: Running) -> None:
        """A failover has lost this claim, and the database gave us the same number once more: end the first run."""
        self.interrupt(older, "lost")
        self._forget(older.claim)

    async def _run(self, running: Running) -> None:
        """One job from start to settle. If we fail ourselves, the job is let fall, and a rescue will find it."""
        job_in_hand.set(running.claim)
        began = time.perf_counter()
        try:
            settle = await self._perform_and_conclude(running)
            self.counts.ran[running.claim.job_type].append((running.ended or time.perf_counter()) - began)
            if settle is None:
                self._forget(running.claim)
            else:
                running.settling = True
                await self._flush(running)
                self._settler.submit(settle)
        except BaseException:
            self._forget(running.claim)
            log.exception("job %s could not be settled; its lease will run out", running.claim.id)

    async def _perform_and_conclude(self, running: Running) -> Settle | None:
        """Whatever the operation does, exactly one of these paths is taken."""
        try:
            outcome = await self._perform(running)
            running.ended = time.perf_counter()
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

    async def _perform(self, running: Running) -> Any:
        operation, claim = running.operation, running.claim
        context = running.context = Context(claim, self._outbox, worker=self._worker, services=self._services)
        context.stopping = self._is_stopping
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
                call = functools.partial(contextvars.copy_context().run, _call, running, arguments)
                return await loop.run_in_executor(self._threads, call)
            case "process":
                return await self._processes.perform(operation, claim, context, running)

    async def _conclude(self, running: Running, outcome: Any) -> Settle | None:
        """Turn what the operation returned into a settle; None when it was settled here, alone."""
        claim = running.claim
        outcome = checked(outcome)
        match outcome:
            case Done(write=None, then=()):
                return policy.succeed(claim, outcome)
            case Done(then=then, write=write):
                settle = policy.succeed(claim, outcome)
                rows = await self._catalog.prepare(then, before=claim)
                bounded = None if write is None else functools.partial(_bounded, write)
                await self._flush(running)
                await self._settle_alone(
                    settle, lambda: self._queue.succeed_with(settle, self._worker, write=bounded, then=rows), rows
                )
            case Snooze():
                return policy.snooze(claim, outcome)
            case Wait(children=children):
                if outcome.result is not None:
                    outcome = dataclasses.replace(outcome, result=orjson.Fragment(policy.storable(outcome.result)))
                rows = await self._catalog.prepare(children, parent=claim)
                await self._flush(running)
                handed_over = Settle("wait", claim, {})
                await self._settle_alone(
                    handed_over, lambda: self._queue.wait(claim, self._worker, outcome, rows), rows
                )
        return None

    async def _settle_alone(
        self, settle: Settle, commit: Callable[[], Coroutine[Any, Any, None]], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Send until the database has answered; after a doubtful commit, a fence means that it had happened."""
        doubtful = False
        while True:
            began = time.perf_counter()
            try:
                await commit()
            except DatabaseUnavailable as error:
                doubtful = True
                log.warning("settling job %s must be repeated: %s", settle.claim.id, error)
                await asyncio.sleep(random.uniform(0.05, 0.5))
            except Fenced:
                self._account(settle, False, not doubtful)
                return
            else:
                self.counts.observe("settle_seconds", time.perf_counter() - began)
                self._account(settle, True, False)
                self._doorbell.ring({row["queue"] for row in rows})
                return

    def _react(self, running: Running, error: BaseException) -> Settle:
        try:
            settle = policy.react(running.claim, running.operation, error)
        except Exception as problem:  # its text or its delay cannot be read; the job must end all the same
            untold = Fatal(
                f"an error of type {type(error).__name__} that cannot be told: {problem!r}", code="unexpected"
            )
            settle = policy.react(running.claim, running.operation, untold)
        if settle.verb == "fail":
            log.warning(
                "job %s (%s) failed: %r, %s",  # what it says may quote its input, which belongs into no log
                running.claim.id,
                running.claim.job_type,
                settle.values["error"]["code"],
                settle.values["error"]["type"],
            )
        return settle

    async def _give_up(self, running: Running) -> Settle | None:
        """The operation was interrupted, or ended although it should have been."""
        self.counts.add("operations_interrupted_total", 1, (running.reason or "self",))
        match running.reason:
            case "timeout":
                seconds = running.operation.timeout_seconds
                return self._react(running, Transient(f"no answer within {seconds:g} seconds", code="timeout"))
            case "stop":
                return Settle("release", running.claim, {"reason": "the worker stopped"})
            case "cancelled":
                await insist(lambda: self._queue.let_go([(running.claim.id, running.claim.claim)]))
                self._note_freed_key(running.claim)
                return None
            case "lost":
                return None
            case None if running.task is not None and running.task.cancelling():  # the loop itself is closing
                return Settle("release", running.claim, {"reason": "the worker stopped"})
            case None:
                return self._react(running, Fatal("the operation cancelled itself", code="unexpected"))

    async def _mourn(self, running: Running, death: Died) -> Settle | None:
        """The process of a cpu operation has died: like a worker's death, it is a rescue."""
        if running.reason is not None:
            return await self._give_up(running)
        log.warning("the process that ran job %s died: %s", running.claim.id, death)
        dead = [(running.claim.id, running.claim.claim)]
        rescued = await insist(lambda: self._queue.rescue(dead=dead, limit=1))
        wake_when_due(rescued, self._wake)
        for one in rescued:
            self.counts.note(one)
        return None

    def interrupt(self, running: Running, reason: Reason) -> None:
        if running.settling or running.reason is not None:
            return
        running.reason = reason
        if running.context is not None:
            running.context.cancelled = True
        if running.kill is not None:
            running.kill()
        elif running.operation.kind == "async" and running.task is not None:
            running.task.cancel()

    def heard(self, news: Mapping[Key, JobStatus | None]) -> None:
        """The lease thread says: these were cancelled or expired, those (None) are not ours any more."""
        for key, status in news.items():
            running = self.held.get(key)
            if running is not None and not running.settling and running.reason is None:
                if status is None:
                    self.counts.add("leases_lost_total")
                    text = "job %s was lost: another claim may have it"
                    log.warning(text, running.claim.id, extra=about(running.claim))
                self.interrupt(running, "lost" if status is None else "cancelled")

    # Afterwards -------------------------------------------------------------------------------------------------

    def _settled(self, settle: Settle, moved: bool, is_fenced: bool) -> None:
        self._account(settle, moved, is_fenced)
        self._forget(settle.claim)

    def _account(self, settle: Settle, moved: bool, is_fenced: bool) -> None:
        claim = settle.claim
        if (running := self._held(claim)) is not None:
            running.settled_by = settle.verb if moved or not is_fenced else None
        if moved:
            self.counts.ended[claim.job_type, settle.verb] += 1
        elif is_fenced:
            self.counts.add("writes_fenced_total")
            log.warning(
                "job %s: the result of claim %d was refused, a newer claim or a human has it",
                claim.id,
                claim.claim,
                extra=about(claim),
            )
        self._note_freed_key(claim)

    def _note_freed_key(self, claim: Claim) -> None:
        if claim.exclusive_key is not None:
            self.freed_keys.add((claim.tenant, claim.exclusive_key))

    def _held(self, claim: Claim) -> Running | None:
        """What runs for this very claim; another one may have the same number."""
        running = self.held.get((claim.id, claim.claim))
        return running if running is not None and running.claim is claim else None

    def _forget(self, claim: Claim) -> None:
        if (running := self._held(claim)) is not None:
            del self.held[claim.id, claim.claim]
            self.per_queue[claim.queue] -= 1
            self._leave_parent(claim)
            if running.timer is not None:
                running.timer.cancel()
            if running.context is not None:
                running.context.settled(running.settled_by)
        self._on_slot_free()
        if not self.held:
            self._emptied.set()

    def _leave_parent(self, claim: Claim) -> None:
        if claim.parent_job_id is not None:
            self.per_parent[claim.parent_job_id] -= 1
            if self.per_parent[claim.parent_job_id] == 0:
                del self.per_parent[claim.parent_job_id]
                self.parents_left = True

    async def _flush(self, running: Running) -> None:
        if self._outbox.has(running.claim):
            await insist(self._outbox.flush)

    async def _joined(self, claim: Claim, kind: str) -> Joined:
        counts = await insist(lambda: self._queue.joined(claim.id, claim.waits))

        async def fetch(after: UUID) -> list[Child]:
            rows = await insist(lambda: self._queue.children_after(claim.id, claim.waits, after))
            return [Child(row[0], row[1], JobStatus(row[2]), *row[3:]) for row in rows]

        loop = asyncio.get_running_loop()

        def fetch_from_thread(after: UUID) -> list[Child]:
            return asyncio.run_coroutine_threadsafe(fetch(after), loop).result()

        return Joined(claim.waits, *counts, fetch=fetch_from_thread if kind == "thread" else fetch)


async def insist(action: Callable[[], Awaitable[T]]) -> T:
    """Repeat something harmless until the database answers."""
    while True:
        try:
            return await action()
        except DatabaseUnavailable:
            await asyncio.sleep(random.uniform(0.1, 0.5))


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
        if isinstance(error, Deadlock):  # the same, from a verb of ours that `write` has called
            raise
        raise _WriteFailed(error) from error


def _call(running: Running, arguments: Mapping[str, Any]) -> Any:
    """In a thread; a future cannot carry StopIteration, so it goes as what Python itself makes of it."""
    if running.reason is not None:  # it was interrupted while it waited for its children's counts or for a thread
        raise asyncio.CancelledError
    try:
        return running.operation.function(**arguments)
    except StopIteration as error:
        raise RuntimeError("the operation raised StopIteration") from error
