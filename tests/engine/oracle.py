"""A second engine, in memory and in plain Python: what the model test expects of the database.

It follows design.md §4 and has no SQL, indexes or transactions. Every method returns what the verb should return, and
raises `Refused` where the verb should raise `Conflict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

LEASE = timedelta(seconds=30)
STALE = timedelta(seconds=1800)
OPEN = ("QUEUED", "RUNNING")


class Refused(Exception):
    """The verb should raise Conflict or InvalidInput."""


@dataclass(slots=True)
class Row:
    """The expected row of a job."""

    id: UUID
    tenant: str
    priority: int
    run_after: datetime
    max_attempts: int
    deadline: datetime | None = None
    exclusive_key: str | None = None
    idempotency_key: str | None = None
    payload: Any = None
    parent_job_id: UUID | None = None
    round: int | None = None
    status: str = "QUEUED"
    attempts: int = 0
    rescues: int = 0
    claims: int = 0
    locked_by: str | None = None
    locked_at: datetime | None = None
    lease_until: datetime | None = None
    is_current: bool = False
    waits: int = 0
    on_join: str | None = None
    allow_failures: int | None = None
    children_open: int = 0
    children_failed: int = 0
    deadline_passed: bool = False
    started: bool = False
    progress_current: int | None = None
    progress_total: int | None = None
    message: str | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def place(self) -> tuple[int, datetime, UUID]:
        return self.priority, self.run_after, self.id

    def is_held_by(self, claim: int) -> bool:
        return self.status == "RUNNING" and self.lease_until is not None and self.claims == claim

    def let_go(self) -> None:
        self.locked_by = self.lease_until = None


class Oracle:
    """All jobs, and the verbs."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.jobs: dict[UUID, Row] = {}
        self.accepted: set[tuple[UUID, int]] = set()
        """Every claim that was settled."""

    # Enqueue ----------------------------------------------------------------------------------------------------

    def enqueue(self, row: Row, delay_seconds: float, on_held: str = "queue") -> tuple[UUID, bool]:
        first = self._first_of(row)
        if first is not None:
            if (first.payload, first.exclusive_key) != (row.payload, row.exclusive_key):
                raise Refused
            return first.id, False
        standing = self._standing_in(row, on_held)
        if standing is not None:
            return standing, False
        self.insert(row, delay_seconds)
        return row.id, True

    def insert(self, row: Row, delay_seconds: float) -> None:
        due = self.now + timedelta(seconds=delay_seconds)
        row.run_after = max(self.now, due if row.deadline is None else min(due, row.deadline))
        self.jobs[row.id] = row

    def _first_of(self, row: Row) -> Row | None:
        if row.idempotency_key is None:
            return None
        same = (row.tenant, row.idempotency_key)
        return next((job for job in self.jobs.values() if (job.tenant, job.idempotency_key) == same), None)

    def _standing_in(self, row: Row, on_held: str) -> UUID | None:
        if row.exclusive_key is None or on_held == "queue":
            return None
        others = [job for job in self._of_key(row) if job.is_open]
        if on_held == "reject" and others:
            raise Refused
        if on_held == "supersede":
            self.cancel([job.id for job in others])
        if on_held == "coalesce":
            others.sort(key=lambda job: (not job.is_current, *job.place))
            return next((job.id for job in others if not job.started), None)
        return None

    # Claims -----------------------------------------------------------------------------------------------------

    def due(self) -> list[Row]:
        """The jobs that a claim of everything should return, in order."""
        ready = [job for job in self.jobs.values() if self._is_ready(job) and job.rescues < 2]
        first = [job for job in ready if job.is_current or not self._has_rival(job)]
        return sorted((job for job in first if self._key_is_free(job)), key=lambda job: job.place)

    def can_claim(self, id: UUID, suspect: bool) -> bool:
        job = self.jobs[id]
        return self._is_ready(job) and (job.rescues >= 2) == suspect and self._key_is_free(job)

    def claim(self, id: UUID, worker: str) -> None:
        job = self.jobs[id]
        for other in self._of_key(job):
            other.is_current = False
        job.status, job.locked_by, job.locked_at, job.lease_until = "RUNNING", worker, self.now, self.now + LEASE
        job.attempts += 1
        job.claims += 1
        job.is_current = job.exclusive_key is not None
        job.started = True

    def renew(self, held: Iterable[tuple[UUID, int]]) -> set[UUID]:
        alive = {id for id, claim in held if self.jobs[id].is_held_by(claim)}
        for id in alive:
            self.jobs[id].lease_until = self.now + LEASE
        return alive

    def _is_ready(self, job: Row) -> bool:
        return job.status == "QUEUED" and job.run_after <= self.now and job.attempts < job.max_attempts

    def _has_rival(self, job: Row) -> bool:
        return any(
            rival.place < job.place and self._is_ready(rival) and rival.rescues < 2 for rival in self._of_key(job)
        )

    def _key_is_free(self, job: Row) -> bool:
        return not any(other.is_current and not self._may_lose_key(other) for other in self._of_key(job))

    def _may_lose_key(self, holder: Row) -> bool:
        return not holder.is_open and not self._lease_is_alive(holder)

    def _lease_is_alive(self, job: Row) -> bool:
        return job.lease_until is not None and job.lease_until >= self.now

    def _of_key(self, job: Row) -> list[Row]:
        if job.exclusive_key is None:
            return []
        same = (job.tenant, job.exclusive_key)
        return [
            other for other in self.jobs.values() if (other.tenant, other.exclusive_key) == same and other is not job
        ]

    # Settles ----------------------------------------------------------------------------------------------------

    def settle(self, settles: Sequence[tuple[UUID, int, str, float]]) -> set[UUID]:
        """Apply settles of (id, claim, verb, delay); only those with a valid fence change a job."""
        moved = set()
        for id, claim, verb, delay_seconds in settles:
            job = self.jobs[id]
            if job.is_held_by(claim):
                moved.add(id)
                self._settle(job, verb, delay_seconds)
        return moved

    def _settle(self, job: Row, verb: str, delay_seconds: float) -> None:
        self._accept(job)
        job.let_go()
        job.rescues = job.rescues if verb == "release" else 0
        if verb in ("succeed", "fail"):
            self._end(job, "SUCCEEDED" if verb == "succeed" else "FAILED")
            return
        job.status = "QUEUED"
        job.attempts -= verb in ("snooze", "release")
        due = self.now + timedelta(seconds=0.0 if verb == "release" else delay_seconds)
        is_bound = job.deadline is not None and not job.deadline_passed
        job.run_after = max(self.now, min(due, job.deadline) if is_bound else due)

    def _line(self, job: Row) -> list[Row]:
        """The job and all its ancestors, which wait for it."""
        return [job] if job.parent_job_id is None else [job, *self._line(self.jobs[job.parent_job_id])]

    def wait(self, id: UUID, claim: int, children: Sequence[Row], on_join: str, allow_failures: int | None) -> None:
        job = self.jobs[id]
        keys = {child.exclusive_key for child in children} - {None}
        if not job.is_held_by(claim) or keys & {ancestor.exclusive_key for ancestor in self._line(job)}:
            raise Refused
        self._accept(job)
        job.let_go()
        job.rescues = job.children_failed = 0
        job.attempts -= 1
        job.waits += 1
        job.children_open, job.allow_failures = len(children), allow_failures
        for child in children:
            child.parent_job_id, child.round = id, job.waits
            self.insert(child, 0.0)
        if children:
            job.on_join, job.progress_current, job.progress_total = on_join, 0, len(children)
            return
        job.on_join = None
        if on_join == "close":
            self._end(job, "SUCCEEDED")
        else:
            job.status, job.run_after = "QUEUED", self.now

    def emit(self, id: UUID, claim: int, message: str) -> bool:
        job = self.jobs[id]
        if job.is_held_by(claim):
            job.message = message
        return job.is_held_by(claim)

    def progress(self, id: UUID, claim: int, current: int) -> bool:
        job = self.jobs[id]
        if not job.is_held_by(claim):
            return False
        if current > (job.progress_current or 0):
            job.rescues = 0
        job.progress_current = current
        return True

    def let_go(self, held: Iterable[tuple[UUID, int]]) -> None:
        for id, claim in held:
            if not self.jobs[id].is_open and self.jobs[id].claims == claim:
                self.jobs[id].let_go()

    def _accept(self, job: Row) -> None:
        assert (job.id, job.claims) not in self.accepted, "one claim was settled twice"
        self.accepted.add((job.id, job.claims))

    # Parents ----------------------------------------------------------------------------------------------------

    def _end(self, job: Row, status: str) -> None:
        """A terminal move, by any verb, is counted on the parent at once."""
        job.status = status
        parent = self.jobs.get(job.parent_job_id) if job.parent_job_id else None
        if parent is not None and parent.children_open > 0:
            self._count(parent, failed=status != "SUCCEEDED")

    def _count(self, parent: Row, *, failed: bool) -> None:
        parent.children_open -= 1
        parent.children_failed += failed
        parent.progress_current = (parent.progress_current or 0) + 1
        if parent.children_open == 0:
            self._join(parent)

    def _join(self, parent: Row) -> None:
        overdue = parent.deadline is not None and parent.deadline <= self.now
        too_many = parent.allow_failures is not None and parent.children_failed > parent.allow_failures
        if parent.on_join == "resume" and (overdue or not too_many):
            parent.deadline_passed |= overdue
            parent.status, parent.run_after, parent.on_join = "QUEUED", self.now, None
        elif overdue or too_many:
            self._end(parent, "FAILED")
        else:
            parent.on_join = None
            self._end(parent, "SUCCEEDED")

    def children_of(self, id: UUID, round: int) -> list[Row]:
        return [job for job in self.jobs.values() if job.parent_job_id == id and job.round == round]

    def _open_children(self, ids: Iterable[UUID]) -> list[Row]:
        wanted = set(ids)
        return [job for job in self.jobs.values() if job.parent_job_id in wanted and job.is_open]

    # Verbs of people --------------------------------------------------------------------------------------------

    def cancel(self, ids: Iterable[UUID]) -> int:
        tree = {id for id in ids if self.jobs[id].is_open}
        while more := {job.id for job in self._open_children(tree)} - tree:
            tree |= more
        for id in tree:
            job = self.jobs[id]
            job.status = "CANCELLED"
            job.children_failed, job.children_open = job.children_failed + job.children_open, 0
        for id in tree:
            if self.jobs[id].parent_job_id not in tree:
                self._end(self.jobs[id], "CANCELLED")
        return len(tree)

    def recover(self, id: UUID) -> None:
        job = self.jobs[id]
        stale = job.locked_at is not None and job.locked_at < self.now - STALE
        if job.status != "RUNNING" or job.lease_until is None or not (stale or not self._lease_is_alive(job)):
            raise Refused
        job.let_go()
        job.status, job.attempts, job.rescues, job.run_after, job.locked_at = "QUEUED", 0, 0, self.now, None

    def rerun(self, id: UUID) -> None:
        job = self.jobs[id]
        lives = self._lives(job)
        if job.status not in ("FAILED", "CANCELLED") or any(map(self._lease_is_alive, lives)):
            raise Refused
        if job.parent_job_id is not None:
            parent = self.jobs[job.parent_job_id]
            if parent.children_open == 0 or parent.waits != job.round:
                raise Refused
        waiting = [one for one in lives if self._unsuccessful(one)]
        if not all(self._key_is_free(one) for one in waiting) or self._meets_itself(waiting):
            raise Refused
        if job.parent_job_id is not None:
            parent.children_open += 1
            parent.children_failed -= 1
            parent.progress_current = (parent.progress_current or 0) - 1
        for one in lives:
            self._revive(one, len(self._unsuccessful(one)))

    def _meets_itself(self, waiting: list[Row]) -> bool:
        """Whether two jobs of one key would both wait again, which only one of them can."""
        keys = [(job.tenant, job.exclusive_key) for job in waiting if job.exclusive_key is not None]
        return len(set(keys)) < len(keys)

    def _lives(self, job: Row) -> list[Row]:
        """The job and its unsuccessful descendants, which would wait again or run again; parents first."""
        return [job, *(one for child in self._unsuccessful(job) for one in self._lives(child))]

    def _unsuccessful(self, job: Row) -> list[Row]:
        if job.on_join is None:
            return []
        children = self.children_of(job.id, job.waits)
        return sorted((one for one in children if one.status in ("FAILED", "CANCELLED")), key=lambda one: one.id)

    def _revive(self, job: Row, children: int) -> None:
        job.let_go()
        job.status = "RUNNING" if children else "QUEUED"
        job.attempts = job.rescues = job.children_failed = 0
        job.children_open = children
        job.progress_current = (job.progress_total or 0) - children if children else None
        job.progress_total = job.progress_total if children else None
        job.on_join = job.on_join if children else None
        job.deadline = None if job.deadline is not None and job.deadline <= self.now else job.deadline
        job.deadline_passed = False
        job.run_after = self.now
        if children and job.exclusive_key is not None:
            for other in self._of_key(job):
                other.is_current = False
            job.is_current = True

    # Upkeep -----------------------------------------------------------------------------------------------------

    def rescue(self, dead: Sequence[tuple[UUID, int]] = ()) -> dict[UUID, bool]:
        """Rescue the named jobs, or all with an expired lease; return those that lost their lock, and if they ran."""
        named = {id for id, claim in dead if self.jobs[id].claims == claim}
        over = [
            job
            for job in self.jobs.values()
            if job.locked_by is not None and (job.id in named if dead else not self._lease_is_alive(job))
        ]
        answer = {job.id: job.status == "RUNNING" for job in over}
        for job in sorted(over, key=lambda job: job.id):
            job.let_go()
            if answer[job.id]:
                self._rescue(job)
        return answer

    def _rescue(self, job: Row) -> None:
        parked = job.max_attempts == 1 or job.rescues >= 2
        job.rescues += 1
        if parked:
            self._end(job, "FAILED")
        else:
            job.status, job.run_after = "QUEUED", self.now
            job.attempts -= 1

    def expire(self) -> None:
        late = [
            job
            for job in self.jobs.values()
            if job.is_open and job.deadline is not None and job.deadline <= self.now and not job.deadline_passed
        ]
        waiting = [job.id for job in late if job.children_open > 0]
        for job in late:
            if job.id not in waiting:
                self._end(job, "FAILED")
        self.cancel([child.id for child in self._open_children(waiting)])
