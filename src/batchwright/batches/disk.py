"""Whether answers can be kept: nothing is sent whose answer may find no room on the disk of the work folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

RESERVE_BYTES = 64 * 1024 * 1024
"""Beside the answers in flight, for plans, files and the database, which may be on the same disk."""
LOOK_SECONDS = 0.25


def free_bytes(folder: Path) -> int:
    """What this user may still write there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class Disk:
    """The disk of the work folder, looked at a few times a second."""

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
        self.trouble: str | None = None
        """What is wrong, while too little is free."""

    def has_room(self, in_flight: int) -> bool:
        """Whether the answers to so many bytes in flight can be kept, and those to one request more."""
        if (now := self._clock()) - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._free = self._measure(self.folder)
        if self._free >= self._reserve + in_flight:
            self.trouble = None
            return True
        self.trouble = (
            f"the disk of the work folder {self.folder} has {self._free >> 20} MiB left, and "
            f"{(self._reserve + in_flight) >> 20} are needed to keep answers; free some, or set batches.work_dir"
        )
        return False
