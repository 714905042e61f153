"""What needs attention, and the current activity."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import Query
from markupsafe import Markup
from starlette.responses import Response

from batchwright.engine.samples import DAY, HOUR, Point
from batchwright.engine.views import QueueView
from batchwright.inference.spending import Spent
from batchwright.web import charts
from batchwright.web.charts import Series
from batchwright.web.formats import money
from batchwright.web.pages import Link, Pages
from batchwright.web.visit import Reader, Visit

pages = Pages("overview", package="batchwright.web", links=[Link("Overview", "/ui", group="", order=0)])

_CAUSES_SHOWN = 8
_QUEUES_SHOWN = 8
_MODELS_SHOWN = 8
Span = Literal["hour", "day"]
_PERIODS = {"hour": HOUR, "day": DAY}


@pages.get("/ui")
async def overview(visit: Reader, span: Annotated[Span, Query()] = "hour") -> Response:
    """The tenant's overview; admins also see the workers, and figures of all processes."""
    is_admin = visit.may("admin")

    async def load() -> dict[str, Any]:
        core, tenant = visit.services.core, visit.tenant
        everywhere = is_admin and "tenant" not in visit.request.query_params
        groups, concerns, rest = await asyncio.gather(  # three at a time: other pages need connections too
            core.inbox(tenant=tenant, limit=100), core.attention(None if everywhere else tenant), load_rest()
        )
        return {
            "concerns": concerns,
            "failed": sum(group.count for group in groups),
            "causes": groups[:_CAUSES_SHOWN],
            **rest,
        }

    async def load_rest() -> dict[str, Any]:
        return {
            "queues": await _queues(visit),
            "money": _money_chart(await visit.services.core.spent_today(visit.tenant)),
            "panels": await _panels(visit),
            **(await _machine(visit, span) if is_admin else {"figures": None, "workers": None, "rates": None}),
        }

    return await visit.show("overview.html", load, title="Overview", span=span, vary=is_admin)


async def _queues(visit: Visit) -> list[QueueView]:
    views = visit.services.core.views
    if visit.tenant is None or visit.may("admin"):
        found = await views.queues(limit=1000)
    else:
        found = (await views.queues_of_tenant(visit.tenant)).queues
    busy = [one for one in found if one.due or one.running or one.scheduled or one.paused_at]
    return sorted(busy, key=lambda one: (-one.due, -one.running, one.name))[:_QUEUES_SHOWN]


async def _machine(visit: Visit, span: Span) -> dict[str, Any]:
    """Totals of all processes, over all tenants."""
    core = visit.services.core
    points = await core.samples.read(_PERIODS[span])
    workers = await core.views.workers()
    alive = [worker for worker in workers if worker.is_alive]
    return {
        "figures": _charts(points, span),
        "workers": {
            "alive": len(alive),
            "silent": len(workers) - len(alive),
            "slots": sum(worker.concurrency for worker in alive),
            "used": sum(worker.running for worker in alive),
        },
        "rates": _now(points),
    }


def _now(points: Sequence[Point]) -> dict[str, float] | None:
    if not points:
        return None
    last = points[-1]
    return {figure: last.rate(figure) for figure in ("jobs", "requests", "tokens", "errors")}


def _charts(points: Sequence[Point], span: Span) -> list[tuple[str, Markup]]:
    """Over the whole span, even if it began before the first sample."""
    if not points:
        return []
    over = f"over the last {span}"
    outcomes = sorted({label for point in points for label in point.rates.get("jobs", {})})
    jobs = [Series(label, [(one.at, one.rate("jobs", label)) for one in points]) for label in outcomes]
    lines = [
        ("Jobs per second", jobs, f"Jobs per second by outcome {over}", "/s"),
        ("Requests per second", _rates(points, "requests"), f"Requests to models per second {over}", "/s"),
        ("Tokens per second", _rates(points, "tokens"), f"Tokens per second {over}", "/s"),
        ("Errors per second", _rates(points, "errors"), f"Failed requests per second {over}", "/s"),
        ("Jobs due", _levels(points, "due"), f"Jobs that are due and wait {over}", ""),
        ("Oldest due job", _levels(points, "oldest_due_seconds"), f"Wait of the oldest due job {over}", "s"),
    ]
    end = points[-1].at
    period = _PERIODS[span]
    begin = end - timedelta(seconds=period.seconds * period.steps)
    return [
        (title, charts.line_chart(series, label=label, unit=unit, begin=begin, end=end))
        for title, series, label, unit in lines
    ]


def _rates(points: Sequence[Point], figure: str) -> list[Series]:
    return [Series(figure, [(one.at, one.rate(figure)) for one in points])]


def _levels(points: Sequence[Point], level: str) -> list[Series]:
    return [Series(level.replace("_", " "), [(one.at, float(one.levels.get(level) or 0.0)) for one in points])]


def _money_chart(spent: Sequence[Spent]) -> Markup | None:
    by_model: dict[str, float] = {}
    for one in spent:
        by_model[one.model] = by_model.get(one.model, 0.0) + float(one.sums.cost)
    rows = sorted(((model, cost) for model, cost in by_model.items() if cost), key=lambda row: -row[1])[:_MODELS_SHOWN]
    if not rows:
        return None
    return charts.bars(rows, label="Cost today by model (UTC)", words={model: money(cost) for model, cost in rows})


async def _panels(visit: Visit) -> list[dict[str, Any]]:
    found = []
    for panel in visit.site.panels:
        values = await panel.load(visit)
        if values is not None:
            found.append({"title": panel.title, "template": panel.template, "href": panel.href, "panel": values})
    return found
