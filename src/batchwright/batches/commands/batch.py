"""`batchwright batch …`: many requests to a model server, as one unit that can be watched, controlled and resumed."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from batchwright.app import AsyncBatchwright
from batchwright.batches.commands import check as batch_check
from batchwright.batches.commands import example as batch_example
from batchwright.batches.commands import files as batch_files
from batchwright.batches.commands import run as batch_run
from batchwright.batches.commands import submit as batch_submit
from batchwright.batches.commands.show import (
    Seen,
    as_json,
    count_failed,
    exit_code,
    look_at,
    look_at_many,
    print_batch,
    print_batches,
    progress,
)
from batchwright.batches.commands.watch import begin_view, follow
from batchwright.batches.commands.watch import watch as watch_batch
from batchwright.batches.local import finish_abandoned, work_until_ended
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch, shard_queue
from batchwright.batches.submission import IN_FLIGHT_MAX
from batchwright.cli.flags import BatchId, Config, DatabaseUrl, Json, OfTenant, open_part, run
from batchwright.cli.loop import spare_the_collector
from batchwright.cli.paging import read_pages
from batchwright.cli.show import number, print_json
from batchwright.inference.prices import Price
from batchwright.settings import Settings
from batchwright.states import BatchStatus

_LIST_PAGE = 100
Prices = Mapping[str, Price]

app = typer.Typer(no_args_is_help=True)
app.command("run")(batch_run.run_batch)
app.command("example")(batch_example.example)
app.command("check")(batch_check.check)
app.command("submit")(batch_submit.submit)

OfBatchStatus = Annotated[
    list[BatchStatus] | None,
    typer.Option("--status", case_sensitive=False, help="Only batches with this status; may be repeated."),
]


@app.command("list")
def list_(
    status: OfBatchStatus = None,
    tenant: OfTenant = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number to show.")] = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List batches, newest first."""

    async def go() -> tuple[list[Seen], Prices]:
        async with open_part(BatchesPart, database_url, config) as part:
            return await look_at_many(part, await _fetch_newest(part, tenant, status, limit)), part.settings.prices

    many, prices = run(go())
    if json:
        print_json([as_json(one, prices) for one in many])
    elif many:
        print_batches(many)
    else:
        typer.echo("no such batches", err=True)


@app.command()
def show(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Show a batch: its progress, what failed and why, its tokens and cost, and when it will be done."""

    async def go() -> tuple[Seen, Prices]:
        async with open_part(BatchesPart, database_url, config) as part:
            return await look_at(part, await part.batches.get(id, tenant=None)), part.settings.prices

    seen, prices = run(go())
    if json:
        print_json(as_json(seen, prices))
    else:
        print_batch(seen, prices)


@app.command()
def watch(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Show a batch live until it has ended.

    The exit code is 0 if every line was answered, 4 if some were not, 3 if the batch was cancelled, and 1 if it failed.
    Without a terminal, changes are printed as lines.
    """

    async def go() -> int:
        async with open_part(BatchesPart, database_url, config) as part:
            return exit_code(await watch_batch(part, id, json=json))

    raise typer.Exit(run(go()))


@app.command()
def cancel(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Cancel a batch. Its answers are kept, and requests in flight may end within `cancel_grace_seconds`.

    A batch that batchwright batch run left unfinished is ended here.
    """

    async def act(part: BatchesPart) -> Batch:
        batch = await part.batches.cancel(id, tenant=None)
        part.core.doorbell.ring([batch.queue])
        if not batch.is_private or batch.has_ended:
            return batch
        return await finish_abandoned(part, batch, functools.partial(_finish, batch.id))

    _act(act, _describe_cancelled, json, database_url, config)


@app.command()
def pause(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Pause a batch: no more requests are sent until it is resumed. Its window keeps running."""

    async def act(part: BatchesPart) -> Batch:
        return await part.batches.pause(id, tenant=None)

    _act(
        act,
        lambda batch: f"batch {batch.id} is paused at {progress(batch) or 'its beginning'}",
        json,
        database_url,
        config,
    )


@app.command()
def resume(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Resume a paused batch."""

    async def act(part: BatchesPart) -> Batch:
        batch = await part.batches.resume(id, tenant=None)
        part.core.doorbell.ring([batch.queue, *(shard_queue(batch.queue, model) for model in batch.models or ())])
        return batch

    _act(
        act,
        lambda batch: f"batch {batch.id} resumes: {progress(batch) or batch.status.value}",
        json,
        database_url,
        config,
    )


@app.command()
def priority(
    id: BatchId,
    priority: Annotated[
        int, typer.Argument(metavar="N", min=0, max=9, help="From 0 (first) to 9 (last).", show_default=False)
    ],
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Set the priority of a batch; applies to requests that no worker has taken yet."""

    async def act(part: BatchesPart) -> Batch:
        return await part.batches.set_priority(id, priority, tenant=None)

    _act(act, lambda batch: f"batch {batch.id} has priority {batch.priority}", json, database_url, config)


@app.command()
def limits(
    id: BatchId,
    max_in_flight: Annotated[
        int,
        typer.Option(
            min=0,
            max=IN_FLIGHT_MAX,
            help="Maximum number of requests in flight per model and worker process; 0 sets no limit.",
        ),
    ],
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Limit how many requests of a batch are in flight; takes effect in about a second."""
    wanted = {"max_in_flight": max_in_flight} if max_in_flight else {}

    async def act(part: BatchesPart) -> Batch:
        return await part.batches.set_limits(id, wanted, tenant=None)

    def describe(batch: Batch) -> str:
        most = batch.limits.get("max_in_flight")
        return f"batch {batch.id} has {'no limit' if most is None else f'at most {number(most)} requests in flight'}"

    _act(act, describe, json, database_url, config)


app.command("retry")(batch_submit.retry)
app.command("results")(batch_files.results)
app.command("manifest")(batch_files.manifest)
app.command("repair")(batch_files.repair)
app.command("gc")(batch_files.gc)


# ------------------------------------------------------------------------------------------------------------------


async def _finish(id: str, settings: Settings) -> Batch:
    """Run a worker with these settings until the batch has ended."""
    async with AsyncBatchwright(settings=settings) as own:
        part = own.part(BatchesPart)
        worker = own.worker()
        view = await begin_view(part, id)
        ended = await work_until_ended(worker, follow(part, view, lambda _: None), on_start=spare_the_collector)
        return ended or await part.batches.get(id, tenant=None)


async def _fetch_newest(
    part: BatchesPart, tenant: str | None, statuses: list[BatchStatus] | None, limit: int
) -> list[Batch]:
    return await read_pages(
        lambda last, n: part.batches.list(tenant, after=last.id if last else None, limit=n, statuses=statuses),
        limit,
        page=_LIST_PAGE,
    )


def _act(
    act: Callable[[BatchesPart], Awaitable[Batch]],
    describe: Callable[[Batch], str],
    json: bool,
    database_url: str | None,
    config: Path | None,
) -> None:
    """Act on a batch, and print the result."""

    async def go() -> tuple[Batch, Prices]:
        async with open_part(BatchesPart, database_url, config) as part:
            return await act(part), part.settings.prices

    batch, prices = run(go())
    if json:
        print_json(as_json(Seen(batch=batch), prices))
    else:
        typer.echo(describe(batch))


def _describe_cancelled(batch: Batch) -> str:
    state = f"batch {batch.id} is {batch.status.value}"
    if not batch.has_ended:
        return f"{state}: requests in flight may end; see: batchwright batch watch {batch.id}"
    return f"{state}: {number(batch.completed)} answers are kept, {number(count_failed(batch))} lines have none"
