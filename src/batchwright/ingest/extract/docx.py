"""Word: paragraphs in reading order, with headings as sections and table rows as lines.

Also reads content controls and tracked insertions, which python-docx ignores, and text boxes.
"""

from __future__ import annotations

import re
import zipfile

from batchwright.ingest.extract.archive import open_archive
from batchwright.ingest.extract.document import Document, damaged
from batchwright.ingest.extract.office import Element, attribute, local, read_part
from batchwright.ingest.text import TextBuilder

_HEADING = re.compile(r"heading (\d)$", re.IGNORECASE)
_LEVELS = 9
_NOTES = ("word/footnotes.xml", "word/endnotes.xml")
_BREAKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def extract(document: Document, builder: TextBuilder) -> None:
    with open_archive(document) as archive:
        if "word/document.xml" not in archive.namelist():
            raise damaged("word/document.xml is missing")
        levels = _read_heading_styles(archive)
        _Reader(builder, levels).read(archive, "word/document.xml")
        for part in _NOTES:
            if part in archive.namelist():
                _Reader(builder, {}).read(archive, part)


def _read_heading_styles(archive: zipfile.ZipFile) -> dict[str, int]:
    """Level by id of the style. Ids differ between languages; names in the file do not."""
    levels: dict[str, int] = {}
    bases: dict[str, str] = {}
    if "word/styles.xml" not in archive.namelist():
        return levels
    for event, element in read_part(archive, "word/styles.xml"):
        if event == "end" and local(element.tag) == "style":
            id = attribute(element, "styleId") or ""
            for child in element.iter():
                _note_style(child, id, levels, bases)
            element.clear()
    for id in bases:
        levels.setdefault(id, _inherited(id, levels, bases))
    return {id: level for id, level in levels.items() if level}


def _note_style(child: Element, id: str, levels: dict[str, int], bases: dict[str, str]) -> None:
    value = attribute(child, "val") or ""
    match local(child.tag):
        case "name" if found := _HEADING.match(value):
            levels[id] = int(found[1])
        case "name" if value.lower() == "title":
            levels[id] = 1
        case "outlineLvl" if value.isdigit() and int(value) < _LEVELS:
            levels.setdefault(id, int(value) + 1)
        case "basedOn":
            bases[id] = value


def _inherited(id: str, levels: dict[str, int], bases: dict[str, str]) -> int:
    for _ in range(len(bases)):
        if id in levels or id not in bases:
            break
        id = bases[id]
    return levels.get(id, 0)


class _Reader:
    """One pass over a part: collects text until its paragraph ends, and cells until their row ends."""

    def __init__(self, builder: TextBuilder, levels: dict[str, int]) -> None:
        self._builder = builder
        self._levels = levels
        self._open: list[list[str]] = []
        """Text of the enclosing paragraphs: a text box is inside a paragraph."""
        self._rows: list[list[str]] = []
        self._level = 0
        self._fallbacks = 0

    def read(self, archive: zipfile.ZipFile, part: str) -> None:
        for event, element in read_part(archive, part):
            name = local(element.tag)
            self._fallbacks += (event == "start") - (event == "end") if name == "Fallback" else 0
            if self._fallbacks:
                continue
            if event == "start":
                self._start(name)
            else:
                self._end(name, element)
                if name in {"p", "tbl", "sectPr"}:
                    element.clear()

    def _start(self, name: str) -> None:
        if name == "p":
            self._open.append([])
            self._level = 0
        elif name == "tr":
            self._rows.append([])

    def _end(self, name: str, element: Element) -> None:
        if name == "tr":
            self._end_row()
        elif not self._open:
            return
        elif name == "t":
            self._open[-1].append(element.text or "")
        elif name == "pStyle":
            self._level = self._levels.get(attribute(element, "val") or "", 0)
        elif name == "p":
            self._end_paragraph("".join(self._open.pop()))
        elif name in _BREAKS and attribute(element, "pos") is None:  # a tab with a position is a tab stop
            self._open[-1].append(_BREAKS[name])

    def _end_paragraph(self, text: str) -> None:
        if self._rows:
            self._rows[-1].append(" ".join(text.split()))
        elif self._level and text.strip():
            self._builder.begin_section(text, level=self._level)
        else:
            self._builder.add(text)

    def _end_row(self) -> None:
        line = " | ".join(cell for cell in self._rows.pop() if cell)
        if self._rows:
            self._rows[-1].append(line)
        else:
            self._builder.add(line, separator="\n")
