"""How the HTTP server is set up; kept apart from it, so that reading settings loads no web framework."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from batchwright.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """The address to listen on; any but a loopback one needs a key."""
    port: int = 8765
    """The port to listen on; 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may call the server, beside its addresses; *.example.com and * are patterns."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of other origins that may call the server from a browser, such as https://desk.example.com."""
    body_bytes_max: int = 32 * 1024 * 1024
    """A request with a larger body is refused."""
    streams_max: int = 2_000
    """Event streams that one process serves at the same time."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"api.port is {self.port}; it goes from 0 to 65535")
        for origin in self.allowed_origins:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.rstrip("/") != origin):
                raise ConfigurationError(f"api.allowed_origins has {origin!r}; write it like https://desk.example.com")

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
