"""Chunks of canonical text: a pure function of text and settings, so that every step computes the same ones.

A chunk ends at the strongest break in the second half of its maximum size: a section, a paragraph, a line, a sentence,
a word, a character. Among equal breaks, the text after each one decides, not its position. So after an edit, the
chunks soon end where they did before, keep their digests, and are not embedded again.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from batchwright.errors import ConfigurationError
from batchwright.inference.tokens import estimate_tokens
from batchwright.ingest.graphemes import is_boundary
from batchwright.ingest.text import CanonicalText

_VERSION = 1
_CHARACTERS_MIN = 16
_CHOSEN_BY_CHARACTERS = 32
_BREAKS = (
    re.compile(r"\n\n"),
    re.compile(r"\n"),
    re.compile(r"""[.!?\u2026]["'\u201d\u2019\u00bb)\]]*[ \t\n]+|[\u3002\uff01\uff1f]"""),
    re.compile(r"[ \t\u2000-\u2006\u2008-\u200a\u3000]"),
)
_SPACE = re.compile(r"\s+")
_NOT_SPACE = re.compile(r"\S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Counts tokens. Its name is part of the fingerprint, because another counter may give other chunks."""

    name: str
    count: Callable[[str], int]


ESTIMATE = Tokenizer(name="estimate", count=estimate_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSettings:
    characters: int = 1_500
    """Maximum number of characters of a chunk, including its overlap."""
    overlap: int = 150
    """Maximum number of characters that a chunk repeats from the one before, if both are in the same section."""
    tokens: int | None = None
    """Maximum number of tokens of a chunk, if the model has such a limit."""

    def __post_init__(self) -> None:
        if self.characters < _CHARACTERS_MIN:
            raise ConfigurationError(f"characters is {self.characters}; it must be at least {_CHARACTERS_MIN}")
        if not 0 <= self.overlap <= self.characters // 2:
            raise ConfigurationError(f"overlap is {self.overlap}; use 0 to half of characters")
        if self.tokens is not None and self.tokens < 1:
            raise ConfigurationError(f"tokens is {self.tokens}; it must be above 0, and for no limit leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A passage: `text[start:end]`, whose first `overlap` characters are the end of the chunk before."""

    start: int
    end: int
    overlap: int
    page_first: int | None
    page_last: int | None
    section: tuple[str, ...]


def chunk_text(text: CanonicalText, settings: ChunkSettings, tokenizer: Tokenizer = ESTIMATE) -> list[Chunk]:
    """Chunks in order. They cover every character except the white space between them."""
    return list(_Chunker(text, settings, tokenizer).run())


def fingerprint(settings: ChunkSettings, tokenizer: Tokenizer = ESTIMATE) -> str:
    """Equal fingerprints give equal chunks. Raise the version here when a change of this module moves a boundary."""
    limit = f"{settings.tokens}:{tokenizer.name}" if settings.tokens is not None else "any"
    return f"chunk:{_VERSION}:{settings.characters}:{settings.overlap}:{limit}"


def chunk_id(digest: str, fingerprint: str, chunk: Chunk) -> str:
    """The name of a chunk of the text with this digest. It is the same in every process."""
    return hashlib.sha256(f"{digest}:{fingerprint}:{chunk.start}:{chunk.end}".encode()).hexdigest()


class _Chunker:
    def __init__(self, source: CanonicalText, settings: ChunkSettings, tokenizer: Tokenizer) -> None:
        self._source = source
        self._text = source.text
        self._settings = settings
        self._tokenizer = tokenizer
        self._section_starts = [section.start for section in source.sections]

    def run(self) -> Iterator[Chunk]:
        body = self._skip_space(0)
        before = body
        while body < len(self._text):
            start = self._begin_overlap(before, body)
            start, end = self._fit(start, body)
            yield self._describe(start, body, end)
            before, body = body, self._skip_space(end)

    def _describe(self, start: int, body: int, end: int) -> Chunk:
        end = start + len(self._text[start:end].rstrip())
        return Chunk(
            start=start,
            end=end,
            overlap=body - start,
            page_first=self._source.page_at(start),
            page_last=self._source.page_at(end - 1),
            section=self._source.section_at(body),
        )

    def _begin_overlap(self, before: int, body: int) -> int:
        """Where the overlap begins: at a word in the chunk before, within this section and the maximum overlap."""
        place = bisect_left(self._section_starts, body + 1) - 1
        section = self._section_starts[place] if place >= 0 else 0
        low = max(body - self._settings.overlap, section, before)
        if low not in (section, before) and (space := _SPACE.search(self._text, low, body)):
            low = space.end()
        while low < body and not is_boundary(self._text, low, origin=before):
            low += 1
        return low

    def _fit(self, start: int, body: int) -> tuple[int, int]:
        """Start and end of a chunk within both limits. The overlap is dropped if there is no room for it."""
        end = self._break(body, start + self._settings.characters)
        limit = self._settings.tokens
        while limit is not None and (tokens := self._tokenizer.count(self._text[start:end])) > limit:
            shorter = self._break(body, max(start + (end - start) * limit // tokens, body + 1))
            if shorter < end:
                end = shorter
            elif start < body:
                start = body
            else:
                break
        return start, end

    def _break(self, body: int, limit: int) -> int:
        """The best place to cut after `body` and not after `limit`."""
        if limit >= len(self._text):
            return len(self._text)
        floor = body + (limit - body) // 2
        for places in chain([self._sections_in(floor, limit)], self._breaks_in(floor, limit)):
            usable = [place for place in places if is_boundary(self._text, place, origin=body)]
            if usable:
                return min(usable, key=self._draw)
        return self._break_anywhere(body, limit)

    def _break_anywhere(self, body: int, limit: int) -> int:
        """Cut between characters. A character is only cut if it is longer than a chunk, e.g. with a million accents."""
        longest = min(body + self._settings.characters, len(self._text))
        for place in chain(range(limit, body, -1), range(limit + 1, longest + 1)):
            if is_boundary(self._text, place, origin=body):
                return place
        return longest

    def _sections_in(self, floor: int, limit: int) -> Iterable[int]:
        starts = self._section_starts
        return starts[bisect_left(starts, floor + 1) : bisect_left(starts, limit + 1)]

    def _breaks_in(self, floor: int, limit: int) -> Iterator[Iterable[int]]:
        for pattern in _BREAKS:
            yield [found.end() for found in pattern.finditer(self._text, floor, limit)]

    def _draw(self, place: int) -> int:
        return zlib.crc32(self._text[place : place + _CHOSEN_BY_CHARACTERS].encode())

    def _skip_space(self, offset: int) -> int:
        """Skip white space. A space with a combining accent does not count as white space."""
        found = _NOT_SPACE.search(self._text, offset)
        place = found.start() if found else len(self._text)
        return place if is_boundary(self._text, place, origin=offset) else place - 1
