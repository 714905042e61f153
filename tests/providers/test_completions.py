"""Files of requests and results: what is refused before anything is paid, and what is kept of bad results."""

import dataclasses
import json
import tracemalloc

import pytest

from batchwright.errors import SchemaInvalid
from batchwright.inference.http import Http
from batchwright.providers import completions
from batchwright.providers.contract import Abilities, Counts, Ending, Input, Phase, Request, Result, Status, Usage
from batchwright.providers.errors import ErrorTable, Kind
from batchwright.providers.lines import split_lines
from batchwright.providers.tools import AdapterTools

ABILITIES = Abilities(task_types=frozenset({"completion"}), can_cancel=True, can_find=True)
TABLE = ErrorTable(by_code={"rate_limit": Kind.RATE_LIMITED})


def line(id="a", **fields):
    body = {"model": "m", "messages": []}
    return {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body, **fields}


def jsonl(*lines):
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


@pytest.fixture
async def tools():
    stored = {}

    async def read(id):
        data = stored[id]
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    async with Http() as http:
        made = AdapterTools(http, open_stored=read, environment={})
        made.stored = stored
        yield made


def request(tools, *lines, **options):
    tools.stored["f"] = jsonl(*lines)
    input = Input(id="i", uri="file:f", filename="in.jsonl", bytes=len(tools.stored["f"]))
    return Request(key="bw-1", task_type="completion", model="m", inputs=[input], options=options)


async def chunks(*parts):
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], []),
        ([b"a\nb"], [b"a", b"b"]),
        ([b"a", b"b\n", b"", b"\nc", b"\n"], [b"ab", b"c"]),
        ([b"a\r\n \n\n"], [b"a\r"]),
        ([b"\xe2\x80", b"\xa8a\x0b\x85\n"], [b"\xe2\x80\xa8a\x0b\x85"]),
        ([b"12345\n1", b"23456\n", b"7"], [b"12345", None, b"7"]),
        ([b"123", b"456", b"789"], [None]),
        ([b"1234567890\nab"], [None, b"ab"]),
    ],
)
async def test_only_line_feeds_end_lines_and_long_ones_are_skipped(parts, expected):
    assert [one async for one in split_lines(chunks(*parts), 5 if None in expected else 100)] == expected


@pytest.mark.parametrize(
    ("lines", "message", "param"),
    [
        ([], "the file has no requests", None),
        ([line("a"), b"{broken"], "line 2: it is not JSON", None),
        ([b"[1]"], "line 1: it is not a JSON object", None),
        ([line(5)], "line 1: custom_id must be a string", "custom_id"),
        ([line("")], "line 1: custom_id must be a string", "custom_id"),
        ([line(body=[])], "line 1: body must be a JSON object", "body"),
        ([line(url=5)], "line 1: url must be a string", "url"),
        ([line("a"), line("b"), line("a")], "line 3: line 1 has the same custom_id", "custom_id"),
        ([line(url="/v1/embeddings")], "line 1: its url is '/v1/embeddings'", "url"),
        ([line("a"), line("b", body={"model": "other"})], "line 2: its model differs", "body.model"),
        ([line(str(n)) for n in range(4)], "the file has more than 3 requests", None),
    ],
)
async def test_a_bad_line_is_named_before_anything_is_paid(tools, lines, message, param):
    abilities = dataclasses.replace(ABILITIES, requests_max=3)
    (problem,) = await completions.check_lines(tools, request(tools, *lines), abilities)
    assert problem.message.startswith(message)
    assert (problem.param, problem.input_id) == (param, "i")


async def test_good_lines_are_accepted_and_bad_ones_are_listed_up_to_a_limit(tools):
    assert await completions.check_lines(tools, request(tools, line("a"), line("b")), ABILITIES) == []
    problems = await completions.check_lines(tools, request(tools, *[b"{"] * 500), ABILITIES)
    assert len(problems) == 100


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"task_type": "transcription"}, "task_type"),
        ({"inputs": []}, "inputs"),
        ({"options": {"endpoint": "/v1/songs"}}, "endpoint"),
    ],
)
async def test_a_request_that_is_not_for_the_provider_is_refused(tools, changed, param):
    asked = dataclasses.replace(request(tools, line()), **changed)
    (problem,) = completions.check_request(asked, ABILITIES, [completions.CHAT])
    assert problem.param == param


async def test_a_file_that_is_too_large_is_refused(tools):
    abilities = dataclasses.replace(ABILITIES, request_bytes_max=10)
    (problem,) = completions.check_request(request(tools, line()), abilities, [completions.CHAT])
    assert "the provider accepts 10" in problem.message


async def test_a_file_that_is_larger_than_stated_is_refused(tools):
    asked = request(tools, line("a"), line("b"), line("c"))
    abilities = dataclasses.replace(ABILITIES, request_bytes_max=asked.inputs[0].bytes - 20)
    (problem,) = await completions.check_lines(tools, asked, abilities)
    assert "the provider's limit" in problem.message


async def test_a_file_is_rewritten_with_a_known_length(tools):
    asked = request(tools, line("a"), line("b"))
    upload = await completions.measured(tools, asked, lambda one: one.custom_id.encode())
    assert (upload.length, [chunk async for chunk in upload.open()]) == (4, [b"a\nb\n"])
    framed = await completions.measured(tools, asked, lambda one: one.custom_id.encode(), b"[", b",", b"]")
    assert (framed.length, [chunk async for chunk in framed.open()]) == (5, [b"[a,b]"])
    assert (upload.content_type, framed.content_type) == ("application/jsonl", "application/json")


