"""Documents of runs, and those that have failed, over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field

from batchwright.api.access import Operator, Reader, Submitter
from batchwright.api.errors import documented
from batchwright.api.openai import Id
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import EventId, EventView, Name, Page
from batchwright.api.services import service
from batchwright.engine.jobs import JobId
from batchwright.errors import Conflict, InvalidInput
from batchwright.ingest.explain import explain_item, remedy_of_parked
from batchwright.ingest.items import Item, Wanted
from batchwright.ingest.runs import QUEUE
from batchwright.ingest.services import IngestServices
from batchwright.ingest.views import (
    CauseName,
    DocumentsChanged,
    DocumentsOfInbox,
    From,
    InboxToRetry,
    ItemToRetry,
    Limit,
    read_cursor,
)
from batchwright.ingest.views_items import CauseView, InboxPage, ItemView, ParkedRun
from batchwright.states import ItemStatus

router = APIRouter(prefix="/v1/ingest", route_class=OrjsonRoute, tags=["ingest"])

ITEM_ID = r"item_[0-9a-f]{32}"
_FOUND = documented(404)
_MOVED = documented(404, 409)
Statuses = Annotated[list[ItemStatus], Field(max_length=len(ItemStatus))]


@router.get("/runs/{id}/items", responses=_FOUND, summary="List the documents of a run, in the order of their listing")
async def list_items(
    request: Request,
    caller: Reader,
    id: Id,
    status: Annotated[Statuses | None, Query(description="Only documents with this status; repeatable.")] = None,
    step: Annotated[Name | None, Query(description="Only documents with this last step, such as `FETCHED`.")] = None,
    cause: Annotated[CauseName | None, Query(description="Only documents that failed for this cause.")] = None,
    limit: Limit = 100,
    cursor: From = None,
) -> Page[ItemView]:
    app = service(request, IngestServices)
    after = read_cursor(cursor, ITEM_ID)
    run = await app.runs.get(id, tenant=caller.tenant)
    items, next = await app.items.page(run.id, after=after, limit=limit, statuses=status, step=step, cause=cause)
    return Page(data=[ItemView.of(item) for item in items], has_more=next is not None, next_cursor=next)


@router.get("/items/{id}", responses=_FOUND, summary="Show a document of a run: its steps, and what it waits for")
async def get_item(request: Request, caller: Reader, id: Id) -> ItemView:
    app = service(request, IngestServices)
    return await _view(app, await app.items.get(id, tenant=caller.tenant))


@router.get("/items/{id}/events", responses=_FOUND, summary="Show the history of a document, over all its jobs")
async def list_item_events(
    request: Request,
    caller: Reader,
    id: Id,
    after: Annotated[EventId, Query(description="Only events after this id; a page's `next_cursor`.")] = 0,
    limit: Limit = 100,
) -> Page[EventView]:
    app = service(request, IngestServices)
    item = await app.items.get(id, tenant=caller.tenant)
    jobs = [JobId(job) for job in item.job_ids]
    events = await app.core.queue.events_of_many(jobs, after=after, limit=limit + 1)
    shown, has_more = [EventView.model_validate(event) for event in events[:limit]], len(events) > limit
    return Page(data=shown, has_more=has_more, next_cursor=str(shown[-1].id) if has_more else None)


@router.post("/items/{id}/retry", responses=_MOVED, summary="Retry a failed or cancelled document")
async def retry_item(request: Request, caller: Submitter, id: Id, body: ItemToRetry | None = None) -> ItemView:
    """The document resumes at the step that failed. A run that has ended opens again until this document ends."""
    app = service(request, IngestServices)
    item = await app.submission.retry_item(id, tenant=caller.tenant, anew=(body or ItemToRetry()).anew)
    app.core.doorbell.ring([QUEUE])
    return await _view(app, item)


@router.post("/items/{id}/dismiss", responses=_MOVED, summary="Take a failed document out of the inbox")
async def dismiss_item(request: Request, caller: Submitter, id: Id) -> ItemView:
    app = service(request, IngestServices)
    item = await app.items.get(id, tenant=caller.tenant)
    if not await app.items.dismiss(caller.tenant, Wanted([item.id])):
        dismissed = item.dismissed_at is not None and item.status is ItemStatus.FAILED
        state = "already dismissed" if dismissed else f"{item.status.value}; only a FAILED one is in the inbox"
        raise Conflict(f"the item {id} is {state}")
    return await _view(app, await app.items.get(id, tenant=caller.tenant))


# The inbox --------------------------------------------------------------------------------------------------------


@router.get("/inbox", responses=_FOUND, summary="List what needs attention: failed documents by cause, and parked runs")
async def inbox(
    request: Request,
    caller: Reader,
    run: Annotated[Name | None, Query(description="Only this run.")] = None,
    limit: Limit = 100,
) -> InboxPage:
    app = service(request, IngestServices)
    if run is not None:
        await app.runs.get(run, tenant=caller.tenant)
    causes = await app.items.inbox(caller.tenant, run_id=run, limit=limit)
    parked = [
        ParkedRun.model_validate(
            {
                "run_id": id,
                "collection": collection,
                "reason": reason,
                "message": message,
                "open": open,
                "remedy": remedy_of_parked(id, reason),
            }
        )
        for id, collection, reason, message, _, open, _ in await app.runs.parked(caller.tenant, limit)
        if run in (None, id)
    ]
    return InboxPage(data=[CauseView.of(cause) for cause in causes], parked=parked)


@router.post("/inbox/retry", responses=_FOUND, summary="Retry documents of the inbox")
async def retry_of_inbox(request: Request, caller: Operator, body: InboxToRetry) -> DocumentsChanged:
    """Covers up to 1,000 runs at a time: repeat the call until it finds none."""
    app = service(request, IngestServices)
    counts = await app.submission.retry(_wanted(body), tenant=caller.tenant, run_id=body.run, anew=body.anew)
    app.core.doorbell.ring([QUEUE] if counts else [])
    return DocumentsChanged(count=sum(counts.values()), runs=counts)


@router.post("/inbox/dismiss", responses=_FOUND, summary="Take documents out of the inbox")
async def dismiss_of_inbox(request: Request, caller: Operator, body: DocumentsOfInbox) -> DocumentsChanged:
    """They stay FAILED, and can still be retried."""
    app = service(request, IngestServices)
    wanted = _wanted(body)
    if body.run is not None:
        await app.runs.get(body.run, tenant=caller.tenant)
    return DocumentsChanged(count=await app.items.dismiss(caller.tenant, wanted, run_id=body.run), runs={})


# ------------------------------------------------------------------------------------------------------------------


def _wanted(body: DocumentsOfInbox) -> Wanted:
    conditions = (body.cause, body.run, body.ids)
    if body.all == any(one is not None for one in conditions):
        raise InvalidInput("no documents selected: set cause, run or ids; or `all` without any of these", param="all")
    return Wanted(body.ids, body.cause, only_inbox=True)


async def _view(app: IngestServices, item: Item) -> ItemView:
    return ItemView.of(item, steps=await app.items.steps(item.id), waits=await explain_item(app.part, item))
