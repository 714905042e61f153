"""`batchwright inbox …`: failed jobs by type and cause, and the commands that rerun or dismiss them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from batchwright.cli.commands.bulk import act_on_many
from batchwright.cli.flags import Config, DatabaseUrl, DryRun, Json, OfCode, OfTenant, OfType, Yes, client, run
from batchwright.cli.show import ago, as_dict, print_json, print_table
from batchwright.engine.views import InboxGroup, JobFilter
from batchwright.errors import InvalidInput
from batchwright.states import JobStatus

app = typer.Typer()

GroupType = Annotated[
    str, typer.Option("--type", metavar="NAME", help="Failed jobs of this operation.", show_default=False)
]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of groups to show.")]


@app.callback(invoke_without_command=True)
def inbox(
    context: typer.Context,
    type: OfType = None,
    tenant: OfTenant = None,
    limit: Limit = 100,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List failed jobs by type and cause; rerun or dismiss them."""
    if context.invoked_subcommand is None:
        _list(type, tenant, limit, json, database_url, config)
    elif any((type, tenant, limit != 100, json, database_url, config)):
        command = context.invoked_subcommand
        raise InvalidInput(f"put the options after the command: batchwright inbox {command} --type NAME")


@app.command("list")
def list_(
    type: OfType = None,
    tenant: OfTenant = None,
    limit: Limit = 100,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List failed jobs by type and cause, the largest group first."""
    _list(type, tenant, limit, json, database_url, config)


@app.command()
def rerun(
    type: GroupType,
    code: OfCode = None,
    tenant: OfTenant = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Rerun the failed jobs of a group."""
    act_on_many(
        "rerun",
        _make_filter(type, code, tenant),
        dry_run=dry_run,
        yes=yes,
        json=json,
        database_url=database_url,
        config=config,
    )


@app.command()
def dismiss(
    type: GroupType,
    code: OfCode = None,
    tenant: OfTenant = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Dismiss the failed jobs of a group: they leave the inbox and stay FAILED."""
    act_on_many(
        "dismiss",
        _make_filter(type, code, tenant),
        dry_run=dry_run,
        yes=yes,
        json=json,
        database_url=database_url,
        config=config,
    )


def _make_filter(type: str, code: str | None, tenant: str | None) -> JobFilter:
    return JobFilter(statuses=(JobStatus.FAILED,), job_type=type, error_code=code, tenant=tenant, dismissed=False)


def _list(
    type: str | None, tenant: str | None, limit: int, json: bool, database_url: str | None, config: Path | None
) -> None:
    async def go() -> list[InboxGroup]:
        async with client(database_url, config) as batchwright:
            return await batchwright.inbox(tenant=tenant, job_type=type, limit=limit)

    groups = run(go())
    if json:
        print_json([_as_dict(group) for group in groups])
    elif groups:
        _print(groups)
    else:
        typer.echo("the inbox is empty: no failed jobs", err=True)


def _as_dict(group: InboxGroup) -> dict[str, Any]:
    return {**as_dict(group), "is_retryable": group.is_retryable}


def _print(groups: Sequence[InboxGroup]) -> None:
    now = datetime.now(UTC)
    print_table(
        {
            "failed": [Text(f"{group.count}{'+' if group.has_more else ''}") for group in groups],
            "last": [Text(ago(now, group.last_at)) for group in groups],
            "retry": [Text("may succeed" if group.is_retryable else "", "green") for group in groups],
            "code": [Text(group.code or "", "red") for group in groups],
            "type": [Text(group.job_type) for group in groups],
            "message": [Text(group.message or "") for group in groups],
        }
    )
    if any(group.has_more for group in groups):
        typer.echo("+  more jobs failed than were counted", err=True)
    typer.echo("see them:  batchwright job list --status failed --type NAME --code CODE", err=True)
    typer.echo("act:       batchwright inbox rerun | dismiss --type NAME [--code CODE]", err=True)
