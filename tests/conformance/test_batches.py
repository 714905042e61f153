"""What the official clients do with batches: section 5.8 of the contract."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import orjson
import pytest

from batchwright.batches.output.verify import verify
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import NewBatch
from batchwright.db.check import Finding, Level
from tests.batches.stage import jsonl, request
from tests.conformance.conftest import SLOW, Client, Running
from tests.conformance.test_files import was_sent_once

ONE = jsonl([request("a")])


def lines(text: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in text.splitlines()]


# Objects and errors -----------------------------------------------------------------------------------------------


async def test_a_batch_is_created_retrieved_cancelled_and_listed(client: Client) -> None:
    file = await client.upload(jsonl([request(str(n), model=SLOW) for n in range(3)]))
    batch = await client(
        client.batches.create,
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"team": "a"},
    )
    assert (batch.object, batch.status, batch.input_file_id) == ("batch", "validating", file.id)
    assert (batch.endpoint, batch.completion_window, batch.metadata) == (
        "/v1/chat/completions",
        "24h",
        {"team": "a"},
    )
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (0, 0, 0)
    assert (batch.errors, batch.usage, batch.output_file_id, batch.in_progress_at) == (None, None, None, None)
    assert batch.expires_at == batch.created_at + 86_400
    assert (await client(client.batches.retrieve, batch.id)).id == batch.id
    cancelling = await client(client.batches.cancel, batch.id)
    assert cancelling.status in ("cancelling", "cancelled")
    assert cancelling.cancelling_at is not None
    assert (await client(client.batches.cancel, batch.id)).id == batch.id
    assert [one.id for one in await client.all(client.batches.list)] == [batch.id]


async def test_line_breaks_of_unicode_do_not_cut_lines_in_two(client: Client, running: Running) -> None:
    """Neither with `iter_lines`, which splits at them, nor with `splitlines`; the model's name is in each answer."""
    breaks = "\u2028\u2029\x85"
    sent = [request(f"good{breaks}", model=f"odd{breaks}"), request(f"bad{breaks}", prompt="[[fault:400]]")]
    batch = await client.ended((await client.create(jsonl(sent))).id)
    files = [(batch.output_file_id, sent[0]), (batch.error_file_id, sent[1])]
    for file_id, line in files:
        content = await client(client.files.content, file_id)
        (found,) = [orjson.loads(one) for one in content.iter_lines()]
        assert [found] == lines(await client.text(file_id))
        assert found["custom_id"] == line["custom_id"]
        if file_id == batch.output_file_id:
            assert found["response"]["body"]["model"] == line["body"]["model"]
    url = f"{running.url}/batches/{batch.id}/results"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {client.raw.api_key}"}) as http:
        for params in ({}, {"follow": "true"}, {"cursors": "true"}):
            async with http.stream("GET", url, params=params) as answer:
                assert answer.status_code == 200
                shown = {orjson.loads(one)["custom_id"] async for one in answer.aiter_lines()}
            assert shown == {line["custom_id"] for line in sent}
    verified = await asyncio.to_thread(running.call, _verified(running, batch.id))
    assert {finding.level for finding in verified} == {Level.OK}


async def _verified(running: Running, id: str) -> list[Finding]:
    """What `batchwright batch manifest --verify` finds."""
    batchwright = running.stage.batchwright
    return await verify(
        batchwright.part(BatchesPart).files, await batchwright.part(BatchesPart).batches.get(id, tenant=None)
    )


@pytest.mark.thorough
async def test_more_than_a_hundred_batches_are_listed_over_several_pages(
    client: Client, running: Running, tenant: str
) -> None:
    async def make() -> list[str]:
        """In a queue that no worker serves, so that they stay as they are."""
        ids = []
        for _ in range(123):
            new = NewBatch(
                tenant=tenant,
                endpoint="/v1/embeddings",
                input_file_id="file-none",
                completion_window="24h",
                queue="nobody",
            )
            ids.append(await running.stage.create(new))
        return ids

    ids = (await asyncio.to_thread(running.call, make()))[::-1]
    for limit in (20, 100):
        assert [batch.id for batch in await client.all(client.batches.list, limit=limit)] == ids
    assert [batch.id for batch in await client.all(client.batches.list)] == ids
    page = await client(client.batches.list, limit=100)
    assert (page.has_more, page.model_extra["first_id"], page.model_extra["last_id"]) == (True, ids[0], ids[99])
    rest = await client(client.batches.list, limit=100, after=ids[99])
    assert (rest.has_more, [batch.id for batch in rest.data]) == (False, ids[100:])


