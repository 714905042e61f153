"""Sends the requests of one worker process: a lane per model, a task per request in flight.

    pump      a slot of the model → the next request of the schedule → a slot of all models, and of bytes → a task
    serve     read the line → send → judge → journal, or back into the schedule → give the slots back

A request that must wait before it is sent again waits in the schedule, without a slot. What a shard has not sent when
it is told to stop is not written anywhere: whoever writes the result files knows why it is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from batchwright.batches.disk import Disk
from batchwright.batches.envelopes import answered, id_on_the_wire, request_id, unanswered
from batchwright.batches.journal import Journal, Outcome
from batchwright.batches.lines import split
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.plan import TOKEN_BYTES
from batchwright.batches.planfile import Entry
from batchwright.batches.schedule import Item, Schedule, Share
from batchwright.errors import StorageError, StorageFull
from batchwright.inference.answers import Answer, Failure, Verdict, pause_seconds
from batchwright.inference.budgets import Budget
from batchwright.inference.gateway import Gateway, Gateways, Request
from batchwright.inference.limits import Hold, Limits, Slot
from batchwright.inference.limits import Lane as Room
from batchwright.inference.settings import GatewaySettings

log = logging.getLogger(__name__)

ABORT_SECONDS = 0.5
"""A request that has not ended this long after the deadline, by its own timeout, is aborted."""


FIRST_SHARDS_MAX = 16
"""Shards that may be the first of their batch, in one claim."""
FOLLOWERS_PER_SLOT = 2
"""While so many requests for each slot wait for the leaders of their groups, no other group begins."""
FULL_SECONDS = 0.5
"""How long a lane rests, or an answer waits in memory, before it is looked again whether there is room on the disk."""
_PRIORITY_LAST = 9
"""Here the first shards of a batch cannot be told from the others."""


class End(Enum):
    """Why a shard stops before its last request."""

    STOP = "the batch was told to stop"
    DEADLINE = "the completion window is over"
    PAUSE = "the batch is paused"
    LEAVE = "the worker stops"
    FULL = "there is no room for the journal"
    LOST = "another worker has the shard"
    BROKEN = "something broke; the log says what"


@dataclass(eq=False, slots=True, kw_only=True)
class Work:
    """One shard in this worker's hands."""

    batch_id: str
    tenant: str
    number: int
    claim: int
    total: int
    """Requests of the shard, those answered before included."""
    model: str
    traceparent: str | None
    deadline: float
    """By the monotonic clock."""
    descriptor: int
    """The input file."""
    journal: Journal
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of the batch's creator, for the model server."""
    share: Share = field(init=False)
    lane: Lane = field(init=False)
    end: End | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is in flight, and nothing will be sent any more."""

    def id(self, entry: Entry) -> str:
        """The line's id in the result files."""
        return request_id(self.batch_id, entry.offset)

    def request(self, entry: Entry, now: float) -> tuple[str, Request]:
        custom_id, url, body = split(os.pread(self.descriptor, entry.length, entry.offset))
        return custom_id, Request(
            url=url,
            body=body,
            id=id_on_the_wire(self.id(entry)),
            traceparent=self.traceparent,
            headers=self.headers,
            seconds_left=self.deadline - now,
        )

    def look(self) -> None:
        """After whatever happened: is it over?"""
        if self.share.is_empty:
            self.quiet.set()

    def abort(self) -> None:
        """Close the connections of what is in flight.

        A task that is cancelled before its first step never runs, and would keep its slots: let all of them begin.
        """
        loop = asyncio.get_running_loop()
        for task in list(self.tasks):
            loop.call_soon(task.cancel)


class Lane:
    """One model: its gateway, its limits, and what is to be sent."""

    def __init__(self, model: str, gateway: Gateway, room: Room, budget: Budget | None) -> None:
        self.model = model
        self.gateway = gateway
        self.room = room
        self.budget = budget
        self.schedule = Schedule()
        self.work: dict[Share, Work] = {}
        self.wake = asyncio.Event()
        self.has_asked = False
        """Since the last shard came, that there is little left to send was said once."""
        self.pump: asyncio.Task[None] | None = None

    async def rest(self, seconds: float | None) -> None:
        """Until something happens, or for so long."""
        self.wake.clear()
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            if timer is not None:
                timer.cancel()


