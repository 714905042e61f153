"""`batchwright batch …`: many requests to a model server, as one thing that can be watched, steered and resumed."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from batchwright.app import VERSION, AsyncBatchwright
from batchwright.batches.seal import PassedOn
from batchwright.batches.store import Batch, NewBatch, window_seconds
from batchwright.batches.submission import (
    IN_FLIGHT_MAX,
    check_metadata,
    check_retry,
    create,
    idempotency,
    is_served,
    retry_of,
    store_input,
)
from batchwright.cli import batch_check, batch_files, batch_run
from batchwright.cli.batch_check import Endpoint, InputFile, endpoint_of, readable
from batchwright.cli.batch_files import on_store
from batchwright.cli.batch_show import (
    Seen,
    as_json,
    exit_code,
    failed,
    number,
    print_batch,
    print_batches,
    progress,
    see,
)
from batchwright.cli.batch_watch import watch as watch_batch
from batchwright.cli.batch_work import finish_abandoned
from batchwright.cli.flags import BatchId, Config, DatabaseUrl, Json, OfTenant, client, parse_headers, run
from batchwright.cli.show import print_json
from batchwright.engine.jobs import DEFAULT_TENANT, JobId
from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.inference.headers import headers_of_creator
from batchwright.inference.settings import NO_GATEWAY
from batchwright.states import BatchStatus
from batchwright.telemetry import tracing

_LIST_PAGE = 100
_TENANT_CHARACTERS_MAX = 100
_KEY_CHARACTERS_MAX = 255

app = typer.Typer(help="Run batches of requests on a model server; look at them and steer them.", no_args_is_help=True)
app.command("run")(batch_run.run_batch)
app.command("check")(batch_check.check)

Window = Annotated[str, typer.Option(metavar="24h", help="When it must be done: any time from 1m to 30d.")]
Priority = Annotated[int, typer.Option(min=0, max=9, help="0 is first.")]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        min=1, max=IN_FLIGHT_MAX, help="Its requests in flight per model and worker process.", show_default=False
    ),
]
OfBatchStatus = Annotated[
    list[BatchStatus] | None,
    typer.Option("--status", case_sensitive=False, help="Only batches with this status; repeat it."),
]


@app.command()
def submit(
    file: InputFile,
    endpoint: Endpoint = None,
    window: Window = "24h",
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Words of your own; repeat it.", show_default=False),
    ] = None,
    priority: Priority = 5,
    max_in_flight: MaxInFlight = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME: VALUE",
            help="A header of a gateway's passthrough_headers; repeat it. A secret as NAME: env:VARIABLE or file:PATH.",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose batch it is.")] = DEFAULT_TENANT,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key gives the same batch.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show it until it has ended.")] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Hand a file of requests to the workers, and print the id of its batch.

    Workers with a model server in their configuration run it. With --wait the exit code is that of batchwright batch
    watch.
    """
    window_seconds(window)
    _check_length("--tenant", tenant, _TENANT_CHARACTERS_MAX)
    _check_length("--idempotency-key", idempotency_key, _KEY_CHARACTERS_MAX)
    values = {
        "tenant": tenant,
        "endpoint": endpoint_of(file, endpoint),
        "completion_window": window,
        "metadata": _pairs(metadata or ()),
        "priority": priority,
        "limits": {} if max_in_flight is None else {"max_in_flight": max_in_flight},
    }

    headers = parse_headers(header or ())

    async def go(batchwright: AsyncBatchwright) -> int:
        passed_on = PassedOn(batchwright.seal, _listed(batchwright, headers))
        batch = await _submitted(batchwright, file, values, idempotency_key, passed_on)
        return await _told(batchwright, batch, wait, json)

    on_store(go, lambda code: code, database_url, config)


