"""The life of a shard on a worker: recover earlier answers, send the rest, register them, and settle.

    check the batch → fetch input and plan → recover earlier answers → send → checkpoint → Done | Snooze

It ends early when its batch must stop or pause, at the deadline, when the worker stops, or when another worker
has it. Whatever was answered is registered before it ends. While the disk is full, it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from batchwright.batches.journal.checkpoint import Account, Owner
from batchwright.batches.plan.planfile import Entry, plan_path, read_entries, safe_name
from batchwright.batches.plan.shards import Shard, cut
from batchwright.batches.send.sender import ABORT_SECONDS, Sender
from batchwright.batches.send.work import End, Work
from batchwright.batches.store import AWAY_SECONDS, Batch, Control, WrongJob, require_own_job, shard_queue
from batchwright.batches.waits import DISK, KEY, STORE, reason_to_wait
from batchwright.engine.context import Context
from batchwright.engine.jobs import new_id
from batchwright.engine.outcomes import Done, Outcome, Snooze, Verb
from batchwright.engine.owned import Held
from batchwright.errors import (
    ConfigurationError,
    Conflict,
    DatabaseError,
    DatabaseUnavailable,
    Fatal,
    NotFound,
    OperationError,
    RetryLater,
    StorageError,
    Transient,
)
from batchwright.states import BatchStatus
from batchwright.telemetry import tracing

if TYPE_CHECKING:
    from batchwright.batches.send.runner import ShardRunner

log = logging.getLogger(__name__)

PAUSED_SECONDS = (1.0, 60.0)
"""A shard of a paused batch sleeps as long as the pause has lasted, within these bounds. Resuming the batch wakes it,
except while its worker is just putting it to sleep: then it sleeps for this time."""
NO_ROOM_SECONDS = 30.0
_HANDED_BACK = {End.BROKEN: "system_error", End.FULL: "system_error", End.LEAVE: "none", End.LOST: "none"}
"""Shards that end like this are given back; the values are the reasons in the metric."""
_LAST_WORDS_SECONDS = 1.5


class ShardClaim(ABC):
    """What all claims of shards share, for any kind of server: the journal, the lines, and the handling of errors."""

    def __init__(self, runner: ShardRunner, ctx: Context, shard: Shard) -> None:
        self.shard = shard
        self._ctx = ctx
        self._runner = runner
        self._tools = runner.tools
        self._dispatcher = runner.dispatcher
        self._checkpoints = runner.checkpoints

    @property
    def attributes(self) -> tracing.Attributes:
        """The attributes of its spans."""
        return {"batch.id": self.shard.batch_id, "tenant.id": self._ctx.tenant, "batch.shard": self.shard.number}

    async def begin(self, traceparent: str | None) -> Outcome:
        """Run the claim; an error becomes an outcome, or an exception that decides how to retry."""
        ctx, shard, tools = self._ctx, self.shard, self._tools
        try:
            control = (await tools.batches.controls([shard.batch_id])).get(shard.batch_id)
            if control is None:
                return Done()
            require_own_job(ctx, control.id, control.job_id)
            return await self.advance(control, traceparent)
        except asyncio.CancelledError:
            if ctx.stopping:
                self._give_back("none")
            raise
        except WrongJob:
            raise
        except NotFound as error:
            await tools.batches.stop(shard.batch_id, "error", {"code": "input_gone", "message": str(error)})
            return Done()
        except Exception as error:
            if (reason := reason_to_wait(error)) is not None:
                return await self._wait(reason, str(error))
            raise await self._judge(error) from error

    @abstractmethod
    async def advance(self, control: Control, traceparent: str | None) -> Outcome:
        """Do the next step; `control` is the current state of the batch."""

    # Before -----------------------------------------------------------------------------------------------------

    async def _find_shortage(self) -> str | None:
        """Why nothing can be started in the work folder now; None if there is room."""
        disk, workspace = self._dispatcher.disk, self._tools.workspace
        if not disk.has_room(self._dispatcher.limits.bytes.in_use):
            return disk.trouble
        is_here = workspace.input(self.shard.batch_id).exists()
        if is_here or await asyncio.to_thread(workspace.has_room):
            return None
        return f"the work folder {workspace.root} is full; raise batches.work_dir_limit, or wait for its batches"

    async def _open_input(self, batch: Batch) -> int:
        files = self._tools.files
        file = await files.get(batch.input_file_id, tenant=None, also_gone=True)
        path = await self._tools.workspace.fetch_input(batch.id, files.store, file.key, file.bytes)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    async def _read_entries(self) -> list[Entry]:
        shard = self.shard
        folder = await self._tools.workspace.fetch_plan(shard.batch_id, self._tools.files.store)
        plan = plan_path(folder, safe_name(shard.model))
        return await asyncio.to_thread(read_entries, plan, shard.start, shard.count)

    def _owner(self, traceparent: str | None) -> Owner:
        return Owner(
            batch_id=self.shard.batch_id,
            shard=self.shard.number,
            model=self.shard.model,
            journal_number=self.shard.journal_number(self._ctx.claim),
            job_id=self._ctx.job_id,
            job_claim=self._ctx.claim,
            worker=self._ctx.worker,
            traceparent=traceparent,
        )

    async def _recover(self, account: Account, entries: list[Entry]) -> set[int]:
        """The offsets of lines that an earlier claim has answered."""
        offsets = {entry.offset for entry in entries}
        unregistered = self._runner.unregistered
        answered, copied = await unregistered.recover_for_shard(
            account.owner, account.journal, offsets, is_wanted=self.shard.may_be_in
        )
        if self._ctx.after_death:
            self._tools.counts.recovered(BatchStatus.IN_PROGRESS, "resumed" if answered else "re_enqueued")
        if copied:
            text = f"{copied} answers were recovered that were not registered yet"
            self._ctx.emit("batch.answers_adopted", text, answers=copied)
        return answered

    # Errors -----------------------------------------------------------------------------------------------------

    async def _wait(self, reason: str, message: str) -> Outcome:
        """Snooze until the store or the disk is available: no answer is lost, so this uses up no attempt."""
        await self._tools.waits.note(self.shard.batch_id, reason, message)
        self._give_back("db_transient" if reason == STORE else "system_error")
        return Snooze(AWAY_SECONDS if reason == STORE else NO_ROOM_SECONDS, message)

    async def _wait_for_room(self) -> Outcome | None:
        """The outcome if there is no room; None if there is."""
        trouble = await self._find_shortage()
        return None if trouble is None else await self._wait(DISK, trouble)

    def _give_back(self, reason: str) -> None:
        """Count and trace that a shard is given back, after it was settled: it may have been lost or have ended."""

        def tell(verb: Verb | None) -> None:
            if verb in ("snooze", "retry", "release"):
                self._tools.counts.given_back(reason)
                with tracing.detached("re-enqueue", link=self._ctx.traceparent) as span:
                    span.set({**self.attributes, "batch.re_enqueue.reason": reason})

        self._ctx.when_settled(tell)

    async def _judge(self, error: Exception) -> Exception:
        """An error that fails this shard permanently ends its batch; requests in flight elsewhere may still finish."""
        if isinstance(error, RetryLater):
            return error
        if isinstance(error, (Conflict, DatabaseError)):  # an earlier claim of ours has not ended yet, or an outage
            self._give_back("db_transient")
            return RetryLater(str(error), 1.0)
        if isinstance(error, StorageError):
            error = Fatal(str(error), code="storage_error")
        elif not isinstance(error, OperationError):
            log.warning("a shard of %s will be tried again: %r", self.shard.batch_id, error)
            error = Transient(str(error), code="unexpected")
        if not isinstance(error, Transient) or self._ctx.attempt >= self._ctx.max_attempts:
            code = getattr(error, "code", None) or "system_error"
            await self._tools.batches.stop(self.shard.batch_id, "error", {"code": code, "message": str(error)})
        else:
            self._give_back("system_error")
        return error


class ShardRun(ShardClaim):
    """One claim of a shard whose requests go to servers of our own."""

    def __init__(self, runner: ShardRunner, ctx: Context, shard: Shard) -> None:
        super().__init__(runner, ctx, shard)
        self._account: Account
        """Its journal. This, `_entries` and `_work` are set before anything is sent."""
        self._entries: list[Entry]
        self._work: Work
        self._recovered_bytes = 0
        """Size of the beginning of its journal, which holds the answers that it recovered."""
        self._end_preparing: Callable[[], None]
        self._batch_queue: str
        self._batch_priority = 0
        self._is_sharing = False

    async def advance(self, control: Control, traceparent: str | None) -> Outcome:
        shard = self.shard
        if control.status != BatchStatus.IN_PROGRESS or control.stop_reason:
            return Done()
        if control.is_paused:
            return Snooze(pause_seconds(control), End.PAUSE.value)
        if not self._dispatcher.serves(shard.model):
            return Snooze(NO_ROOM_SECONDS, f"this worker has no gateway for {shard.model}")
        if (waiting := await self._wait_for_room()) is not None:
            return waiting
        with self._tools.workspace.use(shard.batch_id), self._dispatcher.prepare(shard.model) as end_preparing:
            self._end_preparing = end_preparing
            return await self._run(control, traceparent)

    # Before -----------------------------------------------------------------------------------------------------

    async def _run(self, control: Control, traceparent: str | None) -> Outcome:
        batch = await self._tools.batches.get(self.shard.batch_id, tenant=None)
        self._batch_queue = batch.queue
        try:
            headers = await self._open_headers(batch)
        except ConfigurationError as error:
            return await self._wait(KEY, str(error))
        descriptor = await self._open_input(batch)
        try:
            entries = self._entries = await self._read_entries()
            account = self._account = await self._checkpoints.open(self._owner(traceparent))
            try:
                answered = await self._recover(account, entries)
                self._recovered_bytes = account.journal.size
                self._tools.waits.end(batch.id)
                self._work = Work(
                    total=len(entries),
                    batch_id=batch.id,
                    tenant=batch.tenant,
                    place=self.shard.start,
                    model=self.shard.model,
                    traceparent=traceparent,
                    deadline=time.monotonic() + control.seconds_left,
                    descriptor=descriptor,
                    journal=account.journal,
                    headers=headers,
                )
                pending = [entry for entry in entries if entry.offset not in answered]
                self._ctx.progress(len(entries) - len(pending), len(entries))
                self._checkpoints.watch(account)
                await self._send(pending, control)
            finally:
                self._checkpoints.close(account)
        finally:
            os.close(descriptor)
        return await self._conclude()

    async def _open_headers(self, batch: Batch) -> dict[str, str]:
        """The headers of the batch's creator that its gateway passes through; nothing is sent without them."""
        if not (wanted := self._dispatcher.passes_through(self.shard.model)):
            return {}
        sealed = await self._tools.batches.sealed_headers(batch.id)
        if sealed is None:
            return {}
        headers = await asyncio.to_thread(self._runner.seal.open, sealed, batch.family)
        return {name: value for name, value in headers.items() if name in wanted}

    # While it runs ----------------------------------------------------------------------------------------------

    async def _send(self, pending: list[Entry], control: Control) -> None:
        work = self._work
        self._dispatcher.begin(work, pending, priority=control.priority)
        self._end_preparing()
        self._apply(control)
        self._runner.add(self)
        timer = asyncio.get_running_loop().call_later(max(0.0, control.seconds_left), self._end_at_deadline)
        try:
            await work.quiet.wait()
            await self._checkpoints.flush(self._account)
        except asyncio.CancelledError:
            await self._say_last_words()
            raise
        finally:
            timer.cancel()
            self._runner.remove(self)
            self._dispatcher.forget(work)

    async def _say_last_words(self) -> None:
        """The worker must stop now, or the shard was lost: register the answers, if that is quick."""
        self._work.stop(End.LEAVE)
        self._work.abort()
        with contextlib.suppress(TimeoutError):  # a request may wait for the slot of another model, which takes long
            async with asyncio.timeout(_LAST_WORDS_SECONDS / 3):
                await self._work.quiet.wait()
        with contextlib.suppress(TimeoutError, StorageError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS * 2 / 3):
                await self._checkpoints.flush(self._account)

    def watch(self) -> None:
        """Check what this worker knows without the database, and report the progress of the shard."""
        work = self._work
        if self._ctx.stopping:
            work.stop(End.LEAVE)
        elif self._account.is_lost:
            work.stop(End.LOST)
            work.abort()
        if work.end is None:
            self._ctx.progress(work.total - work.backlog.left, work.total)

    def follow(self, control: Control | None) -> None:
        """Apply the state of the batch: stop, pause, limits."""
        work = self._work
        if control is None:
            work.stop(End.LOST)
            work.abort()
        elif control.status != BatchStatus.IN_PROGRESS or control.stop_reason:
            work.stop(End.STOP)
            grace = self._tools.settings.cancel_grace_seconds
            if control.stop_reason == "cancel" and (control.stopped_seconds or 0.0) >= grace:
                work.abort()
        elif control.is_paused:
            work.stop(End.PAUSE)
        else:
            self._apply(control)

    @property
    def queue(self) -> str:
        return shard_queue(self._batch_queue, self.shard.model)

    @property
    def sender(self) -> Sender:
        return self._work.sender

    @property
    def spare(self) -> int:
        """Number of requests that it could give to other workers.

        0 until the answers that it recovered are registered: a worker that gets their lines would recover them too.
        """
        if self._is_sharing or self._work.end is not None or self._account.is_lost:
            return 0
        return self._work.backlog.untouched if self._account.registered_bytes >= self._recovered_bytes else 0

    async def share(self, count: int, parts: int) -> bool:
        """Give about this many of the last requests to other workers, in parts that become shards; False if none go.

        They are set aside meanwhile. Whatever happens to this process, they are either in its shard or in another.
        """
        work, is_given = self._work, False
        schedule, backlog = work.sender.schedule, work.backlog
        if not (offered := schedule.offer(backlog, min(count, self.spare))):
            return False
        self._is_sharing = True
        try:
            kept, given = self.shard.split(*self._find_places(offered, parts))
            is_given = await self._give({new_id(): one for one in given}, kept)
            if is_given:
                self.shard, work.total = kept, work.total - (self.shard.count - kept.count)
                text = f"{len(offered)} requests go to idle workers"
                self._ctx.emit("batch.shard_split", text, requests=len(offered), shards=len(given))
        except asyncio.CancelledError:
            work.stop(End.LEAVE)
            raise
        finally:
            self._is_sharing = False
            schedule.conclude(backlog, is_given=is_given)
            work.sender.wake.set()
            work.look()
        return is_given

    def _find_places(self, offered: Sequence[Entry], parts: int) -> list[int]:
        """Where the parts begin in the plan."""
        places = {entry.offset: place for place, entry in enumerate(self._entries, self._work.place)}
        firsts = cut(offered, requests_max=math.ceil(len(offered) / parts))
        return [places[offered[one.start].offset] for one in firsts]

    async def _give(self, given: Mapping[UUID, Shard], kept: Shard) -> bool:
        """Retry until the database has answered, or until the shard ends, which then sends none of these requests."""
        held = Held(self._ctx.job_id, self._ctx.claim, self._ctx.worker)
        while True:
            try:
                return await self._tools.batches.split(held, kept, given, batch_priority=self._batch_priority)
            except DatabaseUnavailable as error:
                if self._work.end is not None:
                    return False
                log.debug("whether a shard of %s was split is not known: %s", self.shard.batch_id, error)
            await asyncio.sleep(random.uniform(0.1, 0.5))

    def _apply(self, control: Control) -> None:
        sender = self._work.sender
        self._batch_priority = control.priority
        sender.schedule.change(
            control.id,
            priority=control.priority,
            at_risk=self._runner.needs_express(control, self._ctx),
            in_flight_max=control.limits.get("max_in_flight"),
        )
        sender.wake.set()

    def _end_at_deadline(self) -> None:
        """Called by a timer, without waiting for the next control: requests in flight time out, or are aborted soon."""
        self._work.stop(End.DEADLINE)
        asyncio.get_running_loop().call_later(ABORT_SECONDS, self._work.abort)
        self._runner.end_window(self.shard.batch_id)

    # After ------------------------------------------------------------------------------------------------------

    async def _conclude(self) -> Outcome:
        work, batches = self._work, self._tools.batches
        if work.end in _HANDED_BACK:
            is_guarded = work.end is End.LEAVE and self._dispatcher.broken is not None
            self._give_back("guard_shutdown" if is_guarded else _HANDED_BACK[work.end])
        match work.end:
            case None:
                return Done(progress=(work.total, work.total))
            case End.DEADLINE:  # before the batch can resume and find lines without an answer or a reason
                await batches.stop(work.batch_id, "deadline")
                return Done()
            case End.STOP:
                return Done()
            case End.LOST:  # if the claim is still ours, the rest must be sent; if it is not, this is refused
                return Snooze(0, End.LOST.value)
            case End.PAUSE:  # what was in flight may have taken longer than the pause
                control = (await batches.controls([work.batch_id])).get(work.batch_id)
                return Snooze(0 if control is None else pause_seconds(control), End.PAUSE.value)
            case End.LEAVE:
                return Snooze(0, End.LEAVE.value)
            case End.FULL:
                await self._tools.waits.note(work.batch_id, DISK, End.FULL.value)
                return Snooze(NO_ROOM_SECONDS, End.FULL.value)
            case End.BROKEN:
                raise Transient(End.BROKEN.value, code="shard_broken")


def pause_seconds(control: Control) -> float:
    """How long a shard sleeps while its batch is paused; 0 if it is not."""
    shortest, longest = PAUSED_SECONDS
    return 0.0 if control.paused_seconds is None else min(longest, max(shortest, control.paused_seconds))
