"""Writes the files of an ended batch again, if they are missing or lack answers, while its answers are still kept."""

from __future__ import annotations

import asyncio

from batchwright.batches.journal.workspace import Workspace
from batchwright.batches.output.assemble import Assembly
from batchwright.batches.output.finalize import Finalizer
from batchwright.batches.store import Batch, Batches
from batchwright.errors import Conflict, NotFound
from batchwright.files.store import Files
from batchwright.states import BatchStatus

UNANSWERED = {
    BatchStatus.FAILED: "batch_failed",
    BatchStatus.EXPIRED: "batch_expired",
    BatchStatus.CANCELLED: "batch_cancelled",
}
"""The error of lines that have no answer."""


async def repair(batches: Batches, files: Files, workspace: Workspace, id: str, *, tenant: str | None = None) -> Batch:
    """Write its files and its manifest; its status stays. If this is interrupted, it can be repeated."""
    batch = await batches.get(id, tenant=tenant)
    _refuse_unless_repairable(batch)
    finalizer = Finalizer(batches, files, workspace)
    with workspace.use(batch.id):
        assembly = await _gather(finalizer, batch)
        result = await finalizer.write(batch, assembly)
    async with batches.queue.database.transaction() as session:
        if not await batches.repair(batch, result.ending(), session=session):
            _refuse_unless_answers_are_there(await batches.get(batch.id, tenant=tenant))
            raise Conflict(f"Cannot repair {batch.id}: another process has just repaired it.")
        await finalizer.add_files(result, session)
    return await batches.get(batch.id, tenant=tenant)


async def _gather(finalizer: Finalizer, batch: Batch) -> Assembly:
    try:
        assembly = await finalizer.salvage(batch)
    except NotFound as error:
        raise Conflict(f"Cannot repair {batch.id}: {error}; data that it needs was removed.") from error
    known, _ = batch.error_summary.get(UNANSWERED[batch.status], (0, ""))
    if batch.manifest is not None and assembly.missing >= known:
        raise Conflict(f"Cannot repair {batch.id}: its files are written, and no further answer was found.")
    await asyncio.to_thread(assembly.fill, UNANSWERED[batch.status])
    return assembly


def _refuse_unless_repairable(batch: Batch) -> None:
    if batch.status not in UNANSWERED:
        known = ", ".join(f"'{one.value}'" for one in UNANSWERED)
        raise Conflict(f"Cannot repair a batch with status '{batch.status.value}'; it must be one of {known}.")
    if batch.in_progress_at is None:
        raise Conflict(f"Cannot repair {batch.id}: nothing of it was sent, so nothing was answered.")
    _refuse_unless_answers_are_there(batch)


def _refuse_unless_answers_are_there(batch: Batch) -> None:
    if batch.segments_gone_at is not None:
        raise Conflict(f"Cannot repair {batch.id}: its answers were removed on {batch.segments_gone_at:%Y-%m-%d}.")
