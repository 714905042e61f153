"""Plain text, as it is."""

from __future__ import annotations

from batchwright.ingest.extract.document import Document
from batchwright.ingest.extract.encoding import decode
from batchwright.ingest.text import TextBuilder


def extract(document: Document, builder: TextBuilder) -> None:
    text, warning = decode(document.data)
    if warning is not None:
        builder.warn(warning)
    builder.add(text)
