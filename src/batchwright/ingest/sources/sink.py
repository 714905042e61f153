"""What a fetch returns, and the file that it writes: private, hashed while it is written, and bounded."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from batchwright.errors import Fatal, Transient

PIECE_BYTES = 1024 * 1024
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A document that was fetched."""

    sha256: str
    size: int
    etag: str | None
    """For the next fetch of the same URI; None if a change could not be detected."""
    media_type: str | None
    """As reported by its source, without parameters: `text/html`; None for a file or an object."""
    name: str
    """The last part of its name, with the extension that its source reports, to detect its format."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NotModified:
    """The content is the same as that of this etag; nothing was written."""

    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a source reports about a document."""

    etag: str | None
    media_type: str | None
    name: str


class Sink:
    """A temporary file beside the final one. It gets its final name only when it is complete.

    Threads write to it. If the fetch is abandoned while a thread still writes, the next write fails. The file of a
    killed process stays: its name begins with a dot and ends with `.part`.
    """

    def __init__(self, into: Path, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.size = 0
        self._hash = hashlib.sha256()
        self._into = into
        self._lock = threading.Lock()
        with _translate_errors():
            # Only our user can read it, whatever the umask is, and its name is unique.
            self._file, self._path = tempfile.mkstemp(".part", f".{into.name[:50]}-", into.parent)
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        with suppress(OSError):
            Path(self._path).unlink()

    def check_size(self, size: int | None) -> None:
        """Refuse a document that is too large before reading it."""
        if size is not None and size > self.bytes_max:
            raise too_large(size, self.bytes_max)

    def write(self, data: bytes) -> None:
        with self._lock:
            if not self._is_open:
                raise Transient("the fetch was abandoned", code="source_slow")
            if self.size + len(data) > self.bytes_max:
                raise too_large(None, self.bytes_max)
            self.size += len(data)
            self._hash.update(data)
            with _translate_errors():
                left = memoryview(data)
                while left:
                    left = left[os.write(self._file, left) :]

    async def pour(self, chunks: AsyncIterator[bytes]) -> None:
        """Write all chunks in a thread, so that disk and hash do not block other tasks. Always closes the chunks."""
        pieces = bytearray()
        async with closing(chunks):
            async for chunk in chunks:
                pieces += chunk
                if len(pieces) >= PIECE_BYTES:
                    await asyncio.to_thread(self.write, bytes(pieces))
                    pieces.clear()
        await asyncio.to_thread(self.write, bytes(pieces))

    def finish(self, about: About) -> Fetched:
        """Give the file its name."""
        self._close()
        with _translate_errors():
            Path(self._path).replace(self._into)
        return Fetched(
            sha256=self._hash.hexdigest(),
            size=self.size,
            etag=about.etag,
            media_type=about.media_type,
            name=about.name,
            path=self._into,
        )

    def _close(self) -> None:
        """Close under the lock: a thread may be writing, and its file descriptor must not be reused meanwhile."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._file)


@asynccontextmanager
async def closing(chunks: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    """Close the stream and its connection now, not when the error is garbage collected."""
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


def too_large(size: int | None, bytes_max: int) -> Fatal:
    has = "has more" if size is None else f"has {size:,} bytes, which is more"
    return Fatal(
        f"the document {has} than the {bytes_max:,} bytes that are fetched; to fetch it, raise bytes_max in [ingest]",
        scope="item",
        code="document_too_large",
    )


def gone(what: str) -> Fatal:
    return Fatal(f"{what} no longer exists", scope="item", code="source_gone")


def refused(message: str) -> Fatal:
    return Fatal(message, scope="item", code="source_refused")


def unavailable(message: str) -> Transient:
    return Transient(message, code="source_unavailable")


def changed(what: str) -> Transient:
    return Transient(f"{what} changed while it was read", code="source_changed")


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = "disk_full" if error.errno in _FULL else "disk_error"
        raise Transient(f"the fetched document cannot be written: {error.strerror}", code=code) from None
