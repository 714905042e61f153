"""Finds the bytes of registered segments: in a journal of this machine, or in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from batchwright.batches.assemble import Piece
from batchwright.batches.store import Segment
from batchwright.batches.workspace import JOURNAL, Workspace, fetch_object
from batchwright.errors import StorageError
from batchwright.storage import Store

_FETCHED = "fetched"


class Segments:
    """What is registered, as ranges of files of this machine."""

    def __init__(self, workspace: Workspace, store: Store) -> None:
        self._workspace = workspace
        self._store = store

    async def fetch(self, segments: Sequence[Segment]) -> list[Piece]:
        """In the same order; what is not here is downloaded, once."""
        return [self._here(segment) or await self._download(segment) for segment in segments]

    def is_lost(self, segment: Segment) -> bool:
        """Whether it was in the work folder of this machine and nowhere else, and is not there any more."""
        return segment.key is None and segment.host == self._workspace.id and self._here(segment) is None

    def _here(self, segment: Segment) -> Piece | None:
        if segment.host != self._workspace.id:
            return None
        path = self._workspace.journal(segment.batch_id, segment.shard, segment.claim)
        if not path.is_file() or path.stat().st_size < segment.end:
            return None
        return Piece(path, segment.start, segment.end)

    async def _download(self, segment: Segment) -> Piece:
        if self.is_lost(segment):
            raise StorageError(f"answers of {segment.batch_id} were in the work folder of this machine, and are gone")
        if segment.key is None:
            raise StorageError(
                f"answers of {segment.batch_id} are in the work folder of another machine; "
                "set storage.url to a store that all machines share"
            )
        path = self._path(segment)
        if not path.is_file():
            await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            await fetch_object(self._store, segment.key, path)
        return Piece(path, 0, segment.end - segment.start)

    def _path(self, segment: Segment) -> Path:
        folder = self._workspace.folder(segment.batch_id) / _FETCHED
        return folder / f"{segment.shard}.{segment.claim}.{segment.seq}{JOURNAL}"
