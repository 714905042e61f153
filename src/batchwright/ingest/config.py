"""The settings of a run. They are fixed when the run is created, so all its workers use the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchwright.ingest.chunk import ChunkSettings
from batchwright.ingest.models import Models
from batchwright.ingest.settings import NONE, IngestSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Values that a user sets for one run; None means the value of the settings."""

    chunk_characters: int | None = None
    chunk_overlap: int | None = None
    embedding_model: str | None = None
    embedding_dimensions: int | None = None
    entities: str | None = None
    language: str | None = None
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    roots: Sequence[str] | None = None
    """Folders and buckets that may be read; by default those of the settings."""
    force: bool = False
    """Process every document again, changed or not."""


def make_config(
    settings: IngestSettings, models: Models, wanted: Overrides, metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The settings as the run stores them. Raises ConfigurationError if a model is not available here."""

    def choose(name: str) -> Any:
        found = getattr(wanted, name)
        return getattr(settings, name) if found is None else found

    chunk = ChunkSettings(
        characters=choose("chunk_characters"),
        overlap=min(choose("chunk_overlap"), choose("chunk_characters") // 2),
        tokens=settings.chunk_tokens,
    )
    model, dimensions, entities = choose("embedding_model"), choose("embedding_dimensions"), choose("entities")
    types, lists = list(settings.entity_types), {type: list(words) for type, words in settings.entity_lists.items()}
    extractor = None if entities == NONE else models.find_extractor(entities, types, lists)
    return {
        "chunk": asdict(chunk),
        "embedding": {
            "model": model,
            "dimensions": dimensions,
            "fingerprint": models.find_embedder(model, dimensions).fingerprint,
        },
        "entities": {
            "model": entities,
            "types": types,
            "lists": lists,
            "chunks": settings.entity_chunks,
            "fingerprint": NONE if extractor is None else extractor.fingerprint,
        },
        "language": choose("language"),
        "limits": asdict(settings.limits),
        "metadata": dict(metadata or {}),
        "max_retries": settings.max_retries,
        "include": list(choose("include")),
        "exclude": list(choose("exclude")),
        "roots": None if wanted.roots is None else list(wanted.roots),
        "force": wanted.force,
    }


def required_models(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The models that cost something, with the kind of their requests."""
    found = [("embedding", config["embedding"]["model"]), ("entities", config["entities"]["model"])]
    return [(kind, model) for kind, model in found if model not in ("local", "hash", "none", "patterns")]
