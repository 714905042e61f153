"""Batches for synchronous code: the methods of `client`, as blocking calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from batchwright.batches.answers import BatchResult, parse_result
from batchwright.batches.client import AsyncBatch, AsyncBatches
from batchwright.batches.following import LineReader
from batchwright.batches.requests import Requests, gather
from batchwright.batches.submitting import BatchOptions, Wanted, require_workers, submit
from batchwright.batches.watching import BatchProgress, changed, check_end, read_file

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart
    from batchwright.part import Call


class Batches:
    """The batches of a database, for synchronous code: `batchwright.batches`."""

    def __init__(self, part: BatchesPart, call: Call) -> None:
        self._part = part
        self._async = AsyncBatches(part)
        self._call = call

    def __getitem__(self, id: str) -> Batch:
        """The batch with this id. Its first call fails if there is no such batch."""
        return Batch(self._part, id, self._call)

    def submit(self, requests: Requests, **options: Unpack[BatchOptions]) -> Batch:
        """Like `AsyncBatches.submit`; an iterable is read in this thread."""
        wanted = Wanted.of(options)
        self._call(require_workers(self._part))
        with gather(requests, wanted.defaults, self._part.settings.file_bytes_max) as file:
            return self[self._call(submit(self._part, file, wanted))]

    def list(self, *, tenant: str | None = None, after: str | None = None, limit: int = 20) -> list[Batch]:
        """The newest first, of one tenant or of all; pass the last id as `after` to continue."""
        return [self[one.id] for one in self._call(self._async.list(tenant=tenant, after=after, limit=limit))]


class Batch:
    """One batch, for synchronous code: the methods of `AsyncBatch`, as blocking calls.

    >>> with Batchwright() as batchwright:
    ...     batch = batchwright.batch(requests, model="small")
    ...     for result in batch.results():
    ...         print(result.custom_id, result.text if result.ok else result.error)
    """

    def __init__(self, part: BatchesPart, id: str, call: Call) -> None:
        self._part = part
        self._async = AsyncBatch(part, id)
        self._call = call
        self.id = id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def progress(self) -> BatchProgress:
        """The progress now."""
        return self._call(self._async.progress())

    def follow(self) -> Iterator[BatchProgress]:
        """The progress now and after every change, until the batch has ended."""
        seen: BatchProgress | None = None
        while seen is None or not seen.has_ended:
            seen = self._call(changed(self._part, self.id, seen))
            yield seen

    def wait(self, *, timeout: float | None = None) -> BatchProgress:
        """Wait for the end. `BatchFailed` if it failed as a whole, `WaitTimeout` if it still runs after the timeout."""
        return self._call(self._async.wait(timeout=timeout))

    def results(self, *, after: str | None = None) -> Iterator[BatchResult]:
        """Like `AsyncBatch.results`: the result of each request exactly once, as they arrive, until the batch ends."""
        reader = LineReader(self._part, self.id, after)
        while (lines := self._call(reader.page())) is not None:
            yield from map(parse_result, lines)
        check_end(reader)

    def output(self) -> Iterator[BatchResult]:
        """The good answers in the order of the input, once the batch has ended."""
        return self._of_file("output")

    def errors(self) -> Iterator[BatchResult]:
        """The requests that failed in the order of the input, once the batch has ended."""
        return self._of_file("error")

    def save(self, output: str | Path, errors: str | Path | None = None) -> None:
        """Write the output file, and the error file, once the batch has ended."""
        self._call(self._async.save(output, errors))

    def pause(self) -> None:
        """Send nothing more. Requests in flight finish, and the completion window keeps running."""
        self._call(self._async.pause())

    def resume(self) -> None:
        """Continue a paused batch."""
        self._call(self._async.resume())

    def cancel(self) -> None:
        """End the batch early and keep its answers."""
        self._call(self._async.cancel())

    def retry(self, *, codes: Sequence[str] | None = None) -> Batch:
        """Resend the failed requests of an ended batch, all or those with these error codes, as a new batch."""
        return Batch(self._part, self._call(self._async.retry(codes=codes)).id, self._call)

    def _of_file(self, which: Literal["error", "output"]) -> Iterator[BatchResult]:
        pages = self._call(read_file(self._part, self.id, which))
        while (lines := self._call(pages.page())) is not None:
            yield from map(parse_result, lines)
