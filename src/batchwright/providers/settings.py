"""How tasks are run, and what most providers need to be told: where the service is, and where its key is."""

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
    """Where the service is; the key is sent there and nowhere else."""
    api_key_env: str | None = None
    """The key is in this environment variable."""
    api_key_file: Path | None = None
    """The key is in this file, whatever the environment holds."""

    def __post_init__(self) -> None:
        check_url(self.base_url)


def check_url(url: str) -> None:
    """Refuse what is no address of a service."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    else:
        if "@" in parts.netloc:
            raise ConfigurationError("a provider's base_url holds a user or password; name its key by api_key_file")
    if not is_url or parts.query or parts.fragment:
        raise ConfigurationError(
            f"a provider's base_url is {shown_url(url)}; write it like https://api.example.com/v1, without a query"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """How tasks for outside providers are run."""

    poll_interval_seconds: float = 120.0
    """How often a job at a provider is asked for, unless its provider wants to be asked less often."""
    task_timeout_hours: float = 26.0
    """After so long a task is cancelled at its provider, and ends with what is finished; a provider whose own window is
    longer has that instead, and so has a task that names its own."""
    inputs_max: int = 1_000
    """Inputs of one task."""
    adapters: tuple[str, ...] = ()
    """Modules, files or folders with adapters of your own; installed packages are found by themselves."""
    fetch_private: bool = False
    """Whether inputs may be fetched from addresses of private networks, such as a file server of your own."""
    check_credentials: bool = True
    """Whether the HTTP server refuses a task for a provider whose credential it cannot find itself; switch it off where
    only the workers have credentials."""
    jobs_at_once: int = 16
    """Tasks of one provider that a worker process looks after at the same time; they take no slot of the worker."""

    def __post_init__(self) -> None:
        for name in ("poll_interval_seconds", "task_timeout_hours", "inputs_max", "jobs_at_once"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"tasks.{name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """One provider: what every provider may have, and the settings of its adapter."""

    kind: str | None = None
    """The adapter that speaks to it; unset, the one of the same name."""
    poll_interval_seconds: float | None = None
    """Instead of `tasks.poll_interval_seconds`."""
    task_timeout_hours: float | None = None
    """Instead of `tasks.task_timeout_hours`, and of what the adapter knows."""
    settle_seconds: float | None = None
    """How long a job may be missing from the provider's list after it was made; unset, what the adapter knows."""
    requests_per_minute: float | None = None
    """Calls to it that all worker processes together make in a minute, to submit, ask for and fetch jobs."""
    concurrency: int | None = None
    """Such calls at the same time; not jobs, of which as many are open there as tasks want."""
    prices: Mapping[str, ProviderPrice] = field(default_factory=dict)
    """What a model costs here: a million tokens, or an hour of audio; instead of what is known."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """The settings of its adapter, which checks them."""

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "concurrency"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < inf:
                raise ConfigurationError(
                    f"a provider's {name} is {value}; it must be at least 1, and for no limit leave it out"
                )


_COMMON = frozenset(ProviderSettings.__dataclass_fields__) - {"adapter"}


def _split(providers: Any) -> Any:
    """In each table the settings that all have stand beside those of its adapter."""
    if not isinstance(providers, Mapping):
        raise ConfigurationError("providers has a table for each provider; write [providers.openai]")
    return {name: _split_one(str(name), written) for name, written in providers.items()}


def _split_one(name: str, written: Any) -> Any:
    if isinstance(written, ProviderSettings):
        return written
    if not isinstance(written, Mapping):
        raise ConfigurationError(f"providers.{name} must be a table; write [providers.{name}]")
    if set(written) <= {*_COMMON, "adapter"} and isinstance(written.get("adapter"), Mapping):
        return dict(written)  # as another process of ours wrote it
    common = {key: value for key, value in written.items() if key in _COMMON}
    return {**common, "adapter": {key: value for key, value in written.items() if key not in _COMMON}}


Providers = Annotated[
    dict[str, ProviderSettings],
    pydantic.BeforeValidator(_split),
    "Outside providers by the names that tasks use; those that come with Batchwright need no table where their "
    "credentials are in the usual places.",
]
"""The table `providers`."""
