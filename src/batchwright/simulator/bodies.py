"""Parses requests: the model, the prompt as one text, and the wanted length of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from batchwright.errors import InvalidInput
from batchwright.simulator.messages import check
from batchwright.simulator.structured import Form, form_of

CHAT, COMPLETIONS, EMBEDDINGS, MODERATIONS, RERANK, RESPONSES, SCORE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
ENDPOINTS = {
    **{one: one for one in (CHAT, COMPLETIONS, EMBEDDINGS, MODERATIONS, RERANK, RESPONSES, SCORE)},
    "/score": SCORE,
    "/rerank": RERANK,
    "/v2/rerank": RERANK,
}
"""The endpoint at each path; some have two paths, as in vLLM."""
SILENT = (EMBEDDINGS, MODERATIONS, RERANK, SCORE)
"""Endpoints at which the model generates no text."""
OUTPUT_TOKENS_MAX = 1_000_000
_CHOICES_MAX = 128
_INPUTS_MAX = 2048
_DIMENSIONS_MAX = 4096


class Body(msgspec.Struct, gc=False):
    """The fields that matter here; the decoder skips all others."""

    model: str = ""
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    input: str | list[Any] | None = None
    instructions: str | list[Any] | None = None
    query: str | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    top_n: int | None = None
    tools: list[Any] | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    response_format: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    dimensions: int | None = None
    encoding_format: str | None = None


@dataclass(slots=True, kw_only=True)
class Ask:
    """A request that the model can work on."""

    endpoint: str
    model: str
    prompts: list[bytes]
    choices: int = 1
    max_tokens: int | None = None
    dimensions: int | None = None
    is_base64: bool = False
    documents: Sequence[str] = ()
    """The documents of a rerank request, one for each prompt."""
    top_n: int | None = None
    form: Form | None = None
    """The JSON form that the answer must have."""


_decode = msgspec.json.Decoder(Body).decode


def read(endpoint: str, raw: bytes) -> Ask:
    """Parse a request. Refuses what a model server would refuse."""
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not valid for {endpoint}: {error}") from error
    if body.stream:
        raise InvalidInput("the simulator does not stream; leave `stream` out", param="stream")
    if not body.model and endpoint != MODERATIONS:
        raise InvalidInput("you must provide a model parameter", param="model")
    return Ask(
        endpoint=endpoint,
        model=body.model or "omni-moderation-latest",
        prompts=_prompts(endpoint, body),
        choices=_within("n", body.n, 1, _CHOICES_MAX) or 1,
        max_tokens=_max_tokens(endpoint, body),
        dimensions=_within("dimensions", body.dimensions, 1, _DIMENSIONS_MAX),
        is_base64=body.encoding_format == "base64",
        documents=_list(body.documents or ()) if endpoint == RERANK else (),
        top_n=_within("top_n", body.top_n, 0, _INPUTS_MAX) or None,
        form=_form(endpoint, body),
    )


def _max_tokens(endpoint: str, body: Body) -> int | None:
    if endpoint == CHAT and body.max_completion_tokens is not None:
        return _within("max_completion_tokens", body.max_completion_tokens, 1, OUTPUT_TOKENS_MAX)
    if endpoint == RESPONSES:
        return _within("max_output_tokens", body.max_output_tokens, 1, OUTPUT_TOKENS_MAX)
    return _within("max_tokens", body.max_tokens, 1, OUTPUT_TOKENS_MAX)


def _form(endpoint: str, body: Body) -> Form | None:
    if endpoint == CHAT and body.response_format is not None:
        return form_of(body.response_format, "response_format")
    if endpoint == RESPONSES and body.text is not None:
        return form_of(body.text.get("format"), "text.format")
    return None


def _within(name: str, value: int | None, least: int, most: int) -> int | None:
    if value is not None and not least <= value <= most:
        raise InvalidInput(f"{name} is {value}, but must be from {least} to {most}", param=name)
    return value


def _prompts(endpoint: str, body: Body) -> list[bytes]:
    if endpoint == CHAT:
        if not body.messages:
            raise InvalidInput("messages must be a list with at least one message", param="messages")
        check(body.messages)
        return [_joined(body.tools, *map(_message, body.messages))]
    if endpoint == RESPONSES:
        if body.input is None:
            raise InvalidInput("you must provide an input parameter", param="input")
        return [_joined(body.tools, _text(body.instructions or ""), *map(_text, _parts(body.input)))]
    if endpoint in (RERANK, SCORE):
        return _pairs(endpoint, body)
    name, value = ("prompt", body.prompt) if endpoint == COMPLETIONS else ("input", body.input)
    if not value:
        raise InvalidInput(f"{name} must be a string or a list of strings, and not empty", param=name)
    texts = _texts(value)
    if len(texts) > _INPUTS_MAX:
        raise InvalidInput(f"{name} has {len(texts)} texts, but {_INPUTS_MAX} are allowed", param=name)
    return texts


def _pairs(endpoint: str, body: Body) -> list[bytes]:
    """Each document after its query: one query is paired with all documents, several with one document each."""
    first, second = ("query", "documents") if endpoint == RERANK else ("text_1", "text_2")
    if endpoint == SCORE and body.text_1 is None:
        first, second = "queries", "documents"
    queries, documents = _list(getattr(body, first) or ()), _list(getattr(body, second) or ())
    if not queries or not documents:
        raise InvalidInput(f"{first} and {second} must be strings or lists of strings, and not empty", param=first)
    if len(documents) > _INPUTS_MAX:
        raise InvalidInput(f"{second} has {len(documents)} texts, but {_INPUTS_MAX} are allowed", param=second)
    if len(queries) == 1:
        queries = [*queries] * len(documents)
    if len(queries) != len(documents):
        raise InvalidInput(f"{first} has {len(queries)} texts and {second} {len(documents)}", param=first)
    return [f"{query}\n{document}".encode() for query, document in zip(queries, documents, strict=True)]


def _list(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _joined(tools: list[Any] | None, *texts: str) -> bytes:
    """Tools come first, as in chat templates, so that requests with different tools share no prefix."""
    head = orjson.dumps(tools) if tools else b""
    return head + "".join(texts).encode("utf-8", "surrogatepass")


def _message(message: dict[str, Any]) -> str:
    content = message.get("content")
    if type(content) is str and len(message) == 2:
        return f"<|{message.get('role')}|>{content}\n"
    return f"<|{message.get('role')}|>{orjson.dumps(message).decode()}\n"


def _parts(value: str | list[Any]) -> list[Any]:
    return [value] if isinstance(value, str) else value


def _text(part: Any) -> str:
    return part if isinstance(part, str) else orjson.dumps(part).decode()


def _texts(value: str | list[Any]) -> list[bytes]:
    """One text, many texts, one list of token numbers, or many of them."""
    if isinstance(value, str) or isinstance(value[0], int):
        value = [value]
    return [_text_of(one) for one in value]


def _text_of(one: Any) -> bytes:
    if isinstance(one, str):
        return one.encode()
    if isinstance(one, list) and all(isinstance(number, int) for number in one):
        return b"".join(b"%4d" % (number % 10_000) for number in one)  # four bytes each, so that it counts as one token
    raise InvalidInput(f"an input is {type(one).__name__}, but must be a string or a list of token numbers")
