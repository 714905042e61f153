import json
import re
import sys

import pytest

from batchwright.batches.plan.lines import MIXED, BadLine, GoodLine, LineCheck, split
from batchwright.errors import InvalidInput
from tests.batches.plan.reference import REQUIRED

CHAT = "/v1/chat/completions"


def line(**changes):
    request = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m", "messages": []}}
    return json.dumps({name: value for name, value in {**request, **changes}.items() if value is not ...}).encode()


def body(**changes):
    fields = {"model": "m", "messages": [], **changes}
    return line(body={name: value for name, value in fields.items() if value is not ...})


def found(data, endpoint=CHAT):
    result = LineCheck(endpoint).check(data, 7)
    return [(each.code, each.param, each.message) for each in result.problems] if isinstance(result, BadLine) else []


MISSING = "missing_required_parameter"
CASES = {
    "custom_id missing": (line(custom_id=...), MISSING, "custom_id", "Missing required parameter: 'custom_id'."),
    "custom_id null": (line(custom_id=None), MISSING, "custom_id", "Missing required parameter: 'custom_id'."),
    "custom_id empty": (line(custom_id=""), MISSING, "custom_id", "Missing required parameter: 'custom_id'."),
    "method missing": (line(method=...), MISSING, "method", "Missing required parameter: 'method'."),
    "url missing": (line(url=...), MISSING, "url", "Missing required parameter: 'url'."),
    "body missing": (line(body=...), MISSING, "body", "Missing required parameter: 'body'."),
    "custom_id a number": (
        line(custom_id=3),
        "invalid_type",
        "custom_id",
        "Invalid type for 'custom_id': expected a string, but got a number instead.",
    ),
    "body an array": (
        line(body=[1]),
        "invalid_type",
        "body",
        "Invalid type for 'body': expected an object, but got an array instead.",
    ),
    "body a string": (
        line(body='{"model": "m"}'),
        "invalid_type",
        "body",
        "Invalid type for 'body': expected an object, but got a string instead.",
    ),
    "custom_id long": (
        line(custom_id="ü" * 257),
        "string_above_max_length",
        "custom_id",
        (
            "Invalid 'custom_id': string too long. "
            "Expected a string with at most 512 bytes, but got a string with 514 bytes instead."
        ),
    ),
    "custom_id with NUL": (
        line(custom_id="a\0"),
        "invalid_value",
        "custom_id",
        "Invalid 'custom_id': it holds a NUL character.",
    ),
    "method": (line(method="GET"), "invalid_method", "method", "The method provided for this request must be 'POST'."),
    "url": (
        line(url="/v1/embeddings"),
        "invalid_url",
        "url",
        "The URL provided for this request does not match the batch endpoint.",
    ),
    "model missing": (body(model=...), "invalid_request", "body.model", "Model parameter is required."),
    "model empty": (body(model=""), "invalid_request", "body.model", "Model parameter is required."),
    "model long": (
        body(model="m" * 177),
        "invalid_request",
        "body.model",
        "Model parameter must have at most 176 characters, none of them NUL.",
    ),
    "messages missing": (body(messages=...), "invalid_request", "body.messages", "Messages parameter is required."),
    "messages null": (body(messages=None), "invalid_request", "body.messages", "Messages parameter is required."),
    "messages a string": (
        body(messages="hello"),
        "invalid_type",
        "body.messages",
        "Invalid type for 'body.messages': expected an array, but got a string instead.",
    ),
    "stream": (
        body(stream=True),
        "streaming_unsupported",
        "body.stream",
        "Chat Completions: Streaming is not supported in the Batch API.",
    ),
    "stream that a lenient server takes for true": (
        body(stream=1),
        "streaming_unsupported",
        "body.stream",
        "Chat Completions: Streaming is not supported in the Batch API.",
    ),
}
NOT_JSON = {
    "text": b"hello",
    "cut off": line()[:-1],
    "two objects": line() + line(),
    "an array": b"[" + line() + b"]",
    "NUL byte": line(custom_id="x").replace(b"x", b"\0"),
    "NUL byte in a skipped string": body(user="x").replace(b'"x"', b'"\0"'),
    "invalid UTF-8 in a skipped string": body(user="x").replace(b'"x"', b'"\xff"'),
    "NaN": body(user=77).replace(b"77", b"NaN"),
    "byte order mark": b"\xef\xbb\xbf" + line(),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_line_is_refused_with_openais_message(case):
    data, code, param, message = case
    assert found(data) == [(code, param, message)]


@pytest.mark.parametrize("data", NOT_JSON.values(), ids=NOT_JSON)
def test_a_line_that_is_not_a_json_object_is_refused(data):
    assert found(data) == [("invalid_json_line", None, "This line is not parseable as valid JSON.")]


NOT_JSON_WORDS = "This line is not parseable as valid JSON"


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("\\ud800", "\\ud800"),
        ("\\uDC00x", "\\uDC00"),
        ("\\ud800\\u0041", "\\ud800"),
        ("\\ude00\\ud83d", "\\ude00"),
        ("\\ud83d\\ude00\\ud83d\\ud83d\\ude00", "\\ud83d\\ud83d"),
        ("\\\\ud800 \\\\\\ud801", "\\ud801"),
    ],
)
@pytest.mark.parametrize("field", ["user", "custom_id", "messages"])
def test_half_of_a_surrogate_pair_is_named_with_its_column(text, half, field):
    good = line(custom_id="x") if field == "custom_id" else body(**{field: "x"})
    data = good.replace(b'"x"', f'"ü{text}"'.encode())
    column = data.decode().index(half) + 1
    assert found(data) == [
        ("invalid_json_line", None, f"{NOT_JSON_WORDS}: {half[:6]} at column {column} is half of a surrogate pair.")
    ]


