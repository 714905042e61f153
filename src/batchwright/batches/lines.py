"""Reads one line of a batch input file: a request with its prompt, or everything that is wrong with it.

A good line is decoded once, into the few fields that the plan needs; the rest is checked and skipped. A line that does
not fit is read a second time, field by field, to name every problem. Where a JSON object repeats a key, the last one
counts, here as in nearly every model server, which gets the bytes of the body as they are.

Stricter than Python's `json`: no NaN or Infinity, no lone surrogate escapes, nesting up to Python's recursion limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypedDict

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder, encode

from batchwright.errors import InvalidInput

CUSTOM_ID_BYTES_MAX = 512
MODEL_CHARACTERS_MAX = 176  # a queue is named after the model, below a private one of 17; its name has 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One entry of a batch's `errors.data`, in OpenAI's words where they are on record; `line` counts from 1."""

    code: str
    line: int | None
    message: str
    param: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Request(NamedTuple):
    """What the plan needs of a good line; `inputs` counts the texts to embed and is 0 elsewhere."""

    custom_id: str
    model: str
    prompt: bytes
    inputs: int


class BadLine(NamedTuple):
    """A line that fails the batch; its `custom_id`, if it has a usable one, still makes later ones duplicates."""

    custom_id: str | None
    problems: list[Problem]


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """How the requests of one endpoint look: the field they need, and where their prompt is, in the model's order."""

    title: str
    required: str
    first_bytes: bytes
    prompt: tuple[str, ...]
    counts_inputs: bool = False

    @property
    def expected(self) -> str:
        return "an array" if self.first_bytes == b"[" else "a string or an array"


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(
        title="Chat Completions", required="messages", first_bytes=b"[", prompt=("tools", "messages")
    ),
    "/v1/completions": Endpoint(title="Completions", required="prompt", first_bytes=b'["', prompt=("prompt",)),
    "/v1/embeddings": Endpoint(title="Embeddings", required="input", first_bytes=b'["', prompt=(), counts_inputs=True),
    "/v1/moderations": Endpoint(title="Moderations", required="input", first_bytes=b'["', prompt=()),
    "/v1/responses": Endpoint(
        title="Responses", required="input", first_bytes=b'["', prompt=("instructions", "tools", "input")
    ),
}

_ABSENT = Raw(b"")


class _Body(Struct, gc=False):
    model: str
    stream: bool | None = None
    input: Raw = _ABSENT
    instructions: Raw = _ABSENT
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    tools: Raw = _ABSENT


class _Line(Struct, gc=False):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: _Body


class _Envelope(Struct, gc=False):
    custom_id: str
    body: Raw


_line = Decoder(_Line)
_envelope = Decoder(_Envelope)
_fields = Decoder(dict[str, Raw])
_items = Decoder(list[Raw])
_text = Decoder(str)

Fields = dict[str, Raw]

_KINDS = {
    b"n": "null",
    b"{": "an object",
    b"[": "an array",
    b'"': "a string",
    b"t": "a boolean",
    b"f": "a boolean",
}


class _Fault(TypedDict):
    code: str
    message: str
    param: str


def split(line: bytes) -> tuple[str, bytes]:
    """The custom_id and the body, byte for byte as the user wrote it, of a line that has passed the check."""
    envelope = _envelope.decode(line)
    return envelope.custom_id, bytes(envelope.body)


