"""What only Gemini does: operations, states in two spellings, numbers as texts."""

import json

import pytest

from batchwright.errors import Fatal, RateLimited, SchemaInvalid
from batchwright.providers.contract import Counts, Ending, InDoubt, Job, Phase, Status
from tests.providers.support import telling

JOB = Job(external_id="batches/1")


@pytest.fixture
async def gemini():
    async with telling("gemini") as told:
        yield told


def operation(state, total="2", **fields):
    metadata = {"state": state, "displayName": "bw-1", "batchStats": {"requestCount": total, **fields}}
    return {"name": "batches/1", "metadata": metadata}


@pytest.mark.parametrize("prefix", ["BATCH_STATE_", "JOB_STATE_"])
@pytest.mark.parametrize(
    ("state", "phase", "ending"),
    [
        ("PENDING", Phase.QUEUED, None),
        ("QUEUED", Phase.QUEUED, None),
        ("RUNNING", Phase.RUNNING, None),
        ("SUCCEEDED", Phase.ENDED, Ending.SUCCEEDED),
        ("PARTIALLY_SUCCEEDED", Phase.ENDED, Ending.SUCCEEDED),
        ("FAILED", Phase.ENDED, Ending.FAILED),
        ("CANCELLED", Phase.ENDED, Ending.CANCELLED),
        ("EXPIRED", Phase.ENDED, Ending.EXPIRED),
        ("MEDITATING", Phase.RUNNING, None),
        ("UNSPECIFIED", Phase.RUNNING, None),
    ],
)
async def test_every_state_is_mapped(gemini, prefix, state, phase, ending):
    gemini.say("/v1beta/batches/1", operation(prefix + state, successfulRequestCount="2"))
    status = await gemini.adapter.poll(JOB)
    assert (status.phase, status.ending, status.raw_status) == (phase, ending, prefix + state)


@pytest.mark.parametrize(
    ("stats", "counts", "ending"),
    [
        ({"successfulRequestCount": "2"}, Counts(total=2, succeeded=2, failed=0), Ending.SUCCEEDED),
        ({"successfulRequestCount": "1", "failedRequestCount": "1"}, Counts(total=2, succeeded=1, failed=1), "partial"),
        ({"failedRequestCount": "2"}, Counts(total=2, succeeded=0, failed=2), Ending.FAILED),
    ],
)
async def test_a_batch_that_succeeded_may_hold_no_success(gemini, stats, counts, ending):
    said = operation("BATCH_STATE_SUCCEEDED", **stats)
    said["response"] = {"responsesFile": "files/batch-1"}
    gemini.say("/v1beta/batches/1", said)
    status = await gemini.adapter.poll(JOB)
    assert (status.counts, status.ending) == (counts, ending)
    assert status.found == {"responses_file": "files/batch-1"}


async def test_a_file_is_uploaded_in_two_steps_and_the_upload_address_is_not_stored(gemini):
    url = f"{gemini.server.url}/upload/v1beta/files?upload_id=secret-address"
    gemini.say("/upload/v1beta/files", b"", "200 OK", f"x-goog-upload-url: {url}")
    gemini.say("/upload/v1beta/files?upload_id=secret-address", {"file": {"name": "files/in-1"}})
    (staged,) = [one async for one in gemini.adapter.stage(gemini.chat("a"), {})]
    assert staged == {"input_file": "files/in-1"}
    (begin, rest) = gemini.server.heads
    (_, metadata), (_, line) = gemini.sent
    assert begin["x-goog-upload-header-content-length"] == str(len(gemini.server.bodies[1]))
    assert rest["x-goog-upload-command"] == "upload, finalize"
    assert metadata == {"file": {"displayName": "bw-1"}}
    assert line == {"key": "a", "request": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}}


async def test_nothing_is_sent_to_an_upload_address_on_another_host(gemini):
    gemini.say("/upload/v1beta/files", b"", "200 OK", "x-goog-upload-url: https://evil.example/upload")
    with pytest.raises(Fatal, match="does not get its credentials"):
        _ = [one async for one in gemini.adapter.stage(gemini.chat("a"), {})]


