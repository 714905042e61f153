"""Excel: every sheet is a page and a section, every row a line, with the values as they were last computed."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator

from batchwright.ingest.extract.archive import open_archive
from batchwright.ingest.extract.document import Document, damaged
from batchwright.ingest.extract.office import Element, local, read_listed, read_part
from batchwright.ingest.text import TextBuilder

_STRINGS = "xl/sharedStrings.xml"


def extract(document: Document, builder: TextBuilder) -> None:
    with open_archive(document) as archive:
        strings = list(_read_strings(archive)) if _STRINGS in archive.namelist() else []
        for sheet, part in read_listed(archive, "xl/workbook.xml", "sheet"):
            builder.begin_page()
            builder.begin_section(sheet.get("name", ""), level=1)
            for row in _read_rows(archive, part, strings):
                builder.add(row, separator="\n")


def _read_strings(archive: zipfile.ZipFile) -> Iterator[str]:
    pieces: list[str] = []
    for event, element in read_part(archive, _STRINGS):
        match event, local(element.tag):
            case "end", "t":
                pieces.append(element.text or "")
            case "end", "si":
                yield "".join(pieces)
                pieces.clear()
                element.clear()


def _read_rows(archive: zipfile.ZipFile, part: str, strings: list[str]) -> Iterator[str]:
    values: list[str] = []
    for event, element in read_part(archive, part):
        if event != "end":
            continue
        if local(element.tag) == "c":
            values.append(" ".join(_read_cell(element, strings).split()))
        elif local(element.tag) == "row":
            yield " | ".join(value for value in values if value)
            values.clear()
            element.clear()


def _read_cell(cell: Element, strings: list[str]) -> str:
    text = "".join(child.text or "" for child in cell.iter() if local(child.tag) in {"v", "t"})
    if cell.get("t") != "s":
        return text
    if not text.isdigit() or int(text) >= len(strings):
        raise damaged(f"cell {cell.get('r')} refers to a string that does not exist")
    return strings[int(text)]
