"""Reads every line of a batch exactly once: finished ones while it runs, the others when it has ended.

    registered lines ──▶ page by page, until the batch has ended
    its files        ──▶ all other lines: those that never got an answer, and those that cannot be read here, because
                         they are in the work folder of another machine or were removed

A line is identified by its offset in the input, which is at the end of its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from batchwright.batches.journal.envelopes import offset_of
from batchwright.batches.output.results import PAGE_BYTES, Cursor, Results
from batchwright.batches.store import Batch
from batchwright.errors import Conflict, NotFound

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart
    from batchwright.files.store import File, Files

PAUSE_SECONDS_MIN = 0.05
PAUSE_SECONDS_MAX = 1.0
_CURSOR = b',"cursor":"'


class LineReader:
    """Reads lines of one batch, a page at a time."""

    def __init__(self, part: BatchesPart, id: str, after: str | None = None) -> None:
        self._part = part
        self._id = id
        self._results = Results(part.batches, part.workspace, part.core.store)
        self._after = None if after is None else Cursor.parse(after)
        self._cursor = Cursor()
        self._seen: set[int] = set()
        self._files: FileReader | None = None
        self._is_readable = True
        """Whether registered lines can be read here."""
        self._pause = PAUSE_SECONDS_MIN
        self.batch: Batch | None = None
        """The batch as it was when it was last read."""

    @property
    def is_complete(self) -> bool:
        """Whether all lines that the batch has counted were read."""
        return self.batch is not None and len(self._seen) >= self.batch.done

    async def page(self) -> list[bytes] | None:
        """Some lines; waits for them while the batch runs. None when there are no more."""
        while self._files is None:
            # Read the batch first: if it has ended by then, all of its lines are registered.
            self.batch = batch = await self._part.batches.get(self._id, tenant=None)
            if found := await self._read_registered(batch):
                self._pause = PAUSE_SECONDS_MIN
                return found
            if batch.has_ended:
                self._files = self._rest_of(batch)
            else:
                await asyncio.sleep(self._pause)
                self._pause = min(PAUSE_SECONDS_MAX, self._pause * 2)
        while (lines := await self._files.page()) is not None:
            if fresh := self._not_seen(lines):
                return fresh
        return None

    async def _read_registered(self, batch: Batch) -> list[bytes]:
        """The next new lines; empty if there are none yet."""
        while self._is_readable:
            try:
                if batch.segments_gone_at is not None:
                    raise NotFound(f"finished lines of {batch.id} were removed, and only its files are left")
                page = await self._results.page(self._id, self._cursor, with_cursors=True)
            except (Conflict, NotFound) as error:
                if self._after is not None:
                    raise NotFound(f"{error}; leave out `after`, or read output() and errors()") from error
                self._is_readable = False
                break
            self._cursor = page.next
            if fresh := self._not_seen(_split(page.data)):
                return fresh
            if not page.has_more:
                break
        return []

    def _rest_of(self, batch: Batch) -> FileReader:
        """Usually every line has been read by now, and the files are not needed."""
        ids = () if self.is_complete else (batch.output_file_id, batch.error_file_id)
        return FileReader(self._part.files, ids)

    def _not_seen(self, lines: Iterable[bytes]) -> list[bytes]:
        """Remember these lines; returns those that are new and come after the cursor to resume at."""
        fresh = []
        for line in lines:
            offset = offset_of(line)
            if offset not in self._seen:
                self._seen.add(offset)
                if self._after is None or (cursor := _cursor(line)) is None or cursor > self._after:
                    fresh.append(line)
        return fresh


class FileReader:
    """Reads the lines of stored files, one after the other, a page at a time."""

    def __init__(self, files: Files, ids: Sequence[str | None]) -> None:
        self._files = files
        self._ids = [id for id in ids if id is not None]
        self._file: File | None = None
        self._start = 0

    async def page(self) -> list[bytes] | None:
        """Some lines, each with its newline; None when there are no more."""
        while self._file is not None or self._ids:
            if self._file is None:
                self._file, self._start = await self._find(self._ids.pop(0)), 0
            if lines := await self._read(self._file):
                return lines
            self._file = None
        return None

    async def _find(self, id: str) -> File:
        try:
            return await self._files.get(id, tenant=None)
        except NotFound:
            raise NotFound(f"the file {id} was deleted, or has expired") from None

    async def _read(self, file: File) -> list[bytes]:
        """Whole lines; one may be longer than a page."""
        data = b""
        while self._start + len(data) < file.bytes:
            start = self._start + len(data)
            data += b"".join([piece async for piece in self._files.content(file, start, start + PAGE_BYTES)])
            if end := data.rfind(b"\n") + 1:
                self._start += end
                return _split(data[:end])
        self._start += len(data)
        return [data] if data else []


def _split(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


def _cursor(line: bytes) -> Cursor | None:
    """The cursor of a line; lines of files have none."""
    head, found, rest = line.rpartition(_CURSOR)
    return Cursor.parse(rest[: rest.index(b'"')].decode()) if found and rest.endswith(b'"}\n') and head else None
