"""Routes besides jobs: queues, workers, operations, health and metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from batchwright.api.access import Admin, Reader
from batchwright.api.errors import documented
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import LIMIT_MAX, All, Health, QueueList, QueueName
from batchwright.api.services import services
from batchwright.db.migrate import require_current
from batchwright.engine.exposition import CONTENT_TYPE
from batchwright.engine.views import OperationView, QueueView, WorkerView
from batchwright.errors import ConfigurationError, DatabaseError, NotFound

router = APIRouter(route_class=OrjsonRoute)

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Maximum number to return.")]
WhichQueue = Annotated[QueueName, Path(description="The queue's name.")]


@router.get("/v1/queues", responses=documented(), tags=["queues"], summary="List queues and their waiting jobs")
async def list_queues(request: Request, caller: Reader, limit: Limit = 100) -> QueueList:
    """The queues in which the tenant has open jobs; with `tenant=*` all queues, with the jobs of all tenants.

    Counts are limited: for all tenants to the first 10,000 waiting jobs of each queue, and fewer if there are more than
    ten queues; for one tenant to its newest 5,000 jobs and, if it has more, also the first 1,000 of each queue.
    `has_more` means that there are other jobs, so the true numbers are at least those shown.
    """
    views = services(request).core.views
    if caller.tenant is None:
        return QueueList(data=await views.queues(limit=limit), is_complete=True)
    found = await views.queues_of_tenant(caller.tenant, limit=limit)
    return QueueList(data=found.queues, is_complete=found.is_complete)


@router.post("/v1/queues/{name:path}/pause", responses=documented(404), tags=["queues"], summary="Pause a queue")
async def pause_queue(request: Request, caller: Admin, name: WhichQueue) -> QueueView:
    """Workers claim no more jobs of the queue. Running jobs continue."""
    await services(request).core.named_queues.pause(name)
    return await _queue(request, name)


@router.post("/v1/queues/{name:path}/resume", responses=documented(404), tags=["queues"], summary="Resume a queue")
async def resume_queue(request: Request, caller: Admin, name: WhichQueue) -> QueueView:
    app = services(request)
    await app.core.named_queues.resume(name)
    app.core.doorbell.ring([name])
    return await _queue(request, name)


@router.get("/v1/workers", responses=documented(), tags=["system"], summary="Worker processes")
async def list_workers(request: Request, caller: Admin, limit: Limit = 100) -> All[WorkerView]:
    return All(data=await services(request).core.views.workers(limit=limit))


@router.get("/v1/operations", responses=documented(), tags=["system"], summary="List operations")
async def list_operations(request: Request, caller: Reader, limit: Limit = 1000) -> All[OperationView]:
    return All(data=await services(request).core.views.operations(limit=limit))


@router.get("/healthz", tags=["system"], summary="Liveness: whether this process answers")
async def healthz(request: Request) -> Health:
    return Health(status="ok", version=services(request).version)


@router.get(
    "/readyz",
    responses={503: {"model": Health, "description": "Not ready"}},
    tags=["system"],
    summary="Readiness: whether the database answers and its schema is current",
)
async def readyz(request: Request) -> Response:
    app = services(request)
    try:
        await require_current(app.core.queue.database, app.version)
    except ConfigurationError as error:
        return _unready(app.version, str(error))
    except DatabaseError:
        return _unready(app.version, "the database is unavailable")
    return JSONResponse(Health(status="ok", version=app.version).model_dump())


@router.get(
    "/metrics",
    response_class=Response,
    responses=documented(others={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}),
    tags=["system"],
    summary="Metrics for Prometheus",
)
async def metrics(request: Request, caller: Admin) -> Response:
    return Response(await services(request).exposition.render(), media_type=CONTENT_TYPE)


def _unready(version: str, detail: str) -> Response:
    return JSONResponse(Health(status="unavailable", version=version, detail=detail).model_dump(), status_code=503)


async def _queue(request: Request, name: str) -> QueueView:
    for queue in await services(request).core.views.queues(name=name):
        return queue
    raise NotFound(f"there is no queue {name!r}")
