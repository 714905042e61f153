"""HTML, parsed by lexbor: what a reader sees, without navigation and scripts, with its headings as sections."""

from __future__ import annotations

import re
from typing import Any

from batchwright.errors import Fatal
from batchwright.ingest.extract.document import Document, require
from batchwright.ingest.extract.encoding import decode
from batchwright.ingest.text import TextBuilder

_CHARSET = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_CHARSET_BYTES = 4_096
_BYTES_PER_TAG = 260  # measured with lexbor on 50 MB of short paragraphs
_SKIPPED = frozenset(
    (
        "aside",
        "button",
        "canvas",
        "dialog",
        "footer",
        "form",
        "head",
        "iframe",
        "math",
        "nav",
        "noscript",
        "object",
        "script",
        "select",
        "style",
        "svg",
        "template",
        "textarea",
    )
)
_BLOCKS = frozenset(
    (
        "address",
        "article",
        "blockquote",
        "body",
        "center",
        "dd",
        "details",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "header",
        "hr",
        "html",
        "li",
        "main",
        "ol",
        "p",
        "pre",
        "section",
        "summary",
        "table",
        "tbody",
        "td",
        "tfoot",
        "th",
        "thead",
        "tr",
        "ul",
    )
)
_CELLS = frozenset(("td", "th"))
_LINES = frozenset(("dd", "dt", "li", "tr"))
_LINE_BREAK = re.compile(r" ?\x00 ?")
_HEADINGS = {f"h{level}": level for level in range(1, 7)}


def extract(document: Document, builder: TextBuilder) -> None:
    _check_size(document)
    declared = _CHARSET.search(document.data[:_CHARSET_BYTES])
    text, warning = decode(document.data, declared[1].decode("ascii") if declared else None)
    if warning is not None:
        builder.warn(warning)
    tree = require("selectolax.lexbor").LexborHTMLParser(text)
    main = tree.css("main, [role=main]")
    _Reader(builder).read(main[0] if len(main) == 1 else tree.body or tree.root)


def _check_size(document: Document) -> None:
    """The tree is far larger than its source: refuse a page that would run out of memory halfway."""
    tags = document.data.count(b"<")
    needed = tags * _BYTES_PER_TAG + 4 * len(document.data)
    if needed > document.limits.memory_bytes:
        message = (
            f"the page has about {tags // 2:,} elements and needs {needed // 1_000_000:,} MB; the limit is "
            f"{document.limits.memory_bytes // 1_000_000:,} MB (memory_bytes)"
        )
        raise Fatal(message, scope="item", code="out_of_memory")


class _Reader:
    """Walks the tree without recursion, and collects text until a block ends."""

    def __init__(self, builder: TextBuilder) -> None:
        self._builder = builder
        self._pieces: list[str] = []
        self._is_line = False
        self._is_after_line = False
        self._preformatted = 0

    def read(self, root: Any) -> None:
        node, depth = root, 0
        while node is not None:
            tag = node.tag
            if tag == "-text":
                self._pieces.append(node.text_content or "")
            is_read = tag not in _SKIPPED
            if is_read:
                self._enter(tag)
            child = node.first_child if is_read else None
            if child is not None:
                node, depth = child, depth + 1
                continue
            if is_read:
                self._leave(tag)
            while depth and node.next is None:
                node, depth = node.parent, depth - 1
                self._leave(node.tag)
            node = node.next if depth else None
        self._end_block()

    def _enter(self, tag: str) -> None:
        if tag in _HEADINGS or (tag in _BLOCKS and tag not in _CELLS):
            self._end_block()
            self._is_line = tag in _LINES
            self._is_after_line &= self._is_line
        self._preformatted += tag == "pre"
        if tag == "br":
            self._pieces.append("\x00")

    def _leave(self, tag: str) -> None:
        if tag in _HEADINGS:
            heading = " ".join("".join(self._pieces).replace("\x00", " ").split())
            self._pieces.clear()
            self._builder.begin_section(heading, level=_HEADINGS[tag])
        elif tag in _CELLS:
            self._pieces.append(" | ")
        elif tag in _BLOCKS:
            self._end_block()
            self._preformatted -= tag == "pre"
            self._is_after_line &= tag in _LINES

    def _end_block(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        if not self._preformatted:
            text = " ".join(text.split())
        text = _LINE_BREAK.sub("\n", text).strip()
        if not text:
            return
        self._builder.add(text.removesuffix("|").rstrip(), separator="\n" if self._is_after_line else "\n\n")
        self._is_after_line = self._is_line
        self._is_line = False
