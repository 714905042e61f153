"""What only Anthropic does: batches without a name, our own ids of requests, and endings known only from counts."""

import json
from datetime import UTC, datetime

import pytest

from batchwright.errors import Fatal, RateLimited, SchemaInvalid
from batchwright.providers.contract import Counts, Ending, InDoubt, Job, Phase, Status
from tests.providers.support import telling

JOB = Job(external_id="msgbatch_1")
PATH = "/v1/messages/batches"
SINCE = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
async def anthropic():
    async with telling("anthropic") as told:
        yield told


def batch(id="msgbatch_1", status="ended", created_at="2026-11-01T00:00:10Z", **counts):
    counts = {**dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0), **counts}
    return {"id": id, "processing_status": status, "created_at": created_at, "request_counts": counts}


@pytest.mark.parametrize(
    ("status", "counts", "phase", "ending"),
    [
        ("in_progress", {"processing": 2}, Phase.RUNNING, None),
        ("canceling", {"processing": 2}, Phase.CANCELLING, None),
        ("ended", {"succeeded": 2}, Phase.ENDED, Ending.SUCCEEDED),
        ("ended", {"succeeded": 1, "errored": 1}, Phase.ENDED, Ending.PARTIAL),
        ("ended", {"errored": 2}, Phase.ENDED, Ending.FAILED),
        ("ended", {"canceled": 2}, Phase.ENDED, Ending.CANCELLED),
        ("ended", {"expired": 2}, Phase.ENDED, Ending.EXPIRED),
        ("ended", {"succeeded": 1, "expired": 1}, Phase.ENDED, Ending.PARTIAL),
        ("meditating", {"processing": 2}, Phase.RUNNING, None),
    ],
)
async def test_every_status_is_mapped(anthropic, status, counts, phase, ending):
    anthropic.say(f"{PATH}/msgbatch_1", batch(status=status, **counts))
    found = await anthropic.adapter.poll(JOB)
    assert (found.phase, found.ending) == (phase, ending)
    if phase is Phase.RUNNING:
        assert found.counts == Counts(total=2)


async def test_requests_carry_our_key_and_their_line_and_results_come_back_by_it(anthropic):
    anthropic.say(PATH, batch(status="in_progress"))
    request = anthropic.chat("first/with any text", "second")
    (staged,) = [one async for one in anthropic.adapter.stage(request, {})]
    assert staged == {"requests": 2}
    await anthropic.adapter.submit(request, staged)
    ((_, body),) = anthropic.sent
    assert [one["custom_id"] for one in body["requests"]] == ["bw-1-1", "bw-1-2"]
    assert body["requests"][0]["params"] == {
        "model": "m",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    }
    assert anthropic.server.heads[0]["x-api-key"] == "sk-1"
    assert anthropic.server.heads[0]["anthropic-version"] == "2023-06-01"
    assert anthropic.server.heads[0]["content-type"] == "application/json"
    message = {"id": "msg", "model": "m", "content": [{"type": "text", "text": "hi"}], "usage": {"input_tokens": 3}}
    lines = [
        {"custom_id": "bw-1-2", "result": {"type": "succeeded", "message": message}},
        {"custom_id": "bw-1-9", "result": {"type": "expired"}},
        {"custom_id": "bw-1-1", "result": {"type": "something_new"}},
    ]
    anthropic.say(f"{PATH}/msgbatch_1/results", b"\n".join(json.dumps(line).encode() for line in lines))
    ended = Status(phase=Phase.ENDED, raw_status="ended", ending=Ending.PARTIAL)
    found = {one.key: one async for one in anthropic.adapter.results(request, JOB, ended)}
    assert found["second"].value["response"]["body"]["choices"][0]["message"]["content"] == "hi"
    assert found["second"].usage.input_tokens == 3
    assert found["bw-1-9"].error["code"] == "unknown_key"
    assert found["first/with any text"].error["code"] == "missing_result"


async def test_bodies_in_anthropics_own_format_are_sent_and_answered_unchanged(anthropic):
    anthropic.say(PATH, batch(status="in_progress"))
    own = {"model": "claude", "max_tokens": 5, "messages": [], "thinking": {"type": "enabled"}}
    request = anthropic.request({"custom_id": "a", "body": own}, model=None, endpoint="/v1/messages")
    assert list(anthropic.adapter.validate(request)) == []
    assert await anthropic.adapter.inspect(request) == []
    await anthropic.adapter.submit(request, {"requests": 1})
    assert anthropic.sent[0][1]["requests"][0]["params"] == own
    message = {"id": "msg", "usage": {"input_tokens": 3, "output_tokens": 4}}
    line = {"custom_id": "bw-1-1", "result": {"type": "succeeded", "message": message}}
    anthropic.say(f"{PATH}/msgbatch_1/results", line)
    ended = Status(phase=Phase.ENDED, raw_status="ended", ending=Ending.SUCCEEDED)
    (result,) = [one async for one in anthropic.adapter.results(request, JOB, ended)]
    assert result.value["response"]["body"] == message
    assert (result.usage.input_tokens, result.usage.output_tokens) == (3, 4)


