"""Jobs for lists and graphs: without payload and result, which may be megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from batchwright.db.database import Database
from batchwright.db.statements import statements
from batchwright.engine.jobs import JobId
from batchwright.errors import InvalidInput
from batchwright.states import JobStatus

SQL = statements(__package__, "parts.sql", "views.sql", "briefs.sql")
_WORDS_MAX = 300
_DEPTH_MAX = 50
_ROUND_MAX = 2**15 - 1
STAGE_COUNT_MAX = 10_000
"""Maximum number of a pipeline's jobs that its graph counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBrief:
    """One line of a list."""

    id: JobId
    job_type: str
    queue: str
    tenant: str
    owner: str | None
    status: JobStatus
    priority: int
    attempts: int
    max_attempts: int
    progress_current: int | None
    progress_total: int | None
    children_open: int
    parent_job_id: JobId | None
    is_waiting: bool
    error_code: str | None
    message: str | None
    """Why it failed or is retried; otherwise its last message."""
    run_after: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class Place(NamedTuple):
    """A place among the children of a job: the next page begins after it."""

    round: int
    id: UUID

    def __str__(self) -> str:
        return f"{self.round}.{self.id.hex}"

    @classmethod
    def parse(cls, text: str) -> Place:
        round, _, id = text.partition(".")
        try:
            if not round.isascii() or not round.isdecimal() or int(round) > _ROUND_MAX:
                raise ValueError("a round is a small number")
            return cls(int(round), UUID(id))
        except ValueError as error:
            raise InvalidInput(f"{text[:60]!r} is no place among children; follow a link", param="children") from error


_FIRST = Place(0, UUID(int=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A job in a tree."""

    place: Place
    has_children: bool
    job: JobBrief


@dataclass(slots=True)
class Stage:
    """The jobs of one type in a pipeline."""

    job_type: str
    counts: dict[JobStatus, int] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    """The job types before it: those whose jobs wait for it, or after which it was chained."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Briefs:
    """Read-only queries, each with a bounded number of rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, ids: Sequence[JobId], *, tenant: str | None) -> list[JobBrief]:
        """These jobs, newest first."""
        params = {"ids": list(ids), "tenant": tenant, "words_max": _WORDS_MAX}
        return [_brief(row) for row in await self._database.ask(SQL["briefs"], params)] if ids else []

    async def children(
        self, parents: Sequence[JobId], *, tenant: str | None, limit: int, after: Place | None = None
    ) -> dict[JobId, list[Child]]:
        """The first children of each of these jobs, oldest first, or those after a place."""
        place = after or _FIRST
        limits = {"limit": limit, "words_max": _WORDS_MAX}
        params = {
            "parents": list(parents),
            "tenant": tenant,
            "after_round": place.round,
            "after_id": place.id,
            **limits,
        }
        found: dict[JobId, list[Child]] = {id: [] for id in parents}
        for round, has_children, *columns in await self._database.ask(SQL["children"], params) if parents else ():
            job = _brief(columns)
            assert job.parent_job_id is not None
            found[job.parent_job_id].append(Child(place=Place(round, job.id), has_children=has_children, job=job))
        return found

    async def ancestors(self, id: JobId) -> list[JobId]:
        """The jobs that wait for this job, outermost first."""
        rows = await self._database.ask(SQL["ancestors"], {"id": id, "depth_max": _DEPTH_MAX})
        return [JobId(found) for (found,) in rows]

    async def stages(self, pipeline_id: UUID, *, tenant: str | None) -> list[Stage]:
        """The graph of a pipeline: one stage per job type, in the order of their first jobs."""
        params = {"pipeline_id": pipeline_id, "tenant": tenant, "count_max": STAGE_COUNT_MAX}
        stages: dict[str, Stage] = {}
        last_top: str | None = None
        for job_type, parent_type, status, n, _ in await self._database.ask(SQL["stages"], params):
            is_new = job_type not in stages
            stage = stages.setdefault(job_type, Stage(job_type))
            stage.counts[JobStatus(status)] = stage.counts.get(JobStatus(status), 0) + n
            before = last_top if parent_type is None and is_new else parent_type
            if before is not None and before != job_type and before not in stage.after:
                stage.after.append(before)
            if parent_type is None:
                last_top = job_type
        return list(stages.values())


def _brief(columns: Sequence[Any]) -> JobBrief:
    values = dict(zip(JobBrief.__dataclass_fields__, columns, strict=True))
    return JobBrief(**{**values, "status": JobStatus(values["status"])})
