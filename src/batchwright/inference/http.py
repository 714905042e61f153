"""HTTP to services other than model servers: any method, bounded answers, streams in both directions.

The client sends nothing twice, follows no redirects, and uses no proxies or cookies. After a failure,
`NoAnswer.was_sent` says whether the service may have seen the request. Cancelling a task closes its connection.

>>> http = Http()
>>> service = Service(http, "https://api.example.com/v1", headers=key_header)
>>> batch = (await service.ask("GET", "/batches/1")).json()
>>> async with service.open("GET", "/files/1/content") as answer:
...     async for chunk in answer.chunks():
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import orjson
import wreq
from wreq import Method, dns, exceptions, redirect

from batchwright.errors import Fatal, Transient
from batchwright.inference.answers import Failure
from batchwright.inference.gateway import network_thread
from batchwright.inference.settings import shown_url

MIB = 1024 * 1024
ANSWER_BYTES_MAX = 16 * MIB
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
"""Time limit of a call, from connecting to the last byte; uploads get more time according to their length."""
SILENCE_SECONDS = 60.0
"""Maximum time without data on a stream."""
UPLOAD_BYTES_PER_SECOND_MIN = 256 * 1024
_IDLE_SECONDS = 4.0
_IDLE_CONNECTIONS_MAX = 16

Chunks = AsyncIterator[bytes]
Headers = Mapping[str, str]


class NoAnswer(Transient):
    """There is no complete answer. Only if `was_sent` is False has the service certainly not seen the request."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message, code=failure.value)
        self.failure = failure

    @property
    def was_sent(self) -> bool:
        return self.failure not in (Failure.CONNECT, Failure.UNSENDABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A body that is read while it is sent."""

    length: int
    open: Callable[[], Chunks]
    content_type: str = "application/octet-stream"


def multipart(fields: Headers, file: Upload | None = None, *, filename: str = "", name: str = "file") -> Upload:
    """A form with fields of text and perhaps one file, which is streamed."""
    boundary = f"batchwright-{secrets.token_hex(16)}"
    head = b"".join(
        f'--{boundary}\r\ncontent-disposition: form-data; name="{_quoted(key)}"\r\n\r\n{value}\r\n'.encode()
        for key, value in fields.items()
    )
    kind = f"multipart/form-data; boundary={boundary}"
    if file is None:
        whole = head + f"--{boundary}--\r\n".encode()
        return Upload(length=len(whole), open=lambda: _once(whole), content_type=kind)
    head += (
        f'--{boundary}\r\ncontent-disposition: form-data; name="{_quoted(name)}"; filename="{_quoted(filename)}"\r\n'
        f"content-type: {file.content_type}\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()

    async def chunks() -> Chunks:
        yield head
        async with aclosing(_generator(file.open())) as parts:
            async for part in parts:
                yield part
        yield tail

    return Upload(length=len(head) + file.length + len(tail), open=chunks, content_type=kind)


Body = bytes | Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A complete answer; header names are in lower case."""

    status: int
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """The body as JSON. A service that answers 2xx with anything else has a fault."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            raise Transient(f"the answer with status {self.status} is not JSON", code="not_json") from None


class Incoming:
    """An answer whose body is still to come."""

    def __init__(self, response: wreq.Response) -> None:
        self.status = response.status.as_int()
        self.headers = {_text(name).lower(): _text(value) for name, value in response.headers}
        self.length = response.content_length
        self.address = None if response.remote_addr is None else response.remote_addr.ip()
        """The address of the machine that answered, to refuse forbidden addresses."""
        self._response = response

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    async def chunks(self) -> Chunks:
        """The body; can be read once. Leaving the loop early closes the connection."""
        try:
            async with self._response.stream() as stream:
                async for chunk in stream:
                    if isinstance(chunk, memoryview):
                        yield bytes(chunk)
        except _ERRORS as error:
            failure = Failure.TIMEOUT if _is_late(error) else Failure.LOST
            raise NoAnswer(failure, f"{_SAYS[failure]} after the status {self.status}") from None

    async def whole(self, bytes_max: int = ANSWER_BYTES_MAX) -> Response:
        body = bytearray()
        async with aclosing(_generator(self.chunks())) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > bytes_max:
                    raise NoAnswer(Failure.TOO_LARGE, f"the answer is longer than {bytes_max} bytes")
        return Response(status=self.status, headers=self.headers, body=bytes(body))


class Http:
    """One HTTP client, for all services of a process."""

    def __init__(self, *, connect_seconds: float = CONNECT_SECONDS, runtime: wreq.Runtime | None = None) -> None:
        self._client = wreq.Client(runtime=runtime or network_thread(), **_options(connect_seconds))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; callers that still await an answer get CancelledError."""
        await self._client.__aexit__(None, None, None)

    async def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Headers | None = None,
        body: Body = b"",
        bytes_max: int = ANSWER_BYTES_MAX,
        seconds: float = ANSWER_SECONDS,
    ) -> Response:
        """Send one request and return the complete answer, whatever its status."""
        if isinstance(body, Upload):
            seconds += body.length / UPLOAD_BYTES_PER_SECOND_MIN
        async with await self._send(method, url, headers, body, {"timeout": timedelta(seconds=seconds)}) as response:
            return await Incoming(response).whole(bytes_max)

    @asynccontextmanager
    async def open(
        self, method: str, url: str, *, headers: Headers | None = None, seconds: float = SILENCE_SECONDS
    ) -> AsyncIterator[Incoming]:
        """Send one request and stream the answer. It may take any time, but fails if no data comes for too long."""
        async with await self._send(
            method, url, headers, b"", {"read_timeout": timedelta(seconds=seconds)}
        ) as response:
            yield Incoming(response)

    async def _send(
        self, method: str, url: str, headers: Headers | None, body: Body, times: dict[str, timedelta]
    ) -> wreq.Response:
        options: dict[str, Any] = {**times, "headers": {**_OWN_HEADERS, **(headers or {})}}
        source: _Source | None = None
        if isinstance(body, Upload):
            source = _Source(body)
            options["headers"] |= {"content-length": str(body.length), "content-type": body.content_type}
            options["body"] = source.chunks()
        elif body or method in ("POST", "PUT", "PATCH"):
            options["body"] = body
        try:
            return await self._client.request(_METHODS[method], url, **options)
        except _ERRORS as error:
            if source is not None and source.error is not None:
                raise source.error from None
            failure = _before_an_answer(error)
            raise NoAnswer(failure, _SAYS[failure] + _reason(error)) from None