async def test_a_field_that_cannot_be_mapped_is_a_problem_with_its_line_and_name(anthropic):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    request = anthropic.request({"custom_id": "a", "body": body}, {"custom_id": "b", "body": {**body, "seed": 1}})
    (problem,) = await anthropic.adapter.inspect(request)
    assert problem.message.startswith("line 2: seed: ")
    assert (problem.param, problem.input_id) == ("body.seed", "i")
    with pytest.raises(SchemaInvalid, match="line 2: seed"):
        await anthropic.adapter.submit(request, {"requests": 2})
    assert anthropic.sent == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"type": "rate_limit_error", "message": "m"}, "rate_limited"),
        ({"type": "overloaded_error", "message": "m"}, "transient"),
        ({"type": "api_error", "message": "m"}, "transient"),
        ({"type": "invalid_request_error", "message": "m"}, "schema_invalid"),
        ({"type": "request_too_large", "message": "m"}, "schema_invalid"),
        ({"type": "authentication_error", "message": "m"}, "credential"),
        ({"type": "permission_error", "message": "m"}, "credential"),
        ({"type": "invalid_request_error", "message": "Your credit balance is too low to …"}, "credential"),
        ({"type": "something_new", "message": "m"}, "fatal"),
    ],
)
async def test_errors_of_items_have_their_class(anthropic, error, kind):
    line = {"custom_id": "bw-1-1", "result": {"type": "errored", "error": {"type": "error", "error": error}}}
    anthropic.say(f"{PATH}/msgbatch_1/results", line)
    ended = Status(phase=Phase.ENDED, raw_status="ended", ending=Ending.FAILED)
    (result,) = [one async for one in anthropic.adapter.results(anthropic.chat("a"), JOB, ended)]
    assert (result.error["kind"], result.error["code"]) == (kind, error["type"])


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        ("429 No", "rate_limit_error", RateLimited),
        ("529 No", "overloaded_error", InDoubt),
        ("413 No", "request_too_large", SchemaInvalid),
        ("401 No", "authentication_error", Fatal),
        ("429 No", "enforced_spend_limit_reached", Fatal),
        ("400 No", "organization_on_hold", Fatal),
    ],
)
async def test_a_refused_submission_has_its_class(anthropic, status, error, kind):
    said = {"type": error, "message": "m"}
    if not error.endswith(("_error", "_large")):
        said = {"type": "rate_limit_error", "message": "m", "details": {"error_code": error}}
    anthropic.say(PATH, {"type": "error", "error": said}, status)
    with pytest.raises(kind) as caught:
        await anthropic.adapter.submit(anthropic.chat("a"), {"requests": 1})
    assert type(caught.value) is kind


def first(key):
    return {"custom_id": f"{key}-1", "result": {"type": "expired"}}


async def find(told, *batches, requests=2):
    told.say(f"{PATH}?limit=100", {"data": list(batches), "has_more": False})
    return await told.adapter.find(told.chat("a", "b"), {"requests": requests}, SINCE)


async def test_an_ended_batch_is_recognized_by_the_ids_of_its_requests(anthropic):
    anthropic.say(f"{PATH}/theirs/results", first("bw-2"))
    anthropic.say(f"{PATH}/strangers/results", {"custom_id": "row 1", "result": {"type": "expired"}})
    anthropic.say(f"{PATH}/ours/results", first("bw-1"))
    found = await find(
        anthropic,
        batch("running", "in_progress", processing=2),
        batch("theirs", succeeded=2),
        batch("strangers", succeeded=2),
        batch("ours", succeeded=1, errored=1),
        batch("larger", succeeded=3),
        batch("older", created_at="2026-10-31T23:00:00Z", succeeded=2),
    )
    assert found == [Job(external_id="ours")]


async def test_a_running_batch_of_the_same_size_is_adopted_and_verified_when_it_ends(anthropic):
    (job,) = await find(
        anthropic, batch("msgbatch_1", "in_progress", processing=2), batch("x", "canceling", processing=3)
    )
    assert job == Job(external_id="msgbatch_1", extra={"is_unproved": True})
    ended = Status(phase=Phase.ENDED, raw_status="ended", ending=Ending.EXPIRED)
    anthropic.say(f"{PATH}/msgbatch_1/results", first("bw-2"))
    with pytest.raises(InDoubt, match="belongs to another task"):
        _ = [one async for one in anthropic.adapter.results(anthropic.chat("a", "b"), job, ended)]
    anthropic.say(f"{PATH}/msgbatch_1/results", first("bw-1"))
    assert len([one async for one in anthropic.adapter.results(anthropic.chat("a", "b"), job, ended)]) == 2
