"""Additional headers for model servers: fixed ones from the configuration, and those of a batch's creator.

A fixed header has a literal value, or a reference to it: `env:NAME` or `file:/path`. A creator's header is passed on
if the operator lists its name. Some headers may never be set, because of what they do:

    both         headers that frame a message or belong to one connection, and those that we set ourselves
    creators     also keys and cookies: the creator's are for us, not for the model server
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from batchwright.errors import ConfigurationError, InvalidInput

VALUE_CHARACTERS_MAX = 1024
ENVIRONMENT = "env:"
FILE = "file:"
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,100}")
_FRAMING = frozenset(
    {
        "accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
        "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "x-request-id", "traceparent", "tracestate",
    }
)  # fmt: skip
_FOR_US = frozenset({"authorization", "cookie", "set-cookie", "idempotency-key"})
OBJECTIVE = "x-gateway-inference-objective"


def header_pairs(given: Any) -> Any:
    """A table of headers as sorted pairs, which can be compared and hashed; names are in lower case."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        found = sorted((str(name).lower(), value) for name, value in pairs)
    except (TypeError, ValueError):
        raise ConfigurationError('headers is a table; write headers = { x-team = "search" }') from None
    if not all(isinstance(value, str) for _, value in found):
        raise ConfigurationError("a value in headers is not a string; put it into quotes")
    return tuple(found)


Headers = Annotated[tuple[tuple[str, str], ...], BeforeValidator(header_pairs)]


def check_headers(fixed: Headers, passed: Iterable[str], *, has_key: bool, has_objective: bool) -> None:
    """Refuse headers that would break requests, or that two settings would set. Errors never repeat values."""
    names = [name for name, _ in fixed]
    for name in names:
        _check_name("headers", name, _FRAMING)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"headers has {twice} twice; keep one of them")
    for name, value in fixed:
        if not is_sendable(value):
            raise ConfigurationError(
                f"headers has a value for {name} that cannot be sent: it needs 1 to {VALUE_CHARACTERS_MAX} printable "
                "ASCII characters"
            )
    if has_key and "authorization" in names:
        raise ConfigurationError("the gateway has a key, which is sent as authorization; remove that from headers")
    for name in passed:
        _check_name("passthrough_headers", name, _FRAMING | _FOR_US)
    ours = {*names, *([OBJECTIVE] if has_objective else [])}
    if has_objective and OBJECTIVE in names:
        raise ConfigurationError(f"headers has {OBJECTIVE}, which inference_objective sets; keep one of them")
    if both := sorted(ours.intersection(passed)):
        raise ConfigurationError(
            f"the gateway sets {both[0]} itself and passes it through; remove it from passthrough_headers or from the "
            "settings that set it"
        )


def headers_of_creator(given: Iterable[tuple[str, str]], names: Iterable[str]) -> dict[str, str]:
    """The headers of a request that are passed through. The values of a repeated header are joined with commas."""
    wanted = frozenset(names)
    found: dict[str, str] = {}
    for name, value in given:
        lowered = name.lower()
        if lowered in wanted:
            found[lowered] = f"{found[lowered]}, {value}" if lowered in found else value
    for name, value in found.items():
        if not is_sendable(value):
            raise InvalidInput(
                f"The header {name} cannot be passed on: it needs 1 to {VALUE_CHARACTERS_MAX} printable ASCII "
                "characters.",
                param=name,
            )
    return found


def is_sendable(value: str) -> bool:
    return 0 < len(value) <= VALUE_CHARACTERS_MAX and value.isascii() and value.isprintable() and value == value.strip()


def _check_name(setting: str, name: str, forbidden: frozenset[str]) -> None:
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(f"{setting} has {name[:100]!r}, which is not a header name; write it like x-team")
    if name in _FOR_US & forbidden:
        raise ConfigurationError(
            f"{setting} has {name}, which is meant for this API and not for the model server; for a key of the model "
            "server use api_key_file or headers"
        )
    if name in forbidden:
        raise ConfigurationError(f"{setting} has {name}, which is set automatically for each request; remove it")
