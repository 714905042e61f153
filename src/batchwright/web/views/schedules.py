"""Schedules: their next ticks, and the verbs for them."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import Query
from pydantic import ValidationError
from starlette.responses import Response

from batchwright.api.schedules import NamedPlan, run_once
from batchwright.engine.schedules import LIST_MAX, Missed
from batchwright.errors import Conflict, InvalidInput
from batchwright.web.pages import Link, Pages
from batchwright.web.visit import Operator, Reader, Visit

pages = Pages(
    "schedules", package="batchwright.web", links=[Link("Schedules", "/ui/schedules", group="Engine", order=40)]
)
_PER_PAGE = 50
_FIELDS = ("name", "cron", "timezone", "missed", "tick_field", "job_type", "payload", "queue", "priority")
Name = Annotated[str, Query(min_length=1, max_length=200)]


@pages.get("/ui/schedules")
async def list_schedules(visit: Reader, cursor: Annotated[str | None, Query(max_length=200)] = None) -> Response:
    schedules, tenant = visit.services.core.schedules, visit.caller.own_tenant

    async def load() -> dict[str, Any]:
        found = await schedules.list(tenant=tenant, limit=min(_PER_PAGE + 1, LIST_MAX), after=cursor)
        shown = found[:_PER_PAGE]
        return {"schedules": shown, "next": shown[-1].name if len(found) > _PER_PAGE else None}

    return await visit.show("schedules.html", load, title="Schedules", cursor=cursor)


@pages.get("/ui/schedules/new")
async def show_new(visit: Operator) -> Response:
    return await _draw(visit, {}, {}, is_new=True)


@pages.get("/ui/schedules/one")
async def show_schedule(visit: Reader, name: Name) -> Response:
    schedules, tenant = visit.services.core.schedules, visit.caller.own_tenant

    async def load() -> dict[str, Any]:
        schedule = await schedules.get(name, tenant=tenant)
        return {"schedule": schedule, "upcoming": schedule.upcoming(10)}

    return await visit.show("schedule.html", load, title=f"Schedule {name}")


@pages.get("/ui/schedules/edit")
async def show_edit(visit: Operator, name: Name) -> Response:
    schedule = await visit.services.core.schedules.get(name, tenant=visit.caller.own_tenant)
    given = {field: str(getattr(schedule, field, None) or "") for field in _FIELDS}
    job = schedule.job
    given |= {
        "job_type": str(job.get("operation") or job.get("job_type") or ""),
        "payload": ""
        if job.get("payload") is None
        else orjson.dumps(job["payload"], option=orjson.OPT_INDENT_2).decode(),
        "queue": str(job.get("queue") or ""),
        "priority": "" if job.get("priority") is None else str(job["priority"]),
    }
    return await _draw(visit, given, {}, is_new=False)


@pages.post("/ui/schedules/new")
async def create_schedule(visit: Operator) -> Response:
    return await _put(visit, replace=False)


@pages.post("/ui/schedules/edit")
async def edit_schedule(visit: Operator) -> Response:
    return await _put(visit, replace=True)


@pages.post("/ui/schedules/pause")
async def pause_schedule(visit: Operator) -> Response:
    name = await visit.field("name")
    await visit.services.core.schedules.pause(name, tenant=visit.caller.own_tenant)
    return visit.go("/ui/schedules/one", done="The schedule is paused.", name=name)


@pages.post("/ui/schedules/resume")
async def resume_schedule(visit: Operator) -> Response:
    name = await visit.field("name")
    await visit.services.core.schedules.resume(name, tenant=visit.caller.own_tenant)
    return visit.go("/ui/schedules/one", done="The schedule resumes with its next tick.", name=name)


@pages.post("/ui/schedules/run")
async def run_schedule(visit: Operator) -> Response:
    core, name = visit.services.core, await visit.field("name")
    id = await run_once(core, name, tenant=visit.caller.own_tenant, key=await visit.once())
    return visit.go(f"/ui/jobs/{id}", done="The schedule created this job.")


@pages.post("/ui/schedules/delete")
async def delete_schedule(visit: Operator) -> Response:
    name = await visit.field("name")
    await visit.services.core.schedules.delete(name, tenant=visit.caller.own_tenant)
    return visit.go("/ui/schedules", done=f"The schedule {name} was deleted. Its jobs stay.")


async def _put(visit: Visit, *, replace: bool) -> Response:
    """Like the API; problems are shown beside their fields."""
    tenant = visit.caller.own_tenant
    given = {field: await visit.field(field) for field in _FIELDS}
    try:
        plan = NamedPlan.model_validate(_body(given))
        await visit.services.core.schedules.create(
            plan.name,
            plan.cron,
            plan.job.new_job(tenant),
            timezone=plan.timezone,
            missed=plan.missed,
            tick_field=plan.tick_field,
            tenant=tenant,
            replace=replace,
        )
    except ValidationError as error:
        problem = error.errors()[0]
        problems = {str(problem["loc"][-1]): str(problem["msg"]).removeprefix("Value error, ")}
    except InvalidInput as error:
        problems = {{"operation": "job_type"}.get(error.param or "", error.param or ""): str(error)}
    except Conflict as error:
        problems = {"name": str(error)}
    else:
        return visit.go("/ui/schedules/one", done="The schedule was saved.", name=plan.name)
    return await _draw(visit, given, problems, is_new=not replace)


def _body(given: dict[str, str]) -> dict[str, Any]:
    job: dict[str, Any] = {"job_type": given["job_type"], "queue": given["queue"] or None}
    if given["payload"]:
        try:
            job["payload"] = orjson.loads(given["payload"])
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"the payload is not JSON: {error}", param="payload") from None
    if given["priority"]:
        if not given["priority"].isdecimal():
            raise InvalidInput(f"priority is {given['priority']!r}; use 0 to 9", param="priority")
        job["priority"] = int(given["priority"])
    return {
        "name": given["name"],
        "cron": given["cron"],
        "timezone": given["timezone"] or "UTC",
        "missed": given["missed"] or Missed.LATEST,
        "tick_field": given["tick_field"] or None,
        "job": job,
    }


async def _draw(visit: Visit, given: dict[str, str], problems: dict[str, str], *, is_new: bool) -> Response:
    operations = await visit.services.core.views.operations()
    return visit.draw(
        "schedule_form.html",
        status=400 if problems else 200,
        title="New schedule" if is_new else f"Schedule {given['name']}",
        given={**dict.fromkeys(_FIELDS, ""), "timezone": "UTC", "missed": "latest", **given},
        problems=problems,
        is_new=is_new,
        missed=[("latest", "run the latest one"), ("skip", "skip them"), ("all", "run each of them")],
        operations=[one.name for one in operations],
    )
