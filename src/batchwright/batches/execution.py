"""The life of a shard on a worker: take up what is there, send the rest, register it, and say how it ended.

    look at the batch → input and plan → what was answered before → send → checkpoint → Done | Snooze

It ends early when its batch is told to stop or to pause, at the deadline, when the worker stops, when the disk is full,
or when another worker has it. Whatever was answered is registered before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterator

from batchwright.batches.checkpoint import Account, Checkpoints, Owner
from batchwright.batches.dispatch import ABORT_SECONDS, Dispatcher, End, Work
from batchwright.batches.files import Files
from batchwright.batches.journal import FULL
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.planfile import Entry, plan_path, read_entries, safe_name
from batchwright.batches.settings import BatchSettings
from batchwright.batches.shards import Slice
from batchwright.batches.store import AWAY_SECONDS, SHARD, Batch, Batches, Order, Stranger, refuse_stranger
from batchwright.batches.takeover import Takeover
from batchwright.batches.workspace import Workspace
from batchwright.engine.context import Context
from batchwright.engine.jobs import Done, Outcome, Snooze
from batchwright.errors import (
    Conflict,
    DatabaseError,
    Fatal,
    NotFound,
    OperationError,
    RetryLater,
    StorageError,
    StorageFull,
    StorageUnavailable,
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
FULL_DISKS_MAX = 3
_HANDED_BACK = (End.BROKEN, End.FULL, End.LEAVE)
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
        counts: BatchCounts,
        settings: BatchSettings,
    ) -> None:
        self._batches = batches
        self._files = files
        self._workspace = workspace
        self._dispatcher = dispatcher
        self._checkpoints = checkpoints
        self._takeover = takeover
        self._counts = counts
        self._settings = settings
        self._held: dict[Work, tuple[Context, Account]] = {}
        self._paces: dict[str, _Pace] = {}
        self._helpers: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[bool]] = set()

    @property
    def held(self) -> int:
        return len(self._held)

    async def run(self, ctx: Context, shard: Slice) -> Outcome:
        """One claim of a shard."""
        try:
            order = (await self._batches.orders([shard.batch_id])).get(shard.batch_id)
            if order is None or order.status != BatchStatus.IN_PROGRESS or order.stop_reason:
                return Done()
            refuse_stranger(ctx, order.id, order.job_id)
            if (reason := await self._hindrance(shard, order)) is not None:
                return Snooze(_pause_seconds(order) or NO_ROOM_SECONDS, reason)
            with self._workspace.use(shard.batch_id):
                return await self._run(ctx, shard, order)
        except StorageFull as error:
            return await self._no_room(shard.batch_id, str(error))
        except OSError as error:
            if error.errno not in FULL:
                raise await self._judged(ctx, shard, error) from error
            return await self._no_room(shard.batch_id, str(error))
        except Stranger:
            raise
        except NotFound as error:
            await self._batches.stop(shard.batch_id, "error", {"code": "input_gone", "message": str(error)})
            return Done()
        except Exception as error:
            raise await self._judged(ctx, shard, error) from error

    async def _hindrance(self, shard: Slice, order: Order) -> str | None:
        """Why the shard cannot run here now."""
        if order.paused:
            return End.PAUSE.value
        if not self._dispatcher.serves(shard.model):
            return f"this worker has no gateway for {shard.model}"
        is_here = self._workspace.input(shard.batch_id).exists()
        if not is_here and not await asyncio.to_thread(self._workspace.has_room):
            return "the work folder is full"
        return None

    async def _judged(self, ctx: Context, shard: Slice, error: Exception) -> Exception:
        """An error that ends this shard for good ends its batch, and what is in flight elsewhere may still end."""
        if isinstance(error, RetryLater):
            return error
        if isinstance(error, (Conflict, DatabaseError)):  # an earlier claim of ours has not ended yet, or an outage
            self._counts.given_back("db_transient")
            return RetryLater(str(error), 1.0)
        if isinstance(error, StorageError) and not isinstance(error, StorageUnavailable):
            error = Fatal(str(error), code="storage_error")
        elif not isinstance(error, OperationError):
            log.warning("a shard of %s will be tried again: %r", shard.batch_id, error)
            error = Transient(str(error), code="unexpected")
        if not isinstance(error, Transient) or ctx.attempt >= ctx.max_attempts:
            code = getattr(error, "code", None) or "system_error"
            await self._batches.stop(shard.batch_id, "error", {"code": code, "message": str(error)})
        return error

    async def _run(self, ctx: Context, shard: Slice, order: Order) -> Outcome:
        batch = await self._batches.get(shard.batch_id, tenant=None)
        owner = Owner(batch_id=batch.id, shard=shard.number, model=shard.model, job_id=ctx.job_id, job_claim=ctx.claim)
        with self._waiting_for_store():
            descriptor = await self._open_input(batch)
        try:
            with self._waiting_for_store():
                entries = await self._entries(batch, shard)
                done = await self._take_up(ctx, owner)
            path = self._workspace.journal(batch.id, shard.number, ctx.claim)
            account = self._checkpoints.open(owner, path)
            try:
                work = self._work(ctx, batch, shard, order, descriptor, account, len(entries))
                pending = [entry for entry in entries if entry.offset not in done]
                ctx.progress(len(entries) - len(pending), len(entries))
                await self._send(ctx, work, account, pending, order)
            finally:
                self._checkpoints.close(account)
        finally:
            os.close(descriptor)
        return await self._outcome(ctx, work)

    def _work(
        self, ctx: Context, batch: Batch, shard: Slice, order: Order, descriptor: int, account: Account, total: int
    ) -> Work:
        return Work(
            total=total,
            batch_id=batch.id,
            tenant=batch.tenant,
            number=shard.number,
            claim=ctx.claim,
            model=shard.model,
            endpoint=batch.endpoint,
            traceparent=ctx.traceparent,
            deadline=time.monotonic() + order.seconds_left,
            descriptor=descriptor,
            journal=account.journal,
        )

    # Before -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _waiting_for_store(self) -> Iterator[None]:
        """Nothing is sent yet, so a store that is away costs time, until the window is over, and no attempt."""
        try:
            yield
        except StorageUnavailable as error:
            self._counts.given_back("db_transient")
            raise RetryLater(str(error), AWAY_SECONDS) from error

    async def _open_input(self, batch: Batch) -> int:
        file = await self._files.get(batch.input_file_id, tenant=None, also_gone=True)
        path = await self._workspace.fetch_input(batch.id, self._files.store, file.key, file.bytes)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    async def _entries(self, batch: Batch, shard: Slice) -> list[Entry]:
        folder = await self._workspace.fetch_plan(batch.id, self._files.store)
        plan = plan_path(folder, safe_name(shard.model))
        return await asyncio.to_thread(read_entries, plan, shard.start, shard.count)

    async def _take_up(self, ctx: Context, owner: Owner) -> set[int]:
        """The offsets that have their answer from an earlier claim."""
        done, adopted = await self._takeover.of_shard(owner)
        if ctx.claim > 1:
            self._counts.recovered(BatchStatus.IN_PROGRESS, "resumed" if done else "re_enqueued")
        if adopted:
            ctx.emit("batch.answers_adopted", f"{adopted} answers of a dead worker were kept", answers=adopted)
        return done

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
        for work, (ctx, account) in list(self._held.items()):
            self._watch(work, ctx, account)
        if self._held:
            orders = await self._batches.orders(sorted({work.batch_id for work in self._held}))
            for work in list(self._held):
                self._follow(work, orders.get(work.batch_id))
            self._paces = {id: pace for id, pace in self._paces.items() if id in orders}

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

    async def _outcome(self, ctx: Context, work: Work) -> Outcome:
        if work.end in _HANDED_BACK:
            self._counts.given_back(self._why_given_back(work.end))
            with tracing.detached("re-enqueue", link=ctx.traceparent) as span:
                span.set({"batch.id": work.batch_id, "tenant.id": work.tenant, "batch.shard": work.number})
        match work.end:
            case None:
                return Done(progress=(work.total, work.total))
            case End.DEADLINE:  # before anybody can join its shards and find lines without an answer and a reason
                await self._batches.stop(work.batch_id, "deadline")
                return Done()
            case End.STOP | End.LOST:
                return Done()
            case End.PAUSE:  # what was in flight may have taken longer than the pause
                order = (await self._batches.orders([work.batch_id])).get(work.batch_id)
                return Snooze(0 if order is None else _pause_seconds(order), End.PAUSE.value)
            case End.LEAVE:
                return Snooze(0, End.LEAVE.value)
            case End.FULL:
                return await self._no_room(work.batch_id, End.FULL.value)
            case End.BROKEN:
                raise Transient(End.BROKEN.value, code="shard_broken")

    def _why_given_back(self, end: End) -> str:
        if end is not End.LEAVE:
            return "system_error"
        return "guard_shutdown" if self._dispatcher.broken else "none"

    async def _no_room(self, batch_id: str, message: str) -> Outcome:
        """Room may come back; a batch that finds none three times ends."""
        if await self._batches.note_full_disk(batch_id, seconds=NO_ROOM_SECONDS / 2) < FULL_DISKS_MAX:
            return Snooze(NO_ROOM_SECONDS, message)
        await self._batches.stop(batch_id, "error", {"code": "disk_full", "message": message})
        return Done()

    async def close(self) -> None:
        for task in (*self._helpers, *self._errands):
            task.cancel()
        await asyncio.gather(*self._helpers, *self._errands, return_exceptions=True)
        await asyncio.to_thread(self._checkpoints.syncer.close)


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