async def test_a_line_that_became_bad_after_the_check_stops_the_upload(tools):
    with pytest.raises(SchemaInvalid, match="line 2: it is not JSON"):
        await completions.measured(tools, request(tools, line("a"), b"{"), lambda one: one.raw)


def said(raw):
    return completions.read_openai_line(TABLE, json.dumps(raw).encode())


def test_a_good_line_is_kept_as_it_is():
    raw = {"id": "1", "custom_id": "a", "response": {"status_code": 200, "body": {"usage": {"prompt_tokens": 3}}}}
    result = said(raw)
    assert result == Result(key="a", value={**raw, "error": None}, usage=Usage(input_tokens=3))


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"response": {"status_code": 400, "body": {"error": {"message": "m"}}}}, "schema_invalid", "failed"),
        ({"response": {"status_code": 429, "body": {}}, "error": None}, "rate_limited", "failed"),
        ({"response": {"status_code": 500, "body": "oops"}}, "transient", "failed"),
        ({"response": None, "error": {"code": "rate_limit", "message": "m"}}, "rate_limited", "rate_limit"),
        ({"response": {"status_code": 200, "body": {}}, "error": {"code": "other"}}, "fatal", "other"),
    ],
)
def test_a_failed_line_says_why_and_keeps_the_response(fields, kind, code):
    result = said({"custom_id": "a", **fields})
    assert (result.value, result.error["kind"], result.error["code"]) == (None, kind, code)
    assert result.error.get("response") == (fields["response"] or None)


GOOD = {"custom_id": "a", "response": {"status_code": 200, "body": {"x": 1}}}
BAD = [
    b'{"custom_id": "b", "resp',
    b"[]",
    b'"text"',
    b"null",
    b'{"custom_id": 7, "response": {}}',
    b'{"response": {}}',
    b'{"custom_id": "b"}',
    b'{"custom_id": "b", "response": 5}',
    b'{"custom_id": "b", "response": {"status_code": 200}}',
    b"\xff\xfe",
    b"[" * 3000,
]


def read_line(raw):
    return completions.read_openai_line(TABLE, raw)


@pytest.mark.parametrize("bad", BAD)
async def test_a_malformed_line_is_skipped_and_logged_without_its_content(bad, caplog):
    stream = chunks(json.dumps(GOOD).encode() + b"\n" + bad + b"\n" + json.dumps({**GOOD, "custom_id": "c"}).encode())
    found = [
        one async for one in completions.read_results(stream, lambda raw: completions.read_openai_line(TABLE, raw))
    ]
    assert [one.key for one in found if one.value is not None] == ["a", "c"]
    assert "custom_id" not in caplog.text


MISSING = {"kind": "transient", "code": "missing_result", "message": "m"}


async def reconciled(results, expected):
    return [one async for one in completions.reconcile(chunks(*results), expected, MISSING)]


async def test_results_are_compared_with_what_was_sent():
    first, second = Result(key="a", value={"n": 1}), Result(key="a", value={"n": 2})
    stranger = Result(key="z", value={"response": {"status_code": 200}}, usage=Usage(input_tokens=1))
    found = await reconciled([Result(key="b", value={}), first, second, stranger], ["a", "b", "c"])
    assert [one.key for one in found] == ["b", "a", "z", "c"]
    assert found[1] is first
    assert (found[2].value, found[2].error["code"]) == (None, "unknown_key")
    assert (found[2].error["response"], found[2].usage) == ({"status_code": 200}, Usage(input_tokens=1))
    assert found[3].error == MISSING


async def test_without_the_file_of_requests_results_are_still_delivered():
    assert [one.key for one in await reconciled([Result(key="b", value={})], None)] == ["b"]


@pytest.mark.thorough
async def test_many_results_take_little_memory():
    """80 MB in 20,000 lines."""
    text = "x" * 4000

    async def pour():
        for n in range(20_000):
            yield json.dumps(
                {**GOOD, "custom_id": str(n), "response": {"status_code": 200, "body": {"t": text}}}
            ).encode()
            yield b"\n"

    ids = [str(n) for n in range(20_000)]
    tracemalloc.start()
    try:
        lines = completions.read_results(pour(), read_line)
        count = 0
        async for result in completions.reconcile(lines, ids, MISSING):
            count += result.value is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert peak < 12_000_000


@pytest.mark.parametrize(
    ("counts", "ending"),
    [
        (Counts(total=3, succeeded=3, failed=0), Ending.SUCCEEDED),
        (Counts(total=3, succeeded=1, failed=2), Ending.PARTIAL),
        (Counts(total=3, succeeded=0, failed=3), Ending.FAILED),
        (Counts(total=0, succeeded=0, failed=0), Ending.FAILED),
        (Counts(), Ending.SUCCEEDED),
    ],
)
def test_counts_decide_how_a_complete_job_ended(counts, ending):
    assert completions.ending_of(counts) is ending


@pytest.mark.parametrize(
    ("ending", "code", "kind"),
    [
        (Ending.EXPIRED, "batch_expired", "transient"),
        (Ending.CANCELLED, "batch_cancelled", "fatal"),
        (Ending.SUCCEEDED, "missing_result", "transient"),
        (Ending.FAILED, "own", "schema_invalid"),
    ],
)
def test_the_error_of_a_missing_result_depends_on_how_the_job_ended(ending, code, kind):
    own = {"kind": "schema_invalid", "code": "own", "message": "m"}
    error = completions.missing_error(Status(phase=Phase.ENDED, raw_status="x", ending=ending, error=own))
    assert (error["code"], error["kind"]) == (code, kind)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5, 5), ("5", 5), (0, 0), (-1, None), (True, None), (2**40, None), ("x", None), (None, None), (1.5, None)],
)
def test_implausible_counts_are_ignored(value, expected):
    assert completions.count(value) == expected
