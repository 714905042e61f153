"""Which request of a model is sent next.

    class       express (the first 256 requests of a batch, or the batch is at risk) before bulk, but 1 of 20 is bulk
      priority    the lowest number first
        tenant      take turns; each sends as many requests in a row as its weight
          batch       take turns
            retries that are due, then the shards by number
              followers whose leader was answered, then the plan

A retry has the class that its batch has at that time, and does not count towards the first 256.

Only batches that can send now are in the turns, so choosing a request takes the same time however much is queued. What
becomes ready only by time, a retry or the followers of a leader that takes too long, waits in its batch, which has one
alarm.

Nothing here reads a clock or waits: times are those of the caller's monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final
from weakref import WeakValueDictionary

from batchwright.batches.plan.planfile import Entry
from batchwright.batches.plan.shards import is_boundary
from batchwright.errors import Conflict

EXPRESS_REQUESTS = 256
BULK_EVERY = 20
LEADER_SECONDS = 30.0

IDLE_BATCHES_MAX = 1024
"""How many batches are remembered after their last backlog: their next shard must not be express again."""

PRIORITY = 5


class Unchanged(Enum):
    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


@dataclass(eq=False, slots=True)
class Item:
    """One request, from its first hand-out to its final answer; a retry hands out the same item again."""

    entry: Entry
    backlog: Backlog
    tries: int = 0
    refusals: int = 0
    """The sender counts both; this module never reads or writes them."""
    is_in_flight: bool = False
    followers: Followers | None = None
    """The entries that wait for it, if it leads a group."""


@dataclass(eq=False, slots=True)
class Followers:
    """Entries `start` to `end` of a backlog: a group without its leader, for which they wait until `due` at most."""

    backlog: Backlog
    start: int
    end: int
    due: float = inf
    are_waiting: bool = True


@dataclass(eq=False, slots=True)
class Backlog:
    """The requests of one shard in the schedule; the schedule changes it, others read it."""

    batch: str
    shard: int
    """The shards of a batch are sent in this order."""
    unsent: int = 0
    in_flight: int = 0
    retrying: int = 0
    """Requests that wait for a retry, whether or not it is due."""
    offered: Sequence[Entry] = ()
    """Entries that are set aside until it is known whether another worker gets them."""
    is_withdrawn: bool = False
    _entries: Sequence[Entry] = ()
    _position: int = 0
    _released: list[list[int]] = field(default_factory=list)
    """Followers that no longer wait, as a heap of [start, end]: disjoint, so that the first start may grow in place."""

    @property
    def left(self) -> int:
        """Requests that have no final answer yet."""
        return self.unsent + self.in_flight + self.retrying + len(self.offered)

    @property
    def is_empty(self) -> bool:
        """Whether every request has its final answer, or was withdrawn or given to another worker."""
        return not (self.in_flight or self.unsent or self.retrying or self.offered)

    @property
    def has_ready(self) -> bool:
        """Whether there is an entry that waits for no other."""
        return self._position < len(self._entries) or bool(self._released)

    @property
    def untouched(self) -> int:
        """Number of entries at the end that are in no group that has begun; the first entry of all is not counted."""
        return len(self._entries) - max(1, self._position)

    @property
    def leads_next(self) -> bool:
        """Whether the next entry leads a group."""
        entries, here = self._entries, self._position
        return not self._released and here + 1 < len(entries) and 0 != entries[here].group == entries[here + 1].group

    def take(self) -> Item:
        """The first entry that waits for no other; if it leads a group, the rest of the group is skipped."""
        self.unsent -= 1
        if self._released:
            return Item(self._entries[self._take_released()], self)
        start = self._position
        entry = self._entries[start]
        item = Item(entry, self)
        if not entry.group:
            self._position = start + 1
            return item
        self._position = end = self._group_end(start)
        if end - start > 1:
            item.followers = Followers(self, start + 1, end)
        return item

    def release(self, followers: Followers) -> None:
        heappush(self._released, [followers.start, followers.end])

    def set_aside(self, count: int) -> None:
        """Offer this many of the last entries, or a few less so that no group is divided."""
        entries = self._entries
        place = len(entries) - count
        latest = place + count // 4
        boundary = next((at for at in range(place, latest + 1) if is_boundary(entries, at)), place)
        self._entries, self.offered = entries[:boundary], entries[boundary:]
        self.unsent -= len(self.offered)

    def take_back(self) -> None:
        self._entries, self.offered = (*self._entries, *self.offered), ()

    def take_all(self, held: list[Followers]) -> list[Entry]:
        """Take everything unsent, in plan order; `held` are the followers that still wait. This ends the backlog."""
        parts = [*self._released, *([each.start, each.end] for each in held), [self._position, len(self._entries)]]
        taken = [entry for start, end in sorted(parts) for entry in self._entries[start:end]]
        self._entries, self._position, self._released = (), 0, []
        self.unsent = 0
        self.is_withdrawn = True
        return taken

    def _take_released(self) -> int:
        part = self._released[0]
        position = part[0]
        part[0] += 1
        if part[0] == part[1]:
            heappop(self._released)
        return position

    def _group_end(self, start: int) -> int:
        entries = self._entries
        group = entries[start].group
        end = start + 1
        while end < len(entries) and entries[end].group == group:
            end += 1
        return end


class Schedule:
    """The requests of one model that are to be sent.

    >>> schedule = Schedule()
    >>> backlog = schedule.add("batch_1", "acme", 0, [Entry(0, 120, 0)])
    >>> item = schedule.next(now=1.0)
    >>> schedule.finished(item)
    >>> backlog.is_empty
    True
    """

    def __init__(
        self,
        express_requests: int = EXPRESS_REQUESTS,
        bulk_every: int = BULK_EVERY,
        leader_seconds: float = LEADER_SECONDS,
    ) -> None:
        self.in_flight = 0
        """Requests that are handed out and not yet answered, of all batches."""
        self.retrying = 0
        """Requests that wait for a retry, of all batches."""
        self.unsent = 0
        """Requests that were never handed out, of all batches."""
        self.followers_max: int | None = None
        """While this many entries wait for their leaders, no other group begins. If more leaders are in flight than the
        server's cache can hold prefixes, the cache loses a prefix before its followers are sent."""
        self._express_requests = express_requests
        self._passed_over_max = bulk_every - 1
        self._leader_seconds = leader_seconds
        self._active: dict[str, _Batch] = {}
        self._capped: set[_Batch] = set()
        """Batches that have a backlog and a limit of requests in flight."""
        self._idle: OrderedDict[str, _Batch] = OrderedDict()
        self._tenants: WeakValueDictionary[str, _Tenant] = WeakValueDictionary()
        self._express = _Turns()
        self._bulk = _Turns()
        self._passed_over = 0
        """Express requests since the last bulk request, while there were bulk requests too."""
        self._waiting = 0
        """Entries that wait for their leaders, of all batches."""
        self._parked: dict[_Batch, None] = {}
        """Batches that are out of the turns, because their next entry leads a group and enough entries wait already."""
        self._alarms: list[tuple[float, int, _Batch]] = []
        self._sequence = count()

    @property
    def most_urgent(self) -> int | None:
        """The lowest priority number among the batches that have a backlog here."""
        return min((batch.priority for batch in self._active.values()), default=None)

    @property
    def held_back(self) -> int:
        """Unsent entries beyond the next two rounds, of batches with a limit of requests in flight."""
        if not self._capped:  # read before every request
            return 0
        return sum(max(0, batch.unsent - 2 * (batch.in_flight_max or 0)) for batch in self._capped)

    def add(
        self,
        batch: str,
        tenant: str,
        shard: int,
        entries: Sequence[Entry],
        *,
        priority: int | None = None,
        weight: int | None = None,
    ) -> Backlog:
        """Queues the unsent entries of a shard, in plan order.

        Priority is the batch's and weight the tenant's; the latest value applies. None leaves them unchanged: 5 and 1
        for new ones.
        """
        found = self._find_or_make(batch)
        if any(other.shard == shard and not other.is_withdrawn for other in found.backlogs):
            raise Conflict(f"shard {shard} of batch {batch} is in the schedule already; withdraw it first")
        if not found.backlogs:
            found.tenant = self._tenants.setdefault(tenant, _Tenant())
        if weight is not None:
            assert weight >= 1, f"tenant {tenant} weighs {weight}; the least is 1"
            found.tenant.weight = weight
        self.change(batch, priority=priority)
        backlog = Backlog(batch, shard, unsent=len(entries), _entries=tuple(entries))
        if entries:
            self._activate(found, backlog)
        return backlog

    def next(self, now: float) -> Item | None:
        """Hands out the next request, which is in flight from now on; None if there is none to be sent now."""
        if self._alarms and self._alarms[0][0] <= now:
            self._wake(now)
        may_lead = self.followers_max is None or self._waiting < self.followers_max
        if self._parked and may_lead:
            self._unpark()
        while (batch := self._choose()) is not None and not may_lead and batch.leads_next:
            batch.leave_turns()
            self._parked[batch] = None
        if batch is None:
            return None
        item = self._take_due(batch) if batch.due else self._take_unsent(batch, now)
        item.is_in_flight = True
        item.backlog.in_flight += 1
        batch.in_flight += 1
        self.in_flight += 1
        self._place(batch)
        return item

    def finished(self, item: Item) -> None:
        """The request has its final answer; if it led a group, its followers may be sent."""
        batch = self._land(item)
        self._close_if_empty(batch, item.backlog)
        self._place(batch)

    def again(self, item: Item, due: float) -> bool:
        """Puts the request back, to be resent at `due` or later; False if it is dropped with its withdrawn backlog."""
        batch = self._land(item)
        backlog = item.backlog
        if backlog.is_withdrawn:
            self._close_if_empty(batch, backlog)
        else:
            backlog.retrying += 1
            self.retrying += 1
            heappush(batch.retries, (due, next(self._sequence), item))
            self._set_alarm(batch, due)
        self._place(batch)
        return not backlog.is_withdrawn

    def withdraw(self, backlog: Backlog) -> list[Item]:
        """Removes what waits for a retry, then what was never sent, in plan order; what is in flight stays."""
        if backlog.is_empty or backlog.is_withdrawn:
            backlog.is_withdrawn = True
            return []
        batch = self._active[backlog.batch]
        self.unsent -= backlog.unsent
        self.retrying -= backlog.retrying
        self._waiting -= batch.waiting
        taken = batch.withdraw(backlog)
        self._waiting += batch.waiting
        self._close_if_empty(batch, backlog)
        self._place(batch)
        return taken

    def offer(self, backlog: Backlog, count: int) -> Sequence[Entry]:
        """Sets aside up to this many of the last entries, of groups that have not begun; `conclude` must follow."""
        assert not backlog.offered, f"shard {backlog.shard} of batch {backlog.batch} has an offer out already"
        if backlog.is_withdrawn or not (count := min(count, backlog.untouched)) > 0:
            return ()
        batch = self._active[backlog.batch]
        backlog.set_aside(count)
        self.unsent -= len(backlog.offered)
        if not backlog.has_ready:
            batch.ready = [ready for ready in batch.ready if ready[1] is not backlog]
            heapify(batch.ready)
        self._place(batch)
        return backlog.offered

    def conclude(self, backlog: Backlog, *, is_given: bool) -> None:
        """Ends an offer: another worker gets the entries, or they are sent here after all."""
        batch, count = self._active[backlog.batch], len(backlog.offered)
        if is_given or backlog.is_withdrawn:
            backlog.offered = ()
            self._close_if_empty(batch, backlog)
        else:
            if not backlog.has_ready:
                heappush(batch.ready, (backlog.shard, backlog))
            backlog.take_back()
            backlog.unsent += count
            self.unsent += count
        self._place(batch)

    def change(
        self,
        batch: str,
        *,
        priority: int | None = None,
        at_risk: bool | None = None,
        in_flight_max: int | Unchanged | None = UNCHANGED,
    ) -> None:
        """Changes the given values. `in_flight_max` limits the batch's requests in flight here; None means no limit.

        The values of a batch without a backlog are remembered, so this may be called before its first shard is added.
        """
        found = self._find_or_make(batch)
        if priority is not None and priority != found.priority:
            found.leave_turns()
            found.priority = priority
        if at_risk is not None:
            found.at_risk = at_risk
        if not isinstance(in_flight_max, Unchanged):
            found.in_flight_max = in_flight_max
            (self._capped.add if found.is_capped else self._capped.discard)(found)
        self._place(found)

    def next_due(self, now: float) -> float | None:
        """When something that is not ready now becomes ready by time: a retry is due, or a leader takes too long."""
        self._wake(now)
        due = min((batch.next_due() for batch in self._active.values() if batch.may_send), default=inf)
        return None if due == inf else due

    @property
    def next_retry(self) -> float | None:
        """When the first of the requests that wait for a retry may be sent; only for display."""
        return min((batch.retries[0][0] for batch in self._active.values() if batch.retries), default=None)

    def _find_or_make(self, name: str) -> _Batch:
        if (found := self._active.get(name)) is not None:
            return found
        if (found := self._idle.get(name)) is None:
            found = _Batch(name, _Tenant())
        self._keep_idle(found)
        return found

    def _keep_idle(self, batch: _Batch) -> None:
        self._idle[batch.name] = batch
        self._idle.move_to_end(batch.name)
        if len(self._idle) > IDLE_BATCHES_MAX:
            self._idle.popitem(last=False)

    def _activate(self, batch: _Batch, backlog: Backlog) -> None:
        self._idle.pop(batch.name, None)
        self._active[batch.name] = batch
        batch.backlogs.add(backlog)
        if batch.is_capped:
            self._capped.add(batch)
        heappush(batch.ready, (backlog.shard, backlog))
        self.unsent += backlog.unsent
        self._place(batch)

    def _close_if_empty(self, batch: _Batch, backlog: Backlog) -> None:
        if not backlog.in_flight and backlog.is_empty:
            batch.backlogs.discard(backlog)
            if not batch.backlogs:
                del self._active[batch.name]
                self._capped.discard(batch)
                self._keep_idle(batch)

    def _unpark(self) -> None:
        parked, self._parked = self._parked, {}
        for batch in parked:
            self._place(batch)

    def _choose(self) -> _Batch | None:
        if not self._bulk.levels:
            return self._express.next() if self._express.levels else None
        if self._express.levels and self._passed_over < self._passed_over_max:
            self._passed_over += 1
            return self._express.next()
        self._passed_over = 0
        return self._bulk.next()

    def _take_due(self, batch: _Batch) -> Item:
        item = batch.due.popleft()
        item.backlog.retrying -= 1
        self.retrying -= 1
        return item

    def _take_unsent(self, batch: _Batch, now: float) -> Item:
        backlog = batch.ready[0][1]
        item = backlog.take()
        if not backlog.has_ready:
            heappop(batch.ready)
        if item.followers is not None:
            item.followers.due = now + self._leader_seconds
            batch.followers.append(item.followers)
            size = item.followers.end - item.followers.start
            batch.waiting += size
            self._waiting += size
            self._set_alarm(batch, item.followers.due)
        batch.handed_out += 1
        self.unsent -= 1
        return item

    def _land(self, item: Item) -> _Batch:
        assert item.is_in_flight, f"the request at {item.entry.offset} of batch {item.backlog.batch} is not in flight"
        batch = self._active[item.backlog.batch]
        item.is_in_flight = False
        item.backlog.in_flight -= 1
        batch.in_flight -= 1
        self.in_flight -= 1
        if item.followers is not None:
            self._waiting -= batch.waiting
            batch.release(item.followers)
            self._waiting += batch.waiting
            item.followers = None
        return batch

    def _place(self, batch: _Batch) -> None:
        """Puts a batch into the turns of its class, or takes it out; call this after every change."""
        turns = None
        if (batch.ready or batch.due) and (batch.in_flight_max is None or batch.may_send):
            is_express = batch.at_risk or batch.handed_out < self._express_requests
            turns = self._express if is_express else self._bulk
        if turns is not batch.turns:
            batch.leave_turns()
            if turns is not None:
                batch.turns = turns
                turns.join(batch)

    def _set_alarm(self, batch: _Batch, due: float) -> None:
        if due < batch.alarm:
            batch.alarm = due
            heappush(self._alarms, (due, next(self._sequence), batch))

    def _wake(self, now: float) -> None:
        while self._alarms and self._alarms[0][0] <= now:
            due, _, batch = heappop(self._alarms)
            # An alarm that was replaced by an earlier one does nothing: the earlier one has set the next.
            if due == batch.alarm:
                self._waiting -= batch.waiting
                batch.wake(now)
                self._waiting += batch.waiting
                batch.alarm = inf
                self._set_alarm(batch, batch.next_due())
                self._place(batch)


