"""Addresses and limits of model servers, in a module of their own so that reading settings loads no HTTP client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from batchwright.durations import parse_duration
from batchwright.errors import ConfigurationError
from batchwright.inference.headers import Headers, check_headers

SECRETS = Path("/etc/.secrets")
NO_GATEWAY = (
    "no model server is configured. For one that serves every model write into batchwright.toml\n"
    '    [global_inference_gateway]\n    url = "http://gateway:8000"\n'
    "or name one for each model:\n"
    '    [model_gateways."llama-3"]\n    url = "http://gateway-a:8000"'
)
TO_ANY_SERVER = ("request_timeout", "max_retries", "initial_backoff", "max_backoff")
"""Settings of a gateway that may also apply to another server: no key, and nothing about trust."""
_HOW_TO_WRITE = "write it like http://gateway:8000, without a query"
_NO_HOST = re.compile(r'[\s"%<>\\^`{|}]')
_ONLY_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?")
"""Characters that no host name contains, but a placeholder that was not filled in does."""
_SERVER = re.compile(r"(https?://[^/?#]*)[/?#].")


def seconds(value: Any) -> Any:
    """Read a duration such as "5m" or "1m30s"; a bare number is seconds."""
    found = parse_duration(value) if isinstance(value, str) else None
    return value if found is None else found


Seconds = Annotated[float, BeforeValidator(seconds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """A server that speaks OpenAI's API; in global mode it serves every model."""

    url: str = ""
    """URL of the server, without /v1: http://gateway:8000."""
    api_key_name: str | None = None
    """Name of the file under /etc/.secrets/ with the key."""
    api_key_file: Path | None = None
    """File with the key."""
    api_key_env: str | None = None
    """Environment variable with the key."""
    request_timeout: Seconds = 300.0
    """Time limit of a request, from connecting to the last byte; a number of seconds, or "5m"."""
    max_retries: int = 3
    """How often a request that failed in the server is resent. A busy or unreachable server does not count: the request
    waits."""
    initial_backoff: Seconds = 1.0
    """Pause before the first retry; each further retry doubles it."""
    max_backoff: Seconds = 60.0
    """Maximum pause before a retry."""
    concurrency_total: int | None = None
    """Maximum number of requests in flight to this gateway from all worker processes, which share it evenly."""
    requests_per_minute: float | None = None
    """Maximum number of requests per minute that all worker processes together send to this gateway."""
    tokens_per_minute: float | None = None
    """Maximum number of tokens per minute, of prompts and answers together."""
    headers: Headers = field(default=(), repr=False)
    """Headers of every request to this gateway, as a table; a value, or its place: `env:NAME` or `file:/path`."""
    passthrough_headers: tuple[str, ...] = ()
    """Names of headers to copy from the request that creates a batch to each request of the batch."""
    inference_objective: str | None = None
    """Sent as x-gateway-inference-objective, which an inference gateway may use to rank requests."""
    tls_insecure_skip_verify: bool = False
    """Accept any certificate; for experiments only."""
    tls_ca_cert_file: Path | None = None
    """PEM certificates to trust instead of the public ones."""
    tls_client_cert_file: Path | None = None
    """PEM certificate of the client; needs tls_client_key_file."""
    tls_client_key_file: Path | None = None
    """Private key of that certificate, as PKCS#8 PEM."""
    provider: str | None = None
    """Outside provider whose batch API runs batches of this model instead of a server: `openai`, `anthropic`, `gemini`,
    or any other that supports completions; only for the gateway of one model."""
    provider_model: str | None = None
    """Name of the model at the provider or the overflow provider, if it differs."""
    provider_tokens_max: int | None = None
    """Maximum number of prompt tokens, estimated, in one job at the provider; for accounts whose limit of waiting
    tokens is below that of a job."""
    overflow_provider: str | None = None
    """Provider that takes over shards that no worker has started, if the batch would be too late on this server."""
    overflow_cost_max: float | None = None
    """Maximum cost of this overflow for one batch, in the currency of the provider's prices; estimated with the maximum
    number of tokens that the requests allow."""

    def __post_init__(self) -> None:
        lowered = tuple(sorted({name.lower() for name in self.passthrough_headers}))
        object.__setattr__(self, "passthrough_headers", lowered)
        if self.provider is not None:
            self._check_provider(self.provider)
        elif self.is_set:
            check_url(self.url)
            self._check()
        elif any(getattr(self, one.name) != one.default for one in fields(self)):
            raise ConfigurationError('a gateway has settings but no url; write url = "http://host:8000"')

    @property
    def is_set(self) -> bool:
        return self.url != "" or self.provider is not None

    @property
    def endpoint(self) -> str:
        """The base url; each line's own url is appended to it."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    def _check_provider(self, provider: str) -> None:
        known = ("provider", "provider_model", "provider_tokens_max")
        others = [one.name for one in fields(self) if one.name not in known and getattr(self, one.name) != one.default]
        if others:
            raise ConfigurationError(
                f"a gateway has the provider {provider!r} and {' and '.join(others)}, which are for servers of your "
                f"own; keep the provider, or those. Set its key and its address in [providers.{provider}]"
            )
        if self.provider_tokens_max is not None and self.provider_tokens_max < 1:
            raise ConfigurationError(
                f"provider_tokens_max is {self.provider_tokens_max}; it must be at least 1; for no limit leave it out"
            )

    def _check(self) -> None:
        for name in ("provider_model", "provider_tokens_max"):
            if getattr(self, name) is not None and self.overflow_provider is None:
                raise ConfigurationError(
                    f'the gateway {self.url} has {name} but no provider; write provider = "openai"'
                )
        if (self.overflow_provider is None) != (self.overflow_cost_max is None):
            raise ConfigurationError("overflow_provider and overflow_cost_max belong together; write both")
        if self.overflow_cost_max is not None and not 0 < self.overflow_cost_max < inf:
            raise ConfigurationError(
                f"overflow_cost_max is {self.overflow_cost_max}; write the maximum cost of a batch, above 0"
            )
        named = [name for name in ("api_key_name", "api_key_file", "api_key_env") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ConfigurationError(f"the gateway {self.url} has {' and '.join(named)}; keep one of them")
        check_headers(
            self.headers,
            self.passthrough_headers,
            has_key=bool(named),
            has_objective=bool(self.inference_objective),
        )
        if self.api_key_name is not None and (
            not self.api_key_name or Path(self.api_key_name).name != self.api_key_name
        ):
            raise ConfigurationError(f"api_key_name is {self.api_key_name!r}; it names a file directly under {SECRETS}")
        if (self.tls_client_cert_file is None) != (self.tls_client_key_file is None):
            raise ConfigurationError("tls_client_cert_file and tls_client_key_file belong together; write both")
        if not 0 < self.request_timeout < inf or not 0 < self.initial_backoff <= self.max_backoff < inf:
            raise ConfigurationError(
                f"request_timeout {self.request_timeout}, initial_backoff {self.initial_backoff} and max_backoff "
                f"{self.max_backoff} must be above 0 and finite, and max_backoff not below initial_backoff"
            )
        if self.max_retries < 0:
            raise ConfigurationError(f"max_retries is {self.max_retries}; write 0 for no retries")
        for name in ("concurrency_total", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < inf:
                raise ConfigurationError(f"{name} is {value}; it must be at least 1, and for no limit leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """How many requests one worker process has in flight."""

    concurrency: int = 100
    """Maximum number of requests in flight for all models together."""
    model_concurrency_start: int = 10
    """Requests in flight to one model at the start; after that the number is tuned automatically."""
    model_concurrency_min: int = 1
    """Minimum number of requests in flight to one model, even if it refuses everything."""
    model_concurrency_max: int | None = None
    """Maximum number of requests in flight to one model; by default as many as for all models together."""
    bytes_in_flight_max: int = 256 * 1024 * 1024
    """Maximum size of the requests in flight and their expected answers, in bytes."""
    response_bytes_max: int = 16 * 1024 * 1024
    """Maximum size of an answer; a larger one becomes the error response_too_large."""
    connect_timeout: Seconds = 10.0
    """Time limit of name lookup, connecting and the TLS handshake together."""

    def __post_init__(self) -> None:
        least, most = self.model_concurrency_min, self.most_per_model
        if not 1 <= least <= self.model_concurrency_start <= most <= self.concurrency:
            raise ConfigurationError(
                f"1 <= model_concurrency_min ({least}) <= model_concurrency_start ({self.model_concurrency_start}) <= "
                f"model_concurrency_max ({most}) <= concurrency ({self.concurrency}) does not hold"
            )
        if self.bytes_in_flight_max < self.response_bytes_max or self.response_bytes_max < 1024:
            raise ConfigurationError(
                f"response_bytes_max is {self.response_bytes_max}; it must be from 1024 to bytes_in_flight_max "
                f"({self.bytes_in_flight_max})"
            )
        if not 0 < self.connect_timeout < inf:
            raise ConfigurationError(f"connect_timeout is {self.connect_timeout}; it must be above 0 and finite")

    @property
    def most_per_model(self) -> int:
        return self.concurrency if self.model_concurrency_max is None else self.model_concurrency_max


def refuse_both(gateway: GatewaySettings, model_gateways: Mapping[str, GatewaySettings]) -> None:
    """All models go to one gateway, or each to its own: never both."""
    if (provider := gateway.provider or gateway.overflow_provider) is not None:
        raise ConfigurationError(
            f"global_inference_gateway has the provider {provider!r}; a provider is named for each model: "
            f'[model_gateways."gpt-5-mini"] with provider = "{provider}"'
        )
    if gateway.is_set and model_gateways:
        raise ConfigurationError(
            "both global_inference_gateway and model_gateways are set; keep the first to send every model to one "
            "server, or the second to name a server for each model"
        )
    for model, settings in model_gateways.items():
        if not settings.is_set:
            raise ConfigurationError(
                f'model_gateways."{model}" has no url and no provider; entries inherit nothing from each other'
            )


def shown_url(url: str) -> str:
    """The part of an invalid url that is safe to show: paths and queries may hold keys, and user info a password."""
    if "@" in url:
        return "not shown, because it may contain a password"
    server = _SERVER.match(url)
    return repr(url) if server is None else repr(f"{server[1]}/…")


def check_url(url: str, what: str = "a gateway's url") -> None:
    """`what` is the name by which its author knows it."""
    try:
        parts = urlsplit(url)
        is_host = bool(parts.hostname) and not _NO_HOST.search(parts.netloc)
        known = parts.scheme in ("http", "https") and is_host and (parts.port or 1) > 0
    except ValueError:
        known = False
    else:
        if "@" in parts.netloc:
            raise ConfigurationError(f"{what} holds a user or password; name the key by api_key_file instead")
    if not known or parts.query or parts.fragment:
        remedy = f"write http://{url}" if _ONLY_HOST.fullmatch(url) else _HOW_TO_WRITE
        raise ConfigurationError(f"{what} is {shown_url(url)}; {remedy}")
