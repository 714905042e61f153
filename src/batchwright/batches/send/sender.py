"""Sends the requests of one model, with a task per request in flight.

    pump      a slot of the model → the next request of the schedule → a slot of all models, and of bytes → a task
    serve     read the line → send
    conclude  judge → journal, or back into the schedule → give the slots back; for all answers of a turn together

A request that waits for a retry is in the schedule, without a slot. If a shard must stop, requests that were not sent
are not recorded: the code that writes the result files knows why they have no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from batchwright.batches.journal.envelopes import answered, unanswered
from batchwright.batches.journal.journal import Line
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.plan.plan import TOKEN_BYTES
from batchwright.batches.plan.planfile import Entry
from batchwright.batches.send.disk import Disk
from batchwright.batches.send.health import Health
from batchwright.batches.send.schedule import Backlog, Item, Schedule
from batchwright.batches.send.work import End, Work
from batchwright.batches.tally import LineStatus
from batchwright.errors import StorageError, StorageFull
from batchwright.inference.adaptive import Sent
from batchwright.inference.answers import Answer, Failure, Verdict, pause_seconds
from batchwright.inference.budgets import Budget
from batchwright.inference.gateway import Gateway
from batchwright.inference.limits import Limits, ModelLimit, Permit

log = logging.getLogger(__name__)

ABORT_SECONDS = 0.5
"""A request that has not ended this long after the deadline, by its own timeout, is aborted."""
FOLLOWERS_PER_SLOT = 2
"""While this many requests per slot wait for the leaders of their groups, no other group begins."""
FULL_SECONDS = 0.5
"""How long a sender pauses, or an answer waits in memory, before the disk is checked for room again."""

Answered = tuple[Work, Item, Permit, Sent, str, Answer]
"""A request with its answer; the text is its custom_id."""

_ANSWER, _FAILED, _OK = Verdict.ANSWER, LineStatus.FAILED, LineStatus.OK
"""Used for every request; access through the enum takes five times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the senders of a worker process share."""

    limits: Limits
    counts: BatchCounts
    disk: Disk
    health: Health
    on_demand: Callable[[], None]
    """Called when a sender has few requests left, so that the next shard may be claimed."""
    clock: Callable[[], float]


class Sender:
    """One model: its gateway, its limits, and what is to be sent."""

    def __init__(self, model: str, gateway: Gateway, budget: Budget | None, shared: Shared) -> None:
        self.model = model
        self.gateway = gateway
        self.budget = budget
        self.clock = shared.clock
        self.limit: ModelLimit = shared.limits.of_model(gateway.endpoint, model, now=self.clock())
        self.schedule = Schedule()
        self.work: dict[Backlog, Work] = {}
        self.wake = asyncio.Event()
        self.pump: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._shared = shared
        self._answered: list[Answered] = []
        """Answers of this turn of the event loop; they are concluded together at its end."""
        self._has_asked = False
        """Whether `on_demand` was called since the last shard was added."""

    @property
    def is_low(self) -> bool:
        """Whether less than two rounds of requests are left to send.

        Requests that a batch's own limit holds back do not count: free slots could not send them.
        """
        schedule = self.schedule
        enough = 2 * self.limit.adaptive.limit
        waiting = schedule.unsent + schedule.retrying
        return waiting < enough or waiting - schedule.held_back < enough

    @property
    def seconds_left(self) -> float:
        """How long the waiting requests will take; unknown before the first answer."""
        rounds = (self.schedule.unsent + self.schedule.retrying) / self.limit.adaptive.limit
        return rounds * (self.limit.adaptive.round_seconds or inf) if rounds else 0.0

    def add(self, work: Work, entries: list[Entry], *, priority: int, weight: int) -> None:
        work.sender = self
        work.backlog = self.schedule.add(
            work.batch_id, work.tenant, work.place, entries, priority=priority, weight=weight
        )
        self.work[work.backlog] = work
        self._has_asked = False
        if self.pump is None or self.pump.done():
            self.pump = asyncio.create_task(self._pump(), name=f"pump {self.model}")
        self.wake.set()
        work.look()

    # Starting requests --------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        try:
            await self._pump_on()
        except Exception:  # no caller awaits this task, so its shards must be retried
            log.exception("the sender of %s failed", self.model)
            for work in list(self.work.values()):
                work.stop(End.BROKEN)

    async def _pump_on(self) -> None:
        """Start requests as fast as the limits allow."""
        limits, limit, schedule, disk = self._shared.limits, self.limit, self.schedule, self._shared.disk
        while True:
            if not disk.has_room(limits.bytes.in_use):
                await self._rest(FULL_SECONDS)
                continue
            permit = Permit(limits, limit)
            if not permit.take_slot_now():
                await permit.take_slot()
            schedule.followers_max = FOLLOWERS_PER_SLOT * limit.adaptive.limit
            item = schedule.next(now := self.clock())
            if item is None:
                permit.give_back()
                await self._idle(now)
            elif not self._launch_now(item, permit, now):
                await self._launch(item, permit)

    async def _idle(self, now: float) -> None:
        """Wait until there may be something to send. `now` is when there was nothing: with a later time, something that
        became ready in between would be missed."""
        due = self.schedule.next_due(now)
        await self._rest(None if due is None else max(0.0, due - now))

    async def _rest(self, seconds: float | None) -> None:
        """Wait until something happens, or for this long."""
        self.wake.clear()
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _launch_now(self, item: Item, permit: Permit, now: float) -> bool:
        """Start a request that has to wait for nothing, without the cost of a coroutine; False if it must wait."""
        if self.budget is not None or self.limit.wait_seconds(now) or not permit.take_rest_now(item.entry.length):
            return False
        self._start(self.work[item.backlog], item, permit)
        return True

    async def _launch(self, item: Item, permit: Permit) -> None:
        """With the model's slot taken, wait for the other slots that a request needs, and start it."""
        backlog, length = item.backlog, item.entry.length
        work = self.work[backlog]
        if self.budget is not None:  # first: this may take long, and nothing is held that other models need
            await self.budget.take(_guess_tokens(item.entry), lambda: not backlog.is_withdrawn)
        while (pause := self.limit.wait_seconds(self.clock())) and not backlog.is_withdrawn:
            await self._rest(min(pause, ABORT_SECONDS))
        if not permit.take_rest_now(length):
            await permit.take_rest(length)
        if backlog.is_withdrawn:
            permit.give_back()
            self.schedule.finished(item)
            work.look()
            return
        self._start(work, item, permit)

    def _start(self, work: Work, item: Item, permit: Permit) -> None:
        work.tasks[item] = self._loop.create_task(self._serve(work, item, permit))
        if not self._has_asked and self.is_low:
            self._has_asked = True
            self._shared.on_demand()

    # One request --------------------------------------------------------------------------------------------------

    async def _serve(self, work: Work, item: Item, permit: Permit) -> None:
        """Send a request once; its answer waits for the others of this turn of the event loop."""
        try:
            began = self.clock()
            custom_id, request = work.request(item.entry, began)
            sent = self.limit.sent(began)
            self._shared.health.sent(began)
            answer = await self.gateway.send(request)
        except asyncio.CancelledError:
            _note_abortion(work, item)
        except Exception as error:
            _note_trouble(work, error)
        else:
            if not self._answered:
                self._loop.call_soon(self._conclude)
            self._answered.append((work, item, permit, sent, custom_id, answer))
            return
        finally:
            del work.tasks[item]
        self._end(work, [(item, permit)])

    # The answers of one turn of the event loop --------------------------------------------------------------------

    def _conclude(self) -> None:
        """Write the answers with one call per journal, and give their slots back."""
        groups: dict[Work, list[Answered]] = {}
        for one in self._answered:
            groups.setdefault(one[0], []).append(one)
        now = self.clock()
        self._note_health([one[-1] for one in self._answered], now)
        self._answered.clear()
        for work, group in groups.items():
            ended: Sequence[tuple[Item, Permit]] = [(item, permit) for _, item, permit, *_ in group]
            try:
                judged = [(one, line) for one in group if (line := self._judge(one, now)) is not None]
                if self._keep(work, [line for _, line in judged]):
                    self._shared.counts.answered(self.model, *(one[-1] for one, _ in judged))
                else:
                    ended = self._keep_later(work, judged, ended)
            except Exception as error:
                _note_trouble(work, error)
            self._end(work, ended)

    def _note_health(self, answers: Sequence[Answer], now: float) -> None:
        """Record whether each answer is usable, for people who watch."""
        health, is_answered = self._shared.health, False
        for answer in answers:
            if answer.succeeded:
                is_answered = True
            else:
                health.failed(answer, now)
        if is_answered:
            health.succeeded(now)

    def _end(self, work: Work, requests: Sequence[tuple[Item, Permit]]) -> None:
        """Give back the slots of requests that were answered or will be resent."""
        schedule = self.schedule
        for item, permit in requests:
            permit.give_back()
            if item.is_in_flight:
                schedule.finished(item)
        self.wake.set()
        work.look()

    def _judge(self, one: Answered, now: float) -> Line | None:
        """The line for the journal; None if the request is resent, or it is too late for it."""
        work, item, _, sent, custom_id, answer = one
        self.limit.heard(sent, answer, now)
        if self.budget is not None:
            self.budget.settle(_guess_tokens(item.entry), answer.usage.total, answer)
        if answer.code is not None and answer.code == Failure.EXPIRED:
            work.stop(End.DEADLINE)
            return None
        if answer.verdict is not _ANSWER and (pause := self._pause_before_another(item, answer)) is not None:
            self._shared.counts.retried(self.model, answer)
            self.schedule.again(item, now + pause)
            return None
        offset = item.entry.offset
        line = answered(work.ids.in_files(offset), custom_id, answer)
        return offset, _OK if answer.succeeded else _FAILED, line, answer.usage

    def _pause_before_another(self, item: Item, answer: Answer) -> float | None:
        """How long to wait before it is resent; None if this is its final answer."""
        settings = self.gateway.settings
        if answer.verdict is Verdict.UNAVAILABLE:  # retried until the deadline
            item.refusals += 1
            attempt = item.refusals
        else:
            item.tries += 1
            attempt = item.tries
            if attempt > settings.max_retries:
                return None
        return pause_seconds(answer, attempt, initial=settings.initial_backoff, longest=settings.max_backoff)

    def _keep(self, work: Work, lines: Sequence[Line]) -> bool:
        """Write lines to the journal; False while the disk is full."""
        if not lines:
            return True
        try:
            work.journal.append_all(lines)
        except StorageFull as error:
            if work.journal.broken is not None:
                raise
            self._shared.disk.refuse(str(error))  # the pump may be waiting for the slots that these answers hold
            return False
        return True

    def _keep_later(
        self, work: Work, judged: Sequence[tuple[Answered, Line]], requests: Sequence[tuple[Item, Permit]]
    ) -> Sequence[tuple[Item, Permit]]:
        """Hold lines in memory until the disk has room, each with the slots of its request; returns the others."""
        for (_, item, permit, *_, answer), line in judged:
            work.tasks[item] = self._loop.create_task(self._hold(work, item, permit, line, answer))
        return [(item, permit) for item, permit in requests if item not in work.tasks]

    async def _hold(self, work: Work, item: Item, permit: Permit, line: Line, answer: Answer) -> None:
        """Retry to write a line; it is lost only if the shard must end before there is room."""
        try:
            while True:
                if self._keep(work, [line]):
                    self._shared.counts.answered(self.model, answer)
                    break
                await asyncio.sleep(FULL_SECONDS)
        except asyncio.CancelledError:
            _note_abortion(work, item)
        except Exception as error:
            _note_trouble(work, error)
        finally:
            del work.tasks[item]
        self._end(work, [(item, permit)])


def _note_abortion(work: Work, item: Item) -> None:
    """Record an aborted request at the deadline, because the server may have worked on it. In other cases the code that
    writes the files adds the reason."""
    if work.end is End.DEADLINE:
        offset = item.entry.offset
        custom_id, _ = work.request(item.entry, work.deadline)
        line = unanswered(work.ids.in_files(offset), custom_id, Failure.DEADLINE.value)
        with contextlib.suppress(StorageError):
            work.journal.append(offset, _FAILED, line)


def _note_trouble(work: Work, error: Exception) -> None:
    log.warning("batch %s: %r", work.batch_id, error)
    work.stop(End.FULL if isinstance(error, StorageFull) else End.BROKEN)


def _guess_tokens(entry: Entry) -> int:
    """Estimated tokens of a request, before the server has counted them."""
    return entry.length // TOKEN_BYTES
