"""`batchwright schedule …`: jobs made by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import typer
from rich.table import Table
from rich.text import Text

from batchwright.cli.flags import Config, DatabaseUrl, Json, client, run
from batchwright.cli.jobs import Key, read_payload
from batchwright.cli.show import compact, console, print_json
from batchwright.engine.cron import preview as ticks_of
from batchwright.engine.jobs import DEFAULT_TENANT, JobId, NewJob, OnHeld
from batchwright.engine.schedules import Missed, Schedule

_TICKS = 5

app = typer.Typer(help="Make jobs by the clock.", no_args_is_help=True)

Cron = Annotated[
    str, typer.Option(metavar="CRON", help="Five fields: minute hour day month weekday.", show_default=False)
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name or id.", show_default=False)]
Tenant = Annotated[str, typer.Option(help="Whose schedule it is.")]
Timezone = Annotated[str, typer.Option(metavar="ZONE", help="Whose clocks the cron means: Europe/Berlin.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of its own.", show_default=False)],
    cron: Cron,
    type: Annotated[str, typer.Option(help="The operation's name.", show_default=False)],
    payload: Annotated[
        str | None, typer.Option("--payload", "-p", metavar="JSON|@FILE|-", help="JSON, a file, or standard input.")
    ] = None,
    timezone: Timezone = "UTC",
    missed: Annotated[Missed, typer.Option(help="What to do with ticks that no worker saw in time.")] = Missed.LATEST,
    tick_field: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field of the payload that gets the tick's time.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Instead of the operation's own.")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=9, help="0 is first.")] = None,
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Fail each job that has not ended by then.")
    ] = None,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="Tries before a job fails for good.")] = None,
    key: Key = None,
    on_held: Annotated[OnHeld | None, typer.Option(help="What to do when the key has open jobs.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Change the schedule of this name if there is one.")
    ] = False,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Create a schedule, or with --replace change one."""
    job = NewJob(
        type,
        read_payload(payload),
        queue=queue,
        priority=priority,
        deadline=None if deadline is None else timedelta(seconds=deadline),
        max_attempts=max_attempts,
        exclusive_key=key or None,
        on_held=on_held,
    )
    shape: dict[str, Any] = {"timezone": timezone, "missed": missed, "tick_field": tick_field}

    async def go() -> Schedule:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.create(name, cron, job, tenant=tenant, replace=replace, **shape)

    _print_moved(run(go()), "stands", json)


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 100,
    after: Annotated[str | None, typer.Option(metavar="NAME", help="Only those behind this name.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List schedules by name."""

    async def go() -> Sequence[Schedule]:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.list(tenant=tenant, limit=limit, after=after)

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
    """Fire no tick until the schedule is resumed."""

    async def go() -> Schedule:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.pause(name, tenant=tenant)

    _print_moved(run(go()), "is paused", json)


@app.command()
def resume(
    name: Name,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Go on with the next tick; those of the pause are not made up for."""

    async def go() -> Schedule:
        async with client(database_url, config) as batchwright:
            return await batchwright.schedules.resume(name, tenant=tenant)

    _print_moved(run(go()), "goes on", json)


@app.command()
def delete(
    name: Name,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Delete a schedule; the jobs that it has made stay."""

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
    """Make one job now and print its id; the ticks stay as they are."""

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
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="How many ticks.")] = _TICKS,
    json: Json = False,
) -> None:
    """Print the next ticks of a cron expression; needs no database."""
    ticks = ticks_of(cron, timezone, n)
    if json:
        print_json({"cron": cron, "timezone": timezone, "ticks": ticks})
    else:
        for tick in ticks:
            typer.echo(_both(tick, timezone))


def _print_moved(schedule: Schedule, how: str, json: bool) -> None:
    if json:
        print_json(asdict(schedule))
    elif (ticks := schedule.upcoming(1)) and schedule.paused_at is None:
        typer.echo(f"schedule {schedule.name} {how}; next: {_both(ticks[0], schedule.timezone)}")
    else:
        typer.echo(f"schedule {schedule.name} {how}" + ("; it is paused" if how == "stands" else ""))


def _print_schedules(schedules: Sequence[Schedule]) -> None:
    """Only the error may be cut; columns in which nothing stands are left out."""
    columns = {
        "name": [Text(one.name) for one in schedules],
        "cron": [Text(one.cron) for one in schedules],
        "timezone": [Text(one.timezone) for one in schedules],
        "type": [Text(one.job["operation"]) for one in schedules],
        "next": [_next(one) for one in schedules],
        "last": [Text(_utc(one.last_tick_at) or "") for one in schedules],
        "fires": [Text(str(one.fires), justify="right") for one in schedules],
        "error": [Text(one.last_error or "", "red") for one in schedules],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, cells in shown.items():
        least = None if name == "error" else max(len(name), *map(len, cells))
        table.add_column(name, min_width=least, no_wrap=True, overflow="ellipsis")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console().print(table)


def _print_schedule(schedule: Schedule) -> None:
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(schedule):
        facts.add_row(Text(name, "bold"), value if isinstance(value, Text) else Text(str(value)))
    for place, tick in enumerate(schedule.upcoming(_TICKS)):
        facts.add_row(Text("" if place else "next", "bold"), Text(_both(tick, schedule.timezone)))
    console().print(facts)


def _facts(schedule: Schedule) -> list[tuple[str, Any]]:
    job = schedule.job
    facts = [
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
        ("created", _utc(schedule.created_at)),
        ("last tick", _utc(schedule.last_tick_at)),
        ("last job", schedule.last_job_id),
        ("fires", schedule.fires),
        ("paused", None if schedule.paused_at is None else Text(f"since {_utc(schedule.paused_at)}", "yellow")),
        ("error", None if schedule.last_error is None else Text(schedule.last_error, "red")),
    ]
    return [(name, value) for name, value in facts if value is not None]


def _next(schedule: Schedule) -> Text:
    if schedule.paused_at is not None:
        return Text("paused", "yellow")
    return Text(_utc(schedule.next_at) or "never")


def _both(tick: datetime, timezone: str) -> str:
    """The tick in UTC, and what the clocks of its own zone show then."""
    if timezone == "UTC":
        return str(_utc(tick))
    return f"{_utc(tick)}  ({tick.astimezone(ZoneInfo(timezone)):%a %H:%M %Z})"


def _utc(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
