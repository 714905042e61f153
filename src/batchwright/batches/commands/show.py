"""How batches look on paper: a table of many, the facts of one, and JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from batchwright.batches.part import BatchesPart
from batchwright.batches.progress import DeadlineRisk, forecast
from batchwright.batches.store import Batch, Pace
from batchwright.cli.exit_codes import CANCELLED, FAILED, SOME_FAILED
from batchwright.cli.show import (
    as_dict,
    console,
    counts_text,
    money,
    number,
    print_facts,
    print_table,
    seconds,
    time_text,
)
from batchwright.core import Core
from batchwright.engine.jobs import DEFAULT_TENANT, JobId
from batchwright.engine.views import JobFilter
from batchwright.inference.prices import Price, cost
from batchwright.states import BatchStatus, JobStatus

COLOURS = {
    BatchStatus.VALIDATING: "bright_black",
    BatchStatus.IN_PROGRESS: "cyan",
    BatchStatus.FINALIZING: "cyan",
    BatchStatus.COMPLETED: "green",
    BatchStatus.FAILED: "red",
    BatchStatus.EXPIRED: "yellow",
    BatchStatus.CANCELLING: "yellow",
    BatchStatus.CANCELLED: "yellow",
}
_RISKS = {DeadlineRisk.NONE: "", DeadlineRisk.LOW: ", shortly before its window ends", DeadlineRisk.HIGH: ""}
_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A batch, and what is known of it besides its row."""

    batch: Batch
    pace: Pace | None = None
    shards: Mapping[JobStatus, int] | None = None
    waiting: Sequence[str] = ()


def exit_code(batch: Batch) -> int:
    match batch.status:
        case BatchStatus.COMPLETED if batch.done == batch.completed:
            return 0
        case BatchStatus.COMPLETED | BatchStatus.EXPIRED:
            return SOME_FAILED
        case BatchStatus.CANCELLED:
            return CANCELLED
    return FAILED


async def look_at(part: BatchesPart, batch: Batch) -> Seen:
    """With its pace, its shards, and what it waits for if nobody is at it."""
    if batch.has_ended:
        return Seen(batch=batch)
    paces = await part.batches.paces([batch.id])
    shards = await part.core.queue.count_children(JobId(batch.job_id))
    waiting = [] if shards.get(JobStatus.RUNNING) else await _find_reasons(part.core, batch)
    if batch.waits_for is not None:
        waiting.insert(0, batch.waits_for)
    return Seen(batch=batch, pace=paces.get(batch.id), shards=shards, waiting=waiting)


async def _find_reasons(core: Core, batch: Batch) -> list[str]:
    """Why it waits."""
    job = await core.queue.get(JobId(batch.job_id))
    jobs = [job] if job.status is JobStatus.QUEUED else []
    if job.is_waiting:
        queued = JobFilter(parent_job_id=job.id, statuses=(JobStatus.QUEUED,))
        jobs = (await core.views.page(queued, limit=1)).jobs
    reasons = await core.views.waiting_on(jobs)
    found = [one.message for of_job in reasons.values() for one in of_job]
    if found and batch.is_private:
        found.append("only the command that made it works for it: start that batchwright batch run again")
    return found


def as_json(seen: Seen, prices: Mapping[str, Price]) -> dict[str, Any]:
    batch = seen.batch
    ahead = forecast(batch, seen.pace)
    return {
        **as_dict(batch),
        "cost": cost(batch.usage_by_model, prices),
        "deadline_risk": ahead.risk,
        "done": batch.done,
        "error_summary": group_errors(batch),
        "eta": ahead.eta,
        "rate": None if seen.pace is None else seen.pace.rate,
        "waiting_on": seen.waiting,
    }


def group_errors(batch: Batch) -> list[dict[str, Any]]:
    """Why lines failed, the most frequent reason first."""
    ordered = sorted(batch.error_summary.items(), key=lambda item: (-item[1][0], item[0]))
    return [{"code": code, "count": count, "sample_custom_id": sample} for code, (count, sample) in ordered]


def list_problems(batch: Batch) -> list[Mapping[str, Any]]:
    """What is wrong with the input, or what made the batch fail later on."""
    if batch.errors is not None:
        found: list[Mapping[str, Any]] = batch.errors.get("data") or []
        return found
    return [batch.stop_error] if batch.status is BatchStatus.FAILED and batch.stop_error else []


def print_batches(many: Sequence[Seen]) -> None:
    now = datetime.now(UTC)
    print_table(
        {
            "id": [Text(one.batch.id) for one in many],
            "status": [status_text(one.batch) for one in many],
            "done": [Text(progress(one.batch)) for one in many],
            "failed": [Text(number(count_failed(one.batch)) if count_failed(one.batch) else "", "red") for one in many],
            "tenant": [Text(one.batch.tenant if one.batch.tenant != DEFAULT_TENANT else "") for one in many],
            "age": [Text(seconds((now - one.batch.created_at).total_seconds())) for one in many],
            "left": [Text(left_text(one.batch, one.pace)) for one in many],
            "models": [Text(", ".join(one.batch.models or ())) for one in many],
        },
        elastic=("models",),
    )


def print_batch(seen: Seen, prices: Mapping[str, Price]) -> None:
    batch = seen.batch
    print_facts([*_what(seen), *_counts(seen, prices), *_times(batch), *_files(batch)])
    print_errors(batch)
    print_problems(list_problems(batch), (batch.errors or {}).get("total", 0))


