"""Reads one line of a batch input file: a request with its prompt, or everything that is wrong with it.

A good line is decoded once, into the few fields that the plan needs; the rest is checked and skipped. A line that does
not fit is read a second time, field by field, to name every problem. Where a JSON object repeats a key, the last one
counts, here as in nearly every model server, which gets the bytes of the body as they are.

Stricter than Python's `json`: no NaN or Infinity, no lone surrogate escapes, nesting up to Python's recursion limit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypedDict

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder, encode

from batchwright.errors import InvalidInput

CUSTOM_ID_BYTES_MAX = 512
_SHOWN_CHARACTERS_MAX = 100
MODEL_CHARACTERS_MAX = 176  # a queue's name has up to 200; this one is named after the model, below a private one of 17


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One entry of a batch's `errors.data`, with OpenAI's message if it is known; `line` counts from 1."""

    code: str
    line: int | None
    message: str
    param: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class GoodLine(NamedTuple):
    """What the plan needs of a good line; `inputs` is the number of texts to embed, and 0 for other endpoints."""

    custom_id: str
    model: str
    prompt: bytes
    inputs: int
    url: str
    repeated_bytes: int = 0
    """Bytes that the model reads beside the prompt: the query once more for each document after the first."""
    output_tokens_max: int | None = None
    """Maximum number of tokens of the answer, if the request sets one."""

    @property
    def endpoint(self) -> Endpoint:
        return ENDPOINTS[self.url]


