"""`batchwright ingest inbox`, `retry` and `dismiss`: what has failed, by cause, and what to do with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, OfTenant, open_part, run
from batchwright.cli.show import console, number, print_indented, print_json
from batchwright.errors import Conflict, InvalidInput
from batchwright.ingest.commands.options import Anew
from batchwright.ingest.commands.show import cause_json, count_text
from batchwright.ingest.items import Cause, Wanted
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import QUEUE

OfRun = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="Only documents of this run.", show_default=False)
]
ItemIds = Annotated[
    list[str] | None, typer.Argument(metavar="ITEM...", help="Ids of failed documents.", show_default=False)
]
OfCause = Annotated[
    str | None,
    typer.Option(
        "--cause", metavar="CAUSE", help="Documents that failed for this cause; see: ingest inbox.", show_default=False
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="All failed documents of all runs.")]


def inbox(
    run_id: OfRun = None,
    tenant: OfTenant = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of causes to show.")] = 100,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List failed documents by cause, the largest group first, with the commands to retry or dismiss them."""

    async def go() -> Sequence[Cause]:
        async with open_part(IngestPart, database_url, config) as part:
            if run_id is not None:
                await part.runs.get(run_id, tenant=tenant)
            return await part.items.inbox(tenant, run_id=run_id, limit=limit)

    causes = run(go())
    if json:
        print_json([cause_json(cause) for cause in causes])
    elif causes:
        _print(causes, run_id)
    else:
        typer.echo("the inbox is empty: no failed documents", err=True)


def retry(
    ids: ItemIds = None,
    cause: OfCause = None,
    run_id: OfRun = None,
    everything: Everything = False,
    anew: Anew = False,
    tenant: OfTenant = None,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Retry failed documents from the step that failed. A run that has ended is opened again for them.

    Give ids, a cause, a run, or --all; a cause and a run together mean documents that match both.
    """
    _require_choice(ids, cause, run_id, everything)

    async def go() -> dict[str, int]:
        async with open_part(IngestPart, database_url, config) as part:
            counts: dict[str, int] = {}
            if ids:
                for id in ids:
                    item = await part.submission.retry_item(id, tenant=tenant, anew=anew)
                    counts[item.run_id] = counts.get(item.run_id, 0) + 1
            else:
                counts = await part.submission.retry(Wanted(cause=cause), tenant=tenant, run_id=run_id, anew=anew)
            part.core.doorbell.ring([QUEUE])
            return counts

    counts = run(go())
    if json:
        print_json({"retried": sum(counts.values()), "runs": counts})
        return
    _tell(sum(counts.values()), "retried", "nothing to retry: no FAILED or CANCELLED document matches")
    for id in counts:
        typer.echo(f"  watch:  batchwright ingest watch {id}\n  work:   batchwright ingest resume {id}", err=True)


def dismiss(
    ids: ItemIds = None,
    cause: OfCause = None,
    run_id: OfRun = None,
    everything: Everything = False,
    tenant: OfTenant = None,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Take failed documents out of the inbox; they stay FAILED.

    Give ids, a cause, a run, or --all; a cause and a run together mean documents that match both.
    """
    _require_choice(ids, cause, run_id, everything)

    async def go() -> int:
        async with open_part(IngestPart, database_url, config) as part:
            if run_id is not None:
                await part.runs.get(run_id, tenant=tenant)
            for id in ids or ():
                await part.items.get(id, tenant=tenant)
            count = await part.items.dismiss(tenant, Wanted(ids or None, cause), run_id=run_id)
            if ids and not count:
                raise Conflict(f"none of these documents is FAILED and in the inbox: {', '.join(ids)}")
            return count

    count = run(go())
    if json:
        print_json({"dismissed": count})
    else:
        _tell(count, "dismissed", "nothing to dismiss: no FAILED document of the inbox matches")


def _require_choice(ids: Sequence[str] | None, cause: str | None, run_id: str | None, everything: bool) -> None:
    chosen = [bool(ids), cause is not None or run_id is not None, everything]
    if sum(chosen) != 1:
        raise InvalidInput("select documents in one way: ITEM..., --all, or --cause CAUSE and --run RUN")


def _tell(count: int, verb: str, none: str) -> None:
    typer.echo(f"{verb} {number(count)} document{'' if count == 1 else 's'}" if count else none)


def _print(causes: Sequence[Cause], run_id: str | None) -> None:
    """Print lines, not a table, so that users can copy whole causes and commands."""
    out = console()
    suffix = f" --run {run_id}" if run_id is not None else ""
    for cause in causes:
        names = ", ".join(cause.names)
        more = f" and {number(cause.count - len(cause.names))} more" if cause.count > len(cause.names) else ""
        kind = "" if cause.kind != "Transient" else " · may succeed if it is retried"
        head = Text.assemble((count_text(cause), "bold red"), "  ", (cause.cause, "bold"), (kind, "green"))
        print_indented(head, 0)
        print_indented(Text(cause.message or ""))
        print_indented(Text(f"{names}{more}", "bright_black"))
        out.print(Text(f"  see:  batchwright ingest item {cause.item_ids[0]}"), soft_wrap=True)
        out.print(Text(f"  act:  batchwright ingest retry | dismiss --cause {cause.cause}{suffix}"), soft_wrap=True)
    if any(cause.has_more for cause in causes):
        typer.echo("+  more documents failed than were counted", err=True)
