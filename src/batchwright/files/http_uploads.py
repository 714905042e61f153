"""Uploads over HTTP, as OpenAI's clients expect them: a large file in parts, which may be sent in parallel."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect

from batchwright.api.access import Submitter
from batchwright.api.errors import Refusal, documented, file_too_large, unknown
from batchwright.api.openai import Id, OpenAIRoute, missing, unsupported
from batchwright.api.services import service
from batchwright.errors import BatchwrightError, DatabaseUnavailable, Deadlock, InvalidInput
from batchwright.files.http import base_name, limit_size
from batchwright.files.services import FileServices
from batchwright.files.store import BATCH, INPUT_KEPT_SECONDS, discard, persist
from batchwright.files.uploads import PART_BYTES_MAX, NewUpload, new_part_id, new_upload_id, part_key
from batchwright.files.views import PURPOSES, UploadPartView, UploadToBe, UploadToComplete, UploadView
from batchwright.storage import Field, Store, Stored, form

UPLOADS = "/v1/uploads"
PART_PATH = rf"{UPLOADS}/[^/]+/parts"
PART_TOO_LARGE = f"Part is too large. The limit is {PART_BYTES_MAX} bytes."

router = APIRouter(prefix=UPLOADS, route_class=OpenAIRoute, tags=["uploads"])

_MOVED = documented(404, 409)
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["data"],
                    "properties": {
                        "data": {"type": "string", "format": "binary", "description": "The content, at most 64 MiB."},
                    },
                }
            }
        },
    }
}


@router.post("", responses=documented(), summary="Start the upload of a large file in parts")
async def create_upload(request: Request, caller: Submitter, body: UploadToBe) -> UploadView:
    """The upload is `pending` for an hour: add parts, then complete it."""
    app = service(request, FileServices)
    if body.purpose not in PURPOSES:
        raise unsupported("purpose", body.purpose, PURPOSES)
    if body.bytes > (limit := app.bytes_max):
        raise Refusal(file_too_large(limit), param="bytes")
    name = base_name(body.filename)
    if not name.isprintable():
        raise Refusal(
            "Invalid 'filename': it has characters that cannot be printed.", code="invalid_value", param="filename"
        )
    kept = INPUT_KEPT_SECONDS if body.purpose == BATCH else None
    new = NewUpload(
        id=new_upload_id(),
        tenant=caller.own_tenant,
        purpose=body.purpose,
        filename=name,
        mime_type=body.mime_type,
        bytes=body.bytes,
        expires_seconds=kept if body.expires_after is None else body.expires_after.seconds,
    )
    return UploadView.of(await persist(lambda: app.uploads.create(new)))


@router.post("/{id}/parts", responses=_MOVED, openapi_extra=_FORM, summary="Add a part to an upload")
async def add_part(request: Request, caller: Submitter, id: Id) -> UploadPartView:
    """A form with the part `data`. Send parts in any order, also in parallel; `complete` sets their order."""
    uploads = service(request, FileServices).uploads
    tenant, part_id = caller.own_tenant, new_part_id()
    await uploads.get_pending(id, "add a part to", tenant=tenant)
    stored = await _store(request, uploads.store, part_key(id, part_id))
    try:
        part = await persist(lambda: uploads.add_part(id, part_id, stored, tenant=tenant))
    except (DatabaseUnavailable, Deadlock):
        raise  # the row may exist, and then it needs its bytes
    except BatchwrightError as error:
        await discard(uploads.store, stored)
        raise _refuse(error) from error
    return UploadPartView.of(part)


@router.post("/{id}/complete", responses=_MOVED, summary="Complete an upload: create the file from its parts")
async def complete_upload(request: Request, caller: Submitter, id: Id, body: UploadToComplete) -> UploadView:
    """The file is created as a whole or not at all. A repeated request with the same parts returns the same file."""
    uploads = service(request, FileServices).uploads
    try:
        upload, file = await uploads.complete(id, body.part_ids, tenant=caller.own_tenant, md5=body.md5)
    except InvalidInput as error:
        raise _refuse(error) from error
    return UploadView.of(upload, file)


@router.post("/{id}/cancel", responses=_MOVED, summary="Cancel an upload; its parts are removed")
async def cancel_upload(request: Request, caller: Submitter, id: Id) -> UploadView:
    """An upload that is already cancelled is returned as it is."""
    return UploadView.of(await service(request, FileServices).uploads.cancel(id, tenant=caller.own_tenant))


async def _store(request: Request, store: Store, key: str) -> Stored:
    """Stream the bytes of the form into the store; an invalid form leaves nothing behind."""
    stored: Stored | None = None
    try:
        async for part in form(request.stream(), request.headers.get("content-type", ""), files=("data",)):
            if isinstance(part, Field) or part.name != "data":
                raise unknown(part.name[:100])
            too_large = Refusal(PART_TOO_LARGE, param="data")
            stored = await store.put(key, limit_size(part.chunks, PART_BYTES_MAX, too_large))
    except BaseException as error:
        if stored is not None:
            await discard(store, stored)
        if isinstance(error, ClientDisconnect):
            raise Refusal("The part was cut short.", code="incomplete", param="data") from None
        raise
    if stored is None:
        raise missing("data")
    return stored


def _refuse(error: BatchwrightError) -> Exception:
    if isinstance(error, InvalidInput):
        return Refusal(str(error), code="invalid_value", param=error.param)
    return error