class BadLine(NamedTuple):
    """A line that fails the batch. Its `custom_id`, if usable, still counts when duplicates are searched."""

    custom_id: str | None
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class Need:
    """A field that a request must have, under one of its names, and how its value may begin."""

    names: tuple[str, ...]
    first_bytes: bytes

    @property
    def expected(self) -> str:
        return " or ".join(_KINDS[bytes([first])] for first in self.first_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The format of the requests of one endpoint."""

    title: str
    needs: tuple[Need, ...]
    before: tuple[str, ...] = ()
    """Fields that come before the needs in the prompt."""
    formats: frozenset[bytes] | None = None
    """Values of `response_format` whose answer is JSON; None if every answer is."""
    counts_inputs: bool = False
    is_ordered: bool = True
    """Whether requests are ordered by the beginning of their prompt, because a prefix cache may help."""
    is_text: bool = True
    """Whether the model reads the fields as text; for anything else the number of tokens is unknown beforehand."""
    has_output: bool = True
    """Whether answers have tokens that the model wrote."""
    maxima: tuple[str, ...] = ()
    """Fields that set the maximum number of tokens of an answer; the first one that is present counts."""
    repeats_first: bool = False
    """Whether the model reads the first need once for each item of the second."""


_SCORE = Endpoint(
    title="Score",
    needs=(Need(("text_1", "queries", "data_1"), b'"[{'), Need(("text_2", "documents", "data_2", "items"), b'"[{')),
    has_output=False,
    repeats_first=True,
)
_RERANK = Endpoint(
    title="Rerank",
    needs=(Need(("query",), b'"{'), Need(("documents",), b'"[{')),
    has_output=False,
    repeats_first=True,
)
_AUDIO = Endpoint(
    title="Audio",
    needs=(Need(("file_url",), b'"'),),
    formats=frozenset({b"", b"null", b'"json"', b'"verbose_json"', b'"diarized_json"'}),
    is_ordered=False,
    is_text=False,
)
ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(
        title="Chat Completions",
        needs=(Need(("messages",), b"["),),
        before=("tools",),
        maxima=("max_completion_tokens", "max_tokens"),
    ),
    "/v1/completions": Endpoint(title="Completions", needs=(Need(("prompt",), b'"['),), maxima=("max_tokens",)),
    "/v1/embeddings": Endpoint(
        title="Embeddings",
        needs=(Need(("input",), b'"['),),
        counts_inputs=True,
        is_ordered=False,
        has_output=False,
    ),
    "/v1/moderations": Endpoint(
        title="Moderations", needs=(Need(("input",), b'"['),), is_ordered=False, has_output=False
    ),
    "/v1/responses": Endpoint(
        title="Responses",
        needs=(Need(("input",), b'"['),),
        before=("instructions", "tools"),
        maxima=("max_output_tokens",),
    ),
    "/v1/score": _SCORE,
    "/v1/rerank": _RERANK,
    "/v1/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
    # The same under vLLM's other paths, which its own examples mix.
    "/score": _SCORE,
    "/rerank": _RERANK,
    "/v2/rerank": _RERANK,
}
DEFAULT_ENDPOINT = "/v1/chat/completions"
MIXED = "mixed"
"""The endpoint of a batch whose lines have different ones; only the command line and Python create such batches."""
NO_JSON = {"/v1/audio/speech": "it answers with audio, and a line of an output file holds JSON"}
"""Endpoints that are refused, with the reason."""


def why_refused(url: str) -> str:
    """Why an endpoint is not supported in batches, and which ones are."""
    reason = f": {NO_JSON[url]}" if url in NO_JSON else ""
    return f"{url!r} is not supported in batches{reason}; use one of {', '.join(ENDPOINTS)}"


_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_DEPTH_ADVISED = 500
_ESCAPES = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_FRAMES_MAX = 400
"""Stack frames that may be in use when a line is read: they lower the nesting that Python's limit allows."""
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
_TOKEN_DIGITS_MAX = 9

_ABSENT = Raw(b"")


class _Body(Struct, gc=False):
    model: str
    stream: bool | None = None
    data_1: Raw = _ABSENT
    data_2: Raw = _ABSENT
    documents: Raw = _ABSENT
    file_url: Raw = _ABSENT
    input: Raw = _ABSENT
    instructions: Raw = _ABSENT
    items: Raw = _ABSENT
    max_completion_tokens: Raw = _ABSENT
    max_output_tokens: Raw = _ABSENT
    max_tokens: Raw = _ABSENT
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    queries: Raw = _ABSENT
    query: Raw = _ABSENT
    response_format: Raw = _ABSENT
    text_1: Raw = _ABSENT
    text_2: Raw = _ABSENT
    tools: Raw = _ABSENT


class _Line(Struct, gc=False):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: _Body


class _Envelope(Struct, gc=False):
    custom_id: str
    url: str
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


def split(line: bytes) -> tuple[str, str, bytes]:
    """The custom_id, the url, and the body byte for byte as the user wrote it, of a line that has passed the check."""
    envelope = _envelope.decode(line)
    return envelope.custom_id, envelope.url, bytes(envelope.body)


class LineCheck:
    """Checks the lines of one batch.

    >>> LineCheck("/v1/embeddings").check(b'{"custom_id": "a"}', 7).problems[0].message
    "Missing required parameter: 'method'."
    """

    def __init__(self, url: str) -> None:
        if url != MIXED and url not in ENDPOINTS:
            raise InvalidInput(f"endpoint {why_refused(url)}", param="endpoint")
        self.url = url
        self._readers = {one: _Reader(ENDPOINTS[one]) for one in (ENDPOINTS if url == MIXED else [url])}

    def check(self, line: bytes, number: int) -> GoodLine | BadLine:
        """Never raises because of a line's content; trailing white space, including the newline, is not part of it."""
        if not line.isascii() and not _is_utf8(line):  # msgspec does not look at the bytes of strings that it skips
            return BadLine(None, [_json_problem(number)])
        try:
            fields = _line.decode(line)
        except (DecodeError, RecursionError):
            return self._check_carefully(line, number)
        reader = self._readers.get(fields.url)
        if (
            reader is not None
            and not fields.body.stream
            and _custom_id_fault(fields.custom_id) is None
            and _model_fault(fields.body.model) is None
            and (request := reader.read(fields)) is not None
        ):
            return request
        return self._check_carefully(line, number)

    def _check_carefully(self, line: bytes, number: int) -> GoodLine | BadLine:
        try:
            fields = _fields.decode(line)
            body = _fields.decode(fields["body"]) if _kind(fields.get("body")) == "an object" else None
        except RecursionError:
            return BadLine(None, [_json_problem(number, _explain_depth(line))])
        except DecodeError:
            return BadLine(None, [_json_problem(number, _find_half_surrogate(line))])
        problems = [Problem(line=number, **fault) for fault in self._faults(fields, body)]
        if problems:
            return BadLine(_usable_custom_id(fields.get("custom_id")), problems)
        # Only an earlier one of several equal keys was wrong, and the last one counts: decode without the earlier ones.
        clean = _line.decode(encode({**fields, "body": body}))
        request = self._readers[clean.url].read(clean)
        assert request is not None, "a line without a fault can be read"
        return request

    def _faults(self, fields: Fields, body: Fields | None) -> Iterator[_Fault]:
        yield from _text_faults(fields, "custom_id", _custom_id_fault)
        yield from _text_faults(fields, "method", _method_fault)
        yield from _text_faults(fields, "url", self._url_fault)
        if body is not None:
            yield from self._body_faults(body, self._endpoint(fields))
        elif _kind(fields.get("body")) == "null":
            yield _missing_fault("body")
        else:
            yield _type_fault("body", "an object", fields["body"])

    def _endpoint(self, fields: Fields) -> Endpoint | None:
        """The endpoint to check the body against: the batch's, or in a mixed batch the line's own, if it is known."""
        if self.url != MIXED:
            return ENDPOINTS[self.url]
        url = fields.get("url")
        return ENDPOINTS.get(_text.decode(url)) if url is not None and _kind(url) == "a string" else None

    def _url_fault(self, url: str) -> _Fault | None:
        if url in self._readers:
            return None
        message = "The URL provided for this request does not match the batch endpoint."
        if self.url == MIXED:
            message = f"The URL {why_refused(url[:_SHOWN_CHARACTERS_MAX])}."
        return _Fault(code="invalid_url", message=message, param="url")

    def _body_faults(self, body: Fields, endpoint: Endpoint | None) -> Iterator[_Fault]:
        yield from _text_faults(body, "model", _model_fault, inside="body.")
        if endpoint is None:
            return
        for need in endpoint.needs:
            yield from _need_faults(body, need)
        if bytes(body.get("stream", b"null")) not in (b"null", b"false"):
            message = f"{endpoint.title}: Streaming is not supported in the Batch API."
            yield _Fault(code="streaming_unsupported", message=message, param="body.stream")
        wanted = bytes(body.get("response_format", b""))
        if endpoint.formats is not None and wanted not in endpoint.formats:
            message = f"{endpoint.title}: An answer must be JSON; response_format is 'json' or 'verbose_json'."
            yield _Fault(code="invalid_value", message=message, param="body.response_format")


class _Reader:
    """Reads what the plan needs from lines of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._before = tuple(attrgetter(name) for name in endpoint.before)
        self._maxima = tuple(attrgetter(name) for name in endpoint.maxima)
        self._needs = tuple(
            (tuple(attrgetter(name) for name in need.names), need.first_bytes) for need in endpoint.needs
        )

    def read(self, line: _Line) -> GoodLine | None:
        """None if the body does not have what the endpoint needs."""
        body, endpoint = line.body, self._endpoint
        if endpoint.formats is not None and bytes(body.response_format) not in endpoint.formats:
            return None
        found = []
        for getters, first_bytes in self._needs:
            value = b""
            for get in getters:
                value = bytes(get(body))
                if value not in (b"", b"null"):
                    break
            if not value or value[0] not in first_bytes:
                return None
            found.append(value)
        prompt = b"".join([*[bytes(get(body)) for get in self._before], *found]) if endpoint.is_text else b""
        inputs = _count_inputs(found[0]) if endpoint.counts_inputs else 0
        again = len(found[0]) * (max(1, _count_items(found[1])) - 1) if endpoint.repeats_first else 0
        return GoodLine(line.custom_id, body.model, prompt, inputs, line.url, again, self._output_tokens_max(body))

    def _output_tokens_max(self, body: _Body) -> int | None:
        for get in self._maxima:
            raw = get(body)
            if raw is not _ABSENT and (count := _token_count(bytes(raw))) is not None:
                return count
        return None


def _need_faults(body: Fields, need: Need) -> Iterator[_Fault]:
    name = next((name for name in need.names if _kind(body.get(name)) != "null"), None)
    if name is None and len(need.names) > 1:
        names = ", ".join(f"'{name}'" for name in need.names)
        yield _Fault(code="invalid_request", message=f"One of {names} is required.", param=f"body.{need.names[0]}")
    elif name is None:
        yield _needed_fault(f"body.{need.names[0]}")
    elif bytes(body[name])[0] not in need.first_bytes:
        yield _type_fault(f"body.{name}", need.expected, body[name])


def _text_faults(
    fields: Fields, name: str, fault_of: Callable[[str], _Fault | None], inside: str = ""
) -> Iterator[_Fault]:
    """What is wrong with one field that must be a string."""
    raw = fields.get(name)
    if raw is None or _kind(raw) == "null":
        yield _needed_fault(inside + name) if inside else _missing_fault(name)
    elif _kind(raw) != "a string":
        yield _type_fault(inside + name, "a string", raw)
    elif fault := fault_of(_text.decode(raw)):
        yield fault


def _custom_id_fault(custom_id: str) -> _Fault | None:
    if custom_id == "":
        return _missing_fault("custom_id")
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
        return _needed_fault("body.model")
    if len(model) <= MODEL_CHARACTERS_MAX and "\0" not in model:
        return None
    message = f"Model parameter must have at most {MODEL_CHARACTERS_MAX} characters, none of them NUL."
    return _Fault(code="invalid_request", message=message, param="body.model")


def _missing_fault(param: str) -> _Fault:
    return _Fault(code="missing_required_parameter", message=f"Missing required parameter: '{param}'.", param=param)


def _needed_fault(param: str) -> _Fault:
    name = param.removeprefix("body.").capitalize()
    return _Fault(code="invalid_request", message=f"{name} parameter is required.", param=param)


def _type_fault(param: str, expected: str, raw: Raw) -> _Fault:
    message = f"Invalid type for '{param}': expected {expected}, but got {_kind(raw)} instead."
    return _Fault(code="invalid_type", message=message, param=param)


def _json_problem(number: int, why: str | None = None) -> Problem:
    message = "This line is not parseable as valid JSON"
    return Problem(code="invalid_json_line", line=number, message=f"{message}: {why}." if why else f"{message}.")


def _find_half_surrogate(line: bytes) -> str | None:
    """The first escape of half a character, which many programs write although UTF-8 cannot represent it."""
    high: re.Match[bytes] | None = None
    for escape in _ESCAPES.finditer(line):
        code = int(escape[1] or b"0", 16)
        if 0xDC00 <= code < 0xE000 and high is not None and high.end() == escape.start():
            high = None
            continue
        lone = high or (escape if 0xDC00 <= code < 0xE000 else None)
        if lone is not None:
            return _half(line, lone)
        high = escape if 0xD800 <= code < 0xDC00 else None
    return _half(line, high) if high is not None else None


def _half(line: bytes, escape: re.Match[bytes]) -> str:
    return f"{escape[0].decode()} at column {_column(line, escape.start())} is half of a surrogate pair"


def _explain_depth(line: bytes) -> str:
    """Where the nesting exceeds the depth that can always be read, which depends on Python's recursion limit."""
    depth, most = 0, sys.getrecursionlimit() - _FRAMES_MAX
    for token in _BRACKETS.finditer(line):
        depth += _STEPS.get(token[0], 0)
        if depth > most:
            place = _column(line, token.start())
            return f"it has more than {most} levels of nesting at column {place}; keep it below {_DEPTH_ADVISED}"
    return f"it has too many levels of nesting; keep it below {_DEPTH_ADVISED}"


def _column(line: bytes, position: int) -> int:
    """The column as editors count it: characters, from 1."""
    return len(line[:position].decode("utf-8", "replace")) + 1


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


def _count_items(value: bytes) -> int:
    """The number of items of an array; anything else counts as one."""
    return len(_items.decode(value)) if value[:1] == b"[" else 1


def _token_count(raw: bytes) -> int | None:
    return int(raw) if raw.isdigit() and len(raw) <= _TOKEN_DIGITS_MAX else None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
