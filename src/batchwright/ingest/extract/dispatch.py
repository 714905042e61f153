"""Calls the extractor for the format of a document. Mails use it for their attachments, too."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from batchwright.errors import SchemaInvalid
from batchwright.ingest.extract.detect import detect, is_expected
from batchwright.ingest.extract.document import Document, empty, nested_too_deep
from batchwright.ingest.text import CanonicalText, TextBuilder

Extractor = Callable[[Document, TextBuilder], None]

_FORMATS = ("csv", "docx", "eml", "html", "json", "markdown", "pdf", "pptx", "text", "xlsx")
EXTRACTORS = {format: f"batchwright.ingest.extract.{format}:extract" for format in _FORMATS}


def extract_document(document: Document) -> CanonicalText:
    """The text of a document. It is never empty: a document without text is an error."""
    builder = TextBuilder(output_bytes=document.limits.output_bytes, pages=document.limits.pages)
    format = extract_into(document, builder)
    if builder.is_empty:
        raise empty()
    return builder.build(format)


def extract_into(document: Document, builder: TextBuilder) -> str:
    if document.depth > document.limits.nesting:
        raise nested_too_deep(document.limits.nesting)
    format = detect(document)
    if format not in document.extractors:
        raise SchemaInvalid(f"{document.name} is {format}, which has no extractor", code="unsupported_format")
    if not is_expected(document.name, format):
        builder.warn(f"{document.name} is {format}, although its name has another extension")
    load_extractor(document.extractors[format])(document, builder)
    return format


def load_extractor(path: str) -> Extractor:
    module, _, function = path.partition(":")
    return cast("Extractor", getattr(importlib.import_module(module), function))
