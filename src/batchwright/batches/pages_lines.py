"""Lines of a batch: answers while they come, a request beside its answer, the manifest, and files to download."""

from __future__ import annotations

from typing import Any, Literal

from starlette.responses import Response

from batchwright.api.routes import Streamed
from batchwright.batches.drawing import Gist, gist, pretty, prompt_of
from batchwright.batches.output.lookup import FoundLine
from batchwright.batches.output.results import Cursor
from batchwright.batches.output.verify import verify
from batchwright.batches.pages import find_batch
from batchwright.batches.services import BatchServices
from batchwright.batches.store import Batch
from batchwright.errors import InvalidInput, NotFound
from batchwright.files.http import begin_reading
from batchwright.web.pages import Pages
from batchwright.web.visit import Reader, Visit

pages = Pages("batches", package="batchwright.batches")

_PAGE_BYTES = 256 * 1024
_LINES_MAX = 50
_FOUND_MAX = 20
_TEXT_CHARACTERS_MAX = 512

Kind = Literal["input", "output", "errors"]


@pages.get("/ui/batches/{id}/lines")
async def list_lines(
    visit: Reader, id: str, q: str | None = None, after: str | None = None, of: Literal["output", "errors"] = "output"
) -> Response:
    """Answers in the order in which they came, or, once the batch has its files, as they stand there."""
    app, batch = await find_batch(visit, id)
    if q:
        return await _search(visit, app, batch, q)

    async def load() -> dict[str, Any]:
        latest = await app.batches.get(id, tenant=visit.tenant)
        return {"batch": latest, **await _page(app, latest, of, after)}

    return await visit.show(
        "batches/lines.html", load, title=f"Lines of {id[-8:]}", id=id, q="", of=of, after=after, found=None
    )


@pages.get("/ui/batches/{id}/line")
async def show_line(visit: Reader, id: str, custom_id: str) -> Response:
    """A request beside its answer."""
    app, batch = await find_batch(visit, id)
    found = await app.lines.find(batch, custom_id[:_TEXT_CHARACTERS_MAX], is_exact=True, limit=1)
    if not found.lines:
        where = "its files are gone" if found.input_gone else "its input has no such line"
        raise NotFound(f"there is no line {custom_id[:100]!r} in {batch.id}: {where}")
    line = found.lines[0]
    return visit.draw(
        "batches/line.html",
        title=f"Line {line.custom_id[:60]}",
        batch=batch,
        line=line,
        found=found,
        prompt="" if line.request is None else prompt_of(line.request),
        answer=None if line.answer is None else gist(line.answer),
        request_text=pretty(line.request),
        answer_text=pretty(line.answer),
    )


@pages.get("/ui/batches/{id}/manifest")
async def show_manifest(visit: Reader, id: str, check: bool = False) -> Response:
    """What its files hold; with `check`, every file is read again and held against it."""
    app, batch = await find_batch(visit, id)
    if batch.manifest is None:
        raise NotFound(f"the batch {id} has no manifest: it is {batch.status.value}")
    findings = await verify(app.files, batch) if check else None
    return visit.draw("batches/manifest.html", title=f"Manifest of {id[-8:]}", batch=batch, findings=findings)


@pages.get("/ui/batches/{id}/download/{kind}")
async def download(visit: Reader, id: str, kind: Kind) -> Response:
    app, batch = await find_batch(visit, id)
    file_id = {"input": batch.input_file_id, "output": batch.output_file_id, "errors": batch.error_file_id}[kind]
    if file_id is None:
        raise NotFound(f"the batch {id} has no file of {kind}: it is {batch.status.value}")
    file = await app.files.get(file_id, tenant=batch.tenant)
    headers = {
        "Content-Disposition": f'attachment; filename="{batch.id}-{kind}.jsonl"',
        "Content-Length": str(file.bytes),
    }
    return Streamed(await begin_reading(app.files, file), headers=headers, media_type="application/octet-stream")


# ------------------------------------------------------------------------------------------------------------------


async def _search(visit: Visit, app: BatchServices, batch: Batch, text: str) -> Response:
    if len(text) > _TEXT_CHARACTERS_MAX:
        raise InvalidInput(f"q has {len(text):,} characters; use at most {_TEXT_CHARACTERS_MAX}", param="q")
    found = await app.lines.find(batch, text, limit=_FOUND_MAX)
    rows = [(line, _gist_of(line)) for line in found.lines]
    return visit.draw(
        "batches/lines.html",
        title=f"Lines of {batch.id[-8:]}",
        id=batch.id,
        batch=batch,
        q=text,
        of="output",
        after=None,
        found=found,
        rows=rows,
        gists=[],
        next=None,
        is_gone=False,
    )


def _gist_of(line: FoundLine) -> Gist | None:
    return None if line.answer is None else gist(line.answer)


async def _page(app: BatchServices, batch: Batch, of: str, after: str | None) -> dict[str, Any]:
    file_id = batch.output_file_id if of == "output" else batch.error_file_id
    if file_id is not None:
        lines, next = await _read_file(app, file_id, batch.tenant, after)
    elif batch.segments_gone_at is None and of == "output":
        lines, next = await _read_results(app, batch, after)
    else:
        return {"gists": [], "next": None, "is_gone": batch.segments_gone_at is not None}
    return {"gists": [gist(line) for line in lines], "next": next, "is_gone": False}


async def _read_results(app: BatchServices, batch: Batch, after: str | None) -> tuple[list[bytes], str | None]:
    """Registered answers: a page ends behind its last line."""
    cursor = Cursor() if after is None else Cursor.parse(after)
    page = await app.results.page(batch.id, cursor, _PAGE_BYTES, with_cursors=True)
    lines = page.data.split(b"\n")[:-1]
    if len(lines) <= _LINES_MAX:
        return lines, str(page.next) if page.has_more else None
    last = lines[_LINES_MAX - 1]
    return lines[:_LINES_MAX], last[last.rindex(b'"cursor":"') + 10 : -2].decode()


async def _read_file(
    app: BatchServices, file_id: str, tenant: str, after: str | None
) -> tuple[list[bytes], str | None]:
    """From a byte of the file on; a line that is longer than a page is read whole."""
    file = await app.files.get(file_id, tenant=tenant)
    start = int(after) if after is not None and after.isdecimal() and len(after) < 16 else 0
    size = _PAGE_BYTES
    data = await app.files.store.read(file.key, start, size) if start < file.bytes else b""
    while b"\n" not in data and start + len(data) < file.bytes:
        size *= 4
        data = await app.files.store.read(file.key, start, size)
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1][:_LINES_MAX]
    end = start + sum(len(line) + 1 for line in lines)
    return lines, str(end) if end < file.bytes else None
