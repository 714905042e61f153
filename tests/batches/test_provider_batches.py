"""Batches whose requests outside providers answer, with the contract server as every provider."""

import pytest

from batchwright.states import BatchStatus
from tests.batches.provider_stage import provider_stage
from tests.batches.stage import request


@pytest.fixture
async def stage(database_url, tmp_path):
    async with provider_stage(database_url, tmp_path) as stage:
        yield stage


async def test_one_batch_goes_to_own_servers_and_to_three_providers(stage):
    models = ["small", "gpt", "claude", "gemini-2.5-flash"]
    stage.work()
    id = await stage.submit([request(f"r{n}", model=models[n % 4]) for n in range(20)])
    batch = await stage.finished(id, 3)
    assert batch.status is BatchStatus.COMPLETED, batch.errors
    output, errors = await stage.results(batch)
    assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(20)]
    assert errors == []
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in output)
    assert all(line["id"].startswith("batch_req_") and line["error"] is None for line in output)
    assert sorted(job.provider for job in stage.remote()) == ["anthropic", "gemini", "openai"]
    assert set(batch.usage_by_model) == set(models)
    assert all(usage["input"] > 0 and usage["output"] > 0 for usage in batch.usage_by_model.values())
