"""Nearest vectors without pgvector: a thread compares all vectors of a space.

Vectors stay in memory as long as there is room. When the space has changed, only its list of ids and its new vectors
are read again.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.db.database import Database, Row, Session
from batchwright.db.statements import statements
from batchwright.errors import ConfigurationError
from batchwright.ingest.spaces import Space

SQL = statements(__package__, "exact.sql")
_PAGE_BYTES = 4_000_000
_CACHE_BYTES = 256_000_000


@dataclass(frozen=True, slots=True)
class Block:
    """Normalized vectors of a space, in ascending order of their chunk ids."""

    ids: Any
    matrix: Any

    @property
    def size(self) -> int:
        return int(self.ids.nbytes + self.matrix.nbytes)


@dataclass(frozen=True, slots=True)
class _Kept:
    changes: int
    block: Block


class ExactScan:
    """Compares a query with every vector of a space."""

    def __init__(self, database: Database, *, cache_bytes: int = _CACHE_BYTES) -> None:
        self._database = database
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    async def nearest(
        self, space: Space, query: bytes, limit: int, *, among: Sequence[int] | None, session: Session
    ) -> list[int]:
        """Ids of the nearest chunks, the nearest first; with `among`, only those."""
        numpy = require_numpy()
        wanted = numpy.frombuffer(query, dtype="<f4")
        allowed = None if among is None else numpy.array(sorted(among), dtype=numpy.int64)
        best: list[tuple[float, int]] = []
        async for block in self._blocks(space, session):
            found = await asyncio.to_thread(_best, numpy, block, wanted, limit, allowed)
            best = sorted(best + found)[:limit]
        return [id for _, id in best]

    async def _blocks(self, space: Space, session: Session) -> AsyncIterator[Block]:
        """The whole space from memory, or page by page if it does not fit."""
        ((changes,),) = await self._database.ask(SQL["changes"], {"space_id": space.id}, session) or [(None,)]
        if changes is None:
            return
        kept = self._kept.get(space.id)
        if kept is None or kept.changes != changes:
            ids = [id for (id,) in await self._database.ask(SQL["ids"], {"space_id": space.id}, session)]
            if len(ids) * (8 + 4 * space.dimensions) > self._cache_bytes:
                self._kept.pop(space.id, None)
                async for block in self._pages(space, session):
                    yield block
                return
            kept = _Kept(changes, await self._refresh(space, kept, ids, session))
            self._keep(space.id, kept)
        self._kept.move_to_end(space.id)
        yield kept.block

    async def _refresh(self, space: Space, kept: _Kept | None, ids: list[int], session: Session) -> Block:
        """The current vectors: known ones from memory, new ones from the database."""
        numpy = require_numpy()
        now = numpy.array(ids, dtype=numpy.int64)
        old = kept.block if kept else _block(numpy, space, [])
        new = numpy.setdiff1d(now, old.ids, assume_unique=True)
        size = _page_rows(space)
        blocks = [old]
        for first in range(0, len(new), size):
            wanted = {"space_id": space.id, "chunk_ids": new[first : first + size].tolist()}
            rows = await self._database.ask(SQL["read"], wanted, session)
            blocks.append(await asyncio.to_thread(_block, numpy, space, rows))
        return await asyncio.to_thread(_join, numpy, blocks, now)

    async def _pages(self, space: Space, session: Session) -> AsyncIterator[Block]:
        numpy = require_numpy()
        after = -1
        while True:
            page = {"space_id": space.id, "after": after, "limit": _page_rows(space)}
            rows = await self._database.ask(SQL["page"], page, session)
            if not rows:
                return
            after = rows[-1][0]
            yield await asyncio.to_thread(_block, numpy, space, rows)

    def _keep(self, space_id: int, kept: _Kept) -> None:
        self._kept[space_id] = kept
        self._kept.move_to_end(space_id)
        while sum(one.block.size for one in self._kept.values()) > self._cache_bytes:
            self._kept.popitem(last=False)


def require_numpy() -> Any:
    """Import numpy late: only installations without pgvector need it."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        message = "search over vectors without pgvector needs numpy: pip install 'batchwright[documents]'"
        raise ConfigurationError(message) from None


def _page_rows(space: Space) -> int:
    return max(1, _PAGE_BYTES // (4 * space.dimensions))


def _block(numpy: Any, space: Space, rows: Sequence[Row]) -> Block:
    ids = numpy.array([id for id, _ in rows], dtype=numpy.int64)
    data = b"".join(embedding for _, embedding in rows)
    matrix = numpy.frombuffer(data, dtype="<f4").reshape(len(rows), space.dimensions).astype(numpy.float32)
    lengths = numpy.linalg.norm(matrix, axis=1, keepdims=True)
    return Block(ids, matrix / numpy.where(lengths > 0, lengths, 1))


def _join(numpy: Any, blocks: Sequence[Block], now: Any) -> Block:
    ids = numpy.concatenate([block.ids for block in blocks])
    keep = numpy.isin(ids, now)
    order = numpy.argsort(ids[keep], kind="stable")
    matrix = numpy.concatenate([block.matrix for block in blocks])[keep][order]
    return Block(ids[keep][order], matrix)


def _best(numpy: Any, block: Block, query: Any, limit: int, allowed: Any | None) -> list[tuple[float, int]]:
    """Order by cosine distance, then by id, so that results are repeatable."""
    ids, matrix = block.ids, block.matrix
    if allowed is not None:
        places = numpy.nonzero(numpy.isin(ids, allowed))[0]
        ids, matrix = ids[places], matrix[places]
    if not len(ids):
        return []
    length = float(numpy.linalg.norm(query)) or 1.0
    distances = 1 - (matrix @ query) / length
    near = numpy.argpartition(distances, limit - 1)[:limit] if limit < len(ids) else numpy.arange(len(ids))
    return sorted((float(distances[place]), int(ids[place])) for place in near)
