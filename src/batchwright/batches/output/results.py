"""Finished lines while their batch still runs, in the order in which they were registered.

A cursor is `segment:byte`: a registered range of a journal, and the byte of that journal at which the next record
begins. It stays valid until the ranges are removed, an hour after the end of the batch.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from batchwright.batches.journal.journal import open_to_read, read_open, scan_open
from batchwright.batches.journal.segments import Segments
from batchwright.batches.journal.workspace import Workspace
from batchwright.batches.store import Batches, Segment
from batchwright.errors import Conflict, InvalidInput, NotFound, StorageError
from batchwright.storage import Store

PAGE_BYTES = 8 * 1024 * 1024
_SEGMENTS_PER_PAGE = 200
_CURSOR = re.compile(r"(\d{1,18}):(\d{1,18})", re.ASCII)


class Cursor(NamedTuple):
    """Where to continue."""

    segment: int = 0
    byte: int = 0

    @classmethod
    def parse(cls, text: str) -> Cursor:
        found = _CURSOR.fullmatch(text)
        if found is None:
            raise _refuse_cursor(text)
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.segment}:{self.byte}"


class Lines(NamedTuple):
    """Some finished lines, each with its newline; where to continue, and whether more are registered already."""

    data: bytes
    next: Cursor
    has_more: bool


class _Read(NamedTuple):
    lines: list[bytes]
    ends: list[int]
    """For each line, where the next record begins."""


class Results:
    """Reads what is registered, from a journal of this machine or from the store."""

    def __init__(self, batches: Batches, workspace: Workspace, store: Store) -> None:
        self._batches = batches
        self._segments = Segments(workspace, store)
        self._store = store

    async def page(
        self, batch_id: str, cursor: Cursor, bytes_max: int = PAGE_BYTES, *, with_cursors: bool = False
    ) -> Lines:
        """Lines from the cursor on, as many as fit, but at least one if there is one.

        With cursors, each line has one more field, which says where to continue after it.
        """
        found: list[bytes] = []
        room = bytes_max
        segments = await self._batches.segments(batch_id, after=cursor.segment - 1, limit=_SEGMENTS_PER_PAGE)
        if cursor.segment and (not segments or segments[0].id != cursor.segment):
            raise _refuse_cursor(str(cursor))
        for segment in segments:
            start = _find_start(segment, cursor)
            if start < segment.end:
                read = await self._read(segment, start, room)
                found += _add_cursors(segment, read) if with_cursors else read.lines
                room -= sum(map(len, read.lines))
                start = read.ends[-1]
            cursor = Cursor(segment.id, start)
            if room <= 0:
                break
        is_last = not segments or (cursor.segment == segments[-1].id and cursor.byte >= segments[-1].end)
        return Lines(b"".join(found), cursor, not is_last or len(segments) == _SEGMENTS_PER_PAGE)

    async def _read(self, segment: Segment, start: int, room: int) -> _Read:
        if (path := self._segments.find_journal(segment)) is not None:
            return await asyncio.to_thread(_read_file, path, segment, start, room)
        if self._segments.is_lost(segment):
            raise NotFound(f"answers of {segment.batch_id} were in the work folder of this machine, and are gone")
        if segment.key is None:
            raise Conflict(
                f"answers of {segment.batch_id} are in the work folder of another machine: wait for its output file, "
                "or set storage.url to a store that all machines share"
            )
        data = await self._store.read(segment.key, 0, segment.end - segment.start)
        return await asyncio.to_thread(_read_stored, data, segment, start, room)


def _find_start(segment: Segment, cursor: Cursor) -> int:
    if segment.id != cursor.segment:
        return segment.start
    if not segment.start <= cursor.byte <= segment.end:
        raise _refuse_cursor(str(cursor))
    return cursor.byte


def _read_file(path: Path, segment: Segment, start: int, room: int) -> _Read:
    descriptor = open_to_read(path)
    try:
        return _take_lines(descriptor, path, segment, start, room)
    finally:
        os.close(descriptor)


def _read_stored(data: bytes, segment: Segment, start: int, room: int) -> _Read:
    """A stored piece begins where its range does; it is small, so it is written to a temporary file and read there."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        piece = segment._replace(start=0, end=segment.end - segment.start)
        read = _take_lines(file.fileno(), Path(str(segment.key)), piece, start - segment.start, room)
    return _Read(read.lines, [segment.start + end for end in read.ends])


def _take_lines(descriptor: int, path: Path, segment: Segment, start: int, room: int) -> _Read:
    lines: list[bytes] = []
    ends: list[int] = []
    try:
        for found in scan_open(descriptor, path, start, segment.end):
            lines.append(read_open(descriptor, path, found.position, found.length, found.offset))
            ends.append(found.end)
            room -= found.length
            if room <= 0:
                break
    except StorageError:
        if lines or start == segment.start:
            raise
        raise _refuse_cursor(f"{segment.id}:{start}") from None  # no record begins at the place that the cursor names
    return _Read(lines, ends)


def _add_cursors(segment: Segment, read: _Read) -> list[bytes]:
    cursors = (str(Cursor(segment.id, end)).encode() for end in read.ends)
    return [b'%b,"cursor":"%b"}\n' % (line[:-2], cursor) for line, cursor in zip(read.lines, cursors, strict=True)]


def _refuse_cursor(text: str) -> InvalidInput:
    return InvalidInput(
        f"{text[:40]!r} is not a cursor of this batch; take one from the header x-next-cursor, or leave it out",
        param="after",
    )
