"""Spaces, each with the vectors of one embedder in one collection, and the words of chunks. Search reads both.

With pgvector, each space has its own table with an HNSW index, so that search in one collection never reads the vectors
of others. Without it, search reads all vectors of a space. Only live chunks have vectors and words: one transaction
removes those of the old version and adds those of the new one. So search need not check which chunks are live.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from batchwright.db.database import Database, Row, Session
from batchwright.db.raw import Raw
from batchwright.db.statements import shared_parts, statements
from batchwright.errors import Conflict, DatabaseError, DatabaseUnavailable

SQL = statements(__package__, "spaces.sql")
FILTERS = shared_parts(__package__, "filters.sql")
_EXTENSION = "CREATE EXTENSION IF NOT EXISTS vector"
_VERSION_MIN = (0, 8)
"""Since this version, an index scan continues until enough rows have passed the filter."""
_VECTOR_DIMENSIONS_MAX = 2_000
_HALFVEC_DIMENSIONS_MAX = 4_000
"""Maximum number of dimensions of each type in an HNSW index."""
_WORDS_PAGE = 500
_RACES_MAX = 10
_SETTLE_PAGE = 50
"""Adding a vector to a large index takes milliseconds, and tens of milliseconds on a busy machine."""
_DROP_AFTER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Vectors of one embedder in one collection."""

    id: int
    collection_id: int
    fingerprint: str
    model: str | None
    dimensions: int
    has_table: bool
    """Whether it has its own table, with pgvector."""

    @property
    def has_index(self) -> bool:
        return self.has_table and self.dimensions <= _HALFVEC_DIMENSIONS_MAX

    @property
    def index(self) -> str:
        """How search finds its nearest vectors."""
        return "hnsw" if self.has_index else "exact" if self.has_table else "exact, without pgvector"


@dataclass(frozen=True, slots=True)
class Pgvector:
    """The extension in this database."""

    home: str
    """The schema that it is installed in, quoted."""
    type_id: int


