"""What needs a person's attention: each concern in a sentence, with its remedy and the page that shows it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote
from uuid import UUID

from batchwright.db.database import Database
from batchwright.db.statements import statements
from batchwright.engine.jobs import Job, JobId
from batchwright.engine.queue import Queue
from batchwright.engine.views import Views, WaitingOn

SQL = statements(__package__, "attention.sql")

CONCERNS_MAX = 50
_LATE_SECONDS = 60.0
"""How long a job must be due before it is reported; longer than a worker takes to restart."""
_BUSY_SECONDS = 900.0
"""The same for a job that waits only because all workers are busy."""
_SILENT_SECONDS = 60.0
_HEADS_MAX = 100
_DISK_SHARE_MIN = 0.05
_DISK_BYTES_MIN = 1 << 30
_KINDS_MAX = 1_000
_COUNT_MAX = 1_000

Kind = Literal["stuck", "parked", "paused", "unreachable", "disk", "no_worker", "worker", "late", "waiting"]
Level = Literal["error", "warning"]
_LEVELS: tuple[Level, ...] = ("error", "warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """Something that a person should look at."""

    kind: Kind
    level: Level
    message: str
    """A sentence without its full stop."""
    remedy: str
    """What to do about it."""
    link: str | None = None
    """The page that shows it, below the root of the dashboard, such as `queues`."""


def by_urgency(concerns: Iterable[Concern]) -> list[Concern]:
    """Errors first; at most `CONCERNS_MAX`, because nobody reads a longer list."""
    return sorted(concerns, key=lambda one: _LEVELS.index(one.level))[:CONCERNS_MAX]


class Attention:
    """Finds problems of jobs, queues and workers."""

    def __init__(self, queue: Queue, views: Views) -> None:
        self._queue = queue
        self._views = views
        self._database: Database = queue.database

    async def concerns(self, tenant: str | None) -> list[Concern]:
        """The problems of one tenant's jobs, or (None) of all jobs and of the workers."""
        found = [*await self._waiting(tenant), *await self._abandoned(tenant), *await self._poisoned(tenant)]
        return found if tenant is not None else [*found, *await self._workers()]

    async def _waiting(self, tenant: str | None) -> list[Concern]:
        """Queues whose oldest job does not start, and why."""
        rows = await self._database.ask(SQL["late_heads"], {"late_seconds": _LATE_SECONDS, "limit": _HEADS_MAX})
        late: dict[UUID, float] = dict(rows)
        jobs = await self._queue.get_many([JobId(id) for id in late], tenant=tenant)
        reasons = await self._views.waiting_on(jobs)
        found: dict[tuple[str, str], Concern] = {}
        for job in sorted(jobs, key=lambda job: -late[job.id]):
            for why in reasons[job.id]:
                concern = _concern_of_head(job, why, late[job.id])
                if concern is not None:
                    found.setdefault((job.queue, concern.kind), concern)
        return list(found.values())

    async def _abandoned(self, tenant: str | None) -> list[Concern]:
        params = {"late_seconds": _LATE_SECONDS, "tenant": tenant, "limit": CONCERNS_MAX}
        return [
            Concern(
                kind="stuck",
                level="error",
                message=f"the job {id} ({job_type}) is held by {worker}, whose lease expired {_ago(seconds)} ago, and "
                "no worker has rescued it",
                remedy="start a worker, or recover the job",
                link=f"jobs/{id}",
            )
            for id, job_type, worker, seconds in await self._database.ask(SQL["abandoned"], params)
        ]

    async def _poisoned(self, tenant: str | None) -> list[Concern]:
        limits = {"kinds_max": _KINDS_MAX, "count_max": _COUNT_MAX, "limit": CONCERNS_MAX}
        rows = await self._database.ask(SQL["poisoned"], {"tenant": tenant, **limits})
        return [_concern_of_poison(job_type, count) for job_type, count in rows]

    async def _workers(self) -> list[Concern]:
        params = {"silent_seconds": _SILENT_SECONDS, "limit": CONCERNS_MAX}
        rows = await self._database.ask(SQL["troubled_workers"], params)
        return [_concern_of_worker(id, broken, seconds) for id, broken, seconds in rows]


async def disk_concern(folder: Path, what: str) -> Concern | None:
    """Whether the disk of a local folder is nearly full."""
    try:
        usage = await asyncio.to_thread(shutil.disk_usage, folder)
    except OSError:
        return None
    if usage.free >= min(_DISK_BYTES_MIN, usage.total * _DISK_SHARE_MIN):
        return None
    return Concern(
        kind="disk",
        level="error",
        message=f"the disk of {what} ({folder}) has {usage.free >> 20:,} MiB of {usage.total >> 20:,} MiB left",
        remedy="free some space, or move the folder to a larger disk",
    )


def _concern_of_head(job: Job, why: WaitingOn, seconds: float) -> Concern | None:
    queue = f"queues?name={quote(job.queue)}"
    if why.reason == "no_worker":
        return Concern(
            kind="no_worker",
            level="error",
            message=f"jobs wait in {job.queue!r}, the oldest for {_ago(seconds)}: {why.message}",
            remedy="start a worker that has this operation and serves this queue",
            link=f"jobs/{job.id}",
        )
    if why.reason == "paused_queue":
        return Concern(
            kind="paused",
            level="warning",
            message=f"the queue {job.queue!r} is paused, and its oldest job has been due for {_ago(seconds)}",
            remedy="resume the queue",
            link=queue,
        )
    if why.reason == "no_free_slot" and seconds >= _BUSY_SECONDS:
        return Concern(
            kind="late",
            level="warning",
            message=f"the oldest job in {job.queue!r} has been due for {_ago(seconds)}: {why.message}",
            remedy="start more workers, or raise worker.concurrency",
            link=queue,
        )
    return None


def _concern_of_poison(job_type: str, count: int) -> Concern:
    return Concern(
        kind="parked",
        level="error",
        message=f"{count:,} jobs of type {job_type!r} are parked, because every process that ran them died",
        remedy="find out what kills the process, then rerun them from the inbox",
        link=f"inbox?type={quote(job_type)}",
    )


def _concern_of_worker(id: str, broken: str | None, seconds: float) -> Concern:
    if broken is not None:
        return Concern(
            kind="worker",
            level="error",
            message=f"the worker {id} is broken and claims no more jobs: {broken}",
            remedy="restart it",
            link="workers",
        )
    return Concern(
        kind="worker",
        level="warning",
        message=f"the worker {id} has sent no heartbeat for {_ago(seconds)}",
        remedy="check whether its process still runs; other workers have rescued its jobs",
        link="workers",
    )


def _ago(seconds: float) -> str:
    """A rough duration for people."""
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}s"
    return f"{int(seconds)} seconds"
