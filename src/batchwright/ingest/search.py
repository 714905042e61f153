"""Searches a collection: by words, by vectors, or by both.

By words: each selective word of the query finds a bounded number of chunks, which are ranked by how rare their words
are. By vectors: each space whose embedder answers returns its nearest chunks. The results are merged by rank, not by
score (reciprocal-rank fusion), because scores of different kinds cannot be compared. A search runs in one snapshot, so
it sees exactly one version of each document, even while that changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from batchwright.db.database import Database, Session
from batchwright.db.raw import Raw
from batchwright.db.statements import statements
from batchwright.errors import BatchwrightError, InvalidInput, NotFound
from batchwright.ingest.exact import ExactScan
from batchwright.ingest.questions import Probes, mark, read_filters, read_question, words_of
from batchwright.ingest.spaces import FILTERS, Space, Spaces, binary_vector

SQL = statements(__package__, "search.sql", parts=FILTERS)
Mode = Literal["hybrid", "words", "vectors"]
MODES: tuple[Mode, ...] = ("hybrid", "words", "vectors")
LIMIT_MAX = 100
_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_TUNE = (
    "SELECT set_config('hnsw.ef_search', %(breadth)s::text, true),"
    " set_config('hnsw.iterative_scan', 'strict_order', true)"
)
_FUSION = 60
_DEPTH_MIN = 50
_REACH = 400
_REACH_FILTERED = 2_000
_CANDIDATES = 150
_FEW_CHUNKS = 1_000
"""If a filter leaves no more chunks than this, search compares all of them."""
_MENTIONS_MAX = 20
_COMMON_SECONDS = 300.0


class Embedder(Protocol):
    """Turns queries into vectors of one space."""

    @property
    def fingerprint(self) -> str: ...

    async def embed_query(self, text: str) -> bytes:
        """The vector as float32, little-endian."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A passage that was found."""

    collection: str
    source: str
    name: str
    page_first: int | None
    page_last: int | None
    section: list[str]
    char_start: int
    char_end: int
    text: str
    score: float
    ranks: dict[str, int]
    """Its rank by words and by vectors, from 1."""
    marks: list[tuple[int, int]]
    """Where words of the query are, in characters of `text`."""
    metadata: dict[str, Any]
    mentions: list[dict[str, Any]]
    document_id: int
    chunk_id: int


@dataclass(frozen=True, slots=True)
class Found:
    """The hits of a search, the best first, and how they were found."""

    hits: list[Hit]
    used: list[str]
    """What was used, and what was left out and why."""
    seconds: float


@dataclass(slots=True)
class _Search:
    """A search in progress."""

    collection_id: int
    collection: str
    language: str
    probes: Probes
    vectors: list[tuple[Space, bytes]]
    filters: dict[str, Any] | None
    depth: int
    limit: int
    among: list[int] | None = None
    """The chunks that pass the filters, if they are few."""
    used: list[str] = field(default_factory=list)
    lists: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, Any]:
        return {"collection_id": self.collection_id, "limit": self.depth, **(self.filters or {})}


