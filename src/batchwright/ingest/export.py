"""Export of a collection: one row for each live chunk, as JSON lines or as Parquet.

Rows are read in pages, so memory is bounded whatever the size. If a document changes during the export, its rows are
those of the version that was live when its page was read: versions never change. Documents that are added during the
export may or may not be included.
"""

from __future__ import annotations

import asyncio
import importlib
import io
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import orjson

from batchwright.db.database import Database
from batchwright.db.statements import statements
from batchwright.errors import ConfigurationError, NotFound
from batchwright.ingest.spaces import Space, Spaces

SQL = statements(__package__, "export.sql")
_PAGE = 500
_MENTIONS_MAX = 1_000
_ROW_GROUP = 2_000

Exported = dict[str, Any]


class _Document(NamedTuple):
    id: int
    source: str
    name: str
    version_id: int
    chunks: int
    metadata: dict[str, Any]


class Export:
    """Reads collections page by page."""

    def __init__(self, database: Database, spaces: Spaces) -> None:
        self._database = database
        self._spaces = spaces

    async def rows(
        self, tenant: str, collection: str, *, with_vectors: bool = False, after: int = 0
    ) -> AsyncIterator[Exported]:
        """All live chunks, by document and position; `after` is the last document id of an interrupted export."""
        collection_id = await self._find(tenant, collection)
        while documents := await self._documents(collection_id, after):
            for group in _groups(documents):
                spaces = await self._spaces.of(collection_id) if with_vectors else []
                async for row in self._chunks(group, spaces):
                    if not with_vectors:
                        del row["vector"], row["model"]
                    yield {"collection": collection, **row}
            after = documents[-1].id

    async def _find(self, tenant: str, collection: str) -> int:
        for (id,) in await self._database.ask(SQL["collection"], {"tenant": tenant, "name": collection}):
            return int(id)
        raise NotFound(f"no collection {collection!r}", kind="collection", id=collection)

    async def _documents(self, collection_id: int, after: int) -> list[_Document]:
        params = {"collection_id": collection_id, "after": after, "page": _PAGE}
        return [_Document(*row) for row in await self._database.ask(SQL["documents"], params)]

    async def _chunks(self, group: Sequence[_Document], spaces: Sequence[Space]) -> AsyncIterator[Exported]:
        """The chunks of some documents; a single document may fill many pages."""
        by_version = {document.version_id: document for document in group}
        after = -1
        while True:
            limit = _PAGE if len(group) == 1 else None
            params = {"versions": list(by_version), "after": after, "limit": limit, "mentions": _MENTIONS_MAX}
            rows = await self._database.ask(SQL["chunks"], params)
            vectors = await self._vectors([row[0] for row in rows], spaces)
            for row in rows:
                yield _row(by_version[row[1]], row, vectors.get(row[0]))
            if limit is None or len(rows) < limit:
                return
            after = rows[-1][2]

    async def _vectors(self, chunk_ids: list[int], spaces: Sequence[Space]) -> dict[int, tuple[Space, list[float]]]:
        """The vector of each chunk; where there are several, that of the newest space."""
        found: dict[int, tuple[Space, list[float]]] = {}
        for space in spaces:
            params = {"chunk_ids": chunk_ids, "space_id": space.id}
            statement = (await self._spaces.statements_of(space))["read"] if space.has_table else SQL["vectors"]
            for chunk_id, embedding in await self._database.ask(statement, params):
                found[chunk_id] = (space, embedding if space.has_table else _floats(embedding))
        return found


async def jsonl_lines(rows: AsyncIterator[Exported]) -> AsyncGenerator[bytes, None]:
    """Each row as a line of JSON."""
    async for row in rows:
        yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


async def write_jsonl(rows: AsyncIterator[Exported], stream: BinaryIO) -> int:
    """Write all rows as JSON lines. Returns how many."""
    count = 0
    async for line in jsonl_lines(rows):
        stream.write(line)
        count += 1
    return count


