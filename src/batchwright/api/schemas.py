"""Request and response bodies, as the OpenAPI document shows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import reduce
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import orjson
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from batchwright.engine.jobs import Job, NewJob, OnHeld
from batchwright.engine.views import InboxGroup, Pipeline, QueueView, Reason, WaitingOn
from batchwright.states import JobStatus

T = TypeVar("T")
JOBS_PER_REQUEST_MAX = 1_000
LIMIT_MAX = 1_000
PAYLOAD_DEPTH_MAX = 200
NO_NUL = r"^[^\x00]*$"
_SECONDS_MAX = 366 * 86_400.0
_INTEGER_MAX = 2**53 - 1
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d")
_WRITTEN_DEPTH_MAX = 254


def _require_written_time(value: Any) -> Any:
    if not isinstance(value, str) or not _MOMENT.match(value):
        raise ValueError("write a time with its time zone, like 2026-12-24T18:00:00Z")
    return value


def _storable_moment(moment: datetime) -> datetime:
    """PostgreSQL stores years that Python cannot read back, and a time zone conversion can produce one."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("the year must be from 1 to 9999, in UTC as well") from None


def _shallow(payload: Any) -> Any:
    """orjson has a maximum depth. The limit leaves room for the objects that we wrap around a payload."""
    try:
        orjson.dumps(reduce(lambda inner, _: [inner], range(_WRITTEN_DEPTH_MAX - PAYLOAD_DEPTH_MAX), payload))
    except TypeError:
        raise ValueError(f"it is nested deeper than {PAYLOAD_DEPTH_MAX} levels") from None
    return payload


def _refuse_internal(job_type: str) -> str:
    """Refuse the operations of batches, runs and tasks: enqueued by hand, such a job would belong to none of them."""
    if job_type.startswith("batch."):
        raise ValueError(f"{job_type!r} belongs to batches; create a batch with POST /v1/batches")
    if job_type in ("ingest.run", "ingest.item", "ingest.gather"):
        raise ValueError(f"{job_type!r} belongs to runs over documents; create a run with POST /v1/ingest/runs")
    if job_type == "provider.task":
        raise ValueError(f"{job_type!r} belongs to tasks; create a task with POST /v1/tasks")
    return job_type


Payload = Annotated[Any, AfterValidator(_shallow)]
Moment = Annotated[AwareDatetime, BeforeValidator(_require_written_time), AfterValidator(_storable_moment)]
Text = Annotated[str, Field(pattern=NO_NUL)]
Name = Annotated[Text, Field(min_length=1, max_length=100)]
JobType = Annotated[Name, AfterValidator(_refuse_internal)]
QueueName = Annotated[Text, Field(min_length=1, max_length=200)]
Cursor = Annotated[Text, Field(max_length=200)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=_SECONDS_MAX, allow_inf_nan=False)]
Priority = Annotated[int, Field(strict=True, ge=0, le=9)]
Attempts = Annotated[int, Field(strict=True, ge=1, le=1_000)]
Flag = Annotated[bool, Field(strict=True)]
EventId = Annotated[int, Field(ge=0, le=_INTEGER_MAX)]
KeyPart = (
    Annotated[Text, Field(max_length=500)]
    | Annotated[int, Field(strict=True, ge=-_INTEGER_MAX, le=_INTEGER_MAX)]
    | Flag
    | None
)


class Body(BaseModel):
    """A request body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """A response, read from our own objects."""

    model_config = ConfigDict(from_attributes=True)


class Page(Answer, Generic[T]):
    """One page of a list. `next_cursor` leads to the next page, which may exist even if this one is short."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    next_cursor: str | None


class All(Answer, Generic[T]):
    """A list without pages, up to its limit."""

    object: Literal["list"] = "list"
    data: list[T]


# Jobs -------------------------------------------------------------------------------------------------------------


