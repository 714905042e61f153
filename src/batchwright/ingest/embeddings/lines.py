"""A JSONL file as a source: cut at line ends into byte ranges, which any worker can read separately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import orjson

from batchwright.files.store import File
from batchwright.ingest.embeddings.payloads import Lines
from batchwright.ingest.embeddings.rows import TOO_LONG, BadRow, Row, make_row
from batchwright.storage import Store

LINE_BYTES_MAX = 8 * 1024 * 1024
RANGE_BYTES_MAX = 16 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class LineReader:
    """The lines of one stored file."""

    def __init__(self, store: Store, file: File, *, id_field: str, text_field: str) -> None:
        self._store = store
        self._file = file
        self._id_field = id_field
        self._text_field = text_field

    async def split(self, batch_size: int) -> AsyncIterator[Lines]:
        splitter = Splitter(batch_size)
        async for chunk in self._store.get(self._file.key):
            for piece in await asyncio.to_thread(splitter.feed, chunk):
                yield piece
        for piece in splitter.finish():
            yield piece

    async def read(self, piece: Lines) -> AsyncIterator[Row]:
        if piece.is_too_long:
            message = f"the line has {piece.end - piece.start:,} bytes; the limit is {LINE_BYTES_MAX:,}"
            yield BadRow(TOO_LONG, message, piece.first, piece.first)
            return
        data = await self._store.read(self._file.key, piece.start, piece.end - piece.start)
        for place, line in enumerate(data.split(b"\n")):
            if stripped := line.removeprefix(_BOM).strip():
                yield self._parse(stripped, piece.first + place)

    def _parse(self, line: bytes, number: int) -> Row:
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            return BadRow("invalid_json", f"the line is not JSON: {error}", number, number)
        if not isinstance(found, dict):
            return BadRow("not_an_object", "the line is JSON, but not an object", number, number)
        return make_row(found.get(self._id_field), found.get(self._text_field), number)


class Splitter:
    """Cuts a stream of bytes after a number of lines, and earlier if they are long."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._offset = 0
        self._line_start = 0
        self._number = 1
        self._start = 0
        self._first = 1

    def feed(self, chunk: bytes) -> list[Lines]:
        return list(self._cut(chunk))

    def finish(self) -> list[Lines]:
        """Finish the stream: the last line may have no line end."""
        found = list(self._end_line(self._offset)) if self._offset > self._line_start else []
        if self._line_start > self._start:
            found.append(self._close(self._line_start))
        return found

    def _cut(self, chunk: bytes) -> Iterator[Lines]:
        place = chunk.find(b"\n")
        while place >= 0:
            yield from self._end_line(self._offset + place + 1)
            place = chunk.find(b"\n", place + 1)
        self._offset += len(chunk)

    def _end_line(self, end: int) -> Iterator[Lines]:
        is_too_long = end - self._line_start > LINE_BYTES_MAX
        if self._line_start > self._start and (is_too_long or end - self._start > RANGE_BYTES_MAX):
            yield self._close(self._line_start)
        self._line_start, self._number = end, self._number + 1
        if is_too_long or self._number - self._first >= self._batch_size:
            yield self._close(end, is_too_long=is_too_long)

    def _close(self, end: int, *, is_too_long: bool = False) -> Lines:
        """The piece between the last cut and this one."""
        made = Lines(start=self._start, end=end, first=self._first, is_too_long=is_too_long)
        self._start = end
        self._first = self._number
        return made