class Service:
    """A base URL with its credentials, which are sent only to that scheme, host and port."""

    def __init__(
        self,
        http: Http,
        base_url: str,
        headers: Callable[[], Awaitable[Headers]],
        query: Mapping[str, str | int] | None = None,
    ) -> None:
        self._http = http
        self._headers = headers
        self._query = query or {}
        self.base_url = base_url.rstrip("/")
        self.calls = 0
        """Number of requests that were sent, or attempted, with its credentials."""
        self._origin = origin(self.base_url)

    def __repr__(self) -> str:
        return f"Service({self.base_url})"

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        headers: Headers | None = None,
        json: Any = None,
        body: Body = b"",
        bytes_max: int = ANSWER_BYTES_MAX,
        seconds: float = ANSWER_SECONDS,
    ) -> Response:
        """Send one request with credentials. `path` is relative to the base URL, or a full URL of the same origin."""
        url = self.url(path, query)
        all_headers = {**await self._headers(), **(headers or {})}
        if json is not None:
            body = orjson.dumps(json)
            all_headers["content-type"] = "application/json"
        self.calls += 1
        return await self._http.ask(method, url, headers=all_headers, body=body, bytes_max=bytes_max, seconds=seconds)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        seconds: float = SILENCE_SECONDS,
    ) -> AsyncIterator[Incoming]:
        url = self.url(path, query)
        self.calls += 1
        async with self._http.open(method, url, headers=await self._headers(), seconds=seconds) as incoming:
            yield incoming

    def open_signed(self, url: str) -> AbstractAsyncContextManager[Incoming]:
        """Fetch a signed URL on any host, without credentials."""
        return self._http.open("GET", url)

    def url(self, path: str, query: Mapping[str, str | int] | None = None) -> str:
        """The full URL. A URL of another origin is refused, because it would get the credentials."""
        whole = path if "://" in path.partition("?")[0] else f"{self.base_url}/{path.lstrip('/')}"
        if origin(whole) != self._origin:
            raise Fatal(
                f"{shown_url(whole)} is not part of {self.base_url}, so it does not get its credentials",
                code="foreign_origin",
            )
        both = {**self._query, **(query or {})}
        return f"{whole}{'&' if '?' in whole else '?'}{urlencode(both)}" if both else whole


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port; for text that is not a URL, a value that equals nothing else."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return "", url, 0
    if "@" in parts.netloc or "\\" in url or not parts.hostname:
        return "", url, 0
    return parts.scheme, parts.hostname, port


