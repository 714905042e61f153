"""How runs are printed: a table of many, the facts of one with its funnel, and JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from rich.text import Text

from batchwright.cli.exit_codes import CANCELLED, FAILED, SOME_FAILED
from batchwright.cli.show import (
    age,
    as_dict,
    bar,
    console,
    money,
    number,
    print_facts,
    print_table,
    seconds,
    time_text,
)
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.ingest.explain import Waits, explain_run
from batchwright.ingest.items import OPEN_COUNT_MAX, Cause
from batchwright.ingest.part import IngestPart
from batchwright.ingest.pipeline import DONE, ENQUEUED
from batchwright.ingest.runs import Doubt, Run
from batchwright.states import ItemStatus, RunStatus

COLOURS = {
    RunStatus.PENDING: "bright_black",
    RunStatus.RUNNING: "cyan",
    RunStatus.PARKED: "yellow",
    RunStatus.COMPLETED: "green",
    RunStatus.COMPLETED_WITH_ERRORS: "yellow",
    RunStatus.FAILED: "red",
    RunStatus.CANCELLED: "yellow",
}
_SOURCES_SHOWN = 3
_SKIPPED_SHOWN = 5
_CAUSES_SHOWN = 10
_BAR_COLUMNS = 24
_NO_DOUBT = Doubt(0, Decimal(0), 0)
_EXPECTED_REASONS = frozenset({"excluded", "hidden", "unsupported"})
"""Reasons that need no attention: files left out for these are counted, but not listed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A step of the funnel: how many documents have reached it, and how many are there now."""

    name: str
    reached: int
    here: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run, its funnel, what it waits for, and what failed."""

    run: Run
    funnel: Sequence[Stage] = ()
    waits: Sequence[Waits] = ()
    causes: Sequence[Cause] = field(default_factory=tuple)
    doubt: Doubt = _NO_DOUBT


def exit_code(run: Run) -> int:
    match run.status:
        case RunStatus.COMPLETED:
            return 0
        case RunStatus.COMPLETED_WITH_ERRORS:
            return SOME_FAILED
        case RunStatus.CANCELLED:
            return CANCELLED
    return FAILED


async def look_at(part: IngestPart, run: Run, *, causes: int = _CAUSES_SHOWN) -> Seen:
    at = await part.items.funnel(run) if run.item_count_total else {}
    counts = {(ItemStatus.OPEN, step): n for step, n in at.items()}
    counts |= {
        (ItemStatus.DONE, DONE): run.item_count_done,
        (ItemStatus.FAILED, DONE): run.item_count_failed,
        (ItemStatus.CANCELLED, ENQUEUED): run.item_count_cancelled,
    }
    has_failed = run.item_count_failed > 0
    return Seen(
        run=run,
        funnel=make_funnel(part.graph.stages, counts),
        waits=await explain_run(part, run),
        causes=await part.items.inbox(None, run_id=run.id, limit=causes) if has_failed else (),
        doubt=await part.runs.in_doubt(run.id),
    )


def make_funnel(stages: Sequence[Sequence[str]], counts: Mapping[tuple[ItemStatus, str], int]) -> list[Stage]:
    """Documents that need work, by the step they reached. Failed ones count in the first stage only."""
    names = [ENQUEUED, *(level[-1] for level in stages)]
    shown = [ENQUEUED, *(_name_stage(level) for level in stages)]
    here = [counts.get((ItemStatus.OPEN, name), 0) for name in names]
    done = counts.get((ItemStatus.DONE, DONE), 0)
    ended = sum(counts.get((status, step), 0) for status, step in counts if status in _STUCK)
    reached, so_far = [], done
    for count in reversed(here):
        so_far += count
        reached.append(so_far)
    reached.reverse()
    reached[0] += ended
    funnel = [Stage(name=name, reached=n, here=at) for name, n, at in zip(shown, reached, here, strict=True)]
    return [*funnel, Stage(name=DONE, reached=done, here=0)]


_STUCK = frozenset({ItemStatus.FAILED, ItemStatus.CANCELLED})


def _name_stage(level: Sequence[str]) -> str:
    return level[0] if len(level) == 1 else f"{level[0]} +{len(level) - 1}"


def as_json(seen: Seen) -> dict[str, Any]:
    """The JSON for programs: money as numbers, and what the run waits for."""
    fields = {name: float(value) if isinstance(value, Decimal) else value for name, value in as_dict(seen.run).items()}
    for name in ("collection_id", "traceparent", "recipe"):
        del fields[name]
    return {
        **fields,
        "item_count_open": seen.run.item_count_open,
        "in_doubt": {"calls": seen.doubt.calls, "cost": float(seen.doubt.cost), "tokens": int(seen.doubt.tokens)},
        "funnel": [as_dict(stage) for stage in seen.funnel],
        "waiting_on": [as_dict(one) for one in seen.waits],
        "failures": [cause_json(cause) for cause in seen.causes],
    }


