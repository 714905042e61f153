"""Tasks for outside providers over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from pydantic import Field
from starlette.responses import Response

from batchwright.api.access import Reader, Submitter
from batchwright.api.errors import Refusal, documented
from batchwright.api.jobs import event_page
from batchwright.api.openai import AfterId, Id, OpenAIRoute, unknown_cursor
from batchwright.api.routes import Streamed
from batchwright.api.schemas import LIMIT_MAX, EventId, EventView, Page, Text
from batchwright.api.services import service, services
from batchwright.engine.jobs import JobId
from batchwright.errors import Conflict, NotFound
from batchwright.files.http import begin_reading
from batchwright.providers.services import TaskServices
from batchwright.providers.submission import WantedInput, WantedTask
from batchwright.providers.tasks import Task
from batchwright.providers.views import ProviderList, ProviderView, TaskList, TaskToBe, TaskView
from batchwright.states import TaskStatus
from batchwright.telemetry.tracing import incoming, span

router = APIRouter(route_class=OpenAIRoute, tags=["tasks"])

IdempotencyKey = Annotated[
    Text | None,
    Header(
        min_length=1,
        max_length=255,
        description="A repeated request with the same key and body within 30 days returns the same task; "
        "with another body it is a conflict.",
    ),
]
Statuses = Annotated[list[TaskStatus], Field(max_length=len(TaskStatus))]
_LIST_MAX = 100
_FOUND = documented(404)
_MOVED = documented(404, 409)


@router.post("/v1/tasks", responses=documented(409), summary="Create a task for outside providers")
async def create_task(
    request: Request,
    response: Response,
    caller: Submitter,
    body: TaskToBe,
    idempotency_key: IdempotencyKey = None,
) -> TaskView:
    """Returns immediately. Invalid URLs are listed in `invalid_urls`; the other inputs are processed."""
    app = service(request, TaskServices)
    if body.model is not None and body.models:
        raise Refusal("set `model` or `models`, not both", param="models")
    with span("create-task", parent=incoming(request.headers)) as creating:
        wanted = WantedTask(
            tenant=caller.own_tenant,
            task_type=body.task_type,
            provider=body.provider,
            models=[body.model] if body.model is not None else body.models,
            inputs=[WantedInput.of(one) if isinstance(one, str) else one.wanted() for one in body.inputs],
            options=body.options,
            metadata=body.metadata,
            priority=body.priority,
            timeout_hours=body.timeout_hours,
            result_expires_seconds=None if (kept := body.result_expires_after) is None else kept.seconds,
            idempotency_key=None if idempotency_key is None else f"tasks:{idempotency_key}",
            traceparent=creating.traceparent,
        )
        task, is_new = await app.submission.create(wanted)
        creating.set({"task.id": task.id, "tenant.id": task.tenant})
    if is_new:
        app.core.doorbell.ring([task.queue])
    else:
        response.headers["idempotent-replayed"] = "true"
    return await _view(app, task)


@router.get("/v1/tasks", responses=documented(), summary="List tasks, newest first")
async def list_tasks(
    request: Request,
    caller: Reader,
    after: Annotated[AfterId | None, Query(description="The `last_id` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=_LIST_MAX)] = 20,
    status: Annotated[Statuses | None, Query(description="Only tasks with one of these statuses.")] = None,
) -> TaskList:
    app = service(request, TaskServices)
    if after is not None:
        try:
            await app.tasks.get(after, tenant=caller.tenant)
        except NotFound as error:
            raise unknown_cursor(error) from error
    found = await app.tasks.list(caller.tenant, after=after, limit=limit + 1, statuses=status)
    shown = [TaskView.of(task) for task in found[:limit]]
    return TaskList(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(found) > limit,
    )


@router.get("/v1/tasks/{id}", responses=_FOUND, summary="Show a task with its jobs at providers")
async def get_task(request: Request, caller: Reader, id: Id) -> TaskView:
    app = service(request, TaskServices)
    return await _view(app, await app.tasks.get(id, tenant=caller.tenant))


@router.post("/v1/tasks/{id}/cancel", responses=_MOVED, summary="Cancel a task and keep its finished results")
async def cancel_task(request: Request, caller: Submitter, id: Id) -> TaskView:
    """If a provider cannot cancel a job, the task says so, and Batchwright still fetches the job's results."""
    app = service(request, TaskServices)
    try:
        task = await app.tasks.cancel(id, tenant=caller.tenant)
    except Conflict as error:
        raise Refusal(str(error), status=409) from error
    app.core.doorbell.ring([task.queue])
    return await _view(app, task)


@router.get("/v1/tasks/{id}/events", responses=_FOUND, summary="List the events of a task")
async def get_events(
    request: Request,
    caller: Reader,
    id: Id,
    after: Annotated[EventId, Query(description="The id of the last event that you have seen.")] = 0,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = 100,
) -> Page[EventView]:
    task = await service(request, TaskServices).tasks.get(id, tenant=caller.tenant)
    return await event_page(services(request).core.queue, JobId(task.job_id), after, limit)


@router.get(
    "/v1/tasks/{id}/result",
    response_class=Response,
    responses={
        **_MOVED,
        200: {
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "application/jsonl": {"schema": {"type": "string"}},
            },
            "description": "The merged result file: JSON for a transcription, a JSON line per request for a completion",
        },
    },
    summary="Download the merged result of a task",
)
async def get_result(request: Request, caller: Reader, id: Id) -> Response:
    app = service(request, TaskServices)
    task = await app.tasks.get(id, tenant=caller.tenant)
    if not task.has_ended:
        raise Refusal(f"{task.id} is {task.status.value}; it has no result yet", status=409)
    if task.result_file_id is None:
        raise NotFound(f"{task.id} is {task.status.value}, and has no result", kind="file", id=task.id)
    file = await app.files.get(task.result_file_id, tenant=caller.tenant)
    media_type = "application/jsonl" if task.task_type == "completion" else "application/json"
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f'attachment; filename="{file.filename}"',
    }
    return Streamed(await begin_reading(app.files, file), 200, headers, media_type=media_type)


@router.get("/v1/providers", responses=documented(), summary="List providers and what they can do")
async def list_providers(request: Request, caller: Reader) -> ProviderList:
    app = service(request, TaskServices)
    holds = await app.jobs.holds()
    return ProviderList(data=[ProviderView.of(name, app.directory, holds.get(name)) for name in app.directory.names])


async def _view(app: TaskServices, task: Task) -> TaskView:
    return TaskView.of(task, await app.jobs.of(task.id))
