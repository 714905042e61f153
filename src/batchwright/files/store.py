"""Files that users upload and batches write: a row with the metadata, and bytes in the store.

The bytes are written first, then the row: a process that dies in between leaves an object without a row, which the
garbage collector removes after a day.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar

from batchwright.db.database import Database, Row, Session
from batchwright.db.retry import retry_deadlocks, retry_unavailable
from batchwright.db.statements import statements
from batchwright.engine.jobs import new_id
from batchwright.errors import Conflict, NotFound, StorageError
from batchwright.storage import Store, Stored

T = TypeVar("T")
SQL = statements(__package__, "files.sql")
log = logging.getLogger(__name__)

BATCH = "batch"
BATCH_OUTPUT = "batch_output"
INPUT_KEPT_SECONDS = 30 * 24 * 3600
FOLDER = "files"
_RACES_MAX = 10
_TRIES_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file's row at the time it was read."""

    id: str
    tenant: str
    purpose: str
    filename: str
    bytes: int
    sha256: str
    key: str
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file whose bytes are in the store; it exists once its row does."""

    id: str
    tenant: str
    purpose: str
    filename: str
    stored: Stored
    expires_seconds: int | None = None
    idempotency_key: str | None = None


def new_file_id() -> str:
    """Ids grow with time, so they are also the order of a list."""
    return f"file-{new_id().hex}"


def object_key(file_id: str) -> str:
    """Where the bytes are; the last digits spread the files over 256 folders."""
    return f"{FOLDER}/{file_id[-2:]}/{file_id}"


async def persist(write: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeat a write if the answer to its commit was lost. Ids are created first, so a second write changes nothing."""
    return await retry_unavailable(retry_deadlocks(write), tries_max=_TRIES_MAX)


async def discard(store: Store, stored: Stored) -> None:
    """Remove bytes that no row names; the garbage collector finds any that cannot be removed now."""
    try:
        await store.delete(stored.key)
    except StorageError as error:
        log.warning("%s was not removed: %s", stored.key, error)


class Files:
    """The files of all tenants."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self.store = store

    async def add(self, file: NewFile, *, session: Session | None = None) -> tuple[File, bool]:
        """Add a row for the bytes; returns the file, and whether it is new. It also counts as new after a lost answer.

        If the idempotency key was used before for the same bytes and purpose, returns that file.
        """
        params: dict[str, Any] = {
            "id": file.id,
            "tenant": file.tenant,
            "purpose": file.purpose,
            "filename": file.filename,
            "bytes": file.stored.size,
            "sha256": file.stored.sha256,
            "key": file.stored.key,
            "idempotency_key": file.idempotency_key,
            "expires_seconds": file.expires_seconds,
        }
        if file.idempotency_key is not None:
            await self._database.ask(SQL["free_idempotency_key"], params, session)
        for _ in range(_RACES_MAX):
            if rows := await self._database.ask(SQL["insert"], params, session):
                return _file(rows[0]), True
            for row in await self._database.ask(SQL["known"], params, session):
                return _check_same(_file(row), file)
            # The file was deleted between the two statements, so the key is free now.
        raise Conflict("another request uses the Idempotency-Key at this moment; resend the request")

    async def get(self, id: str, *, tenant: str | None, also_gone: bool = False) -> File:
        """A file of this tenant, or of any (None); `also_gone` finds those that are deleted but still needed."""
        params = {"id": id, "tenant": tenant, "also_gone": also_gone}
        for row in await self._database.ask(SQL["get"], params):
            return _file(row)
        raise NotFound(f"there is no file {id!r}", kind="file", id=id)

    async def names(self, ids: Sequence[str]) -> dict[str, str]:
        """The names of these files, of any tenant; files that no longer exist are left out."""
        rows = await self._database.ask(SQL["names"], {"ids": [*ids]}) if ids else []
        return dict(rows)

    async def list(
        self,
        tenant: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> list[File]:
        params = {"tenant": tenant, "after": after, "limit": limit, "purpose": purpose}
        name = "list_newest" if order == "desc" else "list_oldest"
        name = name if purpose is None else f"{name}_of_purpose"
        return [_file(row) for row in await self._database.ask(SQL[name], params)]

    async def delete(self, id: str, *, tenant: str) -> None:
        """Hide the file from its user; the garbage collector removes the bytes when no batch needs them."""
        if not await self._database.ask(SQL["delete"], {"id": id, "tenant": tenant}):
            raise NotFound(f"there is no file {id!r}", kind="file", id=id)

    def content(self, file: File, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        return self.store.get(file.key, start, end)


def _check_same(known: File, wanted: NewFile) -> tuple[File, bool]:
    if known.id != wanted.id and (known.sha256, known.purpose) != (wanted.stored.sha256, wanted.purpose):
        raise Conflict(f"the Idempotency-Key was used before for another file, {known.id}", holder=known.id)
    return known, known.id == wanted.id


def _file(row: Row) -> File:
    return File(**dict(zip(File.__dataclass_fields__, row, strict=True)))
