"""What most providers need to be told: where the service is, and where its key is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from batchwright.errors import ConfigurationError
from batchwright.inference.settings import shown_url


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
