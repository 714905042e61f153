"""OpenAI's chat requests as Gemini's, and Gemini's answers as OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batchwright.providers.translate import chat
from batchwright.providers.translate.chat import Unmapped

_KNOWN = frozenset(
    {
        "frequency_penalty", "max_completion_tokens", "max_tokens", "messages", "model", "n", "presence_penalty",
        "response_format", "seed", "stop", "temperature", "tool_choice", "tools", "top_k", "top_p",
    }
)  # fmt: skip
_CONFIG = {
    "frequency_penalty": "frequencyPenalty",
    "max_completion_tokens": "maxOutputTokens",
    "max_tokens": "maxOutputTokens",
    "n": "candidateCount",
    "presence_penalty": "presencePenalty",
    "seed": "seed",
    "temperature": "temperature",
    "top_k": "topK",
    "top_p": "topP",
}
_STOPS_MAX = 5
_MODES = {"none": "NONE", "required": "ANY", "function": "ANY"}
_AUDIO = {"wav": "audio/wav", "mp3": "audio/mp3"}
_REASONS = {"STOP": "stop", "MAX_TOKENS": "length"}
_FILTERED = frozenset(
    {
        "BLOCKLIST", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION", "IMAGE_SAFETY", "LANGUAGE", "PROHIBITED_CONTENT",
        "RECITATION", "SAFETY", "SPII",
    }
)  # fmt: skip


def to_contents(body: Mapping[str, Any], *, has_uris: bool = False) -> dict[str, Any]:
    """A GenerateContentRequest; raises Unmapped for a field that has no counterpart at Gemini.

    With `has_uris` images may also be https or gs URLs, which Vertex fetches itself.
    """
    chat.refuse_unknown(body, _KNOWN)
    system, messages = chat.messages_of(body)
    request: dict[str, Any] = {"contents": _contents(messages, has_uris)}
    if system:
        request["systemInstruction"] = {"parts": [{"text": text} for text in system]}
    if config := _config(body):
        request["generationConfig"] = config
    return request | _tools(body)


def to_chat(response: Mapping[str, Any], created: int, model: str = "") -> dict[str, Any]:
    """Gemini's response as a chat completion."""
    candidates = response.get("candidates") or []
    choices = [_choice(index, candidate) for index, candidate in enumerate(candidates)]
    if not choices:  # the prompt itself was refused
        choices = [chat.choice(0, chat.message_of(None, ()), "content_filter")]
    return chat.completion(
        str(response.get("responseId") or ""),
        str(response.get("modelVersion") or model),
        created,
        choices,
        _usage(response.get("usageMetadata") or {}),
    )


def _contents(messages: list[tuple[str, Mapping[str, Any]]], has_uris: bool) -> list[dict[str, Any]]:
    """Turns of `user` and `model`; one turn holds the answers of all tools that were called together."""
    turns: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for field, message in messages:
        role, parts = _turn(field, message, names, has_uris)
        if not parts:
            raise Unmapped(f"{field}.content", "it is empty")
        if turns and turns[-1]["role"] == role:
            turns[-1]["parts"] += parts
        else:
            turns.append({"role": role, "parts": parts})
    return turns


def _turn(
    field: str, message: Mapping[str, Any], names: dict[str, str], has_uris: bool
) -> tuple[str, list[dict[str, Any]]]:
    parts = chat.parts_of(message, field)
    match message.get("role"):
        case "user":
            return "user", [_part(part, where, has_uris) for where, part in parts]
        case "assistant":
            said: list[dict[str, Any]] = [{"text": chat.text_of(part, where)} for where, part in parts]
            for id, name, arguments in chat.tool_calls_of(message, field):
                names[id] = name
                said.append({"functionCall": {"name": name, "args": arguments}})
            return "model", said
        case "tool":
            id = str(message.get("tool_call_id"))
            if id not in names:
                raise Unmapped(f"{field}.tool_call_id", "no earlier call has this id")
            text = "".join(chat.text_of(part, where) for where, part in parts)
            return "user", [{"functionResponse": {"name": names[id], "response": _object(text)}}]
        case role:
            raise Unmapped(f"{field}.role", f"{role!r} has no counterpart at this provider")