class JobToBe(Body):
    """A job to run."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"job_type": "greet", "payload": {"name": "Ada"}, "priority": 2, "idempotency_key": "hello-1"}]
        }
    )

    job_type: JobType = Field(description="The operation's name; `GET /v1/operations` lists them.")
    payload: Payload = Field(None, description="The operation's arguments; checked against its schema.")
    queue: QueueName | None = Field(None, description="Overrides the operation's own queue.")
    priority: Priority | None = Field(None, description="From 0 (first) to 9 (last).")
    delay_seconds: Seconds = Field(0.0, description="Delay before the job may run.")
    run_after: Moment | None = Field(None, description="Do not run before this time.")
    deadline: Moment | None = Field(None, description="Fail the job if it has not ended by then.")
    max_attempts: Attempts | None = Field(None, description="Maximum number of attempts.")
    exclusive_key: list[KeyPart] | None = Field(
        None, min_length=1, max_length=20, description="At most one job with this key runs at a time."
    )
    on_held: OnHeld | None = Field(None, description="What to do when the key has open jobs.")
    idempotency_key: Annotated[Text, Field(min_length=1, max_length=255)] | None = Field(
        None, description="The same key returns the same job; with another body it is refused (409)."
    )
    pipeline_id: UUID | None = Field(None, description="Id of the pipeline to add the job to; by default its own id.")
    traceparent: Annotated[Text, Field(max_length=200)] | None = Field(None, description="W3C trace context.")

    def new_job(self, tenant: str, traceparent: str | None) -> NewJob:
        given = self.model_dump(exclude={"job_type", "payload", "traceparent"})
        return NewJob(self.job_type, self.payload, tenant=tenant, traceparent=self.traceparent or traceparent, **given)


class JobsToBe(Body):
    """Many jobs, all of them or none."""

    jobs: list[JobToBe] = Field(min_length=1, max_length=JOBS_PER_REQUEST_MAX)


def _one_or_many(value: Any) -> str:
    return "many" if (isinstance(value, dict) and "jobs" in value) or isinstance(value, JobsToBe) else "one"


OneOrMany = Annotated[
    Annotated[JobToBe, Tag("one")] | Annotated[JobsToBe, Tag("many")],
    Discriminator(_one_or_many),
]


class WaitingOnView(Answer):
    """One reason why a job does not run."""

    reason: Reason
    message: str
    until: datetime | None
    job_id: UUID | None


def _as_text(code: Any) -> Any:
    """An operation may have used a number as its code; one job that cannot be shown would break every list."""
    return code if code is None else str(code)


class JobError(Answer):
    """Why a job failed, or why it is retried."""

    model_config = ConfigDict(extra="allow")

    kind: str | None = None
    code: Annotated[str | None, BeforeValidator(_as_text)] = None
    type: str | None = None
    message: str | None = None


class JobView(Answer):
    """The current state of a job."""

    object: Literal["job"] = "job"
    id: UUID
    job_type: str
    status: JobStatus
    tenant: str
    queue: str
    priority: int
    payload: Any
    result: Any
    error: JobError | None
    waiting_on: list[WaitingOnView] = Field(description="Why it does not run; empty if it runs or has ended.")
    attempts: int
    max_attempts: int
    rescues: int = Field(description="How many times in a row its worker died while running it.")
    run_after: datetime
    deadline: datetime | None
    exclusive_key: list[Any] | None
    is_current: bool = Field(description="Whether it holds its exclusive key.")
    locked_by: str | None = Field(description="The worker that holds it.")
    locked_at: datetime | None
    lease_until: datetime | None
    pipeline_id: UUID
    parent_job_id: UUID | None
    children_open: int
    children_failed: int
    progress_current: int | None
    progress_total: int | None
    message: str | None
    idempotency_key: str | None
    traceparent: str | None
    owner: str | None = Field(description="The object that owns the job, such as a batch; use that object's verbs.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    dismissed_at: datetime | None

    @classmethod
    def of(cls, job: Job, waiting_on: Sequence[WaitingOn]) -> JobView:
        known = {name: getattr(job, name, None) for name in cls.model_fields if name != "object"}
        key = None if job.exclusive_key is None else orjson.loads(job.exclusive_key)
        reasons = [WaitingOnView.model_validate(reason) for reason in waiting_on]
        return cls.model_validate({**known, "exclusive_key": key, "waiting_on": reasons})


class EventView(Answer):
    """One entry in a job's history."""

    id: int
    job_id: UUID
    ts: datetime
    event: str
    level: Literal["info", "warning", "error"]
    status: JobStatus | None
    claim: int | None
    attempt: int | None
    worker: str | None
    message: str | None
    fields: dict[str, Any] | None
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cost: Annotated[Decimal, Field(allow_inf_nan=True)] | None
    error_kind: str | None


