"""Where a worker looks for jobs: its queues at every priority, each with a watermark behind which it looks on.

A watermark says: everything before it has been looked at. It keeps a claim fast when many dead rows lie at the head
of the index. What may still hide before it (a key that came free, a commit that was late, a lock that was given up)
is found by the full scan, which runs every second, or less often when it is slow.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol
from uuid import UUID

from batchwright.engine.jobs import Claim
from batchwright.engine.queue import NOWHERE, Claimed, Lane, Watermark

PRIORITIES = range(10)
_MARGIN = timedelta(milliseconds=50)
_SCAN_SECONDS_MIN = 1.0
_SCAN_SECONDS_MAX = 30.0
_SCAN_SHARE = 20
_NIL = UUID(int=0)
PRIVATE = "~"
"""A queue whose name begins like this is served only by workers that name it."""


class Demand(Protocol):
    """A part that takes jobs by what it can do with them, instead of by the worker's slots."""

    @property
    def operations(self) -> Sequence[str]:
        """The operations of such jobs."""

    def queues(self) -> list[str]:
        """Whence it takes them, to be shown; a name that ends in a slash stands for all below it."""

    def serves(self, queue: str) -> bool:
        """Whether the jobs of this queue are such jobs."""

    def wanted(self, queue: str, priority: int, running: int) -> int:
        """How many more of them to claim now; so many of the queue are in this worker's hands."""

    @property
    def broken(self) -> str | None:
        """What must not be, and is; the worker takes nothing more then."""

    def listen(self, on_demand: Callable[[], None]) -> None:
        """Whom to tell when more are wanted."""


class Lanes:
    """The lanes of one worker; knows which queues there are and how far each lane was looked through."""

    def __init__(self, queues: Sequence[str] | None, limits: Mapping[str, int], besides: Demand | None = None) -> None:
        self._wanted = queues
        self._limits = limits
        self._besides = besides
        self._queues: list[str] = list(queues or ())
        self._marks: dict[tuple[str, int], Watermark] = {}
        self._scan_at = 0.0
        self._is_scan_asked = False
        self._is_scanning = False
        """A scan was begun and has not come to its end."""
        self._turn = 0

    @property
    def scan_is_due(self) -> bool:
        return self._is_scan_asked or self._is_scanning or time.monotonic() >= self._scan_at

    def scan_soon(self) -> None:
        """Let the next claim be a full scan, also if one is under way: it may have looked already."""
        self._is_scan_asked = True

    def begin_scan(self) -> None:
        """Forget the watermarks, so that the claim which follows is a full scan."""
        self._marks.clear()
        self._is_scan_asked = False
        self._is_scanning = True

    def know(self, queues: Mapping[str, bool]) -> None:
        """Learn which queues exist, and which of them are paused."""
        self._queues = [name for name in {**dict.fromkeys(self._wanted or ()), **queues} if self._takes(name, queues)]

    def _takes(self, queue: str, paused: Mapping[str, bool]) -> bool:
        return not paused.get(queue, False) and self._is_ours(queue)

    def _is_ours(self, queue: str) -> bool:
        if self._besides is not None and self._besides.serves(queue):
            return False
        return queue in self._wanted if self._wanted is not None else not queue.startswith(PRIVATE)

    def serves(self, queue: str) -> bool:
        """Whether a ring for this queue is for us; one that we have never seen makes us look around."""
        if not self._is_ours(queue):
            return False
        if queue not in self._queues:
            self.scan_soon()
        return True

    def open(self, slots: int, running: Mapping[str, int]) -> list[Lane]:
        """All priorities of all queues with room, the queues taking turns at being first."""
        self._turn += 1
        start = self._turn % len(self._queues) if self._queues else 0
        order = self._queues[start:] + self._queues[:start]
        room = {
            name: min(slots, self._limits[name] - running.get(name, 0)) if name in self._limits else slots
            for name in order
        }
        return [
            Lane(name, priority, quota, self._marks.get((name, priority), NOWHERE))
            for priority in PRIORITIES
            for name in order
            if (quota := self._quota(name, priority, room[name], running.get(name, 0))) > 0
        ]

    def _quota(self, queue: str, priority: int, room: int, running: int) -> int:
        return room

    def move_on(self, lanes: Sequence[Lane], claimed: Claimed, slots: int, took_seconds: float) -> None:
        """Remember how far each lane was looked through; a margin covers commits that were still under way.

        Keyed jobs do not move a watermark: they may have been found by their key, far ahead of their lane.
        """
        last: dict[tuple[str, int], Claim] = {}
        per_queue: Counter[str] = Counter()
        for claim in claimed.jobs:
            per_queue[claim.queue] += 1
            if claim.exclusive_key is None:
                latest = last.setdefault((claim.queue, claim.priority), claim)
                if (claim.run_after, claim.id.int) > (latest.run_after, latest.id.int):
                    last[claim.queue, claim.priority] = claim
        horizon = Watermark(claimed.at - _MARGIN, _NIL)
        for lane in lanes:
            name = (lane.queue, lane.priority)
            if len(claimed.jobs) < slots and per_queue[lane.queue] < lane.quota:
                self._marks[name] = horizon
            elif name in last:
                self._marks[name] = min(Watermark(last[name].run_after, last[name].id), horizon)
        if self._is_scanning:
            self._is_scanning = False
            pause = min(_SCAN_SECONDS_MAX, max(_SCAN_SECONDS_MIN, _SCAN_SHARE * took_seconds))
            self._scan_at = time.monotonic() + pause


class LanesOnDemand(Lanes):
    """The queues of a part that says itself how many of their jobs it wants."""

    def __init__(self, demand: Demand) -> None:
        super().__init__(None, {})
        self._demand = demand

    def _is_ours(self, queue: str) -> bool:
        return self._demand.serves(queue)

    def _quota(self, queue: str, priority: int, room: int, running: int) -> int:
        return min(room, self._demand.wanted(queue, priority, running))
