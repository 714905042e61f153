"""Objects in a folder, with plain file calls: obstore's own local store does not fsync, and keeps the drafts of killed
processes.

    write     draft in .drafts/ → fsync → rename or link to its key → fsync of the folders

So whenever a process dies, a key has the whole object or none. Once `write` has returned, the object survives a power
cut.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import stat
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import ParamSpec, TypeVar

from batchwright.errors import Conflict, InvalidInput, NotFound, StorageError, StorageFull, StorageUnavailable
from batchwright.private import is_open_to_others, make_folders, open_private
from batchwright.storage.backend import FULL, Found
from batchwright.storage.contents import gathered
from batchwright.storage.settings import MIB

P = ParamSpec("P")
T = TypeVar("T")

DRAFTS = ".drafts"
PAGE = 1_000
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES}
_RACES_MAX = 100


class Local:
    """A folder as an object store."""

    part_bytes = MIB

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().resolve()
        self._drafts = self._root / DRAFTS

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> str | None:
        draft = await self._call(key, _Draft, self._drafts)
        try:
            async for chunk in gathered(chunks, self.part_bytes):
                await self._call(key, draft.write, chunk)
            return await self._call(key, self._publish, draft, key)
        finally:
            await asyncio.to_thread(draft.discard)

    async def adopt(self, key: str, path: Path) -> str | None:
        return await self._call(key, self._link, path, key)

    async def read(self, key: str, start: int, end: int, etag: str | None) -> bytes:
        return await self._call(key, self._read, key, start, end, etag)

    async def head(self, key: str) -> Found | None:
        return await self._call(key, self._head, key)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._call(keys[0], self._delete, keys)

    async def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sequence[Found]]:
        walk = _walk(self._root / prefix, f"{prefix}/" if prefix else "", after or "")
        while page := await self._call(prefix, list, itertools.islice(walk, PAGE)):
            yield page

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    async def sweep(self, older_than_seconds: float) -> int:
        return await self._call(DRAFTS, self._sweep, time.time() - older_than_seconds)

    def __str__(self) -> str:
        return str(self._root)

    def _path(self, key: str) -> Path:
        return self._root / key

    async def _call(self, key: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._explained(key):
            return await asyncio.to_thread(work, *args, **kwargs)

    def _publish(self, draft: _Draft, key: str) -> str | None:
        found = draft.finish()
        self._place(draft.path, key, os.replace)
        return _etag(found)

    def _place(self, draft: Path, key: str, move: Callable[[Path, Path], None]) -> None:
        """Give the draft its name; creates folders again if the deletion of their last object removed them."""
        target = self._path(key)
        for _ in range(_RACES_MAX):
            with suppress(FileNotFoundError):
                _make_folders(target.parent)
                move(draft, target)
                self._sync_folders(target.parent)
                return
            draft.stat()
        raise StorageUnavailable(f"the folder {target.parent} disappears each time it is created")

    def _sync_folders(self, folder: Path) -> None:
        """Sync all folders up to the root: a process that created one of them may have died before it synced it."""
        for one in (folder, *folder.parents):
            _sync_folder(one)
            if one == self._root:
                break

    def _link(self, path: Path, key: str) -> str | None:
        if is_open_to_others(path.stat().st_mode):
            return None  # a copy is private, and the file keeps its permissions
        draft = _draft_path(self._drafts)
        try:
            os.link(path, draft)
        except OSError as error:
            if error.errno in _CANNOT_LINK:
                return None
            raise
        try:
            found = _sync_file(draft)
            self._place(draft, key, os.replace)
        finally:
            draft.unlink(missing_ok=True)  # renaming a link over another link to the same file leaves both names
        return _etag(found)

    def _head(self, key: str) -> Found | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            info = self._path(key).stat()
            return _found(key, info) if stat.S_ISREG(info.st_mode) else None
        return None

    def _read(self, key: str, start: int, end: int, etag: str | None) -> bytes:
        try:
            file = self._path(key).open("rb", buffering=0)
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(key) from error
        with file:
            if etag is not None and _etag(os.fstat(file.fileno())) != etag:
                raise Conflict(f"{key} was replaced while it was read: read it again from its beginning")
            return os.pread(file.fileno(), end - start, start)

    def _delete(self, keys: Sequence[str]) -> None:
        folders = set()
        for key in keys:
            with suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._path(key).unlink()
            folders.add(self._path(key).parent)
        for folder in folders:
            self._prune(folder)

    def _prune(self, folder: Path) -> None:
        """Remove folders that are now empty; stops at the first that is not."""
        with suppress(OSError):
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent
        with suppress(OSError):
            _sync_folder(folder)

    def _sweep(self, before: float) -> int:
        removed = 0
        with suppress(FileNotFoundError):
            for draft in self._drafts.iterdir():
                with suppress(FileNotFoundError):
                    if draft.stat().st_mtime < before:
                        draft.unlink()
                        removed += 1
        return removed

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"there is no object {key}") from error
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise InvalidInput(f"{key} cannot be both an object and a folder of others") from error
        except OSError as error:
            raise self._storage_error(key, error) from error

    def _storage_error(self, key: str, error: OSError) -> StorageError:
        where = f"{key} in the folder {self._root}: {error.strerror or error}"
        if error.errno in FULL:
            return StorageFull(f"no space for {where}; free some space, or change storage.url")
        if error.errno in _REFUSED:
            return StorageError(f"no permission for {where}; let this user own the folder, or change storage.url")
        return StorageUnavailable(where)


class _Draft:
    """A file that is not visible yet. A lock inside the file object keeps it from being closed during a write."""

    def __init__(self, folder: Path) -> None:
        self.path = _draft_path(folder)
        self.file = open_private(self.path, "xb")

    def write(self, chunk: bytes) -> None:
        self.file.write(chunk)

    def finish(self) -> os.stat_result:
        self.file.flush()
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno())

    def discard(self) -> None:
        with suppress(OSError):  # data that could not be written is not needed
            self.file.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def _draft_path(folder: Path) -> Path:
    if not folder.is_dir():
        _make_folders(folder)
    return folder / uuid.uuid4().hex


def _make_folders(folder: Path) -> None:
    try:
        make_folders(folder)
    except FileExistsError as error:
        if folder.is_file():  # otherwise it existed a moment ago, and a deletion has removed it since
            raise NotADirectoryError(folder) from error


def _walk(folder: Path, prefix: str, after: str) -> Iterator[Found]:
    """Objects in the order of whole keys: `a-b` comes before `a/b`, so a folder is sorted with its slash."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name + "/" * entry.is_dir() for entry in entries if entry.name[0] != ".")
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        key = prefix + name
        if key <= after and not after.startswith(key):
            continue
        if name.endswith("/"):
            yield from _walk(folder / name, key, after)
        elif key != after:
            with suppress(FileNotFoundError):
                yield _found(key, (folder / name).stat())


def _found(key: str, info: os.stat_result) -> Found:
    modified_at = datetime.fromtimestamp(info.st_mtime, UTC)
    return Found(key=key, size=info.st_size, etag=_etag(info), modified_at=modified_at)


def _etag(info: os.stat_result) -> str:
    return f"{info.st_ino:x}-{info.st_mtime_ns:x}-{info.st_size:x}"


def _sync_file(path: Path) -> os.stat_result:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
