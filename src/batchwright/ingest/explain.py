"""What documents wait for, in words, and what a user can do about it.

the run's row      parked: by a user, for its budget, or for a credential
rows of steps      a rate budget, a batch, a retry, the store, another version of a model
the engine         a worker that holds it, no worker, a paused queue, no free slot
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batchwright.engine.jobs import Job, JobId
from batchwright.ingest.items import OPEN_COUNT_MAX
from batchwright.states import ItemStatus, JobStatus, RunStatus

if TYPE_CHECKING:
    from batchwright.engine.views import WaitingOn
    from batchwright.ingest.items import Item
    from batchwright.ingest.part import IngestPart
    from batchwright.ingest.runs import Run

_SAMPLE = 20
"""Number of jobs to examine. All documents of a run are in one queue, so a few show why the others wait."""
_WORDS = {
    "backoff": "a retry",
    "batch": "a batch",
    "budget": "the budget of the run",
    "configuration": "a worker with the same models",
    "credential": "a credential",
    "rate": "the rate limit",
    "redo": "an earlier step, which runs again",
    "resource": "a resource",
    "storage": "the object store",
    "user": "a user",
}
_REMEDIES = {
    "configuration": "on every worker, install the versions that the run was created with",
    "no_worker": "start one: batchwright worker, or batchwright up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """A reason why open documents wait."""

    reason: str
    """`user`, `budget`, `credential`, `rate`, `batch`, `backoff`, `storage`, `configuration`, `resource`, `lease`, or a
    reason of the engine: `no_worker`, `paused_queue`, `no_free_slot`, `isolation`, `listing`."""
    message: str
    count: int | None = None
    """Number of documents; None if not counted."""
    has_more: bool = False
    """Whether there are open documents that were not examined."""
    step: str | None = None
    until: datetime | None = None
    remedy: str | None = None


def remedy_of_parked(run_id: str, reason: str | None) -> str:
    command = f"batchwright ingest resume {run_id}"
    if reason == "budget":
        return f"raise the budget: {command} --budget AMOUNT"
    if reason == "credential":
        return f"replace the credential, then resume: {command}"
    return f"resume it: {command}"


async def explain_item(part: IngestPart, item: Item) -> list[Waits]:
    """Why a document is not done yet; empty for one that has ended."""
    if item.has_ended:
        return []
    run = await part.runs.get(item.run_id, tenant=None)
    found = _of_run(run)
    steps = [step for step in await part.items.steps(item.id) if step.state == "open" and step.waiting]
    is_parked = run.status is RunStatus.PARKED
    for step in steps:
        waiting = step.waiting or {}
        if not (is_parked and waiting.get("for") in ("user", run.parked_reason)):
            found.append(_of_step(waiting, step=step.step, until=step.not_before))
    jobs = await part.core.queue.get_many([JobId(item.job_id)])
    if not jobs:
        return found or [Waits(reason="listing", message="its run has not created a job for it yet")]
    return [*found, *await _of_jobs(part, jobs, has_said=bool(found))]


async def explain_run(part: IngestPart, run: Run, *, limit: int = 10) -> list[Waits]:
    """What the open documents of a run wait for, the largest group first; empty for a run that has ended."""
    if run.has_ended:
        return []
    found = _of_run(run)
    is_parked = run.status is RunStatus.PARKED
    for reason, message, count, until in await part.items.waits(run.id, limit):
        if not (is_parked and reason in ("user", run.parked_reason)):
            waits = _of_step({"for": reason, "message": message}, count=count, until=until)
            found.append(replace(waits, has_more=run.item_count_open > OPEN_COUNT_MAX))
    if is_parked:
        return found
    sample = await part.items.list(run.id, limit=_SAMPLE, statuses=[ItemStatus.OPEN])
    ids = [JobId(item.job_id) for item in sample] if run.listed_at is not None and sample else [JobId(run.job_id)]
    jobs = await part.core.queue.get_many(ids)
    queued = [job for job in jobs if job.status is JobStatus.QUEUED]
    of_jobs = await _of_jobs(part, queued, has_said=bool(found))
    # While other documents of the run are in progress, it is normal that some wait for a free slot.
    is_busy = len(queued) < len(jobs)
    return [*found, *(one for one in of_jobs if not (is_busy and one.reason == "no_free_slot"))]


def _of_run(run: Run) -> list[Waits]:
    if run.status is RunStatus.PARKED:
        reason = run.parked_reason or "user"
        message = f"the run is parked: {run.parked_message or reason}"
        return [Waits(reason=reason, message=message, remedy=remedy_of_parked(run.id, reason))]
    return []


def _of_step(
    waiting: Mapping[str, Any], *, step: str | None = None, count: int | None = None, until: datetime | None = None
) -> Waits:
    reason = str(waiting.get("for") or "resource")
    said = str(waiting.get("message") or "")
    words = _WORDS.get(reason, reason)
    message = f"waits for {words}: {said}" if said else f"waits for {words}"
    return Waits(reason=reason, message=message, step=step, count=count, until=until, remedy=_REMEDIES.get(reason))


async def _of_jobs(part: IngestPart, jobs: Sequence[Job], *, has_said: bool) -> list[Waits]:
    held = [_of_lease(job) for job in jobs if job.status is JobStatus.RUNNING and job.lease_until is not None]
    reasons = await part.core.views.waiting_on(jobs)
    found: dict[str, Waits] = {}
    for job in jobs:
        for one in reasons.get(job.id, ()):
            if one.reason == "run_after":
                # That the job is asleep explains little: the rows of its steps say why.
                if job.message is not None and not has_said:
                    found[one.reason] = Waits(reason="resource", message=job.message, until=one.until)
            elif one.reason != "children":
                found[one.reason] = _from_engine(one)
    return [*held, *found.values()]


def _of_lease(job: Job) -> Waits:
    """A worker holds it: nothing is wrong, unless the worker has stopped renewing its lease."""
    assert job.lease_until is not None
    if job.lease_until < datetime.now(UTC):
        message = f"its worker {job.locked_by} has stopped renewing the lease; another one picks it up soon"
        return Waits(reason="lease", message=message, until=job.lease_until)
    return Waits(reason="lease", message=f"the worker {job.locked_by} works on it", until=job.lease_until)


def _from_engine(one: WaitingOn) -> Waits:
    return Waits(reason=one.reason, message=_in_words(one), until=one.until, remedy=_remedy_of_engine(one.reason))


def _in_words(one: WaitingOn) -> str:
    if one.reason == "no_worker":
        return "no live worker runs documents"
    if one.reason == "no_free_slot":
        return "every worker that runs documents is busy"
    return one.message


def _remedy_of_engine(reason: str) -> str | None:
    from batchwright.ingest.runs import QUEUE

    return f"resume it: batchwright queue resume {QUEUE}" if reason == "paused_queue" else _REMEDIES.get(reason)
