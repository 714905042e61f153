"""Looks after batches that nobody else moves on: late ones, those that do not stop, and those whose job is gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from batchwright.batches.lines import Problem
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.store import FENCE_SECONDS, Batches, Ending, Neglected
from batchwright.batches.webhook_settings import WebhookSettings
from batchwright.db.database import Session
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import JobId
from batchwright.engine.upkeep import Round
from batchwright.errors import DatabaseUnavailable
from batchwright.states import BATCH, BatchStatus, JobStatus

log = logging.getLogger(__name__)

_EVERY_SECONDS = 0.5
_PAGE = 200
_TURN_SECONDS = 1.0
"""The upkeep session stays open while a turn lasts, and other rounds wait."""
_START = (datetime(1, 1, 1, tzinfo=UTC), "")
_ENDED = {None, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}
_OPEN = tuple(status for status in BatchStatus if status not in BATCH.terminal)


class Care:
    """An upkeep round of every worker, so that a batch ends in time even if its own workers are gone."""

    def __init__(
        self,
        batches: Batches,
        catalog: Catalog,
        counts: BatchCounts,
        cancel_grace_seconds: float,
        webhooks: Mapping[str, Sequence[WebhookSettings]],
    ) -> None:
        self._batches = batches
        self._catalog = catalog
        self._counts = counts
        self._webhooks = webhooks
        self._after = _START
        self._grace = {"deadline": FENCE_SECONDS, "cancel": cancel_grace_seconds + FENCE_SECONDS}

    def rounds(self) -> list[Round]:
        return [Round("batches", _EVERY_SECONDS, self.look)]

    async def look(self, session: Session) -> bool:
        """Help one page of batches; True when the next turn must go on behind it."""
        began = time.monotonic()
        page = await self._batches.neglected(self._after, limit=_PAGE, session=session)
        for batch in page:
            self._after = (batch.expires_at, batch.id)  # first: one that cannot be helped must not be in the way
            try:
                await self._help(batch)
            except DatabaseUnavailable:
                raise
            except Exception:  # the others need a hand all the same
                log.exception("batch %s could not be looked after", batch.id)
            if time.monotonic() - began > _TURN_SECONDS:
                return True
        if len(page) == _PAGE:
            return True
        self._after = _START
        return False

    async def _help(self, batch: Neglected) -> None:
        if batch.job_status in _ENDED:
            await self._bury(batch)
        elif batch.status == BatchStatus.VALIDATING:
            if batch.late_seconds >= 0 and batch.job_status == JobStatus.QUEUED:
                await self._expire(batch)
        elif batch.stop_reason is None:
            await self._batches.stop(batch.id, "deadline")
        elif self._must_be_over(batch):
            await self._batches.fence(batch.job_id, "the batch has ended")
        else:
            await self._batches.recall(batch.job_id, "the batch stops")

    def _must_be_over(self, batch: Neglected) -> bool:
        """Whatever it stops for, nothing of it outlives its window."""
        grace = self._grace.get(batch.stop_reason or "", float("inf"))
        return (batch.stopped_seconds or 0.0) >= grace or batch.late_seconds >= FENCE_SECONDS

    async def _expire(self, batch: Neglected) -> None:
        """Its window was over before a worker came to it; nothing was planned, so there is nothing to write."""
        async with self._batches.queue.database.transaction() as session:
            if not await self._batches.expire_unstarted(batch.id, session=session):
                return
            reason = "the batch expired"
            await self._batches.queue.cancel([JobId(batch.job_id)], reason=reason, owned=True, session=session)
            await self._announce(batch, BatchStatus.EXPIRED, session)
        await self._count(batch.id, "expired_dequeue")

    async def _bury(self, batch: Neglected) -> None:
        """Its job ended without ending it, such as by killing every process that ran it. What is registered stays."""
        log.error("batch %s is %s, and its job is %s: it fails", batch.id, batch.status, batch.job_status or "gone")
        message = "The job of this batch could not be run; nothing was sent."
        if batch.status != BatchStatus.VALIDATING:
            message = "The job of this batch could not be run; `batchwright batch repair` writes what was answered."
        problem = Problem(code="system_error", line=None, message=message)
        errors = {"object": "list", "data": [problem.as_json()], "total": 1}
        await self._batches.fence(batch.job_id, "the batch failed")
        async with self._batches.queue.database.transaction() as session:
            ending = Ending(target=BatchStatus.FAILED, sources=_OPEN, errors=errors)
            if await self._batches.end(batch.id, ending, session=session) is None:
                return
            await self._announce(batch, BatchStatus.FAILED, session)
        await self._count(batch.id, "system_error")

    async def _announce(self, batch: Neglected, status: BatchStatus, session: Session) -> None:
        """In the same commit as the ending."""
        if endpoints := self._webhooks.get(batch.tenant):
            from batchwright.batches.webhooks import EVENTS, deliveries  # here: it loads the HTTP client

            jobs = deliveries(endpoints, batch.tenant, batch.id, EVENTS[status], datetime.now(UTC))
            await self._batches.queue.enqueue(await self._catalog.prepare(jobs, session=session), session=session)

    async def _count(self, id: str, reason: str) -> None:
        batch = await self._batches.get(id, tenant=None)
        since = (batch.ended_at or batch.created_at) - batch.created_at
        self._counts.ended(
            batch.status.value, reason, total=batch.total, seconds=0.0, since_created=since.total_seconds()
        )
