"""The input of an extractor, and the errors that all of them share."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchwright.errors import ConfigurationError, Fatal, SchemaInvalid
from batchwright.ingest.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The bytes of a document and the name under which it was found."""

    data: bytes
    name: str
    limits: Limits
    extractors: Mapping[str, str]
    """Function of each format, as module:function; it takes a document and a text builder."""
    depth: int = 0
    """Number of documents that this one is nested in."""
    seen: set[str] = field(default_factory=set)
    """Identities of the mails and attachments read so far; shared with the documents inside."""


def damaged(what: str) -> Fatal:
    return Fatal(f"the document is damaged: {what}", scope="item", code="damaged_document")


def empty() -> SchemaInvalid:
    return SchemaInvalid("the document is empty", code="empty_document")


def encrypted() -> Fatal:
    message = "the document is encrypted; remove its password and retry"
    return Fatal(message, scope="item", code="encrypted_document")


def nested_too_deep(limit: int) -> Fatal:
    message = f"documents are nested more than {limit} deep (nesting)"
    return Fatal(message, scope="item", code="nested_too_deep")


def unpacked_too_large(found: int, limit: int) -> Fatal:
    message = f"the document unpacks to {found:,} bytes; the limit is {limit:,} (unpacked_bytes)"
    return Fatal(message, scope="item", code="unpacked_too_large")


def require(library: str) -> Any:
    """Import a parser that only some installations have."""
    try:
        return importlib.import_module(library)
    except ImportError:
        message = f"this document needs {library.split('.')[0]}: pip install 'batchwright[documents]'"
        raise ConfigurationError(message) from None
