"""Chat requests as Gemini's and back: tables of what maps, and of what is refused."""

import pytest

from batchwright.providers.translate.chat import Unmapped
from batchwright.providers.translate.gemini import to_chat, to_contents

HELLO = [{"role": "user", "content": "hello"}]
CONTENTS = [{"role": "user", "parts": [{"text": "hello"}]}]
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
DECLARED = [{"name": "look", "description": "d", "parametersJsonSchema": {"type": "object"}}]


def asked(**fields):
    return to_contents({"model": "m", "messages": HELLO, **fields})


def turns(*messages, **options):
    return to_contents({"model": "m", "messages": list(messages)}, **options)["contents"]


def config(**fields):
    return {"generationConfig": fields}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"max_tokens": 5}, config(maxOutputTokens=5)),
        ({"max_tokens": 5, "max_completion_tokens": 6}, config(maxOutputTokens=6)),
        ({"temperature": 2, "top_p": 0.5, "top_k": 3}, config(temperature=2, topP=0.5, topK=3)),
        ({"seed": 1, "presence_penalty": 0.1, "frequency_penalty": 0.2},
         config(seed=1, presencePenalty=0.1, frequencyPenalty=0.2)),
        ({"n": 1}, {}),
        ({"n": 2}, config(candidateCount=2)),
        ({"stop": "x"}, config(stopSequences=["x"])),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, config(responseMimeType="application/json")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
         config(responseMimeType="application/json", responseJsonSchema={"type": "object"})),
        ({"tools": [TOOL]}, {"tools": [{"functionDeclarations": DECLARED}]}),
        ({"tools": [TOOL], "tool_choice": "none"},
         {"tools": [{"functionDeclarations": DECLARED}], "toolConfig": {"functionCallingConfig": {"mode": "NONE"}}}),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
         {"tools": [{"functionDeclarations": DECLARED}],
          "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}}}),
        ({"user": "u", "store": True, "metadata": {"a": "b"}}, {}),
        ({"stream": False, "logprobs": None, "parallel_tool_calls": True}, {}),
    ],
)  # fmt: skip
def test_fields_that_map(fields, expected):
    assert asked(**fields) == {"contents": CONTENTS, **expected}


def test_instructions_are_the_system():
    found = asked(messages=[{"role": "system", "content": "be short"}, *HELLO])
    assert found == {"contents": CONTENTS, "systemInstruction": {"parts": [{"text": "be short"}]}}


def test_images_audio_and_files():
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "mp3"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,CCCC"}},
    ]
    assert turns({"role": "user", "content": parts})[0]["parts"] == [
        {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
        {"inlineData": {"mimeType": "audio/mp3", "data": "BBBB"}},
        {"inlineData": {"mimeType": "application/pdf", "data": "CCCC"}},
    ]


@pytest.mark.parametrize("url", ["https://a.com/b.jpg?x=y", "gs://bucket/b.jpg"])
def test_vertex_takes_images_by_url(url):
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    assert turns(message, has_uris=True)[0]["parts"] == [{"fileData": {"fileUri": url, "mimeType": "image/jpeg"}}]
    with pytest.raises(Unmapped, match="images only as data URLs"):
        turns(message)


def test_calls_of_tools_and_their_results():
    def call(id, name):
        return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"at": 1}'}}

    assert turns(
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call("c1", "look"), call("c2", "hear")]},
        {"role": "tool", "tool_call_id": "c2", "content": '{"x": 1}'},
        {"role": "tool", "tool_call_id": "c1", "content": "plain"},
        {"role": "assistant", "content": "done"},
    )[1:] == [
        {
            "role": "model",
            "parts": [
                {"functionCall": {"name": "look", "args": {"at": 1}}},
                {"functionCall": {"name": "hear", "args": {"at": 1}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "hear", "response": {"x": 1}}},
                {"functionResponse": {"name": "look", "response": {"result": "plain"}}},
            ],
        },
        {"role": "model", "parts": [{"text": "done"}]},
    ]


def part(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream": True}, "stream"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"stop": ["1", "2", "3", "4", "5", "6"]}, "stop"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (part(type="image_url", image_url={"url": "https://a.com/b.png"}), "messages.0.content.0.image_url.url"),
        (part(type="input_audio", input_audio={"format": "flac"}), "messages.0.content.0.input_audio"),
        (part(type="video"), "messages.0.content.0"),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools.0.function.strict"),
    ],
)
def test_what_does_not_map_is_refused_by_name(fields, field):
    with pytest.raises(Unmapped) as caught:
        asked(**fields)
    assert caught.value.field == field


def test_a_response_is_a_chat_completion():
    response = {
        "responseId": "r1",
        "modelVersion": "gemini-2.5",
        "candidates": [
            {
                "content": {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "hello"}]},
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 10,
            "candidatesTokenCount": 3,
            "thoughtsTokenCount": 4,
            "cachedContentTokenCount": 2,
        },
    }
    found = to_chat(response, 7)
    message = {"role": "assistant", "content": "hello", "refusal": None, "reasoning_content": "hm"}
    assert (found["id"], found["model"], found["created"]) == ("r1", "gemini-2.5", 7)
    assert found["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert found["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }


def test_several_candidates_are_several_choices():
    candidates = [{"content": {"parts": [{"text": text}]}, "index": n} for n, text in enumerate("ab")]
    found = to_chat({"candidates": candidates}, 7, "m")
    assert [(one["index"], one["message"]["content"]) for one in found["choices"]] == [(0, "a"), (1, "b")]
    assert found["model"] == "m"


def test_calls_have_ids_and_arguments():
    parts = [{"functionCall": {"name": "look", "args": {"a": 1}}}, {"functionCall": {"name": "hear", "id": "x"}}]
    (choice,) = to_chat({"candidates": [{"content": {"parts": parts}, "finishReason": "STOP"}]}, 7)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "call_0_0", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}},
        {"id": "x", "type": "function", "function": {"name": "hear", "arguments": "{}"}},
    ]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("STOP", "stop"), ("MAX_TOKENS", "length"), ("SAFETY", "content_filter"), ("NEW_ONE", "stop"), (None, "stop")],
)
def test_reasons_for_the_end(reason, expected):
    found = to_chat({"candidates": [{"content": {"parts": [{"text": "x"}]}, "finishReason": reason}]}, 7)
    assert found["choices"][0]["finish_reason"] == expected


def test_a_refused_prompt_is_a_filtered_answer():
    (choice,) = to_chat({"promptFeedback": {"blockReason": "SAFETY"}}, 7)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("content_filter", None)
