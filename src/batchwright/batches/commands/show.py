"""How batches are printed: a table of many, the facts of one, and JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from batchwright.batches.concerns import find_unreachable
from batchwright.batches.local import find_abandoned
from batchwright.batches.output.words import read_words
from batchwright.batches.part import BatchesPart
from batchwright.batches.progress import DeadlineRisk, forecast
from batchwright.batches.store import Batch, Pace
from batchwright.cli.exit_codes import CANCELLED, FAILED, SOME_FAILED
from batchwright.cli.show import (
    age,
    as_dict,
    console,
    counts_text,
    money,
    number,
    print_facts,
    print_table,
    print_text,
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
_RESUMES = 3
_WORDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A batch, with what is known beyond its row."""

    batch: Batch
    pace: Pace | None = None
    shards: Mapping[JobStatus, int] | None = None
    waiting: Sequence[str] = ()
    file: str | None = None
    """What its user calls the input file."""
    is_abandoned: bool = False
    """Whether the process of a `batch run` is gone before the batch has ended."""
    words: Mapping[str, str] = field(default_factory=dict)
    """What the server said, by the codes of errors."""


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
    """With its file, its pace, its shards, and what it waits for if it is not running."""
    file = (await part.files.names([batch.input_file_id])).get(batch.input_file_id)
    if batch.has_ended:
        codes = [one["code"] for one in group_errors(batch)[:_WORDS]]
        words = await read_words(part.files, batch.error_file_id, codes)
        return Seen(batch=batch, file=file, words=words)
    shards = await part.core.queue.count_children(JobId(batch.job_id))
    is_abandoned = bool(await find_abandoned(part, [batch]))
    paces = {} if is_abandoned else await part.batches.paces([batch.id])
    if is_abandoned:
        waiting = [f"nobody runs it: its command was stopped or killed; resume it: {resume_command(batch)}"]
    elif shards.get(JobStatus.RUNNING):
        waiting = [] if batch.is_private else await find_unreachable(part.batches, batch.models or ())
    else:
        waiting = await _find_reasons(part.core, batch)
    if batch.waits_for is not None:
        waiting.insert(0, batch.waits_for)
    return Seen(
        batch=batch,
        pace=paces.get(batch.id),
        shards=shards,
        waiting=waiting,
        file=file,
        is_abandoned=is_abandoned,
    )


async def look_at_many(part: BatchesPart, batches: Sequence[Batch]) -> list[Seen]:
    """With what a list shows: their files, their paces, and whether their processes are gone."""
    abandoned = await find_abandoned(part, batches)
    running = [one.id for one in batches if one.in_progress_at and not one.has_ended and one.id not in abandoned]
    paces = await part.batches.paces(running)
    names = await part.files.names([one.input_file_id for one in batches])
    return [
        Seen(
            batch=one,
            pace=paces.get(one.id),
            file=names.get(one.input_file_id),
            is_abandoned=one.id in abandoned,
        )
        for one in batches
    ]


def resume_command(batch: Batch) -> str:
    """How to resume a batch of `batch run`; the values of headers are not stored, so they must be given again."""
    if batch.origin is None:  # created by a version that did not store it
        return "start the same batchwright batch run again"
    headers = "".join(f" --header '{name}: …'" for name in batch.origin["headers"])
    return f"batchwright batch run --resume {batch.id}{headers}"


async def _find_reasons(core: Core, batch: Batch) -> list[str]:
    """Why it waits."""
    job = await core.queue.get(JobId(batch.job_id))
    jobs = [job] if job.status is JobStatus.QUEUED else []
    if job.is_waiting:
        queued = JobFilter(parent_job_id=job.id, statuses=(JobStatus.QUEUED,))
        jobs = (await core.views.page(queued, limit=1)).jobs
    reasons = await core.views.waiting_on(jobs)
    return [one.message for of_job in reasons.values() for one in of_job]


def as_json(seen: Seen, prices: Mapping[str, Price]) -> dict[str, Any]:
    batch = seen.batch
    ahead = forecast(batch, seen.pace)
    return {
        **as_dict(batch),
        "cost": cost(batch.usage_by_model, prices),
        "deadline_risk": ahead.risk,
        "done": batch.done,
        "error_summary": group_errors(batch, seen.words),
        "eta": ahead.eta,
        "file": seen.file,
        "is_abandoned": seen.is_abandoned,
        "rate": None if seen.pace is None else seen.pace.rate,
        "waiting_on": seen.waiting,
    }


