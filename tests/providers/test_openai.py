"""What only services with OpenAI's protocol do: their statuses, their errors, and how they differ."""

import json
import logging
from datetime import UTC, datetime

import pytest

from batchwright.errors import Fatal, RateLimited, SchemaInvalid, Transient
from batchwright.providers.contract import Counts, Ending, InDoubt, Job, Phase
from tests.providers.support import telling

JOB = Job(external_id="batch_1")


@pytest.fixture
async def openai():
    async with telling("openai") as told:
        yield told


def batch(status, total=2, completed=2, failed=0, **fields):
    counts = {"total": total, "completed": completed, "failed": failed}
    return {"id": "batch_1", "status": status, "request_counts": counts, "input_file_id": "file-1", **fields}


@pytest.mark.parametrize(
    ("raw", "phase", "ending"),
    [
        ("validating", Phase.QUEUED, None),
        ("in_progress", Phase.RUNNING, None),
        ("finalizing", Phase.RUNNING, None),
        ("cancelling", Phase.CANCELLING, None),
        ("completed", Phase.ENDED, Ending.SUCCEEDED),
        ("failed", Phase.ENDED, Ending.FAILED),
        ("expired", Phase.ENDED, Ending.EXPIRED),
        ("cancelled", Phase.ENDED, Ending.CANCELLED),
        ("IN_PROGRESS", Phase.RUNNING, None),
        ("COMPLETED", Phase.ENDED, Ending.SUCCEEDED),
        ("meditating", Phase.RUNNING, None),
    ],
)
async def test_every_status_is_mapped_and_a_new_one_is_logged(openai, caplog, raw, phase, ending):
    caplog.set_level(logging.WARNING)
    openai.say("/batches/batch_1", batch(raw))
    status = await openai.adapter.poll(JOB)
    assert (status.phase, status.ending, status.raw_status) == (phase, ending, raw)
    assert ("meditating" in caplog.text) is (raw == "meditating")


@pytest.mark.parametrize(
    ("completed", "failed", "ending"),
    [(2, 0, Ending.SUCCEEDED), (1, 1, Ending.PARTIAL), (0, 2, Ending.FAILED)],
)
async def test_counts_say_how_a_completed_batch_ended(openai, completed, failed, ending):
    said = batch("completed", 2, completed, failed, output_file_id="o", error_file_id=None, expires_at=1_800_000_000)
    openai.say("/batches/batch_1", said)
    status = await openai.adapter.poll(JOB)
    assert (status.ending, status.counts) == (ending, Counts(total=2, succeeded=completed, failed=failed))
    assert (status.found, status.expires_at) == ({"output_file_id": "o"}, datetime(2027, 1, 15, 8, tzinfo=UTC))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ({"code": "invalid_json_line", "message": "bad", "line": 3}, "schema_invalid", "line 3: bad"),
        ({"code": "token_limit_exceeded", "message": "Enqueued token limit"}, "rate_limited", "Enqueued token limit"),
        ({"code": "x", "message": "Cannot find file file-1"}, "transient", "Cannot find file file-1"),
        ({"code": "model_not_found", "message": "m"}, "fatal", "m"),
    ],
)
async def test_the_error_of_a_failed_batch_says_what_to_do(openai, error, kind, message):
    openai.say("/batches/batch_1", batch("failed", errors={"data": [error]}))
    status = await openai.adapter.poll(JOB)
    assert (status.error["kind"], status.error["message"]) == (kind, message)


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        ("429 No", {"code": "rate_limit_exceeded"}, RateLimited),
        ("429 No", {"code": "insufficient_quota"}, Fatal),
        ("400 No", {"code": "billing_hard_limit_reached"}, Fatal),
        ("400 No", {"code": "invalid_endpoint"}, SchemaInvalid),
        ("404 No", {"code": "model_not_found"}, Fatal),
        ("307 No", {}, Fatal),
        ("500 No", {}, InDoubt),
    ],
)
async def test_a_refused_submission_has_its_class(openai, status, error, kind):
    openai.say("/batches", {"error": {**error, "message": "m"}}, status)
    with pytest.raises(kind) as caught:
        await openai.adapter.submit(openai.chat("a"), {"input_file_id": "file-1"})
    assert type(caught.value) is kind
    assert openai.sent == [
        (
            "POST /batches",
            {
                "input_file_id": "file-1",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
                "metadata": {"bw_key": "bw-1"},
            },
        )
    ]


