"""Registering journals: registered ranges never change, even if another worker still writes."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from uuid import uuid4

import pytest

from batchwright.batches.journal.checkpoint import UPLOADS_MAX, Checkpoints, Owner
from batchwright.batches.journal.workspace import Workspace
from batchwright.batches.metrics import BATCH_METRICS, BatchCounts
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Position, Registered
from batchwright.batches.tally import LineStatus
from batchwright.batches.waits import Waits
from batchwright.engine.metrics import WorkerCounts
from batchwright.errors import StorageUnavailable
from batchwright.storage import StorageSettings, Store, open_store

FIRST = b'{"id":"1","custom_id":"a","response":null}\n'
SECOND = b'{"id":"2","custom_id":"b","response":null}\n'
FAILED = b'{"id":"3","custom_id":"c","response":null,"error":{"code":"odd","message":"m"}}\n'
BATCH = "batch_" + "0" * 32


class Registry:
    """Accepts and keeps each registration that follows the last one, as the database does."""

    def __init__(self):
        self.rows = []

    async def register(self, rows):
        fits = [row for row in rows if (row.seq, row.start) == self.position(row)]
        self.rows += fits
        behind = {row.name: self.position(row) for row in rows if row not in fits}
        return Registered({row.name for row in fits}, behind)

    def position(self, row):
        own = [one for one in self.rows if one.name[:3] == row.name[:3]]
        return Position(own[-1].seq + 1, own[-1].end) if own else Position()

    async def note_wait(self, *_):
        return True


@contextmanager
def prepared(folder, shared=None):
    store = open_store(StorageSettings(url=f"file://{shared or folder / 'store'}"), beside=folder)
    registry = Registry()
    counts = BatchCounts(WorkerCounts(BATCH_METRICS))
    settings = BatchSettings(checkpoint_seconds=1.0, shared_checkpoint_seconds=1.0)
    workspace = Workspace(folder / "work", 0)
    workspace.folder(BATCH).mkdir(parents=True)
    checkpoints = Checkpoints(registry, store, workspace, Waits(registry), counts, settings, is_shared=True)
    yield checkpoints, registry, store
    checkpoints.syncer.close()


def owner(shard=0, claim=1):
    names = {"batch_id": BATCH, "shard": shard, "model": "small", "worker": "w1"}
    return Owner(**names, journal_number=claim, job_id=uuid4(), job_claim=claim)


async def test_two_machines_with_the_same_claim_number_keep_their_answers_apart(tmp_path):
    """After a failover that lost a claim, both write a journal with the same number and register the same range."""
    keys = []
    for name, line in (("one", FIRST), ("two", SECOND)):
        with prepared(tmp_path / name, tmp_path / "store") as (checkpoints, registry, store):
            account = await checkpoints.open(owner())
            account.journal.append(0, LineStatus.OK, line)
            await checkpoints.flush(account)
            keys += [row.key for row in registry.rows]
            checkpoints.close(account)
    assert [line in await store.read(key, 0, 1000) for key, line in zip(keys, (FIRST, SECOND), strict=True)] == [
        True
    ] * 2


async def test_ranges_that_the_database_lost_are_registered_again_without_a_gap(tmp_path):
    with prepared(tmp_path) as (checkpoints, registry, store):
        account = await checkpoints.open(owner())
        for n, line in enumerate((FIRST, SECOND, FIRST)):
            account.journal.append(n, LineStatus.OK, line)
            await checkpoints.flush(account)
        del registry.rows[1:]
        account.journal.append(3, LineStatus.FAILED, FAILED)
        await checkpoints.flush(account)
        first, rest = registry.rows
        assert (rest.seq, rest.start, rest.end) == (1, first.end, account.journal.size)
        assert (rest.tally.lines, rest.tally.completed, rest.tally.errors) == (3, 2, {"odd": (1, "c")})
        assert await store.read(rest.key, 0, 1000) == account.journal.path.read_bytes()[rest.start :]
        account.journal.append(4, LineStatus.OK, FIRST)
        await checkpoints.flush(account)
        assert [row.seq for row in registry.rows] == [0, 1, 2]
        checkpoints.close(account)


async def test_when_a_claim_number_is_used_again_its_earlier_journal_is_registered_from_the_beginning(tmp_path):
    with prepared(tmp_path) as (checkpoints, registry, _):
        mine = owner()
        lost = await checkpoints.open(mine)
        lost.journal.append(0, LineStatus.OK, FIRST)
        checkpoints.close(lost)
        again = await checkpoints.open(mine)
        again.journal.append(1, LineStatus.OK, SECOND)
        await checkpoints.flush(again)
        assert [(row.seq, row.start, row.tally.lines) for row in registry.rows] == [
            (0, 0, 1),
            (1, registry.rows[0].end, 1),
        ]
        checkpoints.close(again)
        third = await checkpoints.open(mine)
        await checkpoints.flush(third)
        assert (len(registry.rows), third.seq, third.is_settled) == (2, 2, True), "nothing is registered twice"
        checkpoints.close(third)


async def test_shards_that_end_together_do_not_wait_for_the_uploads_of_each_other(tmp_path, monkeypatch):
    """At the deadline they have 1.5 seconds; answers that are not registered by then may be lost."""
    together = asyncio.Barrier(UPLOADS_MAX)
    put = Store.put

    async def put_together(self, *args):
        await together.wait()
        return await put(self, *args)

    monkeypatch.setattr(Store, "put", put_together)
    with prepared(tmp_path) as (checkpoints, registry, _):
        accounts = [await checkpoints.open(owner(n)) for n in range(UPLOADS_MAX)]
        for account in accounts:
            account.journal.append(0, LineStatus.OK, FIRST)
        async with asyncio.timeout(5):
            await asyncio.gather(*map(checkpoints.flush, accounts))
        assert {row.shard for row in registry.rows} == set(range(UPLOADS_MAX))
        for account in accounts:
            checkpoints.close(account)


async def test_a_failed_upload_does_not_prevent_others_from_being_registered(tmp_path, monkeypatch):
    """And no upload keeps running in the background: in a long outage, their number would grow."""
    put, under_way = Store.put, 0

    async def put_slowly(self, key, *args):
        nonlocal under_way
        if "/segments/0/" in key:
            raise StorageUnavailable("away")
        under_way += 1
        await asyncio.sleep(0.01)
        under_way -= 1
        return await put(self, key, *args)

    monkeypatch.setattr(Store, "put", put_slowly)
    with prepared(tmp_path) as (checkpoints, registry, _):
        accounts = [await checkpoints.open(owner(n)) for n in range(UPLOADS_MAX + 1)]
        for account in accounts:
            account.journal.append(0, LineStatus.OK, FIRST)
        with pytest.raises(StorageUnavailable, match="away"):
            await checkpoints.register(accounts)
        assert under_way == 0
        assert {row.shard for row in registry.rows} == set(range(1, UPLOADS_MAX + 1))
        assert [account.is_settled for account in accounts] == [False] + [True] * UPLOADS_MAX
        for account in accounts:
            checkpoints.close(account)


async def test_a_part_is_registered_once_however_many_ask_for_it(tmp_path):
    with prepared(tmp_path) as (checkpoints, registry, _):
        account = await checkpoints.open(owner())
        account.journal.append(0, LineStatus.OK, FIRST)
        await asyncio.gather(*(checkpoints.register([account]) for _ in range(3)))
        assert ([row.seq for row in registry.rows if row.start < row.end], account.seq) == ([0], 1)
        checkpoints.close(account)
