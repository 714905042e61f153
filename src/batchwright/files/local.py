"""Copies local files into the store and out of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from batchwright.errors import Conflict, InvalidInput, NotFound
from batchwright.files.store import INPUT_KEPT_SECONDS, File, Files, NewFile, new_file_id, object_key, persist

_FILENAME_CHARACTERS_MAX = 512
_PIECE_BYTES = 1 << 20


def require_readable(file: Path) -> Path:
    """Refuse what cannot be read several times: the input is read more than once, and again to resume after a crash."""
    if file == Path("-"):
        raise InvalidInput("standard input cannot be read twice; write it to a file, and give its name")
    try:
        with file.open("rb"):
            return file
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror or error}") from error


def hash_file(file: Path) -> str:
    """The SHA-256 in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


async def read_file(file: Path) -> AsyncIterator[bytes]:
    """The file's bytes, one piece at a time."""
    opened = await asyncio.to_thread(file.open, "rb")
    with opened:
        while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
            yield piece


async def store_file(
    files: Files,
    path: Path,
    *,
    tenant: str,
    purpose: str,
    bytes_max: int,
    sha256: str | None = None,
    id: str | None = None,
) -> File:
    """Copy a local file into the store, for 30 days; refuses one whose checksum has changed."""
    id = id or new_file_id()
    stored = await files.store.put(object_key(id), path, limit=bytes_max)
    if sha256 is not None and stored.sha256 != sha256:
        await files.store.delete(stored.key)
        raise Conflict(f"{path} changed while it was read; wait until it is complete, and run the command again")
    new = NewFile(
        id=id,
        tenant=tenant,
        purpose=purpose,
        filename=path.name[-_FILENAME_CHARACTERS_MAX:],
        stored=stored,
        expires_seconds=INPUT_KEPT_SECONDS,
    )
    file, _ = await persist(lambda: files.add(new))
    return file


async def copy_file(files: Files, file_id: str | None, target: BinaryIO) -> None:
    """Write the content of a stored file; writes nothing if there is no such file."""
    if file_id is None:
        return
    try:
        file = await files.get(file_id, tenant=None)
    except NotFound:
        raise NotFound(f"the file {file_id} was deleted or has expired") from None
    async for chunk in files.content(file):
        await asyncio.to_thread(target.write, chunk)