@pytest.mark.parametrize("said", [{}, [], None, {"id": 5}])
async def test_an_answer_without_an_id_is_in_doubt(openai, said):
    openai.say("/batches", said)
    with pytest.raises(InDoubt):
        await openai.adapter.submit(openai.chat("a"), {"input_file_id": "file-1"})


async def test_ids_from_the_provider_cannot_change_the_path_of_a_request(openai):
    openai.say("/batches/..%2F..%2Fadmin%3Fx", batch("completed"))
    assert (await openai.adapter.poll(Job(external_id="../../admin?x"))).phase is Phase.ENDED


async def test_both_files_are_read_and_either_may_be_absent(openai):
    good = {"custom_id": "a", "response": {"status_code": 200, "body": {"usage": {"prompt_tokens": 1}}}}
    bad = {"custom_id": "b", "response": {"status_code": 429, "body": {"error": {"message": "slow"}}}}
    openai.say("/files/out/content", json.dumps(good).encode())
    openai.say("/files/err/content", json.dumps(bad).encode())
    request = openai.chat("a", "b")

    async def results(**found):
        openai.say("/batches/batch_1", batch("completed", **found))
        status = await openai.adapter.poll(JOB)
        found = [one async for one in openai.adapter.results(request, JOB, status)]
        return {one.key: one.error and one.error["kind"] for one in found}

    assert await results(output_file_id="out", error_file_id="err") == {"a": None, "b": "rate_limited"}
    assert await results(output_file_id="out") == {"a": None, "b": "transient"}
    assert await results(error_file_id="err") == {"a": "transient", "b": "rate_limited"}
    assert await results() == {"a": "transient", "b": "transient"}


async def test_a_deleted_result_file_is_not_waited_for(openai):
    openai.say("/files/out/content", {"error": {"message": "gone"}}, "404 Not Found")
    openai.say("/batches/batch_1", batch("completed", output_file_id="out"))
    status = await openai.adapter.poll(JOB)
    with pytest.raises(Fatal, match="gone"):
        _ = [one async for one in openai.adapter.results(openai.chat("a"), JOB, status)]


async def test_a_line_without_its_requests_file_is_delivered(openai):
    good = {"custom_id": "a", "response": {"status_code": 200, "body": {}}}
    openai.say("/files/out/content", json.dumps(good).encode())
    request = openai.chat("a", "b")
    openai.stored["f"] = b"{broken"
    openai.say("/batches/batch_1", batch("completed", output_file_id="out"))
    status = await openai.adapter.poll(JOB)
    assert [one.key async for one in openai.adapter.results(request, JOB, status)] == ["a"]


async def test_a_file_is_uploaded_with_the_models_name_at_the_provider(openai):
    openai.say("/files", {"id": "file-1"})
    request = openai.chat("a")
    object.__setattr__(request, "model", "gpt-big")
    assert [one async for one in openai.adapter.stage(request, {})] == [{"input_file_id": "file-1"}]
    ((_, body),) = openai.sent
    (line,) = [part for part in body.decode().splitlines() if part.startswith("{")]
    assert json.loads(line)["body"] == {"model": "gpt-big", "messages": [{"role": "user", "content": "hello"}]}
    assert b'name="purpose"\r\n\r\nbatch\r\n' in body
    assert b'filename="bw-1.jsonl"' in body


async def test_lines_that_need_no_change_are_uploaded_byte_for_byte(openai):
    openai.say("/files", {"id": "file-1"})
    request = openai.chat("a")
    openai.stored["f"] = raw = b'{"custom_id":"a",  "url":"/v1/chat/completions","body":{"model":"m","x":1.0}}\n'
    assert [one async for one in openai.adapter.stage(request, {})]
    assert b"\r\n\r\n" + raw + b"\r\n" in openai.server.bodies[0]


async def test_a_batch_is_found_by_its_file_where_there_is_no_metadata(openai):
    others = [{"id": f"batch_{n}", "created_at": 1_800_000_000 - n, "input_file_id": f"file-{n}"} for n in range(3)]
    openai.say("/batches?limit=100", {"data": others, "has_more": False})
    found = await openai.adapter.find(openai.chat("a"), {"input_file_id": "file-1"}, datetime.now(UTC))
    assert [one.external_id for one in found] == ["batch_1"]


