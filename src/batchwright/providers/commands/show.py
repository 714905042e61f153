"""How tasks are printed: a table of many, the details of one with its jobs at providers, and JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from batchwright.cli.exit_codes import CANCELLED, FAILED, SOME_FAILED
from batchwright.cli.show import (
    age,
    as_dict,
    compact,
    console,
    money,
    number,
    print_facts,
    print_table,
    seconds,
    time_text,
)
from batchwright.engine.jobs import DEFAULT_TENANT, JobId
from batchwright.providers.contract import Input
from batchwright.providers.jobs import RemoteJob
from batchwright.providers.part import ProvidersPart
from batchwright.providers.tasks import Target, Task
from batchwright.states import TaskStatus

COLOURS = {
    TaskStatus.PENDING: "bright_black",
    TaskStatus.IN_PROGRESS: "cyan",
    TaskStatus.COMPLETED: "green",
    TaskStatus.PARTIAL_COMPLETE: "yellow",
    TaskStatus.FAILED: "red",
    TaskStatus.CANCELLED: "yellow",
}
PHASES = {"planned": "bright_black", "staged": "bright_black", "submitting": "yellow", "submitted": "cyan"}
_NAMES_SHOWN = 5
_FAILURES_SHOWN = 20
_JOB_FIELDS = (
    "number", "provider", "model", "phase", "key", "external_id", "raw_status", "total", "succeeded", "failed",
    "failures", "call_error", "cancelled", "error", "input_tokens", "output_tokens", "audio_seconds", "cost",
    "created_at", "submitting_at", "submitted_at", "ended_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A task, its jobs at providers, and why it waits."""

    task: Task
    jobs: Sequence[RemoteJob] = ()
    waiting: Sequence[str] = ()


def exit_code(task: Task) -> int:
    match task.status:
        case TaskStatus.COMPLETED:
            return 0
        case TaskStatus.PARTIAL_COMPLETE:
            return SOME_FAILED
        case TaskStatus.CANCELLED:
            return CANCELLED
    return FAILED


async def look_at(part: ProvidersPart, task: Task) -> Seen:
    jobs = await part.jobs.of(task.id)
    if task.has_ended:
        return Seen(task=task, jobs=jobs)
    waiting = [task.waits_for] if task.waits_for is not None else []
    waiting += dict.fromkeys(f"{name_of(job)}: {job.call_error}" for job in jobs if job.call_error is not None)
    own = await part.core.queue.get(JobId(task.job_id))
    if not jobs and own.message is not None and own.message not in waiting:
        waiting.append(own.message)
    # A task that sleeps until its next poll is not stuck: each job shows when that poll is due.
    reasons = await part.core.views.waiting_on([own])
    waiting += [one.message for of_job in reasons.values() for one in of_job if one.reason != "run_after"]
    return Seen(task=task, jobs=jobs, waiting=waiting)


def as_json(seen: Seen) -> dict[str, Any]:
    fields = as_dict(seen.task)
    del fields["seconds_left"], fields["waits_for"]
    return {
        **fields,
        "targets": [target._asdict() for target in seen.task.targets],
        "inputs": [{**as_dict(input), "uri": without_signature(input)} for input in seen.task.inputs],
        "waiting_on": seen.waiting,
        "jobs": [{name: getattr(job, name) for name in _JOB_FIELDS} for job in seen.jobs],
    }


def without_signature(input: Input) -> str:
    """Where an input is, without the query of a URL, which may be a signature."""
    return input.uri.partition("?")[0]


def print_tasks(tasks: Sequence[Task]) -> None:
    now = datetime.now(UTC)
    print_table(
        {
            "id": [Text(task.id) for task in tasks],
            "status": [status_text(task) for task in tasks],
            "good": [Text(number(task.succeeded) if task.has_ended else "") for task in tasks],
            "failed": [Text(number(task.failed) if task.failed else "", "red") for task in tasks],
            "cost": [Text("" if task.cost is None else money(task.cost)) for task in tasks],
            "age": [Text(age((now - task.created_at).total_seconds())) for task in tasks],
            "tenant": [Text(task.tenant if task.tenant != DEFAULT_TENANT else "") for task in tasks],
            "for": [Text(targets_text(task.targets)) for task in tasks],
        },
        elastic=("tenant", "for"),
    )


def print_task(seen: Seen) -> None:
    print_facts([*_what(seen), *_results(seen.task), *_times(seen.task)])
    if seen.jobs:
        console().print()
        print_jobs(seen)


