"""Creates a batch: stores its input, checks the request, and creates the batch together with its job."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

from batchwright.batches.store import PROCESS, Batch, Batches, NewBatch
from batchwright.batches.tally import OTHER
from batchwright.db.retry import retry_unavailable
from batchwright.engine.catalog import Catalog
from batchwright.errors import Conflict, NotFound
from batchwright.files.local import store_file
from batchwright.files.store import BATCH, File, Files

IN_FLIGHT_MAX = 100_000
_TRIES_MAX = 4

T = TypeVar("T")


async def store_input(files: Files, path: Path, *, tenant: str, bytes_max: int, sha256: str | None = None) -> File:
    """Copy a file of requests into the store; refuse a file whose checksum has changed meanwhile."""
    return await store_file(files, path, tenant=tenant, purpose=BATCH, bytes_max=bytes_max, sha256=sha256)


async def create(
    batches: Batches, catalog: Catalog, new: NewBatch, *, must_be_served: bool, instead_of: str | None = None
) -> tuple[Batch, bool]:
    """Create the batch with its job; returns it and whether it is new. After a lost answer, the same id is sent again.

    With `must_be_served` it is refused while no worker has ever run batches. `instead_of` names an ended batch whose
    idempotency key this one takes over.
    """
    from batchwright.batches.operations import process_job  # here, because building its schemas takes a while

    (job,) = await catalog.prepare([process_job(new, must_be_served=must_be_served)])
    return await retry_unavailable(lambda: batches.create(new, job, instead_of=instead_of), tries_max=_TRIES_MAX)


async def is_served(catalog: Catalog) -> bool:
    """Whether some worker has registered that it runs batches; it may be down at the moment."""
    return await catalog.is_published(PROCESS)


async def check_retry(files: Files, batch: Batch, codes: Sequence[str] | None) -> None:
    """Refuse to retry a batch that has no failed lines, or whose failed lines cannot be determined."""
    if not batch.has_ended:
        raise Conflict(f"Cannot retry a batch with status '{batch.status.value}'; wait for its end, or cancel it.")
    if batch.error_file_id is None or batch.done == batch.completed:
        raise Conflict(f"Cannot retry {batch.id}: it has no error file, so no line is known to have failed.")
    for what, file_id in (("input", batch.input_file_id), ("error", batch.error_file_id)):
        try:
            await files.get(file_id, tenant=batch.tenant)
        except NotFound:
            raise Conflict(f"Cannot retry {batch.id}: its {what} file {file_id} is gone.") from None
    known = set(batch.error_summary)
    if codes is not None and known.isdisjoint({*codes, OTHER}):
        there = ", ".join(sorted(known)) or "none"
        raise Conflict(f"Cannot retry {batch.id}: no line of it failed with one of these codes; there are: {there}.")


def retry_of(batch: Batch, codes: Sequence[str] | None, **values: Any) -> NewBatch:
    """A new batch that resends the failed lines of another; it has its own files."""
    return NewBatch(
        tenant=batch.tenant,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        metadata=batch.metadata,
        output_expires_seconds=batch.output_expires_seconds,
        priority=batch.priority,
        limits=batch.limits,
        retry_of=batch.id,
        retry_codes=codes,
        family=batch.family,
        **values,
    )


def idempotency(route: str, key: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
    """A key is unique within its route; the digest identifies the body that first came with it."""
    if key is None:
        return {}
    digest = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).digest()
    return {"idempotency_key": f"{route}:{key}", "idempotency_digest": digest}
