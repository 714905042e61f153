"""OpenAI's chat requests as Anthropic's messages, and Anthropic's answers as OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.providers.translate import chat
from batchwright.providers.translate.chat import Unmapped

MAX_TOKENS = 4096
"""Anthropic requires a limit; OpenAI's requests may have none."""
_KNOWN = frozenset(
    {
        "max_completion_tokens", "max_tokens", "messages", "model", "parallel_tool_calls", "reasoning_effort",
        "response_format", "safety_identifier", "stop", "temperature", "tool_choice", "tools", "top_k", "top_p", "user",
    }
)  # fmt: skip
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
_EFFORTS = ("low", "medium", "high", "xhigh")
_STOPS = {
    "end_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "stop",
    "refusal": "content_filter",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
}


def to_messages(body: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
    """The `params` of a request; raises Unmapped for a field that has no counterpart at Anthropic."""
    chat.refuse_unknown(body, _KNOWN)
    system, messages = chat.messages_of(body)
    params: dict[str, Any] = {
        "model": model or body.get("model"),
        "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or MAX_TOKENS,
        "messages": _messages(messages),
    }
    if system:
        params["system"] = [{"type": "text", "text": text} for text in system]
    params |= _sampling(body) | _output(body) | _tools(body)
    if user := body.get("safety_identifier") or body.get("user"):
        params["metadata"] = {"user_id": user}
    return params


def to_chat(message: Mapping[str, Any], created: int) -> dict[str, Any]:
    """Anthropic's message as a chat completion."""
    text, reasoning, calls = "", "", []
    for block in message.get("content") or ():
        match block.get("type"):
            case "text":
                text += block.get("text") or ""
            case "thinking":
                reasoning += block.get("thinking") or ""
            case "tool_use":
                calls.append(chat.tool_call(str(block.get("id")), str(block.get("name")), block.get("input")))
    reason = _STOPS.get(str(message.get("stop_reason")), "stop")
    choice = chat.choice(0, chat.message_of(text, calls, reasoning), reason)
    model = str(message.get("model") or "")
    return chat.completion(str(message.get("id") or ""), model, created, [choice], _usage(message.get("usage") or {}))


def _messages(messages: list[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge adjacent messages of a role: Anthropic's turns alternate, and the results of all tools are in one turn."""
    turns: list[dict[str, Any]] = []
    for field, message in messages:
        role, blocks = _turn(field, message)
        if not blocks:
            raise Unmapped(f"{field}.content", "it is empty")
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return turns


def _turn(field: str, message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    parts = chat.parts_of(message, field)
    match message.get("role"):
        case "user":
            return "user", [_user_block(part, where) for where, part in parts]
        case "assistant":
            blocks: list[dict[str, Any]] = [
                {"type": "text", "text": text} for where, part in parts if (text := _said(part, where))
            ]
            calls = chat.tool_calls_of(message, field)
            blocks += [{"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in calls]
            return "assistant", blocks
        case "tool":
            content = [{"type": "text", "text": chat.text_of(part, where)} for where, part in parts]
            return "user", [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": content}]
        case role:
            raise Unmapped(f"{field}.role", f"{role!r} has no counterpart at this provider")


def _said(part: Mapping[str, Any], field: str) -> str:
    if part.get("type") == "refusal":
        return str(part.get("refusal") or "")
    return chat.text_of(part, field)


def _user_block(part: Mapping[str, Any], field: str) -> dict[str, Any]:
    match part.get("type"):
        case "image_url":
            return {"type": "image", "source": _image(chat.image_url(part, field), field)}
        case "file":
            kind, data = chat.file_data(part, field)
            if kind != "application/pdf":
                raise Unmapped(f"{field}.file", f"a file of type {kind} is not supported; use a PDF")
            return {"type": "document", "source": {"type": "base64", "media_type": kind, "data": data}}
        case _:
            return {"type": "text", "text": chat.text_of(part, field)}


def _image(url: str, field: str) -> dict[str, str]:
    if (found := chat.data_url(url)) is not None:
        if found[0] not in _IMAGES:
            raise Unmapped(f"{field}.image_url.url", f"an image of type {found[0]} is not supported")
        return {"type": "base64", "media_type": found[0], "data": found[1]}
    if not url.startswith("https://"):
        raise Unmapped(f"{field}.image_url.url", "it must be an https or a data URL")
    return {"type": "url", "url": url}


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    params = {name: body[name] for name in ("temperature", "top_k", "top_p") if body.get(name) is not None}
    if isinstance(params.get("temperature"), (int, float)) and params["temperature"] > 1:
        raise Unmapped("temperature", f"it is {params['temperature']}; this provider accepts 0 to 1")
    if body.get("stop") is not None:
        params["stop_sequences"] = chat.stops_of(body)
    return params


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    wanted, effort = body.get("response_format"), body.get("reasoning_effort")
    if not chat.is_neutral("response_format", wanted):
        match wanted:
            case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
                config["format"] = {"type": "json_schema", "schema": schema}
            case _:
                raise Unmapped("response_format", "it must be text or a json_schema with its schema")
    if effort is not None:
        if effort not in _EFFORTS:
            raise Unmapped("reasoning_effort", f"it is {effort!r}; this provider accepts {', '.join(_EFFORTS)}")
        config["effort"] = effort
    return {"output_config": config} if config else {}


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    tools = [_tool(function) for _, function in chat.functions_of(body)]
    if not tools:
        return {}
    kind, name = chat.tool_choice_of(body)
    choice: dict[str, Any] = {"type": {"required": "any", "function": "tool"}.get(kind, kind)}
    if name is not None:
        choice["name"] = name
    if body.get("parallel_tool_calls") is False and kind != "none":
        choice["disable_parallel_tool_use"] = True
    return {"tools": tools} if choice == {"type": "auto"} else {"tools": tools, "tool_choice": choice}


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    tool = {"name": function["name"], "input_schema": function.get("parameters") or {"type": "object"}}
    return tool | {name: function[name] for name in ("description", "strict") if function.get(name)}


def _usage(said: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's prompt tokens include cached ones; Anthropic counts them separately."""
    cached = int(said.get("cache_read_input_tokens") or 0)
    fresh = int(said.get("input_tokens") or 0) + int(said.get("cache_creation_input_tokens") or 0)
    return chat.usage(fresh + cached, int(said.get("output_tokens") or 0), cached=cached)
