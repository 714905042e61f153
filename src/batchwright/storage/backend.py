"""What a place for objects must be able to do; retries, counting and checksums are added by the Store above it."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says when there is no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An object, as the store describes it."""

    key: str
    size: int
    etag: str | None
    modified_at: datetime


class Backend(Protocol):
    """Every call either answers, or raises one of our errors; NotFound is an answer."""

    part_bytes: int
    """How much one read asks for at most, and one write holds."""

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> str | None:
        """All of it or nothing, durable on return; answers the etag. Errors of `chunks` come out as they are."""

    async def adopt(self, key: str, path: Path) -> str | None:
        """Make the file itself the object and answer its etag; None where that is not possible."""

    async def read(self, key: str, start: int, end: int, etag: str | None) -> bytes:
        """The bytes from `start` to before `end`, both within the object; Conflict if its etag is another."""

    async def head(self, key: str) -> Found | None: ...

    async def delete(self, keys: Sequence[str]) -> None: ...

    def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sequence[Found]]:
        """Objects under the folder `prefix` whose keys come after `after`, in the order of their keys."""

    def local_path(self, key: str) -> Path | None: ...

    async def sweep(self, older_than_seconds: float) -> int:
        """Remove what dead writers left half-written; answers how much that was."""
