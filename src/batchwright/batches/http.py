"""Batches over HTTP: OpenAI's four routes, and additional routes below each batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from batchwright.access.gate import Caller
from batchwright.api.access import Reader, Submitter
from batchwright.api.errors import Refusal, Responses, documented
from batchwright.api.jobs import event_page
from batchwright.api.openai import AfterId, Id, OpenAIRoute, unknown_cursor, unsupported
from batchwright.api.routes import Unfinished
from batchwright.api.schemas import LIMIT_MAX, EventId, EventView, Page, Text
from batchwright.api.services import Services, service, services
from batchwright.api.streams import LiveStream
from batchwright.batches.output.results import Cursor, Lines
from batchwright.batches.plan.lines import ENDPOINTS, NO_JSON
from batchwright.batches.progress import forecast
from batchwright.batches.seal import CreatorHeaders
from batchwright.batches.services import BatchServices
from batchwright.batches.store import SHARD_QUEUE, Batch, NewBatch, window_seconds
from batchwright.batches.submission import check_retry, create, idempotency, is_served, retry_of
from batchwright.batches.views import BatchLimits, BatchList, BatchToBe, BatchView, NewPriority, WhichToRetry
from batchwright.engine.jobs import JobId
from batchwright.errors import (
    BatchwrightError,
    ConfigurationError,
    Conflict,
    DatabaseError,
    DatabaseUnavailable,
    InvalidInput,
    NotFound,
    StorageUnavailable,
)
from batchwright.files.store import BATCH
from batchwright.inference.headers import headers_of_creator
from batchwright.inference.settings import NO_GATEWAY
from batchwright.telemetry.tracing import incoming, span

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/batches", route_class=OpenAIRoute, tags=["batches"])

NDJSON = "application/x-ndjson"
_LIST_MAX = 100
_PAUSE_SECONDS_MIN = 0.25
_PAUSE_SECONDS_MAX = 2.0
_FOUND = documented(404)
_MOVED = documented(404, 409)
_RESULTS: Responses = {
    200: {
        "content": {NDJSON: {"schema": {"type": "string"}}},
        "description": "Lines as they will be in the output and error files, in the order of their completion",
        "headers": {
            "x-next-cursor": {
                "description": "`after` of the next page; absent when the batch has ended and this was the last page",
                "schema": {"type": "string"},
            }
        },
    }
}

IdempotencyKey = Annotated[
    Text | None,
    Header(
        min_length=1,
        max_length=255,
        description="A repeated request with the same key and body within 30 days returns the same batch; "
        "with another body it is a conflict.",
    ),
]
Traceparent = Annotated[Text | None, Header(description="W3C trace context, passed on to workers.")]


# OpenAI's routes --------------------------------------------------------------------------------------------------


@router.post("", responses=documented(409), summary="Create a batch from an uploaded file")
async def create_batch(
    request: Request,
    response: Response,
    caller: Submitter,
    body: BatchToBe,
    idempotency_key: IdempotencyKey = None,
    traceparent: Traceparent = None,
) -> BatchView:
    """A worker checks the lines. If there are problems, the batch is `failed`, and `errors` lists them."""
    app = service(request, BatchServices)
    _check(body)
    headers = _read_headers(app, request)
    with span("create-batch", parent=incoming(request.headers)) as creating:
        new = NewBatch(
            tenant=caller.own_tenant,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            metadata=body.metadata,
            output_expires_seconds=None if (kept := body.output_expires_after) is None else kept.seconds,
            priority=body.priority,
            limits=body.limits.as_row(),
            traceparent=creating.traceparent,
            **idempotency(
                "batches", idempotency_key, {**body.model_dump(mode="json", exclude_unset=True), **headers.digest}
            ),
        )
        new = headers.seal_into(new)
        creating.set({"batch.id": new.id, "tenant.id": new.tenant, "input.file.id": new.input_file_id})
        batch = await app.batches.find_repeated(new)
        if batch is None:
            await _check_workers(app)
            await _check_input(app, new)
        return await _create(app, response, new, batch)


@router.get("", responses=documented(), summary="List batches, newest first")
async def list_batches(
    request: Request,
    caller: Reader,
    after: Annotated[AfterId | None, Query(description="The `last_id` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=_LIST_MAX)] = 20,
) -> BatchList:
    app = service(request, BatchServices)
    if after is not None:
        try:
            await app.batches.get(after, tenant=caller.tenant)
        except NotFound as error:
            raise unknown_cursor(error) from error
    found = await app.batches.list(caller.tenant, after=after, limit=limit + 1)
    shown = await _views(app, found[:limit])
    return BatchList(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(found) > limit,
    )


@router.get("/{id}", responses=_FOUND, summary="Show a batch")
async def get_batch(request: Request, caller: Reader, id: Id) -> BatchView:
    app = service(request, BatchServices)
    return await _view(app, await app.batches.get(id, tenant=caller.tenant))


@router.post("/{id}/cancel", responses=_MOVED, summary="Cancel a batch and keep its answers")
async def cancel_batch(request: Request, caller: Submitter, id: Id) -> BatchView:
    """Requests in flight get `batches.cancel_grace_seconds` to finish. A cancelled batch is returned unchanged."""
    app = service(request, BatchServices)
    try:
        batch = await app.batches.cancel(id, tenant=caller.tenant)
    except Conflict as error:
        raise Refusal(str(error), status=409) from error
    app.core.doorbell.ring([batch.queue])
    return await _view(app, batch)


# Additional routes ------------------------------------------------------------------------------------------------


@router.post("/{id}/pause", responses=_MOVED, summary="Pause a batch: send no more of its requests")
async def pause_batch(request: Request, caller: Submitter, id: Id) -> BatchView:
    """It stays `in_progress`, with `paused_at`. Requests in flight end, and its window keeps running."""
    app = service(request, BatchServices)
    return await _view(app, await app.batches.pause(id, tenant=caller.tenant))


@router.post("/{id}/resume", responses=_MOVED, summary="Resume a paused batch")
async def resume_batch(request: Request, caller: Submitter, id: Id) -> BatchView:
    app = service(request, BatchServices)
    batch = await app.batches.resume(id, tenant=caller.tenant)
    app.core.doorbell.ring([batch.queue, *(f"{SHARD_QUEUE}{model}" for model in batch.models or ())])
    return await _view(app, batch)


@router.post("/{id}/priority", responses=_MOVED, summary="Set the priority of a batch")
async def set_priority(request: Request, caller: Submitter, id: Id, body: NewPriority) -> BatchView:
    """Applies to the requests that no worker has taken yet."""
    app = service(request, BatchServices)
    return await _view(app, await app.batches.set_priority(id, body.priority, tenant=caller.tenant))


@router.post("/{id}/limits", responses=_MOVED, summary="Limit the requests in flight of a batch")
async def set_limits(request: Request, caller: Submitter, id: Id, body: BatchLimits) -> BatchView:
    """Takes effect within about a second, also on requests that wait already."""
    app = service(request, BatchServices)
    return await _view(app, await app.batches.set_limits(id, body.as_row(), tenant=caller.tenant))


@router.post("/{id}/retry", responses=_MOVED, summary="Retry the failed lines of an ended batch")
async def retry_batch(
    request: Request,
    response: Response,
    caller: Submitter,
    id: Id,
    body: WhichToRetry | None = None,
    idempotency_key: IdempotencyKey = None,
    traceparent: Traceparent = None,
) -> BatchView:
    """Creates and returns a new batch of the same input, with its own files; its `retry_of` is this one."""
    app = service(request, BatchServices)
    batch = await app.batches.get(id, tenant=caller.tenant)
    codes = (body or WhichToRetry()).codes
    headers = _read_headers(app, request)
    with span("create-batch", parent=incoming(request.headers)) as creating:
        key = idempotency("retry", idempotency_key, {"retry_of": batch.id, "codes": codes, **headers.digest})
        new = headers.seal_into(retry_of(batch, codes, traceparent=creating.traceparent, **key))
        creating.set({"batch.id": new.id, "tenant.id": new.tenant, "input.file.id": new.input_file_id})
        known = await app.batches.find_repeated(new)
        if known is None:
            await _check_workers(app)
            await check_retry(app.files, batch, codes)
        return await _create(app, response, new, known)


@router.get("/{id}/manifest", responses=_FOUND, summary="Get the manifest of an ended batch")
async def get_manifest(request: Request, caller: Reader, id: Id) -> dict[str, Any]:
    """Counts, and the SHA-256 of the input and of the result files. There is none before the end."""
    batch = await service(request, BatchServices).batches.get(id, tenant=caller.tenant)
    if batch.manifest is None:
        raise NotFound(f"the batch {id} has no manifest: it is {batch.status.value}")
    return batch.manifest


@router.get("/{id}/events", responses=_FOUND, summary="List the events of a batch")
async def list_batch_events(
    request: Request,
    caller: Reader,
    id: Id,
    after: Annotated[EventId, Query(description="Only events after this id; a page's `next_cursor`.")] = 0,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = 100,
) -> Page[EventView]:
    """The events of its shards are listed per job: `GET /v1/jobs?parent_job_id=` lists those jobs."""
    app = service(request, BatchServices)
    batch = await app.batches.get(id, tenant=caller.tenant)
    return await event_page(app.core.queue, JobId(batch.job_id), after, limit)


@router.get(
    "/{id}/results",
    response_class=Response,
    responses=documented(404, 409, 410, 429, others=_RESULTS),
    summary="Get finished lines while the batch runs",
)
async def get_results(
    request: Request,
    caller: Reader,
    id: Id,
    after: Annotated[
        Text | None, Query(max_length=40, description="Where to continue: an `x-next-cursor`, or a `cursor`.")
    ] = None,
    cursors: Annotated[
        bool, Query(description="Add a field `cursor` to each line; sent as `after`, it continues after that line.")
    ] = False,
    follow: Annotated[
        bool, Query(description="Keep the response open until the batch has ended; if it ends earlier, it was cut off.")
    ] = False,
) -> Response:
    """About 8 MB at a time, one JSON object per line, in the order in which they were finished. An hour after the end
    of the batch they are gone, and its files have everything."""
    app, server = service(request, BatchServices), services(request)
    batch = await app.batches.get(id, tenant=caller.tenant)
    lines = await _read_lines(app, batch, Cursor() if after is None else Cursor.parse(after), cursors)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if follow:
        place = server.stream_places.take(caller)
        content = _follow(app, server, caller, batch, lines, cursors)
        return LiveStream(place, content, media_type=NDJSON, headers=headers)
    if lines.has_more or not batch.has_ended:
        headers["x-next-cursor"] = str(lines.next)
    return Response(lines.data, media_type=NDJSON, headers=headers)


# ------------------------------------------------------------------------------------------------------------------


def _check(body: BatchToBe) -> None:
    if body.endpoint not in ENDPOINTS:
        raise unsupported("endpoint", body.endpoint, [*ENDPOINTS], NO_JSON.get(body.endpoint))
    try:
        window_seconds(body.completion_window)
    except InvalidInput as error:
        raise Refusal(str(error), code="invalid_value", param=error.param) from error


def _read_headers(app: BatchServices, request: Request) -> CreatorHeaders:
    """Refuse headers that cannot be encrypted: a batch without them could go to the wrong place."""
    try:
        found = CreatorHeaders(
            app.seal, headers_of_creator(request.headers.items(), app.core.settings.passthrough_headers)
        )
        found.check()
    except InvalidInput as error:
        raise Refusal(str(error), code="invalid_value", param=error.param) from error
    except ConfigurationError as error:
        names = ", ".join(sorted(app.core.settings.passthrough_headers.intersection(request.headers)))
        log.warning("a batch with the header %s was refused: %s", names, error)
        text = (
            f"The header {names} cannot be passed on to the model server, because this server has no usable key to "
            "encrypt it. Its operator sets one by batches.header_key_file; its log says more."
        )
        raise Refusal(text, code="headers_not_configured", param=names) from error
    return found


async def _check_workers(app: BatchServices) -> None:
    """If no gateway is configured here, some worker must have registered that it runs batches; it may be down now."""
    if app.core.settings.has_gateways or await is_served(app.core.catalog):
        return
    text = f"No worker runs batches: {NO_GATEWAY}\nand start a worker with that."
    raise Refusal(text, status=503, code="no_worker", headers={"Retry-After": "5"})


async def _check_input(app: BatchServices, new: NewBatch) -> None:
    try:
        file = await app.files.get(new.input_file_id, tenant=new.tenant)
    except NotFound:
        message = f"Cannot find file {new.input_file_id}, or project {new.tenant} does not have access to it."
        raise Refusal(message, param="file_id") from None
    if file.purpose != BATCH:
        message = f"Invalid purpose of file {file.id}: it is '{file.purpose}', and a batch needs '{BATCH}'."
        raise Refusal(message, code="invalid_value", param="input_file_id")


async def _create(app: BatchServices, response: Response, new: NewBatch, known: Batch | None) -> BatchView:
    """Create the batch with its job, or return the one that an earlier request with the same key created."""
    batch, is_new = known, False
    if batch is None:
        batch, is_new = await create(app.batches, app.core.catalog, new, must_be_served=False)
    if is_new:
        app.core.doorbell.ring([batch.queue])
    else:
        response.headers["Idempotent-Replayed"] = "true"
    return await _view(app, batch)


async def _view(app: BatchServices, batch: Batch) -> BatchView:
    (view,) = await _views(app, [batch])
    return view


async def _views(app: BatchServices, batches: Sequence[Batch]) -> list[BatchView]:
    paces = await app.batches.paces([batch.id for batch in batches if batch.in_progress_at and not batch.has_ended])
    return [BatchView.of(batch, forecast(batch, paces.get(batch.id)), app.settings) for batch in batches]


async def _read_lines(app: BatchServices, batch: Batch, cursor: Cursor, with_cursors: bool) -> Lines:
    try:
        if batch.segments_gone_at is None:
            return await app.results.page(batch.id, cursor, with_cursors=with_cursors)
    except NotFound:
        batch = await app.batches.get(batch.id, tenant=None)
    instead = f"its output file is {batch.output_file_id}" if batch.output_file_id else "it has no output file"
    raise Refusal(f"The lines of {batch.id} are no longer available one by one; {instead}.", status=410, code="gone")


async def _follow(
    app: BatchServices, server: Services, caller: Caller, batch: Batch, lines: Lines, with_cursors: bool
) -> AsyncGenerator[bytes, None]:
    """Lines until the batch has ended. A client that is cut off earlier must be able to tell that lines are missing."""
    server.counts.add("event_streams", 1)
    pause = _PAUSE_SECONDS_MIN
    try:
        while True:
            if lines.data:
                yield lines.data
                pause = _PAUSE_SECONDS_MIN
            if batch.has_ended and not lines.has_more:
                return
            if not lines.data or not lines.has_more:
                await asyncio.sleep(pause)
                pause = min(_PAUSE_SECONDS_MAX, pause * 2)
            if server.event_streams.is_closed or not await _is_still_open(server, caller):
                raise Unfinished
            lines = lines._replace(data=b"")
            with suppress(DatabaseUnavailable, StorageUnavailable):
                # Read the batch first: if it has ended by then, all of its lines are registered.
                latest = await app.batches.get(batch.id, tenant=caller.tenant)
                lines = await _read_lines(app, latest, lines.next, with_cursors)
                batch = latest
    except (Refusal, BatchwrightError) as error:  # a client that reconnects gets the error
        log.warning("results of %s can no longer be followed: %s", batch.id, error)
        raise Unfinished from error
    finally:
        server.counts.add("event_streams", -1)


async def _is_still_open(server: Services, caller: Caller) -> bool:
    """Whether the key is still valid; it counts as valid while the database is unavailable."""
    try:
        return await server.gate.is_still_open(caller)
    except DatabaseError:
        return True