class Why(Body):
    """A reason, recorded in the job's history."""

    reason: Annotated[Text, Field(min_length=1, max_length=500)] = "cancelled by request"


# Many jobs at once ------------------------------------------------------------------------------------------------


class Which(Body):
    """Selects jobs; at least one field besides `dry_run` and `cursor` is required."""

    status: list[JobStatus] = Field(default_factory=list, max_length=5)
    job_type: Name | None = None
    queue: QueueName | None = None
    pipeline_id: UUID | None = None
    parent_job_id: UUID | None = None
    error_code: Name | None = None
    created_from: Moment | None = None
    created_to: Moment | None = None
    dry_run: Flag = Field(False, description="Only count them.")
    cursor: Cursor | None = Field(None, description="The `next_cursor` of an earlier call.")


class WhichToCancel(Which):
    """Selects open jobs to cancel."""

    reason: Annotated[Text, Field(min_length=1, max_length=500)] = "cancelled by request"


class Group(Body):
    """A group of failed jobs."""

    job_type: Name
    code: Name | None = Field(None, description="Only failures with this code; without it all of the type.")
    dry_run: Flag = Field(False, description="Only count them.")
    cursor: Cursor | None = Field(None, description="The `next_cursor` of an earlier call.")


class ChangedView(Answer):
    """What was changed, or with `dry_run` what would change. Call again with `next_cursor` while there is more."""

    object: Literal["changed"] = "changed"
    dry_run: bool
    matched: int = Field(description="Jobs that match the filter and allow the verb; a dry run counts at most 100,000.")
    changed: int = Field(description="Jobs that were changed; the others could not be changed, or had already ended.")
    has_more: bool
    next_cursor: str | None


class InboxView(Answer):
    """Failed jobs of one type with one cause."""

    job_type: str
    code: str | None
    kind: str | None
    count: int = Field(description="Number of jobs; counting stops at about 20,000 over all groups.")
    has_more: bool = Field(description="Whether there are more jobs than were counted.")
    first_at: datetime
    last_at: datetime
    samples: list[UUID] = Field(description="The ids of the latest jobs.")
    message: str | None = Field(description="The latest job's error message.")
    retryable: bool = Field(description="Whether a rerun of the same job is likely to succeed.")

    @classmethod
    def of(cls, group: InboxGroup) -> InboxView:
        values = {name: getattr(group, name, None) for name in cls.model_fields}
        return cls.model_validate({**values, "retryable": group.is_retryable})


# Queues, pipelines and health -------------------------------------------------------------------------------------


class StepView(Answer):
    """The jobs of one type in a pipeline."""

    job_type: str
    counts: dict[JobStatus, int]


class QueueList(All[QueueView]):
    """Queues, and the numbers of their jobs."""

    is_complete: bool = Field(
        description="False if the tenant may have jobs that were not counted, even in queues that are not shown."
    )


class PipelineView(Answer):
    """A root job with all its descendants."""

    object: Literal["pipeline"] = "pipeline"
    id: UUID
    status: JobStatus = Field(description="RUNNING while any job is open, then the worst status of its jobs.")
    counts: dict[JobStatus, int]
    steps: list[StepView]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    has_more: bool = Field(description="Whether it has more than 10,000 jobs; the others are not counted.")

    @classmethod
    def of(cls, pipeline: Pipeline) -> PipelineView:
        return cls.model_validate(pipeline)


class Health(Answer):
    """Whether the server is healthy."""

    status: Literal["ok", "unavailable"]
    version: str
    detail: str | None = None
