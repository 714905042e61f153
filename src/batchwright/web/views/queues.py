"""Queues: the numbers of their jobs, and pausing them."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from batchwright.web.pages import Link, Pages
from batchwright.web.visit import Admin, Reader

_SHOWN = 80
pages = Pages("queues", package="batchwright.web", links=[Link("Queues", "/ui/queues", group="Engine", order=10)])


@pages.get("/ui/queues")
async def list_queues(visit: Reader) -> Response:
    """For admins, all queues with the jobs of all tenants; for others, the queues with the tenant's open jobs."""
    views = visit.services.core.views
    tenant = visit.tenant
    is_all = tenant is None or (visit.may("admin") and "tenant" not in visit.request.query_params)

    async def load() -> dict[str, Any]:
        if is_all or tenant is None:
            queues, is_complete = await views.queues(), True
        else:
            queues, is_complete = await views.queues_of_tenant(tenant)
        first = sorted(queues, key=lambda one: (-one.due, -one.running, one.name))[:_SHOWN]
        return {"queues": first, "more": len(queues) - len(first), "is_complete": is_complete}

    return await visit.show("queues.html", load, title="Queues", vary=is_all, is_all=is_all)


@pages.post("/ui/queues/pause")
async def pause_queue(visit: Admin) -> Response:
    name = await visit.field("name")
    await visit.services.core.named_queues.pause(name)
    return visit.go("/ui/queues", done=f"The queue {name} is paused. Running jobs continue.")


@pages.post("/ui/queues/resume")
async def resume_queue(visit: Admin) -> Response:
    core, name = visit.services.core, await visit.field("name")
    await core.named_queues.resume(name)
    core.doorbell.ring([name])
    return visit.go("/ui/queues", done=f"The queue {name} is resumed.")
