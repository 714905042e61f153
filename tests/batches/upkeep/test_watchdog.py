"""The watchdog: upkeep ends batches that no worker ends, a page at a time."""

from __future__ import annotations

from batchwright.batches.ending import Endings
from batchwright.batches.metrics import BATCH_METRICS, BatchCounts
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batches
from batchwright.batches.upkeep import watchdog as watchdog_module
from batchwright.batches.upkeep.watchdog import Watchdog
from batchwright.engine.metrics import WorkerCounts
from batchwright.engine.upkeep import lock_round
from batchwright.states import BatchStatus
from batchwright.webhooks.announcer import Announcer
from batchwright.webhooks.settings import WebhookSettings
from tests.batches.stage import request, staged
from tests.batches.test_endings import failing
from tests.support import raw

LATE = "UPDATE batchwright.batch SET expires_at = now() - interval '1 second'"
HOOK = WebhookSettings(url="https://example.com/hook", secret_env="SECRET")


def watchdog_of(stage):
    batches = stage.batchwright.part(BatchesPart).batches
    counts = BatchCounts(WorkerCounts(BATCH_METRICS))
    announcer = Announcer(batches.queue, stage.batchwright.catalog, {"default": (HOOK,)})
    return Watchdog(batches, Endings(batches, counts, announcer), 30.0)


async def look(stage):
    async with lock_round(stage.batchwright.queue.database, "batches") as session:
        await watchdog_of(stage).look(session)


async def told(stage):
    event = "payload->'event'->>'type', payload->'event'->>'batch_id'"
    sql = f"SELECT {event} FROM batchwright.job WHERE job_type = 'batch.webhook' ORDER BY created_at"
    return [tuple(row) for row in await raw(stage.batchwright.queue, sql)]


async def test_stalled_batches_are_ended_in_pages_and_one_that_fails_does_not_delay_the_others(
    database_url, tmp_path, monkeypatch
):
    """Each turn is short because the upkeep session is held meanwhile; a batch that fails is skipped."""
    monkeypatch.setattr(watchdog_module, "_PAGE", 2)
    async with staged(database_url, tmp_path) as stage:
        ids = [await stage.submit([request("a")]) for _ in range(5)]
        await raw(stage.batchwright.queue, LATE)
        watchdog, refused, helped = watchdog_of(stage), [], []
        expire = watchdog._expire

        async def help(batch):
            helped.append(batch.id)
            if not refused:
                refused.append(batch.id)
                raise ValueError("not this time")
            await expire(batch)

        watchdog._expire = help
        turns = []
        for _ in range(4):
            async with lock_round(stage.batchwright.queue.database, "batches") as session:
                turns.append(await watchdog.look(session))
        assert turns == [True, True, False, False]
        assert helped == [*sorted(ids, key=helped.index), *refused], (
            "each batch once, and the one that failed again in the next sweep"
        )
        batches = [await stage.batchwright.part(BatchesPart).batches.get(id, tenant=None) for id in ids]
        assert {batch.status for batch in batches} == {BatchStatus.EXPIRED}
        monkeypatch.setattr(watchdog_module, "_TURN_SECONDS", 0.0)
        await stage.submit([request("a")])
        await raw(stage.batchwright.queue, f"{LATE} WHERE status = 'validating'")
        async with lock_round(stage.batchwright.queue.database, "batches") as session:
            assert await watchdog.look(session) is True, "the time of the turn is over, so it wants another"


async def test_a_batch_that_upkeep_ends_sends_its_webhooks(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        late = await stage.submit([request("a")])
        await raw(stage.batchwright.queue, LATE)
        await look(stage)
        lost = await stage.submit([request("a")])
        await raw(stage.batchwright.queue, "DELETE FROM batchwright.job WHERE owner = %(id)s", id=lost)
        await look(stage)
        assert [(await stage.get(id)).status for id in (late, lost)] == [BatchStatus.EXPIRED, BatchStatus.FAILED]
        await look(stage)
        assert await told(stage) == [("batch.expired", late), ("batch.failed", lost)]


async def test_a_batch_that_cannot_be_ended_does_not_prevent_the_end_of_others(database_url, tmp_path, monkeypatch):
    async with staged(database_url, tmp_path) as stage:
        ids = [await stage.submit([request("a")]) for _ in range(2)]
        await raw(stage.batchwright.queue, "DELETE FROM batchwright.job")
        failing(monkeypatch, Batches, "cancel_open_shards", RuntimeError("odd"))
        await look(stage)
        assert {(await stage.get(id)).status for id in ids} == {BatchStatus.VALIDATING, BatchStatus.FAILED}
