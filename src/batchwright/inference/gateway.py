"""One `send()` to model servers, and which server a model's requests go to."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import wreq
from wreq import dns, exceptions, redirect, tls
from wreq.header import HeaderMap

from batchwright.errors import ConfigurationError
from batchwright.inference.answers import Answer, Failure, RateHeaders, Reply, classify
from batchwright.inference.headers import ENVIRONMENT, FILE, OBJECTIVE
from batchwright.inference.settings import NO_GATEWAY, SECRETS, GatewaySettings, InferenceSettings, refuse_both

KEY_SECONDS = 60.0
_IDLE_SECONDS = 4.0
_KEY_BYTES_MAX = 16 * 1024
_TIMEOUT = Failure.TIMEOUT
"""Used for every request; access through the enum takes five times as long."""
_RATES_SIGN = "x-ratelimit-remaining-requests"
"""Servers that report what is left also send this header; for other servers one lookup is enough."""
_OWN_HEADERS = {"accept": "application/json", "accept-encoding": "identity", "content-type": "application/json"}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a batch on its way out; the body is sent byte for byte."""

    url: str
    """The line's own url, such as /v1/chat/completions."""
    body: bytes
    id: str
    """Sent as x-request-id."""
    traceparent: str | None = None
    seconds_left: float | None = None
    """Time left until the deadline."""
    headers: Mapping[str, str] = {}
    """Additional headers; those of the gateway override them."""

    def __repr__(self) -> str:
        return f"Request({self.id} to {self.url}, {len(self.body)} bytes)"


class Key:
    """A reference to a key. The key is read when needed, read again after a minute, and never shown."""

    def __init__(
        self,
        what: str,
        file: Path | None,
        variable: str | None,
        environment: Mapping[str, str],
        *,
        is_word: bool = True,
    ) -> None:
        self._what = what
        self._is_word = is_word
        self._file = file
        self._variable = variable
        self._environment = environment
        self._kept: str | None = None
        self._read_at: float | None = None

    def __repr__(self) -> str:
        return f"Key({self.origin})"

    @property
    def origin(self) -> str:
        if self._file is not None:
            return f"the file {self._file}"
        return f"the environment variable {self._variable}" if self._variable is not None else "none"

    def text(self, now: float) -> str | None:
        """The key, or None if there is none. If it cannot be read right now, the last value is used."""
        if self._read_at is None or now - self._read_at >= KEY_SECONDS:
            try:
                self._kept = self._read()
            except ConfigurationError:
                if self._read_at is None:
                    raise
            self._read_at = now
        return self._kept

    def _read(self) -> str | None:
        if self._file is None and self._variable is None:
            return None
        try:
            text = self._content().strip()
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{self._what} is {self.origin}, which cannot be read: {type(error).__name__}"
            ) from None
        if not text and self._file is None:
            raise ConfigurationError(f"{self._what} is {self.origin}, which is not set")
        is_word = " " not in text or not self._is_word
        if not text or not text.isascii() or not text.isprintable() or not is_word or len(text) > _KEY_BYTES_MAX:
            raise ConfigurationError(f"{self._what} is {self.origin}, which does not hold a key in one line")
        return text

    def _content(self) -> str:
        if self._file is not None:
            with self._file.open(encoding="ascii") as file:
                return file.read(_KEY_BYTES_MAX + 1)
        return self._environment.get(self._variable or "", "")


