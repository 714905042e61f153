"""Answers as JSON, with or without a schema; and which messages and formats are refused, as by OpenAI."""

import json

import jsonschema
import pytest

from batchwright.simulator import running
from batchwright.simulator.structured import example
from tests.simulator.wire import ask, chat

pytestmark = pytest.mark.timeout(60)

TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
    "additionalProperties": False,
}
INVOICE = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 10, "maximum": 12, "multipleOf": 2},
        "total": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.25},
        "currency": {"enum": ["EUR", "USD", "¥"]},
        "kind": {"const": "invoice"},
        "due": {"type": ["string", "null"], "format": "date"},
        "code": {"type": "string", "minLength": 20, "maxLength": 21},
        "paid": {"type": "boolean"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 2, "maxItems": 4},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 3},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        "payer": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
        "payee": {"allOf": [{"$ref": "#/$defs/person"}, {"required": ["mail"]}]},
        "tree": {"$ref": "#/$defs/node"},
    },
    "additionalProperties": False,
    "$defs": {
        "line": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "cents": {"type": "integer", "minimum": -5, "maximum": -1}},
            "required": ["text", "cents"],
            "additionalProperties": False,
        },
        "person": {"type": "object", "properties": {"mail": {"type": "string", "format": "email"}}},
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        },
    },
}
INVOICE["required"] = [*INVOICE["properties"]]


def wanted(schema, name="thing"):
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


def chat_for(format, prompt="Hello!", **more):
    body = chat(prompt)
    body.pop("max_tokens")
    return {**body, "response_format": format, **more}


@pytest.mark.parametrize("schema", [INVOICE, TREE, {"type": "array", "items": {"type": "number", "minimum": 2.5}}])
def test_the_answer_fits_the_schema_for_every_seed(schema):
    check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    found = [example(schema, seed) for seed in range(200)]
    for one in found:
        check.validate(one)
    assert len({json.dumps(one) for one in found}) > 20
    assert example(schema, 7) == found[7]


async def test_a_schema_is_answered_with_json_of_that_schema_and_an_object_with_an_object():
    async with running() as simulator:
        for n in range(2):
            _, _, body = await ask(simulator.url, chat_for(wanted(INVOICE), f"{n}", n=3))
            texts = [one["message"]["content"] for one in body["choices"]]
            for text in texts:
                jsonschema.validate(json.loads(text), INVOICE)
            assert {one["finish_reason"] for one in body["choices"]} == {"stop"}
            assert len(set(texts)) == 3
            assert body["usage"]["completion_tokens"] == sum(-(-len(text.encode()) // 4) for text in texts)
        _, _, body = await ask(simulator.url, chat_for({"type": "json_object"}, max_tokens=40))
        assert isinstance(json.loads(body["choices"][0]["message"]["content"]), dict)
        assert body["usage"]["completion_tokens"] <= 40
        request = {"model": "m", "input": "x", "text": {"format": {"type": "json_schema", "name": "t", "schema": TREE}}}
        _, _, body = await ask(simulator.url, request, "/v1/responses")
        jsonschema.validate(json.loads(body["output"][0]["content"][0]["text"]), TREE)
        assert body["status"] == "completed"


async def test_json_is_cut_off_by_a_small_maximum_and_bad_at_a_rate_if_asked():
    async with running(faults=["bad_json:0.5"]) as simulator:
        _, _, body = await ask(simulator.url, chat_for(wanted(INVOICE), max_tokens=5))
        assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 5)
        bad = 0
        for n in range(60):
            status, _, body = await ask(simulator.url, chat_for({"type": "json_object"}, f"{n}"))
            assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
            try:
                json.loads(body["choices"][0]["message"]["content"])
            except ValueError:
                bad += 1
        assert 15 < bad < 45
        assert simulator.stats()["faults"]["bad_json"] >= bad


PART = {"type": "text", "text": "Hello!"}


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"content": "x"}, "messages[1].role", "Missing required parameter: 'messages[1].role'."),
        (
            {"role": "boss", "content": "x"},
            "messages[1].role",
            "Invalid value: 'boss'. Supported values are: 'sys",
        ),
        ({"role": "user"}, "messages[1].content", "Invalid value for 'content': expected a string, got null."),
        ({"role": "user", "content": 5}, "messages[1].content", "but got an integer instead."),
        ({"role": "user", "content": []}, "messages[1].content", "empty array"),
        ({"role": "user", "content": [PART, {"type": "txt"}]}, "messages[1].content[1].type", "Invalid value: 'txt'."),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "Missing required parameter"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id", "Missing required parameter"),
    ],
)
async def test_messages_that_openai_refuses_are_refused_with_its_message(message, param, words):
    async with running() as simulator:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}, message]}
        status, _, answer = await ask(simulator.url, body)
        assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error")
        assert words in answer["error"]["message"]


async def test_messages_of_every_kind_are_accepted():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [PART]},
        {"role": "user", "content": [PART, {"type": "image_url", "image_url": {"url": "data:,"}}], "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    async with running() as simulator:
        assert (await ask(simulator.url, {"model": "m", "messages": messages, "max_tokens": 1}))[0] == 200


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ({"type": "xml"}, "Invalid value: 'xml'."),
        ({"type": "json_schema"}, "Missing required parameter: 'response_format.json_schema.name'."),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "'response_format.json_schema.schema'"),
        (wanted({"not": {}}), "Invalid schema for response_format 'thing': 'not' is not permitted"),
        (wanted({"$ref": "#/$defs/no"}), "Invalid schema for response_format 'thing': '#/$defs/no' cannot be found"),
        (wanted({"enum": []}), "this is not a JSON schema"),
        (wanted({"type": "array", "minItems": "5"}), "this is not a JSON schema"),
        (wanted({"type": "array", "minItems": 50_000}), "more than 20000 values"),
        (wanted({"$ref": "#"}), "it contains itself endlessly"),
    ],
)
async def test_a_format_that_cannot_be_written_is_refused(format, words):
    async with running() as simulator:
        status, _, answer = await ask(simulator.url, chat_for(format))
        assert status == 400
        assert words in answer["error"]["message"]


async def test_usage_has_the_details_that_openai_has_now():
    async with running() as simulator:
        _, _, body = await ask(simulator.url, chat("Hello!"))
        usage = body["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0, "audio_tokens": 0}
        names = {"reasoning_tokens", "audio_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}
        assert usage["completion_tokens_details"] == dict.fromkeys(names, 0)
        _, _, body = await ask(simulator.url, {"model": "m", "input": "x"}, "/v1/responses")
        assert body["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
