"""The life of a shard on a worker: take up what is there, send the rest, register it, and say how it ended.

    look at the batch → input and plan → what was answered before → send → checkpoint → Done | Snooze

It ends early when its batch is told to stop or to pause, at the deadline, when the worker stops, or when another worker
has it. Whatever was answered is registered before it ends. While the disk is full, it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Mapping

from batchwright.batches.checkpoint import Account, Checkpoints, Owner
from batchwright.batches.dispatch import ABORT_SECONDS, Dispatcher, End, Work
from batchwright.batches.files import Files
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.planfile import Entry, plan_path, read_entries, safe_name
from batchwright.batches.seal import Seal
from batchwright.batches.settings import BatchSettings
from batchwright.batches.shards import Slice
from batchwright.batches.store import AWAY_SECONDS, SHARD, Batch, Batches, Order, Stranger, refuse_stranger
from batchwright.batches.takeover import Takeover
from batchwright.batches.waits import DISK, KEY, STORE, Waits, reason_to_wait
from batchwright.batches.workspace import Workspace
from batchwright.engine.context import Context
from batchwright.engine.jobs import Done, Outcome, Snooze, Verb
from batchwright.errors import (
    ConfigurationError,
    Conflict,
    DatabaseError,
    Fatal,
    NotFound,
    OperationError,
    RetryLater,
    StorageError,
    Transient,
)
from batchwright.inference.budgets import live_workers
from batchwright.states import BatchStatus
from batchwright.telemetry import tracing

log = logging.getLogger(__name__)

CONTROL_SECONDS = 0.5
PAUSED_SECONDS = (1.0, 60.0)
"""A shard of a paused batch sleeps as long as the pause has lasted, within these bounds. Resuming wakes it, but not if
its worker is just putting it to sleep: then that is what it costs."""
NO_ROOM_SECONDS = 30.0
NOTE_SECONDS = 30.0
"""How often a batch whose disk is full is noted to wait."""
_HANDED_BACK = {End.BROKEN: "system_error", End.FULL: "system_error", End.LEAVE: "none", End.LOST: "none"}
"""Shards that end like this are given back; why, in the words of the metric."""
_LAST_WORDS_SECONDS = 1.5
_SHARE_SECONDS = 5.0
_RATE_SECONDS = 10.0
_RISK_SHARE = 0.8
"""A batch is at risk when it needs more than this share of the time that is left."""


class Shards:
    """The shards of a worker process."""

    def __init__(
        self,
        batches: Batches,
        files: Files,
        workspace: Workspace,
        dispatcher: Dispatcher,
        checkpoints: Checkpoints,
        takeover: Takeover,
        waits: Waits,
        counts: BatchCounts,
        settings: BatchSettings,
        seal: Seal,
    ) -> None:
        self._seal = seal
        self._batches = batches
        self._files = files
        self._workspace = workspace
        self._dispatcher = dispatcher
        self._checkpoints = checkpoints
        self._takeover = takeover
        self._waits = waits
        self._counts = counts
        self._settings = settings
        self._noted_at = float("-inf")
        self._held: dict[Work, tuple[Context, Account]] = {}
        self._paces: dict[str, _Pace] = {}
        self._helpers: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[bool]] = set()

    @property
    def held(self) -> int:
        return len(self._held)

    async def run(self, ctx: Context, shard: Slice) -> Outcome:
        """One claim of a shard. Its span lasts until the outcome is committed."""
        span = tracing.span("process-shard", parent=ctx.traceparent, attributes=_named(ctx, shard), current=False)
        span.__enter__()
        ctx.when_settled(lambda _: span.__exit__(None, None, None))
        with tracing.handed(span.traceparent):
            try:
                return await self._begin(ctx, shard, span.traceparent)
            except BaseException as error:
                span.error(error)
                raise

    async def _begin(self, ctx: Context, shard: Slice, traceparent: str | None) -> Outcome:
        try:
            order = (await self._batches.orders([shard.batch_id])).get(shard.batch_id)
            if order is None or order.status != BatchStatus.IN_PROGRESS or order.stop_reason:
                return Done()
            refuse_stranger(ctx, order.id, order.job_id)
            if order.paused:
                return Snooze(_pause_seconds(order), End.PAUSE.value)
            if not self._dispatcher.serves(shard.model):
                return Snooze(NO_ROOM_SECONDS, f"this worker has no gateway for {shard.model}")
            if (trouble := await self._lack_of_room(shard.batch_id)) is not None:
                return await self._wait(ctx, shard, DISK, trouble)
            with self._workspace.use(shard.batch_id):
                return await self._run(ctx, shard, order, traceparent)
        except asyncio.CancelledError:
            if ctx.stopping:
                self._give_back(ctx, shard, "none")
            raise
        except Stranger:
            raise
        except NotFound as error:
            await self._batches.stop(shard.batch_id, "error", {"code": "input_gone", "message": str(error)})
            return Done()
        except Exception as error:
            if (reason := reason_to_wait(error)) is not None:
                return await self._wait(ctx, shard, reason, str(error))
            raise await self._judge(ctx, shard, error) from error

    async def _lack_of_room(self, batch_id: str) -> str | None:
        """Why nothing can be begun in the work folder now."""
        disk = self._dispatcher.disk
        if not disk.has_room(self._dispatcher.limits.bytes.in_use):
            return disk.trouble
        is_here = self._workspace.input(batch_id).exists()
        if is_here or await asyncio.to_thread(self._workspace.has_room):
            return None
        return f"the work folder {self._workspace.root} is full; raise batches.work_dir_limit, or wait for its batches"

    async def _wait(self, ctx: Context, shard: Slice, reason: str, message: str) -> Outcome:
        """Nothing that was answered is lost, so it costs time and no attempt, until the window is over."""
        await self._waits.note(shard.batch_id, reason, message)
        self._give_back(ctx, shard, "db_transient" if reason == STORE else "system_error")
        return Snooze(AWAY_SECONDS if reason == STORE else NO_ROOM_SECONDS, message)

    def _give_back(self, ctx: Context, shard: Slice, reason: str) -> None:
        """Count and trace that a shard is put back, once it is: it may have been taken away or ended meanwhile."""

        def tell(verb: Verb | None) -> None:
            if verb in ("snooze", "retry", "release"):
                self._counts.given_back(reason)
                with tracing.detached("re-enqueue", link=ctx.traceparent) as span:
                    span.set({**_named(ctx, shard), "batch.re_enqueue.reason": reason})

        ctx.when_settled(tell)

    async def _judge(self, ctx: Context, shard: Slice, error: Exception) -> Exception:
        """An error that ends this shard for good ends its batch, and what is in flight elsewhere may still end."""
        if isinstance(error, RetryLater):
            return error
        if isinstance(error, (Conflict, DatabaseError)):  # an earlier claim of ours has not ended yet, or an outage
            self._give_back(ctx, shard, "db_transient")
            return RetryLater(str(error), 1.0)
        if isinstance(error, StorageError):
            error = Fatal(str(error), code="storage_error")
        elif not isinstance(error, OperationError):
            log.warning("a shard of %s will be tried again: %r", shard.batch_id, error)
            error = Transient(str(error), code="unexpected")
        if not isinstance(error, Transient) or ctx.attempt >= ctx.max_attempts:
            code = getattr(error, "code", None) or "system_error"
            await self._batches.stop(shard.batch_id, "error", {"code": code, "message": str(error)})
        else:
            self._give_back(ctx, shard, "system_error")
        return error

    async def _run(self, ctx: Context, shard: Slice, order: Order, traceparent: str | None) -> Outcome:
        batch = await self._batches.get(shard.batch_id, tenant=None)
        try:
            headers = await self._headers(batch, shard.model)
        except ConfigurationError as error:
            return await self._wait(ctx, shard, KEY, str(error))
        owner = Owner(
            batch_id=batch.id,
            shard=shard.number,
            model=shard.model,
            journal_number=shard.journal_number(ctx.claim),
            job_id=ctx.job_id,
            job_claim=ctx.claim,
            worker=ctx.worker,
            traceparent=traceparent,
        )
        descriptor = await self._open_input(batch)
        try:
            entries = await self._entries(batch, shard)
            account = await self._checkpoints.open(owner)
            try:
                answered = await self._take_up(ctx, account, entries)
                self._waits.end(batch.id)
                work = self._work(ctx, batch, shard, order, descriptor, account, len(entries), headers)
                pending = [entry for entry in entries if entry.offset not in answered]
                ctx.progress(len(entries) - len(pending), len(entries))
                self._checkpoints.watch(account)
                await self._send(ctx, work, account, pending, order)
            finally:
                self._checkpoints.close(account)
        finally:
            os.close(descriptor)
        return await self._outcome(ctx, shard, work)

    def _work(
        self,
        ctx: Context,
        batch: Batch,
        shard: Slice,
        order: Order,
        descriptor: int,
        account: Account,
        total: int,
        headers: Mapping[str, str],
    ) -> Work:
        return Work(
            total=total,
            batch_id=batch.id,
            tenant=batch.tenant,
            number=shard.number,
            claim=ctx.claim,
            model=shard.model,
            traceparent=account.owner.traceparent,
            deadline=time.monotonic() + order.seconds_left,
            descriptor=descriptor,
            journal=account.journal,
            headers=headers,
        )

    # Before -----------------------------------------------------------------------------------------------------

    async def _headers(self, batch: Batch, model: str) -> dict[str, str]:
        """Those of the batch's creator that the model's gateway wants; nothing is sent without them."""
        if not (wanted := self._dispatcher.passes_through(model)):
            return {}
        sealed = await self._batches.sealed_headers(batch.id)
        if sealed is None:
            return {}
        headers = await asyncio.to_thread(self._seal.open, sealed, batch.family)
        return {name: value for name, value in headers.items() if name in wanted}

    async def _open_input(self, batch: Batch) -> int:
        file = await self._files.get(batch.input_file_id, tenant=None, also_gone=True)
        path = await self._workspace.fetch_input(batch.id, self._files.store, file.key, file.bytes)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    async def _entries(self, batch: Batch, shard: Slice) -> list[Entry]:
        folder = await self._workspace.fetch_plan(batch.id, self._files.store)
        plan = plan_path(folder, safe_name(shard.model))
        return await asyncio.to_thread(read_entries, plan, shard.start, shard.count)

    async def _take_up(self, ctx: Context, account: Account, entries: list[Entry]) -> set[int]:
        """The offsets that have their answer from an earlier claim."""
        offsets = {entry.offset for entry in entries}
        answered, copied = await self._takeover.of_shard(account.owner, account.journal, offsets)
        if ctx.after_death:
            self._counts.recovered(BatchStatus.IN_PROGRESS, "resumed" if answered else "re_enqueued")
        if copied:
            text = f"{copied} answers were kept that nobody had registered"
            ctx.emit("batch.answers_adopted", text, answers=copied)
        return answered

    # While it runs ----------------------------------------------------------------------------------------------

    async def _send(self, ctx: Context, work: Work, account: Account, pending: list[Entry], order: Order) -> None:
        self._start_helpers()
        self._dispatcher.begin(work, pending, priority=order.priority)
        self._apply(work, order)
        self._held[work] = ctx, account
        timer = asyncio.get_running_loop().call_later(max(0.0, order.seconds_left), self._at_deadline, work)
        try:
            await work.quiet.wait()
            await self._checkpoints.flush(account)
        except asyncio.CancelledError:
            await self._say_last_words(work, account)
            raise
        finally:
            timer.cancel()
            del self._held[work]
            self._dispatcher.forget(work)

    async def _say_last_words(self, work: Work, account: Account) -> None:
        """The worker must stop now, or the shard was taken away: register what is answered, if that is quick."""
        self._dispatcher.end(work, End.LEAVE)
        work.abort()
        with contextlib.suppress(TimeoutError):  # a request may wait for the slot of another model, which takes long
            async with asyncio.timeout(_LAST_WORDS_SECONDS / 3):
                await work.quiet.wait()
        with contextlib.suppress(TimeoutError, StorageError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS * 2 / 3):
                await self._checkpoints.flush(account)

    def _start_helpers(self) -> None:
        if not self._helpers:
            self._helpers = [
                asyncio.create_task(self._control(), name="batch control"),
                asyncio.create_task(self._share(), name="batch shares"),
                asyncio.create_task(self._checkpoints.run(), name="batch checkpoints"),
            ]

    async def _control(self) -> None:
        """Look twice a second what became of the batches in hand."""
        while True:
            await asyncio.sleep(CONTROL_SECONDS)
            try:
                await self._look()
            except DatabaseError as error:
                log.debug("the orders of batches cannot be read: %s", error)
            except Exception:  # shards that nobody controls would never end
                log.exception("the control of batches stumbled")

    async def _look(self) -> None:
        """Only at what is held now: a shard that comes in while the orders are read has none among them."""
        held = dict(self._held)
        for work, (ctx, account) in held.items():
            self._watch(work, ctx, account)
        if not held:
            return
        orders = await self._batches.orders(sorted({work.batch_id for work in held}))
        for work in held:
            if work in self._held:
                self._follow(work, orders.get(work.batch_id))
        still = {work.batch_id for work in self._held}
        self._paces = {id: pace for id, pace in self._paces.items() if id in still}
        await self._note_full_disk(still)

    async def _note_full_disk(self, batch_ids: set[str]) -> None:
        """The dispatcher sends nothing while too little is free; whoever asks should be told why."""
        disk = self._dispatcher.disk
        disk.has_room(
            self._dispatcher.limits.bytes.in_use
        )  # nobody else may look, if every slot is taken or none needed
        if (trouble := disk.trouble) is not None and time.monotonic() - self._noted_at >= NOTE_SECONDS:
            self._noted_at = time.monotonic()
            for id in batch_ids:
                await self._waits.note(id, DISK, trouble)

    async def _share(self) -> None:
        """Gateways with a limit over all workers are divided among those that live."""
        while self._dispatcher.is_shared:
            try:
                workers = await live_workers(self._batches.queue, SHARD)
            except DatabaseError as error:
                log.debug("the workers cannot be counted: %s", error)
            else:
                self._dispatcher.share(workers)
            await asyncio.sleep(_SHARE_SECONDS)

    def _watch(self, work: Work, ctx: Context, account: Account) -> None:
        if ctx.stopping:
            self._dispatcher.end(work, End.LEAVE)
        elif account.is_lost:
            self._dispatcher.end(work, End.LOST)
            work.abort()
        if work.end is None:
            share = work.share
            ctx.progress(work.total - share.unsent - share.in_flight - share.retrying)

    def _follow(self, work: Work, order: Order | None) -> None:
        if order is None:
            self._dispatcher.end(work, End.LOST)
            work.abort()
        elif order.status != BatchStatus.IN_PROGRESS or order.stop_reason:
            self._dispatcher.end(work, End.STOP)
            grace = self._settings.cancel_grace_seconds
            if order.stop_reason == "cancel" and (order.stopped_seconds or 0.0) >= grace:
                work.abort()
        elif order.paused:
            self._dispatcher.end(work, End.PAUSE)
        else:
            self._apply(work, order)

    def _apply(self, work: Work, order: Order) -> None:
        pace = self._paces.setdefault(order.id, _Pace())
        work.lane.schedule.change(
            order.id,
            priority=order.priority,
            at_risk=pace.is_at_risk(order),
            in_flight_max=order.limits.get("max_in_flight"),
        )
        work.lane.wake.set()

    def _at_deadline(self, work: Work) -> None:
        """By the clock, not by the next look: what is in flight ends by its own timeout, or is aborted soon after."""
        self._dispatcher.end(work, End.DEADLINE)
        asyncio.get_running_loop().call_later(ABORT_SECONDS, work.abort)
        errand = asyncio.create_task(self._batches.stop(work.batch_id, "deadline"))
        self._errands.add(errand)
        errand.add_done_callback(self._did)

    def _did(self, errand: asyncio.Task[bool]) -> None:
        self._errands.discard(errand)
        self._dispatcher.on_demand()  # shards that nobody had are cancelled: the batch may be due
        if not errand.cancelled() and (error := errand.exception()) is not None:
            log.warning("a batch could not be told that its window is over; upkeep will: %s", error)

    # After ------------------------------------------------------------------------------------------------------

    async def _outcome(self, ctx: Context, shard: Slice, work: Work) -> Outcome:
        if work.end in _HANDED_BACK:
            is_guarded = work.end is End.LEAVE and self._dispatcher.broken is not None
            self._give_back(ctx, shard, "guard_shutdown" if is_guarded else _HANDED_BACK[work.end])
        match work.end:
            case None:
                return Done(progress=(work.total, work.total))
            case End.DEADLINE:  # before anybody can join its shards and find lines without an answer and a reason
                await self._batches.stop(work.batch_id, "deadline")
                return Done()
            case End.STOP:
                return Done()
            case End.LOST:  # if the claim is ours all the same, the rest must be sent; if it is not, this is refused
                return Snooze(0, End.LOST.value)
            case End.PAUSE:  # what was in flight may have taken longer than the pause
                order = (await self._batches.orders([work.batch_id])).get(work.batch_id)
                return Snooze(0 if order is None else _pause_seconds(order), End.PAUSE.value)
            case End.LEAVE:
                return Snooze(0, End.LEAVE.value)
            case End.FULL:
                await self._waits.note(work.batch_id, DISK, End.FULL.value)
                return Snooze(NO_ROOM_SECONDS, End.FULL.value)
            case End.BROKEN:
                raise Transient(End.BROKEN.value, code="shard_broken")

    async def close(self) -> None:
        for task in (*self._helpers, *self._errands):
            task.cancel()
        await asyncio.gather(*self._helpers, *self._errands, return_exceptions=True)
        await asyncio.to_thread(self._checkpoints.syncer.close)


def _named(ctx: Context, shard: Slice) -> tracing.Attributes:
    return {"batch.id": shard.batch_id, "tenant.id": ctx.tenant, "batch.shard": shard.number}


def _pause_seconds(order: Order) -> float:
    """How long a shard sleeps while its batch is paused; 0 if it is not."""
    shortest, longest = PAUSED_SECONDS
    return 0.0 if order.paused_seconds is None else min(longest, max(shortest, order.paused_seconds))


class _Pace:
    """How fast a batch is, over all workers, and whether that is fast enough."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def is_at_risk(self, order: Order) -> bool:
        now = time.monotonic()
        self._seen.append((now, order.done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        if now - since < _RATE_SECONDS:
            return False
        rate = (order.done - before) / (now - since)
        return (order.total - order.done) > rate * order.seconds_left * _RISK_SHARE