@dataclass(eq=False, slots=True)
class _Batch:
    """What the schedule knows about a batch."""

    name: str
    tenant: _Tenant
    priority: int = PRIORITY
    at_risk: bool = False
    in_flight: int = 0
    in_flight_max: int | None = None
    handed_out: int = 0
    """Number of requests, without retries."""
    backlogs: set[Backlog] = field(default_factory=set)
    ready: list[tuple[int, Backlog]] = field(default_factory=list)
    """A heap of the backlogs that have an entry that waits for no other."""
    due: deque[Item] = field(default_factory=deque)
    """Retries whose time has come."""
    retries: list[tuple[float, int, Item]] = field(default_factory=list)
    """A heap of retries that are not due yet."""
    followers: deque[Followers] = field(default_factory=deque)
    """In the order of their leaders; the first one still waits, and is due first."""
    waiting: int = 0
    """Entries that wait for their leaders."""
    alarm: float = inf
    turns: _Turns | None = None

    @property
    def is_capped(self) -> bool:
        return self.in_flight_max is not None and bool(self.backlogs)

    @property
    def leads_next(self) -> bool:
        """Whether its next entry leads a group. While enough entries wait for their leaders, no other group begins."""
        return not self.due and self.ready[0][1].leads_next

    @property
    def may_send(self) -> bool:
        return self.in_flight_max is None or self.in_flight < self.in_flight_max

    @property
    def unsent(self) -> int:
        return sum(backlog.unsent for backlog in self.backlogs)

    def next_due(self) -> float:
        retry = self.retries[0][0] if self.retries else inf
        return min(retry, self.followers[0].due) if self.followers else retry

    def wake(self, now: float) -> None:
        while self.retries and self.retries[0][0] <= now:
            self.due.append(heappop(self.retries)[2])
        while self.followers and self.followers[0].due <= now:
            self.release(self.followers[0])

    def release(self, followers: Followers) -> None:
        if followers.are_waiting:
            followers.are_waiting = False
            self.waiting -= followers.end - followers.start
            backlog = followers.backlog
            if not backlog.has_ready:
                heappush(self.ready, (backlog.shard, backlog))
            backlog.release(followers)
            while self.followers and not self.followers[0].are_waiting:
                self.followers.popleft()

    def withdraw(self, backlog: Backlog) -> list[Item]:
        waiting = [item for _, _, item in sorted(self.retries) if item.backlog is backlog]
        taken = [*(item for item in self.due if item.backlog is backlog), *waiting]
        self.due = deque(item for item in self.due if item.backlog is not backlog)
        self.retries = [retry for retry in self.retries if retry[2].backlog is not backlog]
        heapify(self.retries)
        self.ready = [ready for ready in self.ready if ready[1] is not backlog]
        heapify(self.ready)
        held = [each for each in self.followers if each.backlog is backlog and each.are_waiting]
        for each in held:
            each.are_waiting = False
            self.waiting -= each.end - each.start
        self.followers = deque(each for each in self.followers if each.are_waiting)
        backlog.retrying = 0
        return [*taken, *(Item(entry, backlog) for entry in backlog.take_all(held))]

    def leave_turns(self) -> None:
        if self.turns is not None:
            self.turns.leave(self)
            self.turns = None


