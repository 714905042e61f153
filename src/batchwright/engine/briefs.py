"""Jobs for lists and graphs: without payload and result, which may be megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from batchwright.db.database import Database
from batchwright.db.statements import statements
from batchwright.engine.jobs import JobId
from batchwright.states import JobStatus

SQL = statements(__package__, "parts.sql", "views.sql", "briefs.sql")
_WORDS_MAX = 300
_DEPTH_MAX = 50
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
        rows = await self._database.ask(SQL["briefs"], params) if ids else []
        names = JobBrief.__dataclass_fields__
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [JobBrief(**{**one, "status": JobStatus(one["status"])}) for one in found]

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
