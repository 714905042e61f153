"""Where model servers are and how many requests they get; kept apart, so that reading settings loads no HTTP client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from batchwright.errors import ConfigurationError
from batchwright.inference.headers import Headers, check_headers

SECRETS = Path("/etc/.secrets")
NO_GATEWAY = (
    "no model server is configured. For one that serves every model write into batchwright.toml\n"
    '    [global_inference_gateway]\n    url = "http://gateway:8000"\n'
    "or name one for each model:\n"
    '    [model_gateways."llama-3"]\n    url = "http://gateway-a:8000"'
)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_NO_HOST = re.compile(r'[\s"%<>\\^`{|}]')
"""No host's name holds one of these, but a placeholder does that nobody has filled in."""
_SERVER = re.compile(r"(https?://[^/?#]*)[/?#].")


def seconds(value: Any) -> Any:
    """Read a duration as llm-d's batch gateway writes it, such as "5m" or "1m30s"; a bare number is seconds."""
    if isinstance(value, str) and _DURATION.sub("", value) == "" and value:
        return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(value))
    return value


Seconds = Annotated[float, BeforeValidator(seconds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """A server that speaks OpenAI's API; in global mode it serves every model."""

    url: str = ""
    """Where the server is, without /v1: http://gateway:8000."""
    api_key_name: str | None = None
    """The key is the file of this name under /etc/.secrets/."""
    api_key_file: Path | None = None
    """The key is in this file."""
    api_key_env: str | None = None
    """The key is in this environment variable."""
    request_timeout: Seconds = 300.0
    """The longest a request may take, from connecting to the last byte; a number of seconds, or "5m"."""
    max_retries: int = 3
    """How often a request that failed in the server is sent again; a busy or absent server is waited for instead."""
    initial_backoff: Seconds = 1.0
    """The pause before the first repetition; each further one doubles it."""
    max_backoff: Seconds = 60.0
    """The longest pause before a repetition."""
    concurrency_total: int | None = None
    """Requests in flight to this gateway from all worker processes together, which share it evenly."""
    requests_per_minute: float | None = None
    """Requests that all worker processes together send to this gateway in a minute."""
    tokens_per_minute: float | None = None
    """Tokens, of prompts and answers, that they spend there in a minute."""
    headers: Headers = field(default=(), repr=False)
    """Headers of every request to this gateway, as a table; a value, or where it is: `env:NAME` or `file:/path`."""
    passthrough_headers: tuple[str, ...] = ()
    """Names of headers that are taken from the request that creates a batch and sent with each of its requests."""
    inference_objective: str | None = None
    """Sent as x-gateway-inference-objective, by which an inference gateway may rank requests."""
    tls_insecure_skip_verify: bool = False
    """Accept any certificate; for experiments only."""
    tls_ca_cert_file: Path | None = None
    """PEM certificates to trust instead of the public ones."""
    tls_client_cert_file: Path | None = None
    """The PEM certificate by which we show who we are; needs tls_client_key_file."""
    tls_client_key_file: Path | None = None
    """The private key of that certificate, as PKCS#8 PEM."""
    provider: str | None = None
    """Instead of to a server, batches of this model go through the batch API of this outside provider: `openai`,
    `anthropic`, `gemini`, or any other that does completions; only for the gateway of one model."""
    provider_model: str | None = None
    """What the provider, or the overflow provider, calls the model, if it is not its name here."""
    provider_tokens_max: int | None = None
    """Tokens of prompts, by a rule of thumb, in one job at the provider; for accounts that may have fewer of them
    waiting there than a job may hold."""
    overflow_provider: str | None = None
    """A provider that takes over what no worker has begun of a batch that would be late on this server."""
    overflow_cost_max: float | None = None
    """What that may cost for one batch, in the money of the provider's prices; by an estimate, which counts the most
    tokens that the requests allow."""

    def __post_init__(self) -> None:
        lowered = tuple(sorted({name.lower() for name in self.passthrough_headers}))
        object.__setattr__(self, "passthrough_headers", lowered)
        if self.provider is not None:
            self._check_provider(self.provider)
        elif self.is_set:
            _check_url(self.url)
            self._check()
        elif any(getattr(self, one.name) != one.default for one in fields(self)):
            raise ConfigurationError('a gateway has settings but no url; write url = "http://host:8000"')

    @property
    def is_set(self) -> bool:
        return self.url != "" or self.provider is not None

    @property
    def endpoint(self) -> str:
        """The url that a line's own url is appended to."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    def _check_provider(self, provider: str) -> None:
        known = ("provider", "provider_model", "provider_tokens_max")
        others = [one.name for one in fields(self) if one.name not in known and getattr(self, one.name) != one.default]
        if others:
            raise ConfigurationError(
                f"a gateway has the provider {provider!r} and {' and '.join(others)}, which are for servers of your "
                f"own; keep the provider, or those. Its key and its address stand in [providers.{provider}]"
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
                f"overflow_cost_max is {self.overflow_cost_max}; it is the most that a batch may cost, above 0"
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
            raise ConfigurationError(f"max_retries is {self.max_retries}; write 0 to never send a request again")
        for name in ("concurrency_total", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < inf:
                raise ConfigurationError(f"{name} is {value}; it must be at least 1, and for no limit leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """How many requests one worker process has in flight."""

    concurrency: int = 100
    """Requests in flight over all models."""
    model_concurrency_start: int = 10
    """Requests in flight to one model at first; how many it bears is found out by trying."""
    model_concurrency_min: int = 1
    """A model that refuses everything still gets this many at a time."""
    model_concurrency_max: int | None = None
    """The most in flight to one model; unset means as many as over all models."""
    bytes_in_flight_max: int = 256 * 1024 * 1024
    """Requests in flight and the answers they may bring, in bytes."""
    response_bytes_max: int = 16 * 1024 * 1024
    """A longer answer is cut off and becomes the error response_too_large."""
    connect_timeout: Seconds = 10.0
    """The longest that name lookup, connecting and the TLS handshake may take together."""

    def __post_init__(self) -> None:
        least, most = self.model_concurrency_min, self.most_per_model
        if not 1 <= least <= self.model_concurrency_start <= most <= self.concurrency:
            raise ConfigurationError(
                f"1 <= model_concurrency_min ({least}) <= model_concurrency_start ({self.model_concurrency_start}) <= "
                f"model_concurrency_max ({most}) <= concurrency ({self.concurrency}) does not hold"
            )
        if self.bytes_in_flight_max < self.response_bytes_max or self.response_bytes_max < 1024:
            raise ConfigurationError(
                f"response_bytes_max is {self.response_bytes_max}; it goes from 1024 to bytes_in_flight_max "
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
    """As much of a useless url as may be repeated: keys stand in paths and queries, passwords before an `@`."""
    if "@" in url:
        return "not shown, for a password may stand in it"
    server = _SERVER.match(url)
    return repr(url) if server is None else repr(f"{server[1]}/…")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_host = bool(parts.hostname) and not _NO_HOST.search(parts.netloc)
        known = parts.scheme in ("http", "https") and is_host and (parts.port or 1) > 0
    except ValueError:
        known = False
    else:
        if "@" in parts.netloc:
            raise ConfigurationError("a gateway's url holds a user or password; name the key by api_key_file instead")
    if not known or parts.query or parts.fragment:
        raise ConfigurationError(
            f"a gateway's url is {shown_url(url)}; write it like http://gateway:8000, without a query"
        )
