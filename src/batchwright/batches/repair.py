"""Gives a failed batch the files that could not be written when it ended, while its answers are still there."""

from __future__ import annotations

import asyncio

from batchwright.batches.files import Files
from batchwright.batches.finalize import Finalizer, Result
from batchwright.batches.store import Batch, Batches
from batchwright.batches.workspace import Workspace
from batchwright.errors import Conflict, NotFound
from batchwright.states import BatchStatus

UNANSWERED = "batch_failed"
"""What is said of the lines that have no answer."""


async def repair(batches: Batches, files: Files, workspace: Workspace, id: str, *, tenant: str | None = None) -> Batch:
    """Write its files and its manifest; it stays `failed`. Broken off at any point, it can be done again."""
    batch = await batches.get(id, tenant=tenant)
    _refuse_unless_repairable(batch)
    finalizer = Finalizer(batches, files, workspace)
    with workspace.use(batch.id):
        result = await _written(finalizer, batch)
    async with batches.queue.database.transaction() as session:
        ending = result.ending(BatchStatus.FAILED, ())
        if not await batches.repair(batch.id, ending, session=session):
            _refuse_unless_answers_are_there(await batches.get(batch.id, tenant=tenant))
            raise Conflict(f"Cannot repair {batch.id}: somebody else has just done that.")
        await finalizer.add_files(result, session)
    return await batches.get(batch.id, tenant=tenant)


async def _written(finalizer: Finalizer, batch: Batch) -> Result:
    try:
        assembly = await finalizer.gather(batch)
    except NotFound as error:
        raise Conflict(f"Cannot repair {batch.id}: {error}; what it needs was removed.") from error
    await asyncio.to_thread(assembly.fill, UNANSWERED)
    return await finalizer.write(batch, assembly)


def _refuse_unless_repairable(batch: Batch) -> None:
    if batch.status is not BatchStatus.FAILED:
        status = batch.status.value
        raise Conflict(f"Cannot repair a batch with status '{status}'; only a failed one may lack its files.")
    if batch.manifest is not None:
        raise Conflict(f"Cannot repair {batch.id}: nothing is wrong with it, its files are written.")
    if batch.in_progress_at is None:
        raise Conflict(f"Cannot repair {batch.id}: its input was refused, so nothing was answered.")
    _refuse_unless_answers_are_there(batch)


def _refuse_unless_answers_are_there(batch: Batch) -> None:
    if batch.segments_gone_at is not None:
        raise Conflict(f"Cannot repair {batch.id}: its answers were removed on {batch.segments_gone_at:%Y-%m-%d}.")
