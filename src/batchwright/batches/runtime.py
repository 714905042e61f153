"""Builds everything that a worker process needs for batches, and decides how many of their jobs the worker may claim.

Jobs of batches take no slots of the worker: twenty long jobs of a user must not keep a batch from being planned, its
shards from being sent, or its files from being written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from batchwright.batches.journal.checkpoint import Checkpoints
from batchwright.batches.journal.segments import Segments
from batchwright.batches.journal.unregistered import UnregisteredAnswers
from batchwright.batches.metrics import BatchCounts, load_of
from batchwright.batches.process import Processor
from batchwright.batches.send.desk import Desk
from batchwright.batches.send.disk import Disk
from batchwright.batches.send.dispatch import Dispatcher
from batchwright.batches.send.runner import ShardRunner
from batchwright.batches.store import PROCESS, PROVIDER_SHARD, QUEUE, SHARD, Batches, provider_queue, shard_queue
from batchwright.batches.toolbox import Toolbox
from batchwright.batches.waits import Waits
from batchwright.engine.queue import Queue
from batchwright.engine.worker.duty import Site
from batchwright.engine.worker.lanes import PRIVATE
from batchwright.files.part import FilesPart
from batchwright.inference.budgets import Budget, Rate
from batchwright.inference.gateway import Gateway, Gateways
from batchwright.inference.limits import Limits
from batchwright.providers.jobs import RemoteJobs
from batchwright.providers.part import ProvidersPart

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart

SHARDS_MAX = 256
"""Maximum number of shards that one process holds at the same time; each costs little more than an open file."""
PROVIDER_SHARDS_MAX = 64
"""Maximum number of shards at one provider that one process polls at the same time."""
COORDINATORS_MAX = 16
"""Maximum number of batches that one process plans or finishes at the same time."""


class Runtime:
    """The batch side of a worker process."""

    def __init__(self, part: BatchesPart, site: Site) -> None:
        core, tools = part.core, _make_tools(part, site)
        inference = core.settings.inference
        gateways = Gateways(core.settings.global_inference_gateway, core.settings.model_gateways, inference)
        self.dispatcher = Dispatcher(
            gateways,
            Limits(inference),
            tools.counts,
            Disk(tools.workspace.root, reserve=tools.settings.work_dir_reserve),
            budgets=_budgets(site.queue, gateways),
            tenant_weights=tools.settings.tenant_weights,
        )
        checkpoints = Checkpoints(
            tools.batches,
            tools.files.store,
            tools.workspace,
            tools.waits,
            tools.counts,
            tools.settings,
            is_shared=core.settings.storage.url is not None,
            load=self.dispatcher.load,
        )
        segments = Segments(tools.workspace, tools.files.store)
        unregistered = UnregisteredAnswers(tools.batches, segments, checkpoints)
        self.desk = _make_desk(part, site, tools)
        self.shards = ShardRunner(
            tools, self.dispatcher, checkpoints, unregistered, part.seal, self.desk, ring=site.ring
        )
        endings = part.make_endings(tools.batches, tools.counts)
        models = None if gateways.models is None else gateways.models | set(self.desk.plans)
        processor = Processor(tools, endings, unregistered, models=models, desk=self.desk)
        tools.counts.watch(lambda: load_of(self.dispatcher, shards=self.shards.held, shards_max=SHARDS_MAX))
        self.services: tuple[object, ...] = (self.shards, processor, self.dispatcher)
        served = [queue for queue in (QUEUE, *(site.queues or ())) if site.serves(queue)]
        self._prefixes = tuple(shard_queue(queue, "") for queue in served)
        self._provider_queues = {provider_queue(queue, one) for queue in served for one in self.desk.providers}
        self._limits = {queue: COORDINATORS_MAX for queue in served if queue == QUEUE or queue.startswith(PRIVATE)}

    # What the worker may claim, for each queue ------------------------------------------------------------------

    operations = (SHARD, PROVIDER_SHARD, PROCESS)

    def queues(self) -> list[str]:
        models = self.dispatcher.gateways.models
        shards = [prefix + model for prefix in self._prefixes for model in sorted([""] if models is None else models)]
        return [*self._limits, *shards, *sorted(self._provider_queues)]

    def serves(self, queue: str) -> bool:
        """Whether this queue is ours: its jobs take no slots of the worker; `wanted` limits them."""
        return queue in self._limits or queue in self._provider_queues or queue.startswith(self._prefixes)

    def wanted(self, queue: str, priority: int, running: int) -> int:
        if self.broken is not None:
            return 0
        if (limit := self._limits.get(queue)) is not None:
            return max(0, limit - running)
        if queue in self._provider_queues:
            return max(0, PROVIDER_SHARDS_MAX - running)
        room = SHARDS_MAX - self.shards.held
        if room <= 0:
            return 0
        model = next(queue.removeprefix(one) for one in self._prefixes if queue.startswith(one))
        return self.dispatcher.wanted(model, priority, room)

    def listen(self, on_demand: Callable[[], None]) -> None:
        self.dispatcher.on_demand = on_demand

    @property
    def broken(self) -> str | None:
        return self.dispatcher.broken

    async def close(self) -> None:
        await self.shards.close()
        await self.dispatcher.close()


def _make_tools(part: BatchesPart, site: Site) -> Toolbox:
    batches = Batches(site.queue)
    return Toolbox(
        batches=batches,
        counts=BatchCounts(site.counts),
        files=part.core.part(FilesPart).files_in(part.core.open_store("processor", site.counts)),
        settings=part.settings,
        waits=Waits(batches),
        workspace=part.workspace,
    )


def _make_desk(part: BatchesPart, site: Site, tools: Toolbox) -> Desk:
    directory = part.core.part(ProvidersPart).directory
    models = part.core.settings.model_gateways
    return Desk(directory=directory, jobs=RemoteJobs(site.queue), models=models, store=tools.files.store)


def _budgets(queue: Queue, gateways: Gateways) -> dict[Gateway, Budget]:
    rates = ((gateway, Rate.of(gateway.settings)) for gateway in gateways.all())
    return {gateway: Budget(queue.database, gateway.endpoint, rate) for gateway, rate in rates if rate is not None}
