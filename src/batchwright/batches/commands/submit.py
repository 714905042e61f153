"""`batchwright batch submit` and `retry`: batches that workers run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from batchwright.app import VERSION
from batchwright.batches.commands.check import Endpoint, InputFile
from batchwright.batches.commands.show import exit_code
from batchwright.batches.commands.watch import watch
from batchwright.batches.part import BatchesPart
from batchwright.batches.plan.inspect import find_endpoint
from batchwright.batches.seal import CreatorHeaders
from batchwright.batches.store import Batch, NewBatch, window_seconds
from batchwright.batches.submission import (
    IN_FLIGHT_MAX,
    check_retry,
    create,
    idempotency,
    is_served,
    retry_of,
    store_input,
)
from batchwright.cli.flags import (
    BatchId,
    Config,
    DatabaseUrl,
    Json,
    check_length,
    on_part,
    open_part,
    parse_headers,
    parse_pairs,
    run,
    warn_if_no_worker,
)
from batchwright.cli.show import print_json
from batchwright.core import Core
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.engine.metadata import check_metadata
from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.files.local import hash_file, require_readable
from batchwright.inference.headers import headers_of_creator
from batchwright.settings import Settings
from batchwright.telemetry import tracing

_TENANT_CHARACTERS_MAX = 100
_KEY_CHARACTERS_MAX = 255

Window = Annotated[str, typer.Option(metavar="DURATION", help="Time in which the batch must be done, from 1m to 30d.")]
Priority = Annotated[int, typer.Option(min=0, max=9, help="From 0 (first) to 9 (last).")]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=IN_FLIGHT_MAX,
        help="Maximum number of its requests in flight per model and worker process.",
        show_default=False,
    ),
]


def submit(
    file: InputFile,
    endpoint: Endpoint = None,
    window: Window = "24h",
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Your own metadata; may be repeated.", show_default=False),
    ] = None,
    priority: Priority = 5,
    max_in_flight: MaxInFlight = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME: VALUE",
            help="A header of a gateway's passthrough_headers; may be repeated. "
            "A secret as NAME: env:VARIABLE or file:PATH.",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant of the batch.")] = DEFAULT_TENANT,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A repeated submit with the same key returns the same batch.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the batch until it ends.")] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Hand a file of requests to the workers, and print the id of its batch.

    Workers with a model server in their configuration run it. With --wait the exit code is that of batchwright batch
    watch.
    """
    window_seconds(window)
    check_length("--tenant", tenant, _TENANT_CHARACTERS_MAX)
    check_length("--idempotency-key", idempotency_key, _KEY_CHARACTERS_MAX)
    pairs = parse_pairs("--metadata", metadata or (), "project=translation")
    check_metadata(pairs)
    values = {
        "tenant": tenant,
        "endpoint": find_endpoint(file, endpoint),
        "completion_window": window,
        "metadata": pairs or None,
        "priority": priority,
        "limits": {} if max_in_flight is None else {"max_in_flight": max_in_flight},
    }

    headers = parse_headers(header or ())

    async def go(part: BatchesPart) -> int:
        passed_on = CreatorHeaders(part.seal, _select_headers(part.core.settings, headers))
        batch = await _submit(part, file, values, idempotency_key, passed_on)
        return await _report(part, batch, wait, json)

    on_part(BatchesPart, go, lambda code: code, database_url, config)


def retry(
    id: BatchId,
    code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE", help="Only lines that failed with this code; may be repeated.", show_default=False
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the new batch until it has ended.")] = False,
    json: Json = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Send the failed lines of an ended batch again, in a new batch with files of its own; print its id."""

    async def go() -> int:
        async with open_part(BatchesPart, database_url, config) as part:
            batch = await part.batches.get(id, tenant=None)
            await check_retry(part.files, batch, code)
            await _require_workers(part.core)
            return await _report(part, await _create(part, retry_of(batch, code)), wait, json)

    raise typer.Exit(run(go()))


def _select_headers(settings: Settings, headers: Mapping[str, str]) -> dict[str, str]:
    """A header that no gateway passes through would be dropped, so it is refused."""
    known = settings.passthrough_headers
    if strange := sorted(headers.keys() - known):
        listed = ", ".join(sorted(known)) or "there is none"
        raise InvalidInput(
            f"--header {strange[0]} is not in passthrough_headers of any gateway ({listed}); add it there"
        )
    return headers_of_creator(_resolve(headers).items(), known)


def _resolve(headers: Mapping[str, str]) -> dict[str, str]:
    """With the values that `env:NAME` and `file:PATH` name."""
    if not headers:
        return {}
    from batchwright.inference.gateway import reference  # here, because it loads an HTTP client

    found = ((name, value, reference(name, value, os.environ)) for name, value in headers.items())
    return {name: value if key is None else key.text(0.0) or "" for name, value, key in found}


async def _submit(
    part: BatchesPart, file: Path, values: dict[str, Any], key: str | None, passed_on: CreatorHeaders
) -> Batch:
    """If there is a batch of this key, return it, and do not store the file again."""
    sha256 = await asyncio.to_thread(hash_file, require_readable(file))
    named = idempotency("submit", key, {**values, "sha256": sha256, **passed_on.digest})
    if key is not None:
        known = await part.batches.find_repeated(NewBatch(input_file_id="", **values, **named))
        if known is not None:
            return known
    await _require_workers(part.core)
    limit = part.settings.file_bytes_max
    stored = await store_input(part.files, file, tenant=values["tenant"], bytes_max=limit, sha256=sha256)
    new = NewBatch(input_file_id=stored.id, **values, **named)
    return await _create(part, passed_on.seal_into(new))


async def _create(part: BatchesPart, new: NewBatch) -> Batch:
    tracing.start(version=VERSION)
    with tracing.span("create-batch") as creating:
        new = replace(new, traceparent=creating.traceparent)
        batch, _ = await create(part.batches, part.core.catalog, new, must_be_served=False)
    part.core.doorbell.ring([batch.queue])
    return batch


async def _require_workers(core: Core) -> None:
    """Refuse a batch that would wait forever: no gateway is configured here, and no worker has ever run batches."""
    if not core.settings.has_gateways and not await is_served(core.catalog):
        raise ConfigurationError(
            "no worker runs batches: no model server is configured. Name one: batchwright up --url "
            "http://127.0.0.1:8000, or global_inference_gateway.url in batchwright.toml. To run the file without "
            "workers: batchwright batch run FILE --url http://127.0.0.1:8000"
        )


async def _report(part: BatchesPart, batch: Batch, wait: bool, json: bool) -> int:
    """Print the id at once, so that an interrupted wait is not a lost batch."""
    if not json:
        typer.echo(batch.id)
        if not batch.has_ended:
            await warn_if_no_worker(part.core, batch.job_id, "batches")
    elif not wait:
        print_json({"id": batch.id, "status": batch.status})
    return exit_code(await watch(part, batch.id, json=json)) if wait else 0