def print_jobs(seen: Seen) -> None:
    jobs = seen.jobs
    print_table(
        {
            "provider": [Text(job.provider) for job in jobs],
            "phase": [phase_text(job) for job in jobs],
            "done": [Text(progress(job)) for job in jobs],
            "failed": [Text(number(job.failed) if job.failed else "", "red") for job in jobs],
            "cost": [Text("" if job.cost is None else money(job.cost)) for job in jobs],
            "next poll": [Text(next_look(job, seen.task)) for job in jobs],
            "model": [Text(job.model or "") for job in jobs],
            "provider status": [Text(job.raw_status or "") for job in jobs],
            "remote id": [Text(job.external_id or "") for job in jobs],
        },
        elastic=("model", "provider status"),
    )
    failures = [f"{name_of(job)}: {error_text(job.error)}" for job in jobs if job.error is not None]
    failures += list_failures(seen.task)
    for text in failures[:_FAILURES_SHOWN]:
        console().print(Text.assemble(("✗ ", "red"), text), soft_wrap=True)
    if len(failures) > _FAILURES_SHOWN:
        console().print(f"  … and {number(len(failures) - _FAILURES_SHOWN)} more", soft_wrap=True)


def list_failures(task: Task) -> list[str]:
    """Failed inputs by name; large results are only in the result file."""
    jobs = (task.provider_state or {}).get("jobs") or []
    entries = [entry for job in jobs for entry in job.get("result") or () if isinstance(entry, Mapping)]
    return [f"{entry.get('filename')}: {error_text(entry['error'])}" for entry in entries if entry.get("error")]


def _what(seen: Seen) -> list[tuple[str, Any]]:
    task = seen.task
    return [
        ("task", task.id),
        ("status", status_text(task)),
        ("waiting on", "\n".join(seen.waiting)),
        ("cancelling", task.cancel_note),
        ("tenant", task.tenant if task.tenant != DEFAULT_TENANT else None),
        ("type", task.task_type),
        ("for", targets_text(task.targets)),
        ("inputs", inputs_text(task.inputs)),
        ("left out", "\n".join(task.invalid_urls)),
        ("options", compact(task.options) if task.options else None),
        ("metadata", ", ".join(f"{name}={value}" for name, value in (task.metadata or {}).items())),
    ]


def _results(task: Task) -> list[tuple[str, Any]]:
    return [
        ("error", Text(error_text(task.error), "red") if task.error else None),
        ("results", results_text(task) if task.has_ended else None),
        ("used", usage_text(task)),
        ("cost", cost_text(task)),
        ("result", task.result_file_id),
    ]


def _times(task: Task) -> list[tuple[str, Any]]:
    ended = task.ended_at
    took = f", took {seconds((ended - task.created_at).total_seconds())}" if ended else ""
    return [
        ("created", time_text(task.created_at)),
        ("began", time_text(task.in_progress_at)),
        ("cancelled", time_text(task.cancel_requested_at)),
        ("gives up", None if ended else time_text(task.deadline_at)),
        ("ended", f"{time_text(ended)}{took}" if ended else None),
        ("job", task.job_id),
    ]


# Words and numbers ------------------------------------------------------------------------------------------------


def status_text(task: Task) -> Text:
    is_leaving = task.cancel_requested_at is not None and not task.has_ended
    return Text(f"{task.status.value}{', cancelling' if is_leaving else ''}", COLOURS[task.status])


def phase_text(job: RemoteJob) -> Text:
    ended = "red" if job.error is not None else "green"
    return Text(job.phase, PHASES.get(job.phase, ended))


def targets_text(targets: Sequence[Target]) -> str:
    return ", ".join(f"{one.provider}/{one.model}" if one.model else one.provider for one in targets)


def name_of(job: RemoteJob) -> str:
    return f"{job.provider}/{job.model}" if job.model else job.provider


def inputs_text(inputs: Sequence[Input]) -> str:
    names = ", ".join(input.filename for input in inputs[:_NAMES_SHOWN])
    more = f" and {number(len(inputs) - _NAMES_SHOWN)} more" if len(inputs) > _NAMES_SHOWN else ""
    return f"{number(len(inputs))}: {names}{more}"


def results_text(task: Task) -> str:
    return f"{number(task.succeeded)} good, {number(task.failed)} failed"


def progress(job: RemoteJob) -> str:
    """Number of results so far and in total; empty if the provider does not report it."""
    if job.succeeded is None and job.failed is None:
        return "" if job.total is None else f"0/{number(job.total)}"
    done = (job.succeeded or 0) + (job.failed or 0)
    return number(done) if job.total is None else f"{number(done)}/{number(job.total)}"


def next_look(job: RemoteJob, task: Task) -> str:
    if job.has_ended or task.has_ended:
        return ""
    return f"in {age(job.due_seconds)}" if job.due_seconds > 0 else "now"


def usage_text(task: Task) -> str:
    parts = []
    if task.input_tokens is not None or task.output_tokens is not None:
        parts.append(f"{number(task.input_tokens or 0)} tokens in · {number(task.output_tokens or 0)} out")
    if task.audio_seconds is not None:
        parts.append(f"{seconds(task.audio_seconds)} of audio")
    return ", ".join(parts)


def cost_text(task: Task) -> str | None:
    if task.cost is not None:
        return money(task.cost)
    return "unknown: a price or an amount is missing" if task.has_ended and task.succeeded else None


def error_text(error: Mapping[str, Any]) -> str:
    code, message = error.get("code"), error.get("message")
    return f"{code}: {message}" if code and message else str(message or code or compact(dict(error)))
