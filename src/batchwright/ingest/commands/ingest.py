"""`batchwright ingest …`: read documents into collections, and search them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Annotated

import typer

from batchwright.cli.flags import Config, DatabaseUrl, Json, OfTenant, open_part, run
from batchwright.cli.paging import read_pages
from batchwright.cli.show import print_json
from batchwright.ingest.commands.collections import collection, collections, delete, documents, export
from batchwright.ingest.commands.costs import costs
from batchwright.ingest.commands.estimate import estimate
from batchwright.ingest.commands.inbox import dismiss, inbox, retry
from batchwright.ingest.commands.items import item, items
from batchwright.ingest.commands.options import RunId
from batchwright.ingest.commands.run import resume, run_
from batchwright.ingest.commands.search import search
from batchwright.ingest.commands.show import Seen, as_json, exit_code, look_at, print_run, print_runs
from batchwright.ingest.commands.watch import watch as watch_run
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import QUEUE, Run
from batchwright.states import RunStatus

_LIST_PAGE = 100

app = typer.Typer(no_args_is_help=True)
app.command("run")(run_)
app.command("estimate")(estimate)


@app.command("list")
def list_(
    status: Annotated[
        list[RunStatus] | None,
        typer.Option(case_sensitive=False, help="Only runs with this status; may be repeated."),
    ] = None,
    collection: Annotated[
        str | None, typer.Option("--collection", "-c", metavar="NAME", help="Only runs into this collection.")
    ] = None,
    tenant: OfTenant = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of runs to show.")] = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List runs, newest first."""

    async def go() -> list[Run]:
        async with open_part(IngestPart, database_url, config) as part:

            def fetch(last: Run | None, n: int) -> Awaitable[Sequence[Run]]:
                after = last.id if last else None
                return part.runs.list(tenant, after=after, limit=n, statuses=status, collection=collection)

            return await read_pages(fetch, limit, page=_LIST_PAGE)

    runs = run(go())
    if json:
        print_json([_without_views(one) for one in runs])
    elif runs:
        print_runs(runs)
    else:
        typer.echo("no such runs", err=True)


@app.command()
def show(id: RunId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Show a run: its progress, what it waits for, what failed and why, and what it cost."""

    async def go() -> Seen:
        async with open_part(IngestPart, database_url, config) as part:
            return await look_at(part, await part.runs.get(id, tenant=None))

    seen = run(go())
    if json:
        print_json(as_json(seen))
    else:
        print_run(seen)


@app.command()
def watch(id: RunId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Show a run live until it ends: documents by step, rate, cost, what it waits for and what failed.

    The exit code is 0 if every document is done, 4 if some failed, 3 if the run was cancelled, and 1 if it failed.
    Without a terminal, changes are printed as lines.
    """

    async def go() -> int:
        async with open_part(IngestPart, database_url, config) as part:
            return exit_code(await watch_run(part, id, json=json))

    raise typer.Exit(run(go()))


@app.command()
def park(id: RunId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Park a run: steps in progress end, and no new ones start until it is resumed."""

    async def go() -> Run:
        async with open_part(IngestPart, database_url, config) as part:
            return await part.submission.park(id, tenant=None)

    found = run(go())
    if json:
        print_json(_without_views(found))
    else:
        typer.echo(f"{found.id} is parked; resume it: batchwright ingest resume {found.id}")


app.command("resume")(resume)


@app.command()
def cancel(id: RunId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Cancel a run with its open documents. Documents that are done stay searchable."""

    async def go() -> Run:
        async with open_part(IngestPart, database_url, config) as part:
            found = await part.submission.cancel(id, tenant=None)
            part.core.doorbell.ring([QUEUE])
            return found

    found = run(go())
    if json:
        print_json(_without_views(found))
    else:
        typer.echo(f"{found.id} is {found.status.value}")


for command in (items, item, inbox, retry, dismiss, search, collections, collection, documents, export, delete, costs):
    app.command(command.__name__)(command)


def _without_views(found: Run) -> dict[str, object]:
    shown = as_json(Seen(run=found))
    for name in ("funnel", "waiting_on", "failures", "in_doubt"):
        del shown[name]
    return shown
