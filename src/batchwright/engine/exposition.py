"""The metrics page for Prometheus: counts of all workers, the state of the queues, and counts of this process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from batchwright.db.database import Database
from batchwright.engine.metrics import WORKER_METRICS, Standing, read_counts, read_standing
from batchwright.errors import DatabaseError
from batchwright.telemetry.metrics import (
    INFINITY,
    SUM,
    Counts,
    Flat,
    LabelLimit,
    LabelLimits,
    Labels,
    Metric,
    bounded,
    series,
)

log = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SHARED = " Read from the database: every process shows the same number, so aggregate with max, not sum."
_FRESH_SECONDS = 5.0
_FRESH_SECONDS_MAX = 60.0
_DUTY = 20
_READ_SECONDS_MAX = 4.0
T = TypeVar("T")

PROCESS_METRICS = (
    Metric("http_requests_total", "Requests that this process answered.", ("route", "method", "status")),
    Metric(
        "http_request_seconds",
        "Time that this process took to answer a request; event streams are left out.",
        ("route",),
        "histogram",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
    Metric("event_streams", "Event streams that this process has open now.", kind="gauge"),
)

STANDING_METRICS = (
    Metric(
        "jobs",
        "Open jobs: due now, scheduled for later, running in a worker, or waiting for their children. "
        "A queue is counted up to 100,000, and so are all jobs that wait for their children.",
        ("queue", "state"),
        "gauge",
    ),
    Metric(
        "oldest_due_age_seconds",
        "How long the oldest job of the queue has been due; 0 when none is. It also grows in a paused queue.",
        ("queue",),
        "gauge",
    ),
    Metric("queue_paused", "1 while the queue is paused.", ("queue",), "gauge"),
    Metric(
        "failed_jobs",
        "Failed jobs in the inbox, not dismissed yet. Counted up to 100,000 over all job types.",
        ("job_type",),
        "gauge",
    ),
    Metric("workers", "Worker processes with a heartbeat in the last minute.", kind="gauge"),
    Metric("worker_slots", "Jobs that these workers can run at the same time.", kind="gauge"),
    Metric("worker_slots_used", "Jobs that they were running at their last heartbeat.", kind="gauge"),
)
DATABASE_UP = Metric(
    "database_up",
    "1 if this process could read the database for this page; at 0, metrics from the database are missing.",
    (),
    "gauge",
)


def process_counts() -> Counts:
    """Metrics of an API process: requests, their durations, and open event streams."""
    return Counts(PROCESS_METRICS)


class Exposition:
    """Renders the page. It reads the database at most every five seconds, however many requests come.

    A reading that took long is used for longer, so that reading never takes more than a twentieth of the time.
    `more` are the metrics that parts add to the workers, `label_limits` the limits on the values of their labels.
    """

    def __init__(
        self, database: Database, own: Counts, *, more: Sequence[Metric] = (), label_limits: LabelLimits | None = None
    ) -> None:
        self._database = database
        self._own = own
        self._label_limits = label_limits or {}
        self._gauges = [metric for metric in more if metric.kind == "gauge"]
        self._sums = [*WORKER_METRICS, *(metric for metric in more if metric.kind != "gauge")]
        self._reading = asyncio.Lock()
        self._shared = b""
        self._fresh_until = 0.0

    async def render(self) -> bytes:
        shared = await self._read_shared()
        return shared + _text(_families(self._own.metrics, self._own.flat()))

    async def _read_shared(self) -> bytes:
        async with self._reading:
            if time.monotonic() >= self._fresh_until:
                began = time.monotonic()
                self._shared = _text(await self._families())
                took = time.monotonic() - began
                self._fresh_until = began + min(_FRESH_SECONDS_MAX, max(_FRESH_SECONDS, _DUTY * took))
            return self._shared

    async def _families(self) -> list[Family]:
        """Everything that can be read. Sums are quick; if the state of the queues takes too long, it is left out."""
        sums = await _try_reading(read_counts(self._database))
        if sums is None:
            return [_family(DATABASE_UP, {(): 0.0})]
        families = [_family(DATABASE_UP, {(): 1.0}), *_families(self._sums, sums, _SHARED, self._label_limits)]
        standing = await _try_reading(read_standing(self._database))
        if standing is not None:
            found = _standing_numbers(standing)
            families += [_family(metric, found[metric.name], _SHARED) for metric in STANDING_METRICS]
            families += _families(self._gauges, standing.gauges, _SHARED, self._label_limits)
        return families


async def _try_reading(reading: Coroutine[Any, Any, T]) -> T | None:
    try:
        async with asyncio.timeout(_READ_SECONDS_MAX):
            return await reading
    except (DatabaseError, TimeoutError) as error:
        log.warning("metrics cannot be read from the database: %s", str(error) or "it took too long")
        return None


def _standing_numbers(standing: Standing) -> dict[str, dict[Labels, float]]:
    jobs: dict[Labels, float] = {}
    for depth in standing.depths:
        jobs |= {(depth.queue, "due"): depth.due, (depth.queue, "scheduled"): depth.scheduled}
    jobs |= {(queue, state): n for queue, state, n in standing.taken}
    return {
        "jobs": jobs,
        "oldest_due_age_seconds": {(depth.queue,): depth.oldest_due_seconds for depth in standing.depths},
        "queue_paused": {(depth.queue,): float(depth.is_paused) for depth in standing.depths},
        "failed_jobs": {(job_type,): n for job_type, n in standing.failed},
        "workers": {(): standing.workers},
        "worker_slots": {(): standing.slots},
        "worker_slots_used": {(): standing.slots_used},
    }


def _families(
    metrics: Iterable[Metric], flat: Flat, note: str = "", label_limits: LabelLimits | None = None
) -> list[Family]:
    """Metrics from the flat form; the metrics of a newer version are ignored here."""
    found = series(flat)
    return [_family(metric, found.get(metric.name, {}), note, label_limits or {}) for metric in metrics]


def _family(
    metric: Metric, numbers: Mapping[Labels, float], note: str = "", label_limits: LabelLimits | None = None
) -> Family:
    name, text = metric.full_name, metric.help + note
    places = [(label_limits or {}).get(label, LabelLimit()) for label in metric.labels]
    kept = bounded({key: n for key, n in numbers.items() if metric.fits(key)}, places)
    if metric.kind == "histogram":
        return _histogram(HistogramMetricFamily(name, text, labels=metric.labels), metric, kept)
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(name, text, labels=metric.labels)
    expected = metric.expected if metric.labels else ((),)
    for labels, n in sorted({**dict.fromkeys(expected, 0.0), **kept}.items()):
        family.add_metric(labels, n)
    return family


def _histogram(family: HistogramMetricFamily, metric: Metric, numbers: Mapping[Labels, float]) -> Family:
    spreads: dict[Labels, dict[str, float]] = {}
    for (*labels, place), n in sorted(numbers.items()):
        spreads.setdefault(tuple(labels), {})[place] = n
    if not metric.labels:
        spreads.setdefault((), {})
    for key, spread in spreads.items():
        family.add_metric(key, list(_cumulative(metric, spread)), spread.get(SUM, 0.0))
    return family


def _cumulative(metric: Metric, spread: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Counts up to each bound; counts from a version with other bounds go to the next higher bound."""
    counts = sorted((float(place), n) for place, n in spread.items() if place != SUM)
    for bound in metric.bounds:
        yield str(bound), sum(n for place, n in counts if place <= bound)
    yield INFINITY, sum(n for _, n in counts)


class _Given(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _text(families: list[Family]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return generate_latest(registry)
