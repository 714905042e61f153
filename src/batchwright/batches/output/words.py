"""Reads the server's messages for failed lines from a batch's error file."""

from __future__ import annotations

from collections.abc import Collection

from batchwright.batches.journal.envelopes import words_of
from batchwright.errors import NotFound, StorageError
from batchwright.files.store import Files

_BYTES_MAX = 8 * 1024 * 1024
"""Only the beginning of an error file is read: frequent errors occur there too."""


async def read_words(files: Files, error_file_id: str | None, codes: Collection[str]) -> dict[str, str]:
    """By code, the message of the first line that failed with it; empty if the file cannot be read."""
    found: dict[str, str] = {}
    if error_file_id is None or not codes:
        return found
    try:
        file = await files.get(error_file_id, tenant=None)
        rest = b""
        async for chunk in files.content(file, 0, min(file.bytes, _BYTES_MAX)):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                code, words = words_of(line + b"\n")
                if words and code in codes:
                    found.setdefault(code, words)
            if len(found) == len(codes):
                break
    except (NotFound, StorageError):
        return found
    return found
