"""How jobs and events look on paper: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.engine.jobs import DEFAULT_QUEUE, Job, JobEvent
from windlass.states import JobStatus

COLOURS = {
    JobStatus.QUEUED: "bright_black",
    JobStatus.RUNNING: "cyan",
    JobStatus.SUCCEEDED: "green",
    JobStatus.FAILED: "red",
    JobStatus.CANCELLED: "yellow",
}
LEVELS = {"info": "", "warning": "yellow", "error": "red"}
_UNFOLDED = 1000


def console() -> Console:
    """Standard output; into a pipe nothing is cut to the width of a terminal that is not there."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNFOLDED)


def print_json(value: Any, *, indent: bool = True) -> None:
    document = orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None, default=str)
    sys.stdout.write(document.decode() + "\n")
    sys.stdout.flush()


def print_jobs(jobs: Sequence[Job]) -> None:
    """Only the message may be cut; columns in which nothing stands are left out."""
    now = datetime.now(UTC)
    columns = {
        "id": [Text(str(job.id)) for job in jobs],
        "status": [Text(job.status, COLOURS[job.status]) for job in jobs],
        "type": [Text(job.job_type) for job in jobs],
        "queue": [Text(job.queue if job.queue != DEFAULT_QUEUE else "") for job in jobs],
        "progress": [Text(progress(job)) for job in jobs],
        "tries": [Text(f"{job.attempts}/{job.max_attempts}") for job in jobs],
        "age": [Text(seconds((now - job.created_at).total_seconds())) for job in jobs],
        "message": [Text(last_words(job)) for job in jobs],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, cells in shown.items():
        least = None if name == "message" else max(len(name), *map(len, cells))
        table.add_column(name, min_width=least, no_wrap=True, overflow="ellipsis")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console().print(table)


def print_job(job: Job, children: Mapping[JobStatus, int], events: Sequence[JobEvent]) -> None:
    out = console()
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(job, children):
        facts.add_row(Text(name, "bold"), value if isinstance(value, Text) else Text(str(value)))
    out.print(facts)
    if events:
        out.print()
        out.print(event_table(events))


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


def counted(counts: Mapping[JobStatus, int]) -> Text:
    """`12 queued · 3 running`, without what is not there."""
    parts = [(f"{counts[status]} {status.lower()}", COLOURS[status]) for status in JobStatus if counts.get(status)]
    return Text(" · ").join(Text(*part) for part in parts)


def stand(job: Job) -> str:
    """The status, and in words what RUNNING or QUEUED means just now."""
    if job.is_waiting:
        return f"waits for {job.children_open} children"
    if job.status is JobStatus.QUEUED and job.run_after > datetime.now(UTC):
        return f"not before {_time(job.run_after)}"
    if job.locked_by is not None and job.status is JobStatus.RUNNING:
        return f"on {job.locked_by}"
    return ""


def _facts(job: Job, children: Mapping[JobStatus, int]) -> list[tuple[str, Any]]:
    began, ended = job.started_at, job.finished_at
    took = seconds((ended - began).total_seconds()) if began and ended else None
    facts: list[tuple[str, Any]] = [
        ("job", job.id),
        ("type", job.job_type),
        ("status", Text(job.status, COLOURS[job.status]).append(f"  {stand(job)}", "default")),
        ("queue", f"{job.queue}, priority {job.priority}"),
        ("tries", f"{job.attempts} of {job.max_attempts}" + (f", {job.rescues} rescues" if job.rescues else "")),
        ("created", _time(job.created_at)),
        ("run after", _time(job.run_after) if job.status is JobStatus.QUEUED else None),
        ("started", _time(began)),
        ("finished", f"{_time(ended)}, took {took}" if took else _time(ended)),
        ("deadline", _time(job.deadline)),
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
    ]
    return [(name, value) for name, value in facts if value not in (None, "")]


def compact(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
