"""PDF, parsed by PDFium: the text layer page by page, and bookmarks as sections."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from batchwright.errors import SchemaInvalid
from batchwright.ingest.extract.document import Document, damaged, encrypted, require
from batchwright.ingest.text import TextBuilder, too_many_pages

_BOOKMARKS_MAX = 10_000
_BOOKMARK_LEVELS_MAX = 6
_TAIL_BYTES = 2_048
_NEEDS_PASSWORD = 4
_HYPHEN_AT_LINE_END = re.compile(r"[\ufffe\x02]\s*")


def extract(document: Document, builder: TextBuilder) -> None:
    """Refuse a truncated file: PDFium would repair it, and nobody would notice the lost pages."""
    if b"%%EOF" not in document.data.rstrip(b"\x00\r\n \t")[-_TAIL_BYTES:]:
        raise damaged("it has no end mark, so part of it is missing")
    pdf = _open(document.data)
    count = len(pdf)
    if not count:
        raise damaged("it has no pages")
    if count > document.limits.pages:
        raise too_many_pages(f"{count:,}", document.limits.pages)
    bookmarks = _read_bookmarks(pdf)
    without_text = 0
    for index in range(count):
        text = _read_page(pdf, index)
        without_text += not text.strip()
        builder.begin_page()
        _add_page(builder, text, bookmarks[index])
    if without_text == count:
        message = f"no page of {count} has a text layer: the document is a scan and needs OCR"
        raise SchemaInvalid(message, code="no_text_layer")
    if without_text:
        builder.warn(f"{without_text} of {count} pages have no text layer")


def _open(data: bytes) -> Any:
    pdfium = require("pypdfium2")
    try:
        return pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        if error.err_code == _NEEDS_PASSWORD:
            raise encrypted() from error
        raise damaged("PDFium cannot open it") from error


def _read_page(pdf: Any, index: int) -> str:
    try:
        page = pdf[index]
    except require("pypdfium2").PdfiumError as error:
        raise damaged(f"page {index + 1} cannot be read") from error
    text_page = page.get_textpage()
    try:
        text: str = text_page.get_text_bounded()
    finally:
        text_page.close()
        page.close()
    return _HYPHEN_AT_LINE_END.sub("", text)


def _read_bookmarks(pdf: Any) -> dict[int, list[tuple[int, str]]]:
    """Titles by page, with their level from 1."""
    found: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for number, bookmark in enumerate(pdf.get_toc(max_depth=_BOOKMARK_LEVELS_MAX)):
        if number >= _BOOKMARKS_MAX:
            break
        target = bookmark.get_dest()
        page = target.get_index() if target is not None else None
        if page is not None:
            found[page].append((bookmark.level + 1, bookmark.get_title()))
    return found


def _add_page(builder: TextBuilder, text: str, bookmarks: list[tuple[int, str]]) -> None:
    """A section begins where its title is on the page, or else at the start of the page."""
    done = 0
    for level, title in bookmarks:
        place = text.find(title, done) if title.strip() else -1
        if place > done:
            builder.add(text[done:place])
            done = place
        builder.begin_section(title, level=level, is_in_text=False)
    builder.add(text[done:])
