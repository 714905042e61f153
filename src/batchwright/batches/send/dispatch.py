"""Sends the requests of one worker process: a sender per model, and how many shards each of them wants."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from batchwright.batches.metrics import BatchCounts
from batchwright.batches.plan.planfile import Entry
from batchwright.batches.send.disk import Disk
from batchwright.batches.send.health import Health
from batchwright.batches.send.sender import Sender, Shared
from batchwright.batches.send.work import Work
from batchwright.inference.budgets import Budget
from batchwright.inference.gateway import Gateway, Gateways
from batchwright.inference.limits import Limits

FIRST_SHARDS_MAX = 16
"""Maximum number of shards in one claim, if they may be the first of their batch."""
_PRIORITY_LAST = 9
"""At this priority the first shards of a batch cannot be distinguished from the others."""


class Dispatcher:
    """All senders of a worker process."""

    def __init__(
        self,
        gateways: Gateways,
        limits: Limits,
        counts: BatchCounts,
        disk: Disk,
        *,
        budgets: Mapping[Gateway, Budget] | None = None,
        tenant_weights: Mapping[str, int] | None = None,
    ) -> None:
        self.gateways = gateways
        self.limits = limits
        self.counts = counts
        self.disk = disk
        self.on_demand: Callable[[], None] = lambda: None
        """Called when a sender has few requests left, so that the next shard may be claimed."""
        self.senders: dict[str, Sender] = {}
        self._preparing: Counter[str] = Counter()
        self._budgets = budgets or {}
        self._weights = tenant_weights or {}
        self.clock = time.monotonic
        self.health = Health(self.clock())
        self._shared = Shared(
            limits=limits,
            counts=counts,
            disk=disk,
            health=self.health,
            on_demand=lambda: self.on_demand(),
            clock=self.clock,
        )
        self.divide_totals(None)

    @property
    def broken(self) -> str | None:
        """A broken invariant: a slot was given back twice. Such a process takes no more work."""
        return self.limits.broken

    @property
    def has_totals(self) -> bool:
        """Whether a gateway has a limit over all workers."""
        return any(gateway.settings.concurrency_total for gateway in self.gateways.all())

    def divide_totals(self, workers: int | None) -> None:
        """Divide the gateways' limits among all workers; until the workers are counted, allow one request."""
        totals: dict[str, int] = {}
        for gateway in self.gateways.all():
            if total := gateway.settings.concurrency_total:
                totals[gateway.endpoint] = min(total, totals.get(gateway.endpoint, total))
        for endpoint, total in totals.items():
            self.limits.limit_endpoint(endpoint, 1 if workers is None else max(1, total // workers))

    def passes_through(self, model: str) -> Sequence[str]:
        """The headers of creators that are passed through to the model's gateway."""
        gateway = self.gateways.of(model)
        return () if gateway is None else gateway.settings.passthrough_headers

    def serves(self, model: str) -> bool:
        return self.gateways.of(model) is not None

    def wanted(self, model: str, priority: int, free: int) -> int:
        """How many shards of this model and priority to claim; `free` more can be held.

        Several, if no shard that is held is more urgent: they may be the first of their batch. Otherwise one, as soon
        as less than two rounds of requests are left to send. An idle sender claims only one, so that other workers get
        some too; and none while another shard is being prepared, which may take long.
        """
        if self.broken or not self.serves(model):
            return 0
        sender = self.senders.get(model)
        urgent = None if sender is None else sender.schedule.most_urgent
        may_take = min(free, 0 if self._preparing[model] else 1)
        if sender is None or urgent is None:
            return may_take
        if priority <= urgent < _PRIORITY_LAST:
            return min(free, FIRST_SHARDS_MAX)
        return may_take if free > FIRST_SHARDS_MAX and sender.is_low else 0

    @contextmanager
    def prepare(self, model: str) -> Iterator[Callable[[], None]]:
        """A shard of this model is held, and its requests will follow; call what is yielded when they are queued."""
        self._preparing[model] += 1
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._preparing[model] -= 1
                self.on_demand()

        try:
            yield end
        finally:
            end()

    def begin(self, work: Work, entries: list[Entry], *, priority: int) -> None:
        """Queue the shard's requests; `work.quiet` is set when all of them have ended."""
        weight = self._weights.get(work.tenant, 1)
        self._sender(work.model).add(work, entries, priority=priority, weight=weight)

    def forget(self, work: Work) -> None:
        work.sender.work.pop(work.backlog, None)

    def _sender(self, model: str) -> Sender:
        sender = self.senders.get(model)
        if sender is None:
            gateway = self.gateways.of(model)
            assert gateway is not None, "shards of models without a gateway are not claimed"
            sender = self.senders[model] = Sender(model, gateway, self._budgets.get(gateway), self._shared)
        return sender

    def in_flight(self) -> Mapping[str, int]:
        return {model: sender.schedule.in_flight for model, sender in self.senders.items()}

    def load(self, model: str) -> tuple[int, int] | None:
        """How many requests to this model may be in flight, and how many are; None if it sends none."""
        sender = self.senders.get(model)
        return None if sender is None else (sender.limit.adaptive.limit, sender.schedule.in_flight)

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = []
        for sender in self.senders.values():
            if sender.pump is not None:
                tasks.append(sender.pump)
            for work in sender.work.values():
                tasks += work.tasks.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.gateways.__aexit__(None, None, None)
