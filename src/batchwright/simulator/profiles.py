"""The speed of a simulated model server: its capacity as numbers, and presets with plausible ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The capacity of one model on one server; rates are in tokens per second, and 0 means no delay."""

    prefill_rate: float = 0.0
    """Prompt tokens per second that the server processes, shared by the requests in prefill."""
    decode_rate: float = 0.0
    """Tokens per second that one request writes when it is alone."""
    decode_rate_total: float = 0.0
    """Upper limit of tokens per second for all requests together; 0 means no limit."""
    max_running: int = 256
    """Maximum number of requests in prefill or decode at the same time; further ones wait."""
    max_waiting: int | None = None
    """Maximum number of waiting requests; further ones are refused. By default no limit, as with vLLM."""
    refuse_status: int = 429
    """The status with which requests are refused: 429 or 503."""
    retry_after: float = 1.0
    """The Retry-After header of a refusal, in seconds."""
    cache_blocks: int = 1 << 17
    """Blocks of 16 tokens that the prefix cache holds; 0 turns it off."""
    output_tokens: float = 128.0
    """Median number of output tokens if the request sets no maximum."""
    output_sigma: float = 0.6
    """Spread of that lognormal distribution; 0 makes all answers equally long."""
    context_tokens: int | None = None
    """Maximum length of prompt and answer together; by default no limit."""
    embedding_dimensions: int = 256
    """Dimensions of an embedding if the request does not set them."""

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "decode_rate", "decode_rate_total", "retry_after", "output_sigma", "cache_blocks"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be 0 or more")
        for name in ("max_running", "output_tokens", "embedding_dimensions"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be 1 or more")
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ConfigurationError(f"max_waiting is {self.max_waiting}, but must be 0 or more")
        if self.refuse_status not in (429, 503):
            raise ConfigurationError(f"refuse_status is {self.refuse_status}, but must be 429 or 503")

    def decode_rate_each(self, running: int) -> float:
        """A step of the server takes a fixed time, and a little more for every additional request in it."""
        ceiling = self.decode_rate_total
        return 1.0 / (1.0 / self.decode_rate + ((running - 1) / ceiling if ceiling else 0.0))

    def with_values(self, values: Mapping[str, Any]) -> Profile:
        """A copy with other numbers. The error for an unknown name lists the known ones."""
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(values) - known):
            raise ConfigurationError(f"a profile has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
        for name, value in values.items():
            may_be_unset = name in ("max_waiting", "context_tokens") and value is None
            if not may_be_unset and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ConfigurationError(f"{name} is {value!r}, but must be a number")
        return dataclasses.replace(self, **values)


# Plausible assumptions, not measurements: replace them with the numbers of your own server.
PROFILES: dict[str, Profile] = {
    "instant": Profile(max_running=100_000, cache_blocks=0),
    "fast": Profile(prefill_rate=200_000, decode_rate=500, decode_rate_total=50_000, max_running=256),
    "7b": Profile(prefill_rate=15_000, decode_rate=80, decode_rate_total=4_000, max_running=128),
    "8b-on-l4": Profile(
        prefill_rate=4_000, decode_rate=30, decode_rate_total=900, max_running=64, cache_blocks=3_000,
        context_tokens=32_768,
    ),
    "8b-on-h100": Profile(
        prefill_rate=40_000, decode_rate=150, decode_rate_total=12_000, max_running=256, cache_blocks=25_000,
        context_tokens=131_072,
    ),
    "70b-on-h100": Profile(
        prefill_rate=10_000, decode_rate=45, decode_rate_total=3_000, max_running=256, cache_blocks=15_000,
        context_tokens=131_072,
    ),
}  # fmt: skip


def profile(name: str) -> Profile:
    try:
        return PROFILES[name]
    except KeyError:
        raise ConfigurationError(f"there is no profile {name!r}; use one of: {', '.join(PROFILES)}") from None


def named_model(text: str, default: str) -> tuple[str, str]:
    """`qwen:7b` is the model qwen with the profile 7b, `qwen` has the default one."""
    name, colon, found = text.rpartition(":")
    if not colon:
        return text, default
    if not name or found not in PROFILES:
        raise ConfigurationError(
            f"{text!r} has no known profile after its last colon; use one of: {', '.join(PROFILES)}. "
            f"A model whose own name has a colon needs one too, as in {text}:{default}"
        )
    return name, found
