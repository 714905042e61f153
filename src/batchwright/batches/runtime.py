"""Everything that a worker process needs for batches, put together once; and how much of it the worker may claim.

Nothing of a batch takes a slot of the worker. Twenty long jobs of a user must not keep a batch from being planned, its
shards from being sent, its files from being written, or its webhooks from being delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from batchwright.batches.checkpoint import Checkpoints
from batchwright.batches.disk import Disk
from batchwright.batches.dispatch import Dispatcher
from batchwright.batches.execution import Shards
from batchwright.batches.files import Files
from batchwright.batches.metrics import BatchCounts, load_of
from batchwright.batches.operations import process_batch, send_shard
from batchwright.batches.process import Processor, shard_queue
from batchwright.batches.seal import Seal
from batchwright.batches.segments import Segments
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import PROCESS, QUEUE, SHARD, Batches
from batchwright.batches.takeover import Takeover
from batchwright.batches.waits import Waits
from batchwright.batches.webhooks import DELIVER, WEBHOOKS, Webhooks, deliver_webhook
from batchwright.batches.workspace import Workspace
from batchwright.engine.catalog import Catalog
from batchwright.engine.lanes import PRIVATE
from batchwright.engine.queue import Queue
from batchwright.inference.budgets import Budget, Rate
from batchwright.inference.gateway import Gateway, Gateways
from batchwright.inference.limits import Limits
from batchwright.inference.settings import InferenceSettings

OPERATIONS: tuple[Callable[..., Any], ...] = (process_batch, send_shard, deliver_webhook)
SHARDS_MAX = 256
"""Shards that one process holds at the same time; each costs little more than an open file."""
COORDINATORS_MAX = 16
"""Batches that one process plans or finishes at the same time."""
DELIVERIES_MAX = 16
"""Webhooks that one process delivers at the same time."""

T = TypeVar("T")


class Runtime:
    """The batch side of a worker process."""

    def __init__(
        self,
        *,
        batches: Batches,
        files: Files,
        workspace: Workspace,
        catalog: Catalog,
        gateways: Gateways,
        webhooks: Webhooks,
        counts: BatchCounts,
        inference: InferenceSettings,
        settings: BatchSettings,
        seal: Seal,
        is_shared: bool,
        queues: Sequence[str] | None = None,
    ) -> None:
        self.dispatcher = Dispatcher(
            gateways,
            Limits(inference),
            counts,
            Disk(workspace.root, reserve=settings.work_dir_reserve),
            budgets=_budgets(batches.queue, gateways),
            tenant_weights=settings.tenant_weights,
        )
        waits = Waits(batches)
        checkpoints = Checkpoints(
            batches,
            files.store,
            workspace,
            waits,
            counts,
            is_shared=is_shared,
            every_seconds=settings.checkpoint_seconds,
            shared_every_seconds=settings.shared_checkpoint_seconds,
        )
        takeover = Takeover(batches, Segments(workspace, files.store), checkpoints)
        self.shards = Shards(
            batches, files, workspace, self.dispatcher, checkpoints, takeover, waits, counts, settings, seal
        )
        processor = Processor(
            batches, files, workspace, catalog, takeover, webhooks, waits, counts, settings, models=gateways.models
        )
        counts.watch(lambda: load_of(self.dispatcher, shards=self.shards.held, shards_max=SHARDS_MAX))
        self._webhooks = webhooks
        self._services: tuple[object, ...] = (self.shards, processor, webhooks, self.dispatcher)
        served = [queue for queue in (QUEUE, *(queues or ())) if _serves(queue, queues)]
        self._prefixes = tuple(shard_queue(queue, "") for queue in served)
        self._limits = {queue: COORDINATORS_MAX for queue in served if queue == QUEUE or queue.startswith(PRIVATE)}
        if _serves(WEBHOOKS, queues):
            self._limits[WEBHOOKS] = DELIVERIES_MAX

    def service(self, kind: type[T]) -> T | None:
        """What operations ask for; None if that is somebody else's."""
        return next((one for one in self._services if isinstance(one, kind)), None)

    # What the worker may claim: it asks for each queue ----------------------------------------------------------

    operations = (SHARD, PROCESS, DELIVER)

    def queues(self) -> list[str]:
        models = self.dispatcher.gateways.models
        shards = [prefix + model for prefix in self._prefixes for model in sorted([""] if models is None else models)]
        return [*self._limits, *shards]

    def serves(self, queue: str) -> bool:
        """Whether this queue is for us: its jobs take no slot of the worker, they are limited by what we can do."""
        return queue in self._limits or queue.startswith(self._prefixes)

    def wanted(self, queue: str, priority: int, running: int) -> int:
        if self.broken is not None:
            return 0
        if (limit := self._limits.get(queue)) is not None:
            return max(0, limit - running)
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
        await self._webhooks.close()


def _serves(queue: str, queues: Sequence[str] | None) -> bool:
    """A worker that serves the queue of batches, or all queues, also serves their shards."""
    return queues is None or queue in queues


def _budgets(queue: Queue, gateways: Gateways) -> dict[Gateway, Budget]:
    rates = ((gateway, Rate.of(gateway.settings)) for gateway in gateways.all())
    return {gateway: Budget(queue, gateway.endpoint, rate) for gateway, rate in rates if rate is not None}
