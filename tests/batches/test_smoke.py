"""Whole batches on a worker in this process, over the simulator."""

from __future__ import annotations

from batchwright.states import BatchStatus
from tests.batches.stage import request, staged


async def test_a_batch_over_two_models_ends_completed_with_every_line(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        lines = [request(f"r{n}", model="small" if n % 3 else "large") for n in range(300)]
        batch = await stage.ended(await stage.submit(lines))
        assert batch.status is BatchStatus.COMPLETED
        output, errors = await stage.results(batch)
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(300)]
        assert errors == []
        assert (batch.total, batch.completed, batch.failed) == (300, 300, 0)
        assert batch.input_tokens > 0
        assert batch.manifest["counts"]["completed"] == 300
        assert stage.simulator.asked(over=1)["requests"] == {}
