"""Registers what journals hold: once a second, one transaction for all shards of a worker.

    take what was appended → bring it to the disk → upload it, where machines share a store → register it, fenced

What is not registered does not exist for anybody else. A registration whose answer was lost is sent again as it was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from batchwright.batches.journal import Journal, Part, Syncer
from batchwright.batches.metrics import BatchCounts
from batchwright.batches.store import Batches, Registration
from batchwright.batches.workspace import Workspace, segment_key
from batchwright.errors import DatabaseError, StorageError, StorageUnavailable
from batchwright.storage import Store

log = logging.getLogger(__name__)

UPLOAD_BYTES = 8 * 1024 * 1024
UPLOADS_MAX = 8
"""Each holds its bytes in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """In whose name a range is registered: a shard of a batch, and the claim that fences it."""

    batch_id: str
    shard: int
    model: str
    job_id: UUID
    job_claim: int


@dataclass(eq=False, slots=True, kw_only=True)
class Account:
    """The journal of one claim, and what of it is registered."""

    owner: Owner
    journal: Journal
    seq: int = 0
    lines: int = 0
    is_lost: bool = False
    """Another claim has the shard: nothing of this journal is taken any more."""
    pending: Part | None = None
    registered_at: float = field(default_factory=time.monotonic)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a part of it is on its way; another one waits, and shards that end together do not for each other."""

    @property
    def is_settled(self) -> bool:
        return self.pending is None and self.journal.untaken == 0

    def gather(self) -> Part | None:
        """What is to be registered next; a part that was sent before is sent again as it was."""
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
        counts: BatchCounts,
        *,
        is_shared: bool,
        every_seconds: float,
        shared_every_seconds: float,
    ) -> None:
        self.syncer = Syncer()
        self._batches = batches
        self._store = store
        self._workspace = workspace
        self._counts = counts
        self._is_shared = is_shared
        self._every_seconds = every_seconds
        self._shared_every_seconds = shared_every_seconds
        self._accounts: set[Account] = set()
        self._uploads = asyncio.Semaphore(UPLOADS_MAX)

    def open(self, owner: Owner, path: Path) -> Account:
        account = Account(owner=owner, journal=Journal(path, self.syncer))
        self._accounts.add(account)
        return account

    def close(self, account: Account) -> None:
        self._accounts.discard(account)
        account.journal.close()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._every_seconds)
            if due := [one for one in self._accounts if self._is_due(one)]:
                await self._try(due)

    async def _try(self, due: Sequence[Account]) -> None:
        """A journal that cannot be synced must not keep the others from being registered."""
        try:
            await self.register([one for one in due if one.journal.broken is None])
        except (DatabaseError, StorageError) as error:
            log.warning("answers are not registered yet: %s", error)
        except Exception:
            log.exception("answers are not registered yet")

    async def flush(self, account: Account) -> None:
        """Register everything, however long the database or the store is away; or find that the shard is lost."""
        while not account.is_settled and not account.is_lost:
            try:
                await self.register([account])
            except (DatabaseError, StorageUnavailable) as error:
                if account.journal.broken is not None:
                    raise
                log.warning("answers are not registered yet: %s", error)
                await asyncio.sleep(random.uniform(0.1, 0.5))

    async def register(self, accounts: Sequence[Account]) -> None:
        """Whatever can be registered is, also if this raises because something else cannot be uploaded."""
        async with AsyncExitStack() as turns:
            for one in sorted(accounts, key=id):
                await turns.enter_async_context(one.turn)
            parts = [(one, part) for one in accounts if (part := one.gather()) is not None]
            if not parts:
                return
            await asyncio.gather(*(self.syncer.sync(one.journal) for one, _ in parts))
            rows = (self._row(one.owner, one.owner.job_claim, one.seq, one.journal.path, part) for one, part in parts)
            uploads = await asyncio.gather(*rows, return_exceptions=True)
            found = zip(parts, uploads, strict=True)
            await self._register([(one, row) for (one, _), row in found if isinstance(row, Registration)])
            for failure in uploads:
                if isinstance(failure, BaseException):
                    raise failure

    async def _register(self, uploaded: Sequence[tuple[Account, Registration]]) -> None:
        if not uploaded:
            return
        taken = await self._batches.register([row for _, row in uploaded])
        for one, row in uploaded:
            if row.name in taken:
                one.seq, one.pending, one.registered_at = one.seq + 1, None, time.monotonic()
                one.lines += row.tally.lines
                self._counts.registered(row.tally.lines)
            else:
                one.is_lost = True

    async def adopt(self, owner: Owner, claim: int, seq: int, path: Path, parts: Sequence[Part]) -> bool:
        """Register ranges of a dead claim's journal in the name of its heir; False if that is fenced itself."""
        rows = [await self._row(owner, claim, seq + place, path, part) for place, part in enumerate(parts)]
        is_taken = len(await self._batches.register(rows)) == len(rows)
        if is_taken:
            self._counts.registered(sum(part.tally.lines for part in parts))
        return is_taken

    async def _row(self, owner: Owner, claim: int, seq: int, path: Path, part: Part) -> Registration:
        key = None
        if self._is_shared:
            key = segment_key(owner.batch_id, owner.shard, claim, part.start, part.end)
            async with self._uploads:
                await self._store.put(key, await asyncio.to_thread(_range, path, part))
        return Registration(
            batch_id=owner.batch_id,
            shard=owner.shard,
            claim=claim,
            seq=seq,
            host=self._workspace.id,
            key=key,
            start=part.start,
            end=part.end,
            tally=part.tally,
            model=owner.model,
            job_id=owner.job_id,
            job_claim=owner.job_claim,
        )

    def _is_due(self, account: Account) -> bool:
        if account.is_settled or account.is_lost or account.turn.locked():
            return False
        if not self._is_shared:
            return True
        waited = time.monotonic() - account.registered_at
        return waited >= self._shared_every_seconds or account.journal.untaken >= UPLOAD_BYTES


def _range(path: Path, part: Part) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), part.end - part.start, part.start)
