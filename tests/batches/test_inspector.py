"""An uploaded file is checked as `batch check` does, and its cost and time are estimated."""

from __future__ import annotations

from batchwright.batches.part import BatchesPart
from tests.batches.output.test_lookup import services
from tests.batches.stage import Stage, jsonl, request, staged

PRICES = {"prices": {"small": {"input": 1.0, "output": 2.0}}}


async def check(stage: Stage, data: bytes):
    file = await stage.batchwright.part(BatchesPart).files.get(await stage.upload(data), tenant=None)
    return await services(stage).inspector.check(file)


async def test_a_good_file_has_an_estimated_cost_and_once_a_pace_is_known_a_time(database_url, tmp_path):
    async with staged(database_url, tmp_path, batches=PRICES) as stage:
        data = jsonl([request(f"r{n}") for n in range(10)])
        found = await check(stage, data)
        assert found.can_run
        assert found.inspection.endpoint == "/v1/chat/completions"
        assert (found.inspection.requests, found.inspection.problems_total) == (10, 0)
        assert found.cost == found.cost_cached > 0
        assert found.seconds is None, "no request was sent to this model yet"
        for ago, n in ((600, 0), (0, 1200)):
            await stage.batchwright.pool.rows(
                "INSERT INTO batchwright.sample VALUES (now() - make_interval(secs => %(ago)s), "
                "jsonb_build_object('requests', jsonb_build_object('small', %(n)s::float8)), '{}')",
                {"ago": ago, "n": n},
            )
        assert abs((await check(stage, data)).seconds - 5.0) < 0.1


async def test_every_problem_is_reported_with_its_line(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        data = jsonl([request("twice"), request("twice")]) + b"no json\n" + jsonl([{**request("x"), "method": "GET"}])
        found = await check(stage, data)
        assert not found.can_run
        assert [problem.line for problem in found.inspection.problems] == [2, 3, 4]
        assert found.inspection.problems_total == 3


async def test_a_file_that_is_for_no_endpoint_is_refused_in_one_sentence(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        found = await check(stage, jsonl([{**request("x"), "url": "/v1/nothing"}]))
        assert not found.can_run
        assert found.refusal.startswith("in.jsonl: ")
        assert "/v1/nothing" in found.refusal
        assert not (await check(stage, b"\n")).can_run