class Gateway:
    """One model server behind the one HTTP client."""

    def __init__(
        self,
        settings: GatewaySettings,
        limits: InferenceSettings | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        runtime: wreq.Runtime | None = None,
        secrets: Path = SECRETS,
    ) -> None:
        self.settings = settings
        self.endpoint = settings.endpoint
        self._limits = limits or InferenceSettings()
        name = settings.api_key_name
        file = secrets / name if name is not None else settings.api_key_file
        variables = os.environ if environment is None else environment
        self._key = Key("the gateway's key", file, settings.api_key_env, variables)
        self._key.text(time.monotonic())
        self._client = wreq.Client(runtime=runtime or network_thread(), **_options(settings, self._limits))
        objective = settings.inference_objective
        self._usual_timeout = timedelta(seconds=settings.request_timeout)
        self._says = _describe_failures(settings, self._limits)
        self._headers = dict(_OWN_HEADERS)
        if objective:
            self._headers[OBJECTIVE] = objective
        self._referred: dict[str, Key] = {}
        for header, value in settings.headers:
            if (found := reference(header, value, variables)) is None:
                self._headers[header] = value
            else:
                found.text(time.monotonic())
                self._referred[header] = found

    def __repr__(self) -> str:
        return f"Gateway({self.endpoint}, key={self._key!r})"

    async def send(self, request: Request) -> Answer:
        """Send one POST and judge the reply. Cancelling the task closes its connection."""
        started = time.monotonic()
        most, left = self.settings.request_timeout, request.seconds_left
        timeout, late = self._usual_timeout, _TIMEOUT
        if left is not None and left < most:
            if left <= 0:
                return classify(self._make_failure(Failure.EXPIRED, started), now=time.time())
            timeout, late = timedelta(seconds=left), Failure.DEADLINE
        try:
            response = await self._client.post(
                self.endpoint + request.url,
                body=request.body,
                headers=self._headers_of(request, started),
                timeout=timeout,
            )
        except Exception as error:
            failure = self._make_failure(_name_failure(error, late), started, self._explain(error))
            return classify(failure, now=time.time())
        return classify(await self._read(response, started, late), now=time.time())

    async def fetch(self, request: Request, seconds: float) -> Reply:
        """Send one GET, for example for the list of models, and return the raw reply."""
        started = time.monotonic()
        try:
            headers = self._headers_of(request, started)
            timeout = timedelta(seconds=seconds)
            response = await self._client.get(self.endpoint + request.url, headers=headers, timeout=timeout)
        except Exception as error:
            failure = _name_failure(error, Failure.TIMEOUT)
            if failure is Failure.TIMEOUT:
                return _make_failure(failure, f"the server did not answer within {seconds:g} s", started)
            return self._make_failure(failure, started, self._explain(error))
        return await self._read(response, started, Failure.TIMEOUT)

    async def close(self) -> None:
        """Close all connections; callers that still await an answer get CancelledError."""
        await self._client.__aexit__(None, None, None)

    def _headers_of(self, request: Request, now: float) -> dict[str, str]:
        headers = {**request.headers, **self._headers} if request.headers else self._headers.copy()
        headers["x-request-id"] = request.id
        for header, value in self._referred.items():
            headers[header] = value.text(now) or ""
        if request.traceparent is not None:
            headers["traceparent"] = request.traceparent
        if (key := self._key.text(now)) is not None:
            headers["authorization"] = f"Bearer {key}"
        return headers

    async def _read(self, response: wreq.Response, started: float, late: Failure) -> Reply:
        status, most = response.status.as_int(), self._limits.response_bytes_max
        length = response.content_length
        body: bytes | None
        try:
            if length is not None and length <= most:  # the body cannot be longer, and reading it at once is cheaper
                body = bytes(await response.bytes())
            else:
                body = await _stream(response, most)
        except Exception as error:
            failure = late if "TimedOut" in str(error) else Failure.LOST
            return self._make_failure(failure, started, f"; it had sent the status {status}", status)
        if body is None:
            return self._make_failure(Failure.TOO_LARGE, started, status=status)
        headers = response.headers
        return Reply(
            status=status,
            body=body,
            retry_after=_text(headers.get("retry-after")),
            request_id=_text(headers.get("x-request-id")),
            location=_text(headers.get("location")) if 300 <= status < 400 else None,
            rates=None if headers.get(_RATES_SIGN) is None else _read_rates(headers),
            seconds=time.monotonic() - started,
        )

    def _make_failure(self, failure: Failure, started: float, reason: str = "", status: int | None = None) -> Reply:
        return _make_failure(failure, self._says[failure] + reason, started, status)

    def _explain(self, error: Exception) -> str:
        """A short text of our own, because the client's text contains addresses and more."""
        text = str(error)
        if "kind: Connect," not in text:
            return f": {_NOT_HTTP}" if "Error(Parse(" in text else ""
        if "connect timeout" in text or "TimedOut" in text:
            return f": {_describe_connect_timeout(self.settings, self._limits)}"
        return next((f": {words}" for sign, words in _REASONS.items() if sign in text), "")


