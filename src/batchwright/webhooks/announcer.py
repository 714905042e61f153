"""Announces that an object has ended, in the same commit: one delivery for each subscribed endpoint of the tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from batchwright.db.database import Session
from batchwright.engine.catalog import Catalog
from batchwright.engine.queue import Queue
from batchwright.webhooks.settings import EventType, WebhookSettings


class Announcer:
    """Enqueues deliveries; it needs no secret, because any worker may end a batch or a task."""

    def __init__(self, queue: Queue, catalog: Catalog, endpoints: Mapping[str, Sequence[WebhookSettings]]) -> None:
        self._queue = queue
        self._catalog = catalog
        self._endpoints = endpoints

    async def announce(self, tenant: str, id: str, event: EventType, session: Session) -> None:
        if endpoints := self._endpoints.get(tenant):
            from batchwright.webhooks.delivery import deliveries  # imported here: it loads the HTTP client

            jobs = deliveries(endpoints, tenant, id, event, datetime.now(UTC))
            await self._queue.enqueue(await self._catalog.prepare(jobs, session=session), session=session)
