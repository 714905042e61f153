"""How answers are classified, as tables."""

import email.utils
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.inference.answers import (
    RETRY_AFTER_SECONDS_MAX,
    Failure,
    Reply,
    Usage,
    Verdict,
    classify,
    pause_seconds,
    retry_after_seconds,
)

NOW = 1_800_000_000.0
GOOD = b'{"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


def judged(status=None, body=b"{}", **reply):
    return classify(Reply(status=status, body=body, **reply), now=NOW)


@pytest.mark.parametrize(
    ("status", "body", "verdict", "code", "overload"),
    [
        (200, GOOD, Verdict.ANSWER, None, False),
        (201, b"{}", Verdict.ANSWER, None, False),
        (200, b"[]", Verdict.COUNTED, "invalid_response", False),
        (200, b"", Verdict.COUNTED, "invalid_response", False),
        (204, b"", Verdict.COUNTED, "invalid_response", False),
        (200, b"<html>", Verdict.COUNTED, "invalid_response", False),
        (200, GOOD[:-1], Verdict.COUNTED, "invalid_response", False),
        (200, b'{"error": {"message": "no"}}', Verdict.COUNTED, "error_in_response", False),
        (200, b'{"error": {"message": "no"}, "choices": []}', Verdict.COUNTED, "error_in_response", False),
        (200, b'{"error": null, "output": [{}]}', Verdict.ANSWER, None, False),
        (200, b'{"error": "odd", "data": [{"embedding": []}]}', Verdict.ANSWER, None, False),
        (301, b"", Verdict.ANSWER, "redirect_refused", False),
        (307, b"{}", Verdict.ANSWER, "redirect_refused", False),
        (400, b'{"error": {"message": "bad"}}', Verdict.ANSWER, None, False),
        (401, b'{"error": {"message": "key"}}', Verdict.ANSWER, None, False),
        (404, b"not found", Verdict.ANSWER, "invalid_response", False),
        (408, b"{}", Verdict.COUNTED, None, False),
        (413, b"{}", Verdict.ANSWER, None, False),
        (422, b"{}", Verdict.ANSWER, None, False),
        (429, b"{}", Verdict.UNAVAILABLE, None, True),
        (500, b"{}", Verdict.COUNTED, None, False),
        (501, b"oops", Verdict.COUNTED, "invalid_response", False),
        (502, b"<html>", Verdict.UNAVAILABLE, "invalid_response", False),
        (503, b"", Verdict.UNAVAILABLE, "invalid_response", True),
        (504, b"{}", Verdict.COUNTED, None, False),
        (529, b"{}", Verdict.UNAVAILABLE, None, True),
    ],
)
def test_the_status_and_the_body_decide(status, body, verdict, code, overload):
    found = judged(status, body)
    assert (found.verdict, found.code, found.is_overload) == (verdict, code, overload)
    assert found.succeeded == (verdict is Verdict.ANSWER and status < 300)


@pytest.mark.parametrize(
    ("failure", "verdict", "overload"),
    [
        (Failure.CONNECT, Verdict.UNAVAILABLE, False),
        (Failure.LOST, Verdict.COUNTED, False),
        (Failure.TIMEOUT, Verdict.COUNTED, True),
        (Failure.DEADLINE, Verdict.ANSWER, False),
        (Failure.EXPIRED, Verdict.ANSWER, False),
        (Failure.TOO_LARGE, Verdict.ANSWER, False),
        (Failure.UNSENDABLE, Verdict.ANSWER, False),
    ],
)
@pytest.mark.parametrize("status", [None, 200, 429])
def test_a_failure_of_the_connection_decides_before_any_status(failure, verdict, overload, status):
    found = judged(status, b"", failure=failure, detail="because")
    assert (found.verdict, found.code, found.message) == (verdict, failure.value, "because")
    assert found.is_overload == overload
    assert not found.succeeded