class Dispatcher:
    """All lanes of a worker process."""

    def __init__(
        self,
        gateways: Gateways,
        limits: Limits,
        counts: BatchCounts,
        disk: Disk,
        *,
        budgets: Mapping[Gateway, Budget] | None = None,
        tenant_weights: Mapping[str, int] | None = None,
        on_demand: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gateways = gateways
        self.limits = limits
        self.counts = counts
        self.disk = disk
        self.on_demand = on_demand
        """Called when a lane is running dry, so that the next shard may be claimed."""
        self.lanes: dict[str, Lane] = {}
        self._budgets = budgets or {}
        self._weights = tenant_weights or {}
        self._clock = clock
        self.share(None)

    @property
    def broken(self) -> str | None:
        """What must not be: a slot was given back twice. Such a process takes no more work."""
        return self.limits.broken

    @property
    def is_shared(self) -> bool:
        """Whether a gateway has a limit over all workers."""
        return any(gateway.settings.concurrency_total for gateway in self.gateways.all())

    def share(self, workers: int | None) -> None:
        """Divide what gateways take from all workers together; before anybody counted them one request is right."""
        totals: dict[str, int] = {}
        for gateway in self.gateways.all():
            if total := gateway.settings.concurrency_total:
                totals[gateway.endpoint] = min(total, totals.get(gateway.endpoint, total))
        for endpoint, total in totals.items():
            self.limits.share(endpoint, 1 if workers is None else max(1, total // workers))

    def passes_through(self, model: str) -> Sequence[str]:
        """The headers of creators that the model's gateway wants."""
        gateway = self.gateways.of(model)
        return () if gateway is None else gateway.settings.passthrough_headers

    def serves(self, model: str) -> bool:
        return self.gateways.of(model) is not None

    def wanted(self, model: str, priority: int, room: int) -> int:
        """How many shards of this model and priority to claim.

        Those that nothing in hand is more urgent than, for they may be the first of their batch; else one, as soon as
        less than two rounds of requests are left to send. An idle lane takes one, so that others have their share.
        """
        if self.broken or not self.serves(model):
            return 0
        lane = self.lanes.get(model)
        urgent = None if lane is None else lane.schedule.most_urgent
        if lane is None or urgent is None:
            return min(room, 1)
        if priority <= urgent < _PRIORITY_LAST:
            return min(room, FIRST_SHARDS_MAX)
        return 1 if room > FIRST_SHARDS_MAX and self._is_low(lane) else 0

    @staticmethod
    def _is_low(lane: Lane) -> bool:
        """What batches with a limit of their own hold back does not count: free slots could not send it."""
        schedule = lane.schedule
        enough = 2 * lane.room.adaptive.limit
        waiting = schedule.unsent + schedule.retrying
        return waiting < enough or waiting - schedule.held_back < enough

    # A shard comes and goes -------------------------------------------------------------------------------------

    def begin(self, work: Work, entries: list[Entry], *, priority: int) -> None:
        """Queue the shard's requests; `work.quiet` says when all of them are through."""
        lane = self._lane(work.model)
        work.lane = lane
        weight = self._weights.get(work.tenant, 1)
        work.share = lane.schedule.add(
            work.batch_id, work.tenant, work.number, entries, priority=priority, weight=weight
        )
        lane.work[work.share] = work
        lane.has_asked = False
        if lane.pump is None or lane.pump.done():
            lane.pump = asyncio.create_task(self._pump(lane), name=f"pump {work.model}")
        lane.wake.set()
        work.look()

    def end(self, work: Work, reason: End) -> None:
        """Send nothing more of this shard; what is in flight may end."""
        if work.end is None:
            work.end = reason
            work.lane.schedule.withdraw(work.share)
            work.look()

    def forget(self, work: Work) -> None:
        work.lane.work.pop(work.share, None)

    def _lane(self, model: str) -> Lane:
        lane = self.lanes.get(model)
        if lane is None:
            gateway = self.gateways.of(model)
            assert gateway is not None, "shards of models without a gateway are not claimed"
            room = self.limits.lane(gateway.endpoint, model, now=self._clock())
            lane = self.lanes[model] = Lane(model, gateway, room, self._budgets.get(gateway))
        return lane

    # Requests ---------------------------------------------------------------------------------------------------

    async def _pump(self, lane: Lane) -> None:
        """Start one request after the other, as fast as the limits allow."""
        try:
            await self._pump_on(lane)
        except Exception:  # nobody waits for this task: what it leaves behind must be tried again
            log.exception("the lane of %s broke down", lane.model)
            for work in list(lane.work.values()):
                self.end(work, End.BROKEN)

    async def _pump_on(self, lane: Lane) -> None:
        slots, schedule = lane.room.slots, lane.schedule
        while True:
            if not self.disk.has_room(self.limits.bytes.in_use):
                await lane.rest(FULL_SECONDS)
                continue
            slot = slots.slot()
            if not slot.enter_now():
                await slot.__aenter__()
            schedule.followers_max = FOLLOWERS_PER_SLOT * lane.room.adaptive.limit
            item = schedule.next(now := self._clock())
            if item is None:
                slot.leave()
                await self._idle(lane, now)
            else:
                await self._launch(lane, item, slot)

    async def _idle(self, lane: Lane, now: float) -> None:
        """Until there may be something to send; `now` is when there was nothing, for a later look would miss some."""
        due = lane.schedule.next_due(now)
        await lane.rest(None if due is None else max(0.0, due - now))

    async def _launch(self, lane: Lane, item: Item, slot: Slot) -> None:
        """With the model's slot in hand, wait for the rest of what a request needs, and start it."""
        work = lane.work[item.share]
        if lane.budget is not None:  # first, for this may take long: whoever waits here keeps nobody else waiting
            await lane.budget.take(_guess(item.entry), lambda: not item.share.is_withdrawn)
        while (pause := lane.room.wait_seconds(self._clock())) and not item.share.is_withdrawn:
            await lane.rest(min(pause, ABORT_SECONDS))
        rest = self.limits.rest(lane.room, item.entry.length)
        if not rest.enter_now():
            await rest.__aenter__()
        if item.share.is_withdrawn:
            rest.leave()
            slot.leave()
            lane.schedule.finished(item)
            work.look()
            return
        task = asyncio.create_task(self._serve(lane, work, item, slot, rest))
        work.tasks.add(task)
        task.add_done_callback(work.tasks.discard)
        if not lane.has_asked and self._is_low(lane):
            lane.has_asked = True
            self.on_demand()

    async def _serve(self, lane: Lane, work: Work, item: Item, slot: Slot, rest: Hold) -> None:
        """One request, once; the slots are given back when its line is in the journal."""
        again: float | None = None
        try:
            again = await self._attempt(lane, work, item)
        except asyncio.CancelledError:
            self._note_abortion(work, item)
        except StorageFull as error:
            log.warning("batch %s: %s", work.batch_id, error)
            self.end(work, End.FULL)
        except Exception as error:
            log.warning("batch %s: %r", work.batch_id, error)
            self.end(work, End.BROKEN)
        finally:
            rest.leave()
            slot.leave()
            if again is None:
                lane.schedule.finished(item)
            else:
                lane.schedule.again(item, again)
            lane.wake.set()
            work.look()

    async def _attempt(self, lane: Lane, work: Work, item: Item) -> float | None:
        """Send it; answers when to send it again, or None if that was that."""
        began = self._clock()
        custom_id, request = work.request(item.entry, began)
        sent = lane.room.sent(began)
        answer = await lane.gateway.send(request)
        now = self._clock()
        lane.room.heard(sent, answer, now)
        if lane.budget is not None:
            lane.budget.settle(_guess(item.entry), answer.usage.total)
        if answer.code == Failure.EXPIRED:
            self.end(work, End.DEADLINE)
            return None
        if (pause := self._pause_before_another(lane.gateway.settings, item, answer)) is not None:
            self.counts.retried(lane.model, answer)
            return now + pause
        await self._keep(work, item.entry, answered(work.id(item.entry), custom_id, answer), answer)
        self.counts.answered(lane.model, answer)
        return None

    async def _keep(self, work: Work, entry: Entry, line: bytes, answer: Answer) -> None:
        """Write a line to the journal. While the disk is full it stays in memory, with the slots of its request: it is
        lost only if the shard must end before there is room."""
        outcome = Outcome.OK if answer.succeeded else Outcome.FAILED
        while True:
            try:
                work.journal.append(entry.offset, outcome, line, answer.usage)
            except StorageFull as error:
                if work.journal.broken is not None:
                    raise
                self.disk.refuse(str(error))  # the pump may wait for the very slot that this answer holds
                await asyncio.sleep(FULL_SECONDS)
            else:
                return

    @staticmethod
    def _note_abortion(work: Work, item: Item) -> None:
        """At the deadline the server may have worked on it; otherwise whoever writes the files knows what to say."""
        if work.end is End.DEADLINE:
            custom_id, _ = work.request(item.entry, work.deadline)
            line = unanswered(work.id(item.entry), custom_id, Failure.DEADLINE.value)
            with contextlib.suppress(StorageError):
                work.journal.append(item.entry.offset, Outcome.FAILED, line)

    @staticmethod
    def _pause_before_another(settings: GatewaySettings, item: Item, answer: Answer) -> float | None:
        """How long to wait before it is sent again; None if this is its answer."""
        match answer.verdict:
            case Verdict.ANSWER:
                return None
            case Verdict.UNAVAILABLE:  # a busy server is waited for until the deadline
                item.refusals += 1
                attempt = item.refusals
            case Verdict.COUNTED:
                item.tries += 1
                attempt = item.tries
                if attempt > settings.max_retries:
                    return None
        return pause_seconds(answer, attempt, initial=settings.initial_backoff, longest=settings.max_backoff)

    # ------------------------------------------------------------------------------------------------------------

    def in_flight(self) -> Mapping[str, int]:
        return {model: lane.schedule.in_flight for model, lane in self.lanes.items()}

    async def close(self) -> None:
        pumps = [lane.pump for lane in self.lanes.values() if lane.pump is not None]
        tasks: list[asyncio.Task[Any]] = [*pumps]
        for lane in self.lanes.values():
            for work in lane.work.values():
                tasks += work.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.gateways.__aexit__(None, None, None)


def _guess(entry: Entry) -> int:
    """The tokens of a request, before anybody has counted them."""
    return entry.length // TOKEN_BYTES
