"""Files over HTTP, as OpenAI's clients expect them: uploads are streamed into the store."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from batchwright.api.access import Reader, Submitter
from batchwright.api.errors import Refusal, documented, file_too_large, unknown
from batchwright.api.openai import (
    EXPIRES_SECONDS_MAX,
    EXPIRES_SECONDS_MIN,
    AfterId,
    Id,
    OpenAIRoute,
    missing,
    out_of_range,
    unknown_cursor,
    unsupported,
    wrong_type,
)
from batchwright.api.routes import Streamed
from batchwright.api.schemas import Text
from batchwright.api.services import service
from batchwright.errors import Conflict, DataRefused, NotFound
from batchwright.files.services import FileServices
from batchwright.files.store import (
    BATCH,
    INPUT_KEPT_SECONDS,
    File,
    Files,
    NewFile,
    discard,
    new_file_id,
    object_key,
    persist,
)
from batchwright.files.views import FILENAME_CHARACTERS_MAX, PURPOSES, FileDeleted, FileList, FileView
from batchwright.storage import Field, Store, Stored, form
from batchwright.storage import File as FilePart

FILES = "/v1/files"
FORM_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size of a form besides its file: enough for sixty fields of the largest size with their headers."""

router = APIRouter(prefix=FILES, route_class=OpenAIRoute, tags=["files"])

_ANCHOR = "expires_after[anchor]"
_SECONDS = "expires_after[seconds]"
_FILENAME = "upload.jsonl"
_LIST_MAX = 10_000
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_FOUND = documented(404)
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "The content, of any kind."},
                        "purpose": {"type": "string", "enum": [*PURPOSES], "description": "The purpose of the file."},
                        _ANCHOR: {"type": "string", "enum": ["created_at"], "description": "The start of the period."},
                        _SECONDS: {
                            "type": "integer",
                            "minimum": EXPIRES_SECONDS_MIN,
                            "maximum": EXPIRES_SECONDS_MAX,
                            "description": "How long it is kept; by default 30 days for `batch`, otherwise forever.",
                        },
                    },
                }
            }
        },
    }
}

IdempotencyKey = Annotated[
    Text | None,
    Header(
        min_length=1,
        max_length=255,
        description="A repeated request with the same bytes and purpose returns the same file; otherwise 409.",
    ),
]


@router.post("", responses=documented(409), openapi_extra=_FORM, summary="Upload a file")
async def upload_file(
    request: Request, response: Response, caller: Submitter, idempotency_key: IdempotencyKey = None
) -> FileView:
    """A form with the parts `file` and `purpose`, in any order; the file is stored as it arrives."""
    app = service(request, FileServices)
    upload = Upload(app.files.store, app.bytes_max)
    try:
        await upload.read(request)
        new = upload.file(caller.own_tenant, idempotency_key)
    except BaseException:
        await upload.discard()
        raise
    # From here on the row may exist even if the answer is lost, and then it needs its bytes.
    try:
        file, is_new = await persist(lambda: app.files.add(new))
    except (Conflict, DataRefused):
        await upload.discard()
        raise
    if not is_new:
        await upload.discard()
        response.headers["Idempotent-Replayed"] = "true"
    return FileView.of(file)


@router.get("", response_model=FileList, responses=documented(), summary="List files, newest first")
async def list_files(
    request: Request,
    caller: Reader,
    purpose: Annotated[Text | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=_LIST_MAX)] = _LIST_MAX,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[AfterId | None, Query(description="The `last_id` of the previous page.")] = None,
) -> Response:
    files = service(request, FileServices).files
    if after is not None:
        try:  # a client that deletes listed files continues after a file that is gone
            await files.get(after, tenant=caller.own_tenant, also_gone=True)
        except NotFound as error:
            raise unknown_cursor(error) from error
    found = await files.list(caller.own_tenant, after=after, limit=limit + 1, order=order, purpose=purpose)
    shown = [FileView.of(file) for file in found[:limit]]
    page = FileList(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(found) > limit,
    )
    # The page may have ten thousand files: if it were returned as a model, the framework would validate all again.
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/{id}", responses=_FOUND, summary="Show a file")
async def get_file(request: Request, caller: Reader, id: Id) -> FileView:
    return FileView.of(await service(request, FileServices).files.get(id, tenant=caller.tenant))


@router.delete("/{id}", responses=_FOUND, summary="Delete a file; a batch that reads it continues")
async def delete_file(request: Request, caller: Submitter, id: Id) -> FileDeleted:
    await service(request, FileServices).files.delete(id, tenant=caller.own_tenant)
    return FileDeleted(id=id)


@router.get(
    "/{id}/content",
    response_class=Response,
    responses=documented(
        404,
        416,
        others={
            200: {"content": _BYTES, "description": "The content, byte for byte"},
            206: {"content": _BYTES, "description": "The requested range"},
        },
    ),
    summary="Download a file",
)
async def get_content(
    request: Request,
    caller: Reader,
    id: Id,
    range: Annotated[
        Text | None, Header(max_length=4096, description="One range, such as `bytes=0-1023` or `bytes=-1024`.")
    ] = None,
    if_range: Annotated[
        Text | None,
        Header(max_length=200, description="The `ETag` of your copy: if the file's differs, you get the whole file."),
    ] = None,
) -> Response:
    """Only one range per request is supported: for several, the answer is the whole file."""
    files = service(request, FileServices).files
    file = await files.get(id, tenant=caller.tenant)
    etag = f'"{file.sha256}"'
    headers = {"Accept-Ranges": "bytes", "Content-Disposition": attachment(file.filename), "ETag": etag}
    part = _parse_range(range if if_range in (None, etag) else None, file.bytes)
    start, end = part or (0, file.bytes)
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.bytes}"
    headers["Content-Length"] = str(end - start)
    content = await begin_reading(files, file, start, end)
    return Streamed(content, 206 if part else 200, headers, media_type="application/octet-stream")


