"""Machines that share only the database and an S3 store exchange journals through the store."""

from __future__ import annotations

import asyncio
import shutil

from batchwright.states import BatchStatus
from tests.batches.stage import request, staged
from tests.batches.test_lifecycle import SLOW
from tests.batches.test_recovery import LEASE, doomed
from tests.storage.conftest import s3, s3_port
from tests.support import raw

__all__ = ["s3", "s3_port"]
REQUESTS = 200
SHARED = {"checkpoint_seconds": 0.1, "shared_checkpoint_seconds": 0.2}


async def test_with_a_lost_machine_only_answers_that_it_had_not_uploaded_are_lost(database_url, tmp_path, s3):
    url = {"url": f"s3://{s3.bucket}/batchwright"}
    lost, heir = tmp_path / "lost", tmp_path / "heir"
    async with staged(database_url, lost, simulator=SLOW, storage=url, batches=SHARED, **LEASE) as first:
        id = await first.submit([request(f"r{n}") for n in range(REQUESTS)])
        point = {"at": "batchwright.batches.store:Batches.register", "when": "after", "call": 2}
        async with doomed(first, lost, **point) as process, asyncio.timeout(40):
            await process.wait()
        registered = (await first.get(id)).completed
        assert 0 < registered < REQUESTS
        shutil.rmtree(lost)
        asked = first.simulator.stats()["received"]
        parts = {"storage": url, "batches": SHARED, "global_inference_gateway": {"url": first.simulator.url}, **LEASE}
        async with staged(database_url, heir, **parts) as second:
            second.work()
            batch = await second.ended(id)
            output, errors = await second.results(batch)
        assert batch.status is BatchStatus.COMPLETED
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(REQUESTS)]
        assert errors == []
        assert first.simulator.stats()["received"] - asked == REQUESTS - registered
        hosts = await raw(first.batchwright.queue, "SELECT DISTINCT host FROM batchwright.batch_segment")
        assert len(hosts) == 2
