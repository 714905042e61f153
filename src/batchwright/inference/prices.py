"""What tokens cost, by model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.errors import ConfigurationError

EVERY_MODEL = "*"
_TOKENS_PER_PRICE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a million tokens of a model cost, in the currency of your choice."""

    input: float = 0.0
    """Tokens of the prompt."""
    cached: float | None = None
    """Tokens of the prompt that the server had in its cache; unset, they cost what the others cost."""
    output: float = 0.0
    """Tokens of the answer."""

    def __post_init__(self) -> None:
        if min(self.input, self.output, self.cached or 0.0) < 0:
            raise ConfigurationError("a price is below 0; write what a million tokens cost")


def cost(usage_by_model: Mapping[str, Mapping[str, Any]], prices: Mapping[str, Price]) -> float | None:
    """What the tokens so far cost; None if a model that used some has no price, because a part is no cost."""
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
    return float(fresh * price.input + cached * of_cached + usage.get("output", 0) * price.output) / _TOKENS_PER_PRICE