class Spaces:
    """Stores vectors. `use_pgvector=False` ignores the extension even if it is installed."""

    def __init__(self, database: Database, *, use_pgvector: bool = True) -> None:
        self.database = database
        self._use_pgvector = use_pgvector
        self._pgvector: Pgvector | None = None
        self._has_looked = False

    async def has_pgvector(self) -> bool:
        """Whether new spaces get a table with an index; installs the extension if we are allowed to."""
        if self._use_pgvector and not self._has_looked:
            is_missing, self._pgvector = await self._look()
            if is_missing:
                await self._install()
                _, self._pgvector = await self._look()
            self._has_looked = True
        return self._use_pgvector and self._pgvector is not None

    async def ensure(self, collection_id: int, *, fingerprint: str, model: str | None, dimensions: int) -> Space:
        """The space of an embedder, with its table; in a separate transaction, before the caller's."""
        has_table = await self.has_pgvector()
        named = {"collection_id": collection_id, "fingerprint": fingerprint}
        for _ in range(_RACES_MAX):
            for row in await self.database.ask(SQL["find"], named):
                return _space(row)
            made = {**named, "model": model, "dimensions": dimensions, "has_table": has_table}
            async with self.database.transaction() as session:
                # Other transactions that insert the same space wait here until the table exists, and then find the row.
                for row in await self.database.ask(SQL["insert"], made, session):
                    await self._create_table(_space(row), session)
                    return _space(row)
        raise Conflict(f"collection {collection_id} is being deleted, so it accepts no vectors; use another collection")

    async def of(self, collection_id: int, *, session: Session | None = None) -> list[Space]:
        """The spaces of a collection, the oldest first."""
        return [
            _space(row)
            for row in await self.database.ask(SQL["of_collection"], {"collection_id": collection_id}, session)
        ]

    async def add(self, space: Space, vectors: Mapping[int, bytes], *, session: Session) -> None:
        """Add vectors by chunk, as float32, little-endian. Existing ones stay: they depend only on text and embedder.

        Call it inside a transaction, best at its end: without pgvector, transactions that change the same space block
        one another from here on.
        """
        if not vectors:
            return
        _check_sizes(space, vectors)
        params: dict[str, object] = {"space_id": space.id, "chunk_ids": list(vectors)}
        if space.has_table:
            held = await self.database.ask(SQL["hold"], params, session)
            embeddings: object = Raw(_binary_array(vectors.values(), (await self._require_pgvector(session)).type_id))
            add = (await self.statements_of(space, session=session))["add"] if held else ""
        else:
            held = await self.database.ask(SQL["count_change"], params, session)
            embeddings, add = list(vectors.values()), SQL["add"]
        if not held:
            raise Conflict(f"the space of {space.fingerprint!r} was just dropped; request it again")
        await self.database.ask(add, {**params, "embeddings": embeddings}, session)

    async def remove_version(self, version_id: int, *, session: Session) -> None:
        """Remove the vectors of a version from all spaces of its collection; inside the caller's transaction."""
        params = {"version_id": version_id}
        for row in await self.database.ask(SQL["of_version"], params, session):
            space = _space(row)
            if space.has_table:
                await self.database.ask(
                    (await self.statements_of(space, session=session))["remove_vectors"], params, session
                )
            else:
                await self.database.ask(SQL["count_change"], {"space_id": space.id}, session)
                await self.database.ask(SQL["remove_vectors"], {**params, "space_id": space.id}, session)

    async def index_words(self, version_id: int, *, session: Session) -> None:
        """Make the chunks of a version findable by their words; inside the transaction that makes it live."""
        sizes = [size async for page in self._word_pages("index_words", version_id, session) for (size,) in page]
        size = {"version_id": version_id, "chunks": len(sizes), "bytes": sum(sizes)}
        await self.database.ask(SQL["note_size"], size, session)

    async def unindex_words(self, version_id: int, *, session: Session) -> None:
        """Remove the words of a retired version, so that search no longer finds it."""
        async for _ in self._word_pages("unindex_words", version_id, session):
            pass

    async def _word_pages(self, statement: str, version_id: int, session: Session) -> AsyncIterator[list[Row]]:
        """Run a statement page by page: a book has ten thousand chunks, too many for the time limit of a statement."""
        first = 0
        while True:
            params = {"version_id": version_id, "first": first, "last": first + _WORDS_PAGE - 1}
            page = await self.database.ask(SQL[statement], params, session)
            if page:
                yield page
            if len(page) < _WORDS_PAGE:
                return
            first += _WORDS_PAGE

    async def settle(self, limit: int = 200) -> int:
        """Upkeep: put new words and vectors into their indexes. Returns the number of vectors, at most `limit`."""
        await self.database.ask(SQL["clean_words"])
        settled = 0
        for row in await self.database.ask(SQL["with_table"]):
            while page := await self._settle(_space(row), min(_SETTLE_PAGE, limit - settled)):
                settled += page
        return settled

    async def drop_empty(self, limit: int = 100, *, keep_seconds: float = _DROP_AFTER_SECONDS) -> list[Space]:
        """Upkeep: drop spaces without vectors, but never the newest of a collection. Returns the dropped ones."""
        found = await self.database.ask(SQL["outdated"], {"limit": limit, "keep_seconds": keep_seconds})
        return [space for space in map(_space, found) if await self._drop_if_empty(space)]

    async def drop(self, space: Space, *, session: Session) -> None:
        """Remove a space with its table. Rows without a table must be gone already, page by page."""
        if space.has_table:
            await session.rows((await self.statements_of(space, session=session))["drop_table"])
        await self.database.ask(SQL["remove"], {"space_id": space.id}, session)

    async def remove_page(self, space: Space, limit: int, *, session: Session) -> int:
        """Remove some vectors of a space that has no table. Returns how many."""
        return len(await self.database.ask(SQL["remove_page"], {"space_id": space.id, "limit": limit}, session))

    # ----------------------------------------------------------------------------------------------------------------

    async def _settle(self, space: Space, limit: int) -> int:
        if not space.has_index or limit < 1:
            return 0
        async with self.database.transaction() as session:
            if not await self.database.ask(SQL["hold"], {"space_id": space.id}, session):
                return 0
            settle = (await self.statements_of(space, session=session))["settle"]
            return len(await self.database.ask(settle, {"limit": limit}, session))

    async def _drop_if_empty(self, space: Space) -> bool:
        params = {"space_id": space.id}
        async with self.database.transaction() as session:
            if not await self.database.ask(SQL["lock"], params, session):
                return False
            look = (await self.statements_of(space, session=session) if space.has_table else SQL)["has_vectors"]
            ((has_vectors,),) = await self.database.ask(look, params, session)
            if not has_vectors:
                await self.drop(space, session=session)
            return not has_vectors

    async def _create_table(self, space: Space, session: Session) -> None:
        if space.has_table:
            made = await self.statements_of(space, session=session)
            await session.rows(made["create_table"])
            await session.rows(made["create_index_of_new"])
            if space.has_index:
                await session.rows(made["create_index"])

    async def statements_of(self, space: Space, *, session: Session | None = None) -> Mapping[str, str]:
        """The statements over the table of a space."""
        return table_statements(space, (await self._require_pgvector(session)).home)

    async def _require_pgvector(self, session: Session | None) -> Pgvector:
        """Uses the caller's transaction: code that holds a connection must not wait for another one."""
        if self._pgvector is None:
            _, self._pgvector = await self._look(session)
        if self._pgvector is None:
            raise DatabaseError(
                "this collection has its vectors in tables of pgvector, which is no longer installed in this database: "
                "CREATE EXTENSION vector, version 0.8 or newer"
            )
        return self._pgvector

    async def _install(self) -> None:
        try:
            await self.database.rows(_EXTENSION)
        except DatabaseUnavailable:
            raise
        except DatabaseError:
            pass  # we are not allowed to, or another process was faster

    async def _look(self, session: Session | None = None) -> tuple[bool, Pgvector | None]:
        """Whether the extension can be installed, and where it is."""
        for version, is_installed, home, type_id in await self.database.ask(SQL["pgvector"], {}, session):
            is_new = _is_new_enough(version)
            return is_new and not is_installed, Pgvector(home, type_id) if is_new and is_installed else None
        return False, None


