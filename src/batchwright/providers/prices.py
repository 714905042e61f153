"""What a provider's batch work costs. What is not known is None, never nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchwright.errors import ConfigurationError
from batchwright.providers.contract import Usage

_TOKENS_PER_PRICE = 1_000_000
_SECONDS_PER_HOUR = 3_600


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderPrice:
    """What a model costs in a provider's batch API."""

    input: float | None = None
    """A million tokens of prompts."""
    output: float | None = None
    """A million tokens of answers."""
    audio_hour: float | None = None
    """An hour of audio."""

    def __post_init__(self) -> None:
        if min(price for price in (self.input or 0.0, self.output or 0.0, self.audio_hour or 0.0)) < 0:
            raise ConfigurationError("a price of a provider is below 0; write what it costs")


def cost(price: ProviderPrice | None, usage: Usage) -> float | None:
    """What this much costs; None if a part of it has no price, or nobody said how much it was."""
    if price is None:
        return None
    if usage.audio_seconds is not None:
        return None if price.audio_hour is None else usage.audio_seconds / _SECONDS_PER_HOUR * price.audio_hour
    if usage.input_tokens is None and usage.output_tokens is None:
        return None
    total = 0.0
    for tokens, per_million in ((usage.input_tokens, price.input), (usage.output_tokens, price.output)):
        if tokens:
            if per_million is None:
                return None
            total += tokens / _TOKENS_PER_PRICE * per_million
    return total


def find_price(written: Mapping[str, ProviderPrice], kind: str, model: str | None) -> ProviderPrice | None:
    """What the configuration says of this model, or of all (`*`)."""
    return written.get(model or "*") or written.get("*")
