"""Estimates what a run will need, from a listing and a sample of its documents. Pure functions without any I/O.

    listing ── documents and bytes by format ─┐
    sample ─── contents of some of them ──────┴─▶ pages, tokens, chunks, requests ─▶ cost by lane, time

Each figure has a lowest and a highest value. In about 19 of 20 cases the real value lies between them. The more the
documents of the sample resemble one another, the closer the bounds are. The estimate ignores the cache, and documents
that turn out to be unchanged: they only make a run cheaper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self

from batchwright.inference.prices import Lane, ListedPrice, cost_of
from batchwright.ingest.chunk import ChunkSettings

LANES: Sequence[Lane] = ("realtime", "batch")
_FILL = 0.75
"""Average fill of a chunk: it ends anywhere in the second half of its maximum size."""
_FACTOR = 2.0
"""Error factor of a figure that is based on a single document, or on documents of another format."""
_DEVIATIONS = 2.0
_MINUTE = 60.0
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Figure:
    """An estimate with its bounds."""

    low: float
    value: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Self:
        return cls(value, value, value)

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.low + other.low, self.value + other.value, self.high + other.high)

    def times(self, factor: float) -> Figure:
        return Figure(self.low * factor, self.value * factor, self.high * factor)

    def document(self) -> dict[str, float]:
        return {"low": _rounded(self.low), "value": _rounded(self.value), "high": _rounded(self.high)}

    def whole(self) -> dict[str, int]:
        """For counts: the bounds rounded outwards."""
        return {"low": math.floor(self.low), "value": round(self.value), "high": math.ceil(self.high)}


NOTHING = Figure.exactly(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The documents of one format that a listing has found."""

    documents: int
    bytes: int
    """Total size of the documents whose size is known."""
    without_size: int = 0
    """Number of documents whose size the source does not report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A document of the sample, as it was extracted."""

    format: str
    bytes: int
    characters: int = 0
    tokens: int = 0
    pages: int | None = None
    """None for formats without pages."""
    chunks: int | None = None
    """None if unknown; then it is estimated from the characters."""
    is_failed: bool = False
    """Whether it could not be extracted, so that it needs no further steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """A model that every document uses, with its prices and rate limits."""

    model: str | None = None
    """None for a model in this process, which costs nothing."""
    prices: Mapping[Lane, ListedPrice | None] | None = None
    """By lane; if a lane is missing or None, its cost is unknown."""
    budget: str = "default"
    """Models of the same budget share its limits."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None

    def price(self, lane: Lane) -> ListedPrice | None:
        return (self.prices or {}).get(lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(ModelUse):
    """How chunks become vectors."""

    inputs_per_request: int = 2048
    tokens_per_request: int = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entities(ModelUse):
    """How entities are found."""

    chunks_per_window: int = 1
    prompt_tokens: int = 400
    """Instructions and schema, which every window repeats."""
    answer_tokens: int = 200
    """Average size of a window's answer. A guess: the real value is between half and double of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run does with each document."""

    chunks: ChunkSettings
    embedding: Embedding | None = None
    entities: Entities | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run will need."""

    documents: int
    bytes: int
    sampled: int
    """Documents that the figures are based on; with none, only documents and bytes are known."""
    failing: Figure
    """Documents that cannot be extracted."""
    pages: Figure
    tokens: Figure
    chunks: Figure
    embedding_tokens: Figure
    embedding_requests: Figure
    entity_windows: Figure
    entity_prompt_tokens: Figure
    entity_answer_tokens: Figure
    cost: Mapping[Lane, Figure | None]
    """In dollars; None if a model has no price, because a partial sum would mislead."""
    seconds: Figure | None
    """In the realtime lane, at the configured limits; None without limits."""
    price_sources: Sequence[str]

    def document(self) -> dict[str, Any]:
        """As JSON; what is unknown is null."""
        counted = {name: getattr(self, name).whole() for name in _COUNTED} if self.sampled else dict.fromkeys(_COUNTED)
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "sampled": self.sampled,
            **counted,
            "cost": {lane: found and found.document() for lane, found in self.cost.items()},
            "seconds": self.seconds and self.seconds.document(),
            "price_sources": list(self.price_sources),
        }


_COUNTED = (
    "failing",
    "pages",
    "tokens",
    "chunks",
    "embedding_tokens",
    "embedding_requests",
    "entity_windows",
    "entity_prompt_tokens",
    "entity_answer_tokens",
)


def estimate(listing: Mapping[str, Listed], sample: Sequence[Sampled], recipe: Recipe) -> Estimate:
    """Extrapolate the sample to the listing, format by format."""
    totals = {name: _extrapolate(listing, sample, measure) for name, measure in _measures(recipe).items()}
    needs = _Needs(
        embedding_requests=totals["embedding_requests"],
        embedding_tokens=totals["embedding_tokens"],
        answer_tokens=_answers(totals["entity_windows"], recipe.entities),
        entity_tokens=totals["entity_prompt_tokens"],
        windows=totals["entity_windows"],
    )
    return Estimate(
        documents=sum(one.documents for one in listing.values()),
        bytes=sum(one.bytes for one in listing.values()),
        sampled=len(sample),
        entity_answer_tokens=needs.answer_tokens,
        cost={lane: needs.cost(recipe, lane) if sample else None for lane in LANES},
        seconds=needs.seconds(recipe) if sample else None,
        price_sources=_sources(recipe),
        **totals,
    )


def chunks_of(characters: int, settings: ChunkSettings) -> int:
    """About how many chunks a text of this length has."""
    return math.ceil(characters / max(1.0, _FILL * (settings.characters - settings.overlap)))


# Needs of a sampled document -----------------------------------------------------------------------------------------

_Measure = tuple[Callable[[Sampled], float], bool]
"""A measure, and whether it grows with the bytes of a document or is counted per document."""


def _measures(recipe: Recipe) -> dict[str, _Measure]:
    settings, embedding, entities = recipe.chunks, recipe.embedding, recipe.entities

    def chunks(one: Sampled) -> int:
        return chunks_of(one.characters, settings) if one.chunks is None else one.chunks

    def embedding_tokens(one: Sampled) -> float:
        repeated = max(0, chunks(one) - 1) * settings.overlap
        return one.tokens * (1 + repeated / one.characters) if one.characters else 0.0

    def embedding_requests(one: Sampled) -> float:
        assert embedding is not None
        by_tokens = embedding_tokens(one) / embedding.tokens_per_request
        return max(math.ceil(chunks(one) / embedding.inputs_per_request), math.ceil(by_tokens))

    def windows(one: Sampled) -> float:
        assert entities is not None
        return math.ceil(chunks(one) / entities.chunks_per_window)

    def entity_tokens(one: Sampled) -> float:
        assert entities is not None
        return one.tokens + windows(one) * entities.prompt_tokens

    def nothing(_: Sampled) -> float:
        return 0.0

    return {
        "failing": (lambda one: one.is_failed, False),
        "pages": (lambda one: one.pages or 0, True),
        "tokens": (lambda one: one.tokens, True),
        "chunks": (chunks, True),
        "embedding_tokens": (embedding_tokens if embedding else nothing, True),
        "embedding_requests": (embedding_requests if embedding else nothing, False),
        "entity_windows": (windows if entities else nothing, True),
        "entity_prompt_tokens": (entity_tokens if entities else nothing, True),
    }


def _answers(windows: Figure, entities: Entities | None) -> Figure:
    if entities is None:
        return NOTHING
    tokens = entities.answer_tokens
    return Figure(windows.low * tokens / _FACTOR, windows.value * tokens, windows.high * tokens * _FACTOR)


# Extrapolation -------------------------------------------------------------------------------------------------------


def _extrapolate(listing: Mapping[str, Listed], sample: Sequence[Sampled], measure: _Measure) -> Figure:
    """The sum over formats. The errors of formats are independent, so their squares add up."""
    by_format: dict[str, list[Sampled]] = defaultdict(list)
    for one in sample:
        by_format[one.format].append(one)
    low = value = high = 0.0
    for name, listed in listing.items():
        found = _of_format(listed, by_format.get(name, []), sample, measure)
        value += found.value
        low += (found.value - found.low) ** 2
        high += (found.high - found.value) ** 2
    return Figure(max(0.0, value - math.sqrt(low)), value, value + math.sqrt(high))


def _of_format(listed: Listed, sample: Sequence[Sampled], others: Sequence[Sampled], measure: _Measure) -> Figure:
    of, by_bytes = measure
    is_known = bool(sample)
    sample = sample or others
    total = _size(listed, sample) if by_bytes else listed.documents
    sizes = [float(one.bytes) if by_bytes else 1.0 for one in sample]
    values = [float(of(one)) for one in sample]
    if not total or not sum(sizes):
        return NOTHING
    ratio = sum(values) / sum(sizes)
    value = ratio * total
    if is_known and len(sample) >= listed.documents:
        return Figure.exactly(sum(values))
    if not is_known or len(sample) == 1:
        return Figure(value / _FACTOR, value, value * _FACTOR)
    error = _DEVIATIONS * _deviation(values, sizes, ratio, listed.documents) * total
    # The total is at least what the sample holds, whatever the deviation.
    return Figure(min(value, max(sum(values), value - error)), value, value + error)


def _size(listed: Listed, sample: Sequence[Sampled]) -> float:
    """All bytes of a format; documents without a size count as average."""
    known = listed.documents - listed.without_size
    if known > 0:
        return listed.bytes * listed.documents / known
    return listed.documents * sum(one.bytes for one in sample) / len(sample) if sample else 0.0


def _deviation(values: Sequence[float], sizes: Sequence[float], ratio: float, documents: int) -> float:
    """The standard error of a ratio of sums. It shrinks as the sample covers more of the documents."""
    count = len(values)
    mean = sum(sizes) / count
    squares = sum((value - ratio * size) ** 2 for value, size in zip(values, sizes, strict=True))
    unseen = max(0.0, 1 - count / documents)
    return math.sqrt(unseen * squares / (count - 1) / count) / mean


# Cost and time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    embedding_requests: Figure
    embedding_tokens: Figure
    entity_tokens: Figure
    answer_tokens: Figure
    windows: Figure

    def cost(self, recipe: Recipe, lane: Lane) -> Figure | None:
        parts = (
            _cost(recipe.embedding, lane, self.embedding_tokens, NOTHING),
            _cost(recipe.entities, lane, self.entity_tokens, self.answer_tokens),
        )
        known = [part for part in parts if part is not None]
        return sum(known, NOTHING) if len(known) == len(parts) else None

    def seconds(self, recipe: Recipe) -> Figure | None:
        """Budgets run in parallel; the uses of one budget share it."""
        by_budget: dict[str, Figure] = {}
        for use, requests, tokens in (
            (recipe.embedding, self.embedding_requests, self.embedding_tokens),
            (recipe.entities, self.windows, self.entity_tokens + self.answer_tokens),
        ):
            if use is not None and use.model is not None and (found := _seconds(use, requests, tokens)) is not None:
                by_budget[use.budget] = by_budget.get(use.budget, NOTHING) + found
        if not by_budget:
            return None
        times = zip(*map(_bounds, by_budget.values()), strict=True)
        return Figure(*map(max, times))


def _cost(use: ModelUse | None, lane: Lane, prompt: Figure, answer: Figure) -> Figure | None:
    if use is None or use.model is None:
        return NOTHING
    price = use.price(lane)
    bounds = ((prompt.low, answer.low), (prompt.value, answer.value), (prompt.high, answer.high))
    found = [_dollars(price, asked, answered) for asked, answered in bounds]
    known = [float(one) for one in found if one is not None]
    return Figure(*known) if len(known) == len(bounds) else None


def _dollars(price: ListedPrice | None, prompt: float, answer: float) -> Decimal | None:
    """Uses the price of short prompts: no chunk or window is longer."""
    if price is None:
        return None
    short = ListedPrice(input=price.input, output=price.output, cached=price.cached, source=price.source)
    return cost_of(short, prompt_tokens=math.ceil(prompt), completion_tokens=math.ceil(answer))


def _seconds(use: ModelUse, requests: Figure, tokens: Figure) -> Figure | None:
    by_requests = requests.times(_MINUTE / use.requests_per_minute) if use.requests_per_minute else NOTHING
    by_tokens = tokens.times(_MINUTE / use.tokens_per_minute) if use.tokens_per_minute else NOTHING
    if not use.requests_per_minute and not use.tokens_per_minute:
        return None
    return Figure(*(max(pair) for pair in zip(_bounds(by_requests), _bounds(by_tokens), strict=True)))


def _bounds(figure: Figure) -> tuple[float, float, float]:
    return figure.low, figure.value, figure.high


def _sources(recipe: Recipe) -> list[str]:
    uses = [use for use in (recipe.embedding, recipe.entities) if use is not None]
    return sorted({price.source for use in uses for lane in LANES if (price := use.price(lane)) is not None})


def _rounded(value: float) -> float:
    return round(value, _DIGITS)
