"""How documents are read, cut, embedded and kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from batchwright.errors import ConfigurationError
from batchwright.inference.prices import Price
from batchwright.ingest.chunk import ChunkSettings
from batchwright.ingest.limits import Limits
from batchwright.ingest.sources.settings import FetchSettings

LOCAL = "local"
HASH = "hash"
NONE = "none"
PATTERNS = "patterns"
Lane = Literal["realtime", "batch", "auto"]
_LANGUAGE = re.compile(r"[a-z_]{1,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSettings(FetchSettings):
    """Documents: sources, and how they are processed."""

    answers_kept_days: float = 90.0
    """How long a model's answer is kept after its last use, so that equal text is not paid for again."""
    batch_deadline_margin_seconds: float = 3600.0
    """In the lane `auto`: this long before the deadline of a run, requests that no batch has answered are sent in
    realtime."""
    batch_from_documents: int = 200
    """In the lane `auto`: runs with more documents to process than this use batches."""
    batch_wait_seconds: float = 30.0
    """In the batch lane: how long requests are gathered from many documents before they become a batch."""
    chunk_characters: int = 1_500
    """Maximum number of characters of a chunk, including its overlap."""
    chunk_overlap: int = 150
    """Maximum number of characters that a chunk repeats from the one before."""
    chunk_tokens: int | None = None
    """Maximum number of tokens of a chunk, if the model has such a limit."""
    embedding_dimensions: int | None = None
    """Length of a vector, if the model lets you choose."""
    embedding_model: str = LOCAL
    """A model that a gateway serves. `local` embeds in the worker, without a network; `hash` also needs no weights."""
    entities: str = PATTERNS
    """How entities are found: `patterns`, `none`, or a chat model that a gateway serves."""
    entity_chunks: int = 2
    """Number of chunks in one request to the model: more of them cost less and find less."""
    entity_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Words to find as entities, by type, in the form { product = ["Batchwright"] }; with `patterns`."""
    entity_types: tuple[str, ...] = ("person", "organization", "location", "product", "event")
    """Types of entities to request from the model."""
    lane: Lane = "auto"
    """How requests reach models: `realtime`, `batch` (cheaper, hours later), or `auto` (small runs in realtime)."""
    language: str = "english"
    """Text search configuration of PostgreSQL for the search by words: `english`, `german`, `simple`, …"""
    limits: Limits = field(default_factory=Limits)
    """Limits of one extraction."""
    max_retries: int = 5
    """How often a step that failed for a temporary reason is retried."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """Price of a million tokens of a model, in dollars; overrides the list that comes with Batchwright."""
    sandboxes: int = 0
    """Maximum number of documents that one worker process extracts at the same time; 0 means one for each core."""
    steps: tuple[str, ...] = ()
    """Modules, files or folders with your own steps; those of installed packages are found automatically."""

    def __post_init__(self) -> None:
        # `super()` without arguments would fail here, because `slots=True` creates the class a second time.
        FetchSettings.__post_init__(self)
        for name in ("entity_chunks", "max_retries", "answers_kept_days", "batch_wait_seconds"):
            least = 0 if name == "max_retries" else 1
            if getattr(self, name) < least:
                raise ConfigurationError(f"ingest.{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("batch_deadline_margin_seconds", "batch_from_documents"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"ingest.{name} is {getattr(self, name)}; it must be at least 0")
        if not _LANGUAGE.fullmatch(self.language):
            raise ConfigurationError(f"ingest.language is {self.language!r}; use one such as english, german or simple")
        if self.embedding_dimensions is not None and not 1 <= self.embedding_dimensions <= 16_000:
            raise ConfigurationError(f"ingest.embedding_dimensions is {self.embedding_dimensions}; use 1 to 16000")
        ChunkSettings(characters=self.chunk_characters, overlap=self.chunk_overlap, tokens=self.chunk_tokens)