def cause_json(cause: Cause) -> dict[str, Any]:
    return as_dict(cause)


# Tables and facts ----------------------------------------------------------------------------------------------------


def print_runs(runs: Sequence[Run]) -> None:
    now = datetime.now(UTC)
    columns = {
        "id": [Text(run.id) for run in runs],
        "status": [Text(run.status.value, COLOURS[run.status]) for run in runs],
        "done": [Text(f"{number(_count_good(run))}/{number(run.item_count_total)}") for run in runs],
        "failed": [Text(number(run.item_count_failed) if run.item_count_failed else "", "red") for run in runs],
        "spent": [Text(money(float(run.spent)) if run.spent else "") for run in runs],
        "age": [Text(age((now - run.created_at).total_seconds())) for run in runs],
        "tenant": [Text(run.tenant if run.tenant != DEFAULT_TENANT else "") for run in runs],
        "collection": [Text(run.collection) for run in runs],
    }
    print_table(columns, elastic=("tenant", "collection"))


def print_run(seen: Seen) -> None:
    print_facts([*_what(seen), *_counts(seen.run), *_money(seen), *_times(seen.run)])
    out = console()
    if seen.run.item_count_total > seen.run.item_count_unchanged:
        out.print()
        for line in funnel_lines(seen.funnel, _BAR_COLUMNS):
            out.print(line)
        if seen.run.item_count_open > OPEN_COUNT_MAX:
            out.print(Text(f"only the first {number(OPEN_COUNT_MAX)} open documents were counted", "bright_black"))
    if seen.causes:
        out.print()
        print_causes(seen.causes)
        out.print(Text(f"see: batchwright ingest inbox --run {seen.run.id}", "bright_black"), soft_wrap=True)


def print_causes(causes: Sequence[Cause]) -> None:
    for cause in causes[:_CAUSES_SHOWN]:
        console().print(Text.assemble(("✗ ", "red"), cause_text(cause)), soft_wrap=True)
    if len(causes) > _CAUSES_SHOWN:
        console().print(f"  … and {number(len(causes) - _CAUSES_SHOWN)} more causes", soft_wrap=True)


def cause_text(cause: Cause) -> str:
    names = ", ".join(cause.names)
    more = f" and {number(cause.count - len(cause.names))} more" if cause.count > len(cause.names) else ""
    return f"{count_text(cause)} at {cause.step}, {cause.code}: {names}{more}: {cause.message}"


def count_text(cause: Cause) -> str:
    """The count, with a plus if there are more that were not counted."""
    return f"{number(cause.count)}{'+' if cause.has_more else ''}"


def funnel_lines(funnel: Sequence[Stage], columns: int) -> list[Text]:
    total = max((stage.reached for stage in funnel), default=0)
    label = max((len(stage.name) for stage in funnel), default=0)
    digits = max((len(number(stage.reached)) for stage in funnel), default=0)
    lines = []
    for stage in funnel:
        colour = "green" if stage.name == DONE else "cyan"
        line = Text(f"  {stage.name:{label}}  {number(stage.reached):>{digits}}  ", no_wrap=True)
        lines.append(line.append_text(bar({colour: stage.reached}, total, columns)))
    return lines


def _what(seen: Seen) -> list[tuple[str, Any]]:
    run = seen.run
    return [
        ("run", run.id),
        ("status", status_text(run)),
        ("waiting on", "\n".join(map(waits_text, seen.waits))),
        ("error", Text(_error_text(run.error), "red") if run.error else None),
        ("collection", run.collection),
        ("tenant", run.tenant if run.tenant != DEFAULT_TENANT else None),
        ("sources", _sources_text(run.sources)),
        ("models", f"{run.config['embedding']['model']}, entities by {run.config['entities']['model']}"),
        ("lane", run.lane),
        ("metadata", ", ".join(f"{name}={value}" for name, value in (run.metadata or {}).items())),
    ]


def _counts(run: Run) -> list[tuple[str, Any]]:
    return [
        ("documents", counts_text(run)),
        *listing_rows(run),
    ]


def listing_rows(run: Run) -> list[tuple[str, str | None]]:
    """What the listing found that is not a document of the run."""
    return [
        ("removed", f"{number(run.retired_count)}, because their sources are gone" if run.retired_count else None),
        ("left out", _skipped_text(run.skipped)),
        ("listing", "not complete, so nothing was removed" if run.is_complete is False else None),
    ]


