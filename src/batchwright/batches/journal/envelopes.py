"""The lines of output and error files: an envelope around the bytes that the server sent.

    answered     {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}
    failed       {"id", "custom_id", "response": null, "error": {"code", "message", "status_code"?, "body"?}}
    unanswered   {"id", "custom_id", "response": null, "error": {"code", "message"}}

A body is spliced in byte for byte: it was checked to be one line of JSON when it arrived, and it is never decoded and
encoded again, which could change its digits. Only U+0085, U+2028 and U+2029 are escaped, because many readers split
lines at them. Every line ends with a newline.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from orjson import dumps

from batchwright.inference.answers import Answer
from batchwright.jsonl import one_line

MESSAGES = {
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_failed": "This request was not executed because the batch failed.",
    "model_not_found": "This request was not executed because no gateway serves its model.",
    "request_aborted": "This request was in flight when the completion window expired, and was aborted.",
}
"""Why there is no answer, by code."""

_CODE_CHARACTERS_MAX = 64
_WORDS_CHARACTERS_MAX = 300
_ID_PREFIX = "batch_"
_ID_START = len(b'{"id":"')
_OFFSET_DIGITS = 10
_LINE_ID = re.compile(rb'\{"id":"batch_req_([0-9a-f]+)[0-9a-f]{10}"')
_REQUEST_ID_PREFIX = "batch_req_"
_NOTHING = b'""'

_BODY = b',"body":'
_CUSTOM_ID = b'","custom_id":'
_NULL_AND_ERROR = b'null,"error":'
_NO_RESPONSE = _NULL_AND_ERROR + b'{"code":'
_RESPONSE = b',"response":'
_STATUS = b'{"status_code":'
_SUCCESS = _STATUS + b"2"
_END_OF_BODY = b'},"error":null'
_END_OF_FAILURE = b"}\n"
_MESSAGE = b',"message":'
_TAILS = {
    code: b"".join((_RESPONSE, _NO_RESPONSE, dumps(code), _MESSAGE, dumps(message), b"}}\n"))
    for code, message in MESSAGES.items()
}


class RequestIds:
    """The ids of a batch's lines: each combines the batch and the line's offset in the input, and never changes.

    >>> ids = RequestIds("batch_0123456789abcdef0123456789abcdef")
    >>> ids.in_files(4096)
    'batch_req_0123456789abcdef0123456789abcdef0000001000'
    >>> ids.on_the_wire(4096)
    '01234567-89ab-cdef-0123-456789abddef'
    """

    __slots__ = ("_in_files", "_last_digits", "_on_the_wire")

    def __init__(self, batch_id: str) -> None:
        digits = batch_id.removeprefix(_ID_PREFIX)
        self._in_files = f"{_REQUEST_ID_PREFIX}{digits}"
        self._on_the_wire = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:22]}"
        self._last_digits = int(digits[22:32], 16)

    def in_files(self, offset: int) -> str:
        return f"{self._in_files}{offset:010x}"

    def on_the_wire(self, offset: int) -> str:
        """The id as model servers get it: some silently refuse ids that are not UUIDs.

        It is the batch's id, with the line's offset in the last ten digits. Search a server's log for the first 22
        digits to find all requests of a batch.
        """
        return f"{self._on_the_wire}{self._last_digits ^ offset:010x}"


def request_id(batch_id: str, offset: int) -> str:
    """The id of one line in the result files; for many lines, `RequestIds` is quicker."""
    return f"{_REQUEST_ID_PREFIX}{batch_id.removeprefix(_ID_PREFIX)}{offset:010x}"


def batch_id_of(line: bytes) -> str | None:
    """The id of the batch that wrote a line; None if none did. The beginning of the line is enough.

    >>> batch_id_of(b'{"id":"batch_req_0123456789abcdef0123456789abcdef0000001000","custom_id":')
    'batch_0123456789abcdef0123456789abcdef'
    """
    found = _LINE_ID.match(line)
    return None if found is None else f"{_ID_PREFIX}{found[1].decode()}"


def offset_of(line: bytes) -> int:
    """The offset of a line's request in the input.

    >>> offset_of(b'{"id":"batch_req_0123456789abcdef0123456789abcdef0000001000","custom_id":')
    4096
    """
    end = line.index(b'"', _ID_START)
    return int(line[end - _OFFSET_DIGITS : end], 16)


def answered(id: str, custom_id: str, answer: Answer) -> bytes:
    """The line of a request that was sent; `response` holds the server's own answer, whatever its status."""
    if answer.code is not None:
        tail = _failure(answer.code, answer)
        return one_line(b"".join((b'{"id":"', id.encode(), _CUSTOM_ID, dumps(custom_id), tail)))
    assert answer.status is not None, "an answer without a status has a code"
    line = b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n' % (
        id.encode(),
        dumps(custom_id),
        answer.status,
        dumps(answer.request_id or id),
        answer.body,
    )
    return one_line(line)


