"""Schedules over HTTP."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from batchwright.api.access import Operator, Reader
from batchwright.api.errors import documented
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import (
    LIMIT_MAX,
    Answer,
    Attempts,
    Body,
    JobType,
    KeyPart,
    Name,
    Page,
    Payload,
    Priority,
    QueueName,
    Seconds,
    Text,
)
from batchwright.api.services import services
from batchwright.api.submit import once
from batchwright.core import Core
from batchwright.db.database import Session
from batchwright.engine.jobs import JobId, NewJob, OnHeld
from batchwright.engine.schedules import Missed, Schedule
from batchwright.errors import InvalidInput

router = APIRouter(prefix="/v1/schedules", route_class=OrjsonRoute, tags=["schedules"])

_FOUND = documented(404)
_MOVED = documented(404, 409)

ScheduleName = Annotated[Text, Field(min_length=1, max_length=200)]
Which = Annotated[ScheduleName, Path(description="The schedule's name or id.")]


class ScheduledJob(Body):
    """The template for each tick's job."""

    job_type: JobType
    payload: Payload = None
    queue: QueueName | None = None
    priority: Priority | None = None
    max_attempts: Attempts | None = None
    exclusive_key: list[KeyPart] | None = Field(None, min_length=1, max_length=20)
    on_held: OnHeld | None = None
    deadline_seconds: Seconds | None = Field(None, description="Counted from the creation of each job.")

    def new_job(self, tenant: str) -> NewJob:
        return NewJob(
            self.job_type,
            self.payload,
            tenant=tenant,
            queue=self.queue,
            priority=self.priority,
            max_attempts=self.max_attempts,
            exclusive_key=self.exclusive_key,
            on_held=self.on_held,
            deadline=None if self.deadline_seconds is None else timedelta(seconds=self.deadline_seconds),
        )


class Plan(Body):
    """The times and the job of a schedule."""

    cron: Annotated[Text, Field(min_length=1, max_length=200)] = Field(
        description="Five fields: minute, hour, day, month, weekday.", examples=["0 6 * * MON-FRI"]
    )
    timezone: Annotated[Text, Field(min_length=1, max_length=100)] = Field("UTC", examples=["Europe/Berlin"])
    missed: Missed = Field(Missed.LATEST, description="What to do with ticks that passed while no worker was running.")
    tick_field: Name | None = Field(None, description="The field of the payload that receives the tick.")
    job: ScheduledJob


class NamedPlan(Plan):
    """A new schedule."""

    name: ScheduleName


class ScheduleView(Answer):
    """The current state of a schedule."""

    object: Literal["schedule"] = "schedule"
    id: UUID
    name: str
    tenant: str
    cron: str
    timezone: str
    missed: Missed
    tick_field: str | None
    job: dict[str, Any]
    next_at: datetime | None
    upcoming: list[datetime] = Field(description="The next five ticks.")
    last_tick_at: datetime | None
    last_job_id: UUID | None
    last_error: str | None
    fires: int
    paused_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleView:
        values = {name: getattr(schedule, name, None) for name in cls.model_fields if name != "object"}
        return cls.model_validate({**values, "upcoming": schedule.upcoming()})


class Fired(Answer):
    """The job that a manual run created."""

    object: Literal["fired"] = "fired"
    job_id: UUID


@router.post("", status_code=201, responses=documented(409), summary="Create a schedule")
async def create_schedule(request: Request, caller: Operator, plan: NamedPlan) -> ScheduleView:
    return await _put(request, caller.own_tenant, plan.name, plan, replace=False)


@router.put("/{name}", responses=_FOUND, summary="Create a schedule, or replace the one of that name")
async def put_schedule(request: Request, caller: Operator, name: Which, plan: Plan) -> ScheduleView:
    return await _put(request, caller.own_tenant, name, plan, replace=True)


@router.get("", responses=documented(), summary="List schedules by name")
async def list_schedules(
    request: Request,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = 100,
    cursor: Annotated[ScheduleName | None, Query(description="The `next_cursor` of the previous page.")] = None,
) -> Page[ScheduleView]:
    schedules, tenant = services(request).core.schedules, caller.own_tenant
    try:
        found = await schedules.list(tenant=tenant, limit=min(limit + 1, LIMIT_MAX), after=cursor)
    except InvalidInput as error:
        error.param = "cursor"
        raise
    shown = [ScheduleView.of(schedule) for schedule in found[:limit]]
    has_more = len(found) > limit or len(found) == LIMIT_MAX
    return Page(data=shown, has_more=has_more, next_cursor=shown[-1].name if has_more else None)


@router.get("/{name}", responses=_FOUND, summary="Show a schedule")
async def get_schedule(request: Request, caller: Reader, name: Which) -> ScheduleView:
    return ScheduleView.of(await services(request).core.schedules.get(name, tenant=caller.own_tenant))


@router.delete("/{name}", status_code=204, responses=_FOUND, summary="Delete a schedule; its jobs stay")
async def delete_schedule(request: Request, caller: Operator, name: Which) -> Response:
    await services(request).core.schedules.delete(name, tenant=caller.own_tenant)
    return Response(status_code=204)


@router.post("/{name}/pause", responses=_FOUND, summary="Pause a schedule: it fires no tick until it is resumed")
async def pause_schedule(request: Request, caller: Operator, name: Which) -> ScheduleView:
    return ScheduleView.of(await services(request).core.schedules.pause(name, tenant=caller.own_tenant))


@router.post("/{name}/resume", responses=_FOUND, summary="Resume a schedule with its next tick")
async def resume_schedule(request: Request, caller: Operator, name: Which) -> ScheduleView:
    return ScheduleView.of(await services(request).core.schedules.resume(name, tenant=caller.own_tenant))


@router.post("/{name}/run", status_code=201, responses=_MOVED, summary="Run a schedule now: create one job")
async def run_schedule(request: Request, caller: Operator, name: Which) -> Fired:
    job_id: JobId = await services(request).core.schedules.fire_now(name, tenant=caller.own_tenant)
    return Fired(job_id=job_id)


async def run_once(core: Core, name: str, *, tenant: str, key: str | None) -> JobId:
    """Run the schedule now; if it was run with this key before, the answer is the job of that run."""

    async def fire(session: Session) -> list[JobId]:
        return [await core.schedules.fire_now(name, tenant=tenant, session=session)]

    (id,) = await once(core, fire, tenant=tenant, key=key)
    return id


async def _put(request: Request, tenant: str, name: str, plan: Plan, *, replace: bool) -> ScheduleView:
    try:
        schedule = await services(request).core.schedules.create(
            name,
            plan.cron,
            plan.job.new_job(tenant),
            timezone=plan.timezone,
            missed=plan.missed,
            tick_field=plan.tick_field,
            tenant=tenant,
            replace=replace,
        )
    except InvalidInput as error:
        field = "job_type" if error.param == "operation" else error.param
        error.param = f"job.{field}" if field in ScheduledJob.model_fields else field
        raise
    return ScheduleView.of(schedule)
