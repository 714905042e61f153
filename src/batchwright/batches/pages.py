"""Pages of batches: the list, one batch with its course, and the verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from batchwright.api.services import service
from batchwright.batches.drawing import Gist, course, gist
from batchwright.batches.progress import forecast
from batchwright.batches.samples import eta_range
from batchwright.batches.services import BatchServices
from batchwright.batches.store import SHARD_QUEUE, Batch
from batchwright.batches.submission import IN_FLIGHT_MAX, check_retry, create, idempotency, retry_of
from batchwright.errors import InvalidInput
from batchwright.inference.prices import cost
from batchwright.states import BatchStatus
from batchwright.web.pages import Finder, Link, Pages, Panel
from batchwright.web.visit import Reader, Submitter, Visit

_LIST_MAX = 50
_PANEL_MAX = 8
_GROUPS: Mapping[str, tuple[BatchStatus, ...]] = {
    "running": (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING),
    **{status.value: (status,) for status in (BatchStatus.COMPLETED, BatchStatus.FAILED)},
    **{status.value: (status,) for status in (BatchStatus.EXPIRED, BatchStatus.CANCELLED)},
}
_PROBLEMS_MAX = 100


async def load_running(visit: Visit) -> dict[str, Any] | None:
    """For the overview: what runs now, with its end."""
    app = service(visit.request, BatchServices)
    found = await app.batches.list(visit.tenant, limit=_PANEL_MAX, statuses=_GROUPS["running"])
    paces = await app.batches.paces([one.id for one in found if one.in_progress_at])
    etas = {one.id: forecast(one, paces.get(one.id)) for one in found}
    return {"batches": found, "etas": etas} if found else None


pages = Pages(
    "batches",
    package="batchwright.batches",
    links=[Link("Batches", "/ui/batches", order=20)],
    finders=[Finder(r"batch_[0-9a-f]{32}", "/ui/batches/{}")],
    panels=[
        Panel("Running batches", "batches/running.html", load_running, order=10, href="/ui/batches?status=running")
    ],
)


@pages.get("/ui/batches")
async def list_batches(visit: Reader, status: str | None = None, after: str | None = None) -> Response:
    app = service(visit.request, BatchServices)
    if status is not None and status not in _GROUPS:
        raise InvalidInput(f"status {status[:40]!r} is not known; use one of: {', '.join(_GROUPS)}")

    async def load() -> dict[str, Any]:
        statuses = None if status is None else _GROUPS[status]
        found = await app.batches.list(visit.tenant, after=after, limit=_LIST_MAX + 1, statuses=statuses)
        shown = found[:_LIST_MAX]
        paces = await app.batches.paces([one.id for one in shown if one.in_progress_at and not one.has_ended])
        etas = {one.id: forecast(one, paces.get(one.id)) for one in shown}
        costs = {one.id: cost(one.usage_by_model, app.settings.prices) for one in shown}
        more = shown[-1].id if len(found) > _LIST_MAX else None
        return {"batches": shown, "etas": etas, "costs": costs, "next": more}

    groups = list(_GROUPS)
    return await visit.show("batches/list.html", load, title="Batches", chosen=status, groups=groups, after=after)


@pages.get("/ui/batches/{id}")
async def show_batch(visit: Reader, id: str) -> Response:
    app = service(visit.request, BatchServices)

    async def load() -> dict[str, Any]:
        batch = await app.batches.get(id, tenant=visit.tenant)
        samples = await app.samples.read(batch.id) if batch.in_progress_at else []
        paces = await app.batches.paces([batch.id] if batch.in_progress_at and not batch.has_ended else [])
        pace = paces.get(batch.id)
        return {
            "batch": batch,
            "ahead": forecast(batch, pace),
            "range": eta_range(batch, pace, samples),
            "rate": None if pace is None else pace.rate,
            "charts_of_batch": course(samples),
            "cost": cost(batch.usage_by_model, app.settings.prices),
            "cost_by_model": {
                model: cost({model: usage}, app.settings.prices) for model, usage in batch.usage_by_model.items()
            },
            "errors": await _error_groups(app, batch),
            "problems": _problems(batch),
        }

    return await visit.show("batches/show.html", load, title=f"Batch {id[-8:]}", id=id, problems_max=_PROBLEMS_MAX)


# Verbs ------------------------------------------------------------------------------------------------------------


@pages.post("/ui/batches/{id}/pause")
async def pause_batch(visit: Submitter, id: str) -> Response:
    await service(visit.request, BatchServices).batches.pause(id, tenant=visit.tenant)
    return visit.go(f"/ui/batches/{id}", done="Paused: requests in flight finish, and no more are sent.")


@pages.post("/ui/batches/{id}/resume")
async def resume_batch(visit: Submitter, id: str) -> Response:
    app = service(visit.request, BatchServices)
    batch = await app.batches.resume(id, tenant=visit.tenant)
    app.core.doorbell.ring([batch.queue, *(f"{SHARD_QUEUE}{model}" for model in batch.models or ())])
    return visit.go(f"/ui/batches/{id}", done="Resumed.")


@pages.post("/ui/batches/{id}/cancel")
async def cancel_batch(visit: Submitter, id: str) -> Response:
    app = service(visit.request, BatchServices)
    batch = await app.batches.cancel(id, tenant=visit.tenant)
    app.core.doorbell.ring([batch.queue])
    return visit.go(f"/ui/batches/{id}", done="Cancelling: what is answered is kept.")


@pages.post("/ui/batches/{id}/priority")
async def set_priority(visit: Submitter, id: str) -> Response:
    priority = read_number(await visit.field("priority"), "priority", 0, 9)
    assert priority is not None
    await service(visit.request, BatchServices).batches.set_priority(id, priority, tenant=visit.tenant)
    return visit.go(f"/ui/batches/{id}", done=f"The priority is {priority} now.")


@pages.post("/ui/batches/{id}/limits")
async def set_limits(visit: Submitter, id: str) -> Response:
    limit = read_number(await visit.field("max_in_flight"), "requests in flight", 1, IN_FLIGHT_MAX, is_optional=True)
    limits = {} if limit is None else {"max_in_flight": limit}
    await service(visit.request, BatchServices).batches.set_limits(id, limits, tenant=visit.tenant)
    words = "has no limit of its own now" if limit is None else f"has at most {limit:,} requests in flight per process"
    return visit.go(f"/ui/batches/{id}", done=f"The batch {words}.")


@pages.post("/ui/batches/{id}/retry")
async def retry_batch(visit: Submitter, id: str) -> Response:
    """A new batch of the lines that failed, all or with one code; the same form sent twice makes one batch."""
    app = service(visit.request, BatchServices)
    batch = await app.batches.get(id, tenant=visit.tenant)
    code = await visit.field("code")
    codes = [code] if code else None
    await check_retry(app.files, batch, codes)
    key = idempotency("ui-retry", await visit.once(), {"retry_of": batch.id, "codes": codes})
    made, _ = await create(app.batches, app.core.catalog, retry_of(batch, codes, **key), must_be_served=False)
    app.core.doorbell.ring([made.queue])
    return visit.go(f"/ui/batches/{made.id}", done="A new batch sends the failed lines again.")


def read_number(text: str, name: str, least: int, most: int, *, is_optional: bool = False) -> int | None:
    """A whole number of a form."""
    if not text and is_optional:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise InvalidInput(f"{name}: {text[:40]!r} is out of range; use {least:,} to {most:,}")
    return int(text)


async def find_batch(visit: Visit, id: str) -> tuple[BatchServices, Batch]:
    app = service(visit.request, BatchServices)
    return app, await app.batches.get(id, tenant=visit.tenant)


# ------------------------------------------------------------------------------------------------------------------


async def _error_groups(app: BatchServices, batch: Batch) -> list[tuple[str, int, str, Gist | None]]:
    """Code, count, the custom_id of one such line, and that line if it is found quickly."""
    summary: Mapping[str, Sequence[Any]] = batch.error_summary or {}
    groups = sorted(summary.items(), key=lambda one: (-int(one[1][0]), one[0]))
    examples = await app.lines.find_errors(batch, [str(sample) for _, (_, sample) in groups]) if groups else {}
    return [
        (code, int(count), str(sample), gist(examples[sample]) if sample in examples else None)
        for code, (count, sample) in groups
    ]


def _problems(batch: Batch) -> dict[str, Any] | None:
    """What the plan found wrong with the input; else what made the batch fail later on."""
    if batch.errors is not None:
        data = batch.errors.get("data", [])
        return {"data": data[:_PROBLEMS_MAX], "total": batch.errors.get("total") or len(data)}
    if batch.status is BatchStatus.FAILED and batch.stop_error is not None:
        return {"data": [batch.stop_error], "total": 1}
    return None
