"""Which batches need attention, and what batches cost today."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any

import orjson
import pytest

from batchwright.app import AsyncBatchwright
from batchwright.batches.metrics import BATCH_METRICS, BatchCounts, Load
from batchwright.batches.operations import process_job
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import NewBatch
from batchwright.engine.metrics import CountsWriter, WorkerCounts
from batchwright.engine.workers import Workers
from batchwright.settings import load_settings

PRICES = {"small": {"input": 1.0, "output": 2.0}}


@pytest.fixture
async def client(database_url, tmp_path):
    flags = {"database": {"url": database_url, "folder": str(tmp_path)}, "batches": {"prices": PRICES}}
    async with AsyncBatchwright(settings=load_settings(flags, environment={})) as client:
        yield client


async def begun(client: AsyncBatchwright, *, tenant: str = "default", window: str = "24h", **columns: Any) -> str:
    """A batch of a hundred requests that a worker has planned."""
    batches = client.part(BatchesPart).batches
    new = NewBatch(tenant=tenant, endpoint="/v1/embeddings", input_file_id="file", completion_window=window)
    (row,) = await client.catalog.prepare([process_job(new)])
    await batches.create(new, row)
    await batches.begin(new.id, total=100, models=["small"], input_sha256="", requests={"small": 100})
    for name, value in columns.items():
        sql = f"UPDATE batchwright.batch SET {name} = %(value)s WHERE id = %(id)s"
        await client.pool.rows(sql, {"id": new.id, "value": value})
    return new.id


async def told(client: AsyncBatchwright, tenant: str | None = None) -> dict[str, str]:
    found = await client.part(BatchesPart).attention(tenant)
    return {one.kind: one.message for one in found}


async def test_a_tenant_is_shown_its_batches_that_wait_are_paused_or_are_too_slow(client):
    assert await told(client) == {}
    batches = client.part(BatchesPart).batches
    waiting = await begun(client)
    await batches.note_wait(waiting, "store", "no answer")
    paused = await begun(client, tenant="other")
    await batches.pause(paused, tenant=None)
    slow = await begun(client, window="1m")
    await client.pool.rows(
        "INSERT INTO batchwright.batch_segment (batch_id, shard, claim, seq, host, start_byte, end_byte, lines, tally, "
        "registered_at) VALUES (%(id)s, 0, 1, 0, 'h', 0, 1, 1, '{}', now())",
        {"id": slow},
    )
    await client.pool.rows(
        "UPDATE batchwright.batch SET in_progress_at = now() - interval '30 seconds' WHERE id = %(id)s", {"id": slow}
    )
    assert await told(client, "default") == {
        "waiting": f"the batch {waiting} waits: the store is unavailable: no answer",
        "late": f"the batch {slow} is too slow for its window of 1m",
    }
    assert list(await told(client, "other")) == ["paused"]
    links = {one.link for one in await client.attention() if one.link and one.link.startswith("batches/")}
    assert links == {f"batches/{id}" for id in (waiting, paused, slow)}


async def test_operators_are_shown_unreachable_servers_and_full_disks(client):
    database = client.queue.database
    values = {"host": "h", "pid": 1, "version": "1", "queues": None, "operations": [], "concurrency": 1}
    await Workers(database).register(id="w1", **values)
    counts = WorkerCounts(BATCH_METRICS)
    idle: Mapping[str, Any] = {"shards": 0, "shards_max": 1, "requests": 0, "requests_max": 1, "in_flight": {}}
    load = Load(**idle, limits={"small": 4}, unreachable=["small"], has_room=False)
    BatchCounts(counts).watch(lambda: load)
    writer = CountsWriter(database, "w1", counts)
    await writer.write()
    assert await told(client) == {
        "unreachable": "the server of the model 'small' cannot be reached from 1 worker process; nothing is sent to it",
        "disk": "the disk of the work folder is nearly full in 1 worker process; nothing is sent there",
    }
    assert await told(client, "default") == {}
    load = Load(**idle, limits={"small": 4})
    await writer.write()
    assert await told(client) == {}


async def test_the_cost_of_today_is_that_of_todays_batches_and_of_todays_part_of_older_ones(client):
    usage = orjson.dumps({"small": {"input": 1_000_000, "cached": 0, "output": 500_000}}).decode()
    await begun(client, usage_by_model=usage)
    await begun(client, tenant="other", usage_by_model=usage.replace("small", "unpriced"))
    await begun(client, usage_by_model=usage, metadata='{"ingest_run": "run_1"}')
    older = await begun(client, usage_by_model=usage)
    await client.pool.rows(
        "UPDATE batchwright.batch SET in_progress_at = now() - interval '3 days' WHERE id = %(id)s", {"id": older}
    )
    for ago, tokens in ((timedelta(0), 300_000), (timedelta(days=2), 700_000)):
        await client.pool.rows(
            "INSERT INTO batchwright.batch_sample "
            "VALUES (%(id)s, 'small', now() - %(ago)s, 10, 1, 0, %(n)s, 0, 0, '{}')",
            {"id": older, "ago": ago, "n": tokens},
        )
    found = {(one.tenant, one.model): one.sums for one in await client.spent_today()}
    assert found["default", "small"].cost == Decimal("2.3")
    assert found["default", "small"].prompt_tokens == 1_300_000
    assert (found["other", "unpriced"].cost, found["other", "unpriced"].unpriced) == (0, 1)
    assert [one.tenant for one in await client.spent_today("other")] == ["other"]
