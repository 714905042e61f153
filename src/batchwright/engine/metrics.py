"""The counts of all workers, added up in the database; and the numbers of jobs, workers and slots.

Each worker writes its own row every few seconds. A row that is no longer updated is folded into the row '' and marked.
A worker that was only frozen finds the mark; from then on it writes later counts to a new row.

Gauges, which show the current state, are added up over the live workers; they are in the row of the heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson

from batchwright.db.database import Database, Row, Session
from batchwright.db.statements import statements
from batchwright.engine.jobs import Claim
from batchwright.engine.queue import Rescued
from batchwright.errors import DatabaseError
from batchwright.telemetry.metrics import (
    VALUES_MAX,
    Counts,
    Flat,
    LabelLimits,
    Metric,
    Sampled,
    difference,
    together,
)

log = logging.getLogger(__name__)

SQL = statements(__package__, "metrics.sql")

_WRITE_SECONDS = 5.0
_TOUCH_SECONDS = 60.0
_LAST_WRITE_SECONDS_MAX = 2.0
_SILENT_SECONDS = 600.0
_FOLDED_SECONDS = 86_400.0
_FOLDS_MAX = 500
_JOBS_MAX = 100_000
_NOTED_MAX = 1_000
_WORKER_SILENT_SECONDS = 60.0

_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0)
_RUNS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)

WORKER_METRICS = (
    Metric("jobs_claimed_total", "Jobs that workers claimed from a queue.", ("queue",)),
    Metric(
        "job_claim_latency_seconds",
        "Time from the moment a job was due until a worker claimed it, including the wait for a paused queue or a key.",
        ("queue",),
        "histogram",
        _LATENCIES,
    ),
    Metric(
        "job_run_seconds",
        "Time that an operation ran, from its start until it returned, raised or was interrupted.",
        ("job_type",),
        "histogram",
        _RUNS,
    ),
    Metric(
        "jobs_settled_total",
        "Jobs that workers settled, by outcome: succeed, fail, retry, snooze, release or wait.",
        ("job_type", "outcome"),
        sampled=Sampled("jobs", "outcome"),
    ),
    Metric(
        "settle_seconds",
        "Duration of one commit that settles jobs, usually many at once.",
        kind="histogram",
        bounds=_QUICK,
    ),
    Metric("jobs_rescued_total", "Jobs rescued from a worker or process that died while running them."),
    Metric("jobs_poisoned_total", "Jobs parked as FAILED because every process that ran them died."),
    Metric(
        "writes_fenced_total",
        "Results refused because a newer claim or a person has changed the job: wasted work, never damage.",
    ),
    Metric("leases_lost_total", "Running jobs that a worker stopped because its lease was over."),
    Metric(
        "operations_interrupted_total",
        "Operations stopped before their end: cancelled, lost, timeout, stop or self.",
        ("reason",),
    ),
    Metric(
        "threads_abandoned_total",
        "Threads of operations that kept running past their time limit; their jobs were settled without them.",
        ("job_type",),
    ),
)


class WorkerCounts(Counts):
    """The metrics of one worker process; parts of Batchwright may add their own.

    What happens to each job is first only noted, and later counted for a thousand jobs at once. This is several times
    cheaper, which matters because a job costs little else.
    """

    def __init__(self, more: Iterable[Metric] = (), label_limits: LabelLimits | None = None) -> None:
        super().__init__((*WORKER_METRICS, *more), label_limits)
        self.on_read(self._count)
        self.ran: defaultdict[str, list[float]] = defaultdict(list)
        """Seconds that operations ran, by type."""
        self.ended: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Jobs that were settled, by type and outcome."""
        self._waited: defaultdict[str, list[float]] = defaultdict(list)
        self._noted = 0

    def note_claimed(self, claims: Sequence[Claim]) -> None:
        """Note the jobs of one claim. Neighbours often became due at the same time: their latency is computed once."""
        due, seconds, waited = None, 0.0, self._waited
        for claim in claims:
            if claim.run_after != due:
                due = claim.run_after
                seconds = (claim.claimed_at - due).total_seconds()
            waited[claim.queue].append(seconds)
        self._noted += len(claims)
        if self._noted >= _NOTED_MAX:
            self._count()

    def _count(self) -> None:
        for queue, waited in self._waited.items():
            self.add("jobs_claimed_total", len(waited), (queue,))
            self.observe_all("job_claim_latency_seconds", waited, (queue,))
        for job_type, ran in self.ran.items():
            self.observe_all("job_run_seconds", ran, (job_type,))
        for labels, n in self.ended.items():
            self.add("jobs_settled_total", n, labels)
        self._waited.clear()
        self.ran.clear()
        self.ended.clear()
        self._noted = 0

    def note_rescued(self, rescued: Iterable[Rescued]) -> None:
        for one in rescued:
            self.add("jobs_rescued_total", one.was_running)
            self.add("jobs_poisoned_total", one.is_poison)


