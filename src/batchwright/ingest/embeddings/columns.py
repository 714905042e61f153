"""A Parquet file as a source, by its row groups. pyarrow reads only the needed ranges from the store."""

from __future__ import annotations

import asyncio
import importlib
import io
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from batchwright.errors import ConfigurationError, Fatal, SchemaInvalid
from batchwright.files.store import File
from batchwright.ingest.embeddings.payloads import Rows
from batchwright.ingest.embeddings.rows import Row, make_row
from batchwright.storage import Store

T = TypeVar("T")
MAGIC = b"PAR1"
GROUP_BYTES_MAX = 1024 * 1024 * 1024
"""Maximum size of the two columns of one row group, unpacked."""
_READ_SECONDS_MAX = 120.0
_ROWS_AT_ONCE = 256


def require_parquet() -> Any:
    """pyarrow's module for Parquet, which only some installations have."""
    return require_arrow("pyarrow.parquet")


def require_arrow(module: str = "pyarrow") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigurationError("Parquet files need pyarrow: pip install 'batchwright[parquet]'") from None


class ColumnReader:
    """The rows of one stored file, from two of its columns. Without an id column, rows are numbered."""

    def __init__(self, store: Store, file: File, *, id_field: str, text_field: str) -> None:
        self._store = store
        self._file = file
        self._id_field = id_field
        self._text_field = text_field
        self._parquet = require_parquet()

    async def split(self, batch_size: int) -> AsyncIterator[Rows]:
        for piece in await self._in_thread(lambda file: list(self._pieces(file, batch_size))):
            yield piece

    async def read(self, piece: Rows) -> AsyncIterator[Row]:
        for row in await self._in_thread(lambda file: list(self._rows(file, piece))):
            yield row

    async def _in_thread(self, work: Callable[[Any], T]) -> T:
        """pyarrow reads synchronously; the bytes come from the event loop, where the store is.

        It runs in a separate thread: the store uses the threads of the event loop, and all of those could block here.
        """
        stored = StoredBytes(self._store, self._file, asyncio.get_running_loop())
        arrow_errors = require_arrow().ArrowException

        def open_and_work() -> T:
            try:
                return work(self._parquet.ParquetFile(stored))
            except arrow_errors as error:
                raise _damaged(self._file, error) from error

        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parquet")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, open_and_work)
        finally:
            thread.shutdown(wait=False)

    def _pieces(self, file: Any, batch_size: int) -> Iterator[Rows]:
        self._columns(file)
        first = 1
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            for start in range(0, rows, batch_size):
                count = min(batch_size, rows - start)
                yield Rows(group=group, start=start, count=count, first=first + start)
            first += rows

    def _rows(self, file: Any, piece: Rows) -> Iterator[Row]:
        columns = self._columns(file)
        self._check_size(file, piece.group, columns)
        end, place = piece.start + piece.count, 0
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[piece.group], columns=columns):
            low, high = max(piece.start - place, 0), min(end - place, batch.num_rows)
            if low < high:
                yield from self._made(batch.slice(low, high - low), piece.first + place + low - piece.start)
            place += batch.num_rows
            if place >= end:
                return

    def _made(self, batch: Any, number: int) -> Iterator[Row]:
        texts = batch.column(self._text_field).to_pylist()
        has_ids = self._id_field in batch.schema.names
        ids = batch.column(self._id_field).to_pylist() if has_ids else [None] * len(texts)
        for place, (id, text) in enumerate(zip(ids, texts, strict=True)):
            yield make_row(id, text, number + place)

    def _columns(self, file: Any) -> list[str]:
        names = file.schema_arrow.names
        if self._text_field not in names:
            raise SchemaInvalid(
                f"the file {self._file.id} has no column {self._text_field!r} (text_field); it has {', '.join(names)}",
                code="no_text_column",
            )
        return [name for name in dict.fromkeys((self._id_field, self._text_field)) if name in names]

    def _check_size(self, file: Any, group: int, columns: list[str]) -> None:
        described = file.metadata.row_group(group)
        found = [described.column(place) for place in range(described.num_columns)]
        unpacked = sum(one.total_uncompressed_size for one in found if one.path_in_schema.split(".")[0] in columns)
        if unpacked > GROUP_BYTES_MAX:
            raise SchemaInvalid(
                f"row group {group} of {self._file.id} unpacks to {unpacked:,} bytes; the limit is "
                f"{GROUP_BYTES_MAX:,}: write the file with smaller row groups",
                code="row_group_too_large",
            )


class StoredBytes(io.RawIOBase):
    """A stored file as a synchronous, seekable file object."""

    def __init__(self, store: Store, file: File, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._store = store
        self._file = file
        self._loop = loop
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.bytes}[whence]
        self._place = max(0, base + offset)
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.bytes - self._place)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        asked: Future[bytes] = asyncio.run_coroutine_threadsafe(
            self._store.read(self._file.key, self._place, wanted), self._loop
        )
        data = asked.result(_READ_SECONDS_MAX)
        self._place += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _damaged(file: File, error: Exception) -> Fatal:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Fatal(f"the Parquet file {file.id} cannot be read: {said[:300]}", code="damaged_file")
