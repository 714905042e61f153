"""`batchwright ingest items` and `item`: the documents of a run, and the history of one."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import typer
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, open_part, run
from batchwright.cli.paging import read_pages
from batchwright.cli.show import as_dict, console, money, number, print_facts, print_json, print_table, seconds, size
from batchwright.engine.jobs import JobEvent, JobId
from batchwright.ingest.commands.options import RunId
from batchwright.ingest.commands.show import waits_text
from batchwright.ingest.explain import Waits, explain_item
from batchwright.ingest.items import Item, StepState
from batchwright.ingest.part import IngestPart
from batchwright.states import ItemStatus

_PAGE = 1000
_EVENTS_MAX = 1000
COLOURS = {
    ItemStatus.OPEN: "cyan",
    ItemStatus.DONE: "green",
    ItemStatus.UNCHANGED: "bright_black",
    ItemStatus.FAILED: "red",
    ItemStatus.CANCELLED: "yellow",
}
_QUIET = frozenset({"step_started"})
"""Events that are not shown, because the next event has the same information."""


def items(
    id: RunId,
    status: Annotated[
        list[ItemStatus] | None,
        typer.Option(case_sensitive=False, help="Only documents with this status; may be repeated."),
    ] = None,
    step: Annotated[
        str | None, typer.Option(metavar="STEP", help="Only documents whose last step is this one, such as FETCHED.")
    ] = None,
    cause: Annotated[
        str | None, typer.Option(metavar="CAUSE", help="Only documents that failed for this cause; see: ingest inbox.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum number of documents to show.")] = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List the documents of a run, in the order in which they were found."""

    async def go() -> list[Item]:
        async with open_part(IngestPart, database_url, config) as part:
            run_id = (await part.runs.get(id, tenant=None)).id
            upper = step.upper() if step is not None else None

            def fetch(last: Item | None, n: int) -> Awaitable[Sequence[Item]]:
                after = last.id if last else None
                return part.items.list(run_id, after=after, limit=n, statuses=status, step=upper, cause=cause)

            return await read_pages(fetch, limit, page=_PAGE)

    found = run(go())
    if json:
        print_json([item_json(item) for item in found])
    elif found:
        print_items(found)
    else:
        typer.echo("no such documents", err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A document, its steps, its history, and what it waits for."""

    item: Item
    steps: Sequence[StepState]
    events: Sequence[JobEvent]
    waits: Sequence[Waits]


def item(
    id: Annotated[str, typer.Argument(metavar="ITEM", help="The document's id in its run.", show_default=False)],
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Show a document of a run: its steps, what it waits for, and its history with models, tokens and cost."""

    async def go() -> Seen:
        async with open_part(IngestPart, database_url, config) as part:
            return await look_at_item(part, await part.items.get(id, tenant=None))

    seen = run(go())
    if json:
        steps = [step._asdict() for step in seen.steps]
        events = [_event_json(event) for event in seen.events]
        print_json({**item_json(seen.item), "steps": steps, "events": events, "waiting_on": seen.waits})
    else:
        print_item(seen)


async def look_at_item(part: IngestPart, item: Item) -> Seen:
    steps = {step.step: step for step in await part.items.steps(item.id)}
    order = [name for name in part.graph.order if name in steps]
    order += [name for name in steps if name not in order]
    events = [event for job in item.job_ids for event in await part.core.queue.events(JobId(job), limit=_EVENTS_MAX)]
    return Seen(
        item=item,
        steps=[steps[name] for name in order],
        events=events,
        waits=await explain_item(part, item),
    )


def item_json(item: Item) -> dict[str, Any]:
    fields = {name: float(value) if isinstance(value, Decimal) else value for name, value in as_dict(item).items()}
    del fields["collection_id"]
    return fields


def _event_json(event: JobEvent) -> dict[str, Any]:
    return {**as_dict(event), "cost": None if event.cost is None else float(event.cost)}


# Output --------------------------------------------------------------------------------------------------------------


def print_items(found: Sequence[Item]) -> None:
    columns = {
        "id": [Text(item.id) for item in found],
        "state": [Text(_state(item), COLOURS[item.status]) for item in found],
        "retries": [Text(str(item.retry_count) if item.retry_count else "") for item in found],
        "cost": [Text(money(float(item.cost)) if item.cost else "") for item in found],
        "name": [Text(item.name) for item in found],
        "error": [Text(_error_text(item), "red") for item in found],
    }
    print_table(columns, elastic=("name", "error"))


def _state(item: Item) -> str:
    return item.step if item.status is ItemStatus.OPEN else item.status.value


def _error_text(item: Item) -> str:
    if item.last_error is None:
        return ""
    return f"{item.last_error.get('code')}: {item.last_error.get('message')}"


def print_item(seen: Seen) -> None:
    item = seen.item
    print_facts(
        [
            ("item", item.id),
            ("name", item.name),
            ("source", item.source),
            ("run", item.run_id),
            ("status", Text(item.status.value, COLOURS[item.status])),
            ("waiting on", "\n".join(map(waits_text, seen.waits))),
            ("error", Text(_error_text(item), "red") if item.last_error else None),
            ("cause", item.cause),
            ("size", None if item.size is None else size(item.size)),
            ("used", _used(item)),
        ]
    )
    if seen.steps:
        console().print()
        _print_steps(seen.steps)
    if seen.events:
        console().print()
        _print_events(seen.events)


def _used(item: Item) -> str | None:
    if not (item.prompt_tokens or item.completion_tokens):
        return None
    return f"{number(item.prompt_tokens)} tokens in · {number(item.completion_tokens)} out · {money(float(item.cost))}"


def _print_steps(steps: Sequence[StepState]) -> None:
    print_table(
        {
            "step": [Text(step.step) for step in steps],
            "state": [_step_state(step) for step in steps],
            "took": [Text(_took(step)) for step in steps],
            "starts": [Text(str(step.starts) if step.starts else "") for step in steps],
            "retries": [Text(str(step.retry_count) if step.retry_count else "") for step in steps],
            "error": [Text(step.error_kind or "", "red") for step in steps],
        },
        elastic=(),
    )


def _step_state(step: StepState) -> Text:
    if step.is_reused:
        return Text("reused", "bright_black")
    if step.state == "done":
        return Text("done", "green")
    return Text("waits" if step.waiting else "open", "yellow" if step.waiting else "cyan")


def _took(step: StepState) -> str:
    if step.started_at is None or step.ended_at is None or step.is_reused:
        return ""
    return _short((step.ended_at - step.started_at).total_seconds())


def _short(time: float) -> str:
    return f"{time * 1000:.0f} ms" if time < 1 else seconds(time)


def _print_events(events: Sequence[JobEvent]) -> None:
    shown = [event for event in events if event.event not in _QUIET]
    columns = {
        "time": [Text(f"{event.ts:%H:%M:%S}") for event in shown],
        "event": [Text(event.event, "red" if event.error_kind else "") for event in shown],
        "took": [Text(_event_took(event)) for event in shown],
        "tokens": [Text(_event_tokens(event)) for event in shown],
        "cost": [Text("" if event.cost is None else money(float(event.cost))) for event in shown],
        "step": [Text(str((event.fields or {}).get("step", ""))) for event in shown],
        "model": [Text(event.model or "") for event in shown],
        "message": [Text(_event_message(event)) for event in shown],
    }
    print_table(columns, elastic=("step", "model", "message"))


def _event_took(event: JobEvent) -> str:
    fields = event.fields or {}
    if event.event == "retry_scheduled" and "seconds" in fields:
        return f"in {_short(fields['seconds'])}"
    return _short(fields["seconds"]) if event.event == "step_completed" and fields.get("seconds") else ""


def _event_tokens(event: JobEvent) -> str:
    if event.prompt_tokens is None and event.completion_tokens is None:
        return ""
    return number((event.prompt_tokens or 0) + (event.completion_tokens or 0))


def _event_message(event: JobEvent) -> str:
    step = (event.fields or {}).get("step")
    kind = f"{event.error_kind}: " if event.error_kind else ""
    reused = "reused " if (event.fields or {}).get("reused") else ""
    message = "" if event.message is None or event.message == step else event.message
    return f"{kind}{reused}{message}".strip()