class LineCheck:
    """Checks the lines of one batch.

    >>> LineCheck("/v1/embeddings").check(b'{"custom_id": "a"}', 7).problems[0].message
    "Missing required parameter: 'method'."
    """

    def __init__(self, url: str) -> None:
        endpoint = ENDPOINTS.get(url)
        if endpoint is None:
            raise InvalidInput(
                f"endpoint {url!r} takes no batches: use one of {', '.join(ENDPOINTS)}", param="endpoint"
            )
        self.url = url
        self.endpoint = endpoint
        self._required: Callable[[_Body], Raw] = attrgetter(endpoint.required)
        self._before = tuple(attrgetter(name) for name in endpoint.prompt if name != endpoint.required)

    def check(self, line: bytes, number: int) -> Request | BadLine:
        """Never raises for what a line holds; trailing white space, a newline included, is no part of it."""
        if not line.isascii() and not _is_utf8(line):  # msgspec does not look at the bytes of strings that it skips
            return BadLine(None, [_not_json(number)])
        try:
            fields = _line.decode(line)
        except (DecodeError, RecursionError):
            return self._check_carefully(line, number)
        required = bytes(self._required(fields.body))
        if self._is_good(fields, required):
            return self._request(fields, required)
        return self._check_carefully(line, number)

    def _is_good(self, line: _Line, required: bytes) -> bool:
        return (
            line.url == self.url
            and not line.body.stream
            and required[:1] in self.endpoint.first_bytes
            and required != b""
            and _custom_id_fault(line.custom_id) is None
            and _model_fault(line.body.model) is None
        )

    def _request(self, line: _Line, required: bytes) -> Request:
        body = line.body
        prompt = b"".join([*[field(body) for field in self._before], required]) if self._before else required
        inputs = _count_inputs(required) if self.endpoint.counts_inputs else 0
        return Request(line.custom_id, body.model, prompt, inputs)

    def _check_carefully(self, line: bytes, number: int) -> Request | BadLine:
        try:
            fields = _fields.decode(line)
            body = _fields.decode(fields["body"]) if _kind(fields.get("body")) == "an object" else None
        except (DecodeError, RecursionError):
            return BadLine(None, [_not_json(number)])
        problems = [Problem(line=number, **fault) for fault in self._faults(fields, body)]
        if problems:
            return BadLine(_usable_custom_id(fields.get("custom_id")), problems)
        # Nothing is wrong where an earlier one of several equal keys was off: drop it and read the line again.
        clean = _line.decode(encode({**fields, "body": body}))
        return self._request(clean, bytes(self._required(clean.body)))

    def _faults(self, fields: Fields, body: Fields | None) -> Iterator[_Fault]:
        yield from _text_faults(fields, "custom_id", _custom_id_fault)
        yield from _text_faults(fields, "method", _method_fault)
        yield from _text_faults(fields, "url", self._url_fault)
        if body is not None:
            yield from self._body_faults(body)
        elif _kind(fields.get("body")) == "null":
            yield _missing("body")
        else:
            yield _wrong_type("body", "an object", fields["body"])

    def _url_fault(self, url: str) -> _Fault | None:
        if url == self.url:
            return None
        return _Fault(
            code="invalid_url",
            message="The URL provided for this request does not match the batch endpoint.",
            param="url",
        )

    def _body_faults(self, body: Fields) -> Iterator[_Fault]:
        yield from _text_faults(body, "model", _model_fault, inside="body.")
        required = body.get(self.endpoint.required)
        param = f"body.{self.endpoint.required}"
        if required is None or _kind(required) == "null":
            yield _needed(param)
        elif bytes(required)[:1] not in self.endpoint.first_bytes:
            yield _wrong_type(param, self.endpoint.expected, required)
        if bytes(body.get("stream", b"null")) not in (b"null", b"false"):
            message = f"{self.endpoint.title}: Streaming is not supported in the Batch API."
            yield _Fault(code="streaming_unsupported", message=message, param="body.stream")


def _text_faults(
    fields: Fields, name: str, fault_of: Callable[[str], _Fault | None], inside: str = ""
) -> Iterator[_Fault]:
    """What is wrong with one field that must be a string."""
    raw = fields.get(name)
    if raw is None or _kind(raw) == "null":
        yield _needed(inside + name) if inside else _missing(name)
    elif _kind(raw) != "a string":
        yield _wrong_type(inside + name, "a string", raw)
    elif fault := fault_of(_text.decode(raw)):
        yield fault


def _custom_id_fault(custom_id: str) -> _Fault | None:
    if custom_id == "":
        return _missing("custom_id")
    if "\0" in custom_id:
        return _Fault(code="invalid_value", message="Invalid 'custom_id': it holds a NUL character.", param="custom_id")
    if len(custom_id) * 4 <= CUSTOM_ID_BYTES_MAX or (size := len(custom_id.encode())) <= CUSTOM_ID_BYTES_MAX:
        return None
    message = (
        "Invalid 'custom_id': string too long. "
        f"Expected a string with at most {CUSTOM_ID_BYTES_MAX} bytes, but got a string with {size} bytes instead."
    )
    return _Fault(code="string_above_max_length", message=message, param="custom_id")


def _method_fault(method: str) -> _Fault | None:
    if method == "POST":
        return None
    return _Fault(code="invalid_method", message="The method provided for this request must be 'POST'.", param="method")


def _model_fault(model: str) -> _Fault | None:
    if model == "":
        return _needed("body.model")
    if len(model) <= MODEL_CHARACTERS_MAX and "\0" not in model:
        return None
    message = f"Model parameter must have at most {MODEL_CHARACTERS_MAX} characters, none of them NUL."
    return _Fault(code="invalid_request", message=message, param="body.model")


def _missing(param: str) -> _Fault:
    return _Fault(code="missing_required_parameter", message=f"Missing required parameter: '{param}'.", param=param)


def _needed(param: str) -> _Fault:
    name = param.removeprefix("body.").capitalize()
    return _Fault(code="invalid_request", message=f"{name} parameter is required.", param=param)


def _wrong_type(param: str, expected: str, raw: Raw) -> _Fault:
    message = f"Invalid type for '{param}': expected {expected}, but got {_kind(raw)} instead."
    return _Fault(code="invalid_type", message=message, param=param)


def _not_json(number: int) -> Problem:
    return Problem(code="invalid_json_line", line=number, message="This line is not parseable as valid JSON.")


def _kind(raw: Raw | None) -> str:
    return "null" if raw is None else _KINDS.get(bytes(raw)[:1], "a number")


def _usable_custom_id(raw: Raw | None) -> str | None:
    if raw is None or _kind(raw) != "a string":
        return None
    custom_id = _text.decode(raw)
    return custom_id if _custom_id_fault(custom_id) is None else None


def _count_inputs(required: bytes) -> int:
    """Texts or token lists to embed: a string is one, and so is an array of numbers."""
    if required[:1] == b'"':
        return 1
    items = _items.decode(required)
    return 1 if items and _kind(items[0]) == "a number" else len(items)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
