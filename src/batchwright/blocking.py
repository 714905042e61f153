"""Batchwright for sync code: the verbs of the async client, each of which waits for its result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload
from uuid import UUID

from batchwright.app import AsyncBatchwright, Operation
from batchwright.db.database import complete, is_blocking
from batchwright.engine.jobs import Job, JobEvent, JobId, NewJob
from batchwright.errors import InvalidInput

if TYPE_CHECKING:
    from batchwright.batches.blocking import Batch, Batches
    from batchwright.batches.requests import Requests
    from batchwright.batches.submitting import BatchOptions

T = TypeVar("T")


class Batchwright:
    """Batchwright for sync code: the same verbs as `AsyncBatchwright`, each of which waits for its result.

    >>> with Batchwright() as batchwright:
    ...     print(batchwright.wait(batchwright.enqueue(greet, {"name": "Ada"})))
    """

    def __init__(self, **options: Any) -> None:
        self.client = AsyncBatchwright(**options)
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> Self:
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="batchwright-client", daemon=True)
        self._thread.start()
        try:
            self.call(self.client.open())
        except BaseException:
            self._end_loop()
            raise
        return self

    def close(self) -> None:
        if self._loop is not None:
            self.call(self.client.close())
            self._end_loop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def enqueue(
        self, operation: Operation, payload: Any = None, *, connection: Any = None, **options: Any
    ) -> JobId: ...

    @overload
    def enqueue(self, operation: Sequence[NewJob], *, connection: Any = None) -> list[JobId]: ...

    def enqueue(self, operation: Any, payload: Any = None, *, connection: Any = None, **options: Any) -> Any:
        """Like `AsyncBatchwright.enqueue`; a `connection` is used in this thread, inside its open transaction."""
        enqueueing = self.client.enqueue(operation, payload, connection=connection, **options)
        if connection is None:
            return self.call(enqueueing)
        if not is_blocking(connection):
            enqueueing.close()
            raise InvalidInput("Batchwright accepts only a blocking connection; for an async one use AsyncBatchwright")
        return complete(enqueueing)

    def wait(self, job: JobId | UUID | str, *, timeout: float | None = None) -> Any:
        return self.call(self.client.wait(job, timeout=timeout))

    def get(self, job: JobId | UUID | str) -> Job:
        return self.call(self.client.get(job))

    def events(self, job: JobId | UUID | str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        return self.call(self.client.events(job, after=after, limit=limit))

    def cancel(self, job: JobId | UUID | str, *, reason: str = "cancelled by request") -> int:
        return self.call(self.client.cancel(job, reason=reason))

    def recover(self, job: JobId | UUID | str) -> None:
        self.call(self.client.recover(job))

    def rerun(self, job: JobId | UUID | str) -> None:
        self.call(self.client.rerun(job))

    def batch(self, requests: Requests, **options: Unpack[BatchOptions]) -> Batch:
        """Submit a file or an iterable of requests as one batch. An iterable is read in this thread.

        >>> requests = ({"custom_id": str(n), "messages": [{"role": "user", "content": text}]} for n, text in texts)
        >>> batch = batchwright.batch(requests, model="small")
        >>> answers = {result.custom_id: result.text for result in batch.results() if result.ok}

        A dict is a line of a batch file, with `body`, or the body itself, which may also contain a `custom_id`.
        Requests are written to the store as they come, not held in memory. The options are those of `BatchOptions`.
        """
        return self.batches.submit(requests, **options)

    @property
    def batches(self) -> Batches:
        """All batches: `batches[id]`, `batches.list()`."""
        offered: Batches = cast("Any", self.client.part_named("batches").blocking_client(self.call))
        return offered

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the async client on its loop and wait for it."""
        if self._loop is None:
            coroutine.close()
            raise InvalidInput("this client is not open; use it in a `with` block, or call open()")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(timeout=5)
            loop.close()
