"""The work folder of a machine: one folder per batch, with its input, its plan and the journals of its shards.

    work/id                         the id of this folder: journals are registered under it
    work/<batch>/input.jsonl        linked or downloaded once, read by every worker of this machine
    work/<batch>/model_map.json     with plans/ and rejected.plan: the plan, as the planner wrote or the store kept it
    work/<batch>/<shard>.<claim>.seg
    work/<batch>/in_use             flocked (shared) by every worker that uses it; the collector locks it exclusively

All of it can be restored, except journals that are not registered yet, which hold answers that were paid for.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import orjson

from batchwright.batches.plan.planfile import MODEL_MAP, PLANS, REJECTED, plan_path, plan_paths, sync_folder
from batchwright.errors import ConfigurationError, NotFound, StorageError
from batchwright.private import make_folders, open_private, write_private
from batchwright.storage import Store

INPUT = "input.jsonl"
IN_USE = "in_use"
JOURNAL = ".seg"
GONE = ".gone"
_HOST_DIGITS = 12
_LOCKED_SECONDS = (0.01, 0.05)
_PREPARING = "preparing"
_USED_SECONDS = 5.0


def plan_key(batch_id: str, name: str) -> str:
    """Where the store keeps a file of the plan."""
    return f"batches/{batch_id}/{name}"


def segments_folder(batch_id: str, shard: int | None = None) -> str:
    """Where the store keeps the answers of a batch, or those of one shard."""
    folder = f"batches/{batch_id}/segments"
    return folder if shard is None else f"{folder}/{shard}"


def segment_key(batch_id: str, shard: int, claim: int, host: str, start: int, end: int) -> str:
    """Where the store keeps a range of a journal.

    It is named after its machine and its byte range, whose content never changes: a retry, or a late zombie, puts the
    same object again. After a failover that lost commits, two machines may have the same claim number; then their
    journals differ, and so do their keys.
    """
    return f"{segments_folder(batch_id, shard)}/{claim}.{host[:_HOST_DIGITS]}.{start}-{end}{JOURNAL}"


def journal_of_key(key: str) -> tuple[int, int]:
    """The shard whose answers are in this object, and the number of the journal that it is a range of."""
    _, _, _, shard, name = key.split("/")
    return int(shard), int(name.partition(".")[0])


class InputDamaged(StorageError):
    """The object has another size than the file that was stored: a part of it would look like a whole file."""


class Workspace:
    """The work folder."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self._id: str | None = None
        self._used = 0
        self._measured_at = float("-inf")

    @property
    def id(self) -> str:
        """The name of this folder, which outlives processes and is shared by all that use it."""
        if self._id is None:
            make_folders(self.root)
            path = self.root / "id"
            draft = path.with_name(f"id.{uuid.uuid4().hex}.tmp")
            write_private(draft, uuid.uuid4().hex)
            with suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
            self._id = path.read_text()
        return self._id

    def require(self) -> None:
        """Refuse a folder that cannot be used: a worker with it would fail shard after shard, and claim the next."""
        try:
            make_folders(self.root)
            if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigurationError(
                f"the work folder {self.root} cannot be used: {error.strerror}; give it to this user, or set "
                "batches.work_dir"
            ) from error

    def folder(self, batch_id: str) -> Path:
        return self.root / batch_id

    def input(self, batch_id: str) -> Path:
        return self.folder(batch_id) / INPUT

    def journal(self, batch_id: str, shard: int, claim: int) -> Path:
        return self.folder(batch_id) / f"{shard}.{claim}{JOURNAL}"

    def journals(self, batch_id: str, shard: int | None = None) -> list[tuple[int, int, Path]]:
        """The journals of a batch that are here, or of one shard: (shard, claim, path)."""
        found = []
        for path in self.folder(batch_id).glob(f"*{JOURNAL}"):
            left, _, right = path.name.removesuffix(JOURNAL).partition(".")
            if left.isdecimal() and right.isdecimal() and shard in (None, int(left)):
                found.append((int(left), int(right), path))
        return sorted(found)

    def has_room(self) -> bool:
        """Whether another batch may be started here."""
        if time.monotonic() - self._measured_at > _USED_SECONDS:
            self._used = _bytes_below(self.root)
            self._measured_at = time.monotonic()
        return self._used < self.limit

    @contextmanager
    def use(self, batch_id: str) -> Iterator[Path]:
        """Keep the garbage collector from removing the folder."""
        descriptor = self._lock(self.folder(batch_id))
        try:
            yield self.folder(batch_id)
        finally:
            os.close(descriptor)

    @staticmethod
    def _lock(folder: Path) -> int:
        """A lock on the file that exists now: the file that we waited for may have been removed with its folder."""
        while True:
            make_folders(folder)
            with suppress(FileNotFoundError):
                descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                with suppress(FileNotFoundError):
                    if (folder / IN_USE).stat().st_ino == os.fstat(descriptor).st_ino:
                        return descriptor
                os.close(descriptor)

    def remove(self, batch_id: str) -> bool:
        """Remove a batch's folder unless it is in use. It is renamed first, so that no other process can enter it."""
        folder = self.folder(batch_id)
        doomed = self.root / f"{batch_id}.{uuid.uuid4().hex}{GONE}"
        try:
            descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / IN_USE).stat().st_ino != os.fstat(descriptor).st_ino:
                return False
            folder.rename(doomed)
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            os.close(descriptor)
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def in_use(self, batch_id: str) -> bool:
        """Whether `remove` would be refused."""
        try:
            descriptor = os.open(self.folder(batch_id) / IN_USE, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def size(self, batch_id: str) -> int | None:
        """The bytes of a batch's folder; None if there is none."""
        folder = self.folder(batch_id)
        return _bytes_below(folder) if folder.is_dir() else None

    def sweep(self) -> None:
        """Remove what is left of folders whose removal was interrupted."""
        for doomed in self.root.glob(f"*{GONE}"):
            shutil.rmtree(doomed, ignore_errors=True)

    async def fetch_input(self, batch_id: str, store: Store, key: str, size: int) -> Path:
        """The input as a file of this machine: linked where the store is a folder, else downloaded once."""
        path = self.input(batch_id)
        async with self._preparing(batch_id):
            if not path.is_file() or path.stat().st_size != size:
                await fetch_object(store, key, path)
            if (found := path.stat().st_size) != size:
                raise InputDamaged(f"The store has {found} of the {size} bytes of the input file. Upload it again.")
        return path

    async def fetch_plan(self, batch_id: str, store: Store) -> Path:
        """The plan's folder, complete; NotFound if the batch is not planned yet."""
        folder = self.folder(batch_id)
        async with self._preparing(batch_id):
            if not (folder / MODEL_MAP).is_file():
                document = b"".join([part async for part in store.get(plan_key(batch_id, MODEL_MAP))])
                make_folders(folder / PLANS)
                for safe in orjson.loads(document)["safe_to_model"]:
                    path = plan_path(folder, safe)
                    await fetch_object(store, plan_key(batch_id, f"{PLANS}/{path.name}"), path)
                await fetch_object(store, plan_key(batch_id, REJECTED), folder / REJECTED)
                await fetch_object(store, plan_key(batch_id, MODEL_MAP), folder / MODEL_MAP)
        return folder

    async def keep_plan(self, batch_id: str, store: Store) -> None:
        """Put the plan into the store, the model map last, because a plan without it does not count."""
        folder = self.folder(batch_id)
        names = [f"{PLANS}/{path.name}" for path in plan_paths(folder)]
        for name in (*names, REJECTED, MODEL_MAP):
            await store.put_file(plan_key(batch_id, name), folder / name)

    @asynccontextmanager
    async def _preparing(self, batch_id: str) -> AsyncIterator[None]:
        """One task at a time on this machine.

        No thread waits for the lock: many shards begin together, and its holder may need the last free thread.
        """
        descriptor = os.open(self.folder(batch_id) / _PREPARING, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while True:
                if _lock_now(descriptor):
                    break
                await asyncio.sleep(random.uniform(*_LOCKED_SECONDS))
            yield
        finally:
            os.close(descriptor)


def _lock_now(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def fetch_object(store: Store, key: str, path: Path) -> None:
    """Fetch an object into a file, under another name first: a file that exists is complete."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    local = store.local_path(key)
    try:
        if local is not None:
            try:
                os.link(local, draft)
            except FileNotFoundError:
                raise NotFound(f"there is no object {key}") from None
            except OSError:  # another file system
                await asyncio.to_thread(_copy, local, draft)
        else:
            await _download(store, key, draft)
        draft.replace(path)
        await asyncio.to_thread(sync_folder, path.parent)
    finally:
        draft.unlink(missing_ok=True)


async def _download(store: Store, key: str, path: Path) -> None:
    with open_private(path, "wb") as file:
        async for part in store.get(key):
            await asyncio.to_thread(file.write, part)
        await asyncio.to_thread(_sync, file.fileno())


def _copy(local: Path, draft: Path) -> None:
    with local.open("rb") as file, open_private(draft, "xb") as copy:
        shutil.copyfileobj(file, copy)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _bytes_below(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total