def _what(seen: Seen) -> list[tuple[str, Any]]:
    batch = seen.batch
    metadata = ", ".join(f"{name}={value}" for name, value in (batch.metadata or {}).items())
    return [
        ("batch", batch.id),
        ("status", status_text(batch)),
        ("waiting on", "\n".join(seen.waiting)),
        ("tenant", batch.tenant if batch.tenant != DEFAULT_TENANT else None),
        ("endpoint", batch.endpoint),
        ("models", ", ".join(batch.models or ())),
        ("queue", f"{batch.queue}, priority {batch.priority}"),
        ("limits", ", ".join(f"{name} {value}" for name, value in batch.limits.items())),
        ("metadata", metadata),
        ("retry of", batch.retry_of),
        ("only codes", ", ".join(batch.retry_codes or ())),
    ]


def _counts(seen: Seen, prices: Mapping[str, Price]) -> list[tuple[str, Any]]:
    batch = seen.batch
    rate = seen.pace.rate if seen.pace is not None else None
    return [
        ("done", progress(batch)),
        ("lines", outcomes(batch)),
        ("shards", counts_text(seen.shards) if seen.shards else None),
        ("pace", f"{rate:,.1f} requests/s" if rate else None),
        ("will end", eta_text(batch, seen.pace)),
        ("tokens", tokens_text(batch)),
        ("cost", cost_text(batch, prices)),
    ]


def _times(batch: Batch) -> list[tuple[str, Any]]:
    ended = batch.ended_at
    took = f", took {seconds((ended - batch.created_at).total_seconds())}" if ended else ""
    return [
        ("created", time_text(batch.created_at)),
        ("window", f"{batch.completion_window}, until {time_text(batch.expires_at)}"),
        ("began", time_text(batch.in_progress_at)),
        ("paused", time_text(batch.paused_at)),
        ("cancelled", time_text(batch.cancelling_at)),
        ("ended", f"{time_text(ended)}{took}" if ended else None),
    ]


def _files(batch: Batch) -> list[tuple[str, Any]]:
    return [
        ("input", batch.input_file_id),
        ("output", batch.output_file_id),
        ("errors", batch.error_file_id),
        ("job", batch.job_id),
    ]


def print_errors(batch: Batch) -> None:
    groups = group_errors(batch)
    if groups:
        console().print()
        print_table(
            {
                "failed": [Text(str(one["count"])) for one in groups],
                "code": [Text(one["code"], "red") for one in groups],
                "for example": [Text(one["sample_custom_id"]) for one in groups],
            },
            elastic=("for example",),
        )


def print_problems(found: Sequence[Mapping[str, Any]], total: int, limit: int = _PROBLEMS) -> None:
    out = console()
    for problem in found[:limit]:
        out.print(Text.assemble((f"✗ {problem_place(problem)}", "red"), problem_words(problem)), soft_wrap=True)
    if total > len(found[:limit]):
        out.print(f"  … and {number(total - len(found[:limit]))} more", soft_wrap=True)


# Words and numbers ------------------------------------------------------------------------------------------------


def status_text(batch: Batch) -> Text:
    is_paused = batch.paused_at is not None and not batch.has_ended
    return Text(f"{batch.status.value}{', paused' if is_paused else ''}", COLOURS[batch.status])


def problem_place(problem: Mapping[str, Any]) -> str:
    return "" if problem.get("line") is None else f"line {number(problem['line'])}: "


def problem_words(problem: Mapping[str, Any]) -> str:
    return f"{problem.get('code')}: {problem.get('message')}"


def progress(batch: Batch) -> str:
    return f"{number(batch.done)}/{number(batch.total)}" if batch.total else ""


def count_failed(batch: Batch) -> int:
    return batch.done - batch.completed


def outcomes(batch: Batch) -> str:
    names = ("completed", "failed", "expired", "cancelled")
    return " · ".join(f"{number(getattr(batch, name))} {name}" for name in names if getattr(batch, name))


def tokens_text(*batches: Batch) -> str:
    """Of all of them together."""
    read, written = sum(one.input_tokens for one in batches), sum(one.output_tokens for one in batches)
    cached, reasoning = sum(one.cached_tokens for one in batches), sum(one.reasoning_tokens for one in batches)
    if not read + written:
        return ""
    share = f" ({cached / read:.0%} from a cache)" if cached and read else ""
    thought = f" ({number(reasoning)} of them thought)" if reasoning else ""
    return f"{number(read)} in{share} · {number(written)} out{thought}"


def cost_text(batch: Batch, prices: Mapping[str, Price]) -> str | None:
    """Nothing, where nothing was used or a model has no price."""
    spent = cost(batch.usage_by_model, prices)
    return None if spent is None or not batch.input_tokens + batch.output_tokens else money(spent)


def left_text(batch: Batch, pace: Pace | None) -> str:
    """How long it will take from now on."""
    eta = forecast(batch, pace).eta
    return "" if eta is None or pace is None else seconds((eta - pace.now).total_seconds())


def eta_text(batch: Batch, pace: Pace | None) -> Text | None:
    ahead = forecast(batch, pace)
    if ahead.eta is None or ahead.risk is None:
        return None
    text = Text(f"in {left_text(batch, pace)}{_RISKS[ahead.risk]}")
    return text.append(", too late for its window", "red") if ahead.risk is DeadlineRisk.HIGH else text