class _Source:
    """Passes the chunks of an upload to the client, and keeps their error, which the client would reduce to text."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self.error: Exception | None = None

    async def chunks(self) -> Chunks:
        left = self._upload.length
        try:
            async with aclosing(_generator(self._upload.open())) as parts:
                async for part in parts:
                    left -= len(part)
                    if left < 0:
                        break
                    for start in range(0, len(part), MIB):
                        yield part if len(part) <= MIB else part[start : start + MIB]
            if left != 0:
                raise Transient(f"a body of {self._upload.length} bytes has another length", code="length_changed")
        except Exception as error:
            self.error = error
            raise


async def _once(data: bytes) -> Chunks:
    yield data


def _generator(chunks: Chunks) -> Any:
    """Makes any iterator closable."""
    return chunks if hasattr(chunks, "aclose") else _closable(chunks)


async def _closable(chunks: Chunks) -> Chunks:
    async for chunk in chunks:
        yield chunk


def _quoted(text: str) -> str:
    """Quotes a name as browsers do in forms."""
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


_METHODS = {
    "DELETE": Method.DELETE,
    "GET": Method.GET,
    "HEAD": Method.HEAD,
    "PATCH": Method.PATCH,
    "POST": Method.POST,
    "PUT": Method.PUT,
}
_OWN_HEADERS = {"accept-encoding": "identity"}
_ERRORS = (
    exceptions.BodyError,
    exceptions.BuilderError,
    exceptions.ConnectionError,
    exceptions.ConnectionResetError,
    exceptions.DecodingError,
    exceptions.RequestError,
    exceptions.TimeoutError,
    exceptions.TlsError,
    exceptions.UpgradeError,
    RuntimeError,
    ValueError,
)
_SAYS = {
    Failure.CONNECT: "the service could not be reached",
    Failure.LOST: "the connection was lost",
    Failure.TIMEOUT: "the request timed out",
    Failure.UNSENDABLE: "the request cannot be sent: its url or a header is invalid",
}
_REASONS = {
    "dns error": "its name is unknown",
    "ConnectionRefused": "connection refused",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted",
    "code: SSL": "the TLS handshake failed",
    "connect timeout": "no connection in time",
    "TimedOut": "no connection in time",
}


def _is_late(error: Exception) -> bool:
    return isinstance(error, exceptions.TimeoutError) or "TimedOut" in str(error)


def _before_an_answer(error: Exception) -> Failure:
    """Why there is no status. The client marks every failure before the connection as `Connect`."""
    if isinstance(error, (exceptions.ConnectionError, exceptions.TlsError)) and "kind: Connect," in str(error):
        return Failure.CONNECT
    if isinstance(error, exceptions.TimeoutError):
        return Failure.TIMEOUT
    if isinstance(error, (exceptions.BuilderError, RuntimeError, ValueError)):
        return Failure.UNSENDABLE
    return Failure.LOST


def _reason(error: Exception) -> str:
    """A short text of our own, because the client's text contains addresses and more."""
    text = str(error)
    if "kind: Connect," not in text:
        return ""
    return next((f": {words}" for sign, words in _REASONS.items() if sign in text), "")


def _text(value: memoryview) -> str:
    return bytes(value).decode("latin-1")


def _options(connect_seconds: float) -> dict[str, Any]:
    """The same as for model servers: no proxies, redirects, cookies or decompression."""
    return {
        "connect_timeout": timedelta(seconds=connect_seconds),
        "cookie_store": False,
        "dns_options": dns.DnsOptions(system_dns=True),
        "http1_only": True,
        "no_proxy": True,
        "pool_idle_timeout": timedelta(seconds=_IDLE_SECONDS),
        "pool_max_idle_per_host": _IDLE_CONNECTIONS_MAX,
        "redirect": redirect.Policy.none(),
        "referer": False,
        "user_agent": "batchwright",
        **dict.fromkeys(("gzip", "brotli", "deflate", "zstd"), False),
    }
