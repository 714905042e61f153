"""Figures for every minute, for the dashboard: the work of all processes, and the state of the queues.

    counters of all processes ──▶ one row a minute (upkeep) ──▶ differences: jobs, requests, tokens, errors per second

Each metric declares what is kept of it (`Metric.sampled`). The figures are totals over all tenants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

import orjson

from batchwright.db.database import Database, Session
from batchwright.db.statements import statements
from batchwright.engine.metrics import Standing, read_counts, read_standing
from batchwright.telemetry.metrics import SUM, Flat, Kind, Metric, series

SQL = statements(__package__, "samples.sql")

EVERY_SECONDS = 60.0
KEPT_SECONDS = 8 * 86_400.0
"""A week, plus the current day."""
_QUEUES_MAX = 20
_NOTHING: Mapping[str, float] = {}

Figures = Mapping[str, Mapping[str, float]]
"""Numbers by figure, then by label."""


@dataclass(frozen=True, slots=True)
class Period:
    """How far back to look, and the length of a step in seconds."""

    seconds: int
    steps: int


HOUR = Period(60, 60)
DAY = Period(600, 144)


class Point(NamedTuple):
    """What happened in one step, per second, and the state at its end."""

    at: datetime
    """The end of the step."""
    seconds: float
    """The length of the step."""
    rates: Figures
    """`jobs` by outcome; `requests`, `errors` and `tokens` by model."""
    levels: Mapping[str, Any]
    """`due`, `scheduled`, `running`, `waiting`, `oldest_due_seconds`, `failed`, `workers`, `slots`, `slots_used`;
    `queues`: due jobs of the longest queues; `in_flight` and `limit` by model."""

    def rate(self, figure: str, *labels: str) -> float:
        """The sum over these labels, or over all."""
        found = self.rates.get(figure, _NOTHING)
        return sum(n for label, n in found.items() if not labels or label in labels)


class Samples:
    """The samples of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def take(self, metrics: Iterable[Metric], *, session: Session | None = None) -> None:
        """Store the counts of all processes so far and the current state; remove old samples."""
        known = list(metrics)
        counts = await read_counts(self._database, session=session)
        standing = await read_standing(self._database, session=session)
        totals = figures_of(known, counts, "counter", "histogram")
        levels = {**_levels(standing), **figures_of(known, standing.gauges, "gauge")}
        params = {"totals": orjson.dumps(totals).decode(), "levels": orjson.dumps(levels).decode()}
        await self._database.ask(SQL["take"], params, session)
        await self._database.ask(SQL["forget"], {"kept_seconds": KEPT_SECONDS}, session)

    async def read(self, period: Period) -> list[Point]:
        """One point per step, oldest first. A step without a sample is missing; the next point covers it too."""
        rows = await self._database.ask(SQL["read"], {"seconds": period.seconds, "steps": period.steps})
        return [_between(before, after) for before, after in pairwise(rows)]


def figures_of(metrics: Iterable[Metric], flat: Flat, *kinds: Kind) -> dict[str, dict[str, float]]:
    """The figures that metrics of these kinds add to; a histogram counts how often something happened."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    counted = series(flat)
    for metric in metrics:
        if metric.sampled is None or metric.kind not in kinds:
            continue
        place = metric.labels.index(metric.sampled.by)
        figure = found[metric.sampled.figure]
        for key, n in counted.get(metric.name, {}).items():
            if metric.fits(key) and not (metric.kind == "histogram" and key[-1] == SUM):
                figure[key[place]] += n
    return {name: dict(figure) for name, figure in found.items()}


def _levels(standing: Standing) -> dict[str, Any]:
    depths = standing.depths
    longest = sorted(depths, key=lambda depth: (-depth.due, depth.queue))[:_QUEUES_MAX]
    return {
        "due": sum(depth.due for depth in depths),
        "scheduled": sum(depth.scheduled for depth in depths),
        "oldest_due_seconds": max((depth.oldest_due_seconds for depth in depths if not depth.is_paused), default=0.0),
        "queues": {depth.queue: depth.due for depth in longest if depth.due},
        "running": sum(n for _, state, n in standing.taken if state == "running"),
        "waiting": sum(n for _, state, n in standing.taken if state == "waiting"),
        "failed": sum(n for _, n in standing.failed),
        "workers": standing.workers,
        "slots": standing.slots,
        "slots_used": standing.slots_used,
    }


def _between(before: Sequence[Any], after: Sequence[Any]) -> Point:
    """The rates between two samples. A counter that decreased, because a failover lost part of it, counts as 0."""
    (since, totals_before, _), (at, totals, levels) = before, after
    seconds = (at - since).total_seconds()
    rates = {
        figure: {
            label: max(0.0, n - totals_before.get(figure, _NOTHING).get(label, 0.0)) / seconds
            for label, n in by_label.items()
        }
        for figure, by_label in totals.items()
    }
    return Point(at, seconds, rates, levels)
