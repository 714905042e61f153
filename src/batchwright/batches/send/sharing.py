"""Decides when a worker gives a part of its requests to others, because those are idle.

A worker that has more than a second of work left checks whether other workers of the same model are idle, while no
shard waits for them. Each of those should get as much as the giver keeps. A part becomes a shard of its own, and an
idle worker claims it. The giver may claim it too, once it has little left itself.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from batchwright.batches.send.shard import ShardRun
from batchwright.batches.store import SHARD
from batchwright.engine.workers import Workers

WORTH_SECONDS = 1.0
"""A worker keeps what it can send in less time than this: giving a part away takes a large part of that."""
PART_MIN = 16
"""Minimum number of requests in a part, because each part costs some statements."""
_PAUSE_SECONDS = (0.4, 8.0)
"""Pause after no worker was idle; doubles each time."""


class Gift(NamedTuple):
    """What a shard should give to other workers."""

    run: ShardRun
    requests: int
    parts: int


class Sharing:
    """Decides for all shards of a worker process."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._pauses: dict[str, tuple[float, float]] = {}
        """By queue: until when it is not checked, and for how long."""

    async def choose(self, sending: set[ShardRun]) -> list[Gift]:
        """At most one gift per queue; `sending` may change meanwhile."""
        gifts = []
        for queue in self._find_busy(sending):
            idle = await self._workers.count_idle(queue, SHARD)
            self._note(queue, idle)
            if idle and (gift := _choose_gift([run for run in sending if run.queue == queue], idle)) is not None:
                gifts.append(gift)
        return gifts

    def _find_busy(self, sending: Iterable[ShardRun]) -> list[str]:
        """The queues whose shards here have much left, and that were not checked just now."""
        now, spare = time.monotonic(), defaultdict[str, int](int)
        for run in sending:
            if run.sender.seconds_left >= WORTH_SECONDS:
                spare[run.queue] = max(spare[run.queue], run.spare)
        self._pauses = {queue: pause for queue, pause in self._pauses.items() if queue in spare}
        paused = {queue for queue, (until, _) in self._pauses.items() if until > now}
        return [queue for queue, most in spare.items() if most >= PART_MIN and queue not in paused]

    def _note(self, queue: str, idle: int) -> None:
        shortest, longest = _PAUSE_SECONDS
        if idle:
            self._pauses.pop(queue, None)
        else:
            pause = min(longest, 2 * self._pauses.get(queue, (0.0, shortest / 2))[1])
            self._pauses[queue] = (time.monotonic() + pause, pause)


def _choose_gift(runs: list[ShardRun], idle: int) -> Gift | None:
    """A gift of the shard that can give most: so much that each idle worker gets as much as stays here."""
    run = max(runs, key=lambda run: run.spare, default=None)
    if run is None:
        return None
    unsent = run.sender.schedule.unsent
    requests = min(run.spare, unsent * idle // (idle + 1))
    return Gift(run, requests, min(idle, requests // PART_MIN)) if requests >= PART_MIN else None
