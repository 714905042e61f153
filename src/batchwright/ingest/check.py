"""The `batchwright check` of documents: parsers, steps, models, roots, and how vectors are searched."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from batchwright.db.check import Finding, Level
from batchwright.errors import BatchwrightError, ConfigurationError
from batchwright.ingest.settings import HASH, LOCAL, NONE
from batchwright.ingest.sources import FileSource, parse_source

if TYPE_CHECKING:
    from batchwright.ingest.part import IngestPart

_PARSERS = {"pypdfium2": "PDF", "selectolax": "HTML"}
_INSTALL = "pip install 'batchwright[documents]'"
_EXACT_CHUNKS = "100,000"


async def check_documents(part: IngestPart) -> list[Finding]:
    found = [_check_parsers(), _check_steps(part), *_check_models(part), *_check_roots(part)]
    return [*found, await _check_vectors(part)] if part.core.is_open else found


def _check_parsers() -> Finding:
    missing = {library: formats for library, formats in _PARSERS.items() if importlib.util.find_spec(library) is None}
    if not missing:
        return Finding("documents", Level.OK, "every parser is installed")
    formats = ", ".join(missing.values())
    text = f"{formats} cannot be read here: {', '.join(missing)} is not installed"
    return Finding("documents", Level.WARNING, text, f"{_INSTALL}; documents of these formats wait until then")


def _check_steps(part: IngestPart) -> Finding:
    try:
        order = part.graph.order
    except (BatchwrightError, ImportError) as error:
        return Finding("document steps", Level.ERROR, str(error), "correct `steps` in [ingest]: no worker starts")
    return Finding("document steps", Level.OK, ", ".join(order))


def _check_models(part: IngestPart) -> list[Finding]:
    """Whether the configured models are available here. The gateways' check says whether their servers answer."""
    settings = part.settings
    findings = []
    try:
        part.models.find_embedder(settings.embedding_model, settings.embedding_dimensions)
    except ConfigurationError as error:
        remedy = f"{_INSTALL}, or set ingest.embedding_model to {HASH!r} or to a model of a server"
        remedy = remedy if settings.embedding_model == LOCAL else "configure its server, or set ingest.embedding_model"
        findings.append(Finding("document models", Level.WARNING, _one_line(error), remedy))
    if settings.entities != NONE:
        try:
            part.models.find_extractor(settings.entities, settings.entity_types, settings.entity_lists)
        except ConfigurationError as error:
            remedy = "configure its server, or set ingest.entities to 'patterns' or 'none'"
            findings.append(Finding("document models", Level.WARNING, _one_line(error), remedy))
    words = f"embeddings by {settings.embedding_model!r}, entities by {settings.entities!r}"
    return findings or [Finding("document models", Level.OK, words)]


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(";")


def _check_roots(part: IngestPart) -> list[Finding]:
    folders = [source for source in map(parse_source, part.settings.roots) if isinstance(source, FileSource)]
    away = [str(source.path) for source in folders if not os.access(source.path, os.R_OK)]
    if not away:
        return []
    text = f"{', '.join(away)} cannot be read here"
    return [Finding("document roots", Level.WARNING, text, "create it, or correct `roots` in [ingest]")]


async def _check_vectors(part: IngestPart) -> Finding:
    if await part.spaces.has_pgvector():
        return Finding("vectors", Level.OK, "pgvector indexes them")
    text = f"pgvector is not installed, so search compares all vectors; that is fine up to about {_EXACT_CHUNKS} chunks"
    return Finding("vectors", Level.OK, text)
