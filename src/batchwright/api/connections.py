"""Limits on connections: how many there are, how large their headers may be, and how long they may take.

    accepted ──▶ waiting ──▶ reading a body ──▶ answered ──▶ idle ──▶ waiting …
                    └────────────┴── refused, or answered before its body ended ──▶ lingering ──▶ closed

uvicorn reads any number of headers for as long as the client likes. `Connection` is its protocol with limits, and
`Crowd` tracks all connections. At the limit it closes the connection that has been without a request for longest; busy
connections stay. A few extra places are reserved for health checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import resource
import struct
import termios
import time
from typing import Any, NamedTuple, cast

import httptools
from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from batchwright.access.settings import ApiSettings
from batchwright.api.errors import error_answer
from batchwright.api.turns import CALLER, InTurn, Turns, credentials

log = logging.getLogger(__name__)

HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
BACKLOG_MAX = 2_048
HEADERS_MAX = 128
"""Maximum number of headers of one request: each takes far more memory than its bytes."""
_HEALTH_PLACES = 64
"""Number of connections accepted beyond the limit; only health checks are answered on them."""
_DESCRIPTORS_RESERVED = 256
"""Descriptors for the database, the store, logs and everything else that the process opens."""
_PLACES_MIN = 64
_HEADS_BYTES_MAX = 16 * 1024 * 1024
"""Maximum bytes of unfinished headers, and of those whose request waits for its turn, over all connections."""
_AHEAD_MAX = 1
"""Requests that may follow on a connection before the first is answered.

Not 0: a client that has read all of an answer may send the next request a moment before we note that it has ended.
"""
_PIECE_BYTES = 16 * 1024
"""Maximum bytes given to the parser at a time, so that headers over the limit are noticed soon."""
_BODY_WINDOW_SECONDS = 10.0
_ANSWER_WINDOW_SECONDS = 30.0
_WATCH_SECONDS = 1.0
_CHECKED_AT_ONCE = 50
_WARN_SECONDS = 60.0


class Patience(NamedTuple):
    """How much is still read, and discarded, after an early answer: a client that is cut off may not see the answer."""

    seconds: float
    bytes_max: int


_WITHOUT_KEY = Patience(2.0, 256 * 1024)
_WITH_KEY = Patience(60.0, 1024**3)
"""Most clients read the answer only after they have sent everything, for example a file that is too large."""


class Refused(Exception):
    """Ends the reading of a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TooManyAhead(Exception):
    """Ends the reading of a connection; the requests before this one are answered."""


