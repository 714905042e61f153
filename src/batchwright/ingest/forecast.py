"""Estimates a run before it starts: lists its sources, and reads some documents of each format.

    list ── less what is unchanged ─▶ documents and bytes by format ─┐
                     └── a few of each format ─▶ fetch, extract, chunk ┴─▶ estimate

Nothing is stored and no model is called, so an estimate costs only time, which is bounded.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from batchwright.db.statements import statements
from batchwright.errors import ConfigurationError, Fatal, OperationError, SchemaInvalid
from batchwright.inference.budgets import RateLimits
from batchwright.inference.embeddings import PackLimits
from batchwright.inference.tokens import estimate_tokens
from batchwright.ingest.chunk import ChunkSettings, chunk_text
from batchwright.ingest.config import required_models
from batchwright.ingest.estimate import LANES, Embedding, Entities, Estimate, Recipe, Sampled, estimate
from batchwright.ingest.estimate import Listed as ListedFormat
from batchwright.ingest.extract.detect import expected_format
from batchwright.ingest.limits import Limits
from batchwright.ingest.runs import NewRun
from batchwright.ingest.sandbox import Sandbox
from batchwright.ingest.settings import NONE
from batchwright.ingest.sources import Fetched, Listed, Listing
from batchwright.ingest.submission import WantedRun

if TYPE_CHECKING:
    from batchwright.ingest.part import IngestPart

SQL = statements(__package__, "forecast.sql")
SAMPLE_PER_FORMAT = 8
SAMPLE_SECONDS = 30.0
"""After this time no more documents are read; those read so far are enough."""
_PAGE = 1000
_SANDBOXES_MAX = 4
_OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The estimate of a run before it starts."""

    estimate: Estimate
    lane: str
    models: Mapping[str, str]
    """Models that cost something, by the kind of their requests."""
    unchanged: int
    """Documents that need no work; no other figure includes them."""
    skipped: Mapping[str, int]
    """What the listing left out, by reason."""
    failing: Mapping[str, int]
    """Documents of the sample that cannot be read, by code."""
    unknown: Sequence[str]
    """What could not be estimated, and why, in words."""

    def document(self) -> dict[str, Any]:
        """As JSON, the form in which a run stores it."""
        return {
            **self.estimate.document(),
            "lane": self.lane,
            "models": dict(self.models),
            "unchanged": self.unchanged,
            "skipped": dict(self.skipped),
            "sample_failures": dict(self.failing),
            "unknown": list(self.unknown),
        }


async def forecast(
    part: IngestPart, wanted: WantedRun, *, per_format: int = SAMPLE_PER_FORMAT, seconds_max: float = SAMPLE_SECONDS
) -> Forecast:
    """What this run would need. Raises InvalidInput if it cannot be run."""
    new = part.submission.prepare(wanted)
    listed = await _Listed.read(part, new, per_format)
    sample = await _Reader(part, new).read(listed.sample, seconds_max)
    recipe = make_recipe(part, new.config)
    found = estimate(listed.formats, sample.documents, recipe)
    models = dict(required_models(new.config))
    return Forecast(
        estimate=found,
        lane=new.lane,
        models=models,
        unchanged=listed.unchanged,
        skipped={reason.value: count for reason, count in listed.listing.skipped_counts.items()},
        failing=sample.failures,
        unknown=[*listed.unknown(), *sample.problems, *_unknown_of(found, recipe, models)],
    )


def make_recipe(part: IngestPart, config: Mapping[str, Any]) -> Recipe:
    """What a run does with each document, with the prices and limits of the configuration."""
    entities, limits = config["entities"], PackLimits()
    paid = dict(required_models(config))
    return Recipe(
        chunks=ChunkSettings(**config["chunk"]),
        embedding=Embedding(
            inputs_per_request=limits.inputs, tokens_per_request=limits.tokens, **_use(part, paid.get("embedding"))
        ),
        entities=None
        if entities["model"] == NONE
        else Entities(chunks_per_window=entities["chunks"], **_use(part, paid.get("entities"))),
    )


def _use(part: IngestPart, model: str | None) -> dict[str, Any]:
    """A free model has neither a name nor a limit."""
    if model is None:
        return {}
    gateway = part.models.gateway(model)
    limits = RateLimits() if gateway is None else RateLimits.of(gateway.settings)
    return {
        "model": model,
        "prices": {lane: part.prices.find(model, lane) for lane in LANES},
        "budget": model if gateway is None else gateway.endpoint,
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
    }


def _unknown_of(found: Estimate, recipe: Recipe, models: Mapping[str, str]) -> list[str]:
    unknown = []
    if found.documents and not found.sampled:
        unknown.append("pages, tokens and cost: no document could be read for the sample")
    paid = [use for use in (recipe.embedding, recipe.entities) if use is not None and use.model is not None]
    unknown += [
        f"cost: the price of {use.model!r} is unknown; set it in [ingest.prices]"
        for use in paid
        if use.price("realtime") is None
    ]
    if models and found.sampled and found.seconds is None:
        unknown.append("time: no requests_per_minute or tokens_per_minute is set for the model server")
    return unknown


