"""Files and folders that only our own user can read, whatever the umask is.

The call that creates a file sets its mode. We do not change the umask: it applies to the whole process, which may be
another program's, and to the files that users name themselves.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal, cast

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_folders(folder: Path) -> list[Path]:
    """Create the missing folders of a path, private; existing ones keep their permissions. Returns the new folders."""
    try:
        folder.mkdir(mode=FOLDER_MODE)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        made = make_folders(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        return [*made, folder]
    except OSError:
        if not folder.is_dir():
            raise
        return []
    return [folder]


def open_private(path: Path, mode: Literal["wb", "xb"]) -> BinaryIO:
    """Open a private file for writing."""
    return cast("BinaryIO", open(path, mode, opener=_open))


def write_private(path: Path, text: str) -> None:
    with open_private(path, "wb") as file:
        file.write(text.encode())


def is_open_to_others(mode: int) -> bool:
    """Whether users other than the owner may read, change or enter something with this mode."""
    return bool(mode & _OTHERS)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
