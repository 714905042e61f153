"""The files that a job may read: regular files inside the data folder. A file that changes while it is read is refused.

Whoever may submit a job chooses the path, so it must not lead out of that folder. The environment variable
EMISSIONS_DATA names the folder; the default is `data` in the worker's current folder. `{tenant}` in it is replaced by
the job's tenant.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

from batchwright.errors import Fatal, Transient

FOLDER = "EMISSIONS_DATA"
_TENANT = re.compile(r"(?!\.)[\w.-]+")


class DataFile:
    """One open file: its name, size and SHA-256, and whether it has changed."""

    def __init__(self, path: str, tenant: str, *, bytes_max: int) -> None:
        self.name = path
        self.reader = _open(_inside(path, tenant), path)
        try:
            found = os.fstat(self.reader.fileno())
            if found.st_size > bytes_max:
                raise Fatal(f"{path!r} has {found.st_size:,} bytes; the limit is {bytes_max:,}", code="file_too_large")
            self.size = found.st_size
            self._changed_at = found.st_mtime_ns
            self.sha256 = hashlib.file_digest(self.reader, "sha256").hexdigest()
        except BaseException:
            self.reader.close()
            raise

    def refuse_change(self) -> None:
        """Fail if the file changed after it was hashed; the next try starts over with the new file."""
        found = os.fstat(self.reader.fileno())
        if (found.st_size, found.st_mtime_ns) != (self.size, self._changed_at):
            raise Transient(f"{self.name!r} changed while it was read", code="file_changed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.reader.close()


def _inside(path: str, tenant: str) -> Path:
    """Check the path before any file is opened, so that a refusal does not reveal whether a file exists."""
    folder = os.environ.get(FOLDER) or "data"
    if "{tenant}" in folder and not _TENANT.fullmatch(tenant):
        raise Fatal(f"the tenant {tenant!r} cannot be the name of a folder", code="file_refused")
    root = Path(folder.replace("{tenant}", tenant)).resolve()
    try:
        found = (root / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # loops of links, NUL characters
        raise Fatal(f"{path!r} is not a usable path: {error}", code="file_refused") from error
    if not found.is_relative_to(root):
        raise Fatal(
            f"{path!r} is outside the data folder; name a file inside it (the worker's {FOLDER} sets the folder)",
            code="file_refused",
        )
    return found


def _open(found: Path, path: str) -> BufferedReader:
    """Do not follow a link that was put there meanwhile, and do not hang on a pipe without a writer."""
    try:
        descriptor = os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Fatal(
            f"there is no file {path!r} in the data folder (the worker's {FOLDER} sets it)", code="file_not_found"
        ) from error
    except (NotADirectoryError, PermissionError) as error:
        raise Fatal(f"{path!r} cannot be read: {error.strerror}", code="file_refused") from error
    except OSError as error:
        raise Transient(f"{path!r} cannot be read now: {error}", code="file_unreadable") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Fatal(f"{path!r} is not a regular file", code="file_refused")
    return os.fdopen(descriptor, "rb")
