"""Keeps a password that was written into a command line out of the process list, which every user can read."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import typer

_STAT = Path("/proc/self/stat")
_ARG_START, _ARG_END = 45, 46
"""Positions in that file, counted after the program's name; in proc(5) they are the fields 48 and 49."""


def hide_password(url: str | None) -> str | None:
    """If a URL that was given by a flag has a password, hide it in the process list, and warn."""
    if url is None:
        return None
    from batchwright.db.check import describe, has_password

    if has_password(url):
        overwrite_argument(url, describe(url))
        typer.echo(
            "warning: --database-url has a password, which other users may have seen in the process list; set "
            "BATCHWRIGHT_DATABASE_URL instead, or leave the password out and name a file with it by PGPASSFILE",
            err=True,
        )
    return url


def overwrite_argument(old: str, new: str) -> bool:
    """Overwrite an argument of this process, in the same number of bytes; False where the system does not allow it."""
    if not _STAT.exists():
        return False
    fields = _STAT.read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not 0 < start < end:
        return False
    raw = os.fsencode(old)
    found = ctypes.string_at(start, end - start).find(raw)
    if found < 0:
        return False
    ctypes.memmove(start + found, os.fsencode(new).ljust(len(raw))[: len(raw)], len(raw))
    return True
