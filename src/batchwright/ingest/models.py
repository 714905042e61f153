"""The models that documents use, by the settings of their run. They are created at first use, and shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchwright.errors import ConfigurationError
from batchwright.ingest.results import Deferred
from batchwright.ingest.settings import HASH, LOCAL, NONE, PATTERNS

if TYPE_CHECKING:
    from batchwright.inference.embeddings import Embedder
    from batchwright.inference.gateway import Gateway, Gateways
    from batchwright.ingest.entities.mention import EntityExtractor
    from batchwright.settings import Settings

_CONFIGURATION_SECONDS = 60.0


class Models:
    """The embedders and extractors of one process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._gateways: Gateways | None = None
        self._embedders: dict[tuple[str, int | None], Embedder] = {}
        self._extractors: dict[str, EntityExtractor] = {}

    def embedder(self, config: Mapping[str, Any]) -> Embedder:
        """The embedder of a run. Raises an error if this worker has another version than the run was created with."""
        wanted = config["embedding"]
        found = self.find_embedder(wanted["model"], wanted.get("dimensions"))
        self._check(found.fingerprint, wanted.get("fingerprint"), wanted["model"])
        return found

    def extractor(self, config: Mapping[str, Any]) -> EntityExtractor | None:
        """None if the run wants no entities."""
        wanted = config["entities"]
        if wanted["model"] == NONE:
            return None
        found = self.find_extractor(wanted["model"], wanted["types"], wanted["lists"])
        self._check(found.fingerprint, wanted.get("fingerprint"), wanted["model"])
        return found

    def find_embedder(self, model: str, dimensions: int | None) -> Embedder:
        if (model, dimensions) not in self._embedders:
            self._embedders[model, dimensions] = self._make_embedder(model, dimensions)
        return self._embedders[model, dimensions]

    def find_serving_embedder(self, model: str, dimensions: int | None) -> Embedder:
        """A client that answers at once; ConfigurationError if only a provider's batch API serves the model."""
        if self.is_at_provider(model):
            raise ConfigurationError(
                f"only the batch API of a provider serves {model!r}, which answers hours later; use another model, or "
                "configure a server for it"
            )
        return self.find_embedder(model, dimensions)

    def find_by_fingerprint(self, fingerprint: str, model: str | None, dimensions: int) -> Embedder | None:
        """The embedder with this fingerprint; None if it is not available here."""
        names = (LOCAL, HASH) if model is None else (model,)
        for name in names:
            for wanted in (None, dimensions):
                try:
                    found = self.find_embedder(name, wanted)
                except ConfigurationError:
                    continue
                if found.fingerprint == fingerprint:
                    return found
        return None

    def find_extractor(self, model: str, types: Sequence[str], lists: Mapping[str, Sequence[str]]) -> EntityExtractor:
        key = repr((model, tuple(types), sorted((type, tuple(words)) for type, words in lists.items())))
        if key not in self._extractors:
            self._extractors[key] = self._make_extractor(model, types, lists)
        return self._extractors[key]

    def gateway(self, model: str) -> Gateway | None:
        """Where the requests for a model go; None if there is no server for it."""
        if self._gateways is None:
            from batchwright.inference.gateway import Gateways

            if not self._settings.has_gateways:
                return None
            self._gateways = Gateways(
                self._settings.global_inference_gateway, self._settings.model_gateways, self._settings.inference
            )
        return self._gateways.of(model)

    def is_at_provider(self, model: str) -> bool:
        """Whether a model has no configured server, and requests go through a provider's batch API."""
        found = self._settings.model_gateways.get(model)
        return found is not None and found.provider is not None

    async def close(self) -> None:
        gateways, self._gateways = self._gateways, None
        if gateways is not None:
            await gateways.__aexit__(None, None, None)

    def _make_embedder(self, model: str, dimensions: int | None) -> Embedder:
        if model == LOCAL:
            from batchwright.inference.local import LocalEmbedder

            return LocalEmbedder()
        if model == HASH:
            from batchwright.inference.local import HashEmbedder

            return HashEmbedder()
        from batchwright.inference.embeddings import RemoteEmbedder

        return RemoteEmbedder(self._find_gateway(model), model, dimensions=dimensions)

    def _make_extractor(self, model: str, types: Sequence[str], lists: Mapping[str, Sequence[str]]) -> EntityExtractor:
        if model == PATTERNS:
            from batchwright.ingest.entities.patterns import PatternExtractor

            return PatternExtractor(lists)
        from batchwright.ingest.entities.model import ModelExtractor

        return ModelExtractor(self._find_gateway(model), model, types=types)

    def _find_gateway(self, model: str) -> Gateway | None:
        """None for a model that only a provider's batch API serves: its requests go through batches."""
        gateway = self.gateway(model)
        if gateway is None and not self.is_at_provider(model):
            raise ConfigurationError(
                f"there is no model server for {model!r}; write into batchwright.toml\n"
                f'    [model_gateways."{model}"]\n    url = "http://gateway:8000"'
            )
        return gateway

    def _check(self, found: str, wanted: str | None, model: str) -> None:
        if wanted is not None and found != wanted:
            raise Deferred(
                f"this worker has {found} for {model!r}, but the run needs {wanted}; install that version",
                _CONFIGURATION_SECONDS,
                waits_for="configuration",
            )
