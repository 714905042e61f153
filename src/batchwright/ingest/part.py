"""The part for documents: steps that resume where they stopped, and search."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from batchwright.files.part import FilesPart
from batchwright.part import Command, Part, Served, Server

if TYPE_CHECKING:
    from batchwright.core import Core
    from batchwright.db.check import Finding
    from batchwright.engine.attention import Concern
    from batchwright.engine.views import InboxGroup
    from batchwright.engine.worker.duty import Duty, Site
    from batchwright.inference.embeddings import Embedder
    from batchwright.inference.spending import Spending
    from batchwright.ingest.collections import Collections
    from batchwright.ingest.context import Tools
    from batchwright.ingest.export import Export
    from batchwright.ingest.gather import Gatherer
    from batchwright.ingest.items import Items
    from batchwright.ingest.library import Library
    from batchwright.ingest.models import Models
    from batchwright.ingest.money import Prices
    from batchwright.ingest.pipeline import Graph
    from batchwright.ingest.requests import Requests
    from batchwright.ingest.runs import Runs
    from batchwright.ingest.search import Search
    from batchwright.ingest.settings import IngestSettings
    from batchwright.ingest.sources import Sources
    from batchwright.ingest.spaces import Space, Spaces
    from batchwright.ingest.submission import Submission
    from batchwright.storage import Store
    from batchwright.telemetry.metrics import Counts

log = logging.getLogger(__name__)


class IngestPart(Part):
    """Runs, documents and collections of all tenants. Every worker can run the steps of documents."""

    name = "ingest"
    tables = {
        "ingest": "batchwright.ingest.settings:IngestSettings",
        "embeddings": "batchwright.ingest.embeddings.settings:EmbeddingSettings",
    }
    metrics = "batchwright.ingest.metrics:INGEST_METRICS"
    operations = (
        "batchwright.ingest.operations:run_documents",
        "batchwright.ingest.operations:run_item",
        "batchwright.ingest.operations:gather_requests",
        "batchwright.ingest.embeddings.operations:compute_embeddings",
        "batchwright.ingest.embeddings.operations:embed_batch",
    )
    routers = (
        "batchwright.ingest.http_runs:router",
        "batchwright.ingest.http_items:router",
        "batchwright.ingest.http_collections:router",
        "batchwright.ingest.http_costs:router",
    )
    pages = ("batchwright.ingest.pages:pages", "batchwright.ingest.pages_search:pages")
    commands = {
        "ingest": Command(
            "batchwright.ingest.commands.ingest:app", "Read documents into collections, and search them.", "Batches"
        ),
    }

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._models: Models | None = None
        self._sources: Sources | None = None

    @property
    def settings(self) -> IngestSettings:
        from batchwright.ingest.settings import IngestSettings

        return self.core.settings.table("ingest", IngestSettings)

    @property
    def runs(self) -> Runs:
        from batchwright.ingest.runs import Runs

        return Runs(self.core.queue)

    @property
    def items(self) -> Items:
        from batchwright.ingest.items import Items

        return Items(self.core.queue)

    @property
    def spaces(self) -> Spaces:
        from batchwright.ingest.spaces import Spaces

        return Spaces(self.core.queue.database)

    @property
    def library(self) -> Library:
        from batchwright.ingest.library import Library

        return Library(self.core.queue.database, self.spaces)

    @property
    def collections(self) -> Collections:
        from batchwright.ingest.collections import Collections

        return Collections(self.core.queue.database, self.spaces)

    @property
    def export(self) -> Export:
        from batchwright.ingest.export import Export

        return Export(self.core.queue.database, self.spaces)

    @cached_property
    def search(self) -> Search:
        """Created once, because it caches which words are common."""
        from batchwright.ingest.search import Search

        return Search(self.core.queue.database, self.spaces, self._embedder_of)

    def _embedder_of(self, space: Space) -> Embedder | None:
        return self.models.find_by_fingerprint(space.fingerprint, space.model, space.dimensions)

    @property
    def prices(self) -> Prices:
        from batchwright.ingest.money import Prices

        return Prices(overrides=self.settings.prices)

    @cached_property
    def graph(self) -> Graph:
        """All steps. An invalid graph is an error, which a worker reports when it starts."""
        from batchwright.ingest.pipeline import load_steps

        return load_steps(self.settings.steps)

    @property
    def models(self) -> Models:
        """The models of this process; created once, and closed with the part."""
        if self._models is None:
            from batchwright.ingest.models import Models

            self._models = Models(self.core.settings)
        return self._models

    @property
    def sources(self) -> Sources:
        if self._sources is None:
            from batchwright.ingest.sources import Sources

            self._sources = Sources(self.settings)
        return self._sources

    @property
    def spending(self) -> Spending:
        from batchwright.inference.spending import Spending

        return Spending(self.core.queue.database)

    @property
    def submission(self) -> Submission:
        from batchwright.ingest.submission import Submission

        return Submission(
            self.runs,
            self.items,
            self.core.catalog,
            self.settings,
            self.models,
            self.graph,
            self.sources,
            self.prices,
        )

    # In a worker ------------------------------------------------------------------------------------------------

    def work(self, site: Site) -> Duty:
        from batchwright.engine.worker.duty import Duty
        from batchwright.ingest.desk import Desk

        if self.settings.steps:  # check the users' steps when the worker starts; ours are known to be valid
            log.info("steps of documents: %s", ", ".join(self.graph.order))
        desk = Desk(self, site)
        return Duty(services=desk.services, rounds=desk.rounds(), close=desk.close)

    def make_gatherer(self, tools: Tools) -> Gatherer:
        """The gatherer of requests that go through batches; unused without a gateway."""
        from batchwright.batches.part import BatchesPart
        from batchwright.ingest.gather import Gatherer, GatherTools

        batches = self.core.part(BatchesPart)
        return Gatherer(
            GatherTools(
                tools=tools,
                batches=batches.batches,
                catalog=self.core.catalog,
                files=self.core.part(FilesPart).files_in(tools.store),
                limits=batches.settings,
                settings=self.settings,
                ring=self.core.doorbell.ring,
            )
        )

    def make_tools(self, store: Store, counts: Counts | None = None) -> Tools:
        from batchwright.ingest.context import Sandboxes, Tools
        from batchwright.ingest.ledger import Answers
        from batchwright.ingest.metrics import IngestCounts
        from batchwright.ingest.rates import Rates

        database = self.core.queue.database
        return Tools(
            queue=self.core.queue,
            store=store,
            folder=self.core.folder / "work" / "ingest",
            answers=Answers(database),
            counts=IngestCounts(counts),
            library=self.library,
            models=self.models,
            prices=self.prices,
            rates=Rates(database, self.models.gateway),
            requests=self._requests(),
            sandboxes=Sandboxes(self.settings.sandboxes or os.cpu_count() or 1),
            sources=self.sources,
            spaces=self.spaces,
            turns=asyncio.Semaphore(os.cpu_count() or 1),
        )

    def _requests(self) -> Requests:
        from batchwright.ingest.pending import Pending
        from batchwright.ingest.requests import Requests

        core = self.core
        return Requests(Pending(core.queue), core.catalog, self.models, self.settings, core.doorbell.ring)

    # In the HTTP server -----------------------------------------------------------------------------------------

    def serve(self, server: Server) -> Served:
        from batchwright.ingest.services import IngestServices

        services = IngestServices(
            part=self,
            collections=self.collections,
            core=self.core,
            export=self.export,
            items=self.items,
            runs=self.runs,
            search=self.search,
            submission=self.submission,
        )
        return Served(services=services, streams=["/v1/collections/{name}/export"])

    # What users see --------------------------------------------------------------------------------------------

    async def inbox(self, tenant: str | None) -> Sequence[InboxGroup]:
        """Failed documents by cause, and runs that wait for a user."""
        from batchwright.ingest.inbox import find_groups

        return await find_groups(self.runs, self.items, tenant)

    async def attention(self, tenant: str | None) -> Sequence[Concern]:
        """Runs that wait for a user."""
        from batchwright.ingest.inbox import find_concerns

        return await find_concerns(self.runs, tenant)

    async def check(self) -> Sequence[Finding]:
        from batchwright.ingest.check import check_documents

        return await check_documents(self)

    async def close(self) -> None:
        self.__dict__.pop("search", None)
        models, self._models = self._models, None
        sources, self._sources = self._sources, None
        if models is not None:
            await models.close()
        if sources is not None:
            await sources.close()
