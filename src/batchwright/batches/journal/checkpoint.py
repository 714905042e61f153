"""Registers what journals hold: once a second, one transaction for all shards of a worker.

    take what was appended → sync it to disk → upload it, if machines share a store → register it, fenced

Other processes see only what is registered. A registration whose answer was lost is resent unchanged.
The ranges of a journal are registered without gaps. A database that has lost commits, in a failover or a crash, refuses
the next range and returns how much of the journal it has; registration continues from there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from batchwright.batches.journal.journal import Journal, JournalRange, Syncer, tally_of
from batchwright.batches.journal.workspace import Workspace, segment_key
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batches, Position, Registration
from batchwright.batches.waits import STORE, Waits
from batchwright.errors import DatabaseError, StorageError, StorageUnavailable
from batchwright.storage import Store
from batchwright.telemetry import tracing

log = logging.getLogger(__name__)

UPLOAD_BYTES = 8 * 1024 * 1024
UPLOADS_MAX = 8
"""Each holds its bytes in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of a journal: a shard of a batch, and the claim that fences its registrations."""

    batch_id: str
    shard: int
    model: str
    journal_number: int
    job_id: UUID
    job_claim: int
    worker: str
    traceparent: str | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class Account:
    """The journal of one claim, and how much of it is registered."""

    owner: Owner
    journal: Journal
    seq: int = 0
    lines: int = 0
    is_lost: bool = False
    """Another claim has the shard: nothing more of this journal is registered."""
    pending: JournalRange | None = None
    registered_at: float = field(default_factory=time.monotonic)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a range is being registered. Shards that end at the same moment must not wait for one another."""

    @property
    def registered_bytes(self) -> int:
        """How much of the journal is registered, as far as is known."""
        return self.journal.size - self.journal.untaken if self.pending is None else self.pending.start

    @property
    def is_settled(self) -> bool:
        return self.pending is None and self.journal.untaken == 0

    def gather(self) -> JournalRange | None:
        """What to register next; a range that was sent before is resent unchanged."""
        if self.pending is None and self.journal.untaken:
            self.pending = self.journal.take()
        return self.pending


