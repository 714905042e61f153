"""`batchwright key …`: who may use the HTTP API."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from batchwright.access.keys import DEFAULT_SCOPES, ApiKey, Created, Scope
from batchwright.cli.flags import Config, DatabaseUrl, Json, client, run
from batchwright.cli.show import console, print_json
from batchwright.engine.jobs import DEFAULT_TENANT, job_id
from batchwright.errors import InvalidInput

app = typer.Typer(no_args_is_help=True)

_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What or whom the key is for.", show_default=False)],
    tenant: Annotated[str, typer.Option(help="Tenant whose jobs the key can see and create.")] = DEFAULT_TENANT,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="What the key allows; may be repeated. By default read, submit and operate.", show_default=False
        ),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Also allow workers, metrics, pausing queues and other tenants.")
    ] = False,
    expires_in: Annotated[
        str | None, typer.Option(metavar="90d", help="Lifetime in minutes, hours or days, such as 30m, 12h or 90d.")
    ] = None,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Create a key and print it. It is shown only this once, because only its hash is kept.

    As soon as there is a key, the HTTP API requires one. Only the key itself goes to standard output.
    """
    scopes = [*(scope or DEFAULT_SCOPES), *([Scope.ADMIN] if admin else [])]
    lifetime = None if expires_in is None else _parse_lifetime(expires_in)

    async def go() -> Created:
        async with client(database_url, config) as batchwright:
            return await batchwright.keys.create(name, tenant=tenant, scopes=scopes, lifetime=lifetime)

    made = run(go())
    if json:
        print_json({**_as_dict(made.key), "secret": made.secret})
    else:
        typer.echo(made.secret)
        typer.echo(f"key {made.key.id} · {_grants_text(made.key)} · keep it: it is not shown again", err=True)


@app.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="Only keys of this tenant.")] = None,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List keys, without their secrets."""

    async def go() -> list[ApiKey]:
        async with client(database_url, config) as batchwright:
            return await batchwright.keys.list(tenant=tenant)

    keys = run(go())
    if json:
        print_json([_as_dict(key) for key in keys])
    elif keys:
        _print(keys)
    else:
        typer.echo("no keys: the HTTP API is open to this machine, and only to it", err=True)


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as batchwright key list shows it.")],
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Revoke a key, from the next request on."""

    async def go() -> ApiKey:
        async with client(database_url, config) as batchwright:
            return await batchwright.keys.revoke(job_id(id))

    key = run(go())
    if json:
        print_json(_as_dict(key))
    else:
        typer.echo(f"key {key.id} ({key.name}) opens nothing any more")


def _print(keys: list[ApiKey]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("id", "key", "name", "tenant", "scopes", "last used", "state"):
        table.add_column(column, no_wrap=True)
    for key in keys:
        used = "never" if key.last_used_at is None else f"{key.last_used_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        row = (str(key.id), f"{key.hint}…", key.name, key.tenant, " ".join(key.scopes), used, _state_text(key))
        table.add_row(*map(Text, row))
    console().print(table)


def _state_text(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is None:
        return "live"
    return "expired" if key.expires_at <= datetime.now(UTC) else f"live until {key.expires_at:%Y-%m-%d %H:%M} UTC"


def _grants_text(key: ApiKey) -> str:
    return f"tenant {key.tenant} · {' '.join(key.scopes)}"


def _as_dict(key: ApiKey) -> dict[str, object]:
    return {name: getattr(key, name) for name in key.__slots__}


def _parse_lifetime(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if found is None:
        raise InvalidInput(f"--expires-in {text!r} is no length of time; write 30m, 12h or 90d", param="expires_in")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})