async def test_a_list_is_read_until_its_batches_are_too_old(openai):
    since = datetime.fromtimestamp(1_800_000_000, UTC)
    new = {"id": "n", "created_at": 1_800_000_005, "metadata": {"bw_key": "other"}}
    old = {"id": "o", "created_at": 1_799_990_000, "metadata": None}
    openai.say("/batches?limit=100", {"data": [new, old], "has_more": True})
    openai.say("/batches?limit=100&after=o", {"data": [old], "has_more": True})
    assert await openai.adapter.find(openai.chat("a"), {}, since) == []
    assert len(openai.sent) == 2


async def test_limits_can_be_set_for_a_compatible_service():
    async with telling("openai", requests_max=1, request_bytes_max=10) as told:
        assert told.adapter.abilities.requests_max == 1
        assert any("accepts 10" in one.message for one in told.adapter.validate(told.chat("a")))
        problems = await told.adapter.inspect(told.chat("a", "b"))
        assert [one.message[:25] for one in problems] == ["the file has more than 10", "the file has more than 1 "]
    async with telling("openai") as told:
        assert told.adapter.abilities.requests_max == 50_000


async def test_an_organization_and_a_project_are_sent():
    async with telling("openai", organization="org-1", project="p-1") as told:
        told.say("/batches?limit=1", {"data": []})
        assert "accepts the key" in await told.adapter.check()
        (head,) = told.server.heads
        names = ("authorization", "openai-organization", "openai-project")
        assert [head[name] for name in names] == ["Bearer sk-1", "org-1", "p-1"]


async def test_together_has_no_metadata_and_its_counts_are_its_files():
    async with telling("together") as told:
        told.say("/batches", {"job": {"id": "b"}})
        assert (await told.adapter.submit(told.chat("a"), {"input_file_id": "f"})).external_id == "b"
        assert "metadata" not in told.sent[0][1]
        for files, ending in {
            (): Ending.FAILED,
            ("output_file_id",): Ending.SUCCEEDED,
            ("error_file_id",): Ending.FAILED,
            ("output_file_id", "error_file_id"): Ending.PARTIAL,
        }.items():
            told.say("/batches/batch_1", {"id": "b", "status": "COMPLETED", **dict.fromkeys(files, "x")})
            assert (await told.adapter.poll(JOB)).ending is ending


async def test_azure_has_other_names_for_endpoints_and_models():
    async with telling("azure_openai", api_version="v") as told:
        told.say("/batches?api-version=v", {"id": "b"})
        told.say("/files?api-version=v", {"id": "file-1"})
        request = told.chat("a")
        object.__setattr__(request, "model", "my-deployment")
        (staged,) = [one async for one in told.adapter.stage(request, {})]
        await told.adapter.submit(request, staged)
        (_, upload), (_, create) = told.sent
        (line,) = [json.loads(part) for part in upload.decode().splitlines() if part.startswith("{")]
        assert (line["url"], line["body"]["model"]) == ("/chat/completions", "my-deployment")
        assert create["endpoint"] == "/chat/completions"
        assert told.server.heads[1]["api-key"] == "sk-1"
        assert "authorization" not in told.server.heads[1]


@pytest.mark.parametrize(("status", "kind"), [("503 No", Transient), ("403 No", Fatal)])
async def test_a_failed_upload_has_its_class(openai, status, kind):
    openai.say("/files", {}, status)
    with pytest.raises(kind):
        _ = [one async for one in openai.adapter.stage(openai.chat("a"), {})]


async def test_a_batch_in_a_list_without_its_result_files_is_polled_by_itself(openai):
    listed = [
        {**batch("completed"), "id": "short"},
        {**batch("completed", output_file_id="o"), "id": "whole"},
        {**batch("in_progress"), "id": "running"},
        {**batch("failed", errors={"data": [{"code": "x", "message": "no"}]}), "id": "failed"},
        {"id": "another"},
    ]
    openai.say("/batches?limit=100", {"data": listed, "has_more": False})
    jobs = [Job(external_id=id) for id in ("short", "whole", "running", "failed", "gone")]
    assert set(await openai.adapter.survey(jobs)) == {"whole", "running", "failed"}
