"""What the server said of lines that failed, out of a batch's error file."""

from __future__ import annotations

from collections.abc import Collection

from batchwright.batches.journal.envelopes import words_of
from batchwright.errors import NotFound, StorageError
from batchwright.files.store import Files

_BYTES_MAX = 8 * 1024 * 1024
"""So much of an error file is looked at: the frequent errors are near its beginning."""


async def read_words(files: Files, error_file_id: str | None, codes: Collection[str]) -> dict[str, str]:
    """By code, the words of the first line that failed with it; a file that cannot be read has none."""
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