def unanswered(id: str, custom_id: str, code: str) -> bytes:
    """The line of a request that was never sent, or was aborted."""
    return one_line(b"".join((b'{"id":"', id.encode(), _CUSTOM_ID, dumps(custom_id), _TAILS[code])))


def error_code_of(line: bytes) -> tuple[str, str]:
    """The code and the custom_id of a failed line.

    The server's own code is used if it looks like one, else its type, else the status. Only the needed parts are
    decoded: a body may be nested so deeply that it can be decoded alone, but not inside its envelope.
    """
    head, _, rest = line.partition(_RESPONSE)
    custom_id = _decode_head(head + b"}").custom_id
    if rest.startswith(_NO_RESPONSE):
        start = len(_NO_RESPONSE) + 1
        return rest[start : rest.index(b'"', start)].decode(), custom_id
    status = rest[len(_STATUS) : rest.index(b",")].decode()
    return _code_in(_find_body(rest)) or f"http_{status}", custom_id


def words_of(line: bytes) -> tuple[str, str]:
    """The code of a failed line, and the server's message; our own message if it sent none."""
    code, _ = error_code_of(line)
    _, _, rest = line.partition(_RESPONSE)
    if not rest.startswith(_NO_RESPONSE):
        return code, words_in(_find_body(rest))
    try:
        message, body = _decode_failure(rest[len(_NULL_AND_ERROR) : -len(_END_OF_FAILURE)]).parts()
    except (msgspec.DecodeError, RecursionError):
        return code, ""
    said = words_in(body)
    return code, f"{message}: {said}" if said and not said.startswith("<") else message


def words_in(body: bytes) -> str:
    """The server's message in the body of an error, in one line; empty if there is none."""
    try:
        found = _decode_any(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return " ".join(_find_words(found).split())[:_WORDS_CHARACTERS_MAX]


def custom_id_of(line: bytes) -> str:
    """The custom_id of a line; nothing else of it is decoded."""
    return _decode_head(line.partition(_RESPONSE)[0] + b"}").custom_id


def is_success(line: bytes) -> bool:
    """Whether the line belongs to the output file, and not to the error file."""
    return line.partition(_RESPONSE)[2].startswith(_SUCCESS)


def _find_body(response: bytes) -> bytes:
    """The body of an answer. A cursor may follow the envelope's last field, and the newline may have been removed."""
    return response[response.index(_BODY) + len(_BODY) : response.rindex(_END_OF_BODY)]


def _failure(code: str, answer: Answer) -> bytes:
    """What went wrong, and what the server sent, if anything."""
    parts = [_RESPONSE, _NO_RESPONSE, dumps(code), _MESSAGE, dumps(MESSAGES.get(code, answer.message))]
    if answer.status is not None:
        parts.append(b',"status_code":%d' % answer.status)
    if answer.body != _NOTHING:
        parts += (_BODY, answer.body)
    parts.append(b"}}\n")
    return b"".join(parts)


class _Head(msgspec.Struct):
    custom_id: str


class _Body(msgspec.Struct):
    error: Any = None


class _Failure(msgspec.Struct):
    message: str = ""
    body: msgspec.Raw = msgspec.Raw(_NOTHING)

    def parts(self) -> tuple[str, bytes]:
        return self.message, bytes(self.body)


_decode_any = msgspec.json.Decoder().decode
_decode_failure = msgspec.json.Decoder(_Failure).decode
_decode_head = msgspec.json.Decoder(_Head).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def _code_in(body: bytes) -> str | None:
    try:
        error = _decode_body(body).error
    except (msgspec.DecodeError, RecursionError):
        return None
    named = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return next((name for name in named if _is_code(name)), None)


def _is_code(name: object) -> bool:
    """Short and printable: codes become keys in tables, and PostgreSQL refuses a NUL."""
    return isinstance(name, str) and 0 < len(name) <= _CODE_CHARACTERS_MAX and name.isprintable()


def _find_words(found: Any) -> str:
    """OpenAI's format is `{"error": {"message"}}`; servers in Python use `{"message"}` and `{"detail"}`."""
    if isinstance(found, str):
        return found
    if isinstance(found, list):
        return _find_words(found[0]) if found else ""
    if isinstance(found, dict):
        names = ("error", "message", "detail", "msg", "error_message")
        return next((words for name in names if (words := _find_words(found.get(name)))), "")
    return ""