def _part(part: Mapping[str, Any], field: str, has_uris: bool) -> dict[str, Any]:
    match part.get("type"):
        case "image_url":
            url = chat.image_url(part, field)
            if (found := chat.data_url(url)) is not None:
                return _inline(*found)
            if has_uris and url.startswith(("https://", "gs://")):
                return {"fileData": {"fileUri": url, "mimeType": _image_type(url, field)}}
            raise Unmapped(f"{field}.image_url.url", "this provider accepts images only as data URLs")
        case "input_audio":
            audio = part.get("input_audio")
            kind = _AUDIO.get(str(audio.get("format"))) if isinstance(audio, dict) else None
            if kind is None or not isinstance(audio, dict):
                raise Unmapped(f"{field}.input_audio", "it must be wav or mp3")
            return _inline(kind, str(audio.get("data")))
        case "file":
            return _inline(*chat.file_data(part, field))
        case _:
            return {"text": chat.text_of(part, field)}


def _inline(kind: str, data: str) -> dict[str, Any]:
    return {"inlineData": {"mimeType": kind, "data": data}}


def _image_type(url: str, field: str) -> str:
    ending = url.partition("?")[0].rpartition(".")[2].lower()
    kinds = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp", "gif": "image/gif"}
    if ending not in kinds:
        raise Unmapped(f"{field}.image_url.url", "its name does not show its type; it must end in .png, .jpg or .webp")
    return kinds[ending]


def _object(text: str) -> dict[str, Any]:
    """A tool's answer as the object that Gemini expects."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"result": text}
    return value if isinstance(value, dict) else {"result": value}


def _config(body: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in _CONFIG if body.get(name) is not None and not (name == "n" and body[name] == 1)]
    config = {_CONFIG[name]: body[name] for name in reversed(names)}
    if body.get("stop") is not None:
        config["stopSequences"] = chat.stops_of(body)
        if len(config["stopSequences"]) > _STOPS_MAX:
            raise Unmapped("stop", f"this provider accepts at most {_STOPS_MAX}")
    return config | _format(body.get("response_format"))


def _format(wanted: Any) -> dict[str, Any]:
    if chat.is_neutral("response_format", wanted):
        return {}
    match wanted:
        case {"type": "json_object"}:
            return {"responseMimeType": "application/json"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"responseMimeType": "application/json", "responseJsonSchema": schema}
    raise Unmapped("response_format", "it must be text, json_object or a json_schema with its schema")


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    declared = [_tool(function, field) for field, function in chat.functions_of(body)]
    if not declared:
        return {}
    request: dict[str, Any] = {"tools": [{"functionDeclarations": declared}]}
    kind, name = chat.tool_choice_of(body)
    if kind in _MODES:
        config = {"mode": _MODES[kind]} | ({"allowedFunctionNames": [name]} if name is not None else {})
        request["toolConfig"] = {"functionCallingConfig": config}
    return request


def _tool(function: Mapping[str, Any], field: str) -> dict[str, Any]:
    if function.get("strict"):
        raise Unmapped(f"{field}.function.strict", "this provider does not guarantee that arguments match the schema")
    tool = {"name": function["name"]}
    if function.get("description"):
        tool["description"] = function["description"]
    return tool | ({"parametersJsonSchema": function["parameters"]} if function.get("parameters") else {})


def _choice(index: int, candidate: Mapping[str, Any]) -> dict[str, Any]:
    text, reasoning = "", ""
    calls: list[Mapping[str, Any]] = []
    for part in (candidate.get("content") or {}).get("parts") or ():
        if call := part.get("functionCall"):
            id = call.get("id") or f"call_{index}_{len(calls)}"
            calls.append(chat.tool_call(str(id), str(call.get("name")), call.get("args")))
        elif part.get("thought"):
            reasoning += part.get("text") or ""
        else:
            text += part.get("text") or ""
    raw = str(candidate.get("finishReason") or "STOP")
    reason = "content_filter" if raw in _FILTERED else _REASONS.get(raw, "stop")
    if calls and reason == "stop":
        reason = "tool_calls"
    return chat.choice(int(candidate.get("index") or index), chat.message_of(text, calls, reasoning), reason)


def _usage(said: Mapping[str, Any]) -> dict[str, Any]:
    thoughts = int(said.get("thoughtsTokenCount") or 0)
    answered = int(said.get("candidatesTokenCount") or 0) + thoughts
    cached = int(said.get("cachedContentTokenCount") or 0)
    return chat.usage(int(said.get("promptTokenCount") or 0), answered, cached=cached, reasoning=thoughts)
