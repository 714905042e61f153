"""Processed documents: versions with their chunks and mentions.

    persist ─▶ staged ── go live, in one commit ──▶ live ── the next version ──▶ retired ── upkeep ──▶ gone

The old version stays searchable until the new one replaces it: a reader always sees exactly one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import orjson

from batchwright.db.database import Database, Session
from batchwright.db.statements import statements
from batchwright.ingest.spaces import Space, Spaces

SQL = statements(__package__, "library.sql")
T = TypeVar("T")
_PAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A version to add."""

    document_id: int
    collection_id: int
    item_id: str
    generation: int
    recipe: str
    sha256: str
    steps: Mapping[str, Any]
    metadata: Mapping[str, Any]


class Unused(NamedTuple):
    """A version that is no longer needed."""

    id: int
    document_id: int
    collection_id: int
    text_key: str | None


class Library:
    """The versions of all documents."""

    def __init__(self, database: Database, spaces: Spaces) -> None:
        self._database = database
        self._spaces = spaces

    async def persist(
        self,
        new: NewVersion,
        chunks: Sequence[Mapping[str, Any]],
        mentions: Sequence[Mapping[str, Any]],
        *,
        session: Session,
    ) -> int:
        """Add a version with its chunks and mentions, in the caller's transaction. Returns its id."""
        params = {name: getattr(new, name) for name in NewVersion.__dataclass_fields__}
        params |= {"steps": _json(new.steps), "metadata": _json(new.metadata)}
        await self._ask("drop_staged", session, **params)
        ((version_id,),) = await self._ask("add_version", session, **params)
        of_version = {"version_id": version_id, "collection_id": new.collection_id}
        ids: dict[int, int] = {}
        for page in _pages(chunks):
            ids |= dict(await self._ask("add_chunks", session, **of_version, chunks=_json(page)))
        for page in _pages(mentions):
            placed = [{**mention, "chunk_id": ids[mention["number"]]} for mention in page]
            await self._ask("add_mentions", session, version_id=version_id, mentions=_json(placed))
        return int(version_id)

    async def chunks(self, version_id: int) -> list[tuple[int, bytes]]:
        """Ids and hashes, in order."""
        return [(id, bytes(hash)) for id, hash in await self._ask("chunks", None, version_id=version_id)]

    async def go_live(
        self,
        document_id: int,
        version_id: int,
        *,
        name: str,
        space: Space | None,
        vectors: Mapping[int, bytes],
        session: Session,
    ) -> int | None:
        """Make the version live, in the caller's transaction. Returns the version that it replaces.

        The document is locked first, so that if two versions go live at once, the second retires the first. A version
        with older bytes than the live one stays staged: its run was parked or retried, and another run found the
        changed document meanwhile.
        """
        rows = await self._ask("lock_document", session, document_id=document_id)
        before: int | None = rows[0][0]
        if before == version_id:
            return None
        if before is not None:
            if any(
                later for (later,) in await self._ask("is_fetched_later", session, version_id=version_id, before=before)
            ):
                return None
            await self._retire(before, session)
        await self._ask("enliven", session, version_id=version_id)
        await self._spaces.index_words(version_id, session=session)
        await self._ask("point", session, document_id=document_id, version_id=version_id, name=name)
        if space is not None:  # last: without pgvector, writers to a space block one another from here to the commit
            for page in _pages(list(vectors.items())):
                await self._spaces.add(space, dict(page), session=session)
        return before

    async def retire(self, document_id: int, version_id: int, *, session: Session) -> bool:
        """Take a document out of search, because its source is gone."""
        rows = await self._ask("lock_document", session, document_id=document_id)
        if not rows or rows[0][0] != version_id:
            return False
        await self._retire(version_id, session)
        await self._ask("point", session, document_id=document_id, version_id=None, name=None)
        return True

    async def finish(self, document_id: int, version_id: int, etag: str | None, *, session: Session) -> None:
        """Mark the source as done in the state in which it was fetched: a run that finds it unchanged does nothing.

        Only if its version is live: another run may have added newer content.
        """
        await self._ask("finish", session, document_id=document_id, version_id=version_id, etag=etag)

    async def note_steps(self, version_id: int, steps: Mapping[str, Any], *, session: Session) -> None:
        await self._ask("note_steps", session, version_id=version_id, steps=_json(steps))

    # Upkeep -----------------------------------------------------------------------------------------------------

    async def unused(self, keep_seconds: float, limit: int) -> list[Unused]:
        rows = await self._ask("unused", None, keep_seconds=keep_seconds, limit=limit)
        return [Unused(*row) for row in rows]

    async def remove(self, version: Unused) -> bool:
        """Remove a retired version with its rows. Returns whether its text can be removed, too."""
        async with self._database.transaction() as session:
            if not await self._ask("remove_version", session, version_id=version.id):
                return False
            if version.text_key is None:
                return False
            params = {"document_id": version.document_id, "text_key": version.text_key}
            ((is_used,),) = await self._ask("is_text_used", session, **params)
            return not is_used

    async def _retire(self, version_id: int, session: Session) -> None:
        await self._ask("retire", session, version_id=version_id)
        await self._spaces.remove_version(version_id, session=session)
        await self._spaces.unindex_words(version_id, session=session)

    def _ask(self, statement: str, session: Session | None, **params: Any) -> Any:
        return self._database.ask(SQL[statement], params, session)


def _pages(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split rows into pages: a book has ten thousand chunks, and no statement may come close to its time limit."""
    for start in range(0, len(rows), _PAGE):
        yield rows[start : start + _PAGE]


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()