class Checkpoints:
    """The journals of a worker process."""

    def __init__(
        self,
        batches: Batches,
        store: Store,
        workspace: Workspace,
        waits: Waits,
        counts: BatchCounts,
        settings: BatchSettings,
        *,
        is_shared: bool,
        load: Callable[[str], tuple[int, int] | None] = lambda model: None,
    ) -> None:
        self.syncer = Syncer()
        self._batches = batches
        self._store = store
        self._workspace = workspace
        self._waits = waits
        self._counts = counts
        self._is_behind = False
        self._is_shared = is_shared
        self._load = load
        self._settings = settings
        self._watched: set[Account] = set()
        self._uploads = asyncio.Semaphore(UPLOADS_MAX)

    async def open(self, owner: Owner) -> Account:
        """Open a journal in the work folder. `flush` registers it, and after `watch` it is registered regularly.

        If the file exists, the database has lost the claim that wrote it, and has reused its number. What the file
        holds is registered first.
        """
        path = self._workspace.journal(owner.batch_id, owner.shard, owner.journal_number)
        account = Account(owner=owner, journal=await asyncio.to_thread(Journal, path, self.syncer))
        if (size := account.journal.size) > 0:
            account.pending = JournalRange(0, size, await asyncio.to_thread(tally_of, path, 0, size))
        return account

    def watch(self, account: Account) -> None:
        self._watched.add(account)

    def close(self, account: Account) -> None:
        self._watched.discard(account)
        account.journal.close()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._settings.checkpoint_seconds)
            if due := [one for one in self._watched if self._is_due(one)]:
                await self._register_due(due)

    async def _register_due(self, due: Sequence[Account]) -> None:
        """A journal that cannot be synced must not keep the others from being registered."""
        try:
            await self.register([one for one in due if one.journal.broken is None])
            self._is_behind = False
        except (DatabaseError, StorageError) as error:
            self._warn_once(error)
        except Exception:
            log.exception("answers are not registered yet")

    def _warn_once(self, error: DatabaseError | StorageError) -> None:
        """Once for each outage. An unavailable store is logged for each batch elsewhere."""
        if not self._is_behind and not isinstance(error, StorageUnavailable):
            log.warning("answers are not registered yet: %s", error)
        self._is_behind = True

    async def flush(self, account: Account) -> None:
        """Register everything, however long the database or the store is down; stop if the shard is lost."""
        while not account.is_settled and not account.is_lost:
            try:
                await self.register([account])
            except (DatabaseError, StorageUnavailable) as error:
                if account.journal.broken is not None:
                    raise
                self._warn_once(error)
                await asyncio.sleep(random.uniform(0.1, 0.5))

    async def register(self, accounts: Sequence[Account]) -> None:
        """Register all that can be uploaded; then raise, if something could not be."""
        async with AsyncExitStack() as turns:
            for one in sorted(accounts, key=id):
                await turns.enter_async_context(one.turn)
            ranges = [(one, taken) for one in accounts if (taken := one.gather()) is not None]
            if not ranges:
                return
            await asyncio.gather(*(self.syncer.sync(one.journal) for one, _ in ranges))
            uploads = await asyncio.gather(*(self._upload(one, taken) for one, taken in ranges), return_exceptions=True)
            uploaded = [(one, row) for (one, _), row in zip(ranges, uploads, strict=True)]
            await self._register([(one, row) for one, row in uploaded if isinstance(row, Registration)])
            for one, row in uploaded:
                if isinstance(row, StorageUnavailable):
                    await self._waits.note(one.owner.batch_id, STORE, str(row))
            for _, row in uploaded:
                if isinstance(row, BaseException):
                    raise row

    async def _register(self, uploaded: Sequence[tuple[Account, Registration]]) -> None:
        if not uploaded:
            return
        registered = await self._batches.register([row for _, row in uploaded])
        for one, row in uploaded:
            if row.name in registered.taken:
                one.seq, one.pending, one.registered_at = one.seq + 1, None, time.monotonic()
                one.lines += row.tally.lines
                self._counts.registered(row.tally.lines)
                self._waits.end(row.batch_id)
            elif (position := registered.behind.get(row.name)) is not None:
                await self._go_back(one, row, position)
            else:
                one.is_lost = True

    async def _go_back(self, account: Account, row: Registration, position: Position) -> None:
        """The database has less of the journal than it had confirmed, or more: register what comes after that."""
        account.seq, account.pending = position.seq, None
        if position.byte >= row.end:
            return
        log.warning(
            "batch %s: the database has lost registered answers; registering shard %d again from byte %d",
            row.batch_id,
            row.shard,
            position.byte,
        )
        tally = await asyncio.to_thread(tally_of, account.journal.path, position.byte, row.end)
        account.pending = JournalRange(position.byte, row.end, tally)

    async def _upload(self, account: Account, taken: JournalRange) -> Registration:
        owner, host, key = account.owner, self._workspace.id, None
        if self._is_shared:
            key = segment_key(owner.batch_id, owner.shard, owner.journal_number, host, taken.start, taken.end)
            async with self._uploads:
                with tracing.handed(owner.traceparent):
                    await self._store.put(key, await asyncio.to_thread(_read_range, account.journal.path, taken))
        return Registration(
            batch_id=owner.batch_id,
            shard=owner.shard,
            claim=owner.journal_number,
            seq=account.seq,
            host=host,
            key=key,
            start=taken.start,
            end=taken.end,
            tally=taken.tally,
            model=owner.model,
            job_id=owner.job_id,
            job_claim=owner.job_claim,
            worker=owner.worker,
            load=self._load(owner.model),
        )

    def _is_due(self, account: Account) -> bool:
        if account.is_settled or account.is_lost or account.turn.locked():
            return False
        if not self._is_shared:
            return True
        waited = time.monotonic() - account.registered_at
        return waited >= self._settings.shared_checkpoint_seconds or account.journal.untaken >= UPLOAD_BYTES


def _read_range(path: Path, taken: JournalRange) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), taken.end - taken.start, taken.start)