class Search:
    """Finds passages. `embedders` returns the embedder of a space, or None if it is not configured."""

    def __init__(
        self,
        database: Database,
        spaces: Spaces,
        embedders: Callable[[Space], Embedder | None],
        *,
        embed_seconds: float = 10.0,
    ) -> None:
        self._database = database
        self._spaces = spaces
        self._embedders = embedders
        self._embed_seconds = embed_seconds
        self._exact = ExactScan(database)
        self._common: tuple[float, dict[str, float]] = (0.0, {})

    async def search(
        self,
        tenant: str,
        collection: str,
        query: str,
        *,
        limit: int = 10,
        mode: Mode = "hybrid",
        filters: Mapping[str, str] | None = None,
    ) -> Found:
        """Passages of a collection that answer a query, the best first."""
        began = time.monotonic()
        if mode not in MODES:
            raise InvalidInput(f"the mode is {mode!r}; use one of: {', '.join(MODES)}", param="mode")
        if not 1 <= limit <= LIMIT_MAX:
            raise InvalidInput(f"the limit is {limit}; use 1 to {LIMIT_MAX}", param="limit")
        search = await self._prepare(tenant, collection, query, limit, read_filters(filters) if filters else None)
        if mode != "words":
            search.vectors = await self._embed(search, query, must=mode == "vectors")
        hits = await self._run(search, mode)
        return Found(hits, search.used, time.monotonic() - began)

    async def _prepare(
        self, tenant: str, collection: str, query: str, limit: int, filters: dict[str, Any] | None
    ) -> _Search:
        question = read_question(query)
        asked = {
            "tenant": tenant,
            "name": collection,
            "text": question.text,
            "phrases": list(question.phrases),
            "excluded": list(question.excluded),
        }
        for id, language, lexemes, phrases, excluded in await self._database.ask(SQL["prepare"], asked):
            probes = Probes.plan(id, lexemes, await self._shares(), phrases, excluded)
            return _Search(id, collection, language, probes, [], filters, max(_DEPTH_MIN, 5 * limit), limit)
        raise NotFound(f"no collection {collection!r}", kind="collection", id=collection)

    async def _run(self, search: _Search, mode: Mode) -> list[Hit]:
        async with self._database.transaction() as session:
            await session.rows(_SNAPSHOT)
            search.among = await self._few_passing(search, session)
            if mode != "vectors":
                await self._by_words(search, session)
            if search.vectors:
                await self._by_vectors(search, session)
            ranked = _fuse(search.lists)[: search.limit]
            return await self._hits(search, ranked, session)

    # Words ----------------------------------------------------------------------------------------------------------

    async def _by_words(self, search: _Search, session: Session) -> None:
        probes = search.probes
        if not probes.lexemes:
            search.used.append("words left out: the query has no words to search by")
            return
        looked_up = {
            "probes": probes.probes,
            "lexemes": probes.lexemes,
            "numbers": probes.numbers,
            "weights": probes.weights,
            "guesses": probes.guesses,
            "condition": probes.condition,
            "reach": _REACH_FILTERED if search.filters else _REACH,
            "candidates": max(_CANDIDATES, search.depth),
            "chunk_ids": search.among,
        }
        statement = SQL[
            "words" if search.filters is None else "words_passing" if search.among is None else "words_among"
        ]
        rows = await self._database.ask(statement, {**search.params, **looked_up}, session)
        search.lists["words"] = [[id for id, _ in rows]]
        search.used.append(f"words: {search.language}")

    async def _shares(self) -> dict[str, float]:
        """Shares of the most common lexemes. They are cached, because they change slowly."""
        until, shares = self._common
        if time.monotonic() >= until:
            shares = dict(await self._database.rows(SQL["common"]))
            self._common = (time.monotonic() + _COMMON_SECONDS, shares)
        return shares

    # Vectors --------------------------------------------------------------------------------------------------------

    async def _embed(self, search: _Search, query: str, *, must: bool) -> list[tuple[Space, bytes]]:
        """The query as a vector of each space. `must` means that a search without vectors is not possible."""
        embedded, failures = [], []
        for space in await self._spaces.of(search.collection_id):
            embedder = self._embedders(space)
            if embedder is None:
                search.used.append(
                    f"vectors left out: no embedder is configured for {space.model or space.fingerprint}"
                )
                continue
            try:
                async with asyncio.timeout(self._embed_seconds):
                    vector = await embedder.embed_query(query)
            except (BatchwrightError, OSError) as error:
                failures.append(error)
                reason = str(error) or "the model server does not answer"
                search.used.append(f"vectors left out: {space.model or space.fingerprint}: {reason}")
                continue
            embedded.append((space, vector))
        if must and failures and not embedded:
            raise failures[0]
        return embedded

    async def _by_vectors(self, search: _Search, session: Session) -> None:
        await self._database.ask(_TUNE, {"breadth": str(min(1000, 2 * search.depth))}, session)
        there = {space.id for space in await self._spaces.of(search.collection_id, session=session)}
        for space, vector in search.vectors:
            if space.id in there:
                found = await self._meeting(search, await self._nearest(search, space, vector, session), session)
                search.lists.setdefault("vectors", []).append(found)
                search.used.append(f"vectors: {space.model or space.fingerprint}-{space.dimensions}, {space.index}")

    async def _nearest(self, search: _Search, space: Space, vector: bytes, session: Session) -> list[int]:
        among = search.among
        if not space.has_table:
            if search.filters and among is None:
                among = await self._passing(search, None, session)
            return await self._exact.nearest(space, vector, search.depth, among=among, session=session)
        name = "nearest" if search.filters is None else "nearest_passing" if among is None else "nearest_among"
        params = {**search.params, "query": Raw(binary_vector(vector)), "chunk_ids": list(among or ())}
        rows = await self._database.ask(
            (await self._spaces.statements_of(space, session=session))[name], params, session
        )
        return [id for id, _ in rows]

    async def _meeting(self, search: _Search, found: list[int], session: Session) -> list[int]:
        """The chunks that have the phrases of the query, and nothing that it excludes."""
        if search.probes.condition is None:
            return found
        params = {"chunk_ids": found, "condition": search.probes.condition}
        return [id for (id,) in await self._database.ask(SQL["meeting"], params, session)]

    async def _few_passing(self, search: _Search, session: Session) -> list[int] | None:
        """The chunks that pass a filter, if they are few."""
        if search.filters is None:
            return None
        found = await self._passing(search, _FEW_CHUNKS + 1, session)
        return found if len(found) <= _FEW_CHUNKS else None

    async def _passing(self, search: _Search, limit: int | None, session: Session) -> list[int]:
        name = "passing_documents" if search.params["metadata"] == "{}" else "passing"
        return [id for (id,) in await self._database.ask(SQL[name], {**search.params, "limit": limit}, session)]

    # Hits -----------------------------------------------------------------------------------------------------------

    async def _hits(self, search: _Search, ranked: Sequence[_Ranked], session: Session) -> list[Hit]:
        wanted = {"chunk_ids": [one.chunk_id for one in ranked], "mentions": _MENTIONS_MAX}
        rows = {row[0]: row for row in await self._database.ask(SQL["hits"], wanted, session)}
        matching = await self._matching(search, [row[9] for row in rows.values()], session)
        return [_hit(search.collection, one, rows[one.chunk_id], matching) for one in ranked if one.chunk_id in rows]

    async def _matching(self, search: _Search, texts: Sequence[str], session: Session) -> set[str]:
        if not search.probes.any:
            return set()
        words = sorted(set().union(*map(words_of, texts)))
        asked = {"words": "\n".join(words), "language": search.language, "query": search.probes.any}
        return {word for (word,) in await self._database.ask(SQL["matching_words"], asked, session)}