def test_too_deep_nesting_is_named_with_its_column():
    opening = sys.getrecursionlimit()
    for depth in (opening, 100_000):
        data = body(note='[{"\\', user=77).replace(b"77", b"[" * depth + b"]" * depth)
        ((code, _, message),) = found(data)
        assert code == "invalid_json_line"
        levels, column = map(int, re.findall(r"\d+", message)[:2])
        assert (
            message
            == f"{NOT_JSON_WORDS}: it has more than {levels} levels of nesting at column {column}; keep it below 500."
        )
        start = data.decode().index("[" * 10)
        assert column - start + 2 == levels + 1, "the object, its body, and then the arrays"
    cut = body(user=77).replace(b"77", b"[" * 100_000)
    assert "levels of nesting" in found(cut)[0][2]


def test_all_problems_of_a_line_are_reported_together():
    assert [code for code, _, _ in found(b'{"body": {"stream": true}}')] == [
        *[MISSING] * 3,
        "invalid_request",
        "invalid_request",
        "streaming_unsupported",
    ]


@pytest.mark.parametrize(("endpoint", "name"), REQUIRED.items())
def test_each_endpoint_needs_its_own_field(endpoint, name):
    good = line(url=endpoint, body={"model": "m", name: ["hello"]})
    assert found(good, endpoint) == []
    wanted = [("invalid_request", f"body.{name}", f"{name.capitalize()} parameter is required.")]
    assert found(line(url=endpoint, body={"model": "m"}), endpoint) == wanted


def test_an_endpoint_without_batches_is_refused_with_the_ones_that_have_them():
    with pytest.raises(
        InvalidInput, match="'/v1/images' is not supported in batches; use one of /v1/chat/completions, "
    ):
        LineCheck("/v1/images")


def test_a_model_and_an_id_at_their_limits_are_good():
    assert found(body(model="m" * 176)) == []
    assert found(line(custom_id="ü" * 256)) == []


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"  \r\n"])
def test_line_endings_and_array_content_are_fine(end):
    data = body(messages=[{"role": "user", "content": [{"type": "text", "text": "grün"}]}]) + end
    assert LineCheck(CHAT).check(data, 1) == GoodLine(
        "a", "m", json.dumps(json.loads(data)["body"]["messages"]).encode(), 0, CHAT
    )


def test_the_prompt_is_tools_before_messages_whatever_the_order_in_the_body():
    one = body().replace(b'"messages": []', b'"messages":[1],"tools":[2]')
    two = body().replace(b'"messages": []', b'"tools": [2], "messages": [1] ')
    assert LineCheck(CHAT).check(one, 1) == LineCheck(CHAT).check(two, 1) == GoodLine("a", "m", b"[2][1]", 0, CHAT)


def test_the_prompt_of_responses_is_instructions_tools_input():
    url = "/v1/responses"
    data = line(url=url, body={"model": "m", "input": "c", "tools": [2], "instructions": "a"})
    assert LineCheck(url).check(data, 1).prompt == b'"a"[2]"c"'