async def test_fields_that_the_client_does_not_know_are_kept(client: Client) -> None:
    batch = await client.create(ONE, extra_body={"priority": 2, "limits": {"max_in_flight": 7}})
    extra = batch.model_extra
    assert (extra["priority"], extra["limits"], extra["paused_at"]) == (2, {"max_in_flight": 7}, None)
    assert {"eta", "deadline_risk", "error_summary", "cost", "prefix_saved_tokens", "retry_of"} <= set(extra)
    assert batch._request_id.startswith("req_")


async def test_an_unknown_batch_is_not_found(client: Client) -> None:
    for method in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError) as refused:
            await client(method, "batch_unknown")
        assert refused.value.body == {
            "message": "No batch found with id 'batch_unknown'.",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
    with pytest.raises(openai.BadRequestError) as unknown:
        await client.all(client.batches.list, after="batch_unknown")
    assert (unknown.value.code, unknown.value.param) == ("invalid_value", "after")


@pytest.mark.parametrize(
    ("options", "code", "param", "message"),
    [
        ({"endpoint": "/v1/videos"}, "invalid_value", "endpoint", "'/v1/responses'"),
        ({"completion_window": "1s"}, "invalid_value", "completion_window", "'24h'"),
        (
            {"metadata": {"tags": ["a"]}},
            "invalid_type",
            "metadata.tags",
            "Invalid type for 'metadata.tags': expected a string, but got an array instead.",
        ),
        ({"extra_body": {"colour": "red"}}, "unknown_parameter", "colour", "Unknown parameter: 'colour'."),
        ({"input_file_id": "file-none"}, None, "file_id", "Cannot find file file-none, or project"),
    ],
)
async def test_an_invalid_request_is_a_bad_request(
    client: Client, options: dict[str, Any], code: str | None, param: str, message: str
) -> None:
    wanted = {"input_file_id": (await client.upload(ONE)).id, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as refused:
        await client(client.batches.create, **{"endpoint": "/v1/chat/completions", **wanted, **options})
    assert (refused.value.code, refused.value.param) == (code, param)
    assert message in refused.value.message


async def test_a_file_of_another_purpose_or_tenant_makes_no_batch(client: Client, running: Running) -> None:
    theirs = await asyncio.to_thread(running.call, running.stage.upload(ONE, tenant="somebody"))
    for id in (theirs, (await client.upload(ONE, purpose="evals")).id):
        with pytest.raises(openai.BadRequestError):
            await client(
                client.batches.create, input_file_id=id, endpoint="/v1/chat/completions", completion_window="24h"
            )


async def test_a_batch_is_repeated_by_its_key_and_another_body_is_a_conflict(client: Client) -> None:
    file = await client.upload(ONE)
    wanted = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    key = {"Idempotency-Key": "once"}
    batch = await client(client.batches.create, **wanted, extra_headers=key)
    assert (await client(client.batches.create, **wanted, extra_headers=key)).id == batch.id
    with pytest.raises(openai.ConflictError) as refused:
        await client(client.batches.create, **{**wanted, "completion_window": "1h"}, extra_headers=key)
    assert was_sent_once(refused.value)
    assert len(await client.all(client.batches.list)) == 1


# Batches that a worker runs ---------------------------------------------------------------------------------------


async def test_a_batch_completes_and_its_output_is_read(client: Client) -> None:
    asked = [request(f"r{n}", model="small") for n in range(40)]
    batch = await client.ended((await client.create(jsonl(asked))).id)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 40, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.failed_at, batch.expired_at, batch.cancelled_at) == (None, None, None)
    assert batch.model == "small"
    usage = batch.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens > 0
    assert usage.input_tokens_details.cached_tokens == batch.model_extra["prefix_saved_tokens"]
    assert usage.output_tokens_details.reasoning_tokens == 0
    output = lines(await client.text(batch.output_file_id))
    assert [line["custom_id"] for line in output] == [line["custom_id"] for line in asked]
    for line in output:
        assert line["id"].startswith("batch_req_")
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        assert line["response"]["request_id"]
        assert line["response"]["body"]["object"] == "chat.completion"
    file = await client(client.files.retrieve, batch.output_file_id)
    assert (file.purpose, file.status) == ("batch_output", "processed")
    assert [one.id for one in await client.all(client.files.list, purpose="batch_output")] == [file.id]
    with pytest.raises(openai.ConflictError) as refused:
        await client(client.batches.cancel, batch.id)
    assert (refused.value.code, refused.value.param) == (None, None)
    assert refused.value.body["message"] == "Cannot cancel a batch with status 'completed'."
    assert was_sent_once(refused.value)


async def test_answers_without_success_are_in_the_error_file(client: Client) -> None:
    asked = [request(f"r{n}", prompt="[[fault:400]]" if n % 2 else None) for n in range(6)]
    kept = {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}
    batch = await client.ended((await client.create(jsonl(asked), **kept)).id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 6, 3, 3)
    output, errors = [lines(await client.text(id)) for id in (batch.output_file_id, batch.error_file_id)]
    assert [line["custom_id"] for line in output] == ["r0", "r2", "r4"]
    assert [line["custom_id"] for line in errors] == ["r1", "r3", "r5"]
    for line in errors:
        assert (line["error"], line["response"]["status_code"]) == (None, 400)
        assert line["response"]["body"]["error"]["message"]
    (group,) = batch.model_extra["error_summary"]
    assert group["count"] == 3
    assert group["sample_custom_id"] in ("r1", "r3", "r5")
    for id in (batch.output_file_id, batch.error_file_id):
        file = await client(client.files.retrieve, id)
        assert file.expires_at == file.created_at + 3600


async def test_a_batch_of_failures_is_completed_without_an_output_file(client: Client) -> None:
    batch = await client.ended((await client.create(jsonl([request("a", prompt="[[fault:400]]")]))).id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 1, 0, 1)
    assert batch.output_file_id is None
    assert batch.error_file_id is not None


CONTENT = [{"type": "text", "text": "What is this?"}, {"type": "text", "text": "And this?"}]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(ONE, id="newline at the end"),
        pytest.param(ONE.rstrip(b"\n"), id="no newline at the end"),
        pytest.param(ONE.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(b"\xef\xbb\xbf" + ONE, id="BOM"),
        pytest.param(b"\n  \r\n" + ONE + b"\n\n", id="blank lines"),
        pytest.param(jsonl([request("a", prompt="x" * 4 * 1024 * 1024)]), id="4 MB line"),
        pytest.param(jsonl([request("a", prompt="before \0 after")]), id="NUL in a prompt"),
        pytest.param(jsonl([request("a", messages=[{"role": "user", "content": CONTENT}])]), id="array content"),
        pytest.param(jsonl([request("a", prompt="\u20ac\U0001f600")]), id="any characters"),
    ],
)
async def test_lines_of_every_kind_are_sent(client: Client, data: bytes) -> None:
    batch = await client.ended((await client.create(data)).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1), batch.errors
    (line,) = lines(await client.text(batch.output_file_id))
    assert line["custom_id"] == "a"


