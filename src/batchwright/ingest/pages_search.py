"""Collections: their documents, the chunks of one, and a search box with hits in their context."""

from __future__ import annotations

import logging
from typing import Any, get_args

from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.responses import Response

from batchwright.api.services import service
from batchwright.errors import InvalidInput, OperationError
from batchwright.ingest import search
from batchwright.ingest.search import Hit
from batchwright.ingest.services import IngestServices
from batchwright.web.pages import Pages
from batchwright.web.visit import Reader

log = logging.getLogger(__name__)

pages = Pages("documents", package="batchwright.ingest")

_DOCUMENTS_MAX = 50
_CHUNKS_MAX = 20
_HITS_MAX = 20
_QUERY_CHARACTERS_MAX = 1_000


@pages.get("/ui/documents/collections/{name}")
async def show_collection(visit: Reader, name: str, after: int = 0) -> Response:
    app, tenant = service(visit.request, IngestServices), visit.caller.own_tenant

    async def load() -> dict[str, Any]:
        found = await app.collections.documents(tenant, name, after=after, limit=_DOCUMENTS_MAX + 1)
        shown = found[:_DOCUMENTS_MAX]
        return {
            "collection": await app.collections.get(tenant, name),
            "documents": shown,
            "next": shown[-1].id if len(found) > _DOCUMENTS_MAX else None,
        }

    return await visit.show("documents/collection.html", load, title=name, name=name, after=after)


@pages.get("/ui/documents/collections/{name}/search")
async def search_collection(visit: Reader, name: str, q: str = "", mode: search.Mode = "hybrid") -> Response:
    """The page is not updated live, because a query may cost something."""
    app, tenant = service(visit.request, IngestServices), visit.caller.own_tenant
    modes = get_args(search.Mode)
    if len(q) > _QUERY_CHARACTERS_MAX:
        raise InvalidInput(f"the query has {len(q):,} characters; use at most {_QUERY_CHARACTERS_MAX:,}", param="q")
    await app.collections.find(tenant, name)
    found = None
    if q.strip():
        try:
            found = await app.search.search(tenant, name, q, limit=_HITS_MAX, mode=mode)
        except (OperationError, OSError) as error:
            log.warning("a search in %r by vectors failed: %s", name, error)
            text = "the model server that embeds queries does not answer; search by words, or retry soon"
            raise HTTPException(503, text) from error
    hits = [] if found is None else [(hit, in_context(hit)) for hit in found.hits]
    return visit.draw(
        "documents/search.html",
        title=f"Search in {name}",
        name=name,
        q=q,
        mode=mode,
        modes=modes,
        found=found,
        hits=hits,
    )


@pages.get("/ui/documents/collections/{name}/documents/{id}")
async def show_document(visit: Reader, name: str, id: int, after: int = -1) -> Response:
    app, tenant = service(visit.request, IngestServices), visit.caller.own_tenant

    async def load() -> dict[str, Any]:
        found = await app.collections.chunks(tenant, name, id, after=after, limit=_CHUNKS_MAX + 1)
        shown = found[:_CHUNKS_MAX]
        return {
            "document": await app.collections.document(tenant, name, id),
            "chunks": shown,
            "next": shown[-1].number if len(found) > _CHUNKS_MAX else None,
        }

    return await visit.show("documents/document.html", load, title="Document", name=name, after=after)


def in_context(hit: Hit) -> Markup:
    """The passage with the words of the query marked."""
    pieces, at = [], 0
    for start, end in sorted(hit.marks):
        if start >= at:
            pieces += [escape(hit.text[at:start]), Markup("<mark>{}</mark>").format(hit.text[start:end])]
            at = end
    return Markup("").join([*pieces, escape(hit.text[at:])])
