"""The garbage collector: removes data that no user can see and no batch needs any more, a little at a time.

                expiry            10 minutes, no batch reads it
    file ───────────────▶ deleted ─────────────────────────────▶ object, then row

                1 hour, or 7 days to be repaired
    ended batch ───────────────────────────────▶ answers unreadable ─▶ objects, segments, work folder ─▶ row, and its
                                                                                          (30 days)      jobs let go

                              10 minutes                        30 days
    upload ── ended or expired ────────▶ objects, rows of parts ────────▶ row

    object or work folder without a row, a day or an hour old ─▶ removed, if it is ours

Users never see a file whose bytes are gone: first the file becomes invisible, then its bytes are removed, then its row,
and each step is committed before the next. So after any failure the next sweep finds the rest, and two sweeps at the
same time do no harm. An object without a row may belong to another database, if two of them share a store or a work
folder by mistake. So such objects are removed only if this database was the first to leave its name there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from batchwright.batches.journal.workspace import Workspace
from batchwright.batches.settings import BatchSettings
from batchwright.db.database import Row, Session
from batchwright.db.statements import statements
from batchwright.engine.owned import JOBS_VIEW
from batchwright.engine.queue import Queue
from batchwright.engine.retention import RetentionSettings
from batchwright.engine.upkeep import Round
from batchwright.errors import StorageError, StorageUnavailable
from batchwright.files.store import FOLDER as FILES
from batchwright.files.store import Files, object_key
from batchwright.files.uploads import FOLDER as UPLOADS
from batchwright.files.uploads import Uploads
from batchwright.private import write_private
from batchwright.providers.jobs import RemoteJobs
from batchwright.storage import Found, Store

SQL = statements(__package__, "collector.sql", parts=JOBS_VIEW)
log = logging.getLogger(__name__)

COMPONENT = "garbage-collector"
"""For `open_store(component=…)`: the store's metric counts deletions by the collector under this name."""
OWNER = "database"
"""The object in the store, and the file in the work folder, with the name of the database that they belong to."""

_EVERY_SECONDS = 600.0
_UNKNOWN_EVERY_SECONDS = 6 * 3600.0
_HALF_WRITTEN_EVERY_SECONDS = 3600.0
# Rescue cannot run during a round, and the server ends a transaction that is idle for ten seconds. So no step begins
# later than _ROUND_SECONDS_MAX in a round, and none waits longer than _PATIENCE_SECONDS for the store or the disk.
_ROUND_SECONDS_MAX = 1.0
_PATIENCE_SECONDS = 3.0
_ROWS = 500
_FOLDERS = 10
# Some stores delete objects one by one, and a step that is too large to end in time would be repeated forever.
_FILES = 50
_OBJECTS = 200
_OBJECTS_LISTED = 1_000
_SEGMENTS = 5_000
# Any request that saw the file before it was deleted has ended after this time.
_GRACE_SECONDS = 600.0
_HOUR_SECONDS = 3600.0
_DAY_SECONDS = 86_400.0
_KEYS_KEPT_SECONDS = 30 * _DAY_SECONDS
_SECONDS_MAX = 36_500 * _DAY_SECONDS
_FOLDER_AGE = timedelta(hours=1)
_OBJECT_AGE = timedelta(days=1)
_BEGINNING = (datetime(1, 1, 1, tzinfo=UTC), "")
_BATCHES = "batches"
_REFUSALS_MAX = 10
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
_OWNER_ID = re.compile(r"(batch|upload)_[0-9a-f]{32}")
_FILE_KEY = re.compile(rf"{FILES}/[0-9a-f]{{2}}/(file-[0-9a-f]{{32}})")


@dataclass(frozen=True, slots=True)
class Amount:
    """How many there are of a kind, and the bytes of those that have some."""

    count: int = 0
    bytes: int = 0


