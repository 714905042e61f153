"""The progress of a batch, for Python code that follows it or waits for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from batchwright.batches.following import PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, FileReader, LineReader
from batchwright.batches.progress import forecast
from batchwright.batches.store import Batch
from batchwright.errors import BatchFailed
from batchwright.states import BATCH, BatchStatus

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """The progress of a batch."""

    id: str
    status: BatchStatus
    total: int
    """Requests; 0 until a worker has checked them."""
    completed: int
    failed: int
    expired: int
    cancelled: int
    input_tokens: int
    output_tokens: int
    eta: datetime | None
    """When it will end at the recent pace; None if unknown."""
    is_paused: bool
    waits_for: str | None
    """What it waits for at the moment, if anything."""
    problems: Sequence[Mapping[str, Any]]
    """Why it failed as a whole: `code`, `message`, `line`."""

    def __str__(self) -> str:
        reason = "" if self.waits_for is None else f"; it waits: {self.waits_for}"
        return f"{self.status.value}, {self.done} of {self.total} requests done{reason}"

    @property
    def done(self) -> int:
        """Requests that have ended, successfully or not."""
        return self.completed + self.failed + self.expired + self.cancelled

    @property
    def has_ended(self) -> bool:
        return self.status in BATCH.terminal


async def changed(part: BatchesPart, id: str, seen: BatchProgress | None) -> BatchProgress:
    """Wait until the progress differs from `seen`, and return it."""
    pause = PAUSE_SECONDS_MIN
    while True:
        batch = await part.batches.get(id, tenant=None)
        if seen is None or _progress(batch, seen.eta) != seen:
            paces = await part.batches.paces([id] if batch.in_progress_at and not batch.has_ended else [])
            return _progress(batch, forecast(batch, paces.get(id)).eta)
        await asyncio.sleep(pause)
        pause = min(PAUSE_SECONDS_MAX, pause * 2)


async def read_file(part: BatchesPart, id: str, which: Literal["error", "output"]) -> FileReader:
    batch = await ended(part, id)
    return FileReader(part.files, [batch.output_file_id if which == "output" else batch.error_file_id])


async def ended(part: BatchesPart, id: str) -> Batch:
    """Wait for the end. The files of a batch that failed half-way hold the answers until then."""
    seen: BatchProgress | None = None
    while seen is None or not seen.has_ended:
        seen = await changed(part, id, seen)
    batch = await part.batches.get(id, tenant=None)
    if batch.manifest is None and batch.output_file_id is None:
        raise BatchFailed(id, _problems(batch))
    return batch


def check_end(reader: LineReader) -> None:
    """A batch that failed, or lost its files, must not look like one that is done."""
    batch = reader.batch
    assert batch is not None, "a reader that is done has read its batch"
    if batch.status is BatchStatus.FAILED or not reader.is_complete:
        raise BatchFailed(batch.id, _problems(batch))


def _progress(batch: Batch, eta: datetime | None) -> BatchProgress:
    return BatchProgress(
        id=batch.id,
        status=batch.status,
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
        expired=batch.expired,
        cancelled=batch.cancelled,
        input_tokens=batch.input_tokens,
        output_tokens=batch.output_tokens,
        eta=eta,
        is_paused=batch.paused_at is not None and not batch.has_ended,
        waits_for=batch.waits_for,
        problems=_problems(batch),
    )


def _problems(batch: Batch) -> list[Mapping[str, Any]]:
    return list((batch.errors or {}).get("data", ()))