@app.command("list")
def list_(
    status: OfBatchStatus = None,
    tenant: OfTenant = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """List batches, the newest first."""

    async def go() -> tuple[list[Seen], Any]:
        async with client(database_url, config) as batchwright:
            batches = await _newest(batchwright, tenant, status, limit)
            paces = await batchwright.batches.paces(
                [one.id for one in batches if one.in_progress_at and not one.has_ended]
            )
            return [Seen(batch=one, pace=paces.get(one.id)) for one in batches], batchwright.settings.batches.prices

    many, prices = run(go())
    if json:
        print_json([as_json(one, prices) for one in many])
    elif many:
        print_batches(many)
    else:
        typer.echo("no such batches", err=True)


@app.command()
def show(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Show a batch: how far it is, what failed and why, its tokens and cost, and when it will be done."""

    async def go() -> tuple[Seen, Any]:
        async with client(database_url, config) as batchwright:
            batch = await batchwright.batches.get(id, tenant=None)
            return await see(batchwright, batch), batchwright.settings.batches.prices

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
        async with client(database_url, config) as batchwright:
            return exit_code(await watch_batch(batchwright, id, json=json))

    raise typer.Exit(run(go()))


@app.command()
def cancel(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Cancel a batch. What is answered is kept, and requests in flight may end within `cancel_grace_seconds`.

    One that batchwright batch run has left unfinished is ended here.
    """

    async def act(batchwright: AsyncBatchwright) -> Batch:
        batch = await batchwright.batches.cancel(id, tenant=None)
        batchwright.doorbell.ring([batch.queue])
        return await finish_abandoned(batchwright, batch) if batch.is_private and not batch.has_ended else batch

    _act(act, _cancelled, json, database_url, config)


@app.command()
def pause(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Send no more requests of a batch until it is resumed; its window goes on."""

    async def act(batchwright: AsyncBatchwright) -> Batch:
        return await batchwright.batches.pause(id, tenant=None)

    _act(
        act,
        lambda batch: f"batch {batch.id} is paused at {progress(batch) or 'its beginning'}",
        json,
        database_url,
        config,
    )


@app.command()
def resume(id: BatchId, json: Json = False, database_url: DatabaseUrl = None, config: Config = None) -> None:
    """Go on with a paused batch."""

    async def act(batchwright: AsyncBatchwright) -> Batch:
        from batchwright.batches.process import shard_queue  # here, because it loads what does the work

        batch = await batchwright.batches.resume(id, tenant=None)
        batchwright.doorbell.ring([batch.queue, *(shard_queue(batch.queue, model) for model in batch.models or ())])
        return batch

    _act(
        act,
        lambda batch: f"batch {batch.id} goes on: {progress(batch) or batch.status.value}",
        json,
        database_url,
        config,
    )


@app.command()
def priority(
    id: BatchId,
    priority: Annotated[int, typer.Argument(metavar="N", min=0, max=9, help="0 is first.", show_default=False)],
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Put a batch before or behind others; counts for the requests that no worker has taken yet."""

    async def act(batchwright: AsyncBatchwright) -> Batch:
        return await batchwright.batches.set_priority(id, priority, tenant=None)

    _act(act, lambda batch: f"batch {batch.id} has priority {batch.priority}", json, database_url, config)


@app.command()
def limits(
    id: BatchId,
    max_in_flight: Annotated[
        int,
        typer.Option(
            min=0, max=IN_FLIGHT_MAX, help="Requests in flight per model and worker process; 0 sets no limit."
        ),
    ],
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Limit what a batch uses of the workers, from about a second later on."""
    wanted = {"max_in_flight": max_in_flight} if max_in_flight else {}

    async def act(batchwright: AsyncBatchwright) -> Batch:
        return await batchwright.batches.set_limits(id, wanted, tenant=None)

    def told(batch: Batch) -> str:
        most = batch.limits.get("max_in_flight")
        return f"batch {batch.id} has {'no limit' if most is None else f'at most {number(most)} requests in flight'}"

    _act(act, told, json, database_url, config)


@app.command()
def retry(
    id: BatchId,
    code: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Only lines that failed with this code; repeat it.", show_default=False),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the new batch until it has ended.")] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Ask the failed lines of an ended batch again, in a new batch with files of its own; prints its id."""

    async def go() -> int:
        async with client(database_url, config) as batchwright:
            batch = await batchwright.batches.get(id, tenant=None)
            await check_retry(batchwright.files, batch, code)
            await _require_workers(batchwright)
            return await _told(batchwright, await _created(batchwright, retry_of(batch, code)), wait, json)

    raise typer.Exit(run(go()))


app.command("results")(batch_files.results)
app.command("manifest")(batch_files.manifest)
app.command("repair")(batch_files.repair)
app.command("gc")(batch_files.gc)


# ------------------------------------------------------------------------------------------------------------------


def _listed(batchwright: AsyncBatchwright, headers: Mapping[str, str]) -> dict[str, str]:
    """A header that no gateway passes through would be dropped, so it is refused."""
    known = batchwright.settings.passthrough_headers
    if strange := sorted(headers.keys() - known):
        listed = ", ".join(sorted(known)) or "there is none"
        raise InvalidInput(
            f"--header {strange[0]} is not in passthrough_headers of any gateway ({listed}); add it there"
        )
    return headers_of_creator(_resolved(headers).items(), known)


def _resolved(headers: Mapping[str, str]) -> dict[str, str]:
    """With the values that `env:NAME` and `file:PATH` name."""
    if not headers:
        return {}
    from batchwright.inference.gateway import reference  # here, because it loads an HTTP client

    found = ((name, value, reference(name, value, os.environ)) for name, value in headers.items())
    return {name: value if key is None else key.text(0.0) or "" for name, value, key in found}


async def _submitted(
    batchwright: AsyncBatchwright, file: Path, values: dict[str, Any], key: str | None, passed_on: PassedOn
) -> Batch:
    """The batch of this key if there is one: then the file is not stored again."""
    sha256 = await asyncio.to_thread(checksum, file)
    named = idempotency("submit", key, {**values, "sha256": sha256, **passed_on.digest})
    if key is not None:
        known = await batchwright.batches.repeated(NewBatch(input_file_id="", **values, **named))
        if known is not None:
            return known
    await _require_workers(batchwright)
    limit = batchwright.settings.batches.file_bytes_max
    stored = await store_input(batchwright.files, file, tenant=values["tenant"], bytes_max=limit, sha256=sha256)
    new = NewBatch(input_file_id=stored.id, **values, **named)
    return await _created(batchwright, passed_on.sealed_into(new))


async def _created(batchwright: AsyncBatchwright, new: NewBatch) -> Batch:
    tracing.start(version=VERSION)
    with tracing.span("create-batch") as creating:
        new = replace(new, traceparent=creating.traceparent)
        batch, _ = await create(batchwright.batches, batchwright.catalog, new, must_be_served=False)
    batchwright.doorbell.ring([batch.queue])
    return batch


async def _require_workers(batchwright: AsyncBatchwright) -> None:
    """Nobody would ever run it where no gateway is configured, neither here nor with any worker so far."""
    if not batchwright.settings.has_gateways and not await is_served(batchwright.queue):
        raise ConfigurationError(
            f"no worker runs batches: {NO_GATEWAY}\nand start: batchwright up\n"
            "or run it here: batchwright batch run FILE --url http://gateway:8000"
        )


async def _warn_if_nobody_runs_it(batchwright: AsyncBatchwright, batch: Batch) -> None:
    """A worker may be on its way, so this is no error; but without one the batch only waits for its window to end."""
    if batch.has_ended:
        return
    reasons = await batchwright.views.waiting_on([await batchwright.queue.get(JobId(batch.job_id))])
    if any(one.reason == "no_worker" for of_job in reasons.values() for one in of_job):
        typer.echo(
            "no worker that runs batches is there now; start one: batchwright up, or batchwright worker", err=True
        )


def checksum(file: Path) -> str:
    with readable(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


async def _newest(
    batchwright: AsyncBatchwright, tenant: str | None, statuses: list[BatchStatus] | None, limit: int
) -> list[Batch]:
    batches: list[Batch] = []
    while len(batches) < limit:
        after = batches[-1].id if batches else None
        size = min(_LIST_PAGE, limit - len(batches))
        page = await batchwright.batches.list(tenant, after=after, limit=size, statuses=statuses)
        batches += page
        if len(page) < size:
            break
    return batches


def _pairs(texts: list[str] | tuple[()]) -> dict[str, str] | None:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise InvalidInput(f"--metadata {text!r} is not NAME=VALUE, such as project=translation", param="metadata")
        pairs[name] = value
    check_metadata(pairs)
    return pairs or None


def _check_length(flag: str, text: str | None, most: int) -> None:
    if text is not None and not 0 < len(text) <= most:
        raise InvalidInput(f"{flag} has {len(text)} characters; it may have 1 to {most}")


def _act(
    act: Callable[[AsyncBatchwright], Awaitable[Batch]],
    told: Callable[[Batch], str],
    json: bool,
    database_url: str | None,
    config: Path | None,
) -> None:
    """Do something to a batch, and say what came of it."""

    async def go() -> tuple[Batch, Any]:
        async with client(database_url, config) as batchwright:
            return await act(batchwright), batchwright.settings.batches.prices

    batch, prices = run(go())
    if json:
        print_json(as_json(Seen(batch=batch), prices))
    else:
        typer.echo(told(batch))


def _cancelled(batch: Batch) -> str:
    stand = f"batch {batch.id} is {batch.status.value}"
    if not batch.has_ended:
        return f"{stand}: requests in flight may end; see: batchwright batch watch {batch.id}"
    return f"{stand}: {number(batch.completed)} answers are kept, {number(failed(batch))} lines have none"


async def _told(batchwright: AsyncBatchwright, batch: Batch, wait: bool, json: bool) -> int:
    """Print the id at once, so that an interrupted wait is not a lost batch."""
    if not json:
        typer.echo(batch.id)
        await _warn_if_nobody_runs_it(batchwright, batch)
    elif not wait:
        print_json({"id": batch.id, "status": batch.status})
    return exit_code(await watch_batch(batchwright, batch.id, json=json)) if wait else 0
