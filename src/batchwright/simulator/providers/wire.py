"""The HTTP side of the contract server: like the simulator's, but it keeps all headers and sends any content type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

import orjson

from batchwright.simulator.faults import Fault
from batchwright.simulator.http import Connection, Exchange

JSON, LINES, OCTETS, XML = "application/json", "application/jsonl", "application/octet-stream", "application/xml"
_FIELD = re.compile(rb'name="((?:[^"\\]|\\.)*)"')
_FILENAME = re.compile(rb'filename="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Answer:
    """The response."""

    status: int = 200
    body: bytes = b""
    type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


def answer(value: object, status: int = 200, **headers: str) -> Answer:
    """An answer in JSON; `retry_after=…` becomes the header `retry-after`."""
    return Answer(status, dump(value), JSON, {name.replace("_", "-"): text for name, text in headers.items()})


def dump(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


class Refused(Exception):
    """The request is refused; its protocol writes the error in its own format."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = {name.replace("_", "-"): text for name, text in headers.items()}


class Call(Exchange):
    """One parsed request."""

    __slots__ = ("path", "query", "type")

    def __init__(
        self, connection: Connection, method: bytes, target: bytes, headers: dict[bytes, bytes], body: bytes, keep: bool
    ) -> None:
        super().__init__(connection, method, target, headers, body, keep)
        path, _, query = target.decode("latin-1").partition("?")
        self.path = path
        self.query = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
        self.type = JSON

    @property
    def verb(self) -> str:
        return "GET" if self.method == b"HEAD" else self.method.decode()

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def header(self, name: str) -> str | None:
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def bearer(self) -> str | None:
        scheme, _, key = (self.header("authorization") or "").partition(" ")
        return key if scheme.lower() == "bearer" and key else None

    def number(self, name: str, default: int, most: int) -> int:
        """A number of the query, from 0 to `most`."""
        text = self.query.get(name) or str(default)
        if not text.isdecimal():
            raise Refused(400, f"{name} is {text!r}, but must be a number")
        return min(int(text), most)

    def json(self) -> dict[str, Any]:
        try:
            value = orjson.loads(self.body or b"{}")
        except orjson.JSONDecodeError as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise Refused(400, "the body is not a JSON object")
        return value

    def form(self) -> dict[str, Part]:
        """The parts of a multipart body by their names."""
        found = re.search(r'boundary="?([^";]+)', self.header("content-type") or "")
        if found is None:
            raise Refused(400, "the body is not multipart/form-data")
        parts = self.body.split(b"--" + found[1].encode())[1:-1]
        return dict(map(_part, parts))

    def parts(self) -> list[Part]:
        """The parts of a multipart/related body in their order."""
        found = re.search(r"boundary=\"?'?([^\"';]+)", self.header("content-type") or "")
        if found is None:
            raise Refused(400, "the body is not multipart/related")
        return [_part(one)[1] for one in self.body.split(b"--" + found[1].encode())[1:-1]]

    def reply(self, what: Answer, fault: Fault | None = None) -> None:
        self.type = what.type
        self.send(what.status, what.body, _headers(what), fault)

    def _head(self, status: int, length: int, extra: bytes) -> bytes:
        head = super()._head(status, length, extra)
        return head if self.type == JSON else head.replace(b"application/json", self.type.encode(), 1)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a multipart body."""

    data: bytes
    filename: str | None = None
    type: str = OCTETS

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


def _part(raw: bytes) -> tuple[str, Part]:
    head, _, data = raw.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    name, filename = _FIELD.search(head), _FILENAME.search(head)
    kind = re.search(rb"(?i)content-type: *([^\r\n]+)", head)
    said = None if filename is None else unquote(filename[1].decode("utf-8", "replace"))
    part = Part(data.removesuffix(b"\r\n"), said, OCTETS if kind is None else kind[1].decode("latin-1"))
    return "" if name is None else name[1].decode(), part


def _headers(what: Answer) -> bytes:
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in what.headers.items())


class Wire(Connection):
    """A client's connection whose requests keep all their headers."""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_message_complete(self) -> None:
        if self._refusal is None:
            self._is_old = self._parser.get_http_version() == "1.0"
            method, keep = self._parser.get_method(), self._parser.should_keep_alive()
            self._ready.append(Call(self, method, self._target, self._headers, b"".join(self._body), keep))
        self._head_bytes = None
