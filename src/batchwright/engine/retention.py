"""Retention: jobs that ended long ago go, then their events, in rounds that are short enough to be in nobody's way.

        ended            cutoff                     next sweep               week over, cutoff
job ──────────▶ kept ──────────▶ removed ──▶ its children ──▶ … ──▶ its events, with their whole partition
                                                                     (few survivors move to the default partition)

Events never go before their job; a week with more survivors than can be moved at once stays as it is. A job goes
before its children, so a parent that exists has all of them and can be rerun and joined; a child whose parent is gone
stands for itself. Jobs with an owner stay until their owner lets go.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from batchwright.db.database import Database, Row, Session
from batchwright.db.statements import statements
from batchwright.engine.upkeep import Round
from batchwright.errors import ConfigurationError
from batchwright.states import JobStatus

SQL = statements(__package__, "retention.sql")
log = logging.getLogger(__name__)

_DAY_SECONDS = 86_400.0
# A call whose answer was lost is repeated with the same ids for some seconds; its job must not be gone by then.
_DAYS_MIN = 1 / 24
_DAYS_MAX = 36_500.0
_EVERY_SECONDS = 600.0
# Rescue waits for its turn behind this round.
_ROUND_SECONDS_MAX = 1.0
_ROWS_PER_STATEMENT = 1_000
# Events may bear a time before their job's creation when the server's clock was set back.
_CLOCK_SLACK = timedelta(days=1)
# Bounds on what is looked for and moved while all events are locked; each job is one look into an index.
_SURVIVING_JOBS_MAX = 10_000
_SURVIVING_EVENTS_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How long what has ended is kept, in days; `inf` keeps it for ever."""

    succeeded_days: float = 7.0
    """SUCCEEDED jobs are kept so long after their end; then their idempotency keys can be used anew."""
    ended_days: float = 30.0
    """FAILED and CANCELLED jobs are kept so long after their end, and can be rerun until then."""
    requests_days: float = 7.0
    """An Idempotency-Key of the HTTP API stands for its first request so long."""
    jobs_per_round: int = 5_000
    """Rows that one round looks at, and so removes at most; a round that had enough to do is followed by another."""

    def __post_init__(self) -> None:
        for name in ("succeeded_days", "ended_days", "requests_days"):
            days = getattr(self, name)
            if not (_DAYS_MIN <= days <= _DAYS_MAX or days == math.inf):
                raise ConfigurationError(
                    f"{name} is {days:g}; give days from {_DAYS_MIN:.2g} (an hour) to {_DAYS_MAX:g}, "
                    "or inf to keep them for ever"
                )
        if not 1 <= self.jobs_per_round <= 100_000:
            raise ConfigurationError(f"jobs_per_round is {self.jobs_per_round}; it must be from 1 to 100000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What one round took away; `has_more` when it stopped for its own limits."""

    jobs: int = 0
    events: int = 0
    requests: int = 0
    partitions: int = 0
    has_more: bool = False

    def __str__(self) -> str:
        counts = {name: getattr(self, name) for name in ("jobs", "events", "requests", "partitions")}
        return ", ".join(f"{name}: {n}" for name, n in counts.items() if n)


class _Walk(NamedTuple):
    """A way along an index, in bounded steps; `start` names the parameters of its place, before everything in it."""

    statement: str
    removes: str
    params: Mapping[str, Any]
    start: Mapping[str, Any]


class Retention:
    """The rounds of one worker. Where its sweep stands is kept in memory: a new worker begins a new one."""

    def __init__(self, database: Database, settings: RetentionSettings) -> None:
        self.settings = settings
        self._database = database
        self._walks = _walks(settings)
        self._begin(0)

    def rounds(self) -> list[Round]:
        """What upkeep does for it."""
        return [
            Round("retention", _EVERY_SECONDS, _as_round(self.sweep)),
            Round("retention of events", _EVERY_SECONDS, _as_round(self.drop_partition)),
        ]

    async def sweep(self, session: Session) -> Removed:
        """Go on along all walks, to the end of the last one or for as much as one round may do."""
        left = self.settings.jobs_per_round
        until = time.monotonic() + _ROUND_SECONDS_MAX
        removed = dict.fromkeys(("jobs", "events", "requests"), 0)
        is_over = False
        while left > 0 and not is_over and time.monotonic() < until:
            limit = min(left, _ROWS_PER_STATEMENT)
            looked_at, gone = await self._step(session, limit)
            removed[self._walks[self._turn].removes] += gone
            left -= looked_at
            if looked_at < limit:
                self._begin((self._turn + 1) % len(self._walks))
                is_over = self._turn == 0
        jobs, events, requests = removed.values()
        return Removed(jobs=jobs, events=events, requests=requests, has_more=not is_over)

    async def drop_partition(self, session: Session) -> Removed:
        """Drop the oldest week of events that hardly any job needs any more."""
        shortest = min(self.settings.succeeded_days, self.settings.ended_days)
        if math.isinf(shortest):
            return Removed()
        keep_seconds = shortest * _DAY_SECONDS + _CLOCK_SLACK.total_seconds()
        for partition, ends in await self._run(session, "old_partitions", keep_seconds=keep_seconds):
            ((answer,),) = await self._run(
                session,
                "drop_partition",
                partition=partition,
                created_before=ends + _CLOCK_SLACK,
                jobs_max=_SURVIVING_JOBS_MAX,
                events_max=_SURVIVING_EVENTS_MAX,
            )
            if answer == "dropped":
                return Removed(partitions=1, has_more=True)
            if answer == "busy":
                break
        return Removed()

    def _begin(self, turn: int) -> None:
        self._turn = turn
        self._place = dict(self._walks[turn].start)

    async def _step(self, session: Session, limit: int) -> tuple[int, int]:
        walk = self._walks[self._turn]
        ((looked_at, gone, *place),) = await self._run(
            session, walk.statement, **walk.params, **self._place, limit=limit
        )
        if looked_at:
            self._place = dict(zip(walk.start, place, strict=False))
        return looked_at, gone

    def _run(self, session: Session, name: str, **params: Any) -> Awaitable[list[Row]]:
        return self._database.ask(SQL[name], params, session)


def _walks(settings: RetentionSettings) -> tuple[_Walk, ...]:
    """What is kept for ever is not walked. Events come last, because their jobs must be gone."""
    days = {
        JobStatus.SUCCEEDED: settings.succeeded_days,
        JobStatus.FAILED: settings.ended_days,
        JobStatus.CANCELLED: settings.ended_days,
    }
    jobs = [
        _Walk(
            "remove_jobs",
            "jobs",
            {"status": status.value, "keep_seconds": kept * _DAY_SECONDS},
            {"after_time": datetime(1, 1, 1, tzinfo=UTC), "after_id": UUID(int=0)},
        )
        for status, kept in days.items()
        if not math.isinf(kept)
    ]
    requests = _Walk("remove_requests", "requests", {"keep_seconds": settings.requests_days * _DAY_SECONDS}, {})
    events = _Walk("remove_events", "events", {}, {"after_job": UUID(int=0), "after_id": 0})
    return (*jobs, *([] if math.isinf(settings.requests_days) else [requests]), events)


def _as_round(verb: Callable[[Session], Awaitable[Removed]]) -> Callable[[Session], Awaitable[bool]]:
    """The verb as a round: it says what it did, and whether it wants another turn."""

    async def run(session: Session) -> bool:
        removed = await verb(session)
        if str(removed):
            log.info("retention removed %s", removed)
        return removed.has_more

    return run
