"""Computes when a model server would finish each request: a queue, shared prefill, shared decode; no clock of its own.

    arrive ──▶ waiting ── a slot is free ──▶ reading the prompt ──▶ writing the answer ──▶ done
        └─ the queue is full: refused         (prefill)               (decode)

Readers share the prefill rate equally. Writers share the decode rate, which falls for each as their number grows.
One number per station is enough: the work that each request inside has received so far. A request that enters is done
when this number has grown by the request's own work. So each event costs one heap operation, however many requests run.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from batchwright.simulator.prefix_cache import BLOCK_TOKENS, PrefixCache
from batchwright.simulator.profiles import Profile

Owner = TypeVar("Owner")


class Ticket(Generic[Owner]):
    """One request in the server."""

    __slots__ = (
        "arrived_at",
        "cached_tokens",
        "links",
        "output_tokens",
        "owner",
        "prompt_tokens",
        "seat",
        "started_at",
    )

    def __init__(self, owner: Owner, *, prompt_tokens: int, output_tokens: int, links: Sequence[int] = ()) -> None:
        self.owner = owner
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.links = links
        self.cached_tokens = 0
        self.arrived_at = 0.0
        self.started_at: float | None = None
        self.seat: Seat[Owner] | None = None


class Seat(Generic[Owner]):
    """A place in a station; empty if its ticket was withdrawn."""

    __slots__ = ("station", "ticket")

    def __init__(self, station: Station[Owner], ticket: Ticket[Owner]) -> None:
        self.station = station
        self.ticket: Ticket[Owner] | None = ticket


class Station(Generic[Owner]):
    """Tickets that are served at the same time, each at the same rate, which depends on their number."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        self.rate = rate
        self.count = 0
        self._at = 0.0
        self._number = 0
        self._rate_now = 0.0
        self._seats: list[tuple[float, int, Seat[Owner]]] = []
        self._served = 0.0

    def enter(self, at: float, ticket: Ticket[Owner], work: float) -> None:
        self.advance(at)
        seat = ticket.seat = Seat(self, ticket)
        self._number += 1
        heapq.heappush(self._seats, (self._served + work, self._number, seat))
        self._resize(self.count + 1)

    def leave(self, at: float, seat: Seat[Owner]) -> None:
        """The ticket was withdrawn; its place in the heap is removed when it reaches the top."""
        self.advance(at)
        seat.ticket = None
        self._resize(self.count - 1)

    def next_at(self) -> float:
        """When the next ticket is done."""
        seats = self._seats
        while seats and seats[0][2].ticket is None:
            heapq.heappop(seats)
        if not seats:
            return math.inf
        return self._at + max(0.0, seats[0][0] - self._served) / self._rate_now

    def pop(self, at: float) -> Ticket[Owner]:
        """Remove the ticket that `next_at` refers to."""
        self.advance(at)
        due, _, seat = heapq.heappop(self._seats)
        self._served = max(self._served, due)  # a rounding error must not delay the next one
        self._resize(self.count - 1)
        ticket = seat.ticket
        assert ticket is not None
        ticket.seat = None
        return ticket

    def advance(self, at: float) -> None:
        if at > self._at:
            self._served += (at - self._at) * self._rate_now
            self._at = at

    def refresh(self) -> None:
        """The rate has changed for the tickets inside."""
        self._resize(self.count)

    def _resize(self, count: int) -> None:
        self.count = count
        self._rate_now = self.rate(count) if count else 0.0


