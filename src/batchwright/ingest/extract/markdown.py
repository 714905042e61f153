"""Markdown: the source as it is, with its headings as sections."""

from __future__ import annotations

import re
from collections.abc import Iterator

from batchwright.ingest.extract.document import Document
from batchwright.ingest.extract.encoding import decode
from batchwright.ingest.text import TextBuilder

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$")
_UNDERLINE = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")


def extract(document: Document, builder: TextBuilder) -> None:
    text, warning = decode(document.data)
    if warning is not None:
        builder.warn(warning)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    done = 0
    for number, level, title in _find_headings(lines):
        builder.add("\n".join(lines[done:number]))
        builder.begin_section(title, level=level, is_in_text=False)
        done = number
    builder.add("\n".join(lines[done:]))


def _find_headings(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Line, level and title of each heading outside code blocks."""
    fence = ""
    for number, line in enumerate(lines):
        found = _FENCE.match(line)
        if found and (not fence or found[1].startswith(fence)):
            fence = "" if fence else found[1]
        elif fence:
            continue
        elif heading := _HEADING.match(line):
            yield number, len(heading[1]), heading[2] or ""
        elif (underline := _UNDERLINE.match(line)) and number and _is_paragraph(lines, number - 1):
            yield number - 1, 1 if underline[1][0] == "=" else 2, lines[number - 1]


def _is_paragraph(lines: list[str], number: int) -> bool:
    """Only a single line counts: longer paragraphs above a rule are rarely meant as headings."""
    line = lines[number]
    is_text = bool(line.strip()) and not line.startswith(("    ", "\t", ">", "-", "*", "+", "|", "#"))
    return is_text and (number == 0 or not lines[number - 1].strip())