@pytest.mark.parametrize(
    ("value", "count"), [("text", 1), ([], 0), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)]
)
def test_embedding_inputs_are_counted_as_texts(value, count):
    url = "/v1/embeddings"
    assert LineCheck(url).check(line(url=url, body={"model": "m", "input": value}), 1).inputs == count


def test_if_a_key_is_repeated_the_last_value_counts():
    assert found(body().replace(b'"model": "m"', b'"model": 3, "model": "m"')) == []
    assert found(body().replace(b'"model": "m"', b'"model": "m", "model": null')) != []
    again = LineCheck(CHAT).check(line().replace(b'"custom_id": "a"', b'"custom_id": 1, "custom_id": "b"'), 1)
    assert again == GoodLine("b", "m", b"[]", 0, CHAT)


def test_splitting_a_line_gives_the_body_byte_for_byte():
    raw = b'{ "model":"m",\t"messages":[],"seed":12345678901234567890123, "x":1e999,"x":"\\u0041\\/" }'
    data = b'{"custom_id":"\\u0041b","method":"POST","url":"/v1/chat/completions", "body" : ' + raw + b" }\r"
    assert found(data) == []
    assert split(data) == ("Ab", CHAT, raw)


PAIR = {"text_1": "q", "text_2": ["a", "b"]}


@pytest.mark.parametrize("url", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_score_accepts_each_of_vllms_pairs_and_says_which_half_is_missing(url, names):
    first, second = names
    good = LineCheck(url).check(line(url=url, body={"model": "m", first: "qq", second: ["a", "b", "c"]}), 1)
    assert (good.prompt, good.repeated_bytes) == (b'"qq"["a", "b", "c"]', 2 * len('"qq"'))
    ((code, param, message),) = found(line(url=url, body={"model": "m", first: "q"}), url)
    assert (code, param) == ("invalid_request", "body.text_2")
    assert message == "One of 'text_2', 'documents', 'data_2', 'items' is required."
    ((code, param, _),) = found(line(url=url, body={"model": "m", first: 3, second: "a"}), url)
    assert (code, param) == ("invalid_type", f"body.{first}")


@pytest.mark.parametrize("url", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank_needs_a_query_and_documents(url):
    assert found(line(url=url, body={"model": "m", "query": "q", "documents": ["a"]}), url) == []
    assert found(line(url=url, body={"model": "m"}), url) == [
        ("invalid_request", "body.query", "Query parameter is required."),
        ("invalid_request", "body.documents", "Documents parameter is required."),
    ]


@pytest.mark.parametrize("url", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_audio_is_accepted_by_url_and_only_if_the_answer_is_json(url):
    body = {"model": "m", "file_url": "data:audio/wav;base64,UklGRg=="}
    assert found(line(url=url, body=body), url) == found(line(url=url, body={**body, "response_format": "json"}), url)
    assert LineCheck(url).check(line(url=url, body=body), 1).prompt == b""
    assert found(line(url=url, body={**body, "response_format": "srt"}), url) == [
        (
            "invalid_value",
            "body.response_format",
            "Audio: An answer must be JSON; response_format is 'json' or 'verbose_json'.",
        )
    ]
    ((code, param, _),) = found(line(url=url, body={"model": "m", "file": "x"}), url)
    assert (code, param) == ("invalid_request", "body.file_url")


def test_speech_is_refused_with_the_reason():
    with pytest.raises(
        InvalidInput, match="'/v1/audio/speech' is not supported in batches: it answers with audio, and a line of"
    ):
        LineCheck("/v1/audio/speech")


def test_each_line_of_a_mixed_batch_is_checked_for_its_own_endpoint():
    assert found(line(), MIXED) == []
    assert found(line(url="/v1/score", body={"model": "m", **PAIR}), MIXED) == []
    ((_, param, _),) = found(line(url="/v1/embeddings"), MIXED)
    assert param == "body.input"
    ((code, param, message),) = found(line(url="/v1/images"), MIXED)
    assert (code, param) == ("invalid_url", "url")
    assert message.startswith("The URL '/v1/images' is not supported in batches; use one of /v1/chat/completions, ")
    assert found(line(url="/v1/images", body={"messages": []}), MIXED)[1][1] == "body.model"
    assert found(line(url=3), MIXED)[0][:2] == ("invalid_type", "url")
