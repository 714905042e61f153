"""How fast a batch is, when it will end at that pace, and whether that is in time.

Two things depend on the share of the remaining time that a batch needs. Users see a low risk above 0.75, while there is
time to add a worker. The sender prefers a batch only above 0.8, because others then wait for it.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from batchwright.batches.store import Batch, Control, Pace
from batchwright.states import BatchStatus

LOW_RISK_SHARE = 0.75
"""A batch that needs more than this share of the time left is shown with a low risk."""
EXPRESS_SHARE = 0.8
"""A batch that needs more than this share of the time left is sent before others."""
_LONGEST = timedelta(days=365)
_RECENT_SECONDS = 10.0


class DeadlineRisk(StrEnum):
    """How the recent pace fits the time that is left."""

    NONE = "none"
    """At this pace it ends well before its deadline; or the deadline no longer matters."""
    LOW = "low"
    """At this pace it ends in time, but in the last quarter of the time left."""
    HIGH = "high"
    """At this pace it does not end in time."""


class Forecast(NamedTuple):
    """When a batch will have its answers at the recent pace; None if that is unknown."""

    eta: datetime | None
    risk: DeadlineRisk | None


def needs_more(share: float, *, lines: int, rate: float, seconds_left: float) -> bool:
    """Whether these lines need more than this share of the time left, at this rate of lines per second."""
    return lines > rate * seconds_left * share


def forecast(batch: Batch, pace: Pace | None) -> Forecast:
    """Unknown for a batch that is not planned, is paused or got no answers recently.

    If answers have just stopped, its end is unknown, but whether it is late at its recent pace is known.
    """
    if batch.status is BatchStatus.FINALIZING:
        return Forecast(None, DeadlineRisk.NONE)
    if batch.status is not BatchStatus.IN_PROGRESS or batch.paused_at is not None or batch.stop_reason is not None:
        return Forecast(None, None)
    if pace is None or not pace.rate:
        return Forecast(None, None)
    lines = max(0, batch.total - batch.done - pace.ahead)
    eta = None if pace.is_stalled else pace.now + min(_LONGEST, timedelta(seconds=lines / pace.rate))
    seconds_left = (batch.expires_at - pace.now).total_seconds()
    if needs_more(1.0, lines=lines, rate=pace.rate, seconds_left=seconds_left):
        return Forecast(eta, DeadlineRisk.HIGH)
    is_low = needs_more(LOW_RISK_SHARE, lines=lines, rate=pace.rate, seconds_left=seconds_left)
    return Forecast(eta, DeadlineRisk.LOW if is_low else DeadlineRisk.NONE)


class RecentPace:
    """How fast a batch is over all workers, as one worker sees it."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self.rate = 0.0
        """Answers per second at the last call."""

    def needs_express(self, control: Control) -> bool:
        """Note the progress of the batch; returns whether it is at risk, and False until it was watched for a while."""
        now = time.monotonic()
        self._seen.append((now, control.done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _RECENT_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        if now - since < _RECENT_SECONDS:
            return False
        self.rate = (control.done - before) / (now - since)
        lines = control.total - control.done
        return needs_more(EXPRESS_SHARE, lines=lines, rate=self.rate, seconds_left=control.seconds_left)
