"""How a batch comes to be: its input is stored, what it asks for is checked, and it is made together with its job."""

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
from batchwright.errors import Conflict, InvalidInput, NotFound
from batchwright.files.store import BATCH, INPUT_KEPT_SECONDS, File, Files, NewFile, new_file_id, object_key, persist

METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARACTERS_MAX = 64
METADATA_VALUE_CHARACTERS_MAX = 512
IN_FLIGHT_MAX = 100_000
_FILENAME_CHARACTERS_MAX = 512
_TRIES_MAX = 4

T = TypeVar("T")


async def store_input(files: Files, path: Path, *, tenant: str, bytes_max: int, sha256: str | None = None) -> File:
    """Copy a file of this machine into the store; one that has another checksum by now is refused."""
    id = new_file_id()
    stored = await files.store.put(object_key(id), path, limit=bytes_max)
    if sha256 is not None and stored.sha256 != sha256:
        await files.store.delete(stored.key)
        raise Conflict(f"{path} was changed while it was read; wait until it is written, and start again")
    new = NewFile(
        id=id,
        tenant=tenant,
        purpose=BATCH,
        filename=path.name[-_FILENAME_CHARACTERS_MAX:],
        stored=stored,
        expires_seconds=INPUT_KEPT_SECONDS,
    )
    file, _ = await persist(lambda: files.add(new))
    return file


async def create(
    batches: Batches, catalog: Catalog, new: NewBatch, *, must_be_served: bool, instead_of: str | None = None
) -> tuple[Batch, bool]:
    """The batch with its job, and whether it is new. Its id is made before: a commit whose answer was lost is repeated.

    One that must be served is refused while no worker has ever run batches. `instead_of` names an ended batch whose
    idempotency key this one gets.
    """
    from batchwright.batches.operations import process_job  # here, because its schemas take a while to be built

    (job,) = await catalog.prepare([process_job(new, must_be_served=must_be_served)])
    return await retry_unavailable(lambda: batches.create(new, job, instead_of=instead_of), tries_max=_TRIES_MAX)


async def is_served(catalog: Catalog) -> bool:
    """Whether some worker has said that it runs batches; it may be away just now."""
    return await catalog.is_published(PROCESS)


async def check_retry(files: Files, batch: Batch, codes: Sequence[str] | None) -> None:
    """Refuse to ask the failed lines of a batch again where there are none, or where they cannot be known."""
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
    """A batch that asks the failed lines of another again; it has files of its own."""
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
    """Keys are the route's own, and stand for the body that came with them first."""
    if key is None:
        return {}
    digest = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).digest()
    return {"idempotency_key": f"{route}:{key}", "idempotency_digest": digest}


def check_metadata(metadata: Mapping[str, str]) -> None:
    """The limits that OpenAI sets, too."""
    if len(metadata) > METADATA_PAIRS_MAX:
        raise InvalidInput(f"metadata has {len(metadata)} pairs; the limit is {METADATA_PAIRS_MAX}", param="metadata")
    for name, value in metadata.items():
        if not 0 < len(name) <= METADATA_KEY_CHARACTERS_MAX or len(value) > METADATA_VALUE_CHARACTERS_MAX:
            raise InvalidInput(
                f"metadata {name[:80]!r}: a name has 1 to {METADATA_KEY_CHARACTERS_MAX} characters, "
                f"and a value at most {METADATA_VALUE_CHARACTERS_MAX}",
                param="metadata",
            )
        if "\0" in name + value:
            raise InvalidInput(f"metadata {name!r} holds a NUL character, which cannot be stored", param="metadata")
