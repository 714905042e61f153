"""`batchwright job …`: the verbs of the client, one command each."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import orjson
import typer

from batchwright.app import AsyncBatchwright
from batchwright.cli.commands import watch as live
from batchwright.cli.commands.bulk import act_on_many
from batchwright.cli.commands.show import job_as_json, print_job, print_jobs
from batchwright.cli.exit_codes import exit_code
from batchwright.cli.flags import (
    Config,
    CreatedAfter,
    CreatedBefore,
    DatabaseUrl,
    DryRun,
    JobIdText,
    Json,
    OfCode,
    OfParent,
    OfPipeline,
    OfQueue,
    OfStatus,
    OfTenant,
    OfType,
    Reason,
    Yes,
    client,
    moment,
    parse_time_span,
    run,
)
from batchwright.cli.show import as_dict, compact, jobs_text, print_json
from batchwright.durations import parse_duration
from batchwright.engine.jobs import Job, JobId, OnHeld, job_id
from batchwright.engine.views import JobFilter, WaitingOn
from batchwright.errors import InvalidInput
from batchwright.states import JobStatus

_EVENTS = 10
_LOOKS_MAX = 10
"""Maximum number of pages that are not full: for each of them 10,000 jobs were searched."""

app = typer.Typer(no_args_is_help=True)

Key = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="PART", help="A part of the exclusive key; may be repeated.", show_default=False),
]
Moment = Annotated[str | None, typer.Option(metavar="TIME", help="Earliest start, such as 2026-12-24T18:00:00+00:00.")]
Deadline = Annotated[
    str | None,
    typer.Option(metavar="TIME|DURATION", help="Fail the job if it has not ended by then, or within 1h, 2d, …"),
]


@app.command()
def submit(
    job_type: Annotated[str, typer.Argument(metavar="TYPE", help="The operation's name.", show_default=False)],
    payload: Annotated[
        str | None, typer.Option("--payload", "-p", metavar="JSON|@FILE|-", help="JSON, a file, or standard input.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Queue to use instead of the operation's own.")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=9, help="From 0 (first) to 9 (last).")] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time to wait before the job may start, such as 90s.")
    ] = None,
    run_after: Moment = None,
    deadline: Deadline = None,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="Maximum number of attempts.")] = None,
    key: Key = None,
    on_held: Annotated[OnHeld | None, typer.Option(help="What to do if the key already has open jobs.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A repeated submit with the same key returns the same job.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result and print it.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the job until it has ended.")] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Enqueue a job and print its id.

    With --wait or --watch the exit code is 0 for SUCCEEDED, 1 for FAILED and 3 for CANCELLED.
    """
    options = {
        "queue": queue,
        "priority": priority,
        "delay_seconds": parse_time_span("--delay", delay),
        "run_after": None if run_after is None else moment(run_after),
        "deadline": _parse_deadline(deadline),
        "max_attempts": max_attempts,
        "exclusive_key": key or None,
        "on_held": on_held,
        "idempotency_key": idempotency_key,
    }
    given = {name: value for name, value in options.items() if value is not None}

    async def go() -> int:
        async with client(database_url, config) as batchwright:
            id = await batchwright.enqueue(job_type, read_payload(payload), **given)
            if watch:
                return await _watch(batchwright, id, json)
            if wait:
                return await _wait(batchwright, id, json)
            _print_id(id, json)
            return 0

    raise typer.Exit(run(go()))


