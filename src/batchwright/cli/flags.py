"""Flags that several commands share, and how they become settings and a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from batchwright.app import AsyncBatchwright
from batchwright.db.check import describe
from batchwright.errors import InvalidInput
from batchwright.settings import Settings, load_settings
from batchwright.states import JobStatus
from batchwright.telemetry.logs import configure_logs

T = TypeVar("T")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="A PostgreSQL 15 or newer; without it (or BATCHWRIGHT_DATABASE_URL) the embedded one.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The settings; by default batchwright.toml.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TetherDescriptor = Annotated[int | None, typer.Option(hidden=True)]
JobIdText = Annotated[str, typer.Argument(metavar="ID", help="The job's id.", show_default=False)]
BatchId = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.", show_default=False)]
OfTenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only of this tenant; by default of all.")
]
OfStatus = Annotated[
    list[JobStatus] | None,
    typer.Option("--status", case_sensitive=False, help="Only jobs with this status; repeat it.", show_default=False),
]
OfType = Annotated[str | None, typer.Option("--type", metavar="NAME", help="Only jobs of this operation.")]
OfQueue = Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Only jobs of this queue.")]
OfPipeline = Annotated[str | None, typer.Option("--pipeline", metavar="ID", help="Only jobs of this pipeline.")]
OfParent = Annotated[str | None, typer.Option("--parent", metavar="ID", help="Only children of this job.")]
OfCode = Annotated[str | None, typer.Option("--code", metavar="CODE", help="Only jobs whose error has this code.")]
CreatedAfter = Annotated[
    str | None, typer.Option(metavar="TIME", help="Only jobs made at or after: 2026-12-24T18:00:00+00:00.")
]
CreatedBefore = Annotated[str | None, typer.Option(metavar="TIME", help="Only jobs made before this time.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; without a terminal this is needed.")]
Reason = Annotated[str, typer.Option(help="Kept in the history of the jobs.")]


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
    flags: dict[str, Any] = {}
    for part, values in {"database": {"url": database_url}, **parts}.items():
        if given := {name: value for name, value in values.items() if value is not None}:
            flags[part] = given
    settings = load_settings(flags, file=config)
    if settings.database.url is not None:
        describe(settings.database.url)
    return settings


@contextlib.asynccontextmanager
async def client(database_url: str | None, config: Path | None) -> AsyncIterator[AsyncBatchwright]:
    settings = settings_from(database_url, config)
    configure_logs("ERROR", settings.log.form)
    async with AsyncBatchwright(settings=settings) as batchwright:
        yield batchwright


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)
