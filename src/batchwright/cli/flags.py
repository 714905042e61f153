"""Flags that several commands share, and how they become settings and a client.

What a client needs is loaded when one is opened: not every command opens one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from batchwright.errors import InvalidInput
from batchwright.part import Part
from batchwright.states import JobStatus

if TYPE_CHECKING:
    from batchwright.app import AsyncBatchwright
    from batchwright.settings import Settings

P = TypeVar("P", bound=Part)
T = TypeVar("T")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="PostgreSQL 15 or newer; without it (or BATCHWRIGHT_DATABASE_URL), the embedded PostgreSQL.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file; by default batchwright.toml.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TetherDescriptor = Annotated[int | None, typer.Option(hidden=True)]
JobIdText = Annotated[str, typer.Argument(metavar="ID", help="The job's id.", show_default=False)]
BatchId = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.", show_default=False)]
OfTenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant; by default all tenants.")
]
OfStatus = Annotated[
    list[JobStatus] | None,
    typer.Option(
        "--status", case_sensitive=False, help="Only jobs with this status; may be repeated.", show_default=False
    ),
]
OfType = Annotated[str | None, typer.Option("--type", metavar="NAME", help="Only jobs of this operation.")]
OfQueue = Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Only jobs of this queue.")]
OfPipeline = Annotated[str | None, typer.Option("--pipeline", metavar="ID", help="Only jobs of this pipeline.")]
OfParent = Annotated[str | None, typer.Option("--parent", metavar="ID", help="Only children of this job.")]
OfCode = Annotated[str | None, typer.Option("--code", metavar="CODE", help="Only jobs whose error has this code.")]
CreatedAfter = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only jobs created at or after this time, such as 2026-12-24T18:00:00+00:00."),
]
CreatedBefore = Annotated[str | None, typer.Option(metavar="TIME", help="Only jobs created before this time.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation; required without a terminal.")]
Reason = Annotated[str, typer.Option(help="Reason to keep in the history of the jobs.")]


def parse_headers(given: Sequence[str]) -> dict[str, str]:
    """From `NAME: VALUE`; an error does not repeat the value."""
    headers: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition(":")
        if not separator or not value.strip():
            raise InvalidInput("a --header has no name or no value; write it like --header 'x-team: search'")
        headers[name.strip().lower()] = value.strip()
    return headers


def settings_from(database_url: str | None, config: Path | None, **parts: Mapping[str, Any]) -> Settings:
    """File, environment and these flags; a flag of None was not given. A URL that cannot be read ends here."""
    from batchwright.settings import load_settings

    flags: dict[str, Any] = {}
    for part, values in {"database": {"url": database_url}, **parts}.items():
        if given := {name: value for name, value in values.items() if value is not None}:
            flags[part] = given
    settings = load_settings(flags, file=config)
    if settings.database.url is not None:
        from batchwright.db.check import describe

        describe(settings.database.url)
    return settings


@contextlib.asynccontextmanager
async def client(database_url: str | None, config: Path | None) -> AsyncIterator[AsyncBatchwright]:
    from batchwright.app import AsyncBatchwright
    from batchwright.telemetry.logs import configure_logs

    settings = settings_from(database_url, config)
    configure_logs("ERROR", settings.log.form)
    async with AsyncBatchwright(settings=settings) as batchwright:
        yield batchwright


@contextlib.asynccontextmanager
async def open_part(kind: type[P], database_url: str | None, config: Path | None) -> AsyncIterator[P]:
    """A part of a client; `part.core` has the rest of it."""
    async with client(database_url, config) as batchwright:
        yield batchwright.part(kind)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def moment(text: str) -> datetime:
    """A time with its zone, as flags and requests write it."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is no time; write 2026-12-24T18:00:00+00:00") from error
    if found.tzinfo is None:
        raise InvalidInput(f"{text!r} has no time zone; write 2026-12-24T18:00:00+00:00")
    return found
