import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchwright.batches.journal.envelopes import (
    MESSAGES,
    answered,
    custom_id_of,
    error_code_of,
    is_success,
    request_id,
    unanswered,
    words_in,
    words_of,
)
from batchwright.inference.answers import Failure, Reply, classify

BATCH = "batch_0198f0c2a7b47c1e9d2f4a6b8c0d1e2f"
ID = request_id(BATCH, 77)
BREAKS = "\u2028\u2029\x85"
"""Characters that JSON allows unescaped in a string, but at which Python's `splitlines` ends a line."""
ESCAPED = rb"\u2028\u2029\u0085"


def judged(status=None, body=b"", **reply):
    return classify(Reply(status=status, body=body, **reply), now=0.0)


def parsed(line):
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line.decode().splitlines()) == 1, "clients that split the file like this must get one line"
    return json.loads(line)


def test_the_id_of_a_line_is_made_of_its_batch_and_its_offset():
    assert request_id(BATCH, 255) == "batch_req_0198f0c2a7b47c1e9d2f4a6b8c0d1e2f00000000ff"
    ids = [request_id(BATCH, offset) for offset in (0, 1, 16, 4096, 209_715_200, 2**39, 2**40 - 1)]
    assert ids == sorted(set(ids))
    assert {len(id) for id in ids} == {len(ID)}


def test_an_answer_is_copied_into_its_envelope_byte_for_byte():
    body = b'{ "n":1.0e2,  "u":"\\u00e9\xc3\xa9", "big": 12345678901234567890, "n":1 }'
    line = answered(ID, "a", judged(200, body, request_id="req-7"))
    assert line == (
        b'{"id":"%b","custom_id":"a","response":{"status_code":200,"request_id":"req-7","body":%b},"error":null}\n'
        % (ID.encode(), body)
    )
    assert list(parsed(line)) == ["id", "custom_id", "response", "error"]


def test_line_breaks_of_unicode_are_escaped_and_nothing_else_is_changed():
    """Otherwise readers that split text into lines would cut such a line in two."""
    body = '{ "é“”…\u2027\u202a":1.0e2, "a\\\\%s":"\\u2028%s\\n" }'
    line = answered(ID, f"a{BREAKS}", judged(200, (body % (BREAKS, BREAKS)).encode(), request_id=f"r{BREAKS}"))
    escaped = (body % (ESCAPED.decode(), ESCAPED.decode())).encode()
    assert line == (
        b'{"id":"%b","custom_id":"a%b","response":{"status_code":200,"request_id":"r%b","body":%b},"error":null}\n'
        % (ID.encode(), ESCAPED, ESCAPED, escaped)
    )
    assert parsed(line)["response"]["body"] == json.loads(body % (BREAKS, BREAKS))


@pytest.mark.parametrize("raw", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", *BREAKS, "\r", "\n"])
@pytest.mark.parametrize("body", ['{"a":1}%s', '{"a":"x\\%s"}', "<p>%s</p>", '{"%s'])
def test_an_answer_that_is_not_json_becomes_one_line_even_with_line_breaks(raw, body):
    sent = body % raw
    found = parsed(answered(ID, "a", judged(200, sent.encode())))
    assert found["error"]["body"] == sent if found["error"] else found["response"]["body"] == json.loads(sent)
    told = judged(failure=Failure.LOST, detail=f"lost{raw}")
    assert parsed(answered(ID, f"a{raw}", told))["error"]["message"] == f"lost{raw}"
    assert parsed(unanswered(ID, f"a{raw}", "batch_expired"))["custom_id"] == f"a{raw}"


def test_without_an_id_from_the_server_the_request_has_ours():
    assert parsed(answered(ID, "a", judged(200, b"{}")))["response"]["request_id"] == ID


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
def test_an_error_body_of_the_server_is_kept_as_the_response(status):
    found = parsed(answered(ID, "a", judged(status, b'{"error": {"message": "no"}}')))
    assert found["error"] is None
    assert found["response"] == {"status_code": status, "request_id": ID, "body": {"error": {"message": "no"}}}


@pytest.mark.parametrize(
    ("answer", "more"),
    [
        (judged(502, b'<html>\n"bad"\xff'), {"status_code": 502, "body": '<html>\n"bad"\ufffd'}),
        (judged(200, b"[1]"), {"status_code": 200, "body": "[1]"}),
        (judged(204), {"status_code": 204}),
        (judged(200, b'{"error": "odd"}'), {"status_code": 200, "body": {"error": "odd"}}),
        (judged(307, b"{}"), {"status_code": 307, "body": {}}),
        (judged(200, failure=Failure.TOO_LARGE, detail="longer than 5 bytes"), {"status_code": 200}),
        (judged(200, failure=Failure.LOST, detail="lost"), {"status_code": 200}),
        (judged(failure=Failure.LOST, detail="lost"), {}),
        (judged(failure=Failure.TIMEOUT, detail="late"), {}),
        (judged(failure=Failure.UNSENDABLE, detail="bad url"), {}),
    ],
)
def test_an_unusable_answer_is_an_error_that_quotes_the_server(answer, more):
    found = parsed(answered(ID, "a", answer))
    assert found["response"] is None
    assert found["error"] == {"code": answer.code, "message": answer.message, **more}
    assert found["error"]["message"]


@pytest.mark.parametrize("failure", [Failure.DEADLINE, Failure.EXPIRED])
def test_an_error_code_with_a_fixed_message_has_it_everywhere(failure):
    line = answered(ID, "a", judged(failure=failure, detail="in other words"))
    assert line == unanswered(ID, "a", failure.value)


@pytest.mark.parametrize("code", sorted(MESSAGES))
def test_a_line_without_an_answer_says_why(code):
    line = unanswered(ID, 'with "quotes"', code)
    assert parsed(line) == {
        "id": ID,
        "custom_id": 'with "quotes"',
        "response": None,
        "error": {"code": code, "message": MESSAGES[code]},
    }
    assert error_code_of(line) == (code, 'with "quotes"')


def test_an_expired_line_is_worded_as_at_openai():
    assert MESSAGES["batch_expired"] == "This request could not be executed before the completion window expired."


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"code": "context_length_exceeded", "type": "invalid_request_error"}, "context_length_exceeded"),
        ({"code": None, "type": "invalid_request_error"}, "invalid_request_error"),
        ({"code": 400, "type": "BadRequestError"}, "BadRequestError"),
        ({"code": "", "type": "empty"}, "empty"),
        ({"code": "x" * 65, "type": "short"}, "short"),
        ({"code": "x" * 64}, "x" * 64),
        ({"code": "a\0b", "type": ""}, "http_400"),
        ({"code": "a\nb"}, "http_400"),
        ({"message": "no"}, "http_400"),
        ({"code": {"deep": 1}}, "http_400"),
        ("just words", "http_400"),
        (["code"], "http_400"),
        (None, "http_400"),
    ],
)
def test_the_code_of_an_error_is_the_servers_if_it_is_a_valid_code(error, code):
    line = answered(ID, "a", judged(400, json.dumps({"error": error}).encode()))
    assert error_code_of(line) == (code, "a")


