"""Finds the process of this user that listens on a port, where the kernel shows it (Linux)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Listener:
    """A process that listens."""

    pid: int
    words: tuple[str, ...]
    """Its command line."""

    @property
    def name(self) -> str:
        return Path(self.words[0]).name if self.words else "another program"

    @property
    def is_batchwright(self) -> bool:
        """Whether it is `batchwright …` or `python -m batchwright …`."""
        names = [Path(word).name for word in self.words[:4]]
        return "batchwright" in names


def find_listener(port: int) -> Listener | None:
    """None if no process listens, if it belongs to another user, or if this system does not show it."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()) in sockets for file in (folder / "fd").iterdir()):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return Listener(int(folder.name), tuple(word for word in words if word))
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    yield rest[5]
