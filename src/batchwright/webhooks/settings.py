"""Settings of webhooks; a separate module, so that reading settings loads no HTTP client."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import pydantic

from batchwright.errors import ConfigurationError
from batchwright.inference.settings import SECRETS, shown_url
from batchwright.settings import refuse_unknown_inside

EventType = Literal[
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "task.completed",
    "task.partial_complete",
    "task.failed",
    "task.cancelled",
]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
SECRET_PREFIX = "whsec_"  # noqa: S105 - the public prefix by which a secret is known, not a secret
TIMEOUT_SECONDS_MAX = 60.0
_NAME_CHARACTERS_MAX = 30
_WAYS = ("secret_name", "secret_file", "secret_env")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """One endpoint that receives an event when a batch or a task of its tenant ends."""

    url: str = ""
    """URL to which events are posted: https://example.com/hooks."""
    secret_name: str | None = None
    """Name of the file under /etc/.secrets/ with the signing secret: whsec_ and base64."""
    secret_file: Path | None = None
    """File with the signing secret."""
    secret_env: str | None = None
    """Environment variable with the signing secret."""
    events: tuple[EventType, ...] = EVENT_TYPES
    """Events that the endpoint receives."""
    timeout_seconds: float = 10.0
    """Time limit of one delivery, from connecting to the answer; at most 60."""

    def __post_init__(self) -> None:
        if not self.url:
            raise ConfigurationError('a webhook has no url; write url = "https://example.com/hooks"')
        _check_url(self.url)
        self._check_secret()
        if not self.events:
            raise ConfigurationError(f"the webhook {self.name} has no events; leave `events` out to get all of them")
        if not 0 < self.timeout_seconds <= TIMEOUT_SECONDS_MAX:
            raise ConfigurationError(
                f"timeout_seconds of the webhook {self.name} is {self.timeout_seconds}; use more than 0 and at most "
                f"{TIMEOUT_SECONDS_MAX:.0f}"
            )

    @property
    def name(self) -> str:
        """Identifies the endpoint for a delivery, whatever else in the configuration has changed.

        Built from the url's host and a hash, without the path, which is a password for some receivers.
        """
        return f"{urlsplit(self.url).netloc}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"

    @property
    def origin(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def path(self) -> str:
        """The request path, as the origin sees it."""
        parts = urlsplit(self.url)
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _check_secret(self) -> None:
        given = {name: str(value) for name in _WAYS if (value := getattr(self, name)) is not None}
        if any(value.startswith(SECRET_PREFIX) and len(value) > _NAME_CHARACTERS_MAX for value in given.values()):
            raise ConfigurationError(
                f"the webhook {self.name} has the secret itself in its settings, where others can read it; put it into "
                "a file, and set secret_file to its name"
            )
        if len(given) != 1:
            found = " and ".join(given) or "no secret"
            raise ConfigurationError(f"the webhook {self.name} has {found}; write one of {', '.join(_WAYS)}")
        name = self.secret_name
        if name is not None and (not name or Path(name).name != name):
            raise ConfigurationError(f"secret_name is {name!r}; it names a file directly under {SECRETS}")


def _refuse_unknown(webhooks: Any) -> Any:
    """The keys are tenants, and each has a list of endpoints."""
    for tenant, endpoints in webhooks.items() if isinstance(webhooks, Mapping) else (("default", None),):
        if not isinstance(endpoints, list | tuple):
            raise ConfigurationError(f"webhooks has a list of endpoints for each tenant; write [[webhooks.{tenant}]]")
        for endpoint in endpoints:
            refuse_unknown_inside(f"webhooks.{tenant}", endpoint, WebhookSettings)
    return webhooks


def refuse_doubles(webhooks: Mapping[str, Sequence[WebhookSettings]]) -> Mapping[str, Sequence[WebhookSettings]]:
    """Refuse a url that a tenant has twice, because an endpoint is identified by its url."""
    for tenant, endpoints in webhooks.items():
        names = [endpoint.name for endpoint in endpoints]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"webhooks.{tenant} has the url of {double} twice; join their `events` in one")
    return webhooks


Webhooks = Annotated[
    dict[str, tuple[WebhookSettings, ...]],
    pydantic.BeforeValidator(_refuse_unknown),
    pydantic.AfterValidator(refuse_doubles),
    "Endpoints that receive an event when a batch or a task ends: a list for each tenant.",
]
"""The table `webhooks`."""


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    else:
        if "@" in parts.netloc:
            raise ConfigurationError(
                "a webhook's url contains a user or password; remove it, because the signature identifies the sender"
            )
    if not known or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigurationError(f"a webhook's url is {shown_url(url)}; write it like https://example.com/hooks")
