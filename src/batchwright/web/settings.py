"""How the dashboard is set up."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """The dashboard at /ui."""

    refresh_seconds: float = 1.0
    """Time between two updates of an open page; all its viewers share one query."""
    session_hours: float = 12.0
    """Time until people sign in again; a session also ends with its key."""
    sign_ins_per_minute: int = 10
    """Maximum number of sign-ins from one address in a minute."""

    def __post_init__(self) -> None:
        if not 0.2 <= self.refresh_seconds <= 60:
            raise ConfigurationError(f"web.refresh_seconds is {self.refresh_seconds:g}; use 0.2 to 60")
        if not 0 < self.session_hours <= 24 * 30:
            raise ConfigurationError(f"web.session_hours is {self.session_hours:g}; use more than 0, up to 720")
        if self.sign_ins_per_minute < 1:
            raise ConfigurationError(f"web.sign_ins_per_minute is {self.sign_ins_per_minute}; use 1 or more")