@app.command("list")
def list_(
    status: OfStatus = None,
    type: OfType = None,
    queue: OfQueue = None,
    pipeline: OfPipeline = None,
    parent: OfParent = None,
    code: OfCode = None,
    created_after: CreatedAfter = None,
    created_before: CreatedBefore = None,
    tenant: OfTenant = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of jobs to show.")] = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List jobs, newest first, with the reasons why jobs wait."""
    wanted = _make_filter(status, type, queue, pipeline, parent, code, created_after, created_before, tenant)

    async def go() -> tuple[list[Job], dict[UUID, list[WaitingOn]]]:
        async with client(database_url, config) as batchwright:
            jobs = await fetch_newest(batchwright, wanted, limit)
            return jobs, await batchwright.views.waiting_on(jobs)

    jobs, reasons = run(go())
    if json:
        print_json([job_as_json(job, reasons[job.id]) for job in jobs])
    elif jobs:
        print_jobs(jobs, reasons)
    else:
        typer.echo("no such jobs", err=True)


async def fetch_newest(batchwright: AsyncBatchwright, wanted: JobFilter, limit: int) -> list[Job]:
    """Up to `limit` jobs, page by page. If matching jobs are rare, stop and say how far the search went."""
    jobs: list[Job] = []
    after = None
    looks_left = _LOOKS_MAX
    while len(jobs) < limit:
        asked = min(1000, limit - len(jobs))
        page, after = await batchwright.views.page(wanted, limit=asked, after=after)
        jobs += page
        looks_left -= len(page) < asked
        if after is None:
            break
        if not looks_left:
            _print_search_limit(after.created_at)
            break
    return jobs


def _print_search_limit(looked_at: datetime) -> None:
    when = (
        looked_at + timedelta(microseconds=1)
    ).isoformat()  # other jobs may have been created in the same microsecond
    typer.echo(f"only jobs created since {when} were searched; search older ones: --created-before {when}", err=True)


def _make_filter(
    status: list[JobStatus] | None,
    type: str | None,
    queue: str | None,
    pipeline: str | None,
    parent: str | None,
    code: str | None,
    created_after: str | None,
    created_before: str | None,
    tenant: str | None,
) -> JobFilter:
    return JobFilter(
        statuses=tuple(status or ()),
        job_type=type,
        queue=queue,
        pipeline_id=None if pipeline is None else job_id(pipeline),
        parent_job_id=None if parent is None else job_id(parent),
        error_code=code,
        created_from=None if created_after is None else moment(created_after),
        created_to=None if created_before is None else moment(created_before),
        tenant=tenant,
    )


@app.command()
def show(
    id: JobIdText,
    events: Annotated[int, typer.Option(min=0, max=10_000, help="Number of recent events to show.")] = _EVENTS,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Show a job with its last events, and why it does not run."""

    async def go() -> tuple[Job, dict[JobStatus, int], list[Any], list[WaitingOn]]:
        async with client(database_url, config) as batchwright:
            found = await batchwright.get(id)
            children = await batchwright.queue.count_children(found.id)
            history = await batchwright.queue.latest_events(found.id, limit=events) if events else []
            return found, children, history, (await batchwright.views.waiting_on([found]))[found.id]

    job, children, history, reasons = run(go())
    if json:
        print_json({**job_as_json(job, reasons), "children": children, "events": history})
    else:
        print_job(job, children, history, reasons)


@app.command()
def watch(id: JobIdText, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Show a job live until it has ended.

    The exit code is 0 for SUCCEEDED, 1 for FAILED and 3 for CANCELLED. Without a terminal, events are printed as
    lines.
    """

    async def go() -> int:
        async with client(database_url, config) as batchwright:
            return await _watch(batchwright, job_id(id), json)

    raise typer.Exit(run(go()))


@app.command()
def cancel(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Jobs by id.", show_default=False)] = None,
    status: OfStatus = None,
    type: OfType = None,
    queue: OfQueue = None,
    pipeline: OfPipeline = None,
    parent: OfParent = None,
    code: OfCode = None,
    created_after: CreatedAfter = None,
    created_before: CreatedBefore = None,
    tenant: OfTenant = None,
    reason: Reason = "cancelled by request",
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Cancel jobs and all their descendants, by id or all that match. Jobs that have ended stay as they are."""
    wanted = _make_filter(status, type, queue, pipeline, parent, code, created_after, created_before, tenant)
    if _is_by_filter("cancel", bool(ids), wanted, dry_run):
        act_on_many(
            "cancel",
            wanted,
            dry_run=dry_run,
            yes=yes,
            json=json,
            database_url=database_url,
            config=config,
            reason=reason,
        )
        return

    async def go() -> int:
        async with client(database_url, config) as batchwright:
            return await batchwright.queue.cancel([job_id(id) for id in ids or ()], reason=reason)

    n = run(go())
    if json:
        print_json({"cancelled": n})
    else:
        typer.echo(f"cancelled {jobs_text(n)}" if n else "nothing to cancel: already ended")


@app.command()
def recover(id: JobIdText, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Release a job whose worker is gone: it is queued again, and its attempts count from zero."""

    async def go() -> Job:
        async with client(database_url, config) as batchwright:
            await batchwright.recover(id)
            return await batchwright.get(id)

    _print_changed(run(go()), "recovered", json)


@app.command()
def rerun(
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="A job by id.", show_default=False)] = None,
    status: OfStatus = None,
    type: OfType = None,
    queue: OfQueue = None,
    pipeline: OfPipeline = None,
    parent: OfParent = None,
    code: OfCode = None,
    created_after: CreatedAfter = None,
    created_before: CreatedBefore = None,
    tenant: OfTenant = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Rerun FAILED and CANCELLED jobs, by id or all that match.

    A parent waits again for its unsuccessful children.
    """
    wanted = _make_filter(status, type, queue, pipeline, parent, code, created_after, created_before, tenant)
    if _is_by_filter("rerun", id is not None, wanted, dry_run):
        act_on_many("rerun", wanted, dry_run=dry_run, yes=yes, json=json, database_url=database_url, config=config)
        return

    async def go() -> Job:
        async with client(database_url, config) as batchwright:
            await batchwright.rerun(str(id))
            return await batchwright.get(str(id))

    _print_changed(run(go()), "rerun", json)


def _is_by_filter(verb: str, has_ids: bool, wanted: JobFilter, dry_run: bool) -> bool:
    """Whether a filter was given instead of ids. Refuses both, and neither: that would change every job."""
    has_filter = wanted != JobFilter()
    if has_ids and (has_filter or dry_run):
        raise InvalidInput("give job ids or a filter, not both; --dry-run is only for a filter")
    if not has_ids and not has_filter:
        raise InvalidInput(
            f"no jobs are named; write batchwright job {verb} ID, or a filter such as --type NAME or --status STATUS"
        )
    return has_filter


async def _watch(batchwright: AsyncBatchwright, id: JobId, json: bool) -> int:
    return exit_code((await live.watch(batchwright, id, json=json)).status)


async def _wait(batchwright: AsyncBatchwright, id: JobId, json: bool) -> int:
    """Print the id before waiting, so that it is known if the wait is interrupted; failures are raised as errors."""
    if not json:
        _print_id(id, json)
    result = await batchwright.wait(id)
    if json:
        print_json({"id": id, "status": JobStatus.SUCCEEDED, "result": result})
    else:
        typer.echo(compact(result))
    return 0


def read_payload(text: str | None) -> Any:
    """JSON from the command line, a file, or standard input; without any, the operation's defaults."""
    if text is None:
        return {}
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the payload cannot be read from {text[1:]}: {error}", param="payload") from error
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(
            f'the payload is not JSON: {error}; write it as --payload \'{{"name": "Ada"}}\'', param="payload"
        ) from error


def _parse_deadline(text: str | None) -> datetime | timedelta | None:
    if text is None:
        return None
    if parse_duration(text) is None:
        return moment(text)
    return timedelta(seconds=parse_time_span("--deadline", text) or 0.0)


def _print_id(id: JobId, json: bool) -> None:
    if json:
        print_json({"id": id})
    else:
        typer.echo(str(id))


def _print_changed(job: Job, verb: str, json: bool) -> None:
    if json:
        print_json(as_dict(job))
    else:
        typer.echo(f"job {job.id} was {verb}: {job.status}")
