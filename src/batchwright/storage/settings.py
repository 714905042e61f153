"""Settings: where files are stored, with timeouts and retries."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.errors import ConfigurationError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """Where files are stored. Keys, region and endpoint of a store come from its provider's own variables."""

    url: str | None = None
    """`s3://bucket/path`, `gs://bucket/path`, `az://account/container/path` or `file:///folder`; unset, a folder
    `files` beside the embedded database."""
    retry_seconds_max: float = 60.0
    """How long one operation is retried while the store is unavailable or answers with internal errors."""
    attempts: int | None = None
    """Maximum number of attempts; unset, as many as fit into that time."""
    timeout_seconds: float = 60.0
    """Time limit of one request to a remote store."""
    connect_timeout_seconds: float = 5.0
    """Time limit of connecting to a remote store."""
    part_bytes: int = 8 * MIB
    """Larger objects are transferred to and from a remote store in parts of this size."""

    def __post_init__(self) -> None:
        at_least = {"attempts": 1, "retry_seconds_max": 0, "part_bytes": 5 * MIB}
        for name, least in at_least.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ConfigurationError(f"storage.{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("timeout_seconds", "connect_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"storage.{name} is {getattr(self, name)}; it must be more than 0")
