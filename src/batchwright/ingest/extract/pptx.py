"""PowerPoint: every slide is a page, its notes included."""

from __future__ import annotations

import zipfile

from batchwright.ingest.extract.archive import open_archive
from batchwright.ingest.extract.document import Document
from batchwright.ingest.extract.office import local, numbered_parts, read_part
from batchwright.ingest.text import TextBuilder


def extract(document: Document, builder: TextBuilder) -> None:
    with open_archive(document) as archive:
        notes = dict.fromkeys(numbered_parts(archive, "ppt/notesSlides/notesSlide"))
        for part in numbered_parts(archive, "ppt/slides/slide"):
            builder.begin_page()
            _add_paragraphs(builder, archive, part)
            note = part.replace("slides/slide", "notesSlides/notesSlide")
            if note in notes:
                _add_paragraphs(builder, archive, note)


def _add_paragraphs(builder: TextBuilder, archive: zipfile.ZipFile, part: str) -> None:
    pieces: list[str] = []
    for event, element in read_part(archive, part):
        match event, local(element.tag):
            case "end", "t":
                pieces.append(element.text or "")
            case "end", "br":
                pieces.append("\n")
            case "end", "p":
                builder.add("".join(pieces), separator="\n")
                pieces.clear()
                element.clear()
