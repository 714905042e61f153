"""`batchwright key …`: keys of the HTTP API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated
from uuid import UUID

import typer
from rich.text import Text

from batchwright.access.keys import DEFAULT_SCOPES, ApiKey, Created, Scope
from batchwright.cli.flags import Config, DatabaseUrl, Json, OfTenant, client, parse_time_span, run
from batchwright.cli.show import print_json, print_table
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.errors import InvalidInput

app = typer.Typer(no_args_is_help=True)


@app.command()
def create(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name that says who or what uses the key.", show_default=False)
    ],
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="Tenant whose jobs the key can see and create.")
    ] = DEFAULT_TENANT,
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
        str | None, typer.Option(metavar="DURATION", help="Lifetime of the key, such as 12h or 90d.")
    ] = None,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Create a key and print it. It is shown only this once, because only its hash is kept.

    As soon as there is a key, the HTTP API requires one. Only the key itself goes to standard output.
    """
    scopes = [*(scope or DEFAULT_SCOPES), *([Scope.ADMIN] if admin else [])]
    seconds = parse_time_span("--expires-in", expires_in, least="1s")
    lifetime = None if seconds is None else timedelta(seconds=seconds)

    async def go() -> Created:
        async with client(database_url, config) as batchwright:
            return await batchwright.keys.create(name, tenant=tenant, scopes=scopes, lifetime=lifetime)

    made = run(go())
    if json:
        print_json({**_as_dict(made.key), "secret": made.secret})
    else:
        typer.echo(made.secret)
        typer.echo(f"key {made.key.id} · {_grants_text(made.key)}", err=True)
        typer.echo("keep it: it is not shown again", err=True)


@app.command("list")
def list_(
    tenant: OfTenant = None,
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
        typer.echo("no keys: the HTTP API is open to every user of this machine, and to no other machine", err=True)


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as batchwright key list shows it.")],
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Revoke a key; the next request with it is refused."""

    async def go() -> ApiKey:
        async with client(database_url, config) as batchwright:
            return await batchwright.keys.revoke(_parse_key_id(id))

    key = run(go())
    if json:
        print_json(_as_dict(key))
    else:
        typer.echo(f"key {key.id} ({key.name}) was revoked")


def _parse_key_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError as error:
        raise InvalidInput(f"{text[:100]!r} is not the id of a key; see: batchwright key list", param="id") from error


def _print(keys: list[ApiKey]) -> None:
    print_table(
        {
            "id": [Text(str(key.id)) for key in keys],
            "key": [Text(f"{key.hint}…") for key in keys],
            "state": [Text(_state_text(key)) for key in keys],
            "last used": [Text(_used_text(key)) for key in keys],
            "scopes": [Text(" ".join(key.scopes)) for key in keys],
            "tenant": [Text(key.tenant) for key in keys],
            "name": [Text(key.name) for key in keys],
        },
        elastic=("tenant", "name"),
    )


def _used_text(key: ApiKey) -> str:
    return "never" if key.last_used_at is None else f"{key.last_used_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


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
