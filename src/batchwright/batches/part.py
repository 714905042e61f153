"""Batches as a part: OpenAI's Batches API on the user's own model servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchwright.files.part import FilesPart
from batchwright.part import BodyLimit, Command, Part, Served, Server
from batchwright.webhooks.part import WebhooksPart

if TYPE_CHECKING:
    from batchwright.batches.blocking import Batches as BlockingBatches
    from batchwright.batches.client import AsyncBatches
    from batchwright.batches.ending import Endings
    from batchwright.batches.journal.workspace import Workspace
    from batchwright.batches.metrics import BatchCounts
    from batchwright.batches.models import Models
    from batchwright.batches.runtime import Runtime
    from batchwright.batches.samples import BatchSamples
    from batchwright.batches.seal import Seal
    from batchwright.batches.settings import BatchSettings
    from batchwright.batches.store import Batches
    from batchwright.core import Core
    from batchwright.db.check import Finding
    from batchwright.engine.attention import Concern
    from batchwright.engine.upkeep import Round
    from batchwright.engine.worker.duty import Duty, Site
    from batchwright.files.store import Files
    from batchwright.inference.spending import Spent
    from batchwright.part import Call
    from batchwright.telemetry.metrics import LabelLimits

FORM_BYTES = 64 * 1024
"""Maximum size of a form without its file."""


class BatchesPart(Part):
    """Batches of all tenants. They run where a gateway is configured; every worker does their upkeep."""

    name = "batches"
    tables = {"batches": "batchwright.batches.settings:BatchSettings"}
    metrics = "batchwright.batches.metrics:BATCH_METRICS"
    operations = (
        "batchwright.batches.operations:process_batch",
        "batchwright.batches.operations:send_shard",
        "batchwright.batches.operations:send_provider_shard",
    )
    routers = ("batchwright.batches.http:router", "batchwright.batches.http_models:router")
    pages = (
        "batchwright.batches.pages_new:pages",
        "batchwright.batches.pages:pages",
        "batchwright.batches.pages_lines:pages",
    )
    commands = {
        "batch": Command(
            "batchwright.batches.commands.batch:app", "Run, watch and control batches of requests.", "Batches"
        ),
    }
    runtime: Runtime | None = None
    """The batch side of the worker that was created last, if a gateway is configured."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        core.part(FilesPart).bytes_max = self.settings.file_bytes_max

    @property
    def settings(self) -> BatchSettings:
        from batchwright.batches.settings import BatchSettings

        return self.core.settings.table("batches", BatchSettings)

    @property
    def is_active(self) -> bool:
        return self.core.settings.has_gateways

    @property
    def batches(self) -> Batches:
        from batchwright.batches.store import Batches

        return Batches(self.core.queue)

    @property
    def samples(self) -> BatchSamples:
        from batchwright.batches.samples import BatchSamples

        return BatchSamples(self.core.queue.database)

    @property
    def files(self) -> Files:
        return self.core.part(FilesPart).files

    @property
    def workspace(self) -> Workspace:
        from batchwright.batches.journal.workspace import Workspace

        return Workspace(self.settings.work_dir or self.core.folder / "work", self.settings.work_dir_limit)

    @property
    def seal(self) -> Seal:
        """Encrypts headers of creators. A key is created automatically only if no other machine needs it."""
        from batchwright.batches.seal import KEY_FILE, KeySource, Seal

        settings = self.settings
        is_named = settings.header_key_file is not None or settings.header_key_env is not None
        made = None if is_named or self.core.settings.database.url is not None else self.core.folder / KEY_FILE
        return Seal(KeySource(settings.header_key_file, settings.header_key_env, made))

    def make_models(self) -> Models:
        """The models that can be used here; close it after use."""
        from batchwright.batches.models import Models

        settings = self.core.settings
        return Models(self.batches, settings.global_inference_gateway, settings.model_gateways, settings.inference)

    def label_limits(self) -> LabelLimits:
        """Every model that the configuration names has its own series."""
        from batchwright.batches.metrics import label_limits

        return label_limits({*self.core.settings.model_gateways, *self.settings.prices} - {"*"})

    # Python clients ---------------------------------------------------------------------------------------------

    def client(self) -> AsyncBatches:
        from batchwright.batches.client import AsyncBatches

        return AsyncBatches(self)

    def blocking_client(self, call: Call) -> BlockingBatches:
        from batchwright.batches.blocking import Batches

        return Batches(self, call)

    # Workers ----------------------------------------------------------------------------------------------------

    def work(self, site: Site) -> Duty:
        from batchwright.engine.worker.duty import Duty

        rounds = self._rounds(site)
        if not self.is_active:
            return Duty(rounds=rounds)
        runtime = self.runtime = self.make_runtime(site)
        return Duty(services=runtime.services, demand=runtime, rounds=rounds, close=runtime.close)

    def make_runtime(self, site: Site) -> Runtime:
        from batchwright.batches.runtime import Runtime

        self.workspace.require()
        return Runtime(self, site)

    def make_endings(self, batches: Batches, counts: BatchCounts) -> Endings:
        from batchwright.batches.ending import Endings

        return Endings(batches, counts, self.core.part(WebhooksPart).announcer)

    def _rounds(self, site: Site) -> list[Round]:
        from batchwright.batches.metrics import BatchCounts
        from batchwright.batches.upkeep.collector import COMPONENT, Collector
        from batchwright.batches.upkeep.watchdog import Watchdog

        core = self.core
        endings = self.make_endings(self.batches, BatchCounts(site.counts))
        settings = self.settings
        watchdog = Watchdog(self.batches, endings, settings.cancel_grace_seconds, settings.provider_grace_seconds)
        store = core.open_store(COMPONENT, site.counts)
        garbage = Collector(core.queue, store, self.workspace, self.settings, core.settings.retention)
        return [*watchdog.rounds(), *garbage.rounds(), self.samples.round()]

    # HTTP server ------------------------------------------------------------------------------------------------

    def serve(self, server: Server) -> Served:
        from batchwright.api.errors import file_too_large
        from batchwright.batches.inspector import Inspector
        from batchwright.batches.output.lookup import LineSearch
        from batchwright.batches.output.results import Results
        from batchwright.batches.services import BatchServices

        models = self.make_models()
        files = self.core.part(FilesPart).files_in(server.store)
        services = BatchServices(
            core=self.core,
            batches=self.batches,
            files=files,
            inspector=Inspector(self.core, files, self.settings),
            lines=LineSearch(self.batches, files, self.workspace),
            models=models,
            results=Results(self.batches, self.workspace, server.store),
            samples=self.samples,
            seal=self.seal,
            settings=self.settings,
        )
        most = self.settings.file_bytes_max
        upload = BodyLimit("POST", "/ui/batches/new", 2 * most + FORM_BYTES, file_too_large(most), "file")
        return Served(
            services=services,
            body_limits=[upload],
            streams=["/v1/batches/{id}/results", "/ui/batches/{id}/download/{kind}"],
            close=models.close,
        )

    async def attention(self, tenant: str | None) -> Sequence[Concern]:
        from batchwright.batches.concerns import find_concerns

        return await find_concerns(self.batches, tenant)

    async def spent_today(self, tenant: str | None) -> Sequence[Spent]:
        from batchwright.batches.concerns import spent_today

        return await spent_today(self.batches, self.settings.prices, tenant)

    async def check(self) -> Sequence[Finding]:
        from batchwright.batches.check import check_gateways, check_store
        from batchwright.db.check import check_folder

        if not self.is_active:
            return ()
        found = [await check_gateways(self), *check_folder("batches.work_dir", self.workspace.root)]
        return [*found, await check_store(self)] if self.core.is_open else found
