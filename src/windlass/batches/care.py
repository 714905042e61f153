"""Looks after batches that nobody else moves on: late ones, those that do not stop, and those whose job is gone."""

from __future__ import annotations

import logging

from windlass.batches.lines import Problem
from windlass.batches.metrics import BatchCounts
from windlass.batches.store import FENCE_SECONDS, Batches, Ending, Neglected
from windlass.db.database import Session
from windlass.engine.jobs import JobId
from windlass.engine.upkeep import Round
from windlass.states import BATCH, BatchStatus, JobStatus

log = logging.getLogger(__name__)

_EVERY_SECONDS = 0.5
_ENDED = {None, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}
_OPEN = tuple(status for status in BatchStatus if status not in BATCH.terminal)


class Care:
    """An upkeep round of every worker, so that a batch ends in time even if its own workers are gone."""

    def __init__(self, batches: Batches, counts: BatchCounts, cancel_grace_seconds: float) -> None:
        self._batches = batches
        self._counts = counts
        self._grace = {"deadline": FENCE_SECONDS, "cancel": cancel_grace_seconds + FENCE_SECONDS}

    def rounds(self) -> list[Round]:
        return [Round("batches", _EVERY_SECONDS, self.look)]

    async def look(self, session: Session) -> None:
        for batch in await self._batches.neglected(session=session):
            await self._help(batch)

    async def _help(self, batch: Neglected) -> None:
        if batch.job_status in _ENDED:
            await self._bury(batch)
        elif batch.status == BatchStatus.VALIDATING:
            if batch.is_late and batch.job_status == JobStatus.QUEUED:
                await self._expire(batch)
        elif batch.stop_reason is None:
            await self._batches.stop(batch.id, "deadline")
        elif (batch.stopped_seconds or 0.0) >= self._grace.get(batch.stop_reason, float("inf")):
            await self._batches.fence(batch.job_id, "the batch has ended")

    async def _expire(self, batch: Neglected) -> None:
        """Its window was over before a worker came to it; nothing was planned, so there is nothing to write."""
        if await self._batches.expire_unstarted(batch.id):
            await self._batches.queue.cancel([JobId(batch.job_id)], reason="the batch expired", owned=True)
            await self._count(batch.id, "expired_dequeue")

    async def _bury(self, batch: Neglected) -> None:
        """Its job ended without ending it, such as by killing every process that ran it. What is registered stays."""
        log.error("batch %s is %s, and its job is %s: it fails", batch.id, batch.status, batch.job_status or "gone")
        message = "The job of this batch could not be run; `windlass batch repair` writes what was answered."
        problem = Problem(code="system_error", line=None, message=message)
        errors = {"object": "list", "data": [problem.as_json()], "total": 1}
        await self._batches.fence(batch.job_id, "the batch failed")
        if await self._batches.end(batch.id, Ending(target=BatchStatus.FAILED, sources=_OPEN, errors=errors)):
            await self._count(batch.id, "system_error")

    async def _count(self, id: str, reason: str) -> None:
        batch = await self._batches.get(id, tenant=None)
        since = (batch.ended_at or batch.created_at) - batch.created_at
        self._counts.ended(
            batch.status.value, reason, total=batch.total, seconds=0.0, since_created=since.total_seconds()
        )
