"""Finds the bytes of answers: registered ranges, and answers that the database does not know."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from batchwright.batches.journal.journal import valid_end
from batchwright.batches.journal.workspace import JOURNAL, Workspace, fetch_object, journal_of_key, segments_folder
from batchwright.batches.store import Segment
from batchwright.errors import NotFound, StorageError
from batchwright.private import make_folders
from batchwright.storage import Store

_FETCHED = "fetched"


class Piece(NamedTuple):
    """A range of a journal, in a file of this machine."""

    path: Path
    start: int
    end: int


class Segments:
    """Answers as ranges of files of this machine."""

    def __init__(self, workspace: Workspace, store: Store) -> None:
        self._workspace = workspace
        self._store = store

    async def fetch(self, segments: Sequence[Segment]) -> list[Piece]:
        """Registered ranges in the same order; those that are not on this machine are downloaded, once."""
        return [self._find_here(segment) or await self._download(segment) for segment in segments]

    def is_lost(self, segment: Segment) -> bool:
        """Whether it was only in the work folder of this machine, and is gone."""
        return segment.key is None and segment.host == self._workspace.id and self._find_here(segment) is None

    def find_journal(self, segment: Segment) -> Path | None:
        """The journal of this range, if it is in the work folder of this machine."""
        if segment.host != self._workspace.id:
            return None
        path = self._workspace.journal(segment.batch_id, segment.shard, segment.claim)
        return path if path.is_file() else None

    async def find_unregistered(
        self,
        batch_id: str,
        segments: Sequence[Segment],
        *,
        shard: int | None = None,
        is_wanted: Callable[[int], bool] = lambda journal_number: True,
    ) -> Mapping[int, Sequence[Piece]]:
        """What no row covers, by shard: the tails of journals of this machine, and objects of the store."""
        found: defaultdict[int, list[Piece]] = defaultdict(list)
        for number, piece in await asyncio.to_thread(self._find_tails, batch_id, segments, shard, is_wanted):
            found[number].append(piece)
        known = {segment.key for segment in segments}
        async for stored in self._store.list(segments_folder(batch_id, shard)):
            if stored.key not in known and stored.key.endswith(JOURNAL):
                number, journal_number = journal_of_key(stored.key)
                if is_wanted(journal_number):
                    with suppress(NotFound):  # the garbage collector has just removed it
                        found[number].append(await self._fetch_stray(batch_id, stored.key))
        return found

    def _find_tails(
        self, batch_id: str, segments: Iterable[Segment], shard: int | None, is_wanted: Callable[[int], bool]
    ) -> list[tuple[int, Piece]]:
        """What journals hold beyond what is registered of them, up to their last whole records. Blocks."""
        registered: defaultdict[tuple[int, int], int] = defaultdict(int)
        for one in segments:
            if one.host == self._workspace.id:
                registered[one.shard, one.claim] = max(registered[one.shard, one.claim], one.end)
        found = []
        for number, claim, path in self._workspace.journals(batch_id, shard):
            start = registered[number, claim]
            if is_wanted(claim) and path.stat().st_size > start and (end := valid_end(path, start)) > start:
                found.append((number, Piece(path, start, end)))
        return found

    def _find_here(self, segment: Segment) -> Piece | None:
        path = self.find_journal(segment)
        if path is None or path.stat().st_size < segment.end:
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
        return Piece(await self._fetch(segment.batch_id, segment.key), 0, segment.end - segment.start)

    async def _fetch_stray(self, batch_id: str, key: str) -> Piece:
        path = await self._fetch(batch_id, key)
        return Piece(path, 0, await asyncio.to_thread(valid_end, path))

    async def _fetch(self, batch_id: str, key: str) -> Path:
        """A copy of the object in the work folder."""
        path = self._workspace.folder(batch_id) / _FETCHED / key.removeprefix(f"{segments_folder(batch_id)}/")
        if not path.is_file():
            await asyncio.to_thread(make_folders, path.parent)
            await fetch_object(self._store, key, path)
        return path
