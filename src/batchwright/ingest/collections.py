"""Collections of a tenant: list, read and delete them.

A deleted collection is gone for users at once; upkeep removes its rows page by page.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from batchwright.db.database import Database, Row, Session
from batchwright.db.statements import statements
from batchwright.errors import Conflict, InvalidInput, NotFound
from batchwright.ingest.spaces import Space, Spaces

SQL = statements(__package__, "collections.sql")
PAGE_MAX = 1000
_COUNTED_MAX = 100_000
"""Maximum number of documents whose sizes are added up; a larger collection sets `is_more`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A collection and its size."""

    id: int
    tenant: str
    name: str
    language: str
    documents: int
    chunks: int
    text_bytes: int
    is_more: bool
    """Whether there are more documents than were counted."""
    spaces: list[Space]
    created_at: datetime
    updated_at: datetime | None
    """When the newest version of a document in it was created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """A document whose version is live."""

    id: int
    source: str
    name: str
    version_id: int
    chunks: int | None
    text_bytes: int | None
    metadata: dict[str, Any]
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk of a document."""

    id: int
    number: int
    page_first: int | None
    page_last: int | None
    section: list[str]
    char_start: int
    char_end: int
    tokens: int
    text: str


class Collections:
    """The collections of all tenants; most methods take the tenant as an argument."""

    def __init__(self, database: Database, spaces: Spaces) -> None:
        self._database = database
        self._spaces = spaces

    async def page(self, tenant: str, *, after: str = "", limit: int = 50) -> list[Collection]:
        """Collections by name; `after` is the last name of the previous page."""
        params = {"tenant": tenant, "after": after, "limit": min(limit, PAGE_MAX), "counted": _COUNTED_MAX}
        return [_collection(row) for row in await self._database.ask(SQL["list"], params)]

    async def page_everywhere(self, *, after: Collection | None = None, limit: int = 50) -> list[Collection]:
        """Collections of all tenants, by tenant and name; `after` is the last one of the previous page."""
        place = {"after_tenant": after.tenant, "after": after.name} if after else {"after_tenant": "", "after": ""}
        params = {**place, "limit": min(limit, PAGE_MAX), "counted": _COUNTED_MAX}
        return [_collection(row) for row in await self._database.ask(SQL["list_everywhere"], params)]

    async def get(self, tenant: str, name: str) -> Collection:
        params = {"tenant": tenant, "name": name, "counted": _COUNTED_MAX}
        for row in await self._database.ask(SQL["get"], params):
            return _collection(row)
        raise _no_collection(name)

    async def find(self, tenant: str, name: str) -> int:
        """The id of a collection."""
        for (id,) in await self._database.ask(SQL["find"], {"tenant": tenant, "name": name}):
            return int(id)
        raise _no_collection(name)

    async def documents(self, tenant: str, name: str, *, after: int = 0, limit: int = 100) -> list[StoredDocument]:
        """Live documents by id; `after` is the last id of the previous page."""
        params = {"collection_id": await self.find(tenant, name), "after": after, "limit": min(limit, PAGE_MAX)}
        return [_document(row) for row in await self._database.ask(SQL["documents"], params)]

    async def document(self, tenant: str, name: str, document_id: int) -> StoredDocument:
        params = {"collection_id": await self.find(tenant, name), "document_id": document_id}
        for row in await self._database.ask(SQL["document"], params):
            return _document(row)
        raise _no_document(name, document_id)

    async def chunks(
        self, tenant: str, name: str, document_id: int, *, after: int = -1, limit: int = 100
    ) -> list[StoredChunk]:
        """Chunks of a document in its order; `after` is the last number of the previous page."""
        document = await self.document(tenant, name, document_id)
        params = {"version_id": document.version_id, "after": after, "limit": min(limit, PAGE_MAX)}
        rows = await self._database.ask(SQL["chunks"], params)
        return [StoredChunk(**dict(zip(StoredChunk.__dataclass_fields__, row, strict=True))) for row in rows]

    async def check_language(self, language: str) -> None:
        """Raises InvalidInput for a language without a text search configuration in the database."""
        if not await self._database.ask(SQL["language"], {"language": language}):
            raise InvalidInput(
                f"the database has no language {language!r}; use one such as english, german or simple",
                param="language",
            )

    # Deletion -----------------------------------------------------------------------------------------------------

    async def delete(self, tenant: str, name: str) -> None:
        """Hide a collection from users at once, and free its name. Raises Conflict while a run works on it."""
        async with self._database.transaction() as session:
            for (id,) in await self._database.ask(SQL["lock"], {"tenant": tenant, "name": name}, session):
                for (run,) in await self._database.ask(SQL["open_run"], {"collection_id": id}, session):
                    raise Conflict(f"the collection {name!r} has an open run, {run}: cancel it first", holder=run)
                await self._database.ask(SQL["mark_deleted"], {"collection_id": id}, session)
                return
        raise _no_collection(name)

    async def retire(self, tenant: str, name: str, document_id: int) -> None:
        """Take one document out of search; the next run that lists its source reads it again."""
        params = {"collection_id": await self.find(tenant, name), "document_id": document_id}
        async with self._database.transaction() as session:
            for (version_id,) in await self._database.ask(SQL["lock_document"], params, session):
                if version_id is None:
                    raise Conflict(f"document {document_id} of {name!r} is already retired")
                await self._spaces.unindex_words(version_id, session=session)
                await self._spaces.remove_version(version_id, session=session)
                await self._database.ask(SQL["retire"], {"version_id": version_id}, session)
                return
        raise _no_document(name, document_id)

    async def deleted(self) -> list[int]:
        """Deleted collections that still have rows."""
        return [id for (id,) in await self._database.ask(SQL["deleted"])]

    async def remove_deleted(self, limit: int = 1000) -> bool:
        """Upkeep: remove about this many rows of a deleted collection; returns whether there is more to do."""
        for (id,) in await self._database.ask(SQL["deleted"]):
            if await self._remove_vectors(id, limit) or await self._remove_documents(id, limit):
                return True
            await self._database.ask(SQL["remove_collection"], {"collection_id": id})
            return bool(await self._database.ask(SQL["deleted"]))
        return False

    async def _remove_vectors(self, collection_id: int, limit: int) -> bool:
        """Remove one table of vectors, or one page of vectors that are in no table."""
        for space in await self._spaces.of(collection_id):
            async with self._database.transaction() as session:
                if space.has_table or await self._spaces.remove_page(space, limit, session=session) < limit:
                    await self._spaces.drop(space, session=session)
            return True
        return False

    async def _remove_documents(self, collection_id: int, limit: int) -> bool:
        """Remove many small documents at a time, but a large one piece by piece."""
        wanted = {"collection_id": collection_id, "limit": limit}
        left = limit
        found = await self._database.ask(SQL["first_documents"], wanted)
        for (document_id,) in found:
            async with self._database.transaction() as session:
                left -= 1 + await self._remove_document(document_id, left, session)
            if left <= 0:
                break
        return bool(found)

    async def _remove_document(self, document_id: int, limit: int, session: Session) -> int:
        params = {"document_id": document_id, "limit": limit}
        removed = len(await self._database.ask(SQL["remove_chunks"], params, session))
        if removed < limit:
            await self._database.ask(SQL["remove_document"], params, session)
        return removed


def _collection(row: Row) -> Collection:
    values = dict(zip(Collection.__dataclass_fields__, row, strict=True))
    return Collection(**{**values, "spaces": [Space(**space) for space in values["spaces"]]})


def _document(row: Row) -> StoredDocument:
    return StoredDocument(**dict(zip(StoredDocument.__dataclass_fields__, row, strict=True)))


def _no_collection(name: str) -> NotFound:
    return NotFound(f"no collection {name!r}", kind="collection", id=name)


def _no_document(collection: str, id: int) -> NotFound:
    return NotFound(f"no document {id} in the collection {collection!r}", kind="document", id=str(id))