def _money(seen: Seen) -> list[tuple[str, Any]]:
    return [("tokens", tokens_text(seen.run)), ("money", money_text(seen.run, seen.doubt))]


def _times(run: Run) -> list[tuple[str, Any]]:
    took = f", took {seconds((run.ended_at - run.created_at).total_seconds())}" if run.ended_at else ""
    return [
        ("created", time_text(run.created_at)),
        ("began", time_text(run.started_at)),
        ("deadline", None if run.ended_at else time_text(run.deadline_at)),
        ("ended", f"{time_text(run.ended_at)}{took}" if run.ended_at else None),
    ]


# Words and numbers ---------------------------------------------------------------------------------------------------


def status_text(run: Run) -> Text:
    reason = f", {run.parked_reason}" if run.status is RunStatus.PARKED and run.parked_reason else ""
    return Text(f"{run.status.value}{reason}", COLOURS[run.status])


def waits_text(one: Waits) -> str:
    count = f"{number(one.count)}{'+' if one.has_more else ''} documents: " if one.count is not None else ""
    step = f"{one.step}: " if one.step is not None else ""
    until = f", until {one.until:%H:%M:%S}" if one.until is not None and one.reason != "lease" else ""
    remedy = f"; {one.remedy}" if one.remedy is not None else ""
    return f"{count}{step}{one.message}{until}{remedy}"


def counts_text(run: Run) -> str:
    parts = [
        (run.item_count_done, "done"),
        (run.item_count_unchanged, "unchanged"),
        (run.item_count_failed, "failed"),
        (run.item_count_cancelled, "cancelled"),
        (run.item_count_open, "open"),
    ]
    said = ", ".join(f"{number(n)} {word}" for n, word in parts if n)
    found = number(run.item_count_total) if run.listed_at is not None or run.has_ended else "listing"
    return f"{found}: {said}" if said else found


def tokens_text(run: Run) -> str | None:
    if not run.calls:
        return None
    return f"{number(run.prompt_tokens)} in · {number(run.completion_tokens)} out · {number(run.calls)} requests"


def money_text(run: Run, doubt: Doubt = _NO_DOUBT) -> str | None:
    """What was spent, with the budget and the estimate. Unknown costs are mentioned."""
    known = estimated_cost(run)
    may_cost = known is not None and known["high"] > 0
    if not (run.calls or run.budget is not None or may_cost or doubt.calls):
        return None
    parts = [f"spent {money(float(run.spent))}{' or more: a price is unknown' if run.has_unknown_cost else ''}"]
    if run.budget is not None:
        parts[0] += f" of {money(float(run.budget))}"
    if known is not None:
        parts.append(f"estimate {range_text(known)}")
    if (on_the_way := run.reserved - doubt.cost) > 0:
        parts.append(f"reserved {money(float(on_the_way))}")
    if doubt.calls:
        parts.append(f"in doubt {money(float(doubt.cost))}")
    return " · ".join(parts)


def estimated_cost(run: Run) -> Mapping[str, float] | None:
    lane = "batch" if run.lane == "batch" else "realtime"
    found = ((run.estimate or {}).get("cost") or {}).get(lane)
    return found if isinstance(found, Mapping) else None


def range_text(figure: Mapping[str, float]) -> str:
    value = money(figure["value"])
    if figure["low"] == figure["high"]:
        return value
    return f"{value} ({money(figure['low'])} to {money(figure['high'])})"


def _count_good(run: Run) -> int:
    return run.item_count_done + run.item_count_unchanged


def _sources_text(sources: Sequence[str]) -> str:
    more = [f"and {number(len(sources) - _SOURCES_SHOWN)} more"] if len(sources) > _SOURCES_SHOWN else []
    return "\n".join([*sources[:_SOURCES_SHOWN], *more])


def _skipped_text(skipped: Mapping[str, Any] | None) -> str | None:
    if not skipped or not skipped.get("total"):
        return None
    counts = ", ".join(f"{number(n)} {reason}" for reason, n in (skipped.get("counts") or {}).items())
    odd = [one for one in skipped.get("shown") or () if one.get("reason") not in _EXPECTED_REASONS]
    shown = [f"{one.get('name')}: {one.get('message')}" for one in odd[:_SKIPPED_SHOWN]]
    return "\n".join([f"{number(skipped['total'])}: {counts}", *shown])


def _error_text(error: Mapping[str, Any]) -> str:
    return f"{error.get('code')}: {error.get('message')}"
