"""Token prices by model: from the user's table, or else from the list that comes with Batchwright.

`tools/prices.py` writes the list, `prices.json`. A price that neither has is None, never 0.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeVar

import orjson

from batchwright.errors import ConfigurationError

T = TypeVar("T")
Lane = Literal["realtime", "batch"]

EVERY_MODEL = "*"
"""In a table of prices: every model without its own price."""
WRITTEN = "configuration"
"""The source of a price that the user wrote."""
DERIVED = "the usual price less the provider's batch discount"
TOKENS_PER_PRICE = 1_000_000
_FOLDER = re.compile(r"^(?:.*/)?models/")
_TUNED = re.compile(r"^(ft:[^:]+):.*$")
_VERSION = re.compile(r"[-@](?:20\d\d-\d\d-\d\d|20\d{6}|00\d|default|latest)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of a model per million tokens, in the currency of your choice."""

    input: float = 0.0
    """Tokens of the prompt."""
    cached: float | None = None
    """Cached tokens of the prompt; by default they cost the same as other tokens of the prompt."""
    output: float = 0.0
    """Tokens of the answer."""

    def __post_init__(self) -> None:
        if min(self.input, self.output, self.cached or 0.0) < 0:
            raise ConfigurationError("a price is below 0; write what a million tokens cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Price per million tokens, in dollars."""

    input: Decimal
    """Tokens of the prompt."""
    output: Decimal
    """Tokens of the answer."""
    cached: Decimal | None = None
    """Cached tokens of the prompt; None means that they cost the same as other tokens of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPrice(Rates):
    """The price of a model, and its source."""

    source: str
    """`configuration`, or the list with its version and date."""
    long_prompt_tokens: int | None = None
    """A request whose prompt has more tokens than this costs `long_prompt`."""
    long_prompt: Rates | None = None


def find_model_price(model: str, *, lane: Lane, overrides: Mapping[str, Price]) -> ListedPrice | None:
    """The price in the user's table for this model, or for all models (`*`), in both lanes; else the price in the list.

    `provider/model` is looked up in that provider's list. A name alone is looked up only in the lists of those who
    make the models themselves, because several sell the same open model at different prices. None where the list has
    no price for this lane: batches may still be billed at the realtime price, and only the caller knows that.
    """
    found = look_up(overrides, names_of(model))
    if found is not None:
        return _written(found)
    entry = _list().find(model)
    said = entry if lane == "realtime" or entry is None else entry.get("batch")
    return None if said is None else _listed(said)


def cost_of(
    price: ListedPrice | None, *, prompt_tokens: int | None, completion_tokens: int | None, cached_tokens: int = 0
) -> Decimal | None:
    """The exact cost of one request; None if the price, or a token count that has a price, is unknown.

    The cached tokens are a part of the prompt's.
    """
    if price is None or prompt_tokens is None:
        return None
    rates: Rates = price
    if price.long_prompt is not None and prompt_tokens > (price.long_prompt_tokens or 0):
        rates = price.long_prompt
    if completion_tokens is None and rates.output:
        return None
    cached = min(cached_tokens, prompt_tokens)
    of_cached = rates.input if rates.cached is None else rates.cached
    total = (prompt_tokens - cached) * rates.input + cached * of_cached + (completion_tokens or 0) * rates.output
    return total / TOKENS_PER_PRICE


def list_source() -> str:
    """The source of the list's prices, with version and date."""
    return _list().source


def names_of(model: str) -> Iterator[str]:
    """Names under which a list may have a model: as written, without its path, and without its version."""
    name = _TUNED.sub(r"\1", _FOLDER.sub("", model.strip().casefold()))
    yield model.strip().casefold()
    yield name
    yield _VERSION.sub("", name)


def look_up(written: Mapping[str, T], names: Iterator[str] | Sequence[str]) -> T | None:
    """The entry of the first of these names in the user's table, or the entry for every model."""
    theirs = {name.casefold(): entry for name, entry in written.items()}
    return next((theirs[name] for name in (*names, EVERY_MODEL) if name in theirs), None)


def cost(usage_by_model: Mapping[str, Mapping[str, Any]], prices: Mapping[str, Price]) -> float | None:
    """The cost of the tokens so far; None if a model that used some has no price, since a partial sum misleads."""
    total = 0.0
    for model, usage in usage_by_model.items():
        price = prices.get(model) or prices.get(EVERY_MODEL)
        if price is not None:
            total += _priced(usage, price)
        elif any(usage.values()):
            return None
    return total if prices else None


def _priced(usage: Mapping[str, Any], price: Price) -> float:
    cached = min(usage.get("cached", 0), usage.get("input", 0))
    of_cached = price.input if price.cached is None else price.cached
    fresh = usage.get("input", 0) - cached
    return float(fresh * price.input + cached * of_cached + usage.get("output", 0) * price.output) / TOKENS_PER_PRICE


@dataclass(frozen=True, slots=True)
class _List:
    source: str
    makers: Sequence[str]
    """Providers whose models are found without the provider's name."""
    prices: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def find(self, model: str) -> Mapping[str, Any] | None:
        provider, _, rest = model.strip().casefold().partition("/")
        if rest and provider in self.prices:
            return _first(self.prices[provider], rest)
        found = [entry for maker in self.makers if (entry := _first(self.prices[maker], model)) is not None]
        return found[0] if found and all(entry == found[0] for entry in found) else None


def _first(prices: Mapping[str, Mapping[str, Any]], model: str) -> Mapping[str, Any] | None:
    return next((prices[name] for name in names_of(model) if name in prices), None)


@functools.cache
def _list() -> _List:
    """The list that comes with Batchwright, read when the first price is looked up."""
    document = orjson.loads(importlib.resources.files(__package__).joinpath("prices.json").read_bytes())
    return _List(f"{document['source']}, {document['date']}", document["makers"], document["prices"])


def _written(price: Price) -> ListedPrice:
    return ListedPrice(
        input=_exact(price.input),
        output=_exact(price.output),
        cached=None if price.cached is None else _exact(price.cached),
        source=WRITTEN,
    )


def _listed(said: Mapping[str, Any]) -> ListedPrice:
    source, long = _list().source, said.get("long_prompt")
    return ListedPrice(
        **_figures(said),
        source=f"{source}: {DERIVED}" if said.get("derived") else source,
        long_prompt_tokens=long and long["tokens"],
        long_prompt=long and Rates(**_figures(long)),
    )


def _figures(said: Mapping[str, Any]) -> dict[str, Decimal]:
    return {name: _exact(said[name]) for name in ("input", "output", "cached") if name in said}


def _exact(value: float) -> Decimal:
    """The number as written: 0.02, and not the nearest binary fraction."""
    return Decimal(str(value))
