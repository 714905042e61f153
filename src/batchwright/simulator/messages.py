"""Checks chat messages, and refuses with OpenAI's messages what OpenAI would refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.errors import InvalidInput

_PLAIN_ROLES = frozenset({"system", "assistant", "user", "developer"})
_ROLES = _PLAIN_ROLES | {"function", "tool"}
_PARTS = {
    "text": ("text", str),
    "refusal": ("refusal", str),
    "image_url": ("image_url", dict),
    "input_audio": ("input_audio", dict),
    "file": ("file", dict),
}


def check(messages: Sequence[Mapping[str, Any]]) -> None:
    for n, message in enumerate(messages):
        if message.get("role") not in _PLAIN_ROLES or type(message.get("content")) is not str or len(message) != 2:
            _check(message, f"messages[{n}]")


def _check(message: Mapping[str, Any], where: str) -> None:
    role = message.get("role")
    if role is None:
        raise _missing(f"{where}.role")
    if role not in _ROLES:
        values = "'system', 'assistant', 'user', 'function', 'tool', and 'developer'"
        raise InvalidInput(f"Invalid value: {role!r}. Supported values are: {values}.", param=f"{where}.role")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise _missing(f"{where}.tool_call_id")
    if role == "function" and not isinstance(message.get("name"), str):
        raise _missing(f"{where}.name")
    content = message.get("content")
    if content is None:
        calls = ("tool_calls", "function_call", "refusal", "audio")
        if not (role == "function" or (role == "assistant" and any(message.get(name) for name in calls))):
            raise InvalidInput(
                f"Invalid value for 'content': expected a string, got null. (at {where})", param=f"{where}.content"
            )
    elif isinstance(content, list):
        if not content:
            raise InvalidInput(
                f"Invalid '{where}.content': empty array. Expected an array with minimum length 1, but got an empty "
                "array instead.",
                param=f"{where}.content",
            )
        for n, part in enumerate(content):
            _check_part(part, f"{where}.content[{n}]")
    elif not isinstance(content, str):
        raise _mistyped(f"{where}.content", "one of a string or array of objects", content)


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise _mistyped(where, "an object", part)
    if part.get("type") is None:
        raise _missing(f"{where}.type")
    if not isinstance(part["type"], str) or part["type"] not in _PARTS:
        values = ", ".join(map(repr, _PARTS))
        raise InvalidInput(f"Invalid value: {part['type']!r}. Supported values are: {values}.", param=f"{where}.type")
    name, kind = _PARTS[part["type"]]
    if part.get(name) is None:
        raise _missing(f"{where}.{name}")
    if not isinstance(part[name], kind):
        raise _mistyped(f"{where}.{name}", "a string" if kind is str else "an object", part[name])


def _missing(where: str) -> InvalidInput:
    return InvalidInput(f"Missing required parameter: '{where}'.", param=where)


_KINDS = {
    bool: "a boolean",
    dict: "an object",
    float: "a decimal",
    int: "an integer",
    list: "an array",
    str: "a string",
}


def _mistyped(where: str, expected: str, found: Any) -> InvalidInput:
    got = _KINDS.get(type(found), "an array")
    return InvalidInput(f"Invalid type for '{where}': expected {expected}, but got {got} instead.", param=where)