class Upload:
    """One form: stores its file and checks its fields as they arrive."""

    def __init__(self, store: Store, bytes_max: int) -> None:
        self.id = new_file_id()
        self._store = store
        self._bytes_max = bytes_max
        self._fields: dict[str, str] = {}
        self._filename = _FILENAME
        self._stored: Stored | None = None

    async def read(self, request: Request) -> None:
        try:
            async for part in form(request.stream(), request.headers.get("content-type", "")):
                match part:
                    case Field():
                        self.take(part)
                    case FilePart(name="file"):
                        await self.put(part)
                    case FilePart():
                        raise unknown(part.name[:100])
        except ClientDisconnect:
            raise Refusal("The upload was cut short.", code="incomplete", param="file") from None

    def file(self, tenant: str, idempotency_key: str | None) -> NewFile:
        """The file of the form; reports anything that is missing."""
        if self._stored is None:
            raise missing("file")
        if "purpose" not in self._fields:
            raise missing("purpose")
        for given, other in ((_ANCHOR, _SECONDS), (_SECONDS, _ANCHOR)):
            if given in self._fields and other not in self._fields:
                raise missing(other)
        purpose, seconds = self._fields["purpose"], self._fields.get(_SECONDS)
        kept = INPUT_KEPT_SECONDS if purpose == BATCH else None
        return NewFile(
            id=self.id,
            tenant=tenant,
            purpose=purpose,
            filename=self._filename,
            stored=self._stored,
            expires_seconds=kept if seconds is None else int(seconds),
            idempotency_key=idempotency_key,
        )

    async def discard(self) -> None:
        if self._stored is not None:
            await discard(self._store, self._stored)

    # Handles each part of the form; the dashboard's form has one more part.

    def take(self, field: Field) -> None:
        match field.name:
            case "purpose":
                if field.value not in PURPOSES:
                    raise unsupported("purpose", field.value, PURPOSES)
            case "expires_after[anchor]":
                if field.value != "created_at":
                    raise unsupported(_ANCHOR, field.value, ["created_at"])
            case "expires_after[seconds]":
                _check_seconds(field.value)
            case _:
                raise unknown(field.name[:100])
        self._fields[field.name] = field.value

    async def put(self, part: FilePart) -> None:
        name = base_name(part.filename or "")
        if len(name) > FILENAME_CHARACTERS_MAX:
            message = f"Invalid 'file': its name has more than {FILENAME_CHARACTERS_MAX} characters."
            raise Refusal(message, code="string_above_max_length", param="file")
        self._filename = name
        too_large = Refusal(file_too_large(self._bytes_max), param="file")
        self._stored = await self._store.put(object_key(self.id), limit_size(part.chunks, self._bytes_max, too_large))


def base_name(name: str) -> str:
    return name.replace("\\", "/").rpartition("/")[2] or _FILENAME


async def limit_size(chunks: AsyncIterator[bytes], limit: int, too_large: Refusal) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise too_large
        yield chunk


def _check_seconds(value: str) -> None:
    if re.fullmatch(r"-?\d{1,18}", value, re.ASCII) is None:
        raise wrong_type(_SECONDS, "an integer", "a string")
    if int(value) < EXPIRES_SECONDS_MIN:
        raise out_of_range(_SECONDS, int(value), least=EXPIRES_SECONDS_MIN)
    if int(value) > EXPIRES_SECONDS_MAX:
        raise out_of_range(_SECONDS, int(value), most=EXPIRES_SECONDS_MAX)


def _parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The requested range as start and end; None if there is none, or if it is not supported."""
    found = _RANGE.fullmatch(header or "")
    if found is None or found[1] + found[2] == "":
        return None
    if found[1] == "":
        start, end = max(0, size - int(found[2])), size
    else:
        start, end = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
        if found[2] and int(found[2]) < start:
            return None
    if start >= end:
        message = f"The file has {size} bytes, and none of them is in the range {header!r}."
        headers = {"Content-Range": f"bytes */{size}"}
        raise Refusal(message, status=416, code="range_not_satisfiable", param="range", headers=headers)
    return start, end


async def begin_reading(
    files: Files, file: File, start: int = 0, end: int | None = None
) -> AsyncGenerator[bytes, None]:
    """The content. The first bytes are read at once, so that a store that does not answer is an error status."""
    chunks = files.content(file, start, end)
    first = await anext(chunks, b"")

    async def content() -> AsyncGenerator[bytes, None]:
        yield first
        async for chunk in chunks:
            yield chunk

    return content()


def attachment(filename: str) -> str:
    plain = "".join(one if one.isascii() and one.isprintable() and one not in '"\\%' else "_" for one in filename)
    coded = "" if plain == filename else f"; filename*=UTF-8''{quote(filename, safe='')}"
    return f'attachment; filename="{plain}"{coded}'
