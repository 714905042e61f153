"""Answers of models: an echo of the request, in the formats of OpenAI, Anthropic and Gemini."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batchwright.errors import InvalidInput
from batchwright.simulator.answers import Written
from batchwright.simulator.bodies import CHAT, ENDPOINTS, read
from batchwright.simulator.prefix_cache import tokens
from batchwright.simulator.profiles import Profile
from batchwright.simulator.providers.jobs import Item, ItemResult, Job
from batchwright.simulator.providers.wire import dump
from batchwright.simulator.providers.world import World

_ANY_MODEL = Profile()
_CALL_TOOL = "[[tool]]"
"""A prompt that contains this is answered with a call of the first tool."""
_DIMENSIONS = 8
_TOKENS_EACH = 8


def openai_item(line: bytes, endpoint: str, model: str | None = None) -> tuple[Item | None, str | None]:
    """A line of a batch's file, or the code of what is wrong with it."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None, "invalid_json_line"
    if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
        return None, "missing_required_parameter"
    if found.get("url", endpoint) != endpoint:
        return None, "mismatched_url"
    body = found.get("body")
    if model is not None and isinstance(body, dict):
        body = {"model": model, **body}
    return Item(found["custom_id"], body, line.decode("utf-8", "replace"), _problem(endpoint, body)), None


def openai_line(world: World, outcome: ItemResult, job: Job) -> bytes:
    """A line of the output or the error file."""
    item, status = outcome.item, outcome.status
    line: dict[str, Any] = {"id": f"batch_req_{item.id}", "custom_id": item.id, "response": None, "error": None}
    if outcome.is_ok:
        body: Mapping[str, Any] = openai_body(world, job.body["endpoint"], item.ask, job)
        line["response"] = {"status_code": 200, "request_id": f"req_{item.id}", "body": body}
    elif status:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": outcome.message, "type": kind, "param": None, "code": None}
        line["response"] = {"status_code": status, "request_id": f"req_{item.id}", "body": {"error": error}}
    else:
        line["error"] = {"code": "batch_expired", "message": "This request could not be executed before the window."}
    return dump(line)


def openai_body(world: World, endpoint: str, body: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """An echo if a chat wants plain text; otherwise the answer of the simulated model server."""
    ask = read(_endpoint(endpoint), dump(body))
    if ask.endpoint == CHAT and ask.form is None:
        return _chat(body, ask.choices, job)
    done = Written(
        number=job.number,
        created=int(job.ends_at),
        prompt_tokens=sum(map(tokens, ask.prompts)),
        cached_tokens=0,
        tokens_each=ask.max_tokens or _TOKENS_EACH,
        formed=world.author.formed(ask, ask.form, _ANY_MODEL, is_bad=False) if ask.form is not None else None,
    )
    found: dict[str, Any] = orjson.loads(world.author.answer(ask, done, ask.dimensions or _DIMENSIONS))
    return found


def echo(text: str) -> str:
    """The text of every model's answer."""
    return f"echo: {text}"


def usage(asked: object, said: str) -> tuple[int, int]:
    """Tokens in and out: four bytes each."""
    return tokens(dump(asked)), max(1, tokens(said.encode()))


def flat(content: Any) -> str:
    """The text in a message's content, whatever its shape."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(one.get("text") or "") for one in parts if isinstance(one, dict))


def wants_tool(said: str) -> bool:
    return _CALL_TOOL in said


def _chat(body: Mapping[str, Any], choices: int, job: Job) -> dict[str, Any]:
    said = echo(flat(body["messages"][-1].get("content")))
    asked, answered = usage(body["messages"], said)
    message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
    has_call = bool(body.get("tools")) and wants_tool(said)
    if has_call:
        call = {"name": body["tools"][0]["function"]["name"], "arguments": dump({"said": said}).decode()}
        message |= {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": call}]}
    reason = "tool_calls" if has_call else "stop"
    choice = {"message": message, "logprobs": None, "finish_reason": reason}
    total = choices * answered
    return {
        "id": f"chatcmpl-{job.number:016x}",
        "object": "chat.completion",
        "created": int(job.ends_at),
        "model": body["model"],
        "choices": [{"index": n, **choice} for n in range(choices)],
        "usage": {"prompt_tokens": asked, "completion_tokens": total, "total_tokens": asked + total},
    }


def _endpoint(endpoint: str) -> str:
    return ENDPOINTS.get(endpoint) or ENDPOINTS.get(f"/v1{endpoint}") or endpoint


def _problem(endpoint: str, body: object) -> str | None:
    if not isinstance(body, dict):
        return "body must be an object"
    try:
        read(_endpoint(endpoint), dump(body))
    except InvalidInput as error:
        return str(error)
    return None
