"""PowerPoint: every slide is a page, its notes included."""

from __future__ import annotations

import zipfile

from batchwright.ingest.extract.archive import open_archive
from batchwright.ingest.extract.document import Document
from batchwright.ingest.extract.office import local, read_listed, read_part, read_relations
from batchwright.ingest.text import TextBuilder


def extract(document: Document, builder: TextBuilder) -> None:
    with open_archive(document) as archive:
        for _, part in read_listed(archive, "ppt/presentation.xml", "sldId"):
            builder.begin_page()
            _add_paragraphs(builder, archive, part)
            for related in read_relations(archive, part).values():
                if related.startswith("ppt/notesSlides/"):
                    _add_paragraphs(builder, archive, related)


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
