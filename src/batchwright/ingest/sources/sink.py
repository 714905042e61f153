"""What a fetch hands back, and the file that it writes: private, hashed on the way, and bounded."""

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
    """For the next fetch of the same URI; None if nothing would tell a change."""
    media_type: str | None
    """As its source says, without parameters: `text/html`; of a file or an object, None."""
    name: str
    """The last part of its name, with the extension that its source gives it, for whoever finds out its format."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NotModified:
    """The content is the same as that of this etag; nothing was written."""

    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a source says of a document while it is written."""

    etag: str | None
    media_type: str | None
    name: str


class Sink:
    """A file of our own beside its later place; there under its name only when it is whole.

    Threads write to it. One that still writes when the fetch was given up is refused its next piece. The file of a
    process that was killed stays: its name begins with a dot and ends with `.part`.
    """

    def __init__(self, into: Path, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.size = 0
        self._hash = hashlib.sha256()
        self._into = into
        self._lock = threading.Lock()
        with _explained():
            # Readable by our user alone, whatever the umask is, and with a name that no second fetch has.
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
        """Refuse what is too large before it is read."""
        if size is not None and size > self.bytes_max:
            raise too_large(size, self.bytes_max)

    def write(self, data: bytes) -> None:
        with self._lock:
            if not self._is_open:
                raise Transient("the fetch was given up", code="source_slow")
            if self.size + len(data) > self.bytes_max:
                raise too_large(None, self.bytes_max)
            self.size += len(data)
            self._hash.update(data)
            with _explained():
                left = memoryview(data)
                while left:
                    left = left[os.write(self._file, left) :]

    async def pour(self, chunks: AsyncIterator[bytes]) -> None:
        """All chunks, with no disk and no hash in the way of other tasks; they are closed whatever happens."""
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
        with _explained():
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
        """A thread may be writing at this moment; its file number must not become another file's meanwhile."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._file)


@asynccontextmanager
async def closing(chunks: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    """Close the stream, and with it its connection, now and not when somebody forgets the error."""
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


def too_large(size: int | None, bytes_max: int) -> Fatal:
    has = "has more" if size is None else f"has {size:,} bytes, which is more"
    return Fatal(
        f"the document {has} than the {bytes_max:,} bytes that are fetched; raise bytes_max in [ingest] for it",
        scope="item",
        code="document_too_large",
    )


def gone(what: str) -> Fatal:
    return Fatal(f"{what} is not there any more", scope="item", code="source_gone")


def refused(message: str) -> Fatal:
    return Fatal(message, scope="item", code="source_refused")


def unavailable(message: str) -> Transient:
    return Transient(message, code="source_unavailable")


def changed(what: str) -> Transient:
    return Transient(f"{what} changed while it was read", code="source_changed")


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = "disk_full" if error.errno in _FULL else "disk_error"
        raise Transient(f"the fetched document cannot be written: {error.strerror}", code=code) from None
