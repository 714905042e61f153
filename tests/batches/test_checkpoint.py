"""Registering journals: what is registered stays what it was, whoever else still writes."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from uuid import uuid4

import pytest

from batchwright.batches.checkpoint import UPLOADS_MAX, Checkpoints, Owner
from batchwright.batches.journal import Outcome, Part, adopt
from batchwright.batches.metrics import BATCH_METRICS, BatchCounts
from batchwright.batches.workspace import Workspace
from batchwright.engine.counts import WorkerCounts
from batchwright.errors import StorageUnavailable
from batchwright.storage import StorageSettings, Store, open_store

FIRST = b'{"id":"1","custom_id":"a","response":null}\n'
SECOND = b'{"id":"2","custom_id":"b","response":null}\n'
BATCH = "batch_" + "0" * 32


class Registry:
    """Takes every registration, and keeps it."""

    def __init__(self):
        self.rows = []

    async def register(self, rows):
        self.rows += rows
        return {row.name for row in rows}


@contextmanager
def prepared(folder):
    store = open_store(StorageSettings(url=f"file://{folder}/store"), beside=folder)
    registry = Registry()
    counts = BatchCounts(WorkerCounts(BATCH_METRICS))
    options = {"is_shared": True, "every_seconds": 1.0, "shared_every_seconds": 1.0}
    checkpoints = Checkpoints(registry, store, Workspace(folder / "work", 0), counts, **options)
    yield checkpoints, registry, store
    checkpoints.syncer.close()


def owner(shard, claim, job):
    return Owner(batch_id=BATCH, shard=shard, model="small", job_id=job, job_claim=claim)


async def test_a_writer_that_lost_its_shard_cannot_replace_what_its_heir_has_registered(tmp_path):
    job, path = uuid4(), tmp_path / "0.1.seg"
    with prepared(tmp_path) as (checkpoints, registry, store):
        account = checkpoints.open(owner(0, 1, job), path)
        account.journal.append(0, Outcome.OK, FIRST)
        end, tally = adopt(path, 0)
        assert await checkpoints.adopt(owner(0, 2, job), 1, 0, path, [Part(0, end, tally)])
        account.journal.append(1, Outcome.OK, SECOND)
        await checkpoints.register([account])
        adopted, _ = registry.rows
        assert await store.read(adopted.key, 0, 1000) == path.read_bytes()[: adopted.end]
        checkpoints.close(account)


async def test_shards_that_end_together_do_not_wait_for_the_uploads_of_each_other(tmp_path, monkeypatch):
    """At the deadline they have a second and a half; what is not registered by then may be lost."""
    together = asyncio.Barrier(UPLOADS_MAX)
    put = Store.put

    async def put_together(self, *args):
        await together.wait()
        return await put(self, *args)

    monkeypatch.setattr(Store, "put", put_together)
    with prepared(tmp_path) as (checkpoints, registry, _):
        accounts = [checkpoints.open(owner(n, 1, uuid4()), tmp_path / f"{n}.1.seg") for n in range(UPLOADS_MAX)]
        for account in accounts:
            account.journal.append(0, Outcome.OK, FIRST)
        async with asyncio.timeout(5):
            await asyncio.gather(*map(checkpoints.flush, accounts))
        assert {row.shard for row in registry.rows} == set(range(UPLOADS_MAX))
        for account in accounts:
            checkpoints.close(account)


async def test_an_upload_that_fails_keeps_no_other_from_being_registered(tmp_path, monkeypatch):
    """Nor does it leave uploads behind that nobody waits for: in a long outage they would be more and more."""
    put, under_way = Store.put, 0

    async def put_slowly(self, key, *args):
        nonlocal under_way
        if "/0.1." in key:
            raise StorageUnavailable("away")
        under_way += 1
        await asyncio.sleep(0.01)
        under_way -= 1
        return await put(self, key, *args)

    monkeypatch.setattr(Store, "put", put_slowly)
    with prepared(tmp_path) as (checkpoints, registry, _):
        accounts = [checkpoints.open(owner(n, 1, uuid4()), tmp_path / f"{n}.1.seg") for n in range(UPLOADS_MAX + 1)]
        for account in accounts:
            account.journal.append(0, Outcome.OK, FIRST)
        with pytest.raises(StorageUnavailable, match="away"):
            await checkpoints.register(accounts)
        assert under_way == 0
        assert {row.shard for row in registry.rows} == set(range(1, UPLOADS_MAX + 1))
        assert [account.is_settled for account in accounts] == [False] + [True] * UPLOADS_MAX
        for account in accounts:
            checkpoints.close(account)


async def test_a_part_is_registered_once_however_many_ask_for_it(tmp_path):
    with prepared(tmp_path) as (checkpoints, registry, _):
        account = checkpoints.open(owner(0, 1, uuid4()), tmp_path / "0.1.seg")
        account.journal.append(0, Outcome.OK, FIRST)
        await asyncio.gather(*(checkpoints.register([account]) for _ in range(3)))
        assert ([row.seq for row in registry.rows if row.start < row.end], account.seq) == ([0], 1)
        checkpoints.close(account)