@pytest.mark.parametrize("tail", [b"}", b"}\n", b',"cursor":"12:345"}\n'])
def test_the_code_of_an_error_is_found_without_a_newline_and_before_a_cursor(tail):
    body = b'{"error": {"code": "too_long", "message": "}},\\"error\\":null}"}}'
    line = answered(ID, "a", judged(400, body)).removesuffix(b"}\n") + tail
    assert error_code_of(line) == ("too_long", "a")


def test_a_body_without_an_error_has_its_status_as_code():
    assert error_code_of(answered(ID, "a", judged(404, b'{"detail": "Not Found"}'))) == ("http_404", "a")


def test_a_code_is_found_where_numbers_are_too_large_to_read():
    line = answered(ID, "a", judged(404, b'{"error": {"code": "c", "n": 1e999}}'))
    assert error_code_of(line) == ("http_404", "a")


def test_a_body_may_be_nested_as_deeply_as_it_was_accepted():
    accepted = [depth for depth in range(600, 1400, 20) if judged(400, nested(depth)).code is None]
    assert accepted
    for status, code in ((400, "http_400"), (307, "redirect_refused")):
        line = answered(ID, "a", judged(status, nested(accepted[-1])))
        assert error_code_of(line) == further_down(line, 100) == (code, "a")


def further_down(line, levels):
    return further_down(line, levels - 1) if levels else error_code_of(line)


def nested(depth):
    return b'{"a":' + b"[" * depth + b"]" * depth + b"}"


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    [',"response":', '","response":null', ',"body":', '"', "\\", "a,", *BREAKS, "\\\\\u2028", "\x7f"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(texts, texts, st.dictionaries(texts, json_values, max_size=3), st.sampled_from([200, 404]), st.booleans())
@example(',"response":{"status_code":200,', ',"body":', {}, 404, False)
def test_any_id_and_any_body_can_be_read_back(custom_id, server_id, body, status, is_ascii):
    text = json.dumps(body, ensure_ascii=is_ascii).encode()
    answer = judged(status, text, request_id=server_id)
    line = answered(ID, custom_id, answer)
    found = parsed(line)
    assert found["custom_id"] == custom_id == custom_id_of(line)
    assert is_success(line) == answer.succeeded
    if answer.code is None:
        assert found["response"] == {"status_code": status, "request_id": server_id or ID, "body": body}
        assert any(character in text.decode() for character in BREAKS) or text in line
    if not answer.succeeded:
        assert error_code_of(line)[1] == custom_id


@given(texts, st.binary(max_size=40), st.sampled_from([200, 404, 502]))
def test_any_bytes_of_a_server_make_one_line_of_json(custom_id, body, status):
    answer = judged(status, body)
    found = parsed(answered(ID, custom_id, answer))
    assert found["custom_id"] == custom_id
    assert (found["error"] is None) == (answer.code is None)
    if answer.code is not None and body:
        assert found["error"]["body"] == body.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no such model", "code": "x"}}', "no such model"),
        (b'{"error": "no such\\n model"}', "no such model"),
        (b'{"message": "Not Found"}', "Not Found"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"], "msg": "field required"}]}', "field required"),
        (b'"upstream connect error"', "upstream connect error"),
        (b'{"choices": []}', ""),
        (b'{"error": null, "message": 7}', ""),
        (b"[" * 5000 + b"]" * 5000, ""),
    ],
)
def test_the_error_message_is_found_in_the_formats_of_common_servers(body, words):
    assert words_in(body) == words
    answer = classify(Reply(status=400, body=body), now=0.0)
    code, said = words_of(answered("batch_req_1", "a", answer))
    assert code == (answer.code or code)
    assert words in said


def test_without_an_answer_the_error_message_is_ours():
    late = classify(Reply(failure=Failure.TIMEOUT, detail="too late"), now=0.0)
    assert words_of(answered("batch_req_1", "a", late)) == ("request_timeout", "too late")
    code, words = words_of(unanswered("batch_req_1", "a", "batch_expired"))
    assert (code, words) == ("batch_expired", MESSAGES["batch_expired"])
    page = classify(Reply(status=200, body=b"<html>" + b"x" * 500), now=0.0)
    assert words_of(answered("batch_req_1", "a", page))[1].endswith("as a web site or a proxy does")
