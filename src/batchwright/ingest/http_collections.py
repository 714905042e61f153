"""Collections over HTTP: their documents, search, export, and deletion."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from batchwright.api.access import Reader, Submitter
from batchwright.api.errors import Refusal, Responses, documented
from batchwright.api.routes import OrjsonRoute, Streamed, Unfinished
from batchwright.api.schemas import EventId, Page, Text
from batchwright.api.services import service
from batchwright.errors import BatchwrightError, ConfigurationError, InvalidInput, OperationError
from batchwright.ingest import search
from batchwright.ingest.export import jsonl_lines, parquet_pieces, require_parquet
from batchwright.ingest.questions import FILTERS_MAX, QUERY_CHARACTERS_MAX
from batchwright.ingest.services import IngestServices
from batchwright.ingest.views import From, read_cursor
from batchwright.ingest.views_collections import ChunkView, CollectionView, DeletedView, DocumentView, SearchView

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/collections", route_class=OrjsonRoute, tags=["collections"])

NDJSON = "application/x-ndjson"
PARQUET = "application/vnd.apache.parquet"
_CHUNKS_MAX = 100
_DOCUMENTS_MAX = 500
_PIECE_BYTES = 64 * 1024
_FOUND = documented(404)
_MOVED = documented(404, 409)
_EXPORTED: Responses = {
    200: {
        "content": {
            NDJSON: {"schema": {"type": "string"}},
            PARQUET: {"schema": {"type": "string", "format": "binary"}},
        },
        "description": "One row for each chunk: its text, place, metadata and entities, and its vector on request",
    }
}
Collection = Annotated[Text, Path(min_length=1, max_length=100, description="The collection.")]
DocumentId = Annotated[int, Path(ge=1, le=2**53 - 1)]
Filter = Annotated[Text, Field(min_length=1, max_length=1_000)]


@router.get("", responses=documented(), summary="List collections by name")
async def list_collections(
    request: Request,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum number to return.")] = 50,
    cursor: From = None,
) -> Page[CollectionView]:
    app = service(request, IngestServices)
    found = await app.collections.page(caller.own_tenant, after=cursor or "", limit=limit + 1)
    shown, has_more = found[:limit], len(found) > limit
    views = [CollectionView.of(collection) for collection in shown]
    return Page(data=views, has_more=has_more, next_cursor=shown[-1].name if has_more else None)


@router.get("/{name}", responses=_FOUND, summary="Show a collection with its size")
async def get_collection(request: Request, caller: Reader, name: Collection) -> CollectionView:
    return CollectionView.of(await service(request, IngestServices).collections.get(caller.own_tenant, name))


@router.delete("/{name}", responses=_MOVED, summary="Delete a collection and everything in it")
async def delete_collection(request: Request, caller: Submitter, name: Collection) -> DeletedView:
    """It is gone at once, and its name is free again. While a run works on it, the request is a conflict."""
    await service(request, IngestServices).collections.delete(caller.own_tenant, name)
    return DeletedView(object="collection", collection=name, id=None)


@router.get("/{name}/documents", responses=_FOUND, summary="List the documents of a collection")
async def list_documents(
    request: Request,
    caller: Reader,
    name: Collection,
    limit: Annotated[int, Query(ge=1, le=_DOCUMENTS_MAX, description="Maximum number to return.")] = 100,
    cursor: From = None,
) -> Page[DocumentView]:
    app = service(request, IngestServices)
    after = int(read_cursor(cursor, r"[0-9]{1,15}") or 0)
    found = await app.collections.documents(caller.own_tenant, name, after=after, limit=limit + 1)
    shown, has_more = found[:limit], len(found) > limit
    views = [DocumentView.of(document) for document in shown]
    return Page(data=views, has_more=has_more, next_cursor=str(shown[-1].id) if has_more else None)


@router.get("/{name}/documents/{id}", responses=_FOUND, summary="Show a document of a collection")
async def get_document(request: Request, caller: Reader, name: Collection, id: DocumentId) -> DocumentView:
    app = service(request, IngestServices)
    return DocumentView.of(await app.collections.document(caller.own_tenant, name, id))


@router.get("/{name}/documents/{id}/chunks", responses=_FOUND, summary="List the chunks of a document, in order")
async def list_chunks(
    request: Request,
    caller: Reader,
    name: Collection,
    id: DocumentId,
    limit: Annotated[int, Query(ge=1, le=_CHUNKS_MAX, description="Maximum number to return.")] = 20,
    cursor: From = None,
) -> Page[ChunkView]:
    """If the document changes between two pages, the second page shows the new chunks."""
    app = service(request, IngestServices)
    after = int(read_cursor(cursor, r"[0-9]{1,9}") or -1)
    found = await app.collections.chunks(caller.own_tenant, name, id, after=after, limit=limit + 1)
    shown, has_more = found[:limit], len(found) > limit
    views = [ChunkView.of(chunk) for chunk in shown]
    return Page(data=views, has_more=has_more, next_cursor=str(shown[-1].number) if has_more else None)


@router.delete("/{name}/documents/{id}", responses=_MOVED, summary="Take a document out of search")
async def retire_document(request: Request, caller: Submitter, name: Collection, id: DocumentId) -> DeletedView:
    """The next run that finds its source reads it again."""
    await service(request, IngestServices).collections.retire(caller.own_tenant, name, id)
    return DeletedView(object="collection.document", collection=name, id=id)


@router.get("/{name}/search", responses=_FOUND, summary="Find passages that answer a query")
async def search_collection(
    request: Request,
    caller: Reader,
    name: Collection,
    q: Annotated[
        Text,
        Query(
            min_length=1,
            max_length=QUERY_CHARACTERS_MAX,
            description='Words, "phrases", and -words to exclude.',
        ),
    ],
    limit: Annotated[int, Query(ge=1, le=search.LIMIT_MAX, description="Maximum number to return.")] = 10,
    mode: Annotated[search.Mode, Query(description="Search by words, by vectors, or by both.")] = "hybrid",
    filter: Annotated[
        list[Filter] | None,
        Query(
            max_length=FILTERS_MAX,
            description="`key:value`, repeatable: `source` and `name` (`*` matches anything), `page`, `entity` (a type "
            "of entities), or a key of the document's metadata.",
        ),
    ] = None,
) -> SearchView:
    """`used` says how passages were found, and what was left out, e.g. because a model server did not answer."""
    app = service(request, IngestServices)
    filters = _read_filters(filter or [])
    try:
        found = await app.search.search(caller.own_tenant, name, q, limit=limit, mode=mode, filters=filters)
    except (OperationError, OSError) as error:
        log.warning("a search in %r by vectors failed: %s", name, error)
        text = "the model server that embeds queries does not answer; search by words, or retry soon"
        raise Refusal(text, status=503, code="model_unavailable", headers={"Retry-After": "5"}) from error
    return SearchView.of(name, q, found)


@router.get(
    "/{name}/export",
    response_class=Response,
    responses=documented(404, others=_EXPORTED),
    summary="Download a collection",
)
async def export_collection(
    request: Request,
    caller: Reader,
    name: Collection,
    format: Annotated[Literal["jsonl", "parquet"], Query(description="JSON lines, or Parquet.")] = "jsonl",
    vectors: Annotated[bool, Query(description="Include the vector of each chunk.")] = False,
    after: Annotated[EventId, Query(description="Only documents after this id: the last one that you received.")] = 0,
) -> Response:
    """Rows are ordered by document and position. If the download is cut short, request the rest with `after`."""
    app = service(request, IngestServices)
    await app.collections.find(caller.own_tenant, name)
    rows = app.export.rows(caller.own_tenant, name, with_vectors=vectors, after=after)
    if format == "jsonl":
        pieces, media_type = jsonl_lines(rows), NDJSON
    else:
        try:
            require_parquet()
        except ConfigurationError as error:
            raise Refusal(f"{error} on the server; or ask for jsonl", code="invalid_value", param="format") from error
        pieces, media_type = parquet_pieces(rows, with_vectors=vectors), PARQUET
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Streamed(_whole(name, pieces), media_type=media_type, headers=headers)


# ------------------------------------------------------------------------------------------------------------------


def _read_filters(given: list[str]) -> dict[str, str]:
    filters: dict[str, str] = {}
    for one in given:
        key, colon, value = one.partition(":")
        if not key or not colon or not value:
            raise InvalidInput(f"the filter {one[:100]!r} must have the form key:value", param="filter")
        if key in filters:
            raise InvalidInput(f"the filter {key[:100]!r} is set twice; a document has only one value", param="filter")
        filters[key] = value
    return filters


async def _whole(name: str, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Join small pieces before they are sent. On an error, abort the response, so that it does not look complete."""
    held, size = list[bytes](), 0
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                held.append(piece)
                size += len(piece)
                if size >= _PIECE_BYTES:
                    yield b"".join(held)
                    held, size = [], 0
    except BatchwrightError as error:
        log.warning("the export of %r was cut short: %s", name, error)
        raise Unfinished from error
    yield b"".join(held)
