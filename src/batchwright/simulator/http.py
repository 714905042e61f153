"""The HTTP side of the simulator: a minimal protocol on httptools, which can break connections on demand."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from http import HTTPStatus
from typing import Protocol, cast

import httptools

from batchwright.simulator.answers import error_body
from batchwright.simulator.faults import Fault

_HEAD_BYTES_MAX = 65_536
_NO_LINGER = struct.pack("ii", 1, 0)
_PIPELINE_MAX = 32
_WANTED = frozenset({b"authorization", b"expect", b"x-request-id", b"x-simulator-fault"})
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class App(Protocol):
    """The application that answers the requests."""

    @property
    def body_bytes_max(self) -> int: ...
    def connected(self, connection: Connection) -> None: ...
    def disconnected(self, connection: Connection) -> None: ...
    def handle(self, exchange: Exchange) -> None: ...
    def lost(self, exchange: Exchange) -> None: ...
    def sent(self, exchange: Exchange, status: int) -> None: ...


class Exchange:
    """One request with its body, and the way to answer it."""

    __slots__ = (
        "body",
        "connection",
        "headers",
        "held",
        "is_counted",
        "keep_alive",
        "method",
        "since",
        "target",
        "work",
    )

    def __init__(
        self, connection: Connection, method: bytes, target: bytes, headers: dict[bytes, bytes], body: bytes, keep: bool
    ) -> None:
        self.connection = connection
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.keep_alive = keep
        self.held: asyncio.TimerHandle | None = None
        self.is_counted = False
        self.since = 0.0
        self.work: object = None

    def send(self, status: int, body: bytes, extra: bytes = b"", fault: Fault | None = None) -> None:
        """Send the answer, complete or damaged by the fault."""
        if self.method == b"HEAD":
            head = self._head(status, len(body), extra)
            self._end(status, head, close=not self.keep_alive)
        elif fault is None:
            self._end(status, self._head(status, len(body), extra) + body, close=not self.keep_alive)
        else:
            self._send_broken(status, body, extra, fault)

    def cut(self, *, reset: bool) -> None:
        """Close the connection without an answer."""
        transport = self.connection.transport
        if reset:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.connection.exchange = None
        self.connection.app.sent(self, 0)
        transport.abort()

    def _send_broken(self, status: int, body: bytes, extra: bytes, fault: Fault) -> None:
        head = self._head(status, len(body), extra)
        match fault.kind:
            case "drop":
                self._end(0, (head + body)[: fault.after or 0], close=True)
            case "truncate":
                kept = len(body) // 2 if fault.bytes is None else fault.bytes
                self._end(status, head + body[:kept], close=True)
            case "wrong_length":
                head = self._head(status, max(0, len(body) + fault.by), extra)
                self._end(status, head + body, close=fault.by < 0)
            case "drip":
                self.connection.transport.write(head)
                self._drip(status, memoryview(body), max(1, fault.bytes or 16), fault.every)
            case _:
                self._end(status, head + body, close=not self.keep_alive)

    def _drip(self, status: int, rest: memoryview, size: int, every: float) -> None:
        self.connection.transport.write(bytes(rest[:size]))
        if len(rest) <= size:
            self._end(status, b"", close=not self.keep_alive)
        else:
            loop = asyncio.get_running_loop()
            self.held = loop.call_later(every, self._drip, status, rest[size:], size, every)

    def _end(self, status: int, data: bytes, *, close: bool) -> None:
        connection = self.connection
        if data:
            connection.transport.write(data)
        connection.exchange = None
        connection.app.sent(self, status)
        if close:
            connection.transport.close()
        else:
            connection.next()

    def _head(self, status: int, length: int, extra: bytes) -> bytes:
        return (
            b"%bserver: batchwright-simulator\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b\r\n"
            % (
                _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status,
                length,
                extra,
                self.connection.persistence(self.keep_alive),
            )
        )


class Connection(asyncio.Protocol):
    """One client's connection. Requests are read by the parser's callbacks and answered one after the other."""

    __slots__ = (
        "_body", "_head_bytes", "_headers", "_is_busy", "_is_old", "_parser", "_ready", "_refusal", "_size", "_target",
        "app", "exchange", "transport",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, app: App) -> None:
        self.app = app
        self.exchange: Exchange | None = None
        self._is_busy = False
        self._is_old = False
        self._parser = httptools.HttpRequestParser(self)
        self._ready: deque[Exchange] = deque()
        self._refusal: tuple[int, str] | None = None
        self.on_message_begin()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.app.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.app.disconnected(self)
        self._ready.clear()
        if (exchange := self.exchange) is not None:
            self.exchange = None
            self.app.lost(exchange)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refusal = 400, "the simulator accepts only HTTP/1.1 without upgrades"
        except httptools.HttpParserError as error:
            self._refusal = 400, f"the request is not valid HTTP: {error}"
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES_MAX:
                self._refusal = 431, f"the headers are longer than {_HEAD_BYTES_MAX} bytes"
        self.next()
        if self._refusal is not None and not self.transport.is_closing():
            self._refuse(*self._refusal)

    def on_message_begin(self) -> None:
        self._body: list[bytes] = []
        self._head_bytes: int | None = 0
        self._headers: dict[bytes, bytes] = {}
        self._size = 0
        self._target = b""

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower in _WANTED:
            self._headers[lower] = value

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self.app.body_bytes_max:
            self._body.append(part)
        else:
            self._refusal = 413, f"the body is longer than {self.app.body_bytes_max} bytes"

    def on_message_complete(self) -> None:
        if self._refusal is None:
            parser, parts = self._parser, self._body
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            self._is_old = parser.get_http_version() == "1.0"
            keep = parser.should_keep_alive()
            self._ready.append(Exchange(self, parser.get_method(), self._target, self._headers, body, keep))
        self._head_bytes = None

    def next(self) -> None:
        """Answer requests one at a time; stop reading from a client that sends too far ahead."""
        if self._is_busy:
            return
        self._is_busy = True
        while self._ready and self.exchange is None and not self.transport.is_closing():
            self.exchange = self._ready.popleft()
            self.app.handle(self.exchange)
        self._is_busy = False
        if len(self._ready) > _PIPELINE_MAX:
            self.transport.pause_reading()
        elif not self.transport.is_reading() and not self.transport.is_closing():
            self.transport.resume_reading()

    def persistence(self, keep: bool) -> bytes:
        if not keep:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self._is_old else b""

    def _refuse(self, status: int, message: str) -> None:
        """A request that cannot be parsed ends its connection."""
        self._ready.clear()
        body = error_body(status, message)
        line = _STATUS_LINES[status]
        head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (
            line,
            len(body),
        )
        self.transport.write(head + body)
        self.transport.close()
