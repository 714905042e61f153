"""Whether answers can be stored: nothing is sent while the disk of the work folder has no room for the answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

RESERVE_BYTES = 64 * 1024 * 1024
"""Kept free in addition to the answers in flight, for plans, files and the database, which may be on the same disk."""
LOOK_SECONDS = 0.25
REFUSED_SECONDS = 2.0
"""How long an answer that found no room counts as trouble; writing it is retried more often than that."""


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class Disk:
    """The disk of the work folder, measured a few times a second."""

    def __init__(
        self,
        folder: Path,
        *,
        reserve: int = RESERVE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.folder = folder
        self._reserve = reserve
        self._clock = clock
        self._measure = free
        self._free = 0
        self._looked_at = float("-inf")
        self._shortage: str | None = None
        self._refused: tuple[str, float] | None = None

    def refuse(self, trouble: str) -> None:
        """An answer found no room, whatever was measured: report that for REFUSED_SECONDS."""
        self._refused = trouble, self._clock()

    @property
    def trouble(self) -> str | None:
        """Why nothing is sent; None while enough is free."""
        if self._refused is not None:
            trouble, at = self._refused
            if self._clock() - at < REFUSED_SECONDS:
                return trouble
            self._refused = None
        return self._shortage

    def has_room(self, in_flight: int) -> bool:
        """Whether this many bytes in flight, with their expected answers, still fit on the disk."""
        if (now := self._clock()) - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._free = self._measure(self.folder)
        if self._free >= self._reserve + in_flight:
            self._shortage = None
            return True
        self._shortage = (
            f"the disk of the work folder {self.folder} has {self._free >> 20} MiB left, and "
            f"{(self._reserve + in_flight) >> 20} are needed to keep answers; free some space, or set batches.work_dir"
        )
        return False
