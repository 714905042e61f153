"""Canonical text: the string that every later step reads, with the offsets of its pages and sections.

Offsets count characters of `text` and are exact: `text[page.start:page.end]` is exactly that page. The text is in
Unicode's form NFC, its lines end with one newline, and it has no control characters except newline and tab.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.errors import Fatal

_LINE_ENDS = re.compile(r"\r\n?|[\f\v\x1c-\x1e\x85\u2028\u2029]")
_UNWANTED = re.compile(r"[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\u00ad\ufeff\ufdd0-\ufdef\ufffe\uffff]")
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_EMPTY_LINES = re.compile(r"\n{3,}")
_BETWEEN_BLOCKS = "\n\n"
_HEADING_CHARACTERS_MAX = 200
_WARNINGS_MAX = 20


@dataclass(frozen=True, slots=True)
class Page:
    """A page, slide or sheet: its number from 1, and its characters."""

    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Section:
    """The text from one heading to the next, under the headings above it, outermost first."""

    path: tuple[str, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalText:
    """The text of a document. Pages are in order and do not overlap; nor do sections."""

    text: str
    format: str
    pages: tuple[Page, ...] = ()
    sections: tuple[Section, ...] = ()
    warnings: tuple[str, ...] = ()
    """What a reader should know about the extraction, such as pages without text."""

    def __post_init__(self) -> None:
        for segments in (self.pages, self.sections):
            _check_order(segments, len(self.text))

    @property
    def digest(self) -> str:
        """A digest of this text: equal for equal text with equal pages and sections."""
        digest = hashlib.sha256(self.text.encode())
        digest.update(repr((self.pages, self.sections)).encode())
        return digest.hexdigest()

    def page_at(self, offset: int) -> int | None:
        """Number of the page that holds this character; between two pages, the one before."""
        found = _segment_at(self.pages, offset)
        return self.pages[found].number if found is not None else None

    def section_at(self, offset: int) -> tuple[str, ...]:
        """Headings above this character, outermost first."""
        found = _segment_at(self.sections, offset)
        return self.sections[found].path if found is not None else ()


class TextBuilder:
    """Builds canonical text block by block, and tracks the offset of each block."""

    def __init__(self, *, output_bytes: int, pages: int) -> None:
        self._blocks: list[str] = []
        self._length = 0
        self._is_set_apart = False
        self._output_bytes = output_bytes
        self._pages_max = pages
        self._page_starts: list[int] = []
        self._section_starts: list[tuple[int, tuple[str, ...]]] = []
        self._headings: list[tuple[int, str]] = []
        self.warnings: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self._length

    def add(self, block: str, *, separator: str = _BETWEEN_BLOCKS) -> None:
        """Append a block after a separator, which begins with a newline, so that no accent joins the previous block."""
        block = normalise(block)
        if not block:
            return
        if self._blocks:
            separator = _BETWEEN_BLOCKS if self._is_set_apart else separator
            self._blocks.append(separator)
            self._length += len(separator)
        self._is_set_apart = False
        self._blocks.append(block)
        self._length += len(block)
        if self._length > self._output_bytes:
            raise text_too_large(self._output_bytes)

    def begin_page(self) -> None:
        """Begin the next page, which may stay empty."""
        if len(self._page_starts) >= self._pages_max:
            raise too_many_pages(f"over {self._pages_max:,}", self._pages_max)
        self._page_starts.append(self._mark())

    def begin_section(self, heading: str, *, level: int, is_in_text: bool = True) -> None:
        """A heading of this level, 1 being outermost, ends the sections of its level and below."""
        heading = " ".join(normalise(heading).split())
        if not heading:
            return
        self._headings = [(depth, text) for depth, text in self._headings if depth < level]
        self._headings.append((level, heading[:_HEADING_CHARACTERS_MAX]))
        self._section_starts.append((self._mark(), tuple(text for _, text in self._headings)))
        if is_in_text:
            self.add(heading)
            self._is_set_apart = True

    def warn(self, warning: str) -> None:
        if len(self.warnings) < _WARNINGS_MAX:
            self.warnings.append(warning)

    def build(self, format: str) -> CanonicalText:
        text = "".join(self._blocks)
        starts = [min(start, len(text)) for start in self._page_starts]
        ends = [*starts[1:], len(text)]
        pages = (Page(number, *span) for number, span in enumerate(zip(starts, ends, strict=False), start=1))
        return CanonicalText(
            text=text,
            format=format,
            pages=tuple(pages),
            sections=self._build_sections(len(text)),
            warnings=tuple(self.warnings),
        )

    def _build_sections(self, length: int) -> tuple[Section, ...]:
        ends = [*(min(start, length) for start, _ in self._section_starts[1:]), length]
        spans = zip(self._section_starts, ends, strict=False)
        return tuple(Section(path, start, end) for (start, path), end in spans if start < end)

    def _mark(self) -> int:
        """Where the next block will begin, if `add` gets the usual separator."""
        self._is_set_apart = True
        return self._length + len(_BETWEEN_BLOCKS) if self._blocks else 0


def normalise(block: str) -> str:
    """A block in canonical form; empty if it has no visible characters."""
    block = block.replace("\r\n", "\n")
    if not block.replace("\n", "").isprintable():
        block = _SURROGATES.sub("\ufffd", _UNWANTED.sub("", _LINE_ENDS.sub("\n", block)))
    if not block.isascii():
        block = unicodedata.normalize("NFC", block)
    block = "\n".join(map(str.rstrip, block.split("\n"))).strip()
    return _EMPTY_LINES.sub("\n\n", block) if "\n\n\n" in block else block


def text_too_large(limit: int) -> Fatal:
    return Fatal(f"the text is larger than {limit:,} bytes (output_bytes)", scope="item", code="text_too_large")


def too_many_pages(found: str, limit: int) -> Fatal:
    message = f"the document has {found} pages; the limit is {limit:,} (pages)"
    return Fatal(message, scope="item", code="too_many_pages")


def _check_order(segments: Sequence[Page | Section], length: int) -> None:
    edges = [edge for segment in segments for edge in (segment.start, segment.end)]
    if edges != sorted(edges) or (edges and not 0 <= edges[0] <= edges[-1] <= length):
        raise ValueError("segments overlap, are out of order or lie outside the text")


def _segment_at(segments: Sequence[Page | Section], offset: int) -> int | None:
    found = bisect_right(segments, offset, key=lambda segment: segment.start) - 1
    return found if found >= 0 else None
