"""The interface of a storage backend; the Store above it adds retries, counting and checksums."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of the operating system for a full disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An object, as the store describes it."""

    key: str
    size: int
    etag: str | None
    modified_at: datetime


class Backend(Protocol):
    """Every call either returns, or raises one of our errors; NotFound counts as an answer."""

    part_bytes: int
    """Maximum size of one read, and of the buffer of one write."""

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> str | None:
        """Write all of it or nothing, durable on return; returns the etag. Errors of `chunks` are raised unchanged."""

    async def adopt(self, key: str, path: Path) -> str | None:
        """Make the file itself the object and return its etag; None where that is not possible."""

    async def read(self, key: str, start: int, end: int, etag: str | None) -> bytes:
        """The bytes from `start` up to, not including, `end`, both within the object; Conflict if its etag differs."""

    async def head(self, key: str) -> Found | None: ...

    async def delete(self, keys: Sequence[str]) -> None: ...

    def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sequence[Found]]:
        """Objects under the folder `prefix` whose keys come after `after`, in the order of their keys."""

    def local_path(self, key: str) -> Path | None: ...

    async def sweep(self, older_than_seconds: float) -> int:
        """Remove incomplete objects of dead writers; returns how many."""
