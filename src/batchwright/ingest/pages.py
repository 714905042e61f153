"""Pages of documents: runs as a funnel by step, items with their timelines, the inbox, and money against budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from markupsafe import Markup
from starlette.responses import Response

from batchwright.api.services import service
from batchwright.engine.jobs import JobId
from batchwright.errors import InvalidInput
from batchwright.ingest.explain import explain_item, explain_run, remedy_of_parked
from batchwright.ingest.items import Cause, Wanted
from batchwright.ingest.runs import QUEUE, Run
from batchwright.ingest.services import IngestServices
from batchwright.states import ItemStatus, RunStatus
from batchwright.web.charts import bars
from batchwright.web.formats import money
from batchwright.web.pages import Finder, Link, Pages
from batchwright.web.visit import Operator, Reader, Submitter, Visit

pages = Pages(
    "documents",
    package="batchwright.ingest",
    links=[Link("Documents", "/ui/documents", order=40)],
    finders=[
        Finder(r"run_[0-9a-f]{32}", "/ui/documents/runs/{}"),
        Finder(r"item_[0-9a-f]{32}", "/ui/documents/items/{}"),
    ],
)

_RUNS_MAX = 25
_ITEMS_MAX = 50
_EVENTS_MAX = 100
_COLLECTIONS_MAX = 50
_CAUSES_MAX = 50
_GROUPS: Mapping[str, tuple[RunStatus, ...]] = {
    "open": (RunStatus.PENDING, RunStatus.RUNNING),
    "parked": (RunStatus.PARKED,),
    "completed": (RunStatus.COMPLETED, RunStatus.COMPLETED_WITH_ERRORS),
    "failed": (RunStatus.FAILED,),
    "cancelled": (RunStatus.CANCELLED,),
}


@pages.get("/ui/documents")
async def list_runs(visit: Reader, status: str | None = None, after: str | None = None) -> Response:
    app = service(visit.request, IngestServices)
    if status is not None and status not in _GROUPS:
        raise InvalidInput(f"the status {status[:40]!r} is unknown; use one of: {', '.join(_GROUPS)}")

    async def load() -> dict[str, Any]:
        statuses = None if status is None else _GROUPS[status]
        found = await app.runs.list(visit.tenant, after=after, limit=_RUNS_MAX + 1, statuses=statuses)
        shown = found[:_RUNS_MAX]
        collections = []
        if visit.tenant is not None and after is None:
            collections = await app.collections.page(visit.tenant, limit=_COLLECTIONS_MAX)
        return {
            "runs": [_shown(run) for run in shown],
            "next": shown[-1].id if len(found) > _RUNS_MAX else None,
            "collections": collections,
        }

    groups = list(_GROUPS)
    return await visit.show("documents/list.html", load, title="Documents", chosen=status, groups=groups, after=after)


@pages.get("/ui/documents/inbox")
async def show_inbox(visit: Reader) -> Response:
    app = service(visit.request, IngestServices)

    async def load() -> dict[str, Any]:
        parked = await app.runs.parked(visit.tenant, _CAUSES_MAX)
        return {
            "causes": list(await app.items.inbox(visit.tenant, limit=_CAUSES_MAX)),
            "parked": [
                (id, collection, message, open_count, remedy_of_parked(id, reason))
                for id, collection, reason, message, _, open_count, _ in parked
            ],
        }

    return await visit.show("documents/inbox.html", load, title="Inbox of documents")


@pages.get("/ui/documents/runs/{id}")
async def show_run(
    visit: Reader, id: str, status: str | None = None, cause: str | None = None, after: str | None = None
) -> Response:
    app = service(visit.request, IngestServices)
    wanted = None if status is None else [_item_status(status)]

    async def load() -> dict[str, Any]:
        run = await app.runs.get(id, tenant=visit.tenant)
        at = await app.items.funnel(run)
        items, next = await app.items.page(run.id, after=after, limit=_ITEMS_MAX, statuses=wanted, cause=cause)
        doubt = await app.runs.in_doubt(run.id)
        causes = list(await app.items.inbox(visit.tenant, run_id=run.id, limit=_CAUSES_MAX))
        return {
            "run": _shown(run),
            "funnel": draw_funnel(app.part.graph.order, run, at, causes),
            "money": _draw_money(run),
            "waits": list(await explain_run(app.part, run)),
            "in_doubt": doubt.cost if doubt is not None else Decimal(0),
            "causes": causes,
            "items": items,
            "next": next,
        }

    return await visit.show(
        "documents/run.html",
        load,
        title=f"Run {id[-8:]}",
        id=id,
        chosen=status,
        cause=cause,
        after=after,
        statuses=[one.value for one in ItemStatus],
    )


@pages.get("/ui/documents/items/{id}")
async def show_item(visit: Reader, id: str) -> Response:
    app = service(visit.request, IngestServices)

    async def load() -> dict[str, Any]:
        item = await app.items.get(id, tenant=visit.tenant)
        jobs = [JobId(job) for job in item.job_ids]
        return {
            "item": item,
            "steps": sorted(await app.items.steps(item.id), key=lambda one: _place(app, one.step)),
            "waits": list(await explain_item(app.part, item)),
            "events": await app.core.queue.events_of_many(jobs, limit=_EVENTS_MAX),
        }

    return await visit.show("documents/item.html", load, title=f"Document {id[-8:]}", id=id)


# Verbs ------------------------------------------------------------------------------------------------------------


@pages.post("/ui/documents/runs/{id}/park")
async def park_run(visit: Submitter, id: str) -> Response:
    await service(visit.request, IngestServices).submission.park(id, tenant=visit.tenant)
    return visit.go(f"/ui/documents/runs/{id}", done="Parked: steps in progress finish, and no new ones start.")


@pages.post("/ui/documents/runs/{id}/resume")
async def resume_run(visit: Submitter, id: str) -> Response:
    app = service(visit.request, IngestServices)
    budget = _read_money(await visit.field("budget"))
    await app.submission.resume(id, tenant=visit.tenant, budget=budget)
    app.core.doorbell.ring([QUEUE])
    return visit.go(f"/ui/documents/runs/{id}", done="Resumed.")


@pages.post("/ui/documents/runs/{id}/cancel")
async def cancel_run(visit: Submitter, id: str) -> Response:
    await service(visit.request, IngestServices).submission.cancel(id, tenant=visit.tenant)
    return visit.go(f"/ui/documents/runs/{id}", done="Cancelled. Documents that are done stay searchable.")


@pages.post("/ui/documents/runs/{id}/retry")
async def retry_run(visit: Submitter, id: str) -> Response:
    """Failed documents of a run, all or of one cause."""
    app = service(visit.request, IngestServices)
    wanted = Wanted(None, await visit.field("cause") or None)
    counts = await app.submission.retry(wanted, tenant=visit.tenant, run_id=id)
    if not counts and (await app.runs.get(id, tenant=visit.tenant)).status is RunStatus.FAILED:
        counts = {(await app.submission.reopen(id, tenant=visit.tenant)).id: 0}
    app.core.doorbell.ring([QUEUE] if counts else [])
    return visit.go(f"/ui/documents/runs/{id}", done=f"{sum(counts.values()):,} documents are retried.")


@pages.post("/ui/documents/items/{id}/retry")
async def retry_item(visit: Submitter, id: str) -> Response:
    app = service(visit.request, IngestServices)
    await app.submission.retry_item(id, tenant=visit.tenant)
    app.core.doorbell.ring([QUEUE])
    return visit.go(f"/ui/documents/items/{id}", done="The document is retried from the step that failed.")


@pages.post("/ui/documents/items/{id}/dismiss")
async def dismiss_item(visit: Submitter, id: str) -> Response:
    app = service(visit.request, IngestServices)
    item = await app.items.get(id, tenant=visit.tenant)
    await app.items.dismiss(visit.tenant, Wanted([item.id]))
    return visit.go(f"/ui/documents/items/{id}", done="Dismissed: it is no longer in the inbox.")


@pages.post("/ui/documents/inbox/retry")
async def retry_cause(visit: Operator) -> Response:
    app = service(visit.request, IngestServices)
    wanted = Wanted(None, await _cause(visit), only_inbox=True)
    counts = await app.submission.retry(wanted, tenant=visit.tenant, run_id=None)
    app.core.doorbell.ring([QUEUE] if counts else [])
    return visit.go("/ui/documents/inbox", done=f"{sum(counts.values()):,} documents are retried.")


@pages.post("/ui/documents/inbox/dismiss")
async def dismiss_cause(visit: Operator) -> Response:
    app = service(visit.request, IngestServices)
    count = await app.items.dismiss(visit.tenant, Wanted(None, await _cause(visit), only_inbox=True))
    return visit.go("/ui/documents/inbox", done=f"{count:,} documents were dismissed; they stay failed.")


# ------------------------------------------------------------------------------------------------------------------


async def _cause(visit: Visit) -> str:
    cause = await visit.field("cause")
    if not cause:
        raise InvalidInput("the form has no cause; choose one on the page", param="cause")
    return cause


def _item_status(text: str) -> ItemStatus:
    try:
        return ItemStatus(text)
    except ValueError:
        known = ", ".join(one.value for one in ItemStatus)
        raise InvalidInput(f"the status {text[:40]!r} is unknown; use one of: {known}", param="status") from None


def _read_money(text: str) -> Decimal | None:
    if not text:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise InvalidInput(f"budget {text[:40]!r} is not a number, such as 12.50", param="budget") from None
    if not value.is_finite() or not 0 < value <= 10**9:
        raise InvalidInput(f"budget {text[:40]!r} is out of range: use more than 0", param="budget")
    return value


_NO_CLOCK = ("seconds_left", "config", "sources")


def _shown(run: Run) -> dict[str, Any]:
    """The run without the fields that change with the clock: a page is redrawn only after a real change."""
    names = (*run.__dataclass_fields__, "has_ended", "item_count_open")
    return {
        **{name: getattr(run, name) for name in names if name not in _NO_CLOCK},
        "sources": run.sources[:5],
        "source_count": len(run.sources),
    }


def _place(app: IngestServices, step: str) -> int:
    order = list(app.part.graph.order)
    return order.index(step) if step in order else len(order)


def draw_funnel(order: Sequence[str], run: Run, at: Mapping[str, int], causes: Sequence[Cause]) -> Markup:
    """How many documents have reached each step. A failed document has reached the step before the one that failed."""
    steps = list(dict.fromkeys(["ENQUEUED", *order, *at]))
    ended = run.item_count_done + run.item_count_unchanged
    stopped = dict(at)
    for cause in causes:
        if cause.step in steps[1:]:
            before = steps[steps.index(cause.step) - 1]
            stopped[before] = stopped.get(before, 0) + cause.count
    reached, rows = ended, list[tuple[str, float]]()
    for step in reversed(steps):
        reached += stopped.get(step, 0)
        rows.append((step.replace("_", " ").capitalize(), float(reached)))
    rows.reverse()
    return bars([*rows, ("Done", float(ended))], label="Documents that have reached each step")


def _draw_money(run: Run) -> Markup | None:
    """What was spent and reserved, and the budget; None without a budget."""
    if run.budget is None:
        return None
    rows = {"Spent": run.spent, "Reserved": run.reserved, "Budget": run.budget}
    words = {name: money(value) for name, value in rows.items()}
    return bars([(name, float(value)) for name, value in rows.items()], label="Money against the budget", words=words)
