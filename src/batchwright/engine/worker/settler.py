"""Group commit: a settle is sent at once if none is in progress; those that arrive meanwhile are sent together next."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from batchwright.db.retry import retry_unavailable
from batchwright.engine.outcomes import Settle
from batchwright.engine.policy import NotStorable, describe
from batchwright.engine.queue import Queue
from batchwright.errors import DatabaseUnavailable
from batchwright.telemetry.logs import about

log = logging.getLogger(__name__)

_BATCH_MAX = 500
_NOT_STORABLE = {"error": "error_not_storable", "result": "result_not_storable"}


class Settler:
    """Collects plain settles, commits them in batches and tells the worker which were accepted."""

    def __init__(
        self,
        queue: Queue,
        worker: str,
        on_settled: Callable[[Sequence[Settle], set[UUID], bool], None],
        on_commit: Callable[[float], None],
    ) -> None:
        self._queue = queue
        self._worker = worker
        self._on_settled = on_settled
        """Called with the settles of a commit, the ids that moved, and whether the others count as fenced."""
        self._on_commit = on_commit
        """Called with the seconds that a commit took."""
        self._context = contextvars.copy_context()
        """Not the context of the job that submits first: its id must not appear on other jobs' log lines."""
        self._pending: list[Settle] = []
        self._task: asyncio.Task[None] | None = None
        self._under_way: dict[object, float] = {}
        """When each commit that is not answered yet began."""

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest commit that is not answered yet has taken so far; 0 if there is none."""
        return time.monotonic() - min(self._under_way.values()) if self._under_way else 0.0

    def submit(self, settle: Settle) -> None:
        self._pending.append(settle)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain(), context=self._context)

    async def idle(self) -> None:
        """Wait until nothing is pending."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _drain(self) -> None:
        try:
            while self._pending:
                batch, self._pending = self._pending[:_BATCH_MAX], self._pending[_BATCH_MAX:]
                await self._commit(batch)
        finally:
            self._task = None

    async def send(self, commit: Callable[[], Awaitable[set[UUID]]], *, jobs: int = 1) -> tuple[set[UUID], bool]:
        """Commit until the database answers; returns the ids that moved, and whether an earlier try is in doubt.

        After a try whose answer was lost, no row means that the try had succeeded.
        """
        is_doubtful = False

        def doubt(error: DatabaseUnavailable) -> None:
            nonlocal is_doubtful
            is_doubtful = True
            log.warning("settling %d jobs must be repeated: %s", jobs, error)

        async def attempt() -> set[UUID]:
            began = time.perf_counter()
            moved = await commit()
            self._on_commit(time.perf_counter() - began)
            return moved

        self._under_way[attempt] = time.monotonic()
        try:
            return await retry_unavailable(attempt, on_failure=doubt), is_doubtful
        finally:
            del self._under_way[attempt]

    async def _commit(self, batch: Sequence[Settle]) -> None:
        try:
            moved, is_doubtful = await self.send(lambda: self._queue.settle(batch, self._worker), jobs=len(batch))
        except Exception as error:  # PostgreSQL refused a value, or it cannot be written as JSON
            return await self._split(batch, error)
        return self._on_settled(batch, moved, not is_doubtful)

    async def _split(self, batch: Sequence[Settle], error: Exception) -> None:
        """The batch was refused because of its data: find the invalid settle and commit the others."""
        if len(batch) > 1:
            half = len(batch) // 2
            await self._commit(batch[:half])
            return await self._commit(batch[half:])
        (settle,) = batch
        if settle.verb == "fail" and settle.values["error"]["code"] in _NOT_STORABLE.values():
            text = "job %s cannot be settled, not even as failed: %s; its lease will expire"
            log.error(text, settle.claim.id, error, extra=about(settle.claim))
            return self._on_settled(batch, set(), False)
        what = "error" if settle.verb == "fail" else "result"
        verdict = NotStorable(f"the {what} cannot be stored: {error}", code=_NOT_STORABLE[what])
        return await self._commit([Settle("fail", settle.claim, {"error": describe(verdict, verdict)})])
