"""The end of a batch: writes the two files and the manifest from the registered answers.

    segments → assembly → unregistered answers → output and error file into the store → one compare-and-set

The files get new ids at every attempt, and their rows are written in the commit that ends the batch. No row names what
an attempt that died has uploaded, so the garbage collector removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.batches.journal.checkpoint import Owner
from batchwright.batches.journal.journal import sound_ranges
from batchwright.batches.journal.segments import Piece, Segments
from batchwright.batches.journal.unregistered import UnregisteredAnswers
from batchwright.batches.journal.workspace import InputDamaged, Workspace
from batchwright.batches.output.assemble import Assembly, assemble, manifest
from batchwright.batches.plan.planfile import REJECTED, plan_path, plan_paths, read_entries, safe_name
from batchwright.batches.plan.shards import Shard, shards_of
from batchwright.batches.store import Batch, Batches, Ending, Segment
from batchwright.db.database import Session
from batchwright.errors import NotFound, StorageError
from batchwright.files.store import BATCH_OUTPUT, Files, NewFile, new_file_id, object_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a batch ends with."""

    counts: Mapping[str, int]
    errors: Mapping[str, Any]
    manifest: Mapping[str, Any]
    output: NewFile | None
    error: NewFile | None

    def ending(self) -> Ending:
        return Ending(
            counts=self.counts,
            error_summary=self.errors,
            output_file_id=self.output.id if self.output else None,
            error_file_id=self.error.id if self.error else None,
            manifest=self.manifest,
        )


class Finalizer:
    """Writes the files of batches."""

    def __init__(
        self, batches: Batches, files: Files, workspace: Workspace, unregistered: UnregisteredAnswers | None = None
    ) -> None:
        self._batches = batches
        self._files = files
        self._workspace = workspace
        self._unregistered = unregistered
        self._segments = Segments(workspace, files.store)

    async def gather(self, batch: Batch, owner: Owner) -> Assembly:
        """Find the record of every line. If some have none, look for unregistered answers."""
        assembly = await self._assemble(batch, await self._batches.segments(batch.id))
        if assembly.missing and self._unregistered is not None:
            models = {one.number: one.model for one in await self.shards(batch)}
            if await self._unregistered.recover_for_batch(owner, models, assembly.missing_offsets):
                assembly = await self._assemble(batch, await self._batches.segments(batch.id))
        return assembly

    async def salvage(self, batch: Batch) -> Assembly:
        """The same for a batch that has ended, without registering anything. Answers that are certainly lost are left
        out, because there is no later attempt that could wait for them."""
        segments = [one for one in await self._batches.segments(batch.id) if not self._segments.is_lost(one)]
        unregistered = await self._segments.find_unregistered(batch.id, segments)
        strays = [piece for pieces in unregistered.values() for piece in pieces]
        return await self._assemble(batch, segments, strays, is_damaged=True)

    async def shards(self, batch: Batch, *, workers: int = 1) -> list[Shard]:
        """The shards of its plan, divided for this number of workers."""
        folder = await self._workspace.fetch_plan(batch.id, self._files.store)
        return await asyncio.to_thread(lambda: list(shards_of(batch.id, folder, workers=workers)))

    async def shards_with(self, batch: Batch, offsets: set[int]) -> list[Shard]:
        """Those that hold one of these lines."""
        folder = await self._workspace.fetch_plan(batch.id, self._files.store)

        def holds(one: Shard) -> bool:
            entries = read_entries(plan_path(folder, safe_name(one.model)), one.start, one.count)
            return any(entry.offset in offsets for entry in entries)

        return await asyncio.to_thread(lambda: [one for one in shards_of(batch.id, folder) if holds(one)])

    async def _assemble(
        self, batch: Batch, segments: Sequence[Segment], strays: Sequence[Piece] = (), *, is_damaged: bool = False
    ) -> Assembly:
        path = await self._fetch_input(batch)
        folder = await self._workspace.fetch_plan(batch.id, self._files.store)
        pieces = await self._segments.fetch(segments)
        if is_damaged:
            pieces = await asyncio.to_thread(_find_sound, pieces)
        plans, rejected = await asyncio.to_thread(plan_paths, folder), folder / REJECTED
        assembly = await asyncio.to_thread(
            assemble, batch.id, path, plans=plans, rejected=rejected, pieces=[*pieces, *strays]
        )
        if assembly.total != batch.total:
            raise StorageError(
                f"the plan of batch {batch.id} has {assembly.total} lines, and {batch.total} were planned"
            )
        return assembly

    async def _fetch_input(self, batch: Batch) -> Path:
        """Only lines without an answer need the input; if it is gone, reading such a line raises NotFound."""
        file = await self._files.get(batch.input_file_id, tenant=None, also_gone=True)
        with suppress(NotFound, InputDamaged):
            await self._workspace.fetch_input(batch.id, self._files.store, file.key, file.bytes)
        return self._workspace.input(batch.id)

    async def write(self, batch: Batch, assembly: Assembly) -> Result:
        """Put the files into the store; an empty file is not written."""
        counts = assembly.counts
        output = await self._put(batch, "output", assembly.output) if assembly.has_output else None
        error = await self._put(batch, "error", assembly.errors) if assembly.has_errors else None
        return Result(
            counts=counts.as_json(),
            errors=assembly.tally.errors,
            manifest={
                "batch_id": batch.id,
                **manifest(
                    counts,
                    input_sha256=batch.input_sha256 or "",
                    output_sha256=output.stored.sha256 if output else None,
                    error_sha256=error.stored.sha256 if error else None,
                ),
                "files": {
                    "input": batch.input_file_id,
                    "output": output.id if output else None,
                    "errors": error.id if error else None,
                },
            },
            output=output,
            error=error,
        )

    async def add_files(self, result: Result, session: Session) -> None:
        for file in (result.output, result.error):
            if file is not None:
                await self._files.add(file, session=session)

    async def _put(self, batch: Batch, kind: str, source: Callable[[], AsyncIterator[bytes]]) -> NewFile:
        id = new_file_id()
        return NewFile(
            id=id,
            tenant=batch.tenant,
            purpose=BATCH_OUTPUT,
            filename=f"{batch.id}_{kind}.jsonl",
            stored=await self._files.store.put(object_key(id), source),
            expires_seconds=batch.output_expires_seconds,
        )


def _find_sound(pieces: Sequence[Piece]) -> list[Piece]:
    """Blocks."""
    return [Piece(one.path, *range) for one in pieces for range in sound_ranges(one.path, one.start, one.end)]
