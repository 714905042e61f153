"""Webhooks on the dashboard: which endpoint receives which events, and the state of deliveries."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response

from batchwright.engine.views import Cursor, JobFilter
from batchwright.states import JobStatus
from batchwright.web.pages import Link, Pages
from batchwright.web.visit import Reader
from batchwright.webhooks.part import DELIVER, QUEUE, WebhooksPart

pages = Pages(
    "webhooks", package="batchwright.webhooks", links=[Link("Webhooks", "/ui/webhooks", group="Engine", order=50)]
)
_PER_PAGE = 50


@pages.get("/ui/webhooks")
async def list_webhooks(
    visit: Reader, failed: bool = False, cursor: Annotated[str | None, Query(max_length=200)] = None
) -> Response:
    """Endpoints are shown by their host: for some receivers, the path of the address is a password."""
    core, tenant = visit.services.core, visit.tenant
    settings = core.part(WebhooksPart).settings
    shown = {name: ends for name, ends in settings.items() if tenant in (None, name)}
    statuses = (JobStatus.FAILED,) if failed else ()
    wanted = JobFilter(tenant=tenant, job_type=DELIVER, queue=QUEUE, statuses=statuses)
    after = None if cursor is None else Cursor.parse(cursor)

    async def load() -> dict[str, Any]:
        ids, next = await core.views.ids(wanted, limit=_PER_PAGE, after=after)
        return {"jobs": await core.briefs.of(ids, tenant=tenant), "next": None if next is None else str(next)}

    return await visit.show("webhooks/list.html", load, title="Webhooks", endpoints=shown, failed=failed, cursor=cursor)
