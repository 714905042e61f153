"""`batchwright schedule …`: jobs at the times of a cron expression."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import typer
from rich.text import Text

from batchwright.cli.commands.jobs import Key, read_payload
from batchwright.cli.flags import Config, DatabaseUrl, Json, OfTenant, client, parse_time_span, run
from batchwright.cli.paging import read_pages
from batchwright.cli.show import compact, print_facts, print_json, print_table
from batchwright.engine.cron import preview as preview_ticks
from batchwright.engine.jobs import DEFAULT_TENANT, JobId, NewJob, OnHeld
from batchwright.engine.schedules import Missed, Schedule
from batchwright.errors import InvalidInput

_PAGE = 1000
_TICKS = 5

app = typer.Typer(no_args_is_help=True)

Cron = Annotated[
    str, typer.Option(metavar="CRON", help="Five fields: minute hour day month weekday.", show_default=False)
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name or id.", show_default=False)]
Tenant = Annotated[str, typer.Option(metavar="NAME", help="Tenant of the schedule.")]
Timezone = Annotated[str, typer.Option(metavar="ZONE", help="Time zone of the cron expression, such as Europe/Berlin.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Unique name of the schedule.", show_default=False)],
    cron: Cron,
    type: Annotated[str, typer.Option(help="The operation's name.", show_default=False)],
    payload: Annotated[
        str | None, typer.Option("--payload", "-p", metavar="JSON|@FILE|-", help="JSON, a file, or standard input.")
    ] = None,
    timezone: Timezone = "UTC",
    missed: Annotated[
        Missed, typer.Option(help="What to do with ticks that no worker handled in time.")
    ] = Missed.LATEST,
    tick_field: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field of the payload that receives the tick's time.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Queue to use instead of the operation's own.")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=9, help="From 0 (first) to 9 (last).")] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Fail each job that has not ended within 1h, 2d, …")
    ] = None,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="Maximum number of attempts of each job.")] = None,
    key: Key = None,
    on_held: Annotated[OnHeld | None, typer.Option(help="What to do if the key already has open jobs.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the schedule of this name if there is one.")
    ] = False,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Create a schedule, or with --replace change one."""
    seconds = parse_time_span("--deadline", deadline)
    job = NewJob(
        type,
        read_payload(payload),
        queue=queue,
        priority=priority,
        deadline=None if seconds is None else timedelta(seconds=seconds),
        max_attempts=max_attempts,
        exclusive_key=key or None,
        on_held=on_held,
    )
    shape: dict[str, Any] = {"timezone": timezone, "missed": missed, "tick_field": tick_field}

    async def go() -> Schedule:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.create(name, cron, job, tenant=tenant, replace=replace, **shape)

    _print_changed(run(go()), "was saved", json)


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of schedules to show.")] = 100,
    after: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only schedules after this name; needs --tenant.")
    ] = None,
    tenant: OfTenant = None,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List schedules by name."""
    if after is not None and tenant is None:
        raise InvalidInput("--after needs --tenant: names are unique within a tenant", param="after")

    async def go() -> Sequence[Schedule]:
        async with client(database_url, config) as batchwright:
            schedules = batchwright.schedules

            def fetch(last: Schedule | None, n: int) -> Awaitable[Sequence[Schedule]]:
                if tenant is None:
                    return schedules.list_everywhere(after=last, limit=n)
                return schedules.list(tenant=tenant, after=last.name if last else after, limit=n)

            return await read_pages(fetch, limit, page=_PAGE)

    found = run(go())
    if json:
        print_json([asdict(schedule) for schedule in found])
    elif found:
        _print_schedules(found)
    else:
        typer.echo("no schedules", err=True)


@app.command()
def show(
    name: Name,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Show a schedule with its next ticks."""

    async def go() -> Schedule:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.get(name, tenant=tenant)

    schedule = run(go())
    if json:
        print_json({**asdict(schedule), "upcoming": schedule.upcoming(_TICKS)})
    else:
        _print_schedule(schedule)


