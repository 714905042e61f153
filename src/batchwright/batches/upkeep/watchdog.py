"""Ends batches that no worker ends: late ones, those that do not stop, and those whose job is gone."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

from batchwright.batches.ending import Endings, error_list
from batchwright.batches.plan.lines import Problem
from batchwright.batches.store import SHARDS_GRACE_SECONDS, Batches, Ending, Stalled
from batchwright.db.database import Session
from batchwright.engine.jobs import JobId
from batchwright.engine.upkeep import Round
from batchwright.errors import DatabaseUnavailable
from batchwright.states import BatchStatus, JobStatus

log = logging.getLogger(__name__)

_EVERY_SECONDS = 0.5
_PAGE = 200
_TURN_SECONDS = 1.0
"""Time limit of one turn: the upkeep session stays open meanwhile, and other rounds wait."""
_WAKE_SECONDS = 5.0
"""Until this long after the order to stop, queued shards are woken: some were just being snoozed when it came."""
_START = (datetime(1, 1, 1, tzinfo=UTC), "")
_ENDED = {None, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}


class Watchdog:
    """An upkeep round of every worker, so that a batch ends in time even if its own workers are gone."""

    def __init__(
        self, batches: Batches, endings: Endings, cancel_grace_seconds: float, provider_grace_seconds: float = 0.0
    ) -> None:
        self._batches = batches
        self._endings = endings
        self._after = _START
        self._provider_grace = provider_grace_seconds
        self._grace = {"deadline": SHARDS_GRACE_SECONDS, "cancel": cancel_grace_seconds + SHARDS_GRACE_SECONDS}

    def rounds(self) -> list[Round]:
        return [Round("batches", _EVERY_SECONDS, self.look)]

    async def look(self, session: Session) -> bool:
        """Check one page of batches; True if the next turn must continue after it."""
        began = time.monotonic()
        page = await self._batches.stalled(self._after, limit=_PAGE, session=session)
        for batch in page:
            self._after = (batch.expires_at, batch.id)  # first: a batch that always fails must not block the others
            try:
                await self._help(batch)
            except DatabaseUnavailable:
                raise
            except Exception:  # one failure must not stop the others
                log.exception("batch %s could not be checked", batch.id)
            if time.monotonic() - began > _TURN_SECONDS:
                return True
        if len(page) == _PAGE:
            return True
        self._after = _START
        return False

    async def _help(self, batch: Stalled) -> None:
        if batch.job_status in _ENDED:
            await self._fail(batch)
        elif batch.status == BatchStatus.VALIDATING:
            if batch.late_seconds >= 0 and batch.job_status == JobStatus.QUEUED:
                await self._expire(batch)
        elif batch.stop_reason is None:
            await self._batches.stop(batch.id, "deadline")
        elif self._must_be_over(batch):
            is_over = self._is_over_everywhere(batch)
            await self._batches.cancel_open_shards(batch.job_id, "the batch has ended", also_at_providers=is_over)
        else:
            is_new = (batch.stopped_seconds or 0.0) < _WAKE_SECONDS
            await self._batches.stop_queued_shards(batch.job_id, "the batch stops", wake=is_new)

    def _is_over_everywhere(self, batch: Stalled) -> bool:
        """A provider needs time to cancel a job, and the results until then are paid for."""
        return max(batch.stopped_seconds or 0.0, batch.late_seconds) >= self._provider_grace

    def _must_be_over(self, batch: Stalled) -> bool:
        """Whatever the reason for stopping, shards end with the window, except those at a provider."""
        grace = self._grace.get(batch.stop_reason or "", float("inf"))
        return (batch.stopped_seconds or 0.0) >= grace or batch.late_seconds >= SHARDS_GRACE_SECONDS

    async def _expire(self, batch: Stalled) -> None:
        """Its window ended before a worker picked it up; nothing was planned, so there are no files to write."""

        async def move(session: Session) -> BatchStatus | None:
            status = await self._batches.expire_unstarted(batch.id, session=session)
            if status is not None:
                job, reason = JobId(batch.job_id), "the batch expired"
                await self._batches.queue.cancel([job], reason=reason, owned=True, session=session)
            return status

        await self._endings.write_now(batch.id, batch.tenant, move, "expired_dequeue")

    async def _fail(self, batch: Stalled) -> None:
        """Its job ended without ending the batch, e.g. because it killed every process. Registered answers are kept."""
        log.error(
            "batch %s is %s, but its job is %s: the batch fails", batch.id, batch.status, batch.job_status or "gone"
        )
        message = "The job of this batch could not be run; nothing was sent."
        if batch.status != BatchStatus.VALIDATING:
            message = "The job of this batch could not be run; `batchwright batch repair` writes what was answered."
        ending = Ending(errors=error_list(Problem(code="system_error", line=None, message=message)))
        await self._batches.cancel_open_shards(batch.job_id, "the batch failed")
        await self._endings.write_now(
            batch.id,
            batch.tenant,
            lambda session: self._batches.fail(batch.id, ending, session=session),
            "system_error",
        )
