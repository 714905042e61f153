"""The listing of a source: an iterator of documents that knows at the end whether it saw all of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

SKIPPED_MAX = 1_000
_NAME_CHARACTERS_MAX = 1_000
_ESCAPED = re.compile(r"[^\ud800-\udc7f\udd00-\udfff]*")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A document that can be fetched."""

    uri: str
    """Its address, the same in every run: `file:///…`, `https://…`, `s3://bucket/key`, `gs://…` or
    `az://account/container/…`."""
    name: str
    """The name shown to users, relative to the source: `2024/report.pdf`."""
    etag: str | None
    """Changes when the content may have changed; None for a URL, which was not requested yet."""
    size: int | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What search can filter on, such as the folder."""


class Reason(StrEnum):
    """Why something was left out of a listing."""

    BAD_LINE = "bad_line"
    EXCLUDED = "excluded"
    HIDDEN = "hidden"
    LINK = "link"
    SPECIAL = "special"
    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    UNREADABLE = "unreadable"
    UNSUPPORTED = "unsupported"


GAPS = frozenset({Reason.BAD_LINE, Reason.TOO_MANY, Reason.UNREADABLE})
"""Reasons that may hide a document. After one of these, missing documents do not count as removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Something that was left out, and why."""

    name: str
    reason: Reason
    message: str


class Listing:
    """The documents of some sources. It can be read once, has each URI once, and has the same order in every run."""

    def __init__(self, entries: Callable[[Listing], AsyncIterator[Listed]], documents_max: int) -> None:
        self.count = 0
        """Documents so far."""
        self.skipped: list[Skipped] = []
        """The first files that were left out; `skipped_counts` counts all of them."""
        self.skipped_counts: Counter[Reason] = Counter()
        self._documents_max = documents_max
        self._has_ended = False
        self._entries = self._checked(entries(self))

    @property
    def is_complete(self) -> bool:
        """Whether the listing is finished and cannot have missed anything, so that documents not in it are gone."""
        return self._has_ended and not any(self.skipped_counts[reason] for reason in GAPS)

    @property
    def skipped_total(self) -> int:
        return self.skipped_counts.total()

    def skip(self, name: str, reason: Reason, message: str) -> None:
        self.skipped_counts[reason] += 1
        # A gap decides whether documents are removed, so it is always reported, even after a thousand hidden files.
        if len(self.skipped) < SKIPPED_MAX or (reason in GAPS and self.skipped_counts[reason] <= SKIPPED_MAX):
            self.skipped.append(Skipped(name=name, reason=reason, message=message))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Listed:
        return await anext(self._entries)

    async def _checked(self, entries: AsyncIterator[Listed]) -> AsyncIterator[Listed]:
        seen: set[str] = set()
        async for listed in entries:
            if listed.uri in seen:
                continue
            if self.count == self._documents_max:
                message = (
                    f"there are more than {self._documents_max} documents; list fewer sources, or raise documents_max"
                )
                self.skip(listed.name, Reason.TOO_MANY, message)
                break
            seen.add(listed.uri)
            self.count += 1
            yield listed
        self._has_ended = True


def shown_name(name: str) -> str:
    """A name that can be stored and shown anywhere: invalid UTF-8 bytes and control characters become `\\xff`."""
    raw = name.encode("utf-8", "surrogateescape") if _ESCAPED.fullmatch(name) else name.encode("utf-8", "replace")
    text = raw.decode("utf-8", "backslashreplace")
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)[:_NAME_CHARACTERS_MAX]
