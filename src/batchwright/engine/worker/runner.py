"""Runs claimed jobs: performs the operation, turns its outcome into a settle, and interrupts it when necessary.

start ──▶ perform ──▶ conclude ──▶ settle ──▶ forget
            ▲
interrupt ──┘   cancelled · lost · timeout · stop
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

import orjson

from batchwright.db.doorbell import Doorbell
from batchwright.db.retry import retry_unavailable
from batchwright.engine import policy
from batchwright.engine.catalog import Catalog
from batchwright.engine.context import Child, Context, Joined, Silence
from batchwright.engine.jobs import Claim, ClaimKey
from batchwright.engine.operation import Operations
from batchwright.engine.outcomes import Done, Outcome, Settle, Snooze, Wait, check_outcome
from batchwright.engine.upkeep import OnRescued
from batchwright.engine.worker.duty import Site
from batchwright.engine.worker.executor import Executor, Reason, Running
from batchwright.engine.worker.outbox import Outbox
from batchwright.engine.worker.processes import Died
from batchwright.engine.worker.settler import Settler
from batchwright.errors import Deadlock, Fatal, Fenced, Transient
from batchwright.states import JobStatus
from batchwright.telemetry.logs import about, job_in_hand

log = logging.getLogger(__name__)

T = TypeVar("T")
_WRITE_SECONDS_MAX = 5.0
_THREAD_GRACE_SECONDS = 1.0
"""How long a thread may continue after its time limit, when `ctx.cancelled` tells it to end."""
_REPEATABLE = frozenset({"40001", "40P01"})


class Runner:
    """The jobs that this worker holds, from `start` until they are settled and forgotten."""

    def __init__(
        self,
        site: Site,
        operations: Operations,
        executor: Executor,
        *,
        doorbell: Doorbell,
        services: Callable[[type[Any]], Any] | None,
        on_slot_free: Callable[[], None],
        on_rescued: OnRescued,
    ) -> None:
        self.held: dict[ClaimKey, Running] = {}
        self.per_queue: Counter[str] = Counter()
        self.over_per_queue: Counter[str] = Counter()
        """The jobs that only wait for their settle."""
        self.per_parent: Counter[UUID] = Counter()
        """Children that we hold, by their parent."""
        self.parents_left: bool = False
        """We no longer hold any child of some parent: the parent may have been joined, and may be due again."""
        self.freed_keys: set[tuple[str, str]] = set()
        """Exclusive keys whose job we just settled: the next claim looks for their next jobs."""
        self.counts = site.counts
        self._queue = site.queue
        self._worker = site.worker
        self._operations = operations
        self._executor = executor
        self._catalog = Catalog(site.queue.database, operations)
        self._doorbell = doorbell
        self._services = services
        self._on_slot_free = on_slot_free
        self._on_rescued = on_rescued
        self._is_stopping = False
        self._emptied = asyncio.Event()
        self._outbox = Outbox(site.queue, site.worker)
        on_commit = functools.partial(site.counts.observe, "settle_seconds")
        self._settler = Settler(site.queue, site.worker, self._end_settled, on_commit)

    @property
    def committing_seconds(self) -> float:
        """How long the oldest commit that is not answered yet has taken so far; 0 if there is none."""
        return self._settler.oldest_seconds

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
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

    async def wait_until_empty(self) -> None:
        """Wait until nothing runs and nothing is left to settle."""
        while self.held:
            self._emptied.clear()
            await self._emptied.wait()
        await self._settler.idle()

    async def close(self) -> None:
        await self._executor.close()
        await self._doorbell.close()

    def start(self, claim: Claim, leased_until: float) -> None:
        operation = self._operations.get(claim.job_type)
        assert operation is not None, "claim takes known types only"
        running = Running(claim, operation, leased_until)
        key = (claim.id, claim.claim)
        if (older := self.held.setdefault(key, running)) is not running:
            self._drop(older)
            self.held[key] = running
        self.per_queue[claim.queue] += 1
        if claim.parent_job_id is not None:
            self.per_parent[claim.parent_job_id] += 1
        running.task = self._loop.create_task(self._run(running))
        if operation.timeout_seconds is not None:
            running.timer = self._loop.call_later(operation.timeout_seconds, self._time_out, running)

    def _drop(self, older: Running) -> None:
        """A failover lost this claim, and the database gave us the same number again: end the first run."""
        self.interrupt(older, "lost")
        self._forget(older)

    async def _run(self, running: Running) -> None:
        """One job from start to settle. After an internal error the job is dropped here, and a rescue will find it."""
        job_in_hand.set(running.claim)
        began = time.perf_counter()
        try:
            settle = await self._perform_and_conclude(running)
            self.counts.ran[running.claim.job_type].append((running.ended or time.perf_counter()) - began)
            if settle is None:
                self._forget(self._find_running(running.claim))
            else:
                running.settling = True
                if self._outbox.has(running.claim):
                    await retry_unavailable(self._outbox.flush)
                self._settler.submit(settle)
                self._leave_slot(running)
        except BaseException:
            self._forget(self._find_running(running.claim))
            log.exception("job %s could not be settled; its lease will expire", running.claim.id)

    async def _perform_and_conclude(self, running: Running) -> Settle | None:
        """Run the operation and decide what follows. Whatever it does, exactly one of these paths is taken."""
        try:
            returned = await self._perform(running)
            running.ended = time.perf_counter()
            if running.reason is not None and (running.reason != "timeout" or running.operation.kind == "thread"):
                return await self._give_up(running)
            running.settling = True
            if isinstance(returned, (Done, Snooze, Wait)):
                return await self._conclude(running, returned)
            return policy.succeed(running.claim, returned)
        except asyncio.CancelledError:
            return await self._give_up(running)
        except Died as death:
            return await self._rescue_dead(running, death)
        except _WriteFailed as failed:
            return self._react(running, failed.error)
        except BaseException as error:  # an operation may even raise SystemExit; the worker continues
            if running.reason is not None:  # it turned our interruption into an error of its own
                return await self._give_up(running)
            return self._react(running, error)

    async def _perform(self, running: Running) -> Any:
        operation, claim = running.operation, running.claim
        if operation.kind == "async" and not operation.takes_context:
            return await operation.function(**operation.arguments(claim.payload))
        context = running.context = Context(claim, self._outbox, worker=self._worker, services=self._services)
        context.stopping = self._is_stopping
        if claim.waits:
            context.joined = await self._read_joined(claim, operation.kind)
        arguments = operation.arguments(claim.payload)
        if operation.takes_context:
            arguments = {"ctx": context, **arguments}
        return await self._executor.call(running, context, arguments)

    async def _conclude(self, running: Running, outcome: Outcome) -> Settle | None:
        """Turn an outcome into a settle; None when it was settled here, alone."""
        claim = running.claim
        check_outcome(outcome)
        match outcome:
            case Done(result=result, progress=progress, write=None) if not outcome.then:
                return policy.succeed(claim, result, progress)
            case Done(result=result, progress=progress, then=then, write=write):
                settle = policy.succeed(claim, result, progress)
                rows = await self._catalog.prepare(then, before=claim)
                bounded = None if write is None else functools.partial(_call_write, write)
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
        """One settle with its rows and jobs, in a separate commit."""

        async def attempt() -> set[UUID]:
            try:
                await commit()
            except Fenced:
                return set()
            return {settle.claim.id}

        began = time.monotonic()
        moved, is_doubtful = await self._settler.send(attempt)
        self._account(settle, self._find_running(settle.claim), bool(moved), not is_doubtful)
        if moved:
            self._doorbell.ring({row["queue"] for row in rows}, age_seconds=time.monotonic() - began)

    def _react(self, running: Running, error: BaseException) -> Settle:
        try:
            settle = policy.react(running.claim, running.operation, error)
        except Exception as problem:  # its text or its delay cannot be read; the job must be settled anyway
            undescribed = Fatal(
                f"an error of type {type(error).__name__} that cannot be described: {problem!r}", code="unexpected"
            )
            settle = policy.react(running.claim, running.operation, undescribed)
        if settle.verb == "fail":
            log.warning(
                "job %s (%s) failed: %r, %s",  # its message may quote the input, which must not be logged
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
                message = f"it did not end within its timeout_seconds of {seconds:g}"
                return self._react(running, Transient(message, code="timeout"))
            case "stop":
                return Settle("release", running.claim, {"reason": "the worker stopped"})
            case "cancelled":
                await retry_unavailable(lambda: self._queue.let_go([(running.claim.id, running.claim.claim)]))
                self._note_freed_key(running.claim)
                return None
            case "lost":
                return None
            case None if running.task is not None and running.task.cancelling():  # the loop itself is closing
                return Settle("release", running.claim, {"reason": "the worker stopped"})
            case None:
                return self._react(running, Fatal("the operation cancelled itself", code="unexpected"))

    async def _rescue_dead(self, running: Running, death: Died) -> Settle | None:
        """The process of a `cpu=True` operation has died. The job is rescued, as after the death of a worker."""
        if running.reason is not None:
            return await self._give_up(running)
        log.warning("the process that ran job %s died: %s", running.claim.id, death)
        dead = [(running.claim.id, running.claim.claim)]
        self._on_rescued(await retry_unavailable(lambda: self._queue.rescue(dead=dead, limit=1)))
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

    def _time_out(self, running: Running) -> None:
        self.interrupt(running, "timeout")
        if running.operation.kind == "thread":
            running.timer = self._loop.call_later(_THREAD_GRACE_SECONDS, self._abandon, running)

    def _abandon(self, running: Running) -> None:
        """Settle the job of a thread that does not end."""
        if running.settling or running.is_forgotten or running.task is None:
            return
        if self._executor.abandon(running):
            name = running.operation.name
            self.counts.add("threads_abandoned_total", 1, (name,))
            log.warning(
                "the operation %s did not end within its time limit of %g s: job %s is settled without its thread, "
                "which still runs; let it check ctx.cancelled, or mark it cpu=True",
                name,
                running.operation.timeout_seconds,
                running.claim.id,
                extra=about(running.claim),
            )
        if running.context is not None:
            running.context._reporter = Silence()  # noqa: SLF001 (its reports are no longer wanted)
        running.task.cancel()

    def hear(self, news: Mapping[ClaimKey, JobStatus | None]) -> None:
        """News from the lease thread: claims that were cancelled or expired, and (None) claims that we have lost."""
        for key, status in news.items():
            running = self.held.get(key)
            if running is not None and not running.settling and running.reason is None:
                if status is None:
                    self.counts.add("leases_lost_total")
                    text = "job %s was lost: another claim may have it"
                    log.warning(text, running.claim.id, extra=about(running.claim))
                self.interrupt(running, "lost" if status is None else "cancelled")

    def _leave_slot(self, running: Running) -> None:
        """The operation has ended: while its settle is in progress, another job may run."""
        if not running.is_forgotten:
            running.is_over = True
            self.over_per_queue[running.claim.queue] += 1
            self._on_slot_free()

    # After the settle -------------------------------------------------------------------------------------------

    def _end_settled(self, settles: Sequence[Settle], moved: set[UUID], is_fenced: bool) -> None:
        """Handle the result of a commit. Nearly always all have moved, and then there is no need to look up each id."""
        all_moved = len(moved) == len(settles)
        for settle in settles:
            running = self._find_running(settle.claim)
            self._account(settle, running, all_moved or settle.claim.id in moved, is_fenced)
            if running is not None:
                self._remove(running)
        self._note_forgotten()

    def _account(self, settle: Settle, running: Running | None, moved: bool, is_fenced: bool) -> None:
        claim = settle.claim
        if running is not None:
            running.settled_by = settle.verb if moved or not is_fenced else None
        if moved:
            self.counts.ended[claim.job_type, settle.verb] += 1
        elif is_fenced:
            self.counts.add("writes_fenced_total")
            log.warning(
                "job %s: the result of claim %d was refused, because a newer claim or a person has changed the job",
                claim.id,
                claim.claim,
                extra=about(claim),
            )
        if claim.exclusive_key is not None:
            self._note_freed_key(claim)

    def _note_freed_key(self, claim: Claim) -> None:
        if claim.exclusive_key is not None:
            self.freed_keys.add((claim.tenant, claim.exclusive_key))

    def _find_running(self, claim: Claim) -> Running | None:
        """The run of exactly this claim; another one may have the same number."""
        running = self.held.get((claim.id, claim.claim))
        return running if running is not None and running.claim is claim else None

    def _forget(self, running: Running | None) -> None:
        if running is not None:
            self._remove(running)
        self._note_forgotten()

    def _remove(self, running: Running) -> None:
        claim = running.claim
        del self.held[claim.id, claim.claim]
        running.is_forgotten = True
        self.per_queue[claim.queue] -= 1
        if running.is_over:
            self.over_per_queue[claim.queue] -= 1
        if claim.parent_job_id is not None:
            self._leave_parent(claim.parent_job_id)
        if running.timer is not None:
            running.timer.cancel()
        if running.context is not None:
            running.context.settled(running.settled_by)

    def _note_forgotten(self) -> None:
        """Called once for all jobs that were forgotten together."""
        self._on_slot_free()
        if not self.held:
            self._emptied.set()

    def _leave_parent(self, parent: UUID) -> None:
        self.per_parent[parent] -= 1
        if self.per_parent[parent] == 0:
            del self.per_parent[parent]
            self.parents_left = True

    async def _flush(self, running: Running) -> None:
        if self._outbox.has(running.claim):
            await retry_unavailable(self._outbox.flush)

    async def _read_joined(self, claim: Claim, kind: str) -> Joined:
        counts = await retry_unavailable(lambda: self._queue.joined(claim.id, claim.waits))

        async def fetch(after: UUID) -> list[Child]:
            rows = await retry_unavailable(lambda: self._queue.children_after(claim.id, claim.waits, after))
            return [Child(row[0], row[1], JobStatus(row[2]), *row[3:]) for row in rows]

        loop = asyncio.get_running_loop()

        def fetch_from_thread(after: UUID) -> list[Child]:
            return asyncio.run_coroutine_threadsafe(fetch(after), loop).result()

        return Joined(claim.waits, *counts, fetch=fetch_from_thread if kind == "thread" else fetch)


class _WriteFailed(Exception):
    """Carries an exception from `write`: it counts as the operation's error, even if its class is ours."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _call_write(write: Callable[[Any], Awaitable[None]], connection: Any) -> None:
    """Repeat the commit only if our own connection broke, or after a deadlock."""
    try:
        async with asyncio.timeout(_WRITE_SECONDS_MAX):
            await write(connection)
    except Exception as error:
        if getattr(connection, "closed", False) or getattr(error, "sqlstate", None) in _REPEATABLE:
            raise
        if isinstance(error, Deadlock):  # the same, from one of our verbs that `write` called
            raise
        raise _WriteFailed(error) from error
