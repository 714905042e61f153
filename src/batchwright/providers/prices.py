"""Prices of a provider's batch work: from the user's table, or else from the list that comes with Batchwright.

`tools/prices.py` writes the list, `prices.json`. A price that is in neither is None, never 0.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batchwright.errors import ConfigurationError
from batchwright.inference.prices import DERIVED, EVERY_MODEL, TOKENS_PER_PRICE, WRITTEN, look_up, names_of
from batchwright.providers.contract import Result, Usage

ANY = EVERY_MODEL
_SECONDS_PER_HOUR = 3_600


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderPrice:
    """What a model costs in a provider's batch API, in dollars."""

    input: float | None = None
    """Price of a million tokens of prompts."""
    output: float | None = None
    """Price of a million tokens of answers."""
    cached: float | None = None
    """Price of a million tokens of prompts that the provider read from its cache; by default that of `input`."""
    cache_write: float | None = None
    """Price of a million tokens of prompts that the provider wrote to its cache; by default that of `input`."""
    audio_hour: float | None = None
    """Price of an hour of audio."""

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached", "cache_write", "audio_hour"):
            price = getattr(self, name)
            if price is not None and not 0 <= price < float("inf"):
                raise ConfigurationError(f"{name} of a provider's price is {price}; it must be 0 or more, in dollars")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price(ProviderPrice):
    """A price, and its source."""

    source: str
    long_prompt: LongPrompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """The price of requests whose prompts have more than `tokens` tokens."""

    tokens: int
    price: ProviderPrice


class Bill:
    """The cost of one job, added up result by result, because long prompts may have their own price."""

    def __init__(self, price: Price | None) -> None:
        self._price = price
        self._total: float | None = None
        self._is_known = True

    def add(self, result: Result) -> None:
        """A failure without usage costs nothing. A success without usage makes the whole cost unknown."""
        if result.usage == Usage():
            self._is_known = self._is_known and result.error is not None
            return
        spent = cost(self._price, result.usage)
        if spent is None:
            self._is_known = False
        else:
            self._total = (self._total or 0.0) + spent

    @property
    def cost(self) -> float | None:
        return self._total if self._is_known else None

    @property
    def source(self) -> str | None:
        """Which price was used."""
        return None if self._price is None else self._price.source


def cost(price: ProviderPrice | None, usage: Usage) -> float | None:
    """The cost of one request; None if a part of it has no price, or its amount is unknown."""
    if price is None:
        return None
    if usage.audio_seconds is not None:
        return None if price.audio_hour is None else usage.audio_seconds / _SECONDS_PER_HOUR * price.audio_hour
    if usage.input_tokens is None and usage.output_tokens is None:
        return None
    if isinstance(price, Price) and price.long_prompt and (usage.input_tokens or 0) > price.long_prompt.tokens:
        price = price.long_prompt.price
    total = 0.0
    for tokens, per_million in _split(price, usage):
        if tokens:
            if per_million is None:
                return None
            total += tokens / TOKENS_PER_PRICE * per_million
    return total


def _split(price: ProviderPrice, usage: Usage) -> Iterator[tuple[int, float | None]]:
    """Tokens by price. Tokens read from the cache, or written to it, are part of the prompt's tokens."""
    asked = usage.input_tokens or 0
    cached = min(usage.cached_tokens or 0, asked)
    written = min(usage.cache_written_tokens or 0, asked - cached)
    yield asked - cached - written, price.input
    yield cached, price.input if price.cached is None else price.cached
    yield written, price.input if price.cache_write is None else price.cache_write
    yield usage.output_tokens or 0, price.output


def find_price(written: Mapping[str, ProviderPrice], kind: str, model: str | None) -> Price | None:
    """The price in the user's table for this model, or for all models (`*`); or else the price in the built-in list."""
    names = list(names_of(model or ANY))
    if (price := look_up(written, names)) is not None:
        return Price(
            input=price.input,
            output=price.output,
            cached=price.cached,
            cache_write=price.cache_write,
            audio_hour=price.audio_hour,
            source=WRITTEN,
        )
    known = _list().kinds.get(kind, {})
    found = next((known[name] for name in (*names, ANY) if name in known), None)
    return None if found is None else _read(found, _list().source)


@dataclass(frozen=True, slots=True)
class _List:
    source: str
    kinds: Mapping[str, Mapping[str, Mapping[str, Any]]]


@functools.cache
def _list() -> _List:
    """The list that comes with Batchwright, read when the first price is looked up."""
    text = importlib.resources.files(__package__).joinpath("prices.json").read_bytes()
    document = orjson.loads(text)
    return _List(document["source"], document["prices"])


def list_source() -> str:
    """The source of the list's prices."""
    return _list().source


def listed_models(kind: str) -> int:
    """How many models of a provider have a price in the list."""
    return len(_list().kinds.get(kind, {}))


def _read(entry: Mapping[str, Any], source: str) -> Price:
    said = dict(entry)
    is_derived, long = said.pop("derived", False), dict(said.pop("long_prompt", {}))
    tokens = long.pop("tokens", 0)
    return Price(
        **said,
        source=f"{source}: {DERIVED}" if is_derived else source,
        long_prompt=LongPrompt(tokens=tokens, price=ProviderPrice(**long)) if long else None,
    )
