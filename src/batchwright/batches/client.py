"""Batches for Python code: submit requests, follow the batch, and read results as they come.

    submit() ──▶ a handle with the id ──▶ progress(), follow(), wait()
                                      ├─▶ results(): as they arrive; output(), errors(): in the order of the input
                                      └─▶ pause(), resume(), cancel(), retry()

The handle holds nothing but the id, so another process gets the same one with `batches[id]`. Workers send the requests;
this module writes them to the store and the database, and reads the results there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from batchwright.batches.answers import BatchResult, parse_result
from batchwright.batches.following import LineReader
from batchwright.batches.requests import AsyncRequests, gather_async
from batchwright.batches.store import SHARD_QUEUE
from batchwright.batches.submission import check_retry, retry_of
from batchwright.batches.submitting import BatchOptions, Wanted, create_batch, require_workers, submit
from batchwright.batches.watching import BatchProgress, changed, check_end, ended, read_file
from batchwright.errors import BatchFailed, InvalidInput, WaitTimeout
from batchwright.files.local import copy_file
from batchwright.states import BatchStatus

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart

_LIST_MAX = 1000


class AsyncBatches:
    """The batches of a database, for async code: `batchwright.batches`."""

    def __init__(self, part: BatchesPart) -> None:
        self._part = part

    def __getitem__(self, id: str) -> AsyncBatch:
        """The batch with this id. Its first call fails if there is no such batch."""
        return AsyncBatch(self._part, id)

    async def submit(self, requests: AsyncRequests, **options: Unpack[BatchOptions]) -> AsyncBatch:
        """Submit requests: a file, or an iterable of dicts. The options are in `BatchOptions`.

        A dict is a line of a batch file, with `body`, or the body itself, which may have an extra `custom_id`.
        """
        wanted = Wanted.of(options)
        await require_workers(self._part)
        async with gather_async(requests, wanted.defaults, self._part.settings.file_bytes_max) as file:
            return self[await submit(self._part, file, wanted)]

    async def list(self, *, tenant: str | None = None, after: str | None = None, limit: int = 20) -> list[AsyncBatch]:
        """The newest first, of one tenant or of all; pass the last id as `after` to continue."""
        if not 1 <= limit <= _LIST_MAX:
            raise InvalidInput(f"limit is {limit}; it goes from 1 to {_LIST_MAX}", param="limit")
        found = await self._part.batches.list(tenant, after=after, limit=limit)
        return [self[batch.id] for batch in found]


class AsyncBatch:
    """One batch, for async code.

    >>> async with AsyncBatchwright() as batchwright:
    ...     batch = await batchwright.batch(requests, model="small")
    ...     async for result in batch.results():
    ...         print(result.custom_id, result.text if result.ok else result.error)
    """

    def __init__(self, part: BatchesPart, id: str) -> None:
        self._part = part
        self.id = id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    # Progress ---------------------------------------------------------------------------------------------------

    async def progress(self) -> BatchProgress:
        """The progress now."""
        return await changed(self._part, self.id, None)

    async def follow(self) -> AsyncIterator[BatchProgress]:
        """The progress now and after every change, until the batch has ended."""
        seen: BatchProgress | None = None
        while seen is None or not seen.has_ended:
            seen = await changed(self._part, self.id, seen)
            yield seen

    async def wait(self, *, timeout: float | None = None) -> BatchProgress:
        """Wait for the end. `BatchFailed` if it failed as a whole, `WaitTimeout` if it still runs after the timeout."""
        last: BatchProgress | None = None
        try:
            async with asyncio.timeout(timeout):
                async for seen in self.follow():
                    last = seen
        except TimeoutError:
            state = "" if last is None else f": {last}"
            raise WaitTimeout(f"batch {self.id} has not ended after {timeout:g} seconds{state}") from None
        assert last is not None, "a batch that has ended was seen"
        if last.status is BatchStatus.FAILED:
            raise BatchFailed(self.id, last.problems)
        return last

    # Results ----------------------------------------------------------------------------------------------------

    async def results(self, *, after: str | None = None) -> AsyncIterator[BatchResult]:
        """The result of each request exactly once, as they arrive, until the batch has ended. In no particular order.

        To resume, pass the `cursor` of the last result that you have processed; that works until an hour after the end
        of the batch. If the batch failed as a whole, this raises `BatchFailed` after its last result.
        """
        reader = LineReader(self._part, self.id, after)
        while (lines := await reader.page()) is not None:
            for line in lines:
                yield parse_result(line)
        check_end(reader)

    async def output(self) -> AsyncIterator[BatchResult]:
        """The good answers in the order of the input, once the batch has ended."""
        async for result in self._of_file("output"):
            yield result

    async def errors(self) -> AsyncIterator[BatchResult]:
        """The requests that failed in the order of the input, once the batch has ended."""
        async for result in self._of_file("error"):
            yield result

    async def save(self, output: str | Path, errors: str | Path | None = None) -> None:
        """Write the output file, and the error file, once the batch has ended."""
        batch = await ended(self._part, self.id)
        for file_id, path in ((batch.output_file_id, output), (batch.error_file_id, errors)):
            if path is not None:
                with await asyncio.to_thread(Path(path).open, "wb") as target:
                    await copy_file(self._part.files, file_id, target)

    async def _of_file(self, which: Literal["error", "output"]) -> AsyncIterator[BatchResult]:
        pages = await read_file(self._part, self.id, which)
        while (lines := await pages.page()) is not None:
            for line in lines:
                yield parse_result(line)

    # Control ----------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Send nothing more. Requests in flight finish, and the completion window keeps running."""
        await self._part.batches.pause(self.id, tenant=None)

    async def resume(self) -> None:
        """Continue a paused batch."""
        batch = await self._part.batches.resume(self.id, tenant=None)
        self._ring(batch.queue, *(f"{SHARD_QUEUE}{model}" for model in batch.models or ()))

    async def cancel(self) -> None:
        """End the batch early and keep its answers."""
        batch = await self._part.batches.cancel(self.id, tenant=None)
        self._ring(batch.queue)

    async def retry(self, *, codes: Sequence[str] | None = None) -> AsyncBatch:
        """Resend the failed requests of an ended batch, all or those with these error codes, as a new batch."""
        batch = await self._part.batches.get(self.id, tenant=None)
        await check_retry(self._part.files, batch, codes)
        await require_workers(self._part)
        return AsyncBatch(self._part, await create_batch(self._part, retry_of(batch, codes)))

    def _ring(self, *queues: str) -> None:
        self._part.core.doorbell.ring(queues)