def backlog() -> int:
    """Connections that the kernel keeps until they are accepted; all of them may arrive at once."""
    return min(BACKLOG_MAX, _descriptors() // 4)


def places(settings: ApiSettings) -> int:
    """How many connections may be open, so that enough descriptors remain for everything else."""
    found = min(settings.connections_max, _descriptors() - backlog() - _HEALTH_PLACES - _DESCRIPTORS_RESERVED)
    if found < settings.connections_max:
        log.warning(
            "at most %d connections at a time, not the %d of api.connections_max: this process may open %d files; "
            "raise that limit (ulimit -n, LimitNOFILE=)",
            max(_PLACES_MIN, found),
            settings.connections_max,
            _descriptors(),
        )
    return max(_PLACES_MIN, found)


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Crowd(ServerState):
    """All connections of one server, by activity; those that may be closed to make room are sorted by time."""

    def __init__(self, settings: ApiSettings, places: int) -> None:
        super().__init__()
        self.settings = settings
        self.places = places
        self.turns = Turns()
        self.head_bytes = 0
        """Total bytes of unfinished headers, and of those whose request waits for its turn."""
        self.lingering: dict[Connection, None] = {}
        self.waiting: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}
        self._warned_at = -_WARN_SECONDS

    def admit(self, connection: Connection) -> None:
        """Make room for a new connection: close another, or use a place reserved for health checks."""
        if len(self.connections) > self.places:
            self._warn()
            if not self._end_one(besides=connection):
                connection.is_extra = True
        if len(self.connections) > self.places + _HEALTH_PLACES:
            self._end(connection)

    def bound_heads(self, besides: Connection) -> None:
        while self.head_bytes > _HEADS_BYTES_MAX and self._end_one(besides):
            self._warn()

    def put(self, connection: Connection, where: dict[Connection, None] | None) -> None:
        for place in (self.lingering, self.waiting, self.idle):
            place.pop(connection, None)
        if where is not None:
            where[connection] = None

    async def check(self, now: float) -> None:
        """Close connections that are too slow. Thousands may be due at once, so others have their turn in between."""
        for n, connection in enumerate(list(self.connections)):
            if isinstance(connection, Connection):
                connection.check(now)
            if n % _CHECKED_AT_ONCE == _CHECKED_AT_ONCE - 1:
                await asyncio.sleep(0)

    async def watch(self) -> None:
        """One check of all connections a second is less work than a timer for each."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            await self.check(loop.time())

    def _end_one(self, besides: Connection) -> bool:
        """Close the connection that has been without a request for longest; returns whether there was one."""
        for place in (self.lingering, self.waiting, self.idle):
            for connection in place:
                if connection is not besides:
                    self._end(connection)
                    return True
        return False

    def _end(self, connection: Connection) -> None:
        # Update everything now: the loop reports a lost connection only on its next turn.
        self.put(connection, None)
        self.connections.discard(connection)
        connection.forget()
        connection.abort()

    def _warn(self) -> None:
        if time.monotonic() - self._warned_at >= _WARN_SECONDS:
            self._warned_at = time.monotonic()
            log.warning(
                "%d connections are open, with %d bytes of unfinished headers; the oldest without a request are closed",
                len(self.connections),
                self.head_bytes,
            )


class Connection(HttpToolsProtocol):
    """One connection, with limits."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(server_state, Crowd)
        self.crowd = server_state
        self.settings = server_state.settings
        self.is_extra = False
        """Beyond the limit: only health checks are answered."""
        self._is_lingering = False
        self._is_deaf = False
        """Everything that still comes is discarded."""
        self._patience = _WITHOUT_KEY
        self._in_head = True
        self._in_body = False
        self._since = self.loop.time()
        """When it began to wait or to linger."""
        self._headers = 0
        self._head_bytes = 0
        self._silent_bytes = 0
        """Bytes that the parser consumed without a callback: part of a header, or of something that is not a body."""
        self._noted_bytes = 0
        self._kept_bytes = 0
        """Of complete headers, from clients that we do not know yet."""
        self._answered: RequestResponseCycle | None = None
        """The request whose turn it is; `cycle` is the newest one."""
        self._is_silent = False
        self._keeps_alive = True
        self._body_window = Window(self._since)
        self._answer_window: Window | None = None
        self._received_bytes = 0
        self._written_bytes = 0

    @property
    def is_busy(self) -> bool:
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.disconnected)

    @property
    def _is_known(self) -> bool:
        """Whether the request whose turn it is came with valid credentials."""
        return self._answered is not None and CALLER in self._answered.scope

    # Called by the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._since = self.loop.time()
        self.crowd.put(self, self.crowd.waiting)
        self.crowd.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        self.crowd.put(self, None)
        if self._answered is not None:  # uvicorn tells only the newest request, which may be the one behind
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        pieces = memoryview(data)
        for start in range(0, len(data), _PIECE_BYTES):
            if self._is_lingering:
                self._discard_input()
                return
            if self.parser is None or self._is_deaf or self.transport.is_closing():
                return
            self._feed(pieces[start : start + _PIECE_BYTES])

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def abort(self) -> None:
        self.transport.abort()

    # Called by the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _AHEAD_MAX:
            raise TooManyAhead
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head = True
        self._note_parsed()
        if self in self.crowd.idle:  # the time limit for the first request starts with the connection
            self._wait()

    def on_url(self, url: bytes) -> None:
        self._note_parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        self._note_parsed(len(name) + len(value) + len(b": \r\n"))
        if self._in_head:  # bytes after a body count, although we ignore them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._keep_head()
        super().on_headers_complete()
        self.cycle.transport = AnswerTransport(self)
        if any(name in (b"content-length", b"transfer-encoding") and value != b"0" for name, value in self.headers):
            self._in_body = True
            self._body_window = Window(self.loop.time(), self._received_bytes)
            # An answer before the end of the body closes the connection; and the body is read only on demand.
            self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
            self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._note_parsed()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.forget_head()
        if self._in_body:
            self._in_body = False
            if not self.cycle.response_started:
                self.cycle.keep_alive = self._keeps_alive
            if not self.pipeline:
                self.flow.resume_reading()
        super().on_message_complete()

    # Called while answering -------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        self.crowd.put(self, None)
        if cycle.scope["path"] in HEALTH_PATHS:
            super()._start_asgi_task(cycle, app)
        elif self.is_extra:
            cycle.keep_alive = False
            super()._start_asgi_task(cycle, cast("Any", busy(self.crowd.places)))
        else:
            who = credentials(cycle.scope["headers"])
            if self.crowd.turns.knows(who):
                self._forget_kept()
            else:  # until its turn comes, it may be closed to make room
                self.crowd.put(self, self.crowd.waiting)
                self.crowd.bound_heads(self)
            self.crowd.turns.ask(who, lambda: self._begin(cycle, InTurn(app, self.crowd.turns, who)))

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> bool:
        if cycle.disconnected or self.transport.is_closing():
            return False
        # Who has not read the last answer may be closed to make room, too.
        self.crowd.put(self, self.crowd.waiting if self.flow.write_paused else None)
        super()._start_asgi_task(cycle, app)
        return True

    def on_response_complete(self) -> None:
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self.is_busy or self.transport.is_closing():
            return
        self._forget_kept()
        if self._in_head:
            self._wait()
        else:
            self._forget_request()
            self.crowd.put(self, self.crowd.idle)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.transport.is_closing():  # the client has left, which the loop reports on its next turn
            return
        self._written_bytes += len(data)
        if self._is_known:
            self._forget_kept()
            self.crowd.put(self, None)
        elif self.is_busy:  # a stranger who does not read its answer may be closed to make room
            self.crowd.put(self, self.crowd.waiting)
        self.transport.write(data)

    def close(self) -> None:
        """Let the peer read the answer before we close: a peer that is still sending would see a reset instead."""
        if self._in_body and not self.transport.is_closing():
            self._linger(_WITH_KEY if CALLER in self.cycle.scope else _WITHOUT_KEY)
        elif self._is_deaf and not self.transport.is_closing():
            self._linger(_WITHOUT_KEY)
        else:
            self.transport.close()

    def _linger(self, patience: Patience) -> None:
        self._is_lingering = True
        self._patience = patience
        self._since = self.loop.time()
        self._received_bytes = 0
        self.crowd.put(self, self.crowd.lingering)
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            self.transport.write_eof()
        self.flow.resume_reading()

    # Time limits ------------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Close the connection if it takes too long."""
        if self.transport is None or self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size() > 0:
            self._check_answer(now)
            return
        self._answer_window = None
        if self._is_lingering:
            if now - self._since > self._patience.seconds:
                self.abort()
        elif self._in_body and self.is_busy:
            self._check_body(now)
        elif self._in_head and not self.is_busy and now - self._since > self.settings.head_seconds:
            if self._received_bytes == 0:
                self.transport.close()
            else:
                self._refuse(
                    Refused(408, f"the headers were not complete within {self.settings.head_seconds:g} seconds")
                )

    def _check_answer(self, now: float) -> None:
        if self._answer_window is None:
            self._answer_window = Window(now, self._taken_bytes())
        elif not self._answer_window.moves(now, self._taken_bytes(), self._least, _ANSWER_WINDOW_SECONDS):
            self.abort()

    def _check_body(self, now: float) -> None:
        if self.flow.read_paused:  # then it is the server that is slow
            self._body_window = Window(now, self._received_bytes)
        elif not self._body_window.moves(now, self._received_bytes, self._least, _BODY_WINDOW_SECONDS):
            self._refuse(Refused(408, f"the body arrived more slowly than {self._least} bytes per second"))

    @property
    def _least(self) -> int:
        return self.settings.bytes_per_second_min

    def _taken_bytes(self) -> int:
        """Bytes of our answers that the peer has received; those in the kernel's large buffer do not count."""
        waiting = self.transport.get_write_buffer_size()
        found = self.transport.get_extra_info("socket")
        if found is not None:
            with contextlib.suppress(OSError, ValueError):
                (queued,) = struct.unpack("i", fcntl.ioctl(found.fileno(), termios.TIOCOUTQ, b"\0" * 4))
                waiting += queued
        return self._written_bytes - waiting

    # ------------------------------------------------------------------------------------------------------------

    def _feed(self, piece: memoryview) -> None:
        self._is_silent = True
        try:
            self.parser.feed_data(piece)
            if self._is_silent:
                self._silent_bytes += len(piece)
                self._note_head()
        except httptools.HttpParserUpgrade:
            return  # no other protocol is supported: answer as if the request had not asked for an upgrade
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, TooManyAhead):
                self._is_deaf, self.cycle.keep_alive = True, False
                return
            self._refuse(cause if isinstance(cause, Refused) else Refused(400, "this is not an HTTP/1.1 request"))
        except Refused as refused:
            self._refuse(refused)

    def _note_parsed(self, head_bytes: int = 0) -> None:
        self._is_silent = False
        self._silent_bytes = 0
        self._head_bytes += head_bytes
        self._note_head()

    def _note_head(self) -> None:
        total = self._head_bytes + self._silent_bytes
        self.crowd.head_bytes += total - self._noted_bytes
        self._noted_bytes = total
        if total > self.settings.head_bytes_max:
            raise Refused(431, f"the headers are larger than {self.settings.head_bytes_max} bytes in total")
        if self._headers > HEADERS_MAX:
            raise Refused(431, f"the request has more than {HEADERS_MAX} headers")
        self.crowd.bound_heads(self)

    def forget(self) -> None:
        self.forget_head()
        self._forget_kept()

    def forget_head(self) -> None:
        self.crowd.head_bytes -= self._noted_bytes
        self._headers = self._head_bytes = self._silent_bytes = self._noted_bytes = 0

    def _keep_head(self) -> None:
        """Count the complete headers of a stranger until its request is answered."""
        size = self._head_bytes
        self.forget_head()
        if not self._is_known:
            self._kept_bytes += size
            self.crowd.head_bytes += size

    def _forget_kept(self) -> None:
        self.crowd.head_bytes -= self._kept_bytes
        self._kept_bytes = 0

    def _forget_request(self) -> None:
        """Thousands of idle connections would otherwise keep the headers of their last requests in memory."""
        if self.cycle.more_body:  # its end is not parsed yet
            return
        self.cycle = self.scope = self.headers = self._answered = None  # type: ignore[assignment]  # uvicorn sets them anew
        self.url = b""

    def _wait(self) -> None:
        self._since = self.loop.time()
        self.crowd.put(self, self.crowd.waiting)

    def _discard_input(self) -> None:
        if self._received_bytes > self._patience.bytes_max:
            self.transport.close()

    def _refuse(self, refused: Refused) -> None:
        """Answer in place of the application, which sees a disconnect; if it has begun to answer, hang up."""
        self.forget()
        if self.is_busy:
            if self.cycle.response_started or self._in_head or self.pipeline:
                self.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.write(_written(refused.status, str(refused)))
        self._linger(_WITHOUT_KEY)


@functools.cache
def _written(status: int, message: str) -> bytes:
    """An error as bytes; cached, because there are few and thousands of connections may be refused at once."""
    answer = error_answer(status, message, headers={"Connection": "close"})
    lines = [b"%b: %b\r\n" % header for header in answer.raw_headers]
    return b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(answer.body)])


class AnswerTransport(asyncio.Transport):
    """The transport for an answer: it counts the bytes sent, and lets the peer read them before it closes."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._connection.write(data)

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()


class Window:
    """A period in which a minimum number of bytes must move."""

    def __init__(self, since: float, bytes_before: int = 0) -> None:
        self._since = since
        self._before = bytes_before

    def moves(self, now: float, bytes_now: int, per_second: int, seconds: float) -> bool:
        """Whether enough bytes moved in the last period; always true before a period has ended."""
        if now - self._since < seconds:
            return True
        is_enough = bytes_now - self._before >= per_second * seconds
        self._since, self._before = now, bytes_now
        return is_enough


def busy(places: int) -> ASGIApp:
    message = f"{places} connections are open already, the limit of this server; try again soon"
    return error_answer(503, message, headers={"Connection": "close"})
