"""The source of an upload: bytes, a file or a stream, measured and hashed as it is read."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from batchwright.errors import NotFound, TooLarge
from batchwright.storage.settings import MIB

Chunks = AsyncIterator[bytes]
Repeatable = bytes | Path | Callable[[], Chunks]
"""Sources that can be read again if the store fails in the middle; a callable creates a new iterator each time."""
Source = Repeatable | Chunks


class Contents:
    """A source that can be read once or several times; afterwards it knows its size and checksum.

    A piece is at most 1 MiB, so that hashing never blocks the event loop for longer than a millisecond or two.
    """

    def __init__(self, source: Source, limit: int | None = None) -> None:
        self._limit = limit
        self._source = source
        self._digest = hashlib.sha256()
        self.size = 0
        self.touched = False

    @property
    def repeatable(self) -> bool:
        """Whether another attempt is still possible."""
        return isinstance(self._source, (bytes, Path)) or callable(self._source) or not self.touched

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    async def hold(self, size: int) -> None:
        """Keep a stream that ends within `size` in memory, which makes it repeatable."""
        if isinstance(self._source, (bytes, Path)) or callable(self._source):
            return
        parts = gathered(self._bounded(self._source), size)
        first = await anext(parts, b"")
        self._source = first if len(first) < size else _joined(first, parts)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Read it once, from the beginning. A pass that ends early is closed, together with its source."""
        self._digest, self.size, self.touched = hashlib.sha256(), 0, True
        async with aclosing(self._bounded(self._open())) as pieces:
            async for piece in pieces:
                self.size += len(piece)
                self._digest.update(piece)
                yield piece

    async def measure(self) -> None:
        """Read it only to learn its size and checksum."""
        async for _ in self.chunks():
            pass

    def _open(self) -> Chunks:
        match self._source:
            case bytes():
                return _of_bytes(self._source)
            case Path():
                return _of_file(self._source)
            case _:
                return self._source() if callable(self._source) else self._source

    async def _bounded(self, chunks: Chunks) -> AsyncGenerator[bytes, None]:
        size = 0
        try:
            async for chunk in chunks:
                size += len(chunk)
                if self._limit is not None and size > self._limit:
                    raise TooLarge(f"the file is larger than {self._limit} bytes, which is the limit")
                for start in range(0, len(chunk), MIB):
                    yield chunk if len(chunk) <= MIB else chunk[start : start + MIB]
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()


async def gathered(chunks: Chunks, size: int) -> Chunks:
    """The same bytes in chunks of at least `size`, except the last."""
    parts, held = list[bytes](), 0
    async for chunk in chunks:
        parts.append(chunk)
        held += len(chunk)
        if held >= size:
            whole = b"".join(parts)
            parts, held = [], 0
            yield whole
    if held:
        yield b"".join(parts)


async def _joined(first: bytes, rest: Chunks) -> Chunks:
    yield first
    del first
    async for chunk in rest:
        yield chunk


async def _of_bytes(data: bytes) -> Chunks:
    yield data


async def _of_file(path: Path) -> Chunks:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path} to upload") from error
    try:
        while chunk := await asyncio.to_thread(file.read, MIB):
            yield chunk
    finally:
        await asyncio.to_thread(file.close)
