"""Stored documents: rows made by the test, and versions swapped as in the last step of a run."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from batchwright.db.database import Database, Session
from batchwright.ingest.collections import Collections
from batchwright.ingest.export import Export
from batchwright.ingest.search import Search
from batchwright.ingest.spaces import Space, Spaces

DIMENSIONS = 32
NOW = "coalesce(%(now)s::timestamptz, now())"


def vector(*values: float, dimensions: int = DIMENSIONS) -> bytes:
    return struct.pack(f"<{dimensions}f", *values, *([0.0] * (dimensions - len(values))))


class Meanings:
    """An embedder with a small thesaurus: words of one meaning share a direction; others have a random one."""

    fingerprint = "meanings-1"
    model = "meanings"

    def __init__(self, thesaurus: Mapping[str, str] | None = None) -> None:
        self.thesaurus = thesaurus or {}
        self.calls = 0
        self.error: Exception | None = None

    async def embed_query(self, text: str) -> bytes:
        self.calls += 1
        if self.error:
            raise self.error
        return self.embed(text)

    def embed(self, text: str) -> bytes:
        total = [0.0] * DIMENSIONS
        for word in re.findall(r"\w+", text.lower()):
            meaning = self.thesaurus.get(word, word)
            weight = 3.0 if word in self.thesaurus else 0.3
            digest = hashlib.blake2b(meaning.encode(), digest_size=DIMENSIONS).digest()
            total = [sum + weight * (byte - 127.5) / 127.5 for sum, byte in zip(total, digest, strict=True)]
        length = math.sqrt(sum(value * value for value in total)) or 1.0
        return vector(*(value / length for value in total))


class Shelf:
    """A database with collections in it."""

    def __init__(self, database: Database, *, use_pgvector: bool, embedder: Any = None) -> None:
        self.database = database
        self.spaces = Spaces(database, use_pgvector=use_pgvector)
        self.embedder = embedder or Meanings()
        self.collections = Collections(database, self.spaces)
        self.export = Export(database, self.spaces)
        self.search = Search(database, self.spaces, self.embedder_of)
        self._items = 0

    def embedder_of(self, space: Space) -> Any:
        return self.embedder if space.fingerprint == self.embedder.fingerprint else None

    async def collection(self, name: str = "papers", *, tenant: str = "default", language: str = "english") -> int:
        params = {"tenant": tenant, "name": name, "language": language}
        ((id,),) = await self.database.ask(
            "INSERT INTO batchwright.ingest_collection (tenant, name, language, created_at) "
            f"VALUES (%(tenant)s, %(name)s, %(language)s, {NOW}) RETURNING id",
            params,
        )
        return id

    async def space(self, collection: int, *, fingerprint: str | None = None, dimensions: int = DIMENSIONS) -> Space:
        return await self.spaces.ensure(
            collection,
            fingerprint=fingerprint or self.embedder.fingerprint,
            model=getattr(self.embedder, "model", None),
            dimensions=dimensions,
        )

    async def document(self, collection: int, source: str = "a.txt") -> int:
        params = {"collection_id": collection, "source": source, "name": source.rsplit("/", 1)[-1]}
        ((id,),) = await self.database.ask(
            "INSERT INTO batchwright.ingest_document (collection_id, source, name, created_at, updated_at) "
            f"VALUES (%(collection_id)s, %(source)s, %(name)s, {NOW}, {NOW}) RETURNING id",
            params,
        )
        return id

    async def stage(
        self,
        document: int,
        texts: Sequence[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        section: Sequence[str] = (),
    ) -> int:
        """A version with a chunk and a page for each text; searches do not find it yet."""
        self._items += 1
        params = {
            "document_id": document,
            "item_id": f"item-{id(self)}-{self._items}",
            "metadata": orjson.dumps(metadata or {}).decode(),
        }
        ((version, collection),) = await self.database.ask(
            "INSERT INTO batchwright.ingest_version "
            "(document_id, collection_id, item_id, generation, recipe, sha256, metadata, created_at) "
            f"SELECT id, collection_id, %(item_id)s, 1, 'r', 's', %(metadata)s::jsonb, {NOW} "
            "FROM batchwright.ingest_document WHERE id = %(document_id)s RETURNING id, collection_id",
            params,
        )
        await self.database.ask(
            "INSERT INTO batchwright.ingest_chunk (version_id, collection_id, number, key, hash, char_start, char_end, "
            "page_first, page_last, section, tokens, text) "
            r"SELECT %(version)s, %(collection)s, number - 1, number::text, '\x00', 0, length(text), number, number, "
            "%(section)s::text[], 1, text FROM unnest(%(texts)s::text[]) WITH ORDINALITY AS given (text, number)",
            {"version": version, "collection": collection, "texts": list(texts), "section": list(section)},
        )
        return version

    async def chunks(self, version: int, session: Session | None = None) -> list[tuple[int, str]]:
        return await self.database.ask(
            "SELECT id, text FROM batchwright.ingest_chunk WHERE version_id = %(version)s ORDER BY number",
            {"version": version},
            session,
        )

    async def publish(self, version: int, space: Space | None, session: Session) -> None:
        """Replace the live version of the document by this one, in the caller's transaction."""
        params = {"version": version}
        for (old,) in await self.database.ask(
            "SELECT old.id FROM batchwright.ingest_version AS new JOIN batchwright.ingest_version AS old "
            "ON old.document_id = new.document_id AND old.state = 'live' WHERE new.id = %(version)s",
            params,
            session,
        ):
            await self.spaces.unindex_words(old, session=session)
            await self.spaces.remove_version(old, session=session)
            await self.database.ask(
                f"UPDATE batchwright.ingest_version SET state = 'retired', retired_at = {NOW} WHERE id = %(old)s",
                {"old": old},
                session,
            )
        await self.database.ask(
            "WITH made AS (UPDATE batchwright.ingest_version SET state = 'live' WHERE id = %(version)s "
            "RETURNING id, document_id) UPDATE batchwright.ingest_document AS document SET live_version = made.id "
            "FROM made WHERE document.id = made.document_id",
            params,
            session,
        )
        await self.spaces.index_words(version, session=session)
        if space:
            vectors = {id: self.embedder.embed(text) for id, text in await self.chunks(version, session)}
            await self.spaces.add(space, vectors, session=session)

    async def put(
        self, collection: int, source: str, *texts: str, space: Space | None = None, **options: Any
    ) -> tuple[int, int]:
        """A live document; returns its id and the id of its version."""
        document = await self.document(collection, source)
        version = await self.stage(document, texts, **options)
        async with self.database.transaction() as session:
            await self.publish(version, space, session)
        return document, version

    async def mention(self, version: int, type: str, text: str) -> None:
        await self.database.ask(
            "INSERT INTO batchwright.ingest_mention (version_id, chunk_id, type, text, char_start, char_end) "
            "SELECT version_id, id, %(type)s, %(text)s, 0, 1 FROM batchwright.ingest_chunk "
            "WHERE version_id = %(version)s",
            {"version": version, "type": type, "text": text},
        )

    async def open_run(self, collection: int, id: str = "run_" + "0" * 32) -> str:
        await self.database.ask(
            "INSERT INTO batchwright.ingest_run (id, tenant, collection_id, kind, sources, config, recipe, lane, "
            "priority, job_id, created_at) VALUES (%(id)s, 'default', %(collection)s, 'documents', '[]', '{}', 'r', "
            f"'auto', 5, gen_random_uuid(), {NOW})",
            {"id": id, "collection": collection},
        )
        return id

    async def count(self, table: str) -> int:
        ((count,),) = await self.database.rows(f"SELECT count(*) FROM batchwright.{table}")
        return count
