"""Models over HTTP: configured ones, those that workers serve, and those that the only gateway lists."""

from __future__ import annotations

import asyncio

import pytest

from batchwright.batches import models as module
from batchwright.batches.services import BatchServices
from batchwright.inference.settings import GatewaySettings
from batchwright.simulator import Profile, SimulatorSettings, running
from tests.api.conftest import GATEWAY, fails, serving


async def test_models_that_have_gateways_and_those_of_workers_are_listed(database_url: str) -> None:
    named = {"meta/llama-3": GATEWAY, "embed": GATEWAY}
    async with serving(database_url, parts={"model_gateways": named}) as api:
        await api.sql(
            "INSERT INTO batchwright.worker (id, host, pid, version, queues, operations, concurrency, on_demand_types, "
            "on_demand_queues, started_at, heartbeat_at) VALUES ('w', 'h', 1, '0', NULL, '{}', 1, '{batch.shard}', "
            "'{batches,shard/elsewhere,shard/,private/shard/hidden}', now(), now()) RETURNING id"
        )
        http = await api.client()
        found = (await http.get("/v1/models")).json()
        assert [one["id"] for one in found["data"]] == ["elsewhere", "embed", "meta/llama-3"]
        model = {"id": "meta/llama-3", "object": "model", "created": 0, "owned_by": "batchwright"}
        assert (found["object"], found["data"][2]) == ("list", model)
        for path in ("meta/llama-3", "meta%2Fllama-3"):
            assert (await http.get(f"/v1/models/{path}")).json() == model
        message = fails(await http.get("/v1/models/gpt-5"), 404, "model_not_found", "model")
        assert message == "The model 'gpt-5' does not exist."
        reader, submitter = await api.holder("read", tenant="b"), await api.holder("submit")
        assert (await reader.get("/v1/models")).json() == found
        fails(await submitter.get("/v1/models"), 403)


async def test_models_of_a_gateway_for_all_models_are_requested_from_it_and_cached(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SimulatorSettings(models={"small": Profile(), "large": Profile()}, any_model=None)
    async with running(settings) as simulator:
        gateway = GatewaySettings(url=f"{simulator.url}/v1")
        async with serving(database_url, parts={"global_inference_gateway": gateway}) as api:
            http = await api.client()
            answers = await asyncio.gather(*(http.get("/v1/models") for _ in range(5)))
            found = answers[0].json()
            assert [one["id"] for one in found["data"]] == ["large", "small"]
            assert found["data"][0]["owned_by"] == "batchwright-simulator"
            assert found["data"][0]["created"] > 0
            assert all(answer.json() == found for answer in answers)
            message = fails(await http.get("/v1/models/smal"), 404, "model_not_found")
            assert message == "The model 'smal' does not exist. Did you mean 'small'?"
            models = api.service(BatchServices).models
            said = await module.describe_missing(models, ["smal", "large"], ["model_not_found", "timeout"])
            hint = "the models that the server has: large, small; did you mean 'small'?"
            assert said == f"the server has no model 'smal'; {hint}"
            assert await module.describe_missing(models, ["small"], ["model_not_found"]) is None
            assert await module.describe_missing(models, ["smal"], ["timeout"]) is None
            models._asked_at -= 2 * module.KEPT_SECONDS
            await simulator.close()
            assert (await http.get("/v1/models")).json() == found
            fails(await http.get("/v1/models/unknown"), 404, "model_not_found")
            reason = "the server could not be reached: connection refused"
            assert f"the gateway {simulator.url} does not list its models: {reason}" in caplog.messages


async def test_if_a_gateway_has_never_answered_the_list_is_an_error_and_not_empty(database_url: str) -> None:
    async with serving(database_url, parts={"global_inference_gateway": GATEWAY}) as api:
        http = await api.client()
        for path in ("", "/small"):
            answer = await http.get(f"/v1/models{path}")
            assert "did not list" in fails(answer, 503, "unavailable")
            assert answer.headers["retry-after"] == "5"
            assert "127.0.0.1" not in answer.text
