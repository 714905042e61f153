"""The shards that a worker process holds: how they are run, controlled and stopped."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from batchwright.batches.journal.checkpoint import Checkpoints
from batchwright.batches.journal.unregistered import UnregisteredAnswers
from batchwright.batches.plan.shards import Shard
from batchwright.batches.progress import RecentPace
from batchwright.batches.seal import Seal
from batchwright.batches.send.desk import Desk
from batchwright.batches.send.dispatch import Dispatcher
from batchwright.batches.send.overflow import Overflow
from batchwright.batches.send.provider import ProviderShardRun
from batchwright.batches.send.shard import ShardClaim, ShardRun
from batchwright.batches.send.sharing import Gift, Sharing
from batchwright.batches.store import SHARD, Control
from batchwright.batches.toolbox import Toolbox
from batchwright.batches.waits import DISK
from batchwright.engine.context import Context
from batchwright.engine.outcomes import Outcome
from batchwright.engine.workers import Workers
from batchwright.errors import BatchwrightError, DatabaseError
from batchwright.inference.budgets import live_workers
from batchwright.telemetry import tracing

log = logging.getLogger(__name__)

CONTROL_SECONDS = 0.5
NOTE_SECONDS = 30.0
"""How often it is noted that a batch waits for room on the disk."""
RELIEVE_SECONDS = 10.0
"""How often shards of a batch that would be late are redirected to a provider."""
_COUNT_WORKERS_SECONDS = 5.0


class ShardRunner:
    """The shards of a worker process."""

    def __init__(
        self,
        tools: Toolbox,
        dispatcher: Dispatcher,
        checkpoints: Checkpoints,
        unregistered: UnregisteredAnswers,
        seal: Seal,
        desk: Desk,
        *,
        ring: Callable[[Iterable[str]], None],
    ) -> None:
        self.tools = tools
        self.dispatcher = dispatcher
        self.checkpoints = checkpoints
        self.unregistered = unregistered
        self.seal = seal
        self.desk = desk
        self._ring = ring
        self._sharing = Sharing(Workers(tools.batches.queue.database))
        self._sending: set[ShardRun] = set()
        self._paces: dict[str, RecentPace] = {}
        self._noted_at = float("-inf")
        self._helpers: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[object]] = set()
        self._overflow = Overflow(tools, desk)
        self._relieve_at: dict[str, float] = {}

    @property
    def held(self) -> int:
        return len(self._sending)

    async def run(self, ctx: Context, shard: Shard) -> Outcome:
        """One claim of a shard. Its span lasts until the outcome is committed."""
        kind: type[ShardClaim] = ShardRun if shard.provider is None else ProviderShardRun
        run = kind(self, ctx, shard)
        span = tracing.span("process-shard", parent=ctx.traceparent, attributes=run.attributes, current=False)
        span.__enter__()
        ctx.when_settled(lambda _: span.__exit__(None, None, None))
        with tracing.handed(span.traceparent):
            try:
                return await run.begin(span.traceparent)
            except BaseException as error:
                span.error(error)
                raise

    async def close(self) -> None:
        for task in (*self._helpers, *self._errands):
            task.cancel()
        await asyncio.gather(*self._helpers, *self._errands, return_exceptions=True)
        await asyncio.to_thread(self.checkpoints.syncer.close)

    # Calls of runs ----------------------------------------------------------------------------------------------

    def add(self, run: ShardRun) -> None:
        """From now on the run is informed of changes to its batch."""
        if not self._helpers:
            self._helpers = [
                asyncio.create_task(self._control(), name="batch control"),
                asyncio.create_task(self._divide_totals(), name="batch shares"),
                asyncio.create_task(self.checkpoints.run(), name="batch checkpoints"),
            ]
        self._sending.add(run)

    def remove(self, run: ShardRun) -> None:
        self._sending.discard(run)

    def needs_express(self, control: Control, ctx: Context) -> bool:
        """Whether a batch would be late at its pace. If so, a background task may redirect shards to a provider."""
        pace = self._paces.setdefault(control.id, RecentPace())
        is_late = pace.needs_express(control)
        if is_late and self.desk.overflows and time.monotonic() >= self._relieve_at.get(control.id, 0.0):
            self._relieve_at[control.id] = math.inf
            self._run_in_background(self._relieve(control, pace.rate, ctx))
        return is_late

    async def _relieve(self, control: Control, rate: float, ctx: Context) -> None:
        try:
            await self._overflow.relieve(control, rate, ctx)
        except (BatchwrightError, OSError) as error:
            log.warning("batch %s would be late, and its shards cannot be redirected now: %s", control.id, error)
        finally:
            self._relieve_at[control.id] = time.monotonic() + RELIEVE_SECONDS

    def end_window(self, batch_id: str) -> None:
        """Order a batch to stop because its window has ended, in the background."""
        self._run_in_background(self.tools.batches.stop(batch_id, "deadline"))

    def _run_in_background(self, doing: Coroutine[Any, Any, object]) -> None:
        errand = asyncio.create_task(doing)
        self._errands.add(errand)
        errand.add_done_callback(self._finish_errand)

    def _finish_errand(self, errand: asyncio.Task[object]) -> None:
        self._errands.discard(errand)
        self.dispatcher.on_demand()  # shards that no worker had were cancelled, so the batch's own job may be due
        if not errand.cancelled() and (error := errand.exception()) is not None:
            log.warning("a step of a batch failed, and upkeep retries it: %s", error)

    # While shards are sent --------------------------------------------------------------------------------------

    async def _control(self) -> None:
        """Check the state of the current batches twice a second."""
        while True:
            await asyncio.sleep(CONTROL_SECONDS)
            try:
                await self._steer()
            except DatabaseError as error:
                log.debug("the controls of batches cannot be read: %s", error)
            except Exception:  # shards without a controller would never end
                log.exception("reading the controls of batches failed")

    async def _steer(self) -> None:
        """Apply controls only to shards that are held now: they may lack the batch of a shard that is added later."""
        held = set(self._sending)
        for run in held:
            run.watch()
        if not held:
            return
        controls = await self.tools.batches.controls(sorted({run.shard.batch_id for run in held}))
        for run in held:
            if run in self._sending:
                run.follow(controls.get(run.shard.batch_id))
        still = {run.shard.batch_id for run in self._sending}
        self._paces = {id: pace for id, pace in self._paces.items() if id in still}
        self._relieve_at = {id: due for id, due in self._relieve_at.items() if id in still}
        await self._note_full_disk(still)
        await self._share_work()

    async def _share_work(self) -> None:
        """Give a part of the unsent requests to idle workers."""
        for gift in await self._sharing.choose(self._sending):
            self._run_in_background(self._give(gift))

    async def _give(self, gift: Gift) -> None:
        if await gift.run.share(gift.requests, gift.parts):
            self._ring([gift.run.queue])

    async def _note_full_disk(self, batch_ids: set[str]) -> None:
        """Note why the dispatcher sends nothing while too little is free, so that users see it."""
        disk, in_flight = self.dispatcher.disk, self.dispatcher.limits.bytes.in_use
        disk.has_room(in_flight)  # no other code measures while all slots are taken or none is needed
        if (trouble := disk.trouble) is not None and time.monotonic() - self._noted_at >= NOTE_SECONDS:
            self._noted_at = time.monotonic()
            for id in batch_ids:
                await self.tools.waits.note(id, DISK, trouble)

    async def _divide_totals(self) -> None:
        """Divide the limits of gateways among live workers."""
        while self.dispatcher.has_totals:
            try:
                workers = await live_workers(self.tools.batches.queue.database, SHARD)
            except DatabaseError as error:
                log.debug("the workers cannot be counted: %s", error)
            else:
                self.dispatcher.divide_totals(workers)
            await asyncio.sleep(_COUNT_WORKERS_SECONDS)
