"""Tasks for outside providers as a part: speech and completions are sent once, polled, and fetched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from batchwright.files.part import FilesPart
from batchwright.part import Command, Part, Served, Server
from batchwright.webhooks.part import WebhooksPart

if TYPE_CHECKING:
    from pathlib import Path

    from batchwright.core import Core
    from batchwright.db.check import Finding
    from batchwright.engine.attention import Concern
    from batchwright.engine.views import InboxGroup
    from batchwright.engine.worker.duty import Duty, Site
    from batchwright.files.store import Files
    from batchwright.inference.budgets import RateBudget, RateLimits
    from batchwright.inference.http import Http
    from batchwright.providers.directory import Directory
    from batchwright.providers.jobs import RemoteJobs
    from batchwright.providers.settings import ProviderSettings, TaskSettings
    from batchwright.providers.submission import Submission
    from batchwright.providers.tasks import Tasks

PROCESS = "provider.task"
_COMMANDS = "batchwright.providers.commands"


class ProvidersPart(Part):
    """Tasks of all tenants. Every worker runs them; each provider's table has its URL and credentials."""

    name = "providers"
    tables = {
        "tasks": "batchwright.providers.settings:TaskSettings",
        "providers": "batchwright.providers.settings:Providers",
    }
    operations = ("batchwright.providers.operations:run_task",)
    routers = ("batchwright.providers.http:router",)
    pages = ("batchwright.providers.pages:pages",)
    commands = {
        "task": Command(f"{_COMMANDS}.task:app", "Send work to outside providers and fetch the results.", "Batches"),
        "providers": Command(
            f"{_COMMANDS}.providers:providers", "List outside providers and whether they are ready.", "Batches"
        ),
    }

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._directory: Directory | None = None
        self._http: Http | None = None
        self.unstored: dict[str, Path] = {}
        """Local files that will be stored, by id. Until then they are read from their local path."""

    @property
    def settings(self) -> TaskSettings:
        from batchwright.providers.settings import TaskSettings

        return self.core.settings.table("tasks", TaskSettings)

    @property
    def providers(self) -> Mapping[str, ProviderSettings]:
        found: Mapping[str, ProviderSettings] = self.core.settings.table("providers", dict)
        return found

    @property
    def tasks(self) -> Tasks:
        from batchwright.providers.tasks import Tasks

        return Tasks(self.core.queue)

    @property
    def jobs(self) -> RemoteJobs:
        from batchwright.providers.jobs import RemoteJobs

        return RemoteJobs(self.core.queue)

    @property
    def directory(self) -> Directory:
        """The providers, with one HTTP client for all of them; created once, and closed with the part."""
        if self._directory is None:
            self._directory = self._make_directory()
        return self._directory

    @property
    def submission(self) -> Submission:
        return self.submission_with(self.core.part(FilesPart).files)

    def submission_with(self, files: Files) -> Submission:
        from batchwright.providers.submission import Submission

        return Submission(self.tasks, self.core.catalog, files, self.directory, self.settings)

    def _make_directory(self) -> Directory:
        from batchwright.inference.http import Http
        from batchwright.providers.directory import Directory
        from batchwright.providers.tools import AdapterTools

        self._http = Http()
        tools = AdapterTools(
            self._http,
            open_stored=self._read_stored,
            place_of_stored=self._place_stored,
            may_fetch_private=self.settings.fetch_private,
        )
        return Directory(self.providers, self.settings, tools, open_budget=self.open_budget)

    def open_budget(self, name: str, limits: RateLimits) -> RateBudget:
        from batchwright.inference.budgets import RateBudget

        return RateBudget(self.core.queue.database, name, limits)

    async def _read_stored(self, name: str) -> AsyncIterator[bytes]:
        """The bytes of a stored file, even if its user has deleted it meanwhile. A name with a slash is not that of a
        file, but of an object that a part has put into the store."""
        from batchwright.errors import Fatal, NotFound, StorageError, Transient

        if (path := self.unstored.get(name)) is not None:
            from batchwright.files.local import read_file

            async for chunk in read_file(path):
                yield chunk
            return
        files = self.core.part(FilesPart).files
        try:
            key = name if "/" in name else (await files.get(name, tenant=None, also_gone=True)).key
            async for chunk in files.store.get(key):
                yield chunk
        except NotFound as error:
            raise Fatal(str(error), scope="item", code="input_not_found") from None
        except StorageError as error:
            raise Transient(str(error), code="storage_unavailable") from None

    def _place_stored(self, name: str) -> str | None:
        """The address of a stored file or object, if it is in a bucket that a provider can be given access to."""
        from batchwright.files.store import object_key

        url = self.core.settings.storage.url
        if url is None or url.partition("://")[0] not in ("gs", "s3", "az"):
            return None
        return f"{url.rstrip('/')}/{name if '/' in name else object_key(name)}"

    # In a worker ------------------------------------------------------------------------------------------------

    def work(self, site: Site) -> Duty:
        from batchwright.engine.worker.duty import Duty
        from batchwright.providers.process import TaskRunner, TaskTools
        from batchwright.providers.upkeep import TaskUpkeep

        core = self.core
        store = core.open_store("provider", site.counts)
        announcer = core.part(WebhooksPart).announcer
        tools = TaskTools(
            announcer=announcer,
            catalog=core.catalog,
            directory=self.directory,
            files=core.part(FilesPart).files_in(store),
            jobs=self.jobs,
            store=store,
            tasks=self.tasks,
        )
        upkeep = TaskUpkeep(self.tasks, self.jobs, self.directory, announcer, store, core.settings.retention)
        return Duty(
            services=[TaskRunner(tools)],
            demand=TaskDemand(site, self.settings.jobs_at_once),
            rounds=upkeep.rounds(),
            close=upkeep.close,
        )

    # In the HTTP server -----------------------------------------------------------------------------------------

    def serve(self, server: Server) -> Served:
        from batchwright.providers.services import TaskServices

        files = self.core.part(FilesPart).files_in(server.store)
        services = TaskServices(
            core=self.core,
            directory=self.directory,
            files=files,
            jobs=self.jobs,
            submission=self.submission_with(files),
            tasks=self.tasks,
        )
        return Served(services=services, streams=["/ui/tasks/{id}/download"])

    async def close(self) -> None:
        self._directory, http, self._http = None, self._http, None
        if http is not None:
            await http.close()

    async def inbox(self, tenant: str | None) -> Sequence[InboxGroup]:
        """Tasks that wait because their provider refuses its credential."""
        return await self.tasks.parked(tenant)

    async def attention(self, tenant: str | None) -> Sequence[Concern]:
        """The same tasks, as one sentence per provider."""
        from batchwright.engine.attention import Concern

        return [
            Concern(
                kind="parked",
                level="error",
                message=group.message or "a provider refuses its credential",
                remedy="correct the credential: the tasks resume within minutes",
                link="tasks",
            )
            for group in await self.tasks.parked(tenant)
        ]

    async def check(self) -> Sequence[Finding]:
        from batchwright.providers.check import check_providers

        return await check_providers(self)


class TaskDemand:
    """Tasks take no slot of the worker: they mostly wait, and a slow provider delays only its own tasks."""

    operations = (PROCESS,)
    broken = None

    def __init__(self, site: Site, at_once: int) -> None:
        self._site = site
        self._at_once = at_once

    def queues(self) -> list[str]:
        from batchwright.providers.tasks import QUEUE

        return [QUEUE] if self._site.queues is None else [one for one in self._site.queues if self.serves(one)]

    def serves(self, queue: str) -> bool:
        return queue.startswith("tasks/") and self._site.serves(queue)

    def wanted(self, queue: str, priority: int, running: int) -> int:
        return max(0, self._at_once - running)

    def listen(self, on_demand: Callable[[], None]) -> None:
        """Nothing to do: a task that is put back frees its place, and the worker notices that itself."""
