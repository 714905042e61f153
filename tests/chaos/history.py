"""What the database knows about a run: rows, events and effects, read once at the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.rows import namedtuple_row

_JOBS = """
SELECT id, job_type, status::text, payload, result, error ->> 'code' AS code, error ->> 'message' AS reason,
       attempts, max_attempts, claims, locked_by, exclusive_key, parent_job_id, round, waits,
       children_open, children_failed, progress_total, idempotency_key, deadline, priority, queue, tenant
FROM batchwright.job ORDER BY id
"""
_EVENTS = """
SELECT id, job_id, extract(epoch FROM ts)::float8, event, status::text, claim, attempt, worker
FROM batchwright.job_event ORDER BY id
"""

TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


class Event(NamedTuple):
    """One line of a job's history."""

    id: int
    job_id: UUID
    ts: float
    event: str
    status: str | None
    claim: int
    attempt: int
    worker: str | None


@dataclass(slots=True)
class History:
    """Everything that happened, by job."""

    jobs: dict[UUID, Any]
    events: list[Event]
    effects: Counter[UUID]
    of_job: dict[UUID, list[Event]] = field(default_factory=lambda: defaultdict(list))
    children: dict[UUID, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for event in self.events:
            self.of_job[event.job_id].append(event)
        for job in self.jobs.values():
            if job.parent_job_id is not None:
                self.children[job.parent_job_id].append(job)

    def count(self, job: Any, event: str) -> int:
        return sum(one.event == event for one in self.since_rerun(job))

    def since_rerun(self, job: Any) -> list[Event]:
        """The events since its last rerun."""
        events = self.of_job[job.id]
        starts = [place for place, event in enumerate(events) if event.event == "job.rerun"]
        return events[starts[-1] :] if starts else events

    def was_rerun(self, job: Any) -> bool:
        return any(event.event == "job.rerun" for event in self.of_job[job.id])

    def of_type(self, job_type: str) -> Iterator[Any]:
        return (job for job in self.jobs.values() if job.job_type == job_type)

    def line(self, job: Any) -> Iterator[Any]:
        """The job, its parent, and so on to the root."""
        while job is not None:
            yield job
            job = self.jobs.get(job.parent_job_id)


def read_history(url: str, *, has_effects: bool = True) -> History:
    with psycopg.connect(url) as connection:
        jobs = {job.id: job for job in connection.cursor(row_factory=namedtuple_row).execute(_JOBS)}
        events = [Event(*row) for row in connection.execute(_EVENTS)]
        effects: Counter[UUID] = Counter()
        if has_effects:
            effects.update(id for (id,) in connection.execute("SELECT job_id FROM chaos.effect"))
    return History(jobs, events, effects)
