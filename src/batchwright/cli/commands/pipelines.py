"""`batchwright pipeline …`: a root job with all its descendants."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from batchwright.app import AsyncBatchwright
from batchwright.cli.commands.jobs import fetch_newest
from batchwright.cli.commands.show import job_as_json, print_jobs
from batchwright.cli.exit_codes import exit_code
from batchwright.cli.flags import Config, DatabaseUrl, Json, OfTenant, Reason, client, run
from batchwright.cli.show import (
    COLOURS,
    as_dict,
    console,
    counts_parts,
    counts_text,
    jobs_text,
    print_facts,
    print_json,
    print_table,
    seconds,
    status_bar,
    time_text,
)
from batchwright.cli.tables import fact_lines, head_lines, table_lines
from batchwright.engine.jobs import Job, JobId, job_id
from batchwright.engine.views import JobFilter, Pipeline, WaitingOn
from batchwright.errors import DatabaseUnavailable
from batchwright.states import JOB, JobStatus

_JOBS = 50
_LOOK_SECONDS = 0.25

app = typer.Typer(no_args_is_help=True)

PipelineId = Annotated[
    str, typer.Argument(metavar="ID", help="The pipeline's id: that of its first job.", show_default=False)
]


@app.command()
def show(
    id: PipelineId,
    jobs: Annotated[int, typer.Option(min=0, max=10_000, help="Number of newest jobs to show.")] = _JOBS,
    watch: Annotated[bool, typer.Option("--watch", help="Show the pipeline live until it has ended.")] = False,
    tenant: OfTenant = None,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Show the progress of a pipeline, and its newest jobs.

    With --watch the exit code is 0 for SUCCEEDED, 1 for FAILED and 3 for CANCELLED.
    """
    pipeline_id = job_id(id)

    async def go() -> int:
        async with client(database_url, config) as batchwright:
            if watch:
                return exit_code((await _watch(batchwright, pipeline_id, tenant, json)).status)
            await _show(batchwright, pipeline_id, tenant, jobs, json)
            return 0

    raise typer.Exit(run(go()))


@app.command()
def cancel(
    id: PipelineId,
    reason: Reason = "cancelled by request",
    tenant: OfTenant = None,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Cancel all open jobs of a pipeline."""

    async def go() -> int:
        async with client(database_url, config) as batchwright:
            return await batchwright.bulk.cancel_pipeline(job_id(id), tenant=tenant, reason=reason)

    n = run(go())
    if json:
        print_json({"cancelled": n})
    else:
        typer.echo(f"cancelled {jobs_text(n)}" if n else "nothing to cancel: already ended")


async def _show(batchwright: AsyncBatchwright, id: JobId, tenant: str | None, limit: int, json: bool) -> None:
    found = await batchwright.views.pipeline(id, tenant=tenant)
    jobs = await fetch_newest(batchwright, JobFilter(pipeline_id=id, tenant=tenant), limit)
    reasons = await batchwright.views.waiting_on(jobs)
    if json:
        print_json({**_as_dict(found), "jobs": [job_as_json(job, reasons[job.id]) for job in jobs]})
    else:
        _print(found, jobs, reasons)


def _print(pipeline: Pipeline, jobs: list[Job], reasons: dict[Any, list[WaitingOn]]) -> None:
    out = console()
    print_facts(_facts(pipeline))
    out.print()
    print_table(step_columns(pipeline), elastic=("type",))
    if jobs:
        out.print()
        print_jobs(jobs, reasons)
    if pipeline.has_more:
        n = sum(pipeline.counts.values()) - 1
        typer.echo(f"it has more jobs: only {n:,} of them are counted")
    elif jobs and len(jobs) < (n := sum(pipeline.counts.values())):
        typer.echo(f"the newest {len(jobs)} of {n}; see: batchwright job list --pipeline {pipeline.id} --limit {n}")


def _facts(pipeline: Pipeline) -> list[tuple[str, Any]]:
    return [
        ("pipeline", pipeline.id),
        ("status", Text(pipeline.status, COLOURS[pipeline.status])),
        ("jobs", counts_text(pipeline.counts)),
        ("created", time_text(pipeline.created_at)),
        ("started", time_text(pipeline.started_at)),
        ("finished", time_text(pipeline.finished_at)),
        ("took", _duration_text(pipeline) if pipeline.finished_at else None),
    ]


def _duration_text(pipeline: Pipeline, now: datetime | None = None) -> str:
    return seconds(((pipeline.finished_at or now or datetime.now(UTC)) - pipeline.created_at).total_seconds())


def step_columns(pipeline: Pipeline) -> dict[str, list[Text]]:
    """A row for each type, a column for each status that a job has."""
    columns = {
        status.lower(): [Text(str(step.counts.get(status, "")), COLOURS[status]) for step in pipeline.steps]
        for status in JobStatus
        if pipeline.counts.get(status)
    }
    return {**columns, "type": [Text(step.job_type) for step in pipeline.steps]}


def _as_dict(pipeline: Pipeline) -> dict[str, Any]:
    return {**as_dict(pipeline), "steps": [as_dict(step) for step in pipeline.steps]}


# Live ---------------------------------------------------------------------------------------------------------------


async def _watch(batchwright: AsyncBatchwright, id: JobId, tenant: str | None, json: bool) -> Pipeline:
    if json:
        return await _follow(batchwright, id, tenant, lambda seen: print_json(_as_dict(seen), indent=False))
    if not sys.stdout.isatty():
        return await _follow(batchwright, id, tenant, _say)
    with Live(console=console(), auto_refresh=False) as screen:

        def draw(seen: Pipeline) -> None:
            screen.update(_draw(seen, screen.console.width), refresh=True)

        return await _follow(batchwright, id, tenant, draw, unchanged=True)


async def _follow(
    batchwright: AsyncBatchwright,
    id: JobId,
    tenant: str | None,
    on_look: Callable[[Pipeline], object],
    *,
    unchanged: bool = False,
) -> Pipeline:
    """Look several times a second, and less often if that is slow. Wait while the database is unavailable."""
    seen = await batchwright.views.pipeline(id, tenant=tenant)
    on_look(seen)
    while seen.status not in JOB.terminal:
        began = time.monotonic()
        before = seen
        try:
            seen = await batchwright.views.pipeline(id, tenant=tenant)
        except DatabaseUnavailable:
            await asyncio.sleep(_LOOK_SECONDS)
            continue
        if unchanged or seen != before:
            on_look(seen)
        await asyncio.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - began)))
    return seen


def _say(pipeline: Pipeline) -> None:
    typer.echo(f"{datetime.now(UTC):%H:%M:%S} {pipeline.status:9} {counts_text(pipeline.counts).plain}")


def _draw(pipeline: Pipeline, width: int) -> RenderableType:
    named = Text(f"{pipeline.id}  ", "bright_black").append(pipeline.status, COLOURS[pipeline.status])
    head = head_lines(Text("pipeline", "bold"), [named, Text(_duration_text(pipeline))], width)
    progress = Text("  ").append_text(status_bar(pipeline.counts, "jobs", width - 2))
    counts = fact_lines(counts_parts(pipeline.counts), width)
    steps = table_lines(step_columns(pipeline), width, elastic=("type",), indent=2)
    return Group(*head, progress, *counts, Text(), *steps)