class CountsWriter:
    """Keeps one worker's row. A failed write does not affect the worker: the next one contains its counts too."""

    def __init__(self, database: Database, worker: str, counts: Counts) -> None:
        self._database = database
        self._worker = worker
        self._counts = counts
        self._row = worker
        self._rows = 1
        self._is_written = False
        self._base: Flat = {}
        """The counts in our earlier, folded rows."""
        self._sent: Flat = {}
        """The content of this row if our last write succeeded."""
        self._answered: Flat = {}
        self._touch_at = 0.0
        self._gauges: Flat = {}
        """The content of the heartbeat's row; nothing if the row is missing."""
        self._gauges_touch_at = 0.0

    async def run(self) -> None:
        """Runs until cancelled."""
        await self.learn()
        learn_at = time.monotonic() + _TOUCH_SECONDS
        while True:
            await asyncio.sleep(_WRITE_SECONDS * random.uniform(0.8, 1.2))
            await self.write()
            if self._counts.is_crowded and time.monotonic() >= learn_at:
                await self.learn()
                learn_at = time.monotonic() + _TOUCH_SECONDS

    async def learn(self) -> None:
        """Read which label values others have counted: if there are too many, all workers must name the same ones."""
        try:
            self._counts.know(await read_counts(self._database))
        except DatabaseError as error:
            log.debug("the counts of other workers cannot be read: %s", error)

    async def write_last(self) -> None:
        try:
            async with asyncio.timeout(_LAST_WRITE_SECONDS_MAX):
                await self.write()
        except TimeoutError:
            log.debug("the last counts were not written in time")

    async def write(self) -> None:
        try:
            await self._write(self._counts.flat("counter", "histogram"))
            await self._write_gauges(self._counts.flat("gauge"))
        except DatabaseError as error:
            log.debug("the counts will be written later: %s", error)

    async def _write(self, counted: Flat) -> None:
        is_touch_due = self._is_written and time.monotonic() >= self._touch_at
        if counted == self._answered and not is_touch_due:
            return
        if not await self._send(counted):
            await self._begin_anew()
            await self._send(counted)
        self._answered = counted
        self._touch_at = time.monotonic() + _TOUCH_SECONDS

    async def _write_gauges(self, gauges: Flat) -> None:
        """Repeat the write now and then: a row that was removed while we were frozen is created without gauges."""
        is_touch_due = bool(gauges) and time.monotonic() >= self._gauges_touch_at
        if gauges != self._gauges or is_touch_due:
            params = {"worker": self._worker, "gauges": orjson.dumps(gauges).decode()}
            is_there = bool(await self._database.ask(SQL["write_gauges"], params))
            self._gauges = gauges if is_there else {}
            self._gauges_touch_at = time.monotonic() + _TOUCH_SECONDS

    async def _send(self, counted: Flat) -> bool:
        """Write our row; returns whether it was still ours."""
        before, self._sent = self._sent, difference(counted, self._base)
        sql = SQL["update_counts" if self._is_written else "insert_counts"]
        params = {"worker": self._row, "counts": orjson.dumps(self._sent).decode()}
        is_ours = bool(await self._database.ask(sql, params))
        if is_ours:
            self._is_written = True
        else:
            self._sent = before
        return is_ours

    async def _begin_anew(self) -> None:
        """Our row was folded: its content is counted permanently. This only reads, so it can be interrupted anywhere.

        If even the mark is gone, we cannot know whether our last write was in time. We prefer to lose it rather than
        count it twice.
        """
        found = await self._database.ask(SQL["folded_counts"], {"worker": self._row})
        self._base = together(self._base, found[0][0] if found else self._sent)
        self._sent = {}
        self._is_written = False
        self._rows += 1
        self._row = f"{self._worker}#{self._rows}"


async def fold(database: Database, *, session: Session | None = None) -> int:
    """Add up the rows of workers that are gone; returns how many. Call it under the upkeep lock: it has no other."""
    params = {"silent_seconds": _SILENT_SECONDS, "limit": _FOLDS_MAX}
    ((folded,),) = await database.ask(SQL["fold_counts"], params, session)
    await database.ask(SQL["forget_folded"], {"kept_seconds": _FOLDED_SECONDS}, session)
    return int(folded)


class Depth(NamedTuple):
    """The state of one queue."""

    queue: str
    is_paused: bool
    due: int
    scheduled: int
    oldest_due_seconds: float


class Standing(NamedTuple):
    """The current state of queues, jobs and workers, read from indexes at a bounded cost."""

    depths: list[Depth]
    taken: Sequence[Row]
    """(queue, running | waiting, jobs)"""
    failed: Sequence[Row]
    """(job type, jobs) in the inbox"""
    workers: int
    slots: int
    slots_used: int
    gauges: Flat
    """The gauges of the live workers, added up."""


async def read_counts(database: Database, *, session: Session | None = None) -> Flat:
    """The sum over all workers, including those that are gone; no number in it ever decreases."""
    return dict(await database.ask(SQL["counted"], {}, session))


async def read_gauges(database: Database, *, session: Session | None = None) -> Flat:
    """The gauges of the live workers, added up."""
    return dict(await database.ask(SQL["gauges"], {"silent_seconds": _WORKER_SILENT_SECONDS}, session))


async def read_standing(database: Database, *, session: Session | None = None) -> Standing:
    limits = {"queues_max": VALUES_MAX, "jobs_max": _JOBS_MAX}
    depths = await database.ask(SQL["depths"], limits, session)
    taken = await database.ask(SQL["taken"], limits, session)
    failed = await database.ask(SQL["failed"], limits, session)
    alive = {"silent_seconds": _WORKER_SILENT_SECONDS}
    ((workers, slots, slots_used),) = await database.ask(SQL["slots"], alive, session)
    gauges = await read_gauges(database, session=session)
    return Standing([Depth(*row) for row in depths], taken, failed, workers, slots, slots_used, gauges)