# The listing ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Listed:
    """A listing in progress: its counts, and a random sample of each format."""

    listing: Listing
    per_format: int
    unchanged: int = 0
    documents: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    without_size: Counter[str] = field(default_factory=Counter)
    _chosen: dict[str, list[Listed]] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    async def read(cls, part: IngestPart, new: NewRun, per_format: int) -> _Listed:
        config = new.config
        listing = part.sources.list(
            new.sources, include=config["include"], exclude=config["exclude"], roots=config["roots"]
        )
        found = cls(listing=listing, per_format=per_format)
        page: list[Listed] = []
        async for one in listing:
            page.append(one)
            if len(page) == _PAGE:
                await found._add(part, new, page)
                page = []
        await found._add(part, new, page)
        return found

    @property
    def formats(self) -> dict[str, ListedFormat]:
        return {
            format: ListedFormat(documents=count, bytes=self.bytes[format], without_size=self.without_size[format])
            for format, count in self.documents.items()
        }

    @property
    def sample(self) -> list[Listed]:
        """One document of each format in turn, so that all formats lose equally if time runs out."""
        longest = max(map(len, self._chosen.values()), default=0)
        return [chosen[place] for place in range(longest) for chosen in self._chosen.values() if place < len(chosen)]

    def unknown(self) -> list[str]:
        return [] if self.listing.is_complete else ["documents: parts of the sources could not be listed"]

    async def _add(self, part: IngestPart, new: NewRun, page: Sequence[Listed]) -> None:
        unchanged = set() if new.config["force"] else await _find_unchanged(part, new, page)
        self.unchanged += len(unchanged)
        for one in page:
            if one.uri not in unchanged:
                self._count(one)

    def _count(self, one: Listed) -> None:
        format = expected_format(one.name) or _OTHER
        self.documents[format] += 1
        if one.size is None:
            self.without_size[format] += 1
        else:
            self.bytes[format] += one.size
        chosen = self._chosen.setdefault(format, [])
        if len(chosen) < self.per_format:
            chosen.append(one)
        elif (place := self._random.randrange(self.documents[format])) < self.per_format:
            chosen[place] = one


async def _find_unchanged(part: IngestPart, new: NewRun, page: Sequence[Listed]) -> set[str]:
    known = [{"source": one.uri, "etag": one.etag} for one in page if one.etag is not None]
    if not known:
        return set()
    params = {"tenant": new.tenant, "collection": new.collection, "recipe": new.recipe}
    rows = await part.core.queue.database.ask(SQL["unchanged"], {**params, "listed": orjson.dumps(known).decode()})
    return {source for (source,) in rows}


# The sample ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sample:
    documents: list[Sampled] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class _Reader:
    """Reads documents as a run would, and keeps nothing but their sizes."""

    def __init__(self, part: IngestPart, new: NewRun) -> None:
        self._sources = part.sources
        self._config = new.config
        self._chunks = ChunkSettings(**new.config["chunk"])
        self._limits = Limits(**new.config["limits"])
        self._found = _Sample()

    async def read(self, chosen: Sequence[Listed], seconds_max: float) -> _Sample:
        until = time.monotonic() + seconds_max
        left = iter(enumerate(chosen))
        with tempfile.TemporaryDirectory(prefix="batchwright-") as folder:
            count = min(_SANDBOXES_MAX, os.cpu_count() or 1, len(chosen))
            await asyncio.gather(*(self._read_some(left, Path(folder), until) for _ in range(count)))
        return self._found

    async def _read_some(self, left: Any, folder: Path, until: float) -> None:
        async with Sandbox(self._limits) as sandbox:
            for number, listed in left:
                if time.monotonic() > until:
                    return
                await self._read_one(sandbox, listed, folder / str(number))

    async def _read_one(self, sandbox: Sandbox, listed: Listed, path: Path) -> None:
        """Count a document that would fail in a run, too; ignore one that the run would retry."""
        format = expected_format(listed.name) or _OTHER
        try:
            fetched = await self._sources.fetch(listed.uri, path, roots=self._config["roots"])
            assert isinstance(fetched, Fetched), "no etag was given"
            text = await sandbox.extract(path, name=fetched.name or listed.name)
            chunks = await asyncio.to_thread(lambda: len(chunk_text(text, self._chunks)))
        except (Fatal, SchemaInvalid) as error:
            self._found.failures[error.code or error.kind] += 1
            self._found.documents.append(Sampled(format=format, bytes=listed.size or 0, is_failed=True))
        except (OperationError, ConfigurationError) as error:
            problem = f"{format}: {error}"
            if problem not in self._found.problems:
                self._found.problems.append(problem)
        else:
            self._found.documents.append(
                Sampled(
                    format=format,
                    bytes=fetched.size,
                    characters=len(text.text),
                    tokens=estimate_tokens(text.text),
                    pages=len(text.pages) or None,
                    chunks=chunks,
                )
            )
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)
