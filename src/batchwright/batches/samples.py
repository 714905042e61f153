"""The progress of a batch over time, as workers registered it: answers, tokens, requests in flight and their limit.

Each registration adds to the sample of its batch, its model and its time (`add_sums` in batches.sql).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import quantiles
from typing import NamedTuple

from batchwright.batches.store import Batch, Pace
from batchwright.db.database import Database, Session
from batchwright.db.statements import statements
from batchwright.engine.upkeep import Round
from batchwright.states import BatchStatus

SQL = statements(__package__, "samples.sql")

KEPT_SECONDS = 8 * 86_400.0
_FORGET_EVERY_SECONDS = 600.0
_FORGET_MAX = 5_000
_READ_MAX = 4_000
_RECENT = timedelta(minutes=15)
_RATES_MIN = 4
"""With fewer steps, the variation of the pace is unknown."""
_LONGEST = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class BatchSample:
    """What was registered for one model, or for several, in one step of time."""

    model: str
    at: datetime
    """The beginning of the step."""
    seconds: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    limit: int | None
    """Maximum number of requests in flight over all workers that registered something; None if unknown."""
    in_flight: int | None

    @property
    def lines(self) -> int:
        return self.completed + self.failed

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


_COLUMNS = tuple(BatchSample.__dataclass_fields__)


class Range(NamedTuple):
    """When a batch will have its answers, at its fastest and at its slowest recent pace."""

    earliest: datetime
    latest: datetime


class BatchSamples:
    """The samples of all batches."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, batch_id: str) -> list[BatchSample]:
        """By model, the oldest first. If a batch has very many, only the newest."""
        rows = await self._database.ask(SQL["read"], {"batch_id": batch_id, "limit": _READ_MAX})
        found = []
        for row in reversed(rows):
            *values, load = row
            limit = sum(one for one, _ in load.values()) if load else None
            in_flight = sum(one for _, one in load.values()) if load else None
            found.append(BatchSample(**dict(zip(_COLUMNS, (*values, limit, in_flight), strict=True))))
        return found

    def round(self) -> Round:
        return Round("batch samples", _FORGET_EVERY_SECONDS, self._forget)

    async def _forget(self, session: Session) -> bool:
        params = {"kept_seconds": KEPT_SECONDS, "limit": _FORGET_MAX}
        return len(await self._database.ask(SQL["forget"], params, session)) == _FORGET_MAX


def together(samples: Iterable[BatchSample]) -> list[BatchSample]:
    """The samples of all models added up, for each step."""
    by_time: defaultdict[datetime, list[BatchSample]] = defaultdict(list)
    for one in samples:
        by_time[one.at].append(one)
    return [_add(same) for _, same in sorted(by_time.items())]


def _add(same: Sequence[BatchSample]) -> BatchSample:
    limits = [one.limit for one in same if one.limit is not None]
    in_flight = [one.in_flight for one in same if one.in_flight is not None]
    return BatchSample(
        model="",
        at=same[0].at,
        seconds=same[0].seconds,
        completed=sum(one.completed for one in same),
        failed=sum(one.failed for one in same),
        input_tokens=sum(one.input_tokens for one in same),
        cached_tokens=sum(one.cached_tokens for one in same),
        output_tokens=sum(one.output_tokens for one in same),
        limit=sum(limits) if limits else None,
        in_flight=sum(in_flight) if in_flight else None,
    )


def eta_range(batch: Batch, pace: Pace | None, samples: Sequence[BatchSample]) -> Range | None:
    """The earliest and the latest end, by the fastest and the slowest quarter of the recent steps.

    None if unknown: it does not run, or it has not run long enough.
    """
    if pace is None or batch.status is not BatchStatus.IN_PROGRESS or batch.paused_at or batch.stop_reason:
        return None
    recent = [one for one in together(samples)[:-1] if pace.now - one.at <= _RECENT]  # the last step is not over yet
    rates = [one.lines / one.seconds for one in recent]
    if len(rates) < _RATES_MIN:
        return None
    slow, _, fast = quantiles(rates, n=4)
    if slow <= 0:
        return None
    lines = max(0, batch.total - batch.done - pace.ahead)
    return Range(*(pace.now + min(_LONGEST, timedelta(seconds=lines / rate)) for rate in (fast, slow)))
