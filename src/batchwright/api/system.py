"""What stands around the jobs: queues, workers, operations, health and metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from batchwright.api.access import Admin, Reader
from batchwright.api.errors import documented
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import LIMIT_MAX, All, Health, QueueName
from batchwright.api.services import services
from batchwright.db.migrate import require_current
from batchwright.engine.exposition import CONTENT_TYPE
from batchwright.engine.views import OperationView, QueueView, WorkerView
from batchwright.errors import ConfigurationError, DatabaseError, NotFound

router = APIRouter(route_class=OrjsonRoute)

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="At most so many.")]
WhichQueue = Annotated[QueueName, Path(description="The queue's name.")]


@router.get("/v1/queues", responses=documented(), tags=["queues"], summary="Queues, and what waits in them")
async def list_queues(request: Request, caller: Reader, limit: Limit = 100) -> All[QueueView]:
    """The queues in which the tenant has open jobs; with `tenant=*` all queues, and everybody's jobs.

    Of each queue the first 10,000 jobs that wait are looked at, for one tenant the first 1,000; `has_more` says that
    there are others, so that at least as many as shown are due or scheduled.
    """
    return All(data=await services(request).core.views.queues(tenant=caller.tenant, limit=limit))


@router.post("/v1/queues/{name:path}/pause", responses=documented(404), tags=["queues"], summary="Claim no more of it")
async def pause_queue(request: Request, caller: Admin, name: WhichQueue) -> QueueView:
    """Jobs that run already go on."""
    await services(request).core.named_queues.pause(name)
    return await _queue(request, name)


@router.post("/v1/queues/{name:path}/resume", responses=documented(404), tags=["queues"], summary="Claim from it again")
async def resume_queue(request: Request, caller: Admin, name: WhichQueue) -> QueueView:
    app = services(request)
    await app.core.named_queues.resume(name)
    app.core.doorbell.ring([name])
    return await _queue(request, name)


@router.get("/v1/workers", responses=documented(), tags=["system"], summary="Worker processes")
async def list_workers(request: Request, caller: Admin, limit: Limit = 100) -> All[WorkerView]:
    return All(data=await services(request).core.views.workers(limit=limit))


@router.get("/v1/operations", responses=documented(), tags=["system"], summary="Operations that jobs can run")
async def list_operations(request: Request, caller: Reader, limit: Limit = 1000) -> All[OperationView]:
    return All(data=await services(request).core.views.operations(limit=limit))


@router.get("/healthz", tags=["system"], summary="Whether this process answers")
async def healthz(request: Request) -> Health:
    return Health(status="ok", version=services(request).version)


@router.get(
    "/readyz",
    responses={503: {"model": Health, "description": "It cannot work now"}},
    tags=["system"],
    summary="Whether requests can be answered: the database answers, and its schema fits",
)
async def readyz(request: Request) -> Response:
    app = services(request)
    try:
        await require_current(app.core.queue.database, app.version)
    except ConfigurationError as error:
        return _unready(app.version, str(error))
    except DatabaseError:
        return _unready(app.version, "the database is away")
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