async def write_parquet(rows: AsyncIterator[Exported], stream: BinaryIO, *, with_vectors: bool = False) -> int:
    """Write all rows as Parquet. Returns how many. Metadata is JSON text."""
    count = 0

    async def counted() -> AsyncIterator[Exported]:
        nonlocal count
        async for row in rows:
            count += 1
            yield row

    async for piece in parquet_pieces(counted(), with_vectors=with_vectors):
        stream.write(piece)
    return count


async def parquet_pieces(rows: AsyncIterator[Exported], *, with_vectors: bool = False) -> AsyncGenerator[bytes, None]:
    """All rows as Parquet, one group of rows at a time. Pieces that were yielded are no longer kept in memory."""
    arrow, parquet = require_parquet()
    schema, sink = _schema(arrow, with_vectors), _Sink()
    with parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        group: list[Exported] = []
        async for row in rows:
            group.append({**row, "metadata": orjson.dumps(row["metadata"]).decode()})
            if len(group) >= _ROW_GROUP:
                await asyncio.to_thread(_write_group, arrow, writer, group, schema)
                group = []
                yield sink.take()
        if group:
            await asyncio.to_thread(_write_group, arrow, writer, group, schema)
    yield sink.take()


class _Sink(io.RawIOBase):
    """A file-like buffer: the writer appends to it, and `take` removes what was written so far."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._size += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._size


def _write_group(arrow: Any, writer: Any, group: list[Exported], schema: Any) -> None:
    writer.write_table(arrow.Table.from_pylist(group, schema=schema))


def _schema(arrow: Any, with_vectors: bool) -> Any:
    entity = [
        ("type", arrow.string()),
        ("text", arrow.string()),
        ("char_start", arrow.int32()),
        ("char_end", arrow.int32()),
    ]
    columns = {
        "collection": arrow.string(),
        "source": arrow.string(),
        "name": arrow.string(),
        "document_id": arrow.int64(),
        "chunk_id": arrow.int64(),
        "number": arrow.int32(),
        "page_first": arrow.int32(),
        "page_last": arrow.int32(),
        "section": arrow.list_(arrow.string()),
        "char_start": arrow.int32(),
        "char_end": arrow.int32(),
        "text": arrow.string(),
        "metadata": arrow.string(),
        "entities": arrow.list_(arrow.struct(entity)),
    }
    vector = {"vector": arrow.list_(arrow.float32()), "model": arrow.string()} if with_vectors else {}
    return arrow.schema(list({**columns, **vector}.items()))


def _groups(documents: Sequence[_Document]) -> Iterator[list[_Document]]:
    """Groups of documents that fit into one page; a larger document is a group by itself."""
    group: list[_Document] = []
    size = 0
    for document in documents:
        if group and size + document.chunks > _PAGE:
            yield group
            group, size = [], 0
        group.append(document)
        size += document.chunks
    if group:
        yield group


def _row(document: _Document, row: Sequence[Any], vector: tuple[Space, list[float]] | None) -> Exported:
    id, _, number, page_first, page_last, section, char_start, char_end, text, entities = row
    return {
        "source": document.source,
        "name": document.name,
        "document_id": document.id,
        "chunk_id": id,
        "number": number,
        "page_first": page_first,
        "page_last": page_last,
        "section": section,
        "char_start": char_start,
        "char_end": char_end,
        "text": text,
        "metadata": document.metadata,
        "entities": entities,
        "vector": vector[1] if vector else None,
        "model": (vector[0].model or vector[0].fingerprint) if vector else None,
    }


def _floats(embedding: bytes) -> list[float]:
    values = array("f")
    values.frombytes(embedding)
    return values.tolist()


def require_parquet() -> tuple[Any, Any]:
    """pyarrow and its Parquet module, or ConfigurationError."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigurationError("Parquet needs pyarrow: pip install 'batchwright[parquet]'") from None
