"""What every part uses: settings, the database, the queue and its catalog, the doorbell, the object store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from batchwright.access.keys import Keys
from batchwright.access.sessions import Sessions
from batchwright.db.database import Database, Pool
from batchwright.db.doorbell import Doorbell
from batchwright.db.embedded import default_root
from batchwright.engine.attention import Attention, Concern, by_urgency, disk_concern
from batchwright.engine.briefs import Briefs
from batchwright.engine.bulk import Bulk
from batchwright.engine.catalog import Catalog
from batchwright.engine.named_queues import NamedQueues
from batchwright.engine.queue import Queue
from batchwright.engine.samples import Samples
from batchwright.engine.schedules import Schedules
from batchwright.engine.views import InboxGroup, Views
from batchwright.engine.worker.duty import label_limits_of, metrics_of
from batchwright.engine.workers import Workers
from batchwright.errors import InvalidInput
from batchwright.inference.spending import Spending, Spent
from batchwright.operations.registry import Registry
from batchwright.part import Part
from batchwright.plugins import load, part_kinds
from batchwright.settings import Settings, settings_of
from batchwright.storage import Store, open_store
from batchwright.storage.metrics import StorageCounts
from batchwright.telemetry.metrics import Counts

if TYPE_CHECKING:
    from batchwright.engine.exposition import Exposition

P = TypeVar("P", bound=Part)
T = TypeVar("T")
_SPENT_MAX = 100


class Core:
    """There is one in a client, a worker process or an HTTP server, with all the parts of that process."""

    def __init__(self, settings: Settings, operations: Registry, kinds: Iterable[type[Part]]) -> None:
        self.settings = settings
        self.operations = operations
        self._pool: Pool | None = None
        self.parts: list[Part] = []
        for kind in kinds:  # one by one: a part may use those before it
            self.parts.append(kind(self))

    def part(self, kind: type[P]) -> P:
        """The part of this kind."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        raise InvalidInput(f"there is no part {kind.name!r} here")

    def part_named(self, name: str) -> Part:
        """The part of this name, for modules that may not import its class."""
        for part in self.parts:
            if part.name == name:
                return part
        raise InvalidInput(f"there is no part {name!r} here")

    def use_pool(self, pool: Pool) -> None:
        """Use a pool that the caller opens and closes."""
        self._pool = pool

    @property
    def is_open(self) -> bool:
        """Whether the database is open."""
        return self._pool is not None

    @property
    def pool(self) -> Pool:
        return _require_open(self._pool)

    @cached_property
    def queue(self) -> Queue:
        return Queue(Database(self.pool), self.settings.engine)

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self.queue.database, self.operations)

    @cached_property
    def doorbell(self) -> Doorbell:
        return Doorbell(self.pool)

    @property
    def views(self) -> Views:
        return Views(self.queue)

    @property
    def briefs(self) -> Briefs:
        return Briefs(self.queue.database)

    @property
    def named_queues(self) -> NamedQueues:
        return NamedQueues(self.queue.database)

    @property
    def workers(self) -> Workers:
        return Workers(self.queue.database)

    @property
    def samples(self) -> Samples:
        return Samples(self.queue.database)

    @property
    def bulk(self) -> Bulk:
        return Bulk(self.queue, self.views)

    @property
    def schedules(self) -> Schedules:
        return Schedules(self.queue, self.catalog)

    @property
    def keys(self) -> Keys:
        return Keys(self.queue.database)

    @property
    def sessions(self) -> Sessions:
        return Sessions(self.queue.database)

    async def inbox(
        self, *, tenant: str | None = None, job_type: str | None = None, limit: int = 100
    ) -> list[InboxGroup]:
        """Items that wait for a person: those of the parts first, then failed jobs, largest group first."""
        of_parts = [group for part in self.parts for group in await part.inbox(tenant)]
        wanted = [group for group in of_parts if job_type in (None, group.job_type)]
        return [*wanted, *await self.views.inbox(tenant=tenant, job_type=job_type, limit=limit)][:limit]

    async def attention(self, tenant: str | None = None) -> list[Concern]:
        """What a person should look at now, errors first; of one tenant, or (None) of all tenants and this machine."""
        found = [*await Attention(self.queue, self.views).concerns(tenant)]
        for part in self.parts:
            found += await part.attention(tenant)
        if tenant is None and (disk := await disk_concern(self.folder, "the data folder")) is not None:
            found.append(disk)
        return by_urgency(found)

    async def spent_today(self, tenant: str | None = None) -> list[Spent]:
        """What models cost today (UTC), by tenant, model and lane, most expensive first."""
        costs = await Spending(self.queue.database).costs(tenant, days=1, limit=_SPENT_MAX)
        of_parts = [one for part in self.parts for one in await part.spent_today(tenant)]
        return sorted([*costs.parts, *of_parts], key=lambda one: (-one.sums.cost, one.model, one.lane))[:_SPENT_MAX]

    @property
    def folder(self) -> Path:
        """Where this machine keeps data that is not in the database: work folders, and files without a remote store."""
        return Path(self.settings.database.folder or default_root())

    @cached_property
    def store(self) -> Store:
        return open_store(self.settings.storage, beside=self.folder)

    def open_store(self, component: str, counts: Counts, *, patience_seconds: float = inf) -> Store:
        """The same store, with its calls counted; `patience_seconds` limits its retries more than the settings do."""
        settings = self.settings.storage
        settings = dataclasses.replace(settings, retry_seconds_max=min(settings.retry_seconds_max, patience_seconds))
        return open_store(settings, beside=self.folder, counts=StorageCounts(counts), component=component)

    def add_operations(self) -> None:
        """Register the operations of the parts that are active here."""
        for part in self.parts:
            if part.is_active:
                for place in part.operations:
                    self.operations.add(load(place))


def child_parts(document: dict[str, Any], pool: Pool, operations: Registry) -> list[Part]:
    """The parts in a child process that runs one job alone."""
    core = Core(settings_of(document), operations, part_kinds())
    core.use_pool(pool)
    return core.parts


CHILD_PARTS = f"{__name__}:{child_parts.__name__}"


def exposition_of(core: Core, own: Counts) -> Exposition:
    """The Prometheus page of a process that has these counts, with the metrics of all parts."""
    from batchwright.engine.exposition import Exposition  # imported here: clients have no such page

    limits = label_limits_of(core.parts)
    return Exposition(core.queue.database, own, more=metrics_of(core.parts), label_limits=limits)


def _require_open(opened: T | None) -> T:
    if opened is None:
        raise InvalidInput("this client is not open; use it in a `with` block, or call open()")
    return opened