@pytest.mark.parametrize(
    ("data", "code", "line", "param"),
    [
        pytest.param(b"", "empty_file", None, None, id="empty"),
        pytest.param(b"\n\n", "empty_file", None, None, id="only blank lines"),
        pytest.param(ONE + b"{\n", "invalid_json_line", 2, None, id="not JSON"),
        pytest.param(ONE.replace(b"Say", b"S\0y"), "invalid_json_line", 1, None, id="a NUL byte"),
        pytest.param(b"\n" + ONE + ONE, "duplicate_custom_id", 3, "custom_id", id="twice the same custom_id"),
        pytest.param(jsonl([request("a", stream=True)]), "streaming_unsupported", 1, "body.stream", id="stream"),
        pytest.param(ONE.replace(b"chat/", b""), "invalid_url", 1, "url", id="another endpoint"),
        pytest.param(ONE.replace(b'"method"', b'"m"'), "missing_required_parameter", 1, "method", id="no method"),
    ],
)
async def test_an_invalid_line_fails_the_batch_and_is_named(
    client: Client, data: bytes, code: str, line: int | None, param: str | None
) -> None:
    batch = await client.ended((await client.create(data)).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors.object == "list"
    problem = batch.errors.data[0]
    assert (problem.code, problem.line) == (code, line)
    if param is not None:
        assert problem.param == param
    assert problem.message


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 3}),
        ("/v1/embeddings", {"input": ["one", "two"]}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}),
    ],
)
async def test_every_endpoint_of_the_model_server_can_be_used(
    client: Client, endpoint: str, body: dict[str, Any]
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "small", **body}}
    batch = await client.ended((await client.create(jsonl([line]), endpoint=endpoint)).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1), batch.errors
    assert batch.usage.input_tokens > 0


