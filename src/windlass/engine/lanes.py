"""Where a worker looks for jobs: its queues at every priority, each with a watermark behind which it looks on.

A watermark says: everything before it has been looked at. It keeps a claim fast when many dead rows lie at the head
of the index. What may still hide before it (a key that came free, a commit that was late, a lock that was given up)
is found by the full scan, which runs every second, or less often when it is slow.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from windlass.engine.queue import NOWHERE, Claimed, Lane, Watermark

PRIORITIES = range(10)
_MARGIN = timedelta(milliseconds=50)
_SCAN_SECONDS_MIN = 1.0
_SCAN_SECONDS_MAX = 30.0
_SCAN_SHARE = 20
_NIL = UUID(int=0)


class Lanes:
    """The lanes of one worker; knows which queues there are and how far each lane was looked through."""

    def __init__(self, queues: Sequence[str] | None, limits: Mapping[str, int]) -> None:
        self._wanted = queues
        self._limits = limits
        self._queues: list[str] = list(queues or ())
        self._marks: dict[tuple[str, int], Watermark] = {}
        self._scan_at = 0.0
        self._turn = 0

    @property
    def scan_is_due(self) -> bool:
        return time.monotonic() >= self._scan_at

    def scan_soon(self) -> None:
        """Forget the watermarks at the next claim."""
        self._scan_at = 0.0

    def know(self, queues: Mapping[str, bool]) -> None:
        """Learn which queues exist, and which of them are paused."""
        wanted = self._wanted if self._wanted is not None else queues
        self._queues = [name for name in wanted if not queues.get(name, False)]

    def serves(self, queue: str) -> bool:
        """Whether a ring for this queue is for us; one that we have never seen makes us look around."""
        if self._wanted is not None and queue not in self._wanted:
            return False
        if queue not in self._queues:
            self.scan_soon()
        return True

    def open(self, slots: int, running: Mapping[str, int]) -> list[Lane]:
        """All priorities of all queues with room, the queues taking turns at being first."""
        if self.scan_is_due:
            self._marks.clear()
        self._turn += 1
        start = self._turn % len(self._queues) if self._queues else 0
        order = self._queues[start:] + self._queues[:start]
        room = {
            name: min(slots, self._limits[name] - running.get(name, 0)) if name in self._limits else slots
            for name in order
        }
        return [
            Lane(name, priority, room[name], self._marks.get((name, priority), NOWHERE))
            for priority in PRIORITIES
            for name in order
            if room[name] > 0
        ]

    def move_on(self, lanes: Sequence[Lane], claimed: Claimed, slots: int, took_seconds: float) -> None:
        """Remember how far each lane was looked through; a margin covers commits that were still under way.

        Keyed jobs do not move a watermark: they may have been found by their key, far ahead of their lane.
        """
        last: dict[tuple[str, int], Watermark] = {}
        per_queue: Counter[str] = Counter()
        for claim in claimed.jobs:
            per_queue[claim.queue] += 1
            if claim.exclusive_key is None:
                name = (claim.queue, claim.priority)
                mark = Watermark(claim.run_after, claim.id)
                last[name] = max(mark, last.get(name, mark))
        horizon = Watermark(claimed.at - _MARGIN, _NIL)
        for lane in lanes:
            name = (lane.queue, lane.priority)
            if len(claimed.jobs) < slots and per_queue[lane.queue] < lane.quota:
                self._marks[name] = horizon
            elif name in last:
                self._marks[name] = min(last[name], horizon)
        if self.scan_is_due:
            pause = min(_SCAN_SECONDS_MAX, max(_SCAN_SECONDS_MIN, _SCAN_SHARE * took_seconds))
            self._scan_at = time.monotonic() + pause
