"""Flags that several commands share, and how they become settings and a client.

The modules for a client are loaded when one is opened, because not every command opens one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from batchwright.cli.process_list import hide_password
from batchwright.cli.stop import end
from batchwright.durations import DURATION_FORM, parse_duration
from batchwright.errors import InvalidInput
from batchwright.part import Part
from batchwright.states import JobStatus

if TYPE_CHECKING:
    from uuid import UUID

    from batchwright.app import AsyncBatchwright
    from batchwright.core import Core
    from batchwright.settings import Settings

P = TypeVar("P", bound=Part)
T = TypeVar("T")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="PostgreSQL 15 or newer; without it (or BATCHWRIGHT_DATABASE_URL), the embedded PostgreSQL. Pass a "
        "password by that variable or by PGPASSFILE: other users can see command lines.",
        callback=hide_password,
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
OutputFile = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="Write to this file, device or pipe; - is standard output."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist already.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; only say what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation; required without a terminal.")]
Reason = Annotated[str, typer.Option(help="Reason to keep in the history of the jobs.")]


def parse_headers(given: Sequence[str]) -> dict[str, str]:
    """Parse `NAME: VALUE`. Errors do not quote the value, because it may be secret."""
    headers: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition(":")
        if not separator or not value.strip():
            raise InvalidInput("a --header has no name or no value; write it like --header 'x-team: search'")
        headers[name.strip().lower()] = value.strip()
    return headers


def parse_pairs(flag: str, given: Sequence[str], example: str) -> dict[str, str]:
    """Parse `NAME=VALUE`."""
    pairs = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign:
            raise InvalidInput(f"{flag} {text!r} is not NAME=VALUE, such as {example}", param=flag.lstrip("-"))
        pairs[name] = value
    return pairs


def parse_time_span(
    flag: str, text: str | None, *, least: str = "0s", most: str = "3650d", unit_seconds: float = 1.0
) -> float | None:
    """Seconds of a duration such as 90s, 5m, 1h or 2d; a bare number is a number of units, by default of seconds."""
    if text is None:
        return None
    found = parse_duration(text, unit_seconds=unit_seconds)
    param = flag.lstrip("-").replace("-", "_")
    if found is None:
        raise InvalidInput(f"{flag} {text!r} is not a duration: {DURATION_FORM}", param=param)
    if not (parse_duration(least) or 0.0) <= found <= (parse_duration(most) or 0.0):
        raise InvalidInput(f"{flag} {text} is out of range: use {least} to {most}", param=param)
    return found


def check_length(flag: str, text: str | None, most: int) -> None:
    if text is not None and not 0 < len(text) <= most:
        raise InvalidInput(f"{flag} has {len(text)} characters; use 1 to {most}")


async def warn_if_no_worker(core: Core, job_id: UUID, work: str) -> None:
    """Warn if no live worker would run this job. It is not an error, because a worker may start later."""
    from batchwright.engine.jobs import JobId

    reasons = await core.views.waiting_on([await core.queue.get(JobId(job_id))])
    if not any(one.reason == "no_worker" for of_job in reasons.values() for one in of_job):
        return
    if work == "batches" and not core.settings.has_gateways:
        remedy = "start one with a model server: batchwright up --url http://127.0.0.1:8000, or configure one as "
        remedy += "global_inference_gateway.url in batchwright.toml"
    else:
        remedy = "start one: batchwright up, or batchwright worker"
    typer.echo(f"no live worker runs {work}; {remedy}", err=True)


def settings_from(
    database_url: str | None,
    config: Path | None,
    *,
    defaults: Mapping[str, Any] | None = None,
    **parts: Mapping[str, Any],
) -> Settings:
    """Settings from the file, the environment and these flags, of which None means not given.

    `defaults` apply to settings that neither the file nor the environment sets. A database URL that cannot be read is
    refused here.
    """
    from batchwright.settings import load_settings

    flags: dict[str, Any] = {}
    for part, values in {"database": {"url": database_url}, **parts}.items():
        if given := {name: value for name, value in values.items() if value is not None}:
            flags[part] = given
    settings = load_settings(flags, file=config, defaults=defaults)
    for url in (settings.database.url, settings.database.lease_url):
        if url is not None:
            from batchwright.db.check import describe

            describe(url)
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
    """One part of a new client; its `core` has everything else."""
    async with client(database_url, config) as batchwright:
        yield batchwright.part(kind)


def on_part(
    kind: type[P],
    act: Callable[[P], Coroutine[Any, Any, T]],
    tell: Callable[[T], int],
    database_url: str | None,
    config: Path | None,
) -> NoReturn:
    """A command that uses the store. `tell` prints the result and returns the exit code."""

    async def go() -> tuple[T, Settings]:
        async with open_part(kind, database_url, config) as part:
            return await act(part), part.core.settings

    found, settings = run(go())
    end(tell(found), settings)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def moment(text: str) -> datetime:
    """Parse a time with its time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is not a time; write 2026-12-24T18:00:00+00:00") from error
    if found.tzinfo is None:
        raise InvalidInput(f"{text!r} has no time zone; write 2026-12-24T18:00:00+00:00")
    return found