@app.command()
def pause(
    name: Name,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Pause a schedule: it creates no jobs until it is resumed."""

    async def go() -> Schedule:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.pause(name, tenant=tenant)

    _print_changed(run(go()), "is paused", json)


@app.command()
def resume(
    name: Name,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Resume a schedule with its next tick; ticks during the pause are skipped."""

    async def go() -> Schedule:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.resume(name, tenant=tenant)

    _print_changed(run(go()), "was resumed", json)


@app.command()
def delete(
    name: Name,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Delete a schedule; the jobs that it has created stay."""

    async def go() -> Schedule:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.delete(name, tenant=tenant)

    deleted = run(go())
    if json:
        print_json(asdict(deleted))
    else:
        typer.echo(f"deleted schedule {deleted.name}")


@app.command("run")
def run_(
    name: Name,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Create one job now and print its id; the next tick does not change."""

    async def go() -> JobId:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.fire_now(name, tenant=tenant)

    id = run(go())
    if json:
        print_json({"id": id})
    else:
        typer.echo(str(id))


@app.command()
def preview(
    cron: Annotated[str, typer.Argument(metavar="CRON", help="Five fields, in quotes.", show_default=False)],
    timezone: Timezone = "UTC",
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="Number of ticks to print.")] = _TICKS,
    json: Json = False,
) -> None:
    """Print the next ticks of a cron expression; needs no database."""
    ticks = preview_ticks(cron, timezone, n)
    if json:
        print_json({"cron": cron, "timezone": timezone, "ticks": ticks})
    else:
        for tick in ticks:
            typer.echo(_tick_text(tick, timezone))


def _print_changed(schedule: Schedule, how: str, json: bool) -> None:
    if json:
        print_json(asdict(schedule))
    elif (ticks := schedule.upcoming(1)) and schedule.paused_at is None:
        typer.echo(f"schedule {schedule.name} {how}; next: {_tick_text(ticks[0], schedule.timezone)}")
    else:
        typer.echo(f"schedule {schedule.name} {how}" + ("; it is paused" if how == "was saved" else ""))


def _print_schedules(schedules: Sequence[Schedule]) -> None:
    columns = {
        "name": [Text(one.name) for one in schedules],
        "next": [_next_text(one) for one in schedules],
        "last": [Text(_utc_text(one.last_tick_at) or "") for one in schedules],
        "fires": [Text(str(one.fires)) for one in schedules],
        "cron": [Text(one.cron) for one in schedules],
        "timezone": [Text(one.timezone) for one in schedules],
        "type": [Text(one.job["operation"]) for one in schedules],
        "tenant": [Text(one.tenant if one.tenant != DEFAULT_TENANT else "") for one in schedules],
        "error": [Text(one.last_error or "", "red") for one in schedules],
    }
    print_table(columns, elastic=("type", "tenant", "error"))


def _print_schedule(schedule: Schedule) -> None:
    ticks = [_tick_text(tick, schedule.timezone) for tick in schedule.upcoming(_TICKS)]
    print_facts([*_facts(schedule), *(("" if place else "next", tick) for place, tick in enumerate(ticks))])


def _facts(schedule: Schedule) -> list[tuple[str, Any]]:
    job = schedule.job
    return [
        ("schedule", schedule.name),
        ("id", schedule.id),
        ("tenant", schedule.tenant if schedule.tenant != DEFAULT_TENANT else None),
        ("cron", f"{schedule.cron}, {schedule.timezone}"),
        ("missed ticks", schedule.missed),
        ("type", job["operation"]),
        ("payload", compact(job["payload"])),
        ("tick field", schedule.tick_field),
        *((name.replace("_", " "), job[name]) for name in ("queue", "priority", "max_attempts")),
        ("key", None if job["exclusive_key"] is None else compact(job["exclusive_key"])),
        ("on held", job["on_held"]),
        ("deadline", None if job["deadline_seconds"] is None else f"{job['deadline_seconds']:g} s for each job"),
        ("created", _utc_text(schedule.created_at)),
        ("last tick", _utc_text(schedule.last_tick_at)),
        ("last job", schedule.last_job_id),
        ("fires", schedule.fires),
        ("paused", None if schedule.paused_at is None else Text(f"since {_utc_text(schedule.paused_at)}", "yellow")),
        ("error", None if schedule.last_error is None else Text(schedule.last_error, "red")),
    ]


def _next_text(schedule: Schedule) -> Text:
    if schedule.paused_at is not None:
        return Text("paused", "yellow")
    return Text(_utc_text(schedule.next_at) or "never")


def _tick_text(tick: datetime, timezone: str) -> str:
    """The tick in UTC, and in its own time zone."""
    if timezone == "UTC":
        return str(_utc_text(tick))
    return f"{_utc_text(tick)}  ({tick.astimezone(ZoneInfo(timezone)):%a %H:%M %Z})"


def _utc_text(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
