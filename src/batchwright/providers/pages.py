"""Pages of tasks: the list, and one task with a row per job at a provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from batchwright.api.routes import Streamed
from batchwright.api.services import service
from batchwright.engine.jobs import JobId
from batchwright.errors import InvalidInput, NotFound
from batchwright.files.http import begin_reading
from batchwright.providers.jobs import RemoteJob
from batchwright.providers.services import TaskServices
from batchwright.providers.tasks import Task
from batchwright.providers.views import ProviderView
from batchwright.states import TaskStatus
from batchwright.web.pages import Finder, Link, Pages
from batchwright.web.visit import Reader, Submitter

pages = Pages(
    "tasks",
    package="batchwright.providers",
    links=[Link("Tasks", "/ui/tasks", order=30)],
    finders=[Finder(r"task_[0-9a-f]{32}", "/ui/tasks/{}")],
)

_LIST_MAX = 50
_EVENTS_MAX = 50
_GROUPS: Mapping[str, tuple[TaskStatus, ...]] = {
    "open": (TaskStatus.PENDING, TaskStatus.IN_PROGRESS),
    "completed": (TaskStatus.COMPLETED, TaskStatus.PARTIAL_COMPLETE),
    "failed": (TaskStatus.FAILED,),
    "cancelled": (TaskStatus.CANCELLED,),
}


@pages.get("/ui/tasks")
async def list_tasks(visit: Reader, status: str | None = None, after: str | None = None) -> Response:
    app = service(visit.request, TaskServices)
    if status is not None and status not in _GROUPS:
        raise InvalidInput(f"the status {status[:40]!r} is unknown; use one of: {', '.join(_GROUPS)}")

    async def load() -> dict[str, Any]:
        statuses = None if status is None else _GROUPS[status]
        found = await app.tasks.list(visit.tenant, after=after, limit=_LIST_MAX + 1, statuses=statuses)
        shown = found[:_LIST_MAX]
        return {
            "tasks": [_without_clock(task) for task in shown],
            "next": shown[-1].id if len(found) > _LIST_MAX else None,
        }

    groups = list(_GROUPS)
    return await visit.show("tasks/list.html", load, title="Tasks", chosen=status, groups=groups, after=after)


@pages.get("/ui/tasks/providers")
async def list_providers(visit: Reader) -> Response:
    """What each provider can do, and whether it is ready."""
    app = service(visit.request, TaskServices)

    async def load() -> dict[str, Any]:
        holds = await app.jobs.holds()
        return {"providers": [ProviderView.of(name, app.directory, holds.get(name)) for name in app.directory.names]}

    return await visit.show("tasks/providers.html", load, title="Providers")


@pages.get("/ui/tasks/{id}")
async def show_task(visit: Reader, id: str) -> Response:
    app = service(visit.request, TaskServices)

    async def load() -> dict[str, Any]:
        task = await app.tasks.get(id, tenant=visit.tenant)
        jobs = await app.jobs.of(task.id)
        events = await app.core.queue.latest_events(JobId(task.job_id), limit=_EVENTS_MAX)
        return {"task": _without_clock(task), "jobs": [_shown(job) for job in jobs], "events": events}

    return await visit.show("tasks/show.html", load, title=f"Task {id[-8:]}", id=id)


@pages.post("/ui/tasks/{id}/cancel")
async def cancel_task(visit: Submitter, id: str) -> Response:
    app = service(visit.request, TaskServices)
    task = await app.tasks.cancel(id, tenant=visit.tenant)
    app.core.doorbell.ring([task.queue])
    return visit.go(f"/ui/tasks/{id}", done="Cancelling. Finished results are kept.")


@pages.get("/ui/tasks/{id}/download")
async def download(visit: Reader, id: str) -> Response:
    app = service(visit.request, TaskServices)
    task = await app.tasks.get(id, tenant=visit.tenant)
    if task.result_file_id is None:
        raise NotFound(f"{task.id} is {task.status.value}, and has no result", kind="file", id=task.id)
    file = await app.files.get(task.result_file_id, tenant=task.tenant)
    kind = "jsonl" if task.task_type == "completion" else "json"
    headers = {
        "Content-Disposition": f'attachment; filename="{task.id}.{kind}"',
        "Content-Length": str(file.bytes),
    }
    return Streamed(await begin_reading(app.files, file), headers=headers, media_type="application/octet-stream")


# ------------------------------------------------------------------------------------------------------------------

_OF_JOB = (
    "number",
    "provider",
    "model",
    "phase",
    "external_id",
    "raw_status",
    "total",
    "succeeded",
    "failed",
    "cancelled",
    "error",
    "call_error",
    "cost",
    "created_at",
    "submitted_at",
    "ended_at",
)
_CLOCKS = ("seconds_left",)


def _shown(job: RemoteJob) -> dict[str, Any]:
    """The job without the fields that change with the clock: a page is redrawn only after a real change."""
    return {name: getattr(job, name) for name in _OF_JOB}


def _without_clock(task: Task) -> dict[str, Any]:
    names = (*task.__dataclass_fields__, "has_ended")
    return {name: getattr(task, name) for name in names if name not in _CLOCKS}
