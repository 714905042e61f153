"""How a batch ends in the database: its last transition and its webhooks in one commit, and metrics after that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from batchwright.batches.metrics import BatchCounts
from batchwright.batches.plan.lines import Problem
from batchwright.batches.store import Batch, Batches
from batchwright.db.database import Session
from batchwright.states import BatchStatus
from batchwright.webhooks.announcer import Announcer
from batchwright.webhooks.settings import EventType

EVENTS: dict[BatchStatus, EventType] = {
    BatchStatus.COMPLETED: "batch.completed",
    BatchStatus.FAILED: "batch.failed",
    BatchStatus.EXPIRED: "batch.expired",
    BatchStatus.CANCELLED: "batch.cancelled",
}
LastMove = Callable[[Session], Awaitable[BatchStatus | None]]
"""Ends a batch in this transaction; None if another process moved it."""


class Endings:
    """Ends batches, whether their own job does it or the watchdog."""

    def __init__(
        self,
        batches: Batches,
        counts: BatchCounts,
        announcer: Announcer,
    ) -> None:
        self._batches = batches
        self._counts = counts
        self._announcer = announcer

    async def write(self, id: str, tenant: str, move: LastMove, session: Session) -> BatchStatus | None:
        """Make the last transition, and add the webhooks that announce it to the same commit."""
        status = await move(session)
        if status is not None:
            await self._announcer.announce(tenant, id, EVENTS[status], session)
        return status

    async def write_now(self, id: str, tenant: str, move: LastMove, reason: str) -> None:
        """The same in a transaction of its own, and count it. The processing time is unknown: no worker ended it."""
        async with self._batches.queue.database.transaction() as session:
            if await self.write(id, tenant, move, session) is None:
                return
        batch = await self._batches.get(id, tenant=None)
        self.count(batch, batch.status, reason, at=batch.ended_at or batch.created_at)

    def count(self, batch: Batch, status: BatchStatus, reason: str, *, at: datetime, worked: bool = False) -> None:
        """Call this after the commit: before that, the same end may be tried several times, or fail.

        `worked` says that a worker had the batch from the moment it picked it up until now.
        """
        if status is BatchStatus.CANCELLED:
            self._counts.cancelled(_phase(batch))
        self._counts.ended(
            status.value,
            reason,
            total=batch.total,
            seconds=(at - batch.taken_up_at).total_seconds() if worked and batch.taken_up_at else 0.0,
            since_created=(at - batch.created_at).total_seconds(),
        )


def error_list(problem: Problem) -> dict[str, Any]:
    """The `errors` of a batch that has one problem."""
    return {"object": "list", "data": [problem.as_json()], "total": 1}


def _phase(batch: Batch) -> str:
    """How far a batch was when it was cancelled, in the words of the metric."""
    if batch.finalizing_at is not None:
        return "finalizing"
    return "queued" if batch.in_progress_at is None else "in_progress"