async def test_a_batch_is_created_of_the_file_under_our_key(gemini):
    gemini.say("/v1beta/models/m:batchGenerateContent", {"name": "batches/7"})
    assert (await gemini.adapter.submit(gemini.chat("a"), {"input_file": "files/1"})).external_id == "batches/7"
    ((_, body),) = gemini.sent
    assert body == {"batch": {"displayName": "bw-1", "inputConfig": {"fileName": "files/1"}}}
    assert gemini.server.heads[0]["x-goog-api-key"] == "sk-1"


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        ("429 No", {"status": "RESOURCE_EXHAUSTED"}, RateLimited),
        ("400 No", {"status": "INVALID_ARGUMENT"}, SchemaInvalid),
        ("400 No", {"status": "INVALID_ARGUMENT", "details": [{"reason": "API_KEY_INVALID"}]}, Fatal),
        ("400 No", {"status": "FAILED_PRECONDITION", "message": "API key expired. Renew it."}, Fatal),
        ("403 No", {"status": "PERMISSION_DENIED"}, Fatal),
        ("404 No", {"status": "NOT_FOUND"}, Fatal),
        ("503 No", {"status": "UNAVAILABLE"}, InDoubt),
    ],
)
async def test_a_refused_submission_has_its_class(gemini, status, error, kind):
    gemini.say("/v1beta/models/m:batchGenerateContent", {"error": {"code": 1, "message": "m", **error}}, status)
    with pytest.raises(kind) as caught:
        await gemini.adapter.submit(gemini.chat("a"), {"input_file": "files/1"})
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": 3, "message": "m"}, "schema_invalid"),
        ({"code": 8, "message": "m"}, "rate_limited"),
        ({"code": 10, "message": "m"}, "transient"),
        ({"code": 13, "message": "m"}, "transient"),
        ({"code": 14, "message": "m"}, "transient"),
        ({"code": 7, "message": "m"}, "credential"),
        ({"code": 5, "message": "m"}, "fatal"),
    ],
)
async def test_errors_of_items_have_their_class(gemini, error, kind):
    gemini.say("/v1beta/files/batch-1:download?alt=media", {"key": "a", "error": error})
    status = Status(phase=Phase.ENDED, raw_status="x", found={"responses_file": "files/batch-1"})
    (result,) = [one async for one in gemini.adapter.results(gemini.chat("a"), JOB, status)]
    assert result.error["kind"] == kind


async def test_requests_in_geminis_own_format_are_sent_and_answered_unchanged(gemini):
    own = {"contents": [{"parts": [{"text": "x"}]}], "safetySettings": []}
    endpoint = "/v1beta/models/m:generateContent"
    request = gemini.request({"custom_id": "a", "body": own}, endpoint=endpoint)
    assert list(gemini.adapter.validate(request)) == []
    response = {"responseId": "r", "usageMetadata": {"promptTokenCount": 5, "candidatesTokenCount": 6}}
    gemini.say("/v1beta/files/batch-1:download?alt=media", json.dumps({"key": "a", "response": response}).encode())
    status = Status(phase=Phase.ENDED, raw_status="x", found={"responses_file": "files/batch-1"})
    (result,) = [one async for one in gemini.adapter.results(request, JOB, status)]
    assert result.value["response"]["body"] == response
    assert (result.usage.input_tokens, result.usage.output_tokens) == (5, 6)


async def test_a_request_without_a_model_or_with_a_field_that_cannot_be_mapped_is_refused(gemini):
    assert [one.param for one in gemini.adapter.validate(gemini.chat("a", model=None))] == ["model"]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 1}}
    (problem,) = await gemini.adapter.inspect(gemini.request({"custom_id": "a", "body": body}))
    assert (problem.param, problem.message[:19]) == ("body.logit_bias", "line 1: logit_bias:")