def test_every_failure_has_its_verdict():
    for failure in Failure:
        assert judged(failure=failure).code == failure


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("0", 0.0),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("9" * 400, RETRY_AFTER_SECONDS_MAX),
        (email.utils.formatdate(NOW + 20, usegmt=True), 20.0),
        (email.utils.formatdate(NOW - 20, usegmt=True), 0.0),
        (email.utils.formatdate(NOW + 86400, usegmt=True), RETRY_AFTER_SECONDS_MAX),
        ("Sun, 99 Nov 2026 25:61:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_capped(text, seconds):
    assert retry_after_seconds(text, now=NOW) == seconds


def test_pauses_double_up_to_the_longest_and_are_never_shorter_than_retry_after():
    random.seed(1)
    for attempt, least, most in [(1, 0.5, 1.0), (2, 1.0, 2.0), (4, 4.0, 8.0), (50, 30.0, 60.0)]:
        pauses = [pause_seconds(judged(500), attempt, initial=1.0, longest=60.0) for _ in range(200)]
        assert least <= min(pauses) < max(pauses) <= most
    asked = judged(429, retry_after="120")
    assert all(120 <= pause_seconds(asked, 1, initial=1.0, longest=60.0) <= 132 for _ in range(200))


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}, Usage(input=9, output=4)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(input=9, cached=8)),
        (
            {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}},
            Usage(input=9, output=4, cached=2),
        ),
        (
            {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 7, "audio_tokens": 1}},
            Usage(output=9, reasoning=7),
        ),
        ({"output_tokens": 9, "output_tokens_details": {"reasoning_tokens": 0}}, Usage(output=9, reasoning=0)),
        ({"output_tokens": 9, "output_tokens_details": {"reasoning_tokens": "7"}}, Usage(output=9)),
        ({"output_tokens": 9, "completion_tokens_details": "many"}, Usage(output=9)),
        ({"prompt_tokens": 9, "total_tokens": 9}, Usage(input=9)),
        ({"prompt_tokens": "9", "completion_tokens": None}, Usage()),
        ({"prompt_tokens": -1, "completion_tokens": True}, Usage()),
        ({"prompt_tokens": 2**31, "completion_tokens": 2**31 - 1}, Usage(output=2**31 - 1)),
        ({"prompt_tokens": 1e30, "prompt_tokens_details": [1]}, Usage()),
        ([1, 2], Usage()),
        (None, Usage()),
        ("many", Usage()),
    ],
)
def test_usage_is_read_leniently(usage, expected):
    assert judged(200, json.dumps({"choices": [1], "usage": usage}).encode()).usage == expected


def test_absent_or_impossible_usage_is_unknown():
    assert judged(200, b'{"choices": [1]}').usage == Usage()
    assert judged(200, b'{"choices": [1], "usage": {"prompt_tokens": 1e999}}').usage == Usage()


def test_a_pretty_printed_body_becomes_one_line_and_nothing_else_changes():
    body = b'{\r\n  "a" : "x\\n\\r y",\r\n\t"b": [ 1.0,\n 12345678901234567890 ]\r}\n'
    line = judged(200, body).body
    assert line == body.replace(b"\r", b" ").replace(b"\n", b" ")
    assert json.loads(line) == json.loads(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    value=st.dictionaries(st.text(), JSON, max_size=4), indent=st.sampled_from([None, 0, 2, "\t"]), ascii=st.booleans()
)
def test_any_json_object_survives_byte_for_byte(value, indent, ascii):
    text = json.dumps({**value, "choices": [1]}, indent=indent, ensure_ascii=ascii)
    try:
        body = text.encode()
    except UnicodeEncodeError:
        return
    found = judged(200, body)
    if found.code == "invalid_response":  # half a surrogate pair, written as an escape, is not valid text
        assert "\\ud" in text
        return
    assert b"\n" not in found.body
    assert len(found.body) == len(body)
    assert all(new == old or (new == 32 and old in b"\r\n") for new, old in zip(found.body, body, strict=True))


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda inner: b'{"a": "' + inner + b'"}'))
def test_any_body_becomes_one_line_of_json(body):
    found = judged(200, body)
    assert b"\n" not in found.body
    assert b"\r" not in found.body
    parsed = json.loads(found.body)
    assert isinstance(parsed, dict) == (found.code is None)
    if found.code is not None:
        assert parsed == body.decode("utf-8", "replace")


@pytest.mark.parametrize(
    "body", [b'{"a": "x\ny"}', b'{"a": "\xff"}', b'{"a": NaN}', b"{} {}", b"\xef\xbb\xbf{}", b'{"a":' + b"[" * 5000]
)
def test_a_body_that_is_almost_json_is_kept_as_text(body):
    found = judged(200, body)
    assert found.code == "invalid_response"
    assert json.loads(found.body) == body.decode("utf-8", "replace")