class ModelServer(Generic[Owner]):
    """One model with its capacity and its cache. Every call passes the time, which never goes backwards."""

    def __init__(self, profile: Profile) -> None:
        self.cache = PrefixCache(profile.cache_blocks)
        self.profile = profile
        self.running = 0
        self.running_max = 0
        self.waiting: deque[Ticket[Owner]] = deque()
        self.waiting_max = 0
        self.slot_seconds = 0.0
        """The number of running requests, integrated over time; divided by time and slots it is the utilisation."""
        self._changed_at = 0.0
        self._decode: Station[Owner] = Station(lambda n: self.profile.decode_rate_each(n))
        self._done: list[Ticket[Owner]] = []
        self._prefill: Station[Owner] = Station(lambda n: self.profile.prefill_rate / n)

    def arrive(self, now: float, ticket: Ticket[Owner]) -> bool:
        """False if too many requests wait: then this one is refused."""
        self._run(now)
        ticket.arrived_at = now
        limit = self.profile.max_waiting
        if self.running >= self.profile.max_running and limit is not None and len(self.waiting) >= limit:
            return False
        self.waiting.append(ticket)
        self._admit(now)
        self.waiting_max = max(self.waiting_max, len(self.waiting))
        return True

    def abort(self, now: float, ticket: Ticket[Owner]) -> None:
        """The client has disconnected: free what the request holds. Does nothing for a ticket that is done."""
        self._run(now)
        if ticket.seat is not None:
            ticket.seat.station.leave(now, ticket.seat)
            ticket.seat = None
            self._resize(now, -1)
            self._admit(now)
        elif ticket.started_at is None:
            self.waiting.remove(ticket)

    def advance(self, now: float) -> list[Ticket[Owner]]:
        """Tickets that are done and were not reported yet, in the order of their ends."""
        self._run(now)
        done, self._done = self._done, []
        return done

    def next_at(self) -> float:
        """When to call `advance` again; infinite when nothing runs."""
        if self._done:
            return 0.0
        return min(self._prefill.next_at(), self._decode.next_at())

    def change(self, now: float, profile: Profile) -> None:
        """Change the capacity from now on, also for the requests inside."""
        self._run(now)
        self._prefill.advance(now)
        self._decode.advance(now)
        # A rate of 0 means no work at all: requests inside finish immediately, instead of never.
        while not profile.prefill_rate and self._prefill.next_at() < math.inf:
            self._write(now, self._prefill.pop(now))
        while not profile.decode_rate and self._decode.next_at() < math.inf:
            self._end(now, self._decode.pop(now))
        self.profile = profile
        self._prefill.refresh()
        self._decode.refresh()
        self.cache.capacity = profile.cache_blocks
        self._admit(now)

    def reset(self, now: float) -> None:
        """Empty the cache and reset the counts; requests continue."""
        self._run(now)
        self.cache.reset()
        self._changed_at = now
        self.slot_seconds = 0.0
        self.running_max = self.running
        self.waiting_max = len(self.waiting)

    def slot_seconds_at(self, now: float) -> float:
        return self.slot_seconds + self.running * max(0.0, now - self._changed_at)

    def _run(self, now: float) -> None:
        """Process everything that is due, in order."""
        while True:
            read_at, written_at = self._prefill.next_at(), self._decode.next_at()
            if min(read_at, written_at) > now:
                return
            if read_at <= written_at:
                self._write(read_at, self._prefill.pop(read_at))
            else:
                self._end(written_at, self._decode.pop(written_at))
            self._admit(min(read_at, written_at))

    def _admit(self, at: float) -> None:
        while self.waiting and self.running < self.profile.max_running:
            ticket = self.waiting.popleft()
            ticket.started_at = at
            self._resize(at, 1)
            self._read(at, ticket)

    def _read(self, at: float, ticket: Ticket[Owner]) -> None:
        if ticket.links and self.profile.cache_blocks:
            ticket.cached_tokens = BLOCK_TOKENS * self.cache.find(ticket.links)
        if self.profile.prefill_rate:
            self._prefill.enter(at, ticket, ticket.prompt_tokens - ticket.cached_tokens)
        else:
            self._write(at, ticket)

    def _write(self, at: float, ticket: Ticket[Owner]) -> None:
        if ticket.links and self.profile.cache_blocks:
            self.cache.store(ticket.links)
        if self.profile.decode_rate and ticket.output_tokens:
            self._decode.enter(at, ticket, ticket.output_tokens)
        else:
            self._end(at, ticket)

    def _end(self, at: float, ticket: Ticket[Owner]) -> None:
        self._resize(at, -1)
        self._done.append(ticket)

    def _resize(self, at: float, by: int) -> None:
        if at > self._changed_at:
            self.slot_seconds += self.running * (at - self._changed_at)
            self._changed_at = at
        self.running += by
        self.running_max = max(self.running_max, self.running)
