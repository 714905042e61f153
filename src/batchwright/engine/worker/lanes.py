"""Where a worker looks for jobs: its queues at every priority, each with a watermark after which the search continues.

Everything before a watermark has been examined. This keeps a claim fast when many dead rows are at the head of the
index. A job is written before it is committed, so it may appear before a watermark: the ring for it says how far to
look back, and the watermarks do not pass our own commits. All other jobs that become claimable there (after a freed
key, a released lock, or a late commit whose ring was lost) are found by the full scan, which runs every second, or less
often when it is slow.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
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
    """A part that takes jobs by its own capacity instead of the worker's slots."""

    @property
    def operations(self) -> Sequence[str]:
        """The operations of such jobs."""

    def queues(self) -> list[str]:
        """The queues that it takes them from, for display; a name that ends in a slash means all queues below it."""

    def serves(self, queue: str) -> bool:
        """Whether the part takes the jobs of this queue."""

    def wanted(self, queue: str, priority: int, running: int) -> int:
        """How many more jobs to claim now, given how many of the queue this worker holds."""

    @property
    def broken(self) -> str | None:
        """A fault of the part, if any; the worker then claims no more jobs."""

    def listen(self, on_demand: Callable[[], None]) -> None:
        """Set the callback for when more jobs are wanted."""


class Lanes:
    """The lanes of one worker: which queues exist, and how far each lane was searched."""

    def __init__(self, queues: Sequence[str] | None, limits: Mapping[str, int], besides: Demand | None = None) -> None:
        self._wanted = queues
        self._limits = limits
        self._besides = besides
        self._queues: list[str] = list(queues or ())
        self._marks: dict[tuple[str, int], Watermark] = {}
        self._late: dict[str, datetime] = {}
        """By queue, since when jobs may have appeared that the last claim did not see."""
        self._scan_at = 0.0
        self._is_scan_asked = False
        self._is_scanning = False
        """A scan has begun and not ended."""
        self._turn = 0

    @property
    def scan_is_due(self) -> bool:
        return self._is_scan_asked or self._is_scanning or time.monotonic() >= self._scan_at

    def scan_soon(self) -> None:
        """Make the next claim a full scan, even if one is in progress: that one may already be past the job's place."""
        self._is_scan_asked = True

    def look_back(self, queue: str, since: datetime) -> None:
        """Let the next claim search this queue from that time on, even if one is in progress."""
        self._late[queue] = min(since, self._late.get(queue, since))

    def begin_scan(self) -> None:
        """Forget the watermarks, so that the following claim is a full scan."""
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
        """Whether a ring for this queue is for us; an unknown queue makes us read the list of queues again."""
        if not self._is_ours(queue):
            return False
        if queue not in self._queues:
            self.scan_soon()
        return True

    def open(self, slots: int, running: Mapping[str, int]) -> list[Lane]:
        """All priorities of all queues with free capacity; the queues take turns at being first."""
        self._turn += 1
        self._lower_marks()
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

    def _lower_marks(self) -> None:
        for queue, since in self._late.items():
            for priority in PRIORITIES:
                if (mark := self._marks.get((queue, priority))) is not None and mark.run_after > since:
                    self._marks[queue, priority] = Watermark(since, _NIL)
        self._late.clear()

    def _quota(self, queue: str, priority: int, room: int, running: int) -> int:
        return room

    def move_on(
        self,
        lanes: Sequence[Lane],
        claimed: Claimed,
        slots: int,
        took_seconds: float,
        *,
        committing_seconds: float = 0.0,
    ) -> None:
        """Remember how far each lane was searched.

        A margin covers commits that were still in progress. It grows with our own: `committing_seconds` is how long the
        oldest of them had taken when the claim was sent.

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
        horizon = Watermark(claimed.at - _MARGIN - timedelta(seconds=committing_seconds), _NIL)
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
    """The queues of a part that decides itself how many of their jobs it wants."""

    def __init__(self, demand: Demand) -> None:
        super().__init__(None, {})
        self._demand = demand

    def _is_ours(self, queue: str) -> bool:
        return self._demand.serves(queue)

    def _quota(self, queue: str, priority: int, room: int, running: int) -> int:
        return min(room, self._demand.wanted(queue, priority, running))
