"""What a worker process does for documents. It is loaded on first use, because most workers never see a document."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from batchwright.db.database import Session
from batchwright.db.statements import statements
from batchwright.engine.upkeep import Round
from batchwright.files.part import FilesPart

if TYPE_CHECKING:
    from batchwright.engine.worker.duty import Site
    from batchwright.ingest.context import Tools
    from batchwright.ingest.embeddings.duty import EmbeddingDuty
    from batchwright.ingest.part import IngestPart
    from batchwright.ingest.upkeep import DocumentUpkeep

SQL = statements(__package__, "desk.sql")
_ROUNDS = {
    "end_abandoned": 15.0,
    "evict_answers": 3_600.0,
    "forget_spending": 3_600.0,
    "remove_collections": 60.0,
    "remove_runs": 3_600.0,
    "remove_versions": 300.0,
    "settle_vectors": 5.0,
    "wake_resumed": 5.0,
}
"""Upkeep rounds for documents, with their interval in seconds."""


class Desk:
    """Services and upkeep for documents in one worker process."""

    def __init__(self, part: IngestPart, site: Site) -> None:
        self._part = part
        self._site = site

    def services(self) -> Sequence[object]:
        """The services that operations use."""
        from batchwright.ingest.coordinator import Coordinator
        from batchwright.ingest.process import ItemRunner

        runner = ItemRunner(self.tools, self._part.graph)
        return [Coordinator(self.tools), runner, self._part.make_gatherer(self.tools), *self.embeddings.services]

    def rounds(self) -> list[Round]:
        found = [
            Round(f"ingest_{name}", every, functools.partial(self._keep_up, name)) for name, every in _ROUNDS.items()
        ]
        return [*found, Round("ingest_embeddings", 600.0, self._clean_embeddings)]

    async def close(self) -> None:
        if "embeddings" in self.__dict__:
            await self.embeddings.close()
        if "tools" in self.__dict__:
            await self.tools.sandboxes.close()

    @cached_property
    def tools(self) -> Tools:
        return self._part.make_tools(self._part.core.open_store("ingest", self._site.counts), self._site.counts)

    @cached_property
    def embeddings(self) -> EmbeddingDuty:
        """The embeddings of files and tables, which are not documents."""
        from batchwright.ingest.embeddings.duty import EmbeddingDuty
        from batchwright.ingest.embeddings.settings import EmbeddingSettings
        from batchwright.ingest.embeddings.toolbox import Toolbox

        core, tools = self._part.core, self.tools
        return EmbeddingDuty(
            Toolbox(
                queue=tools.queue,
                files=core.part(FilesPart).files_in(tools.store),
                settings=core.settings.table("embeddings", EmbeddingSettings),
                find_embedder=tools.models.find_serving_embedder,
                answers=tools.answers,
                prices=tools.prices,
                rates=tools.rates,
            )
        )

    @cached_property
    def upkeep(self) -> DocumentUpkeep:
        from batchwright.ingest.upkeep import DocumentUpkeep

        return DocumentUpkeep(
            self.tools, self._part.collections, self._part.settings, self._part.core.settings.retention
        )

    async def _keep_up(self, name: str, session: Session) -> bool:
        if not await self._has_documents(session):
            return False
        found: bool = await getattr(self.upkeep, name)(session)
        return found

    async def _clean_embeddings(self, session: Session) -> bool:
        return await self._has_documents(session) and await self.embeddings.upkeep.clean(session)

    async def _has_documents(self, session: Session) -> bool:
        """Whether there are any documents. Once the tools are loaded, the answer is True without a query."""
        if "tools" in self.__dict__:
            return True
        ((found,),) = await self._site.queue.database.ask(SQL["has_documents"], {}, session)
        return bool(found)
