"""One job: its payload and result, why it waits, its parent and children, its pipeline, and its verbs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import Query
from markupsafe import Markup
from starlette.responses import Response

from batchwright.api.schemas import JobView
from batchwright.engine.briefs import Place, Stage
from batchwright.engine.jobs import Job, JobEvent, JobId
from batchwright.errors import Conflict, NotFound
from batchwright.states import JOB, JobStatus
from batchwright.web import charts
from batchwright.web.pages import Pages
from batchwright.web.views.tree import OPEN_PATTERN, load_tree
from batchwright.web.visit import Operator, Reader, Visit

pages = Pages("job", package="batchwright.web")

_EVENTS_SHOWN = 25
_EVENTS_PER_PAGE = 100
_EVENTS_LOOKED_AT = 200
_REASON_MAX = 500
_ATTEMPTS_SHOWN = 10
_CHILDREN_COUNTED_MAX = 10_000
_NO_END = frozenset({"job.enqueued", "job.joined", "job.started"})


@dataclass(slots=True)
class Attempt:
    """The outcome of one claim of a job."""

    claim: int
    number: int | None
    worker: str | None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    ending: str | None = None
    message: str | None = None


@pages.get("/ui/jobs/{id}")
async def show_job(
    visit: Reader,
    id: UUID,
    children: Annotated[str | None, Query(max_length=200)] = None,
    open: Annotated[str | None, Query(pattern=f"^{OPEN_PATTERN}$")] = None,
) -> Response:
    core, tenant = visit.services.core, visit.tenant
    after = None if children is None else Place.parse(children)
    opened = open.split(".") if open else []

    async def load() -> dict[str, Any]:
        job = await core.queue.get(JobId(id), tenant=tenant)
        events = await core.queue.latest_events(job.id, limit=_EVENTS_LOOKED_AT)
        return {
            "job": job,
            "reasons": (await core.views.waiting_on([job]))[job.id],
            "events": events[-_EVENTS_SHOWN:][::-1],
            "has_more_events": len(events) > _EVENTS_SHOWN,
            "attempts": attempts_of(events),
            **await _family(visit, job, after, opened),
            **await _pipeline(visit, job),
        }

    return await visit.show("job.html", load, title=f"Job {str(id)[-8:]}", id=id, children=children)


@pages.get("/ui/jobs/{id}/events")
async def show_events(visit: Reader, id: UUID, after: Annotated[int, Query(ge=0, le=2**53 - 1)] = 0) -> Response:
    """The whole history, oldest first."""
    core, tenant = visit.services.core, visit.tenant

    async def load() -> dict[str, Any]:
        job = await core.queue.get(JobId(id), tenant=tenant)
        events = await core.queue.events(job.id, after=after, limit=_EVENTS_PER_PAGE + 1)
        has_more = len(events) > _EVENTS_PER_PAGE
        return {"events": events[:_EVENTS_PER_PAGE], "next": events[_EVENTS_PER_PAGE - 1].id if has_more else None}

    return await visit.show("job_events.html", load, title=f"History of job {str(id)[-8:]}", id=id, after=after)


@pages.get("/ui/jobs/{id}/document")
async def download(visit: Reader, id: UUID) -> Response:
    """Everything about the job, as the API shows it."""
    core = visit.services.core
    job = await core.queue.get(JobId(id), tenant=visit.tenant)
    reasons = await core.views.waiting_on([job])
    text = orjson.dumps(JobView.of(job, reasons[job.id]).model_dump(mode="json"), option=orjson.OPT_INDENT_2)
    headers = {"Content-Disposition": f'attachment; filename="job-{id}.json"'}
    return Response(text, media_type="application/json", headers=headers)


@pages.post("/ui/jobs/{id}/cancel")
async def cancel_job(visit: Operator, id: UUID) -> Response:
    reason = (await visit.field("reason"))[:_REASON_MAX] or "cancelled by request"
    n = await visit.services.core.queue.cancel([JobId(id)], tenant=visit.tenant, reason=reason)
    words = "The job was cancelled." if n == 1 else f"{n:,} jobs were cancelled." if n else "The job had ended already."
    return visit.go(f"/ui/jobs/{id}", done=words)


@pages.post("/ui/jobs/{id}/rerun")
async def rerun_job(visit: Operator, id: UUID) -> Response:
    await visit.services.core.queue.rerun(JobId(id), tenant=visit.tenant)
    return await _again(visit, id, "The job is queued again.")


@pages.post("/ui/jobs/{id}/recover")
async def recover_job(visit: Operator, id: UUID) -> Response:
    await visit.services.core.queue.recover(JobId(id), tenant=visit.tenant)
    return await _again(visit, id, "The job was released; a worker will pick it up.")


@pages.post("/ui/jobs/{id}/dismiss")
async def dismiss_job(visit: Operator, id: UUID) -> Response:
    """Remove the job from the inbox; its status does not change."""
    core = visit.services.core
    job = await core.queue.get(JobId(id), tenant=visit.tenant)
    if not await core.queue.dismiss([job.id]):
        raise Conflict(f"job {id} is {job.status}; only a failed job that belongs to no batch is in the inbox")
    return visit.go(f"/ui/jobs/{id}", done="The job was removed from the inbox.")


@pages.post("/ui/pipelines/{id}/cancel")
async def cancel_pipeline(visit: Operator, id: UUID) -> Response:
    n = await visit.services.core.bulk.cancel_pipeline(id, tenant=visit.tenant)
    return visit.go("/ui/jobs", done=f"{n:,} jobs of the pipeline were cancelled.", pipeline=str(id))


@pages.get("/ui/pipelines/{id}")
async def show_pipeline(visit: Reader, id: UUID) -> Response:
    """Show the pipeline on the page of its first job or, if that is gone, the list of its jobs."""
    with suppress(NotFound):
        await visit.services.core.queue.get(JobId(id), tenant=visit.tenant)
        return visit.go(f"/ui/jobs/{id}")
    return visit.go("/ui/jobs", pipeline=str(id))


def attempts_of(events: Sequence[JobEvent]) -> list[Attempt]:
    """The outcome of each claim, newest first, as far as these events show it."""
    found: dict[int, Attempt] = {}
    for event in events:
        if not event.claim:
            continue
        one = found.setdefault(event.claim, Attempt(event.claim, event.attempt, event.worker))
        if event.event == "job.started":
            one.started_at, one.worker, one.number = event.ts, event.worker, event.attempt
        elif event.event.startswith("job.") and event.event not in _NO_END and one.ended_at is None:
            one.ended_at, one.ending, one.message = event.ts, event.event.removeprefix("job."), event.message
    return list(found.values())[::-1][:_ATTEMPTS_SHOWN]


async def _family(visit: Visit, job: Job, after: Place | None, opened: Sequence[str]) -> dict[str, Any]:
    """The jobs that wait for this one, and the tree of those that this one waits for."""
    core = visit.services.core
    above = await core.briefs.of(await core.briefs.ancestors(job.id) if job.parent_job_id else [], tenant=visit.tenant)
    tree, next = await load_tree(core.briefs, job.id, tenant=visit.tenant, opened=opened, after=after)
    counts: Mapping[JobStatus, int] = Counter(twig.job.status for twig in tree)
    if next is not None or after is not None:  # the page does not show all of them
        counts = await core.queue.count_children(job.id, limit=_CHILDREN_COUNTED_MAX + 1)
    return {
        "above": above[::-1],
        "tree": tree,
        "child_counts": counts,
        "counted_max": _CHILDREN_COUNTED_MAX if sum(counts.values()) > _CHILDREN_COUNTED_MAX else None,
        "next": None if next is None else str(next),
    }


async def _pipeline(visit: Visit, job: Job) -> dict[str, Any]:
    stages = await visit.services.core.briefs.stages(job.pipeline_id, tenant=visit.tenant)
    is_open = any(status not in JOB.terminal for stage in stages for status in stage.counts)
    picture = _picture(visit, job, stages) if len(stages) > 1 else None
    return {"picture": picture, "is_pipeline_open": is_open and len(stages) > 1}


def _picture(visit: Visit, job: Job, stages: Sequence[Stage]) -> Markup:
    known = {stage.job_type for stage in stages}
    nodes = [
        charts.Node(
            stage.job_type,
            stage.job_type,
            _stage_words(stage.counts),
            status=_worst(stage.counts).lower(),
            share=sum(n for status, n in stage.counts.items() if status in JOB.terminal) / stage.total,
            href=visit.url("/ui/jobs", pipeline=str(job.pipeline_id), type=stage.job_type),
        )
        for stage in stages
    ]
    edges = [(before, stage.job_type) for stage in stages for before in stage.after if before in known]
    return charts.graph(nodes, edges, label="Pipeline")


def _stage_words(counts: Mapping[JobStatus, int]) -> str:
    return ", ".join(f"{n:,} {status.lower()}" for status, n in sorted(counts.items(), key=lambda pair: -pair[1]))


def _worst(counts: Mapping[JobStatus, int]) -> JobStatus:
    order = (JobStatus.FAILED, JobStatus.RUNNING, JobStatus.QUEUED, JobStatus.CANCELLED, JobStatus.SUCCEEDED)
    return next(status for status in order if counts.get(status))


async def _again(visit: Visit, id: UUID, words: str) -> Response:
    core = visit.services.core
    core.doorbell.ring([(await core.queue.get(JobId(id), tenant=visit.tenant)).queue])
    return visit.go(f"/ui/jobs/{id}", done=words)
