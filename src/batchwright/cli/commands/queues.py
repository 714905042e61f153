"""`batchwright queue …`: the numbers of jobs in each queue, and whether it is paused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, OfTenant, client, run
from batchwright.cli.show import age, print_json, print_table, time_text
from batchwright.engine.views import QueuesOfTenant, QueueView

app = typer.Typer(no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="The queues' names.", show_default=False)]


@app.command("list")
def list_(tenant: OfTenant = None, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """List queues with what is due, scheduled for later and running."""

    async def go() -> QueuesOfTenant:
        async with client(database_url, config) as batchwright:
            if tenant is not None:
                return await batchwright.views.queues_of_tenant(tenant)
            return QueuesOfTenant(await batchwright.views.queues(), is_complete=True)

    queues, is_complete = run(go())
    if json:
        print_json(queues)
    elif queues:
        _print(queues)
    elif is_complete:
        typer.echo("no queues: a queue exists once it has had a job", err=True)
    if not is_complete:
        typer.echo(
            "only some jobs were counted: the tenant may have more, also in other queues; see: ", err=True, nl=False
        )
        typer.echo(f"batchwright job list --status queued --tenant {tenant}", err=True)


@app.command()
def pause(names: Names, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Pause queues: no more of their jobs start; running jobs continue."""

    async def go() -> None:
        async with client(database_url, config) as batchwright:
            for name in names:
                await batchwright.named_queues.pause(name)

    run(go())
    if json:
        print_json({"paused": names})
    else:
        typer.echo(f"paused: {', '.join(names)}")


@app.command()
def resume(names: Names, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Resume paused queues."""

    async def go() -> None:
        async with client(database_url, config) as batchwright:
            for name in names:
                await batchwright.named_queues.resume(name)
                batchwright.doorbell.ring([name])

    run(go())
    if json:
        print_json({"resumed": names})
    else:
        typer.echo(f"resumed: {', '.join(names)}")


def _print(queues: Sequence[QueueView]) -> None:
    oldest = [one.oldest_due_seconds for one in queues]
    print_table(
        {
            "queue": [Text(one.name) for one in queues],
            "due": [Text(_at_least(one.due, one)) for one in queues],
            "scheduled": [Text(_at_least(one.scheduled, one)) for one in queues],
            "running": [Text(str(one.running)) for one in queues],
            "oldest due": [Text("" if waited is None else age(waited)) for waited in oldest],
            "paused since": [Text(time_text(one.paused_at) or "", "yellow") for one in queues],
        }
    )


def _at_least(n: int, queue: QueueView) -> str:
    """In a long queue only the first jobs are counted."""
    return f"{n}+" if queue.has_more else str(n)