def group_errors(batch: Batch, words: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Why lines failed, the most frequent reason first; with what the server said, where that is known."""
    ordered = sorted(batch.error_summary.items(), key=lambda item: (-item[1][0], item[0]))
    return [
        {"code": code, "count": count, "sample_custom_id": sample}
        | ({"message": words[code]} if words and code in words else {})
        for code, (count, sample) in ordered
    ]


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
            "status": [Text("stopped", "yellow") if one.is_abandoned else status_text(one.batch) for one in many],
            "done": [Text(progress(one.batch)) for one in many],
            "failed": [Text(number(count_failed(one.batch)) if count_failed(one.batch) else "", "red") for one in many],
            "age": [Text(age((now - one.batch.created_at).total_seconds())) for one in many],
            "left": [Text(left_text(one.batch, one.pace)) for one in many],
            "tenant": [Text(one.batch.tenant if one.batch.tenant != DEFAULT_TENANT else "") for one in many],
            "file": [Text(one.file or "") for one in many],
            "models": [Text(", ".join(one.batch.models or ())) for one in many],
        },
        elastic=("tenant", "file", "models"),
    )
    stopped = [one.batch for one in many if one.is_abandoned]
    for batch in stopped[:_RESUMES]:
        console().print(Text(f"resume: {resume_command(batch)}", "yellow"), soft_wrap=True)
    if len(stopped) > _RESUMES:
        console().print(f"… and {len(stopped) - _RESUMES} more that can be resumed", soft_wrap=True)


def print_batch(seen: Seen, prices: Mapping[str, Price]) -> None:
    batch = seen.batch
    print_facts([*_what(seen), *_counts(seen, prices), *_times(batch), *_files(batch)])
    print_errors(batch)
    print_words(batch, seen.words)
    print_problems(list_problems(batch), (batch.errors or {}).get("total", 0))


def _what(seen: Seen) -> list[tuple[str, Any]]:
    batch = seen.batch
    metadata = ", ".join(f"{name}={value}" for name, value in (batch.metadata or {}).items())
    return [
        ("batch", batch.id),
        ("file", _file_text(seen)),
        ("status", status_text(batch, is_abandoned=seen.is_abandoned)),
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


def _file_text(seen: Seen) -> str | None:
    """Of a `batch run` where the file is, and its server; of others what the file is called."""
    origin = seen.batch.origin
    return seen.file if origin is None else f"{origin['file']}, on {origin['server']}"


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


async def print_missing_models(part: BatchesPart, batch: Batch) -> None:
    """If lines failed because the server does not have their model: which models it has."""
    from batchwright.batches.models import describe_missing  # here, because few batches need it

    models = part.make_models()
    try:
        found = await describe_missing(models, batch.models or (), batch.error_summary)
    finally:
        await models.close()
    if found is not None:
        print_text(Text(found, "yellow"))


def print_words(batch: Batch, words: Mapping[str, str]) -> None:
    """What the server said of the most frequent errors, whole."""
    for one in group_errors(batch, words)[:_WORDS]:
        if "message" in one:
            print_text(Text.assemble((f"{one['code']}: ", "red"), one["message"]))


def print_problems(found: Sequence[Mapping[str, Any]], total: int, limit: int = _PROBLEMS) -> None:
    for problem in found[:limit]:
        print_text(Text.assemble((f"✗ {problem_place(problem)}", "red"), problem_words(problem)))
    if total > len(found[:limit]):
        console().print(f"  … and {number(total - len(found[:limit]))} more", soft_wrap=True)


# Words and numbers ------------------------------------------------------------------------------------------------


def status_text(batch: Batch, *, is_abandoned: bool = False) -> Text:
    is_paused = batch.paused_at is not None and not batch.has_ended
    more = ", paused" if is_paused else ", stopped" if is_abandoned else ""
    return Text(f"{batch.status.value}{more}", "yellow" if is_abandoned else COLOURS[batch.status])


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
    thought = f" ({number(reasoning)} of them for reasoning)" if reasoning else ""
    return f"{number(read)} in{share} · {number(written)} out{thought}"


def cost_text(batch: Batch, prices: Mapping[str, Price]) -> str | None:
    """Nothing, where nothing was used or a model has no price."""
    spent = cost(batch.usage_by_model, prices)
    return None if spent is None or not batch.input_tokens + batch.output_tokens else money(spent)


def left_text(batch: Batch, pace: Pace | None) -> str:
    """The remaining time; empty if it is unknown, or if only the files remain to be written."""
    eta = forecast(batch, pace).eta
    if eta is None or pace is None or eta <= pace.now:
        return ""
    return seconds(max(1.0, (eta - pace.now).total_seconds()))


def eta_text(batch: Batch, pace: Pace | None) -> Text | None:
    ahead, left = forecast(batch, pace), left_text(batch, pace)
    if not left or ahead.risk is None:
        return None
    text = Text(f"in {left}{_RISKS[ahead.risk]}")
    return text.append(", too late for its window", "red") if ahead.risk is DeadlineRisk.HIGH else text