async def test_many_models_in_one_file_are_accepted(client: Client) -> None:
    asked = [request(f"r{n}", model=f"model-{n % 3}") for n in range(9)]
    batch = await client.ended((await client.create(jsonl(asked))).id)
    assert (batch.status, batch.request_counts.completed, batch.model) == ("completed", 9, None)


async def test_a_cancelled_batch_keeps_its_answers(client: Client) -> None:
    asked = [request("quick"), *(request(f"slow{n}", model=SLOW) for n in range(3))]
    batch = await client.create(jsonl(asked))
    while (await client(client.batches.retrieve, batch.id)).request_counts.completed < 1:
        await asyncio.sleep(0.05)
    assert (await client(client.batches.cancel, batch.id)).status == "cancelling"
    over = await client.ended(batch.id)
    counts = over.request_counts
    assert (over.status, counts.total, counts.completed, counts.failed) == ("cancelled", 4, 1, 3)
    assert over.cancelling_at <= over.cancelled_at
    assert [line["custom_id"] for line in lines(await client.text(over.output_file_id))] == ["quick"]
    errors = lines(await client.text(over.error_file_id))
    assert [(line["response"], line["error"]["code"]) for line in errors] == [(None, "batch_cancelled")] * 3
    assert over.model_extra["counts_by_outcome"]["cancelled"] == 3


# What OpenAI does not offer, through its client -------------------------------------------------------------------


async def test_failed_lines_are_retried_through_the_client(client: Client) -> None:
    asked = [request("good"), request("bad", prompt="[[fault:400]]")]
    batch = await client.ended((await client.create(jsonl(asked))).id)
    retry = await client(client.raw.post, f"/batches/{batch.id}/retry", body={"codes": None}, cast_to=type(batch))
    assert (retry.model_extra["retry_of"], retry.status) == (batch.id, "validating")
    over = await client.ended(retry.id)
    assert (over.status, over.request_counts.total, over.request_counts.failed) == ("completed", 1, 1)
    assert [line["custom_id"] for line in lines(await client.text(over.error_file_id))] == ["bad"]


async def test_results_and_the_manifest_are_read_through_the_client(client: Client) -> None:
    batch = await client.ended((await client.create(jsonl([request(f"r{n}") for n in range(5)]))).id)
    results = await client(client.raw.get, f"/batches/{batch.id}/results?follow=true", cast_to=str)
    assert sorted(line["custom_id"] for line in lines(results)) == [f"r{n}" for n in range(5)]
    manifest = await client(client.raw.get, f"/batches/{batch.id}/manifest", cast_to=dict[str, Any])
    assert manifest["counts"]["completed"] == 5
    events = await client(client.raw.get, f"/batches/{batch.id}/events", cast_to=dict[str, Any])
    assert events["data"][0]["event"] == "job.enqueued"
    paused = await client.create(jsonl([request("a", model=SLOW)]))
    shown = await client(client.raw.post, f"/batches/{paused.id}/pause", cast_to=type(batch))
    assert shown.model_extra["paused_at"] is not None
    await client(client.batches.cancel, paused.id)