@functools.lru_cache(maxsize=1024)
def table_statements(space: Space, home: str) -> Mapping[str, str]:
    """The statements over the table of one space."""
    type = "vector" if space.dimensions <= _VECTOR_DIMENSIONS_MAX else "halfvec"
    parts = {
        "table": f"batchwright.ingest_vectors_{space.id:d}",
        "home": home,
        "type": f"{home}.{type}",
        "operators": f"{home}.{type}_cosine_ops",
        "dimensions": f"{space.dimensions:d}",
    }
    return statements(__package__, "vectors.sql", parts={**FILTERS, **parts})


def binary_vector(embedding: bytes) -> bytes:
    """A vector as pgvector receives it: the number of dimensions, two unused bytes, big-endian floats."""
    values = array("f")
    values.frombytes(embedding)
    if sys.byteorder == "little":
        values.byteswap()
    return struct.pack(">HH", len(values), 0) + values.tobytes()


def _binary_array(embeddings: Iterable[bytes], type_id: int) -> bytes:
    """An array of vectors as PostgreSQL receives it."""
    parts = [binary_vector(embedding) for embedding in embeddings]
    head = struct.pack(">iiIii", 1, 0, type_id, len(parts), 1)
    return head + b"".join(struct.pack(">i", len(part)) + part for part in parts)


def _check_sizes(space: Space, vectors: Mapping[int, bytes]) -> None:
    for chunk_id, embedding in vectors.items():
        if len(embedding) != 4 * space.dimensions:
            found = len(embedding) / 4
            raise ValueError(f"the vector of chunk {chunk_id} has {found:g} dimensions, not {space.dimensions}")


def _is_new_enough(version: str) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) >= _VERSION_MIN


def _space(row: Row) -> Space:
    return Space(**dict(zip(Space.__dataclass_fields__, row, strict=True)))
