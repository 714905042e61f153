"""What a step can use: its document, its run, and the tools of its worker."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from batchwright.engine.owned import Held
from batchwright.engine.queue import Queue
from batchwright.errors import NotFound, SchemaInvalid, StorageError
from batchwright.inference.tokens import estimate_tokens
from batchwright.ingest.chunk import Chunk, ChunkSettings, chunk_id, chunk_text, fingerprint
from batchwright.ingest.items import Item
from batchwright.ingest.ledger import Answers, ItemLedger
from batchwright.ingest.library import Library
from batchwright.ingest.machine import Live, Machine
from batchwright.ingest.metrics import IngestCounts
from batchwright.ingest.models import Models
from batchwright.ingest.money import Prices
from batchwright.ingest.rates import Rates
from batchwright.ingest.requests import Requests
from batchwright.ingest.results import OutputLost
from batchwright.ingest.runs import Run
from batchwright.ingest.sandbox import Sandbox
from batchwright.ingest.sources import Sources
from batchwright.ingest.spaces import Spaces
from batchwright.ingest.text import CanonicalText
from batchwright.private import make_folders
from batchwright.storage import Store

T = TypeVar("T")
FETCHED = "FETCHED"
CONTENT_EXTRACTED = "CONTENT_EXTRACTED"
CHUNKED = "CHUNKED"
EMBEDDED = "EMBEDDED"
ENTITY_EXTRACTED = "ENTITY_EXTRACTED"
PERSISTED = "PERSISTED"
INDEXED = "INDEXED"
FOLDER = "ingest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A chunk with its text, key and hash."""

    number: int
    chunk: Chunk
    key: str
    """Identifies this position in this text."""
    hash: bytes
    """Depends only on the words, so that equal passages are embedded once."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools that the steps of a worker process share."""

    queue: Queue
    store: Store
    folder: Path
    """For files that are kept only as long as a step runs."""
    answers: Answers
    counts: IngestCounts
    library: Library
    models: Models
    prices: Prices
    rates: Rates
    requests: Requests
    sandboxes: Sandboxes
    sources: Sources
    spaces: Spaces
    turns: asyncio.Semaphore
    """Limits work in threads to the number of cores."""


class Sandboxes:
    """A pool of sandboxes, each for one document at a time. They start at first use."""

    def __init__(self, count: int) -> None:
        self._all = [Sandbox() for _ in range(count)]
        self._free: asyncio.LifoQueue[Sandbox] = asyncio.LifoQueue()
        for sandbox in self._all:
            self._free.put_nowait(sandbox)

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Sandbox]:
        sandbox = await self._free.get()
        try:
            yield sandbox
        finally:
            self._free.put_nowait(sandbox)

    async def close(self) -> None:
        for sandbox in self._all:
            await sandbox.close()


@dataclass(slots=True, kw_only=True)
class StepContext:
    """What a step can use; one for each run of an item's job."""

    tools: Tools
    machine: Machine
    held: Held
    _texts: dict[str, asyncio.Task[CanonicalText]] = field(default_factory=dict, repr=False)

    @property
    def item(self) -> Item:
        return self.machine.item

    @property
    def run(self) -> Run:
        return self.machine.run

    @property
    def live(self) -> Live | None:
        """The version of the document that search finds now."""
        return self.machine.live

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings of the run, as they were when it was created."""
        return self.run.config

    @property
    def outputs(self) -> Mapping[str, Mapping[str, Any]]:
        """Outputs of the previous steps, by name."""
        return self.machine.outputs

    async def text(self) -> CanonicalText:
        """The canonical text, which all steps read."""
        key = self.outputs[CONTENT_EXTRACTED]["text_key"]
        if key not in self._texts:
            self._texts = {key: asyncio.ensure_future(self._load_text(key))}
        try:
            return await asyncio.shield(self._texts[key])
        except (OutputLost, StorageError):
            self._texts.pop(key, None)  # a later call may succeed
            raise

    async def passages(self) -> list[Passage]:
        """The chunks of the text. They are a pure function of it, so each branch computes its own."""
        return await self.compute(plan_passages, await self.text(), self.config)

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Run slow code in a thread. The number of threads is limited, so that they do not starve the event loop."""
        async with self.tools.turns:
            return await asyncio.to_thread(function, *args)

    def ledger(self, fingerprint: str) -> ItemLedger:
        """Where a step records what it pays for."""
        return ItemLedger(
            queue=self.tools.queue,
            held=self.held,
            run=self.run,
            item=self.item,
            fingerprint=fingerprint,
            prices=self.tools.prices,
            rates=self.tools.rates,
            counts=self.tools.counts,
        )

    def object_key(self, name: str) -> str:
        """Key of an object of this document in the store."""
        return f"{FOLDER}/{self.item.collection_id}/{self.item.document_id}/{name}"

    @contextlib.contextmanager
    def folder(self) -> Any:
        """A temporary folder for this step, which only our user can read."""
        make_folders(self.tools.folder)
        with tempfile.TemporaryDirectory(dir=self.tools.folder, prefix="step-") as made:
            yield Path(made)

    async def _load_text(self, key: str) -> CanonicalText:
        try:
            packed = b"".join([piece async for piece in self.tools.store.get(key)])
        except NotFound:
            raise OutputLost(CONTENT_EXTRACTED) from None
        return await asyncio.to_thread(msgspec.msgpack.decode, packed, type=CanonicalText)


def chunk_settings(config: Mapping[str, Any]) -> ChunkSettings:
    return ChunkSettings(**config["chunk"])


def plan_passages(text: CanonicalText, config: Mapping[str, Any]) -> list[Passage]:
    settings = chunk_settings(config)
    print_ = fingerprint(settings)
    digest = text.digest
    passages = []
    for number, chunk in enumerate(chunk_text(text, settings)):
        words = text.text[chunk.start : chunk.end]
        passages.append(
            Passage(
                number=number,
                chunk=chunk,
                key=chunk_id(digest, print_, chunk),
                hash=hashlib.sha256(words.encode()).digest(),
                text=words,
            )
        )
    if not passages:
        raise SchemaInvalid("the document has no text to cut into chunks", code="no_text")
    return passages


def digest_of(passages: Sequence[Passage]) -> str:
    """A digest of all chunks: branches with the same digest have cut the text at the same places."""
    return hashlib.sha256("".join(passage.key for passage in passages).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive passages that go into one request."""

    start: int
    hash: bytes
    text: str


def plan_windows(text: CanonicalText, passages: Sequence[Passage], per_window: int) -> list[Window]:
    """Windows without overlap, so that entities are rarely found twice."""
    windows = []
    for first in range(0, len(passages), per_window):
        some = passages[first : first + per_window]
        start = some[0].chunk.start + (some[0].chunk.overlap if first else 0)
        words = text.text[start : some[-1].chunk.end]
        if words.strip():
            windows.append(Window(start=start, hash=hashlib.sha256(words.encode()).digest(), text=words))
    return windows


def count_tokens(passages: Sequence[Passage]) -> int:
    return sum(estimate_tokens(passage.text) for passage in passages)
