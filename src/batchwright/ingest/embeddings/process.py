"""The coordinator: cuts the source into batches, waits for all of them, and assembles their parts.

    run ──▶ split ──▶ Wait(batches) ── the last one ended ──▶ run again ──▶ assemble ──▶ Done, with the file's row

The files' ids follow from the job's id, so a repetition after a crash writes the same files. The commit that ends the
job writes their rows: there is exactly one result if the job succeeded, and otherwise none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256
from typing import Any
from uuid import UUID

from batchwright.db.database import wrap_connection
from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.engine.outcomes import Done, Wait
from batchwright.errors import Fatal, NotFound, SchemaInvalid, StorageError
from batchwright.files.store import NewFile, object_key, persist
from batchwright.ingest.embeddings.output import write_parquet
from batchwright.ingest.embeddings.parts import FOLDER, Part
from batchwright.ingest.embeddings.payloads import BATCH, BATCH_ROWS_MAX, ComputeEmbeddings, EmbedBatch, Piece
from batchwright.ingest.embeddings.toolbox import Toolbox
from batchwright.storage import Store, Stored

log = logging.getLogger(__name__)
PURPOSE = "embeddings"
ERRORS_PURPOSE = "embeddings_errors"
BATCHES_MAX = 20_000


class EmbeddingCoordinator:
    """Runs the operation `compute_embeddings` in one worker process."""

    def __init__(self, tools: Toolbox) -> None:
        self._tools = tools
        self._errands: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop removing parts; upkeep removes those that are left."""
        for errand in self._errands:
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)

    async def run(self, ctx: Context, request: ComputeEmbeddings) -> Any:
        if ctx.joined is None:
            return await self._begin(ctx, request)
        if ctx.deadline_passed:
            raise Fatal("the deadline passed before all batches had ended", code="deadline_exceeded")
        return await self._finish(ctx, request)

    async def _begin(self, ctx: Context, request: ComputeEmbeddings) -> Wait:
        embedder = self._tools.embedder(request)
        reader = await self._tools.reader(request, ctx.tenant)
        pieces = await _collect(reader.split(request.batch_size), request.batch_size)
        if not pieces:
            raise SchemaInvalid("the source has no rows", code="empty_source")
        ctx.emit("embeddings.split", f"{len(pieces)} batches", batches=len(pieces), fingerprint=embedder.fingerprint)
        children = [
            NewJob(
                BATCH,
                dataclasses.asdict(
                    EmbedBatch(
                        parent=str(ctx.job_id),
                        number=number,
                        fingerprint=embedder.fingerprint,
                        piece=piece,
                        request=request,
                    )
                ),
            )
            for number, piece in enumerate(pieces)
        ]
        return Wait(children, on_join="resume")

    async def _finish(self, ctx: Context, request: ComputeEmbeddings) -> Done:
        assert ctx.joined is not None
        parts = [Part(**child.result) async for child in ctx.joined]
        total = _Total.of(parts)
        errors = await self._write_errors(ctx, parts)
        if not total.rows:
            await self._refuse(total, errors)
        rows = await self._write_rows(ctx, request, parts)
        new = [rows, *([errors] if errors is not None else [])]

        async def write(connection: Any) -> None:
            session = await wrap_connection(connection)
            for file in new:
                await self._tools.files.add(file, session=session)

        ctx.when_settled(lambda verb: self._remove_parts(ctx.job_id) if verb == "succeed" else None)
        return Done(self._result(request, total, rows, errors), write=write)

    def _remove_parts(self, job_id: UUID) -> None:
        """Remove the parts, which are no longer needed."""
        errand = asyncio.get_running_loop().create_task(remove_folder(self._tools.store, parts_folder(job_id)))
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    async def _write_rows(self, ctx: Context, request: ComputeEmbeddings, parts: Sequence[Part]) -> NewFile:
        id = derived_file_id(ctx.job_id, "rows")
        store, keys = self._tools.store, [part.key for part in parts if part.key is not None]
        try:
            if request.output == "jsonl":
                stored = await store.put(object_key(id), lambda: _concatenated(store, keys))
            else:
                has_text_ids = any(part.has_text_ids for part in parts)
                stored = await write_parquet(store, object_key(id), keys, has_text_ids=has_text_ids)
        except NotFound as error:
            raise _parts_gone(error) from None
        return _new_file(ctx, id, PURPOSE, f"embeddings-{ctx.job_id}.{request.output}", stored)

    async def _write_errors(self, ctx: Context, parts: Sequence[Part]) -> NewFile | None:
        store, keys = self._tools.store, [part.errors_key for part in parts if part.errors_key is not None]
        if not keys:
            return None
        id = derived_file_id(ctx.job_id, "errors")
        try:
            stored = await store.put(object_key(id), lambda: _concatenated(store, keys))
        except NotFound as error:
            raise _parts_gone(error) from None
        return _new_file(ctx, id, ERRORS_PURPOSE, f"embeddings-{ctx.job_id}-errors.jsonl", stored)

    async def _refuse(self, total: _Total, errors: NewFile | None) -> None:
        """No row has a vector: the job fails, but the list of bad rows is still written."""
        if errors is None:
            raise SchemaInvalid("the source has no rows", code="empty_source")
        await persist(lambda: self._tools.files.add(errors))
        counted = ", ".join(f"{count:,} {code}" for code, count in sorted(total.codes.items()))
        raise SchemaInvalid(
            f"none of the {total.failed:,} rows could be embedded: {counted}. The first: {total.first_error}; the file "
            f"{errors.id} lists all of them. Check text_field and id_field",
            code="no_usable_rows",
        )

    def _result(
        self, request: ComputeEmbeddings, total: _Total, rows: NewFile, errors: NewFile | None
    ) -> dict[str, Any]:
        model = self._tools.embedder(request).model
        price = self._tools.price(model)
        return {
            "file_id": rows.id,
            "errors_file_id": None if errors is None else errors.id,
            "rows": total.rows,
            "failed": total.failed,
            "errors": total.codes,
            "model": model,
            "dimensions": total.dimensions,
            "asked": total.asked,
            "calls": total.calls,
            "tokens": total.tokens,
            "in_doubt": total.in_doubt,
            "cost": None if total.cost is None else float(total.cost),
            "price": None if price is None else price.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Total:
    rows: int
    failed: int
    asked: int
    calls: int
    tokens: int
    in_doubt: int
    cost: Decimal | None
    """None if the cost of any batch is unknown: a partial sum would mislead."""
    dimensions: int | None
    codes: dict[str, int]
    first_error: str | None

    @classmethod
    def of(cls, parts: Sequence[Part]) -> _Total:
        dimensions = {part.dimensions for part in parts if part.dimensions is not None}
        if len(dimensions) > 1:
            raise Fatal(f"batches got vectors of different dimensions: {sorted(dimensions)}", code="wrong_dimensions")
        costs = [None if part.cost is None else Decimal(part.cost) for part in parts]
        codes = sum((Counter(part.codes) for part in parts), Counter[str]())
        first = next((part.first_error for part in parts if part.first_error is not None), None)
        return cls(
            rows=sum(part.rows for part in parts),
            failed=sum(part.failed for part in parts),
            asked=sum(part.asked for part in parts),
            calls=sum(part.calls for part in parts),
            tokens=sum(part.tokens for part in parts),
            in_doubt=sum(part.in_doubt for part in parts),
            cost=None if None in costs else sum((cost for cost in costs if cost is not None), Decimal(0)),
            dimensions=next(iter(dimensions), None),
            codes=dict(sorted(codes.items())),
            first_error=None if first is None else f"row {first['row'] or first['id']}: {first['message']}",
        )


def derived_file_id(job_id: UUID, what: str) -> str:
    """The id of a file of this job: always the same, and ordered by time like other ids."""
    digest = sha256(f"{job_id} {what}".encode()).hexdigest()
    return f"file-{job_id.hex[:12]}7{digest[:19]}"


async def _collect(pieces: AsyncIterator[Piece], batch_size: int) -> list[Piece]:
    found: list[Piece] = []
    async for piece in pieces:
        found.append(piece)
        if len(found) > BATCHES_MAX:
            raise SchemaInvalid(
                f"the source has more than {BATCHES_MAX:,} batches of {batch_size:,} rows; raise batch_size, up to "
                f"{BATCH_ROWS_MAX:,}, or split the source",
                code="too_many_batches",
            )
    return found


async def _concatenated(store: Store, keys: Sequence[str]) -> AsyncIterator[bytes]:
    for key in keys:
        async for chunk in store.get(key):
            yield chunk


def _new_file(ctx: Context, id: str, purpose: str, filename: str, stored: Stored) -> NewFile:
    return NewFile(id=id, tenant=ctx.tenant, purpose=purpose, filename=filename, stored=stored)


def _parts_gone(error: NotFound) -> Fatal:
    return Fatal(
        f"a part of the result is gone ({error}); submit the job again: what was paid for is not paid again",
        code="parts_gone",
    )


def parts_folder(job_id: UUID) -> str:
    return f"{FOLDER}/{job_id}"


async def remove_folder(store: Store, folder: str) -> None:
    try:
        await store.delete(*[found.key async for found in store.list(folder)])
    except StorageError as error:
        log.warning("%s was not removed: %s", folder, error)
