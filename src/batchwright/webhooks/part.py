"""Webhooks as a part: deliveries are jobs in their own queue, limited by what a process can deliver."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from batchwright.part import Part

if TYPE_CHECKING:
    from batchwright.engine.worker.duty import Duty, Site
    from batchwright.webhooks.announcer import Announcer

QUEUE = "webhooks"
DELIVER = "batch.webhook"
DELIVERIES_MAX = 16
"""Maximum number of webhooks that one process delivers at the same time."""


class WebhooksPart(Part):
    """Notifies tenants' endpoints when a batch or a task has ended."""

    name = "webhooks"
    tables = {"webhooks": "batchwright.webhooks.settings:Webhooks"}
    operations = ("batchwright.webhooks.delivery:deliver_webhook",)
    pages = ("batchwright.webhooks.pages:pages",)

    @property
    def is_active(self) -> bool:
        """Batches announce their end, and they run where there is a gateway; tasks run everywhere."""
        return self.core.settings.has_gateways or bool(self.settings)

    @property
    def announcer(self) -> Announcer:
        """For parts that have something to announce."""
        from batchwright.webhooks.announcer import Announcer

        return Announcer(self.core.queue, self.core.catalog, self.settings)

    def work(self, site: Site) -> Duty | None:
        if not self.is_active:
            return None
        from batchwright.engine.worker.duty import Duty
        from batchwright.webhooks.delivery import Webhooks

        webhooks = Webhooks(self.settings)
        demand = Deliveries() if site.serves(QUEUE) else None
        return Duty(services=[webhooks], demand=demand, close=webhooks.close)


class Deliveries:
    """Deliveries use no slot of the worker: twenty long jobs of a user must not delay them."""

    operations = (DELIVER,)
    broken = None

    def queues(self) -> list[str]:
        return [QUEUE]

    def serves(self, queue: str) -> bool:
        return queue == QUEUE

    def wanted(self, queue: str, priority: int, running: int) -> int:
        return max(0, DELIVERIES_MAX - running)

    def listen(self, on_demand: Callable[[], None]) -> None:
        """No callback is needed: the worker itself notices when a delivery has ended."""
