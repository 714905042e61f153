"""Retention: removes jobs that ended long ago, then their events, in rounds short enough not to block other work.

        ended            cutoff                     next sweep               week over, cutoff
job ──────────▶ kept ──────────▶ removed ──▶ its children ──▶ … ──▶ its events, with their whole partition
                                                                     (few survivors move to the default partition)

Events are never removed before their job; a week with more survivors than can be moved at once stays as it is. A job
is removed before its children, so an existing parent has all of them and can be rerun and joined; a child whose parent
is gone is independent. Jobs with an owner stay until their owner releases them.
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
# A call whose answer was lost is repeated with the same ids for some seconds; until then its job must exist.
_DAYS_MIN = 1 / 24
_DAYS_MAX = 36_500.0
_EVERY_SECONDS = 600.0
# The rescue waits until this round ends.
_ROUND_SECONDS_MAX = 1.0
_ROWS_PER_STATEMENT = 1_000
# Events may have a time before their job's creation if the server's clock was set back.
_CLOCK_SLACK = timedelta(days=1)
# Limits on rows examined and moved while all events are locked; each job costs one index lookup.
_SURVIVING_JOBS_MAX = 10_000
_SURVIVING_EVENTS_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How long ended jobs are kept, in days; `inf` keeps them forever."""

    succeeded_days: float = 7.0
    """How long SUCCEEDED jobs are kept after their end; then their idempotency keys can be used again."""
    ended_days: float = 30.0
    """How long FAILED and CANCELLED jobs are kept after their end; they can be rerun until then."""
    requests_days: float = 7.0
    """How long an Idempotency-Key of the HTTP API refers to its first request."""
    jobs_per_round: int = 5_000
    """Maximum number of rows that one round examines and removes; a full round is followed by another."""

    def __post_init__(self) -> None:
        for name in ("succeeded_days", "ended_days", "requests_days"):
            days = getattr(self, name)
            if not (_DAYS_MIN <= days <= _DAYS_MAX or days == math.inf):
                raise ConfigurationError(
                    f"{name} is {days:g}; use {_DAYS_MIN:.2g} (an hour) to {_DAYS_MAX:g} days, "
                    "or inf to keep them forever"
                )
        if not 1 <= self.jobs_per_round <= 100_000:
            raise ConfigurationError(f"jobs_per_round is {self.jobs_per_round}; it must be from 1 to 100000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What one round removed; `has_more` if it stopped at its own limits."""

    jobs: int = 0
    events: int = 0
    requests: int = 0
    partitions: int = 0
    has_more: bool = False

    def __str__(self) -> str:
        counts = {name: getattr(self, name) for name in ("jobs", "events", "requests", "partitions")}
        return ", ".join(f"{name}: {n}" for name, n in counts.items() if n)


class _Walk(NamedTuple):
    """A walk along an index, in bounded steps; `start` is its first position, before every row, by parameter."""

    statement: str
    removes: str
    params: Mapping[str, Any]
    start: Mapping[str, Any]


class Retention:
    """The rounds of one worker. The position of its sweep is kept in memory: a new worker starts a new sweep."""

    def __init__(self, database: Database, settings: RetentionSettings) -> None:
        self.settings = settings
        self._database = database
        self._walks = _walks(settings)
        self._begin(0)

    def rounds(self) -> list[Round]:
        """The round for upkeep."""
        return [
            Round("retention", _EVERY_SECONDS, _as_round(self.sweep)),
            Round("retention of events", _EVERY_SECONDS, _as_round(self.drop_partition)),
        ]

    async def sweep(self, session: Session) -> Removed:
        """Continue all walks, to the end of the last one or to the limit of one round."""
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
        """Drop the oldest week of events of which only few belong to a job that still exists."""
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
    """Rows that are kept forever need no walk. Events come last, because their jobs must be gone first."""
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
    """The verb as a round: it logs what was removed, and returns whether there is more to do."""

    async def run(session: Session) -> bool:
        removed = await verb(session)
        if str(removed):
            log.info("retention removed %s", removed)
        return removed.has_more

    return run
