"""Reads OpenAI's chat requests part by part, for the translators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.+)", re.DOTALL)
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stream": (False,),
    "tool_choice": ("auto",),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Values that equal the default; None always does."""
_IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "store", "user"})
"""Fields that do not change the answer."""


class Unmapped(ValueError):
    """A field of a request without a counterpart at the provider."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def refuse_unknown(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse fields that are not translated, unless their value changes nothing."""
    for name, value in body.items():
        if name not in known and name not in _IGNORED and not is_neutral(name, value):
            raise Unmapped(name, "it has no counterpart at this provider")


def is_neutral(name: str, value: Any) -> bool:
    return value is None or value in _NEUTRAL.get(name, ())


def messages_of(body: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, Mapping[str, Any]]]]:
    """The system texts at the beginning, and the other messages with their names for errors."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unmapped("messages", "it must be a list of messages")
    system: list[str] = []
    others: list[tuple[str, Mapping[str, Any]]] = []
    for index, message in enumerate(messages):
        field = f"messages.{index}"
        if not isinstance(message, dict):
            raise Unmapped(field, "it must be an object")
        if message.get("name") is not None:
            raise Unmapped(f"{field}.name", "it has no counterpart at this provider")
        if message.get("role") in ("system", "developer"):
            if others:
                raise Unmapped(f"{field}.role", "instructions must come before all other messages")
            system += [text_of(part, where) for where, part in parts_of(message, field)]
        else:
            others.append((field, message))
    if not others:
        raise Unmapped("messages", "there are only instructions; add a message of the user")
    return system, others


def parts_of(message: Mapping[str, Any], field: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The parts of a message with their names for errors: one part for a string, none without content."""
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [(f"{field}.content", {"type": "text", "text": content})]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise Unmapped(f"{field}.content", "it must be a string or a list of parts")
    return [(f"{field}.content.{index}", part) for index, part in enumerate(content)]


def text_of(part: Mapping[str, Any], field: str) -> str:
    text = part.get("text") if part.get("type") == "text" else None
    if not isinstance(text, str):
        raise Unmapped(field, f"a part of type {part.get('type')!r} has no counterpart at this provider")
    return text


def image_url(part: Mapping[str, Any], field: str) -> str:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str):
        raise Unmapped(f"{field}.image_url.url", "it must be a URL")
    return url


def data_url(url: str) -> tuple[str, str] | None:
    """The media type and the base64 of a data URL; None for any other URL."""
    found = _DATA_URL.fullmatch(url)
    return None if found is None else (found[1], found[2])


def file_data(part: Mapping[str, Any], field: str) -> tuple[str, str]:
    """The media type and the base64 of a file that the request itself contains."""
    file = part.get("file")
    found = data_url(str(file.get("file_data"))) if isinstance(file, dict) else None
    if found is None:
        raise Unmapped(f"{field}.file", "it must have file_data as a data URL; ids of files cannot be used")
    return found


def tool_calls_of(message: Mapping[str, Any], field: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """The calls of an assistant's message: id, name and arguments."""
    if message.get("function_call") is not None:
        raise Unmapped(f"{field}.function_call", "it has no counterpart at this provider; use tool_calls")
    calls: list[tuple[str, str, Mapping[str, Any]]] = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        where = f"{field}.tool_calls.{index}"
        function = (
            call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
        )
        if not isinstance(function, dict):
            raise Unmapped(where, "it must be a call of a function")
        try:
            arguments = orjson.loads(function.get("arguments") or "{}")
        except (orjson.JSONDecodeError, TypeError):
            arguments = None
        if not isinstance(arguments, dict):
            raise Unmapped(f"{where}.function.arguments", "it must be a JSON object")
        calls.append((str(call.get("id")), str(function.get("name")), arguments))
    return calls


def functions_of(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The functions among the tools, with their names for errors; other tools have no counterpart."""
    functions: list[tuple[str, Mapping[str, Any]]] = []
    for index, tool in enumerate(body.get("tools") or ()):
        field = f"tools.{index}"
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unmapped(field, "only functions have a counterpart at this provider")
        functions.append((field, function))
    return functions


def stops_of(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise Unmapped("stop", "it must be a string or a list of strings")
    return stops


def tool_choice_of(body: Mapping[str, Any]) -> tuple[str, str | None]:
    """`auto`, `none`, `required` or `function`, and then its name."""
    choice = body.get("tool_choice") or "auto"
    if choice in ("auto", "none", "required"):
        return str(choice), None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unmapped("tool_choice", "it must be auto, none, required or a function")
    return "function", function["name"]


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in an answer."""
    text = orjson.dumps(arguments or {}).decode()
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def message_of(text: str | None, calls: Sequence[Mapping[str, Any]], reasoning: str = "") -> dict[str, Any]:
    """An assistant's message in an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
    if text == "" and not calls:
        message["content"] = ""
    if calls:
        message["tool_calls"] = list(calls)
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def completion(
    id: str, model: str, created: int, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": list(choices),
        "usage": usage,
    }


def choice(index: int, message: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}


def usage(prompt: int, answered: int, *, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answered,
        "total_tokens": prompt + answered,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