class _Tenant:
    """A tenant of these batches; remembered as long as one of its batches is."""

    def __init__(self) -> None:
        self.weight = 1


class _Turns:
    """The batches of one class that may send now."""

    def __init__(self) -> None:
        self.levels: dict[int, _Level] = {}
        """By priority; none of them is empty."""

    def join(self, batch: _Batch) -> None:
        if (level := self.levels.get(batch.priority)) is None:
            level = self.levels[batch.priority] = _Level()
        level.join(batch)

    def leave(self, batch: _Batch) -> None:
        level = self.levels[batch.priority]
        level.leave(batch)
        if not level.tenants:
            del self.levels[batch.priority]

    def next(self) -> _Batch:
        return self.levels[min(self.levels)].next()


class _Level:
    """The batches of one class and priority. The first is next; new batches, and those after their turn, go last."""

    def __init__(self) -> None:
        self.tenants: OrderedDict[_Tenant, OrderedDict[_Batch, None]] = OrderedDict()
        self._turns_left = 0
        """Turns that the first tenant has left; 0 before its first turn."""

    def join(self, batch: _Batch) -> None:
        self.tenants.setdefault(batch.tenant, OrderedDict())[batch] = None

    def leave(self, batch: _Batch) -> None:
        batches = self.tenants[batch.tenant]
        del batches[batch]
        if not batches:
            if batch.tenant is next(iter(self.tenants)):
                self._turns_left = 0
            del self.tenants[batch.tenant]

    def next(self) -> _Batch:
        tenant, batches = next(iter(self.tenants.items()))
        batch = next(iter(batches))
        if len(batches) > 1:
            batches.move_to_end(batch)
        self._turns_left = (self._turns_left or tenant.weight) - 1
        if not self._turns_left and len(self.tenants) > 1:
            self.tenants.move_to_end(tenant)
        return batch
