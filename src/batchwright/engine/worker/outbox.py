"""Events and progress of running jobs, buffered for a moment and written together under the fence."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson

from batchwright.engine.jobs import Claim, ClaimKey
from batchwright.engine.queue import Queue
from batchwright.errors import DatabaseError, DatabaseUnavailable, InvalidInput, TooLarge

log = logging.getLogger(__name__)

EVENT_BYTES_MAX = 64 * 1024
_EVENTS_BUFFERED_MAX = 50_000
_EVENTS_PER_WRITE = 2_000
_EMIT_SECONDS = 0.2
_PROGRESS_SECONDS = 1.0
_RETRY_SECONDS = 0.5
_Step = tuple[int | None, int | None]
"""The current and the total progress; None for what was not reported."""


class Outbox:
    """Accepts reports from the loop and from threads; writes events within 200 ms and progress within a second."""

    def __init__(self, queue: Queue, worker: str) -> None:
        self._queue = queue
        self._worker = worker
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._steps: dict[ClaimKey, _Step] = {}
        self._dirty: set[ClaimKey] = set()
        self._in_flight: set[ClaimKey] = set()
        self._place = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.copy_context()
        """Not the context of the job that reports first: its id must not appear on other jobs' log lines."""
        self._due: asyncio.TimerHandle | None = None
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def emit(self, claim: Claim, event: Mapping[str, Any]) -> None:
        record = {"id": claim.id, "claim": claim.claim, "worker": self._worker, **event}
        try:
            document = orjson.dumps(record, default=str)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"the event {event['event']!r} cannot be stored: {error}", param="fields") from error
        if len(document) > EVENT_BYTES_MAX:
            raise TooLarge(f"the event {event['event']!r} has {len(document)} bytes; the limit is {EVENT_BYTES_MAX}")
        with self._lock:
            if len(self._events) >= _EVENTS_BUFFERED_MAX:
                log.error("the event buffer is full; an event of job %s is dropped", claim.id)
                return
            self._place += 1
            self._events.append({**orjson.loads(document.replace(b"\\u0000", b"\\ufffd")), "place": self._place})
            self._dirty.add((claim.id, claim.claim))
        self._schedule(_EMIT_SECONDS)

    def progress(self, claim: Claim, current: int | None, total: int | None) -> None:
        key = (claim.id, claim.claim)
        with self._lock:
            latest = None if current is None else int(current), None if total is None else int(total)
            self._steps[key] = _merged(self._steps.get(key, (None, None)), latest)
            self._dirty.add(key)
        self._schedule(_PROGRESS_SECONDS)

    def has(self, claim: Claim) -> bool:
        """Whether reports of this job must be written before it is settled."""
        if not self._dirty and not self._in_flight:  # usually there are no reports, and hashing an id is not free
            return False
        key = (claim.id, claim.claim)
        return key in self._dirty or key in self._in_flight

    async def flush(self) -> None:
        """Write everything that is buffered; raises DatabaseUnavailable and keeps it when it cannot.

        A job's report stays marked as pending until it is written, so that no settle overtakes it.
        """
        async with self._writing:
            with self._lock:
                events, self._events = self._events, []
                steps, self._steps = self._steps, {}
                self._in_flight, self._dirty = self._dirty, set()
            moves = [(id, claim, *step) for (id, claim), step in steps.items()]
            try:
                while events:
                    await self._write(self._queue.emit, events[:_EVENTS_PER_WRITE])
                    del events[:_EVENTS_PER_WRITE]
                if moves:
                    await self._write(self._queue.progress, moves)
            except DatabaseUnavailable:
                with self._lock:
                    self._events = events + self._events
                    for key, earlier in steps.items():
                        self._steps[key] = _merged(earlier, self._steps.get(key, (None, None)))
                    self._dirty |= self._in_flight
                raise
            finally:
                self._in_flight = set()

    async def _write(self, write: Callable[[Sequence[Any]], Awaitable[object]], reports: Sequence[Any]) -> None:
        """Drop only the report that the database refuses."""
        try:
            await write(reports)
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            await self._split(write, reports, error)

    async def _split(
        self, write: Callable[[Sequence[Any]], Awaitable[object]], reports: Sequence[Any], error: DatabaseError
    ) -> None:
        if len(reports) == 1:
            job = reports[0]["id"] if isinstance(reports[0], dict) else reports[0][0]
            text = "a report of job %s was refused by the database and is dropped: %s"
            return log.error(text, job, type(error).__name__, extra={"job_id": str(job)})
        half = len(reports) // 2
        await self._write(write, reports[:half])
        return await self._write(write, reports[half:])

    def _schedule(self, seconds: float) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._arm, seconds, context=self._context)

    def _arm(self, seconds: float) -> None:
        assert self._loop is not None
        when = self._loop.time() + seconds
        if self._due is not None and self._due.when() <= when:
            return
        if self._due is not None:
            self._due.cancel()
        self._due = self._loop.call_later(seconds, self._fire)

    def _fire(self) -> None:
        self._due = None
        task = asyncio.ensure_future(self._flush_or_retry())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush_or_retry(self) -> None:
        try:
            await self.flush()
        except DatabaseUnavailable:
            self._arm(_RETRY_SECONDS)


def _merged(earlier: _Step, later: _Step) -> _Step:
    current, total = later
    return earlier[0] if current is None else current, earlier[1] if total is None else total
