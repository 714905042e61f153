"""Chat requests as Anthropic's messages and back: tables of what maps, and of what is refused."""

import pytest

from batchwright.providers.translate.anthropic import MAX_TOKENS, to_chat, to_messages
from batchwright.providers.translate.chat import Unmapped

HELLO = [{"role": "user", "content": "hello"}]
TEXT = [{"type": "text", "text": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object", "x": 1}}}
PNG = "data:image/png;base64,AAAA"


def asked(**fields):
    return to_messages({"model": "m", "max_tokens": 9, "messages": HELLO, **fields})


def turns(*messages):
    return to_messages({"model": "m", "messages": list(messages)})["messages"]


def test_the_smallest_request():
    assert to_messages({"model": "m", "messages": HELLO}) == {
        "model": "m",
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": TEXT}],
    }
    assert to_messages({"model": "m", "messages": HELLO}, "claude")["model"] == "claude"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 4}, {"temperature": 0.5, "top_p": 0.9, "top_k": 4}),
        ({"stop": "x"}, {"stop_sequences": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop_sequences": ["x", "y"]}),
        ({"user": "u"}, {"metadata": {"user_id": "u"}}),
        ({"safety_identifier": "s", "user": "u"}, {"metadata": {"user_id": "s"}}),
        (
            {"tools": [TOOL]},
            {"tools": [{"name": "look", "description": "d", "input_schema": {"type": "object", "x": 1}}]},
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "look", "strict": True}}]},
            {"tools": [{"name": "look", "input_schema": {"type": "object"}, "strict": True}]},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
        ({"reasoning_effort": "low"}, {"output_config": {"effort": "low"}}),
        ({"tools": [TOOL], "tool_choice": "none"}, {"tool_choice": {"type": "none"}}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            {"tool_choice": {"type": "tool", "name": "look"}},
        ),
        (
            {"tools": [TOOL], "parallel_tool_calls": False},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        (
            {"n": 1, "stream": False, "logprobs": False, "seed": None, "presence_penalty": 0, "store": False},
            {"max_tokens": 9},
        ),
        ({"response_format": {"type": "text"}, "logit_bias": {}, "service_tier": "auto", "tools": []}, {}),
    ],
)
def test_fields_that_map(fields, expected):
    found = asked(**fields)
    assert found == {**found, **expected}
    allowed = {"model", "max_tokens", "messages", *expected} | ({"tools"} if fields.get("tools") else set())
    assert set(found) == allowed


def test_instructions_are_the_system():
    found = asked(
        messages=[
            {"role": "system", "content": "be short"},
            {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
            *HELLO,
        ]
    )
    assert found["system"] == [{"type": "text", "text": "be short"}, {"type": "text", "text": "be kind"}]


def test_images_and_documents():
    parts = [
        {"type": "text", "text": "what is this"},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "image_url", "image_url": {"url": "https://a.com/b.png", "detail": "low"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,BBBB"}},
    ]
    assert turns({"role": "user", "content": parts})[0]["content"] == [
        {"type": "text", "text": "what is this"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "image", "source": {"type": "url", "url": "https://a.com/b.png"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "BBBB"}},
    ]


def test_calls_of_tools_and_their_results():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    other = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": ""}}
    assert turns(
        *HELLO,
        {"role": "assistant", "content": "wait", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": "and?"},
    )[1:] == [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
                {"type": "tool_use", "id": "c2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "two"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]


def message(**fields):
    return {"messages": [{"role": "user", "content": "x", **fields}]}


def part(**fields):
    return message(content=[fields])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"seed": 1}, "seed"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort"),
        ({"functions": [{}]}, "functions"),
        ({"something_new": 1}, "something_new"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [*HELLO, {"role": "system", "content": "x"}]}, "messages.1.role"),
        (message(role="function"), "messages.0.role"),
        (message(name="bob"), "messages.0.name"),
        (message(content=5), "messages.0.content"),
        (message(content=None), "messages.0.content"),
        (part(type="input_audio"), "messages.0.content.0"),
        (part(type="image_url", image_url={"url": "http://a.com/b.png"}), "messages.0.content.0.image_url.url"),
        (part(type="image_url", image_url={"url": "data:image/bmp;base64,A"}), "messages.0.content.0.image_url.url"),
        (part(type="image_url"), "messages.0.content.0.image_url.url"),
        (part(type="file", file={"file_id": "f"}), "messages.0.content.0.file"),
        (part(type="file", file={"file_data": "data:text/csv;base64,A"}), "messages.0.content.0.file"),
        (message(role="assistant", tool_calls=[{"type": "custom"}]), "messages.0.tool_calls.0"),
        (
            message(role="assistant", tool_calls=[{"function": {"name": "a", "arguments": "[1]"}}]),
            "messages.0.tool_calls.0.function.arguments",
        ),
        (message(role="assistant", function_call={}), "messages.0.function_call"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
def test_what_does_not_map_is_refused_by_name(fields, field):
    with pytest.raises(Unmapped) as caught:
        asked(**fields)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def said(content, reason="end_turn", **usage):
    return to_chat({"id": "msg_1", "model": "claude", "content": content, "stop_reason": reason, "usage": usage}, 7)


def test_an_answer_is_a_chat_completion():
    usage = {"input_tokens": 10, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2, "output_tokens": 3}
    assert said([{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}], **usage) == {
        "id": "msg_1",
        "object": "chat.completion",
        "created": 7,
        "model": "claude",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 17,
            "completion_tokens": 3,
            "total_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 5},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_an_answer_with_calls_and_thoughts():
    content = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}},
    ]
    (choice,) = said(content, "tool_use")["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}],
        "reasoning_content": "hm",
    }


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("refusal", "content_filter"),
        ("something_new", "stop"),
    ],
)
def test_reasons_for_the_end(reason, expected):
    assert said([{"type": "text", "text": ""}], reason)["choices"][0]["finish_reason"] == expected
