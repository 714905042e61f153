"""Everything that a worker process needs for batches, put together once; and how much of it the worker may claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from batchwright.batches.checkpoint import Checkpoints
from batchwright.batches.dispatch import Dispatcher
from batchwright.batches.execution import Shards
from batchwright.batches.files import Files
from batchwright.batches.metrics import BatchCounts, load_of
from batchwright.batches.operations import process_batch, send_shard
from batchwright.batches.process import Processor, shard_queue
from batchwright.batches.segments import Segments
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import QUEUE, SHARD, Batches
from batchwright.batches.takeover import Takeover
from batchwright.batches.webhooks import Webhooks, deliver_webhook
from batchwright.batches.workspace import Workspace
from batchwright.engine.catalog import Catalog
from batchwright.engine.queue import Queue
from batchwright.inference.budgets import Budget, Rate
from batchwright.inference.gateway import Gateway, Gateways
from batchwright.inference.limits import Limits
from batchwright.inference.settings import InferenceSettings

OPERATIONS: tuple[Callable[..., Any], ...] = (process_batch, send_shard, deliver_webhook)
SHARDS_MAX = 256
"""Shards that one process holds at the same time; each costs little more than an open file."""

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
        is_shared: bool,
        queues: Sequence[str] | None = None,
    ) -> None:
        self.dispatcher = Dispatcher(
            gateways,
            Limits(inference),
            counts,
            budgets=_budgets(batches.queue, gateways),
            tenant_weights=settings.tenant_weights,
        )
        checkpoints = Checkpoints(
            batches,
            files.store,
            workspace,
            counts,
            is_shared=is_shared,
            every_seconds=settings.checkpoint_seconds,
            shared_every_seconds=settings.shared_checkpoint_seconds,
        )
        takeover = Takeover(batches, workspace, Segments(workspace, files.store), checkpoints)
        self.shards = Shards(batches, files, workspace, self.dispatcher, checkpoints, takeover, counts, settings)
        processor = Processor(
            batches, files, workspace, catalog, takeover, webhooks, counts, settings, models=gateways.models
        )
        counts.watch(lambda: load_of(self.dispatcher, shards=self.shards.held, shards_max=SHARDS_MAX))
        self._webhooks = webhooks
        self._services: tuple[object, ...] = (self.shards, processor, webhooks, self.dispatcher)
        self._prefixes = tuple(shard_queue(queue, "") for queue in (QUEUE, *(queues or ())) if _serves(queue, queues))

    def service(self, kind: type[T]) -> T | None:
        """What operations ask for; None if that is somebody else's."""
        return next((one for one in self._services if isinstance(one, kind)), None)

    # What the worker may claim: it asks for each queue of shards ------------------------------------------------

    operations = (SHARD,)

    def queues(self) -> list[str]:
        models = self.dispatcher.gateways.models
        return [prefix + model for prefix in self._prefixes for model in sorted([""] if models is None else models)]

    def serves(self, queue: str) -> bool:
        """Whether this queue is for us: its jobs take no slot of the worker, they are limited by what we can send."""
        return queue.startswith(self._prefixes)

    def wanted(self, queue: str, priority: int) -> int:
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
