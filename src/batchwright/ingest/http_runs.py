"""Runs over documents in the HTTP API: create, watch, park, resume, cancel, retry; and estimates of future runs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from batchwright.api.access import Reader, Submitter
from batchwright.api.errors import Refusal, documented
from batchwright.api.openai import Id
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import Name, Page
from batchwright.api.services import service
from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.ingest.explain import explain_run
from batchwright.ingest.forecast import forecast
from batchwright.ingest.items import Wanted
from batchwright.ingest.runs import QUEUE, Run
from batchwright.ingest.services import IngestServices
from batchwright.ingest.views import (
    DocumentsChanged,
    DocumentsToRetry,
    EstimateView,
    From,
    FunnelStep,
    IdempotencyKey,
    RunToBe,
    RunToCancel,
    RunToPark,
    RunToResume,
    RunView,
    as_decimal,
    read_cursor,
)
from batchwright.states import RunStatus
from batchwright.telemetry.tracing import incoming, span

router = APIRouter(prefix="/v1/ingest", route_class=OrjsonRoute, tags=["ingest"])

RUN_ID = r"run_[0-9a-f]{32}"
_LIST_MAX = 100
_RUNS_PER_STEP = 10
_PAGE_CHARACTERS_MAX = 16 * 1024 * 1024
_ESTIMATE_SECONDS = 90.0
_FOUND = documented(404)
_MOVED = documented(404, 409)
Statuses = Annotated[list[RunStatus], Field(max_length=len(RunStatus))]


@router.post(
    "/runs",
    status_code=201,
    responses=documented(409, others={200: {"model": RunView, "description": "The run already existed"}}),
    summary="Read documents into a collection",
)
async def create_run(
    request: Request, response: Response, caller: Submitter, body: RunToBe, idempotency_key: IdempotencyKey = None
) -> RunView:
    """Returns at once; workers do the work. A run over documents that have not changed does nothing."""
    app = service(request, IngestServices)
    with span("create-run", parent=incoming(request.headers)) as creating:
        wanted = body.wanted(caller.own_tenant, idempotency_key=idempotency_key, traceparent=creating.traceparent)
        await _check(app, body)
        try:
            run, is_new = await app.submission.create(wanted)
        except ConfigurationError as error:
            raise _unservable(error, body) from error
        creating.set({"run.id": run.id, "tenant.id": run.tenant})
    if is_new:
        app.core.doorbell.ring([QUEUE])
    else:
        response.status_code = 200
        response.headers["Idempotent-Replayed"] = "true"
    return await _view(app, run)


@router.get("/runs", responses=documented(), summary="List runs, the newest first")
async def list_runs(
    request: Request,
    caller: Reader,
    status: Annotated[Statuses | None, Query(description="Only runs with this status; repeatable.")] = None,
    collection: Annotated[Name | None, Query(description="Only runs into this collection.")] = None,
    limit: Annotated[int, Query(ge=1, le=_LIST_MAX, description="Maximum number to return.")] = 20,
    cursor: From = None,
) -> Page[RunView]:
    """A page may have fewer runs than `limit` if they have many sources."""
    app = service(request, IngestServices)
    after, found, size = read_cursor(cursor, RUN_ID), list[Run](), 0
    while len(found) <= limit and size < _PAGE_CHARACTERS_MAX:
        wanted = min(_RUNS_PER_STEP, limit + 1 - len(found))
        step = await app.runs.list(caller.tenant, after=after, limit=wanted, statuses=status, collection=collection)
        found += step
        size += sum(len(source) for run in step for source in run.sources)
        if len(step) < wanted:
            break
        after = step[-1].id
    else:
        shown = found[:limit]
        return Page(data=[RunView.of(run) for run in shown], has_more=True, next_cursor=shown[-1].id)
    return Page(data=[RunView.of(run) for run in found], has_more=False, next_cursor=None)


@router.get("/runs/{id}", responses=_FOUND, summary="Show a run: its progress, what it costs, what it waits for")
async def get_run(request: Request, caller: Reader, id: Id) -> RunView:
    app = service(request, IngestServices)
    return await _view(app, await app.runs.get(id, tenant=caller.tenant))


@router.post("/runs/{id}/cancel", responses=_MOVED, summary="Cancel a run; documents that are done stay")
async def cancel_run(request: Request, caller: Submitter, id: Id, why: RunToCancel | None = None) -> RunView:
    app = service(request, IngestServices)
    reason = (why or RunToCancel()).reason
    return await _view(app, await app.submission.cancel(id, tenant=caller.tenant, reason=reason))


@router.post("/runs/{id}/park", responses=_MOVED, summary="Park a run: start no further steps")
async def park_run(request: Request, caller: Submitter, id: Id, why: RunToPark | None = None) -> RunView:
    """Steps in progress finish."""
    app = service(request, IngestServices)
    message = (why or RunToPark()).reason
    return await _view(app, await app.submission.park(id, tenant=caller.tenant, message=message))


@router.post("/runs/{id}/resume", responses=_MOVED, summary="Resume a parked run")
async def resume_run(request: Request, caller: Submitter, id: Id, body: RunToResume | None = None) -> RunView:
    """A run that has used up its budget needs a larger one; otherwise it is parked again."""
    app = service(request, IngestServices)
    budget = as_decimal((body or RunToResume()).budget)
    run = await app.submission.resume(id, tenant=caller.tenant, budget=budget)
    app.core.doorbell.ring([QUEUE])
    return await _view(app, run)


@router.post("/runs/{id}/retry", responses=_MOVED, summary="Retry failed and cancelled documents of a run")
async def retry_run(
    request: Request, caller: Submitter, id: Id, body: DocumentsToRetry | None = None
) -> DocumentsChanged:
    """Each document resumes at the step that failed. A run that has failed as a whole starts again."""
    app = service(request, IngestServices)
    body = body or DocumentsToRetry()
    wanted = Wanted(body.ids, body.cause)
    counts = await app.submission.retry(wanted, tenant=caller.tenant, run_id=id, anew=body.anew)
    if not counts and wanted == Wanted():
        run = await app.runs.get(id, tenant=caller.tenant)
        if run.status is RunStatus.FAILED:
            counts = {(await app.submission.reopen(id, tenant=caller.tenant)).id: 0}
    app.core.doorbell.ring([QUEUE] if counts else [])
    return DocumentsChanged(count=sum(counts.values()), runs=counts)


@router.post("/estimates", responses=documented(), summary="Estimate what a run would need; nothing is created")
async def estimate_run(request: Request, caller: Submitter, body: RunToBe) -> EstimateView:
    """Lists the sources and reads a few documents of each format, which takes up to a minute. Calls no model."""
    app = service(request, IngestServices)
    wanted = body.wanted(caller.own_tenant)
    await _check(app, body)
    if app.estimating.locked():
        raise _busy("this server is busy with other estimates; retry soon")
    async with app.estimating:
        try:
            async with asyncio.timeout(_ESTIMATE_SECONDS):
                return EstimateView.model_validate((await forecast(app.part, wanted)).document())
        except ConfigurationError as error:
            raise _unservable(error, body) from error
        except TimeoutError:
            raise _busy(
                f"the sources could not be listed and sampled within {_ESTIMATE_SECONDS:g} s; list fewer of them, or "
                "run `batchwright ingest estimate` on the server"
            ) from None


# ------------------------------------------------------------------------------------------------------------------


async def _check(app: IngestServices, body: RunToBe) -> None:
    if body.language is not None:
        await app.collections.check_language(body.language)


def _unservable(error: ConfigurationError, body: RunToBe) -> InvalidInput:
    """If the caller named a model that this server does not have, it is the caller's error."""
    named = {"embedding_model": body.embedding_model, "entities": body.entities}
    param = next((name for name, model in named.items() if model is not None and repr(model) in str(error)), None)
    return InvalidInput(str(error), param=param)


def _busy(message: str) -> Refusal:
    return Refusal(message, status=503, code="unavailable", headers={"Retry-After": "10"})


async def _view(app: IngestServices, run: Run) -> RunView:
    at = await app.items.funnel(run)
    order = list(dict.fromkeys(["ENQUEUED", *app.part.graph.order, *at]))
    return RunView.of(
        run,
        doubt=await app.runs.in_doubt(run.id),
        funnel=[FunnelStep(step=step, count=at.get(step, 0)) for step in order],
        waits=await explain_run(app.part, run),
    )
