"""How jobs and events are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from rich.table import Table
from rich.text import Text

from batchwright.cli.show import (
    COLOURS,
    age,
    as_dict,
    compact,
    console,
    counts_text,
    print_facts,
    print_table,
    seconds,
    time_text,
)
from batchwright.cli.tables import table_lines
from batchwright.engine.jobs import DEFAULT_QUEUE, DEFAULT_TENANT, Job, JobEvent
from batchwright.engine.queue import CHILDREN_COUNTED_MAX
from batchwright.engine.views import Reason, WaitingOn
from batchwright.states import JobStatus

SHORT: dict[Reason, str] = {
    "run_after": "time",
    "exclusive_key": "key",
    "paused_queue": "pause",
    "no_worker": "worker",
    "isolation": "isolation",
    "children": "children",
    "no_free_slot": "slot",
}
LEVELS = {"info": "", "warning": "yellow", "error": "red"}


def print_jobs(jobs: Sequence[Job], reasons: Mapping[UUID, Sequence[WaitingOn]]) -> None:
    now = datetime.now(UTC)
    print_table(
        {
            "id": [Text(str(job.id)) for job in jobs],
            "status": [Text(job.status, COLOURS[job.status]) for job in jobs],
            "tries": [Text(f"{job.attempts}/{job.max_attempts}") for job in jobs],
            "age": [Text(age((now - job.created_at).total_seconds())) for job in jobs],
            "progress": [Text(progress(job)) for job in jobs],
            "type": [Text(job.job_type) for job in jobs],
            "waiting on": [Text(", ".join(SHORT[one.reason] for one in reasons[job.id])) for job in jobs],
            "tenant": [Text(job.tenant if job.tenant != DEFAULT_TENANT else "") for job in jobs],
            "queue": [Text(job.queue if job.queue != DEFAULT_QUEUE else "") for job in jobs],
            "message": [Text(last_message(job)) for job in jobs],
        },
        elastic=("type", "waiting on", "tenant", "queue", "message"),
    )


def print_job(
    job: Job, children: Mapping[JobStatus, int], events: Sequence[JobEvent], reasons: Sequence[WaitingOn]
) -> None:
    print_facts(_facts(job, children, reasons))
    if events:
        out = console()
        out.print()
        out.print(event_table(events))


def _facts(job: Job, children: Mapping[JobStatus, int], reasons: Sequence[WaitingOn]) -> list[tuple[str, Any]]:
    began, ended = job.started_at, job.finished_at
    took = seconds((ended - began).total_seconds()) if began and ended else None
    return [
        ("job", job.id),
        ("type", job.job_type),
        ("status", Text(job.status, COLOURS[job.status]).append("" if reasons else f"  {state_text(job)}", "default")),
        ("waiting on", "\n".join(one.message for one in reasons)),
        ("tenant", job.tenant if job.tenant != DEFAULT_TENANT else None),
        ("queue", f"{job.queue}, priority {job.priority}"),
        ("tries", f"{job.attempts} of {job.max_attempts}" + (f", {job.rescues} rescues" if job.rescues else "")),
        ("created", time_text(job.created_at)),
        ("run after", time_text(job.run_after) if job.status is JobStatus.QUEUED else None),
        ("started", time_text(began)),
        ("finished", f"{time_text(ended)}, took {took}" if took else time_text(ended)),
        ("deadline", time_text(job.deadline)),
        ("key", job.exclusive_key),
        ("idempotency", job.idempotency_key),
        ("pipeline", job.pipeline_id if job.pipeline_id != job.id else None),
        ("parent", job.parent_job_id),
        ("progress", progress(job)),
        ("children", _children_text(children) if children else None),
        ("message", job.message),
        ("payload", compact(job.payload)),
        ("result", compact(job.result) if job.status is JobStatus.SUCCEEDED else None),
        ("error", last_message(job) if job.error else None),
        ("dismissed", time_text(job.dismissed_at)),
    ]


def job_as_json(job: Job, reasons: Sequence[WaitingOn]) -> dict[str, Any]:
    """The fields of a job and the reasons why it waits, for JSON."""
    return {**as_dict(job), "waiting_on": reasons}


def event_lines(events: Sequence[JobEvent], width: int) -> list[Text]:
    """One line for each event, for live views; long messages are cut."""
    columns = {
        "time": [Text(f"{event.ts.astimezone(UTC):%H:%M:%S}", "bright_black") for event in events],
        "event": [Text(event.event, LEVELS[event.level]) for event in events],
        "message": [Text(describe_event(event), LEVELS[event.level]) for event in events],
    }
    return table_lines(columns, width, has_header=False, indent=2)


def event_table(events: Sequence[JobEvent]) -> Table:
    """A table of events; times and names stay whole, and messages are wrapped."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event in events:
        style = LEVELS[event.level]
        table.add_row(
            Text(f"{event.ts.astimezone(UTC):%H:%M:%S}", "bright_black"),
            Text(event.event, style),
            Text(describe_event(event), style),
        )
    return table


def event_line(event: JobEvent) -> str:
    return f"{event.ts.astimezone(UTC):%H:%M:%S} {event.level:7} {event.event:18} {describe_event(event)}".rstrip()


def describe_event(event: JobEvent) -> str:
    """An event's message and fields; without both, its worker."""
    fields = " ".join(f"{name}={value}" for name, value in (event.fields or {}).items())
    return " ".join(filter(None, [event.message, fields])) or event.worker or ""


def progress(job: Job) -> str:
    if job.progress_current is None and job.progress_total is None:
        return ""
    total = "?" if job.progress_total is None else job.progress_total
    return f"{job.progress_current or 0}/{total}"


def last_message(job: Job) -> str:
    if job.error is not None:
        return f"{job.error.get('code')}: {job.error.get('message')}"
    return job.message or ""


def state_text(job: Job) -> str:
    """Details about the status of a QUEUED or RUNNING job."""
    if job.is_waiting:
        return f"waits for {job.children_open} children"
    if job.status is JobStatus.QUEUED and job.run_after > datetime.now(UTC):
        return f"not before {time_text(job.run_after)}"
    if job.locked_by is not None and job.status is JobStatus.RUNNING:
        return f"on {job.locked_by}"
    return ""


def _children_text(children: Mapping[JobStatus, int]) -> Text:
    text = counts_text(children)
    if sum(children.values()) >= CHILDREN_COUNTED_MAX:
        text.append(f" (only {CHILDREN_COUNTED_MAX:,} are counted)")
    return text