class Gateways:
    """The gateway of each model: one for all of them, or one each. Equal settings share one client.

    Models that go to an outside provider have none.
    """

    def __init__(
        self,
        gateway: GatewaySettings,
        model_gateways: Mapping[str, GatewaySettings],
        limits: InferenceSettings | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        secrets: Path = SECRETS,
    ) -> None:
        refuse_both(gateway, model_gateways)
        if not gateway.is_set and not model_gateways:
            raise ConfigurationError(NO_GATEWAY)
        servers = {model: one for model, one in model_gateways.items() if one.provider is None}
        wanted = {gateway, *servers.values()} - {GatewaySettings()}
        thread = network_thread()
        self._made = {
            one: Gateway(one, limits, environment=environment, runtime=thread, secrets=secrets) for one in wanted
        }
        self._of_all = self._made.get(gateway)
        self._of_model = {model: self._made[settings] for model, settings in servers.items()}

    def __repr__(self) -> str:
        return f"Gateways({self._of_all or self._of_model!r})"

    @property
    def models(self) -> frozenset[str] | None:
        """The models that have a gateway; None means every model."""
        return None if self._of_all is not None else frozenset(self._of_model)

    def all(self) -> list[Gateway]:
        return list(self._made.values())

    def of(self, model: str) -> Gateway | None:
        """The gateway for a model's requests; None becomes a model_not_found line."""
        return self._of_all or self._of_model.get(model)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for gateway in self._made.values():
            await gateway.close()


def _describe_failures(settings: GatewaySettings, limits: InferenceSettings) -> dict[Failure, str]:
    return {
        Failure.CONNECT: "the server could not be reached",
        Failure.DEADLINE: "the deadline came while the request was in flight",
        Failure.EXPIRED: "the deadline came before the request was sent",
        Failure.LOST: "the connection was lost",
        Failure.TIMEOUT: f"the server did not answer within {settings.request_timeout:g} s, the request_timeout",
        Failure.TOO_LARGE: f"the answer is longer than {limits.response_bytes_max} bytes",
        Failure.UNSENDABLE: "the request cannot be sent: its url or a header is invalid",
    }


def _describe_connect_timeout(settings: GatewaySettings, limits: InferenceSettings) -> str:
    """The client gets at most half of the request's time, see `_options`."""
    if limits.connect_timeout <= settings.request_timeout / 2:
        return f"no connection within {limits.connect_timeout:g} s, the inference.connect_timeout"
    return f"no connection within {settings.request_timeout / 2:g} s, half of the request_timeout"


def reference(header: str, value: str, environment: Mapping[str, str]) -> Key | None:
    """Where a fixed header's value is read from; None if the text is the value itself."""
    what = f"the header {header}"
    if value.startswith(ENVIRONMENT):
        return Key(what, None, value.removeprefix(ENVIRONMENT), environment, is_word=False)
    if value.startswith(FILE):
        return Key(what, Path(value.removeprefix(FILE)), None, environment, is_word=False)
    return None


def network_thread() -> wreq.Runtime:
    """One thread does the network I/O: more threads compete for the interpreter lock and use a fifth more CPU."""
    return wreq.Runtime(workers=1, thread_name="batchwright-http")


async def _stream(response: wreq.Response, bytes_max: int) -> bytes | None:
    """The complete body, or None if it is too long. Leaving the stream early closes the connection."""
    chunks: list[memoryview] = []
    total = 0
    async with response.stream() as stream:
        async for chunk in stream:
            if isinstance(chunk, memoryview):
                chunks.append(chunk)
                total += len(chunk)
                if total > bytes_max:
                    return None
    return b"".join(chunks)


