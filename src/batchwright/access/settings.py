"""Settings of the HTTP server; a separate module, so that reading settings loads no web framework."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from batchwright.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address needs a key."""
    port: int = 8765
    """Port to listen on; 0 picks a free one."""
    socket: Path | None = None
    """A unix socket to listen on instead of host and port. Only the user that runs the server can connect to it."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients may use for the server, besides its addresses; *.example.com and * are patterns."""
    allowed_origins: tuple[str, ...] = ()
    """Other origins whose pages may call the server from a browser, such as https://desk.example.com."""
    body_bytes_max: int = 4 * 1024 * 1024
    """Maximum size of a request body; a larger one is refused. One payload of 1 MiB fits, however it is escaped."""
    jobs_bytes_max: int = 32 * 1024 * 1024
    """Maximum body size of POST /v1/jobs, which may hold 1,000 jobs."""
    connections_max: int = 4_096
    """Maximum number of connections per process; fewer if its limit of open files is lower."""
    head_bytes_max: int = 64 * 1024
    """Maximum size of a request's headers, including its path; a larger request is refused."""
    head_seconds: float = 10.0
    """Time limit for the headers of a request; then the connection is closed."""
    idle_seconds: int = 75
    """Time after which an idle connection is closed; proxies keep theirs open for a minute."""
    bytes_per_second_min: int = 1_024
    """Minimum transfer rate: a slower body is refused after ten seconds, and a slower answer is cut after thirty."""
    streams_max: int = 2_000
    """Maximum number of event streams that one process serves at the same time."""
    streams_per_key_max: int = 500
    """Maximum number of these streams for one key."""
    streams_per_tenant_max: int = 1_000
    """Maximum number of these streams for one tenant; other tenants can still open theirs."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"api.port is {self.port}; use 0 to 65535")
        if self.socket is not None and self.socket.name in ("", "..", "."):
            raise ConfigurationError(f"api.socket is {str(self.socket)!r}; write it like /run/batchwright/api.sock")
        for name in ("connections_max", "head_bytes_max", "head_seconds", "idle_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"api.{name} is {getattr(self, name)}; it must be greater than 0")
        for origin in self.allowed_origins:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.rstrip("/") != origin):
                raise ConfigurationError(f"api.allowed_origins has {origin!r}; write it like https://desk.example.com")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect; other machines need a key."""
        return self.socket is not None or is_loopback(self.host)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
