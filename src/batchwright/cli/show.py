"""How jobs and events look on paper: tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchwright.engine.jobs import DEFAULT_QUEUE, DEFAULT_TENANT, Job, JobEvent
from batchwright.engine.views import Reason, WaitingOn
from batchwright.jsonl import one_line
from batchwright.states import JobStatus

COLOURS = {
    JobStatus.QUEUED: "bright_black",
    JobStatus.RUNNING: "cyan",
    JobStatus.SUCCEEDED: "green",
    JobStatus.FAILED: "red",
    JobStatus.CANCELLED: "yellow",
}
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
_UNFOLDED = 1000


def console() -> Console:
    """Standard output; into a pipe nothing is cut to the width of a terminal that is not there."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNFOLDED)


def print_json(value: Any, *, indent: bool = True) -> None:
    """Statuses may be keys: they are text, which the encoder takes for something else."""
    shape = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    document = orjson.dumps(value, option=shape, default=str)
    sys.stdout.write(one_line(document).decode() + "\n")
    sys.stdout.flush()


def print_jobs(jobs: Sequence[Job], reasons: Mapping[UUID, Sequence[WaitingOn]]) -> None:
    now = datetime.now(UTC)
    print_table(
        {
            "id": [Text(str(job.id)) for job in jobs],
            "status": [Text(job.status, COLOURS[job.status]) for job in jobs],
            "type": [Text(job.job_type) for job in jobs],
            "tenant": [Text(job.tenant if job.tenant != DEFAULT_TENANT else "") for job in jobs],
            "queue": [Text(job.queue if job.queue != DEFAULT_QUEUE else "") for job in jobs],
            "progress": [Text(progress(job)) for job in jobs],
            "tries": [Text(f"{job.attempts}/{job.max_attempts}") for job in jobs],
            "age": [Text(seconds((now - job.created_at).total_seconds())) for job in jobs],
            "waiting on": [Text(", ".join(SHORT[one.reason] for one in reasons[job.id])) for job in jobs],
            "message": [Text(last_words(job)) for job in jobs],
        },
        elastic=("waiting on", "message"),
    )


def print_table(columns: Mapping[str, Sequence[Text]], *, elastic: Sequence[str] = ("message",)) -> None:
    """Only elastic columns may be cut; those in which nothing stands are left out, numbers stand on the right."""
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, cells in shown.items():
        least = None if name in elastic else max(len(name), *map(len, cells))
        is_number = all(cell.plain.isdecimal() for cell in cells)
        side: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(name, min_width=least, no_wrap=True, overflow="ellipsis", justify=side)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console().print(table)


def print_facts(facts: Sequence[tuple[str, Any]]) -> None:
    """Names and values, without those that are not there; an id that is cut would be of no use."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts:
        if value not in (None, ""):
            table.add_row(Text(name, "bold"), value if isinstance(value, Text) else Text(str(value)))
    console().print(table)


def print_job(
    job: Job, children: Mapping[JobStatus, int], events: Sequence[JobEvent], reasons: Sequence[WaitingOn]
) -> None:
    print_facts(_facts(job, children, reasons))
    if events:
        out = console()
        out.print()
        out.print(event_table(events))


def with_reasons(job: Job, reasons: Sequence[WaitingOn]) -> dict[str, Any]:
    """The fields of a job and why it waits, as JSON has them."""
    return {**plain(job), "waiting_on": reasons}


def plain(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass, one level deep."""
    return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}


def event_table(events: Sequence[JobEvent]) -> Table:
    table = Table.grid(padding=(0, 2))
    for event in events:
        style = LEVELS[event.level]
        table.add_row(
            Text(f"{event.ts.astimezone(UTC):%H:%M:%S}", "bright_black"),
            Text(event.event, style),
            Text(detail(event), style),
        )
    return table


def event_line(event: JobEvent) -> str:
    return f"{event.ts.astimezone(UTC):%H:%M:%S} {event.level:7} {event.event:18} {detail(event)}".rstrip()


def detail(event: JobEvent) -> str:
    """What an event says: its message, its fields, else the worker that it happened on."""
    fields = " ".join(f"{name}={value}" for name, value in (event.fields or {}).items())
    return " ".join(filter(None, [event.message, fields])) or event.worker or ""


def progress(job: Job) -> str:
    if job.progress_current is None and job.progress_total is None:
        return ""
    total = "?" if job.progress_total is None else job.progress_total
    return f"{job.progress_current or 0}/{total}"


def last_words(job: Job) -> str:
    if job.error is not None:
        return f"{job.error.get('code')}: {job.error.get('message')}"
    return job.message or ""


def seconds(n: float) -> str:
    if n < 60:
        return f"{max(0.0, n):.1f} s"
    minutes, rest = divmod(int(n), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def jobs_text(n: int) -> str:
    return f"{n} job{'' if n == 1 else 's'}"


def counted(counts: Mapping[JobStatus, int]) -> Text:
    """`12 queued · 3 running`, without what is not there."""
    parts = [(f"{counts[status]} {status.lower()}", COLOURS[status]) for status in JobStatus if counts.get(status)]
    return Text(" · ").join(Text(*part) for part in parts)


def stand(job: Job) -> str:
    """The status, and in words what RUNNING or QUEUED means just now."""
    if job.is_waiting:
        return f"waits for {job.children_open} children"
    if job.status is JobStatus.QUEUED and job.run_after > datetime.now(UTC):
        return f"not before {time_text(job.run_after)}"
    if job.locked_by is not None and job.status is JobStatus.RUNNING:
        return f"on {job.locked_by}"
    return ""


def _facts(job: Job, children: Mapping[JobStatus, int], reasons: Sequence[WaitingOn]) -> list[tuple[str, Any]]:
    began, ended = job.started_at, job.finished_at
    took = seconds((ended - began).total_seconds()) if began and ended else None
    return [
        ("job", job.id),
        ("type", job.job_type),
        ("status", Text(job.status, COLOURS[job.status]).append("" if reasons else f"  {stand(job)}", "default")),
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
        ("children", counted(children) if children else None),
        ("message", job.message),
        ("payload", compact(job.payload)),
        ("result", compact(job.result) if job.status is JobStatus.SUCCEEDED else None),
        ("error", last_words(job) if job.error else None),
        ("dismissed", time_text(job.dismissed_at)),
    ]


def compact(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def time_text(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
