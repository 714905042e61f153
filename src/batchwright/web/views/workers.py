"""Worker processes with their last heartbeat."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from batchwright.access.keys import Scope
from batchwright.web.pages import Link, Pages
from batchwright.web.visit import Admin

pages = Pages(
    "workers",
    package="batchwright.web",
    links=[Link("Workers", "/ui/workers", group="Engine", order=20, scope=Scope.ADMIN)],
)
_SHOWN = 60


@pages.get("/ui/workers")
async def list_workers(visit: Admin) -> Response:
    views = visit.services.core.views

    async def load() -> dict[str, Any]:
        workers = await views.workers()
        return {"workers": workers[:_SHOWN], "more": max(0, len(workers) - _SHOWN)}

    return await visit.show("workers.html", load, title="Workers")