def _make_failure(failure: Failure, detail: str, started: float, status: int | None = None) -> Reply:
    return Reply(status=status, failure=failure, detail=detail, seconds=time.monotonic() - started)


def _name_failure(error: Exception, late: Failure) -> Failure:
    """Why there is no status. The client marks every failure before the connection as `Connect`.

    Its connect timeout is shorter than the request's, so other timeouts mean that we were connected.
    """
    if isinstance(error, (exceptions.ConnectionError, exceptions.TlsError)) and "kind: Connect," in str(error):
        return Failure.CONNECT
    if isinstance(error, exceptions.TimeoutError):
        return late
    if isinstance(error, (exceptions.BuilderError, RuntimeError)):
        return Failure.UNSENDABLE
    return Failure.LOST


_REASONS = {
    "dns error": "its name is unknown",
    "ConnectionRefused": "connection refused",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted",
    "WRONG_VERSION_NUMBER": "it does not speak TLS; if it is a plain http server, write http:// instead of https://",
    "code: SSL": "the TLS handshake failed",
}
_NOT_HTTP = "it does not speak plain HTTP; if it is an https server, write https://, else another port"


def _read_rates(headers: HeaderMap) -> RateHeaders:
    return RateHeaders(
        **{
            f"{what}_{part}": _text(headers.get(f"x-ratelimit-{part}-{what}"))
            for what in ("requests", "tokens")
            for part in ("limit", "remaining", "reset")
        }
    )


def _text(value: memoryview | None) -> str | None:
    return None if value is None else str(value, "latin-1")


def _options(settings: GatewaySettings, limits: InferenceSettings) -> dict[str, Any]:
    """No proxies from the environment, no redirects, no cookies, no decompression: requests are sent as they are built.

    Idle connections are dropped before a server drops them (uvicorn: 5 s), which would cost an attempt.
    """
    return {
        "connect_timeout": timedelta(seconds=min(limits.connect_timeout, settings.request_timeout / 2)),
        "cookie_store": False,
        "dns_options": dns.DnsOptions(system_dns=True),
        "http1_only": True,
        "no_proxy": True,
        "pool_idle_timeout": timedelta(seconds=_IDLE_SECONDS),
        "pool_max_idle_per_host": limits.concurrency,
        "redirect": redirect.Policy.none(),
        "referer": False,
        "user_agent": "batchwright",
        **dict.fromkeys(("gzip", "brotli", "deflate", "zstd"), False),
        **_tls(settings),
    }


def _tls(settings: GatewaySettings) -> dict[str, Any]:
    """The TLS options of the client. Unusable files are refused here, at start."""
    options: dict[str, Any] = {}
    if settings.tls_insecure_skip_verify:
        options |= {"tls_verify": False, "tls_verify_hostname": False}
    elif settings.tls_ca_cert_file is not None:
        options["tls_verify"] = tls.CertStore.from_pem_stack(_trusted(settings.tls_ca_cert_file))
    if settings.tls_client_cert_file is not None and settings.tls_client_key_file is not None:
        options["tls_identity"] = _identity(settings.tls_client_cert_file, settings.tls_client_key_file)
    return options


def _trusted(file: Path) -> bytes:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(file)
        return file.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"tls_ca_cert_file {file} holds no readable PEM certificates: {error}") from error


def _identity(certificate: Path, key: Path) -> tls.Identity:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"tls_client_cert_file {certificate} and tls_client_key_file {key} are no readable PEM pair: {error}"
        ) from error
    try:
        return tls.Identity.from_pkcs8_pem(certificate.read_bytes(), key.read_bytes())
    except exceptions.BuilderError as error:
        raise ConfigurationError(
            f"tls_client_key_file {key} is not PKCS#8; convert it with `openssl pkcs8 -topk8 -nocrypt`"
        ) from error
