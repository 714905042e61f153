"""Jobs over HTTP: submit, view, follow, and the operator's verbs, on one job or on many."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Body, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from batchwright.access.gate import Caller
from batchwright.api.access import Operator, Reader, Submitter
from batchwright.api.errors import Responses, documented
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import (
    LIMIT_MAX,
    All,
    ChangedView,
    Cursor,
    EventId,
    EventView,
    Group,
    InboxView,
    JobsToBe,
    JobToBe,
    JobView,
    Moment,
    Name,
    OneOrMany,
    Page,
    PipelineView,
    QueueName,
    Text,
    Which,
    WhichToCancel,
    Why,
)
from batchwright.api.services import Services, services
from batchwright.api.streams import LiveStream
from batchwright.api.submit import submit
from batchwright.engine import views
from batchwright.engine.bulk import Changed, Verb
from batchwright.engine.jobs import Job, JobEvent, JobId
from batchwright.engine.queue import Queue
from batchwright.engine.views import JobFilter
from batchwright.errors import Conflict, DatabaseError, InvalidInput
from batchwright.jsonl import one_line
from batchwright.states import JOB, JobStatus
from batchwright.telemetry.tracing import incoming

router = APIRouter(prefix="/v1", route_class=OrjsonRoute)

_PING_SECONDS = 15.0
_JOBS_PER_STEP = 25
_PAGE_BYTES_MAX = 16 * 1024 * 1024
_FOUND = documented(404)
_MOVED = documented(404, 409)
_LISTED = documented()
_MESSAGE = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_STREAMED: Responses = {
    200: {
        "content": {"text/event-stream": {"itemSchema": _MESSAGE}},
        "description": "One message for each event, with the data that `GET /v1/jobs/{id}/events` shows. When the job "
        "has ended, a message `end` follows, and the stream closes",
    },
    204: {"description": "The job has ended and every event was sent: do not reconnect"},
}

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Maximum number to return.")]
From = Annotated[Cursor | None, Query(description="The `next_cursor` of the previous page.")]
IdempotencyKey = Annotated[
    Text | None,
    Header(
        min_length=1,
        max_length=255,
        description="A repeated request with the same body returns the same jobs; another body is refused (409).",
    ),
]


# Jobs -------------------------------------------------------------------------------------------------------------


@router.post(
    "/jobs",
    status_code=201,
    responses=documented(
        409, others={200: {"model": JobView | Page[JobView], "description": "The jobs already existed"}}
    ),
    tags=["jobs"],
    summary="Submit one job, or up to 1,000 at once (all or none)",
)
async def submit_jobs(
    request: Request,
    response: Response,
    caller: Submitter,
    body: Annotated[OneOrMany, Body()],
    idempotency_key: IdempotencyKey = None,
    traceparent: Annotated[Text | None, Header(description="W3C trace context, passed on to workers.")] = None,
) -> JobView | Page[JobView]:
    app = services(request)
    tenant = caller.own_tenant
    bodies = body.jobs if isinstance(body, JobsToBe) else [body]
    origin = incoming(request.headers)
    jobs = [one.new_job(tenant, origin) for one in bodies]
    submitted = await submit(app.core, jobs, tenant=tenant, key=idempotency_key, body=_meant(body))
    shown = await _views(app, await app.core.queue.get_many(submitted.ids, tenant=tenant))
    if not submitted.is_new:
        response.status_code = 200
        response.headers["Idempotent-Replayed"] = "true"
    if isinstance(body, JobsToBe):
        return Page(data=shown, has_more=False, next_cursor=None)
    if not shown:
        raise Conflict("the job of this request has been removed since; use another key to create a new one")
    return shown[0]


def _meant(body: JobToBe | JobsToBe) -> dict[str, Any]:
    """The body as it was sent. Payloads are not copied: for 30 MB, that would block the event loop for many seconds."""
    if isinstance(body, JobsToBe):
        return {"jobs": [_meant(job) for job in body.jobs]}
    payload = {"payload": body.payload} if "payload" in body.model_fields_set else {}
    return {**body.model_dump(mode="json", exclude_unset=True, exclude={"payload"}), **payload}


@router.get("/jobs", responses=_LISTED, tags=["jobs"], summary="List jobs, newest first")
async def list_jobs(
    request: Request,
    caller: Reader,
    status: Annotated[list[JobStatus] | None, Query(max_length=5, description="Repeat for several.")] = None,
    job_type: Annotated[Name | None, Query()] = None,
    queue: Annotated[QueueName | None, Query()] = None,
    pipeline_id: UUID | None = None,
    parent_job_id: UUID | None = None,
    error_code: Annotated[Name | None, Query()] = None,
    created_from: Moment | None = None,
    created_to: Moment | None = None,
    limit: Limit = 50,
    cursor: From = None,
) -> Page[JobView]:
    app = services(request)
    wanted = JobFilter(
        tenant=caller.tenant,
        statuses=tuple(status or ()),
        job_type=job_type,
        queue=queue,
        pipeline_id=pipeline_id,
        parent_job_id=parent_job_id,
        error_code=error_code,
        created_from=created_from,
        created_to=created_to,
    )
    jobs, next = await _page(app, wanted, limit, _place(cursor))
    return Page(data=await _views(app, jobs), has_more=next is not None, next_cursor=_text(next))


@router.get("/jobs/failed", responses=_LISTED, tags=["inbox"], summary="The inbox: failed jobs by type and cause")
async def inbox(
    request: Request, caller: Reader, job_type: Annotated[Name | None, Query()] = None, limit: Limit = 100
) -> All[InboxView]:
    groups = await services(request).core.inbox(tenant=caller.tenant, job_type=job_type, limit=limit)
    return All(data=[InboxView.of(group) for group in groups])


@router.post("/jobs/failed/rerun", responses=_LISTED, tags=["inbox"], summary="Rerun a group of failed jobs")
async def rerun_group(request: Request, caller: Operator, group: Group) -> ChangedView:
    return await _many(services(request), "rerun", _of_group(caller, group), group.dry_run, group.cursor)


@router.post("/jobs/failed/dismiss", responses=_LISTED, tags=["inbox"], summary="Dismiss a group of failed jobs")
async def dismiss_group(request: Request, caller: Operator, group: Group) -> ChangedView:
    return await _many(services(request), "dismiss", _of_group(caller, group), group.dry_run, group.cursor)


@router.post("/jobs/cancel", responses=_LISTED, tags=["jobs"], summary="Cancel jobs by filter")
async def cancel_many(request: Request, caller: Operator, which: WhichToCancel) -> ChangedView:
    wanted = _filter(caller, which)
    return await _many(services(request), "cancel", wanted, which.dry_run, which.cursor, reason=which.reason)


@router.post("/jobs/rerun", responses=_LISTED, tags=["jobs"], summary="Rerun jobs by filter")
async def rerun_many(request: Request, caller: Operator, which: Which) -> ChangedView:
    return await _many(services(request), "rerun", _filter(caller, which), which.dry_run, which.cursor)


@router.get("/jobs/{id}", responses=_FOUND, tags=["jobs"], summary="Show a job")
async def get_job(request: Request, caller: Reader, id: UUID) -> JobView:
    return await _shown(services(request), caller, id)


@router.post("/jobs/{id}/cancel", responses=_MOVED, tags=["jobs"], summary="Cancel a job and its descendants")
async def cancel_job(request: Request, caller: Operator, id: UUID, why: Why | None = None) -> JobView:
    """A job that has already ended does not change."""
    app = services(request)
    await app.core.queue.cancel([JobId(id)], tenant=caller.tenant, reason=(why or Why()).reason)
    return await _shown(app, caller, id)


@router.post("/jobs/{id}/recover", responses=_MOVED, tags=["jobs"], summary="Release a job whose worker is gone")
async def recover_job(request: Request, caller: Operator, id: UUID) -> JobView:
    """Refused (409) while its lease is alive and its lock is not stale."""
    app = services(request)
    await app.core.queue.recover(JobId(id), tenant=caller.tenant)
    return await _shown(app, caller, id, ring=True)


@router.post("/jobs/{id}/rerun", responses=_MOVED, tags=["jobs"], summary="Rerun a job that has ended")
async def rerun_job(request: Request, caller: Operator, id: UUID) -> JobView:
    app = services(request)
    await app.core.queue.rerun(JobId(id), tenant=caller.tenant)
    return await _shown(app, caller, id, ring=True)


# Events -----------------------------------------------------------------------------------------------------------


@router.get("/jobs/{id}/events", responses=_FOUND, tags=["events"], summary="A job's history")
async def list_events(
    request: Request,
    caller: Reader,
    id: UUID,
    after: Annotated[EventId, Query(description="Only events after this id; a page's `next_cursor`.")] = 0,
    limit: Limit = 100,
) -> Page[EventView]:
    app = services(request)
    await app.core.queue.get(JobId(id), tenant=caller.tenant)
    return await event_page(app.core.queue, JobId(id), after, limit)


@router.get(
    "/jobs/{id}/events/stream",
    response_class=StreamingResponse,
    responses=documented(404, 429, others=_STREAMED),
    tags=["events"],
    summary="Follow a job's events as they happen",
)
async def stream_events(
    request: Request,
    caller: Reader,
    id: UUID,
    after: Annotated[EventId, Query(description="Only events after this id.")] = 0,
    last_event_id: Annotated[EventId | None, Header(description="Sent by browsers when they reconnect.")] = None,
) -> Response:
    """Server-sent events. Each event is sent once, in order, even across reconnects with `Last-Event-ID`."""
    app = services(request)
    app.stream_places.check(caller)  # before any query: a client over the limit may try often
    job = await app.core.queue.get(JobId(id), tenant=caller.tenant)
    start = after if last_event_id is None else last_event_id
    if start > 0:
        last = await app.event_streams.last(job.id)
        if start >= last and job.status in JOB.terminal:
            return Response(status_code=204)
        start = min(start, last)  # after a position beyond the last event, no event would ever be new
    place = app.stream_places.take(caller)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return LiveStream(place, _frames(app, caller, job, start), media_type="text/event-stream", headers=headers)


async def event_page(queue: Queue, id: JobId, after: int, limit: int) -> Page[EventView]:
    events = await queue.events(id, after=after, limit=limit + 1)
    shown = [EventView.model_validate(event) for event in events[:limit]]
    has_more = len(events) > limit
    return Page(data=shown, has_more=has_more, next_cursor=str(shown[-1].id) if has_more else None)


def render_event(event: JobEvent) -> bytes:
    """One message of a stream."""
    return b"id: %d\ndata: %b\n\n" % (event.id, one_line(EventView.model_validate(event).model_dump_json().encode()))


async def _frames(app: Services, caller: Caller, job: Job, after: int) -> AsyncGenerator[bytes, None]:
    """If the key is revoked, the stream ends, and a reconnect is refused."""
    app.counts.add("event_streams", 1)
    try:
        yield b"retry: 1000\n\n"
        async with aclosing(app.event_streams.follow(job, after, idle_seconds=_PING_SECONDS)) as news:
            async for frames in news:
                with suppress(DatabaseError):
                    if not await app.gate.is_still_open(caller):
                        return
                yield b"".join(frames) if frames else b": ping\n\n"
        if not app.event_streams.is_closed:  # otherwise the client reconnects, to another server
            yield b"event: end\ndata: %b\n\n" % orjson.dumps({"job_id": job.id})
    finally:
        app.counts.add("event_streams", -1)


# Pipelines --------------------------------------------------------------------------------------------------------


@router.get("/pipelines/{id}", responses=_FOUND, tags=["pipelines"], summary="Show a pipeline")
async def get_pipeline(request: Request, caller: Reader, id: UUID) -> PipelineView:
    """`GET /v1/jobs?pipeline_id=` lists its jobs."""
    return PipelineView.of(await services(request).core.views.pipeline(id, tenant=caller.tenant))


@router.post("/pipelines/{id}/cancel", responses=_MOVED, tags=["pipelines"], summary="Cancel a pipeline's open jobs")
async def cancel_pipeline(request: Request, caller: Operator, id: UUID, why: Why | None = None) -> PipelineView:
    app = services(request)
    await app.core.bulk.cancel_pipeline(id, tenant=caller.tenant, reason=(why or Why()).reason)
    return PipelineView.of(await app.core.views.pipeline(id, tenant=caller.tenant))


# ------------------------------------------------------------------------------------------------------------------


async def _shown(app: Services, caller: Caller, id: UUID, *, ring: bool = False) -> JobView:
    job = await app.core.queue.get(JobId(id), tenant=caller.tenant)
    if ring:
        app.core.doorbell.ring([job.queue])
    (view,) = await _views(app, [job])
    return view


async def _page(
    app: Services, wanted: JobFilter, limit: int, after: views.Cursor | None
) -> tuple[list[Job], views.Cursor | None]:
    """Jobs up to the limit, or fewer if they are large: a thousand can take two gigabytes."""
    ids, next = await app.core.views.ids(wanted, limit=limit, after=after)
    jobs: list[Job] = []
    size = 0
    for start in range(0, len(ids), _JOBS_PER_STEP):
        found = await app.core.queue.get_many(ids[start : start + _JOBS_PER_STEP], tenant=wanted.tenant)
        jobs += found
        size += sum(len(orjson.dumps(job.payload)) + len(orjson.dumps(job.result)) for job in found)
        if size > _PAGE_BYTES_MAX and start + _JOBS_PER_STEP < len(ids):
            return jobs, views.Cursor(jobs[-1].created_at, jobs[-1].id)
    return jobs, next


async def _views(app: Services, jobs: Sequence[Job]) -> list[JobView]:
    reasons = await app.core.views.waiting_on(jobs)
    return [JobView.of(job, reasons[job.id]) for job in jobs]


async def _many(
    app: Services, verb: Verb, wanted: JobFilter, dry_run: bool, cursor: str | None, *, reason: str | None = None
) -> ChangedView:
    if dry_run:
        n = await app.core.bulk.count(verb, wanted)
        return ChangedView(dry_run=True, matched=n, changed=0, has_more=False, next_cursor=None)
    match verb:
        case "cancel":
            done = await app.core.bulk.cancel(wanted, after=_place(cursor), reason=reason or Why().reason)
        case "rerun":
            done = await app.core.bulk.rerun(wanted, after=_place(cursor))
            app.core.doorbell.ring(await app.core.named_queues.all() if done.changed else ())
        case "dismiss":
            done = await app.core.bulk.dismiss(wanted, after=_place(cursor))
    return _changed(done)


def _changed(done: Changed) -> ChangedView:
    return ChangedView(
        dry_run=False,
        matched=done.matched,
        changed=done.changed,
        has_more=done.next is not None,
        next_cursor=_text(done.next),
    )


def _of_group(caller: Caller, group: Group) -> JobFilter:
    return JobFilter(
        tenant=caller.tenant,
        statuses=(JobStatus.FAILED,),
        job_type=group.job_type,
        error_code=group.code,
        dismissed=False,
    )


def _filter(caller: Caller, which: Which) -> JobFilter:
    given = which.model_dump(exclude={"dry_run", "cursor", "reason", "status"}, exclude_none=True)
    if not given and not which.status:
        raise InvalidInput("there is no filter; give at least one of status, job_type, queue, …")
    return JobFilter(tenant=caller.tenant, statuses=tuple(which.status), **given)


def _place(cursor: str | None) -> views.Cursor | None:
    return None if cursor is None else views.Cursor.parse(cursor)


def _text(cursor: views.Cursor | None) -> str | None:
    return None if cursor is None else str(cursor)
