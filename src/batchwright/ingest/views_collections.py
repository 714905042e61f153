"""Collections, their documents, and search results, as the API shows them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from batchwright.api.schemas import Answer
from batchwright.ingest.collections import Collection, StoredChunk, StoredDocument
from batchwright.ingest.search import Found, Hit
from batchwright.ingest.spaces import Space


class SpaceView(Answer):
    """The vectors of one embedder."""

    model: str | None = Field(description="Null for an embedder that runs in the worker; see `fingerprint`.")
    fingerprint: str
    dimensions: int
    index: str = Field(description="How search finds the nearest vectors.")


class CollectionView(Answer):
    """A collection and its size."""

    object: Literal["collection"] = "collection"
    name: str
    language: str = Field(description="Text search configuration for the search by words.")
    documents: int
    chunks: int
    text_bytes: int
    is_more: bool = Field(description="Whether there are more documents than were counted.")
    spaces: list[SpaceView]
    created_at: datetime
    updated_at: datetime | None = Field(description="When its newest document version was created.")

    @classmethod
    def of(cls, collection: Collection) -> CollectionView:
        same = set(cls.model_fields) - {"object", "spaces"}
        return cls(
            **{name: getattr(collection, name) for name in same}, spaces=[_space(space) for space in collection.spaces]
        )


def _space(space: Space) -> SpaceView:
    return SpaceView.model_validate(space)


class DocumentView(Answer):
    """A document that search finds."""

    object: Literal["collection.document"] = "collection.document"
    id: int
    source: str
    name: str
    chunks: int | None
    text_bytes: int | None
    metadata: dict[str, Any]
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, document: StoredDocument) -> DocumentView:
        return cls.model_validate(document)


class ChunkView(Answer):
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

    @classmethod
    def of(cls, chunk: StoredChunk) -> ChunkView:
        return cls.model_validate(chunk)


class DeletedView(Answer):
    """A deleted object."""

    object: Literal["collection", "collection.document"]
    collection: str
    id: int | None = Field(description="Id of the deleted document; null for a collection.")
    deleted: Literal[True] = True


class MentionView(Answer):
    """An entity in a passage."""

    type: str
    text: str
    char_start: int
    char_end: int


class HitView(Answer):
    """A passage that was found."""

    collection: str
    source: str
    name: str
    document_id: int
    chunk_id: int
    page_first: int | None
    page_last: int | None
    section: list[str]
    char_start: int = Field(description="Where it begins in the text of the document, in characters.")
    char_end: int
    text: str
    score: float = Field(description="Only comparable within one search.")
    ranks: dict[str, int] = Field(description="Its rank by words and by vectors, from 1.")
    marks: list[tuple[int, int]] = Field(description="Where words of the query are, in characters of `text`.")
    metadata: dict[str, Any]
    mentions: list[MentionView]

    @classmethod
    def of(cls, hit: Hit) -> HitView:
        return cls.model_validate(hit)


class SearchView(Answer):
    """The passages that answer a query, the best first."""

    object: Literal["list"] = "list"
    collection: str
    query: str
    data: list[HitView]
    used: list[str] = Field(description="How they were found, and what was left out and why.")
    seconds: float

    @classmethod
    def of(cls, collection: str, query: str, found: Found) -> SearchView:
        hits = [HitView.of(hit) for hit in found.hits]
        return cls(collection=collection, query=query, data=hits, used=found.used, seconds=found.seconds)
