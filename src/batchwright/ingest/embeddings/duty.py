"""What `compute_embeddings` adds to a worker process, for the part that owns it."""

from __future__ import annotations

from batchwright.ingest.embeddings.batch import BatchRunner
from batchwright.ingest.embeddings.process import EmbeddingCoordinator
from batchwright.ingest.embeddings.toolbox import Toolbox
from batchwright.ingest.embeddings.upkeep import EmbeddingUpkeep


class EmbeddingDuty:
    """Services and upkeep; close it when the worker ends."""

    def __init__(self, tools: Toolbox) -> None:
        self._coordinator = EmbeddingCoordinator(tools)
        self.services: tuple[object, ...] = (self._coordinator, BatchRunner(tools))
        self.upkeep = EmbeddingUpkeep(tools.queue.database, tools.store)

    async def close(self) -> None:
        await self._coordinator.close()
