"""Uploads: a large file comes in parts, each stored whole or not at all, and becomes a file in one commit.

    create ──▶ pending ── complete ──▶ completed: the file exists
                  ├────── cancel ────▶ cancelled
                  └── after an hour ─▶ expired

`complete` copies the parts into one object under a new file id. Then one transaction ends the upload and adds the file.
A process that dies before that commit leaves an object that no row names, and the upload is still pending. Of two calls
at the same time one commits; the other returns the file of the first. The garbage collector removes the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from batchwright.db.database import Database, Row, Session
from batchwright.db.statements import statements
from batchwright.engine.jobs import new_id
from batchwright.errors import Conflict, InvalidInput, NotFound, StorageError
from batchwright.files.store import File, Files, NewFile, discard, new_file_id, object_key, persist
from batchwright.states import UploadStatus
from batchwright.storage import Store, Stored

SQL = statements(__package__, "uploads.sql")

FOLDER = "uploads"
OPEN_SECONDS = 3600
PARTS_MAX = 10_000
PART_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An upload's row at the time it was read."""

    id: str
    tenant: str
    status: UploadStatus
    purpose: str
    filename: str
    bytes: int
    expires_seconds: int | None
    """How long its file will be kept."""
    part_ids: list[str] | None
    """The parts of its file, once it is completed."""
    file_id: str | None
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUpload:
    """A request to upload a file."""

    id: str
    tenant: str
    purpose: str
    filename: str
    mime_type: str
    bytes: int
    expires_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part that is in the store."""

    id: str
    upload_id: str
    bytes: int
    key: str
    created_at: datetime


def new_upload_id() -> str:
    return f"upload_{new_id().hex}"


def new_part_id() -> str:
    return f"part_{new_id().hex}"


def part_key(upload_id: str, part_id: str) -> str:
    return f"{FOLDER}/{upload_id}/{part_id}"


class Uploads:
    """The uploads of all tenants."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files

    @property
    def store(self) -> Store:
        return self._files.store

    async def create(self, new: NewUpload) -> Upload:
        """Create an upload; a repeated call returns the same one."""
        fields = {name: getattr(new, name) for name in NewUpload.__dataclass_fields__}
        await self._database.ask(SQL["insert"], {**fields, "open_seconds": OPEN_SECONDS})
        return await self.get(new.id, tenant=new.tenant)

    async def get(self, id: str, *, tenant: str, session: Session | None = None) -> Upload:
        for row in await self._database.ask(SQL["get"], {"id": id, "tenant": tenant}, session):
            return _upload(row)
        raise NotFound(f"there is no upload {id!r}", kind="upload", id=id)

    async def get_pending(self, id: str, verb: str, *, tenant: str) -> Upload:
        upload = await self.get(id, tenant=tenant)
        if upload.status is not UploadStatus.PENDING:
            raise Conflict(f"Cannot {verb} an upload with status '{upload.status.value}'.")
        return upload

    async def add_part(self, upload_id: str, part_id: str, stored: Stored, *, tenant: str) -> Part:
        """Add a row for the bytes; a repeated call returns the same part."""
        ids = {"id": part_id, "upload_id": upload_id}
        params = {**ids, "tenant": tenant, "bytes": stored.size, "key": stored.key, "parts_max": PARTS_MAX}
        for statement in ("add_part", "part"):
            for row in await self._database.ask(SQL[statement], params):
                return _part(row)
        upload = await self.get_pending(upload_id, "add a part to", tenant=tenant)
        raise InvalidInput(
            f"The upload {upload_id} accepts no more parts: it was created for {upload.bytes} bytes, and its parts, "
            f"including resent ones, may have at most twice that size and number at most {PARTS_MAX}.",
            param="data",
        )

    async def cancel(self, id: str, *, tenant: str) -> Upload:
        """An upload that is already cancelled is returned as it is."""
        for row in await self._database.ask(SQL["cancel"], {"id": id, "tenant": tenant}):
            return _upload(row)
        upload = await self.get(id, tenant=tenant)
        if upload.status is not UploadStatus.CANCELLED:
            raise Conflict(f"Cannot cancel an upload with status '{upload.status.value}'.")
        return upload

    async def complete(
        self, id: str, part_ids: Sequence[str], *, tenant: str, md5: str | None = None
    ) -> tuple[Upload, File]:
        """Create the file from these parts, in this order; a second call returns the same file."""
        upload = await self.get(id, tenant=tenant)
        if upload.status is UploadStatus.PENDING:
            upload = await self._make(upload, await self._parts(upload, part_ids), md5)
        if upload.status is not UploadStatus.COMPLETED:
            raise Conflict(f"Cannot complete an upload with status '{upload.status.value}'.")
        if upload.part_ids != list(part_ids):
            raise Conflict(f"The upload {id} was completed with other parts, or in another order.")
        return upload, await self._files.get(upload.file_id or "", tenant=tenant)

    async def expire(self, *, limit: int, session: Session | None = None) -> int:
        """End uploads that have expired; returns how many."""
        return len(await self._database.ask(SQL["expire"], {"limit": limit}, session))

    async def _parts(self, upload: Upload, ids: Sequence[str]) -> list[Part]:
        """The parts in the order of the ids; together they must have the size that the upload was created for."""
        rows = await self._database.ask(SQL["parts"], {"upload_id": upload.id, "ids": list(ids)})
        known = {part.id: part for part in map(_part, rows)}
        for id in ids:
            if id not in known:
                raise InvalidInput(f"Invalid 'part_ids': {upload.id} has no part '{id}'.", param="part_ids")
        if len(ids) > len(known):
            raise InvalidInput("Invalid 'part_ids': a part is listed twice.", param="part_ids")
        size = sum(known[id].bytes for id in ids)
        if size != upload.bytes:
            message = f"The parts have {size} bytes, but the upload was created for {upload.bytes} bytes."
            raise InvalidInput(f"Invalid 'part_ids': {message}", param="part_ids")
        return [known[id] for id in ids]

    async def _make(self, upload: Upload, parts: Sequence[Part], md5: str | None) -> Upload:
        """Join the parts and end the upload; returns its final state, whichever call ended it."""
        file_id = new_file_id()
        try:
            stored = await self.store.put(object_key(file_id), self._join(parts, md5))
        except NotFound as error:
            latest = await self.get(upload.id, tenant=upload.tenant)
            if latest.status is UploadStatus.PENDING:
                raise StorageError(f"a part of {upload.id} is gone from the store: {error}") from error
            return latest  # it ended meanwhile, and the collector removed its parts
        new = NewFile(
            id=file_id,
            tenant=upload.tenant,
            purpose=upload.purpose,
            filename=upload.filename,
            stored=stored,
            expires_seconds=upload.expires_seconds,
        )
        # If the answer to the commit is lost, the bytes stay: the file may exist.
        latest = await persist(lambda: self._commit(upload, [part.id for part in parts], new))
        if latest.file_id != file_id:
            await discard(self.store, stored)
        return latest

    def _join(self, parts: Sequence[Part], md5: str | None) -> Callable[[], AsyncIterator[bytes]]:
        """A stream that can be restarted if the store fails. Wrong bytes end it, and then nothing is stored."""

        async def chunks() -> AsyncIterator[bytes]:
            digest = hashlib.md5(usedforsecurity=False)
            for part in parts:
                async for chunk in self.store.get(part.key):
                    if md5 is not None:
                        digest.update(chunk)
                    yield chunk
            if md5 is not None and digest.hexdigest() != md5.lower():
                raise InvalidInput(
                    f"Invalid 'md5': the parts together have {digest.hexdigest()}, not '{md5[:100]}'.", param="md5"
                )

        return chunks

    async def _commit(self, upload: Upload, part_ids: list[str], new: NewFile) -> Upload:
        params = {"id": upload.id, "tenant": upload.tenant, "part_ids": part_ids, "file_id": new.id}
        async with self._database.transaction() as session:
            for row in await self._database.ask(SQL["complete"], params, session):
                await self._files.add(new, session=session)
                return _upload(row)
        return await self.get(upload.id, tenant=upload.tenant)


def _upload(row: Row) -> Upload:
    values = dict(zip(Upload.__dataclass_fields__, row, strict=True))
    return Upload(**{**values, "status": UploadStatus(values["status"])})


def _part(row: Row) -> Part:
    return Part(**dict(zip(Part.__dataclass_fields__, row, strict=True)))