@dataclass(frozen=True, slots=True)
class _Ranked:
    chunk_id: int
    score: float
    ranks: dict[str, int]


def _fuse(lists: Mapping[str, Sequence[Sequence[int]]]) -> list[_Ranked]:
    """Reciprocal-rank fusion: chunks that rank high in many lists come first."""
    ranks: dict[int, dict[str, int]] = {}
    scores: dict[int, float] = {}
    for kind, found in lists.items():
        for ids in found:
            for rank, id in enumerate(ids, 1):
                scores[id] = scores.get(id, 0.0) + 1 / (_FUSION + rank)
                known = ranks.setdefault(id, {})
                known[kind] = min(rank, known.get(kind, rank))
    best = sorted((-score, id) for id, score in scores.items())
    return [_Ranked(id, -score, ranks[id]) for score, id in best]


def _hit(collection: str, ranked: _Ranked, row: Sequence[Any], matching: set[str]) -> Hit:
    chunk_id, document_id, source, name, page_first, page_last, section, start, end, text, metadata, mentions = row
    return Hit(
        collection=collection,
        source=source,
        name=name,
        page_first=page_first,
        page_last=page_last,
        section=section,
        char_start=start,
        char_end=end,
        text=text,
        score=ranked.score,
        ranks=ranked.ranks,
        marks=mark(text, matching),
        metadata=metadata,
        mentions=mentions,
        document_id=document_id,
        chunk_id=chunk_id,
    )
