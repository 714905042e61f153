"""Settings of tasks, and those that most providers share: the service's URL, and where to find its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import pydantic

from batchwright.errors import ConfigurationError
from batchwright.inference.settings import shown_url
from batchwright.providers.prices import ProviderPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """A service with one key."""

    base_url: str = ""
    """URL of the service; the key is sent only there."""
    api_key_env: str | None = None
    """Environment variable with the key."""
    api_key_file: Path | None = None
    """File with the key; overrides the environment variable."""

    def __post_init__(self) -> None:
        check_url(self.base_url)


def check_url(url: str) -> None:
    """Refuse a URL that cannot be the address of a service."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    else:
        if "@" in parts.netloc:
            raise ConfigurationError(
                "a provider's base_url contains a user or password; put the key into a file and set api_key_file"
            )
    if not is_url or parts.query or parts.fragment:
        raise ConfigurationError(
            f"a provider's base_url is {shown_url(url)}; write it like https://api.example.com/v1, without a query"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Tasks at outside providers."""

    poll_interval_seconds: float = 120.0
    """How often workers poll a job at a provider, unless the provider asks for fewer polls."""
    task_timeout_hours: float = 26.0
    """After this time Batchwright cancels a task at its provider and keeps the finished results. A longer window of the
    provider replaces it, and so does the timeout of a task that names its own."""
    inputs_max: int = 1_000
    """Maximum number of inputs of one task."""
    adapters: tuple[str, ...] = ()
    """Modules, files or folders with your own adapters; adapters of installed packages are found automatically."""
    fetch_private: bool = False
    """Whether inputs may be fetched from private networks, for example from your own file server."""
    check_credentials: bool = True
    """Whether the HTTP server refuses a task for a provider whose credential it cannot find itself; turn it off where
    only the workers have credentials."""
    jobs_at_once: int = 16
    """Maximum number of tasks of one provider that a worker process handles at the same time; they use no slot of the
    worker."""

    def __post_init__(self) -> None:
        for name in ("poll_interval_seconds", "task_timeout_hours", "inputs_max", "jobs_at_once"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"tasks.{name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """One provider: the settings that all providers share, and those of its adapter."""

    kind: str | None = None
    """The adapter for this provider; by default the one with the same name."""
    poll_interval_seconds: float | None = None
    """Overrides `tasks.poll_interval_seconds`."""
    task_timeout_hours: float | None = None
    """Overrides `tasks.task_timeout_hours` and the adapter's own timeout."""
    settle_seconds: float | None = None
    """How long a new job may be missing from the provider's list; by default the adapter's own value."""
    requests_per_minute: float | None = None
    """Maximum number of calls per minute to submit, poll and fetch jobs, for all worker processes together."""
    concurrency: int | None = None
    """Maximum number of such calls at the same time. The number of open jobs is not limited."""
    prices: Mapping[str, ProviderPrice] = field(default_factory=dict)
    """Prices of models, per million tokens or hour of audio; they override the built-in prices."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """The adapter's own settings; the adapter checks them."""

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "concurrency"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < inf:
                raise ConfigurationError(
                    f"a provider's {name} is {value}; it must be at least 1; for no limit, leave it out"
                )


_COMMON = frozenset(ProviderSettings.__dataclass_fields__) - {"adapter"}


def _split(providers: Any) -> Any:
    """Each table mixes the shared settings with those of the adapter."""
    if not isinstance(providers, Mapping):
        raise ConfigurationError("providers has a table for each provider; write [providers.openai]")
    return {name: _split_one(str(name), written) for name, written in providers.items()}


def _split_one(name: str, written: Any) -> Any:
    if isinstance(written, ProviderSettings):
        return written
    if not isinstance(written, Mapping):
        raise ConfigurationError(f"providers.{name} must be a table; write [providers.{name}]")
    if set(written) <= {*_COMMON, "adapter"} and isinstance(written.get("adapter"), Mapping):
        return dict(written)  # already split, by another Batchwright process
    common = {key: value for key, value in written.items() if key in _COMMON}
    return {**common, "adapter": {key: value for key, value in written.items() if key not in _COMMON}}


Providers = Annotated[
    dict[str, ProviderSettings],
    pydantic.BeforeValidator(_split),
    "Outside providers by the names that tasks use; those that come with Batchwright need no table if their "
    "credentials are in the usual places.",
]
"""The table `providers`."""