_NONE = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed or, in a dry run, would be."""

    expired_files: Amount = _NONE
    """Files that expired; their bytes are counted when they are removed."""
    deleted_files: Amount = _NONE
    ended_batches: Amount = _NONE
    """Batches whose answers, plans and journals were removed."""
    batch_objects: Amount = _NONE
    """Plans and answers that the store kept for them."""
    batch_segments: Amount = _NONE
    """Rows that name the places of their answers."""
    work_folders: Amount = _NONE
    upload_parts: Amount = _NONE
    """Parts of uploads that have ended; a completed upload has its file."""
    idempotency_keys: Amount = _NONE
    old_batches: Amount = _NONE
    """Batches that users can no longer retrieve."""
    old_uploads: Amount = _NONE
    unknown_objects: Amount = _NONE
    """Objects that no row names."""
    half_written: Amount = _NONE
    """Unfinished objects of killed processes in the store's folder; a dry run does not look for them."""

    @property
    def bytes(self) -> int:
        return sum(amount.bytes for amount in self.by_kind().values())

    def by_kind(self) -> dict[str, Amount]:
        return {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        found = [(kind, amount) for kind, amount in self.by_kind().items() if amount.count]
        return ", ".join(f"{kind}: {one.count}" + f" ({one.bytes} bytes)" * (one.bytes > 0) for kind, one in found)


class Collector:
    """The rounds of one worker, or one manual sweep. The position of a round is kept in memory."""

    def __init__(
        self, queue: Queue, store: Store, workspace: Workspace, settings: BatchSettings, retention: RetentionSettings
    ) -> None:
        self._queue = queue
        self._store = store
        self._remote_jobs = RemoteJobs(queue)
        self._uploads = Uploads(queue.database, Files(queue.database, store))
        self._workspace = workspace
        self._batches_days = retention.ended_days
        self._kept = {
            "kept_seconds": min(settings.segments_kept_hours * _HOUR_SECONDS, _SECONDS_MAX),
            "failed_kept_seconds": min(settings.failed_segments_kept_days * _DAY_SECONDS, _SECONDS_MAX),
        }

    def rounds(self) -> list[Round]:
        """For `Worker(rounds=…)`."""
        sweeps = (
            ("garbage", _EVERY_SECONDS, self._chores()),
            ("unknown objects", _UNKNOWN_EVERY_SECONDS, self._orphan_chores()),
            ("half-written objects", _HALF_WRITTEN_EVERY_SECONDS, [self._remove_half_written]),
        )
        return [Round(name, every, functools.partial(self._round, _Sweep(chores))) for name, every, chores in sweeps]

    async def collect(self, dry_run: bool) -> Collected:
        """Collect everything once; a dry run changes nothing and returns what would be removed."""
        sweep = _Sweep([*self._chores(), *self._orphan_chores(), self._remove_half_written], is_dry=dry_run)
        while await sweep.chore(sweep, self._queue.database) or sweep.next_chore():
            pass
        return sweep.collected()

    def _chores(self) -> list[_Chore]:
        """In this order; a dry run considers what each chore would leave to the later ones."""
        return [
            self._expire_files,
            self._remove_files,
            self._expire_uploads,
            self._remove_parts,
            self._let_segments_go,
            self._remove_leftovers,
            self._remove_folders,
            functools.partial(self._clear_keys, "files"),
            functools.partial(self._clear_keys, "batches"),
            self._remove_uploads,
            *([] if math.isinf(self._batches_days) else [self._remove_batches]),
        ]

    def _orphan_chores(self) -> list[_Chore]:
        return [
            self._remove_unknown_files,
            functools.partial(self._remove_unknown_leftovers, _BATCHES, "known_batches"),
            functools.partial(self._remove_unknown_leftovers, UPLOADS, "known_uploads"),
        ]

    async def _round(self, sweep: _Sweep, session: Session) -> bool:
        """Continue one chore, to its end or until the round's time is up; its changes are then committed."""
        until = time.monotonic() + _ROUND_SECONDS_MAX
        has_more = True
        try:
            while has_more and time.monotonic() < until:
                place = sweep.place
                sweep.until = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
                has_more = await sweep.chore(sweep, session)
        except (StorageUnavailable, TimeoutError) as error:
            log.warning("garbage collection waits for the store or the disk: %s", str(error) or "no answer in time")
            has_more = False
        except StorageError as error:
            log.warning("some garbage was not removed: %s", error)
            sweep.refusals += 1
            has_more = sweep.place != place and sweep.refusals < _REFUSALS_MAX
        except Exception:
            sweep.next_chore()
            sweep.found.clear()
            raise
        if found := str(sweep.collected()):
            log.info("garbage collected: %s", found)
        sweep.found.clear()
        return has_more or sweep.next_chore()

    # Files ------------------------------------------------------------------------------------------------------

    async def _expire_files(self, sweep: _Sweep, session: Session) -> bool:
        rows = await self._page(sweep, session, "expired_files")
        ids = [id for _, id in rows]
        if ids and not sweep.is_dry:
            ids = [id for (id,) in await self._ask(session, "delete_expired", ids=ids)]
        sweep.note("expired_files", len(ids))
        return len(rows) == _ROWS

    async def _remove_files(self, sweep: _Sweep, session: Session) -> bool:
        rows = await self._page(sweep, session, "deleted_files", limit=_FILES, grace_seconds=_GRACE_SECONDS)
        free = [row[1:4] for row in rows if not row[4]]
        sizes = [size for _, _, size in free]
        if free and not sweep.is_dry:
            await self._delete(sweep, [key for _, key, _ in free])
            sizes = [size for (size,) in await self._ask(session, "remove_files", ids=[id for id, _, _ in free])]
        sweep.note("deleted_files", len(sizes), sum(sizes))
        return len(rows) == _FILES

    # Uploads ----------------------------------------------------------------------------------------------------

    async def _expire_uploads(self, sweep: _Sweep, session: Session) -> bool:
        if sweep.is_dry:
            return False
        return await self._uploads.expire(limit=_ROWS, session=session) == _ROWS

    async def _remove_parts(self, sweep: _Sweep, session: Session) -> bool:
        """Everything in the folder of an upload, also a part whose writer died before its row was written."""
        before = sweep.place
        rows = await self._page(sweep, session, "upload_leftovers", limit=1, grace_seconds=_GRACE_SECONDS)
        for _, id in rows:
            found = await self._remove_some(sweep, f"{UPLOADS}/{id}")
            sweep.note("upload_parts", len(found), sum(one.size for one in found))
            if len(found) == _OBJECTS:
                sweep.place = before
            elif not sweep.is_dry:
                await self._ask(session, "remove_parts", id=id)
        return bool(rows)

    async def _remove_uploads(self, sweep: _Sweep, session: Session) -> bool:
        rows = await self._page(sweep, session, "old_uploads", keep_seconds=_KEYS_KEPT_SECONDS)
        ids = [id for _, id in rows]
        if ids and not sweep.is_dry:
            ids = [id for (id,) in await self._ask(session, "remove_uploads", ids=ids)]
        sweep.note("old_uploads", len(ids))
        return len(rows) == _ROWS

    # Leftovers of batches ---------------------------------------------------------------------------------------

    async def _let_segments_go(self, sweep: _Sweep, session: Session) -> bool:
        """Make segments unreadable; they are removed in a later transaction."""
        if sweep.is_dry:
            return False
        return len(await self._ask(session, "let_segments_go", **self._kept, limit=_ROWS)) == _ROWS

    async def _remove_leftovers(self, sweep: _Sweep, session: Session) -> bool:
        before = sweep.place
        rows = await self._page(sweep, session, "leftovers", limit=1, **self._kept)
        for _, id in rows:
            if not await self._clear(sweep, session, id):
                sweep.place = before
        return bool(rows)

    async def _clear(self, sweep: _Sweep, session: Session, id: str) -> bool:
        """Do one step for one batch; returns whether it was the last."""
        found = await self._remove_some(sweep, f"{_BATCHES}/{id}")
        sweep.note("batch_objects", len(found), sum(one.size for one in found))
        if len(found) == _OBJECTS:
            return False
        statement = "count_segments" if sweep.is_dry else "remove_segments"
        ((segments,),) = await self._ask(session, statement, id=id, limit=_SEGMENTS)
        sweep.note("batch_segments", segments)
        if segments == _SEGMENTS and not sweep.is_dry:
            return False
        await self._remove_folder(sweep, id)
        if not sweep.is_dry:
            await self._ask(session, "end_leftovers", id=id)
        sweep.note("ended_batches")
        return True

    async def _remove_folders(self, sweep: _Sweep, session: Session) -> bool:
        if sweep.place is None and not sweep.is_dry:
            async with asyncio.timeout_at(sweep.until):
                await asyncio.to_thread(self._workspace.sweep)
        after = sweep.place[0] if sweep.place else ""
        folders = await asyncio.to_thread(_list_folders, self._workspace.root, after)
        if not folders:
            return False
        sweep.place = (folders[-1][0],)
        known: dict[str, bool] = dict(await self._ask(session, "known_batches", ids=[id for id, _ in folders]))
        now, name = await self._read_clock(session)
        has_unknown = any(id not in known for id, _ in folders)
        is_ours = has_unknown and await asyncio.to_thread(self._owns_work_folder, name, sweep.is_dry)
        for id, changed_at in folders:
            if known.get(id, is_ours) and now - changed_at > _FOLDER_AGE:
                await self._remove_folder(sweep, id)
        return len(folders) == _FOLDERS

    async def _remove_folder(self, sweep: _Sweep, id: str) -> None:
        """Remove a folder unless it is in use: then a later sweep removes it."""
        async with asyncio.timeout_at(sweep.until):
            size = await asyncio.to_thread(self._workspace.size, id)
            if size is None:
                return
            if sweep.is_dry:
                is_gone = not await asyncio.to_thread(self._workspace.in_use, id)
            else:
                is_gone = await asyncio.to_thread(self._workspace.remove, id)
        if is_gone:
            sweep.note("work_folders", 1, size)

    # Old rows and keys ------------------------------------------------------------------------------------------

    async def _clear_keys(self, of: str, sweep: _Sweep, session: Session) -> bool:
        sweep.place = sweep.place or ("", "")
        rows = await self._page(sweep, session, f"keys_of_{of}", keep_seconds=_KEYS_KEPT_SECONDS)
        old = [id for _, _, id, is_old in rows if is_old]
        if old and not sweep.is_dry:
            old = [id for (id,) in await self._ask(session, f"clear_keys_of_{of}", ids=old)]
        sweep.note("idempotency_keys", len(old))
        return len(rows) == _ROWS

    async def _remove_batches(self, sweep: _Sweep, session: Session) -> bool:
        """Disown its jobs in the same transaction: later they could not be found."""
        keep_seconds = self._batches_days * _DAY_SECONDS
        rows = await self._page(sweep, session, "old_batches", limit=1, keep_seconds=keep_seconds, **self._kept)
        for _, id, job_id, is_free in rows:
            if is_free and not sweep.is_dry:
                await self._queue.disown(job_id, id, session=session)
                await self._remote_jobs.forget(id, session=session)
                await self._ask(session, "remove_batch", id=id)
            sweep.note("old_batches", int(is_free))
        return bool(rows)

    # Objects without a row --------------------------------------------------------------------------------------

    async def _remove_unknown_files(self, sweep: _Sweep, session: Session) -> bool:
        found = await self._next_objects(sweep, FILES)
        now, name = await self._read_clock(session)
        old = [one for one in found if _is_old_file(one, now)]
        known = {key for (key,) in await self._ask(session, "known_files", keys=[one.key for one in old])}
        await self._remove_unknown(sweep, [one for one in old if one.key not in known], name)
        return len(found) == _OBJECTS_LISTED

    async def _remove_unknown_leftovers(self, folder: str, known_ids: str, sweep: _Sweep, session: Session) -> bool:
        """Objects of batches and uploads whose row is gone, and those that a late writer put after the removal."""
        found = await self._next_objects(sweep, folder)
        now, name = await self._read_clock(session)
        old = [one for one in found if _OWNER_ID.fullmatch(_owner_of(one)) and now - one.modified_at > _OBJECT_AGE]
        ids = list({_owner_of(one) for one in old})
        known: dict[str, bool] = dict(await self._ask(session, known_ids, ids=ids))
        await self._remove_unknown(sweep, [one for one in old if known.get(_owner_of(one), True)], name)
        return len(found) == _OBJECTS_LISTED

    async def _remove_unknown(self, sweep: _Sweep, unknown: Sequence[Found], name: str) -> None:
        if unknown and await self._owns_store(sweep, name):
            await self._delete(sweep, [one.key for one in unknown])
            sweep.note("unknown_objects", len(unknown), sum(one.size for one in unknown))

    async def _remove_half_written(self, sweep: _Sweep, session: Session) -> bool:
        if not sweep.is_dry:
            async with asyncio.timeout_at(sweep.until):
                sweep.note("half_written", await self._store.sweep())
        return False

    async def _owns_store(self, sweep: _Sweep, name: str) -> bool:
        """Whether this database was the first to leave its name in the store.

        Not every store can create an object only if it does not exist. A race between two databases is so unlikely that
        a check before is enough.
        """
        async with asyncio.timeout_at(sweep.until):
            is_free = await self._store.head(OWNER) is None
            if is_free and not sweep.is_dry:
                await self._store.put(OWNER, name.encode())
            is_ours = is_free or await self._store.read(OWNER, 0, 100) == name.encode()
        if not is_ours:
            _warn_of_owner(str(self._store))
        return is_ours

    def _owns_work_folder(self, name: str, is_dry: bool) -> bool:
        path = self._workspace.root / OWNER
        if not is_dry:
            _create_once(path, name)
        is_ours = not path.exists() or path.read_text() == name
        if not is_ours:
            _warn_of_owner(str(self._workspace.root))
        return is_ours

    # ------------------------------------------------------------------------------------------------------------

    def _ask(self, session: Session, name: str, **params: Any) -> Awaitable[list[Row]]:
        return self._queue.database.ask(SQL[name], params, session)

    async def _page(
        self, sweep: _Sweep, session: Session, name: str, *, limit: int = _ROWS, **params: Any
    ) -> list[Row]:
        """The next rows of a walk; whatever happens to them, the walk continues after them."""
        after, after_id = sweep.place or _BEGINNING
        place = {"after": after, "after_id": after_id}
        rows = await self._ask(session, name, **place, **params, is_dry=sweep.is_dry, limit=limit)
        if rows:
            sweep.place = rows[-1][:2]
        return rows

    async def _read_clock(self, session: Session) -> tuple[datetime, str]:
        """The database's time and its name."""
        ((now, name),) = await self._ask(session, "here")
        return now, name

    async def _next_objects(self, sweep: _Sweep, folder: str) -> list[Found]:
        found = await self._list(sweep, folder, sweep.place[0] if sweep.place else None, _OBJECTS_LISTED)
        if found:
            sweep.place = (found[-1].key,)
        return found

    async def _list(self, sweep: _Sweep, folder: str, after: str | None, limit: int) -> list[Found]:
        found: list[Found] = []
        listing = cast("AsyncGenerator[Found, None]", self._store.list(folder, after))
        async with asyncio.timeout_at(sweep.until), aclosing(listing):
            async for one in listing:
                found.append(one)
                if len(found) == limit:
                    break
        return found

    async def _remove_some(self, sweep: _Sweep, folder: str) -> list[Found]:
        """Remove the next objects of a folder, from where the last step stopped; fewer than the limit are the last."""
        after, sweep.inside = sweep.inside, None
        is_inside = after is not None and after.startswith(f"{folder}/")
        found = await self._list(sweep, folder, after if is_inside else None, _OBJECTS)
        await self._delete(sweep, [one.key for one in found])
        if len(found) == _OBJECTS:
            sweep.inside = found[-1].key
        return found

    async def _delete(self, sweep: _Sweep, keys: Collection[str]) -> None:
        if not sweep.is_dry:
            async with asyncio.timeout_at(sweep.until):
                await self._store.delete(*keys)


class _Sweep:
    """One pass over some chores: the current chore, its position, and what was found."""

    def __init__(self, chores: Sequence[_Chore], *, is_dry: bool = False) -> None:
        self.is_dry = is_dry
        self.until: float | None = None  # when to stop waiting for the store and the disk, by the event loop's clock
        self.found: dict[str, Amount] = {}
        self._chores = chores
        self._begin(0)

    @property
    def chore(self) -> _Chore:
        return self._chores[self._turn]

    def next_chore(self) -> bool:
        """Begin the next chore; False if the sweep starts again from the first."""
        self._begin((self._turn + 1) % len(self._chores))
        return self._turn > 0

    def _begin(self, turn: int) -> None:
        self._turn = turn
        self.place: tuple[Any, ...] | None = None
        self.inside: str | None = None
        self.refusals = 0

    def note(self, kind: str, count: int = 1, size: int = 0) -> None:
        before = self.found.get(kind, _NONE)
        self.found[kind] = Amount(before.count + count, before.bytes + size)

    def collected(self) -> Collected:
        return Collected(**self.found)


_Chore = Callable[[_Sweep, Session], Awaitable[bool]]
"""Does one bounded step from the sweep's position, advances it, and returns whether more may be left."""


def _list_folders(root: Path, after: str) -> list[tuple[str, datetime]]:
    """The next folders of batches by name, and when each was last changed."""
    try:
        with os.scandir(root) as entries:
            names = sorted(one.name for one in entries if one.name > after and _BATCH_ID.fullmatch(one.name))
    except FileNotFoundError:
        return []
    found = []
    for name in names[:_FOLDERS]:
        with suppress(FileNotFoundError):
            found.append((name, datetime.fromtimestamp((root / name).stat().st_mtime, UTC)))
    return found


def _is_old_file(one: Found, now: datetime) -> bool:
    """Judge by the time in its id as well: an object may be a link to a file that was already old."""
    match = _FILE_KEY.fullmatch(one.key)
    if match is None or object_key(match[1]) != one.key:
        return False
    born_at = int(match[1][5:17], 16) / 1000
    return now.timestamp() - max(born_at, one.modified_at.timestamp()) > _OBJECT_AGE.total_seconds()


def _owner_of(one: Found) -> str:
    return one.key.split("/")[1]


def _create_once(path: Path, text: str) -> None:
    """Write the file completely or not at all; a second writer changes nothing."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    write_private(draft, text)
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()


def _warn_of_owner(place: str) -> None:
    log.warning(
        "%s belongs to another database, so objects that no row names are kept; give each database its own, or delete "
        "%r in it if the other database is gone for good",
        place,
        OWNER,
    )
