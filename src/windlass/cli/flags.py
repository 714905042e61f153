"""Flags that several commands share, and how they become settings and a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from windlass.app import AsyncWindlass
from windlass.db.check import describe
from windlass.settings import Settings, load_settings
from windlass.telemetry.logs import configure_logs

T = TypeVar("T")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="A PostgreSQL 15 or newer; without it (or WINDLASS_DATABASE_URL) the embedded one.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The settings; by default windlass.toml.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobIdText = Annotated[str, typer.Argument(metavar="ID", help="The job's id.", show_default=False)]


def settings_from(database_url: str | None, config: Path | None, **worker: Any) -> Settings:
    """File, environment and these flags; a flag of None was not given. A URL that cannot be read ends here."""
    given = {name: value for name, value in worker.items() if value is not None}
    flags: dict[str, Any] = {"worker": given} if given else {}
    if database_url is not None:
        flags["database"] = {"url": database_url}
    settings = load_settings(flags, file=config)
    if settings.database.url is not None:
        describe(settings.database.url)
    return settings


@contextlib.asynccontextmanager
async def client(database_url: str | None, config: Path | None) -> AsyncIterator[AsyncWindlass]:
    settings = settings_from(database_url, config)
    configure_logs("ERROR", settings.log.form)
    async with AsyncWindlass(settings=settings) as windlass:
        yield windlass


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)
