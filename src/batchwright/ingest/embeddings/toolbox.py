"""What coordinators and batches use in a worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchwright.engine.queue import Queue
from batchwright.errors import ConfigurationError, Fatal, NotFound
from batchwright.files.store import Files
from batchwright.inference.embeddings import Embedder
from batchwright.inference.prices import ListedPrice
from batchwright.ingest.embeddings.columns import MAGIC, ColumnReader
from batchwright.ingest.embeddings.lines import LineReader
from batchwright.ingest.embeddings.payloads import ComputeEmbeddings, Table
from batchwright.ingest.embeddings.rows import Reader
from batchwright.ingest.embeddings.settings import EmbeddingSettings
from batchwright.ingest.embeddings.tables import TableReader
from batchwright.ingest.ledger import Answers
from batchwright.ingest.money import Prices
from batchwright.ingest.rates import Rates
from batchwright.ingest.settings import LOCAL
from batchwright.storage import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of one worker process."""

    queue: Queue
    files: Files
    settings: EmbeddingSettings
    find_embedder: Callable[[str, int | None], Embedder]
    """The embedder by the name of its model, or `local` or `hash`, and by the requested dimensions."""
    answers: Answers
    prices: Prices
    rates: Rates

    @property
    def store(self) -> Store:
        return self.files.store

    def price(self, model: str | None) -> ListedPrice | None:
        return None if model is None else self.prices.find(model, "realtime")

    def embedder(self, request: ComputeEmbeddings) -> Embedder:
        try:
            return self.find_embedder(request.model or LOCAL, request.dimensions)
        except ConfigurationError as error:
            raise Fatal(str(error), code="model_not_configured") from None

    async def reader(self, request: ComputeEmbeddings, tenant: str, *, also_gone: bool = False) -> Reader:
        """The reader for a source; for a file, by its first bytes. `also_gone` includes files deleted meanwhile."""
        if isinstance(request.source, Table):
            return TableReader(self.queue.database, request.source, self.settings)
        try:
            file = await self.files.get(request.source, tenant=tenant, also_gone=also_gone)
            is_parquet = await self.store.read(file.key, 0, len(MAGIC)) == MAGIC
        except NotFound as error:
            raise Fatal(str(error), code="input_not_found") from None
        try:
            kind = ColumnReader if is_parquet else LineReader
            return kind(self.store, file, id_field=request.id_field, text_field=request.text_field)
        except ConfigurationError as error:
            raise Fatal(str(error), code="library_missing") from None
