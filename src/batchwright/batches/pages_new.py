"""A new batch: drop a file, see every problem with its line, what it will cost and take, and start it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response

from batchwright.api.errors import file_too_large
from batchwright.api.services import service
from batchwright.batches.inspector import Checked
from batchwright.batches.pages import read_number
from batchwright.batches.plan.lines import ENDPOINTS, MIXED
from batchwright.batches.services import BatchServices
from batchwright.batches.store import NewBatch, window_seconds
from batchwright.batches.submission import IN_FLIGHT_MAX, create, idempotency, is_served
from batchwright.errors import BatchwrightError, Conflict, InvalidInput
from batchwright.files.http import base_name
from batchwright.files.store import BATCH, INPUT_KEPT_SECONDS, File, NewFile, discard, new_file_id, object_key, persist
from batchwright.files.views import FILENAME_CHARACTERS_MAX
from batchwright.inference.settings import NO_GATEWAY
from batchwright.web.pages import Pages
from batchwright.web.visit import Submitter, Visit

pages = Pages("batches", package="batchwright.batches")

NEW = "/ui/batches/new"
_CHUNK_BYTES = 1024 * 1024
_PROBLEMS_SHOWN_MAX = 200
_RECENT_MAX = 10


@pages.get(NEW)
async def choose_file(visit: Submitter) -> Response:
    app = service(visit.request, BatchServices)
    recent = await app.files.list(visit.caller.own_tenant, limit=_RECENT_MAX, purpose=BATCH)
    return visit.draw("batches/new.html", title="New batch", recent=recent, bytes_max=app.settings.file_bytes_max)


@pages.post(NEW)
async def take_file(visit: Submitter) -> Response:
    """Keep the file, then show what is in it: what was uploaded once need not be uploaded again."""
    app = service(visit.request, BatchServices)
    tenant = visit.caller.own_tenant
    form = await visit.form()
    upload = form.get("file")
    if not isinstance(upload, UploadFile) or not upload.filename:
        raise InvalidInput("choose a file of requests first: one JSON object per line", param="file")
    if (upload.size or 0) > app.settings.file_bytes_max:
        raise HTTPException(413, file_too_large(app.settings.file_bytes_max))
    try:
        file = await _store(visit, app, upload, tenant)
    finally:
        await form.close()
    return visit.go(f"{NEW}/{file.id}")


@pages.get(NEW + "/{file_id}")
async def check_file(visit: Submitter, file_id: str) -> Response:
    app = service(visit.request, BatchServices)
    file = await app.files.get(file_id, tenant=visit.caller.own_tenant)
    return _draw(visit, await app.inspector.check(file), {})


@pages.post(NEW + "/{file_id}")
async def start_batch(visit: Submitter, file_id: str) -> Response:
    """The batch of this form; the same form sent twice makes one batch."""
    app = service(visit.request, BatchServices)
    file = await app.files.get(file_id, tenant=visit.caller.own_tenant)
    checked = await app.inspector.check(file)
    values = {name: await visit.field(name) for name in ("window", "priority", "max_in_flight", "note")}
    if not checked.can_run:
        raise Conflict(f"{file.filename} has problems; correct them and upload it again")
    try:
        new = _new_batch(checked, values, await visit.once())
        await _require_worker(app)
    except BatchwrightError as error:
        return _draw(visit, checked, values, problem=str(error), status=400)
    batch = await app.batches.find_repeated(new)
    if batch is None:
        batch, _ = await create(app.batches, app.core.catalog, new, must_be_served=False)
        app.core.doorbell.ring([batch.queue])
    return visit.go(f"/ui/batches/{batch.id}", done="The batch has started.")


async def _store(visit: Visit, app: BatchServices, upload: UploadFile, tenant: str) -> File:
    name = base_name(upload.filename or "")[:FILENAME_CHARACTERS_MAX]
    id = new_file_id()
    stored = await app.files.store.put(object_key(id), _chunks(upload), limit=app.settings.file_bytes_max)
    new = NewFile(
        id=id,
        tenant=tenant,
        purpose=BATCH,
        filename=name,
        stored=stored,
        expires_seconds=INPUT_KEPT_SECONDS,
        idempotency_key=visit.once_of([("once", await visit.field("once")), ("name", name), ("sha256", stored.sha256)]),
    )
    try:
        file, is_new = await persist(lambda: app.files.add(new))
    except BatchwrightError:
        await discard(app.files.store, stored)
        raise
    if not is_new:
        await discard(app.files.store, stored)
    return file


async def _chunks(upload: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await upload.read(_CHUNK_BYTES):
        yield chunk


def _new_batch(checked: Checked, values: dict[str, str], key: str | None) -> NewBatch:
    assert checked.inspection is not None
    window = values["window"] or "24h"
    window_seconds(window)
    priority = read_number(values["priority"] or "5", "priority", 0, 9)
    limit = read_number(values["max_in_flight"], "requests in flight", 1, IN_FLIGHT_MAX, is_optional=True)
    body = {"file": checked.file.id, **values}
    return NewBatch(
        tenant=checked.file.tenant,
        endpoint=checked.inspection.endpoint,
        input_file_id=checked.file.id,
        completion_window=window,
        metadata={"note": values["note"][:500]} if values["note"] else None,
        priority=5 if priority is None else priority,
        limits={} if limit is None else {"max_in_flight": limit},
        **idempotency("ui", key, body),
    )


async def _require_worker(app: BatchServices) -> None:
    if not app.core.settings.has_gateways and not await is_served(app.core.catalog):
        raise Conflict(f"no worker runs batches: {NO_GATEWAY}, and start a worker with that")


def _draw(visit: Visit, checked: Checked, values: dict[str, str], **context: Any) -> Response:
    found = checked.inspection
    status = context.pop("status", 200)
    endpoints = [] if found is None else sorted(found.urls.items())
    return visit.draw(
        "batches/check.html",
        status=status,
        title="New batch",
        checked=checked,
        found=found,
        problems=[] if found is None else list(found.problems)[:_PROBLEMS_SHOWN_MAX],
        endpoints=endpoints,
        is_mixed=found is not None and found.endpoint == MIXED,
        known=sorted(ENDPOINTS),
        values={"window": "24h", "priority": "5", "max_in_flight": "", "note": "", **values},
        problem=context.get("problem"),
    )
