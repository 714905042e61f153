"""Mentions of entities, and the interface of extractors that find them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from batchwright.inference.calls import Ledger


@dataclass(frozen=True, slots=True)
class Mention:
    """An entity in a window: `window[start:end] == text`."""

    type: str
    text: str
    start: int
    end: int


class EntityExtractor(Protocol):
    """Finds mentions in windows of text."""

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean the same request, so that equal windows need only one answer."""

    @property
    def model(self) -> str | None:
        """None for an extractor that runs in this process and costs nothing."""

    async def extract(self, windows: Mapping[bytes, str], ledger: Ledger) -> None:
        """Settle the mentions of each window under its key. On an error, settle the other windows first, then raise."""


def dump_mentions(mentions: Iterable[Mention]) -> bytes:
    """Mentions as a ledger stores them: a JSON list of {type, text, start, end}."""
    return msgspec.json.encode(list(mentions))


def load_mentions(value: bytes) -> list[Mention]:
    return msgspec.json.decode(value, type=list[Mention])
