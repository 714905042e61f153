"""Files on the dashboard: list, upload, download, delete."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response

from batchwright.api.routes import Streamed
from batchwright.api.services import service
from batchwright.errors import Conflict, DataRefused, Forbidden
from batchwright.files.http import Upload, attachment, begin_reading
from batchwright.files.services import FileServices
from batchwright.files.store import NewFile, persist
from batchwright.files.views import PURPOSES
from batchwright.storage import Field
from batchwright.storage import File as FilePart
from batchwright.web.pages import Finder, Link, Pages
from batchwright.web.visit import Reader, Submitter, Uploader, Visit

pages = Pages(
    "files",
    package="batchwright.files",
    links=[Link("Files", "/ui/files", group="Work", order=60)],
    finders=[Finder(r"file-[0-9a-f]{32}", "/ui/files/{}")],
)
_PER_PAGE = 50


@pages.get("/ui/files")
async def list_files(
    visit: Reader,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[str | None, Query(max_length=100)] = None,
) -> Response:
    """Newest first."""
    app, tenant = service(visit.request, FileServices), visit.caller.own_tenant

    async def load() -> dict[str, Any]:
        found = await app.files.list(tenant, after=after, limit=_PER_PAGE + 1, purpose=purpose or None)
        shown = found[:_PER_PAGE]
        return {"files": shown, "next": shown[-1].id if len(found) > _PER_PAGE else None}

    return await visit.show(
        "files/list.html", load, title="Files", purpose=purpose, purposes=PURPOSES, after=after, bytes_max=app.bytes_max
    )


@pages.post("/ui/files")
async def upload_file(visit: Uploader) -> Response:
    """Stream the file into the store, as the HTTP API does; the form's token must come before it.

    A form that is sent twice creates one file.
    """
    app = service(visit.request, FileServices)
    upload = _PageUpload(visit, app)
    try:
        await upload.read(visit.request)
        new = upload.file(visit.caller.own_tenant, None)
        new = replace(new, idempotency_key=upload.once(new))
    except BaseException:
        await upload.discard()
        raise
    try:
        file, is_new = await persist(lambda: app.files.add(new))
    except (Conflict, DataRefused):
        await upload.discard()
        raise
    if not is_new:
        await upload.discard()
    return visit.go(f"/ui/files/{file.id}", done="The file is uploaded.")


@pages.get("/ui/files/{id}")
async def show_file(visit: Reader, id: str) -> Response:
    app, tenant = service(visit.request, FileServices), visit.tenant

    async def load() -> dict[str, Any]:
        return {"file": await app.files.get(id, tenant=tenant)}

    return await visit.show("files/file.html", load, title="File")


@pages.get("/ui/files/{id}/content")
async def download_file(visit: Reader, id: str) -> Response:
    app = service(visit.request, FileServices)
    file = await app.files.get(id, tenant=visit.tenant)
    headers = {"Content-Disposition": attachment(file.filename), "Content-Length": str(file.bytes)}
    content = await begin_reading(app.files, file)
    return Streamed(content, 200, headers, media_type="application/octet-stream")


@pages.post("/ui/files/{id}/delete")
async def delete_file(visit: Submitter, id: str) -> Response:
    await service(visit.request, FileServices).files.delete(id, tenant=visit.caller.own_tenant)
    return visit.go("/ui/files", done="The file was deleted. A batch that reads it continues.")


class _PageUpload(Upload):
    """A dashboard form: nothing is stored before its token is checked."""

    def __init__(self, visit: Visit, app: FileServices) -> None:
        super().__init__(app.files.store, app.bytes_max)
        self._visit = visit
        self._is_checked = False
        self._once = ""

    def take(self, field: Field) -> None:
        if field.name == "csrf":
            self._visit.check_token(field.value)
            self._is_checked = True
        elif field.name == "once":
            self._once = field.value
        else:
            super().take(field)

    def once(self, new: NewFile) -> str | None:
        """The same key for the same file of the same form."""
        parts = {"once": self._once, "name": new.filename, "purpose": new.purpose, "sha256": new.stored.sha256}
        return self._visit.once_of([*parts.items()])

    async def put(self, part: FilePart) -> None:
        if not self._is_checked:
            raise Forbidden("this form is not from this site; reload the page and send it again")
        await super().put(part)
