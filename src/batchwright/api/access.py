"""Who may come in: addresses, hosts and origins, keys and scopes, tenants."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import socket
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.api.errors import error_answer, file_too_large
from batchwright.api.keys import PREFIX, Keys
from batchwright.api.keys import Scope as KeyScope
from batchwright.api.schemas import NO_NUL
from batchwright.api.settings import ApiSettings
from batchwright.batches.uploads import PART_BYTES_MAX
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.errors import ConfigurationError

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104  compared with, never bound
ALL_TENANTS = "*"
FILES = "/v1/files"
UPLOADS = "/v1/uploads"
_PARTS = re.compile(rf"{UPLOADS}/[^/]+/parts")
FORM_BYTES_MAX = 8 * 1024 * 1024
"""What a form may hold beside its file: sixty fields of the largest size and their headers fit."""
PART_TOO_LARGE = f"Part is too large. The limit is {PART_BYTES_MAX} bytes."
LIVE_SECONDS = 10.0
"""How old the answer may be whether a key with open streams still lives."""


async def require_key(settings: ApiSettings, keys: Keys) -> None:
    """Refuse to answer strangers: on any but a loopback address there must be a key."""
    if not settings.is_loopback and not await keys.any():
        raise ConfigurationError(
            f"without a key the server answers on a loopback address only, not on {settings.host}; "
            "make one: batchwright key create NAME"
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and in whose name."""

    tenant: str | None
    """The tenant whose objects are seen; None sees all of them."""
    scopes: frozenset[KeyScope]
    key: UUID | None
    """The key that opened; None where none is needed yet."""

    @property
    def own_tenant(self) -> str:
        """The tenant for something new."""
        if self.tenant is None:
            raise HTTPException(400, "tenant=* means all tenants; name one tenant here")
        return self.tenant


class Gate:
    """Turns a request's credentials into a caller."""

    def __init__(self, settings: ApiSettings, keys: Keys) -> None:
        self._settings = settings
        self._keys = keys
        self._looking = asyncio.Lock()
        self._live: dict[UUID | None, tuple[float, bool]] = {}

    async def enter(self, secret: str | None, needed: KeyScope, tenant: str | None) -> Caller:
        key = None
        holder = None if secret is None else await self._keys.find(secret)
        if holder is not None:
            key, home, scopes = holder
        elif not (secret or "").startswith(PREFIX) and await self._is_open_to_all():  # clients that must send a key
            home, scopes = DEFAULT_TENANT, frozenset(KeyScope)
        elif secret is None:
            raise _unauthorized("this needs a key: send the header Authorization: Bearer bw_…")
        else:
            raise _unauthorized("this key is unknown, revoked or too old; batchwright key create makes a new one")
        if needed not in scopes:
            raise HTTPException(403, f"this needs the scope {needed.value!r}, which the key does not have")
        if tenant is None or tenant == home:
            return Caller(home, scopes, key)
        if KeyScope.ADMIN not in scopes:
            raise HTTPException(403, "acting in another tenant needs the scope 'admin'")
        return Caller(None if tenant == ALL_TENANTS else tenant, scopes, key)

    async def is_still_open(self, caller: Caller) -> bool:
        """Whether who came in could come in again; asked once in a while for each key, however many streams it has."""
        async with self._looking:
            looked_at, live = self._live.get(caller.key, (-math.inf, True))
            if time.monotonic() - looked_at >= LIVE_SECONDS:
                live = await (self._keys.is_live(caller.key) if caller.key else self._is_open_to_all())
                self._live[caller.key] = (time.monotonic(), live)
            return live

    async def _is_open_to_all(self) -> bool:
        """On a loopback address, and as long as no key was ever made, the machine's user may do everything."""
        return self._settings.is_loopback and not await self._keys.any()


def _unauthorized(message: str) -> HTTPException:
    return HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})


_bearer = HTTPBearer(auto_error=False, description="An API key, made by `batchwright key create`.")
TenantParam = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=100,
        pattern=NO_NUL,
        description="Act in this tenant instead of the key's own, or in all of them (`*`); needs the scope `admin`.",
    ),
]


class Needs:
    """A dependency that lets in whoever has this scope."""

    def __init__(self, scope: KeyScope) -> None:
        self.scope = scope

    async def __call__(
        self,
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
        tenant: TenantParam = None,
    ) -> Caller:
        if credentials is None and request.headers.get("authorization") is not None:
            raise _unauthorized("the Authorization header is not of the form: Bearer bw_…")
        gate: Gate = request.app.state.services.gate
        return await gate.enter(None if credentials is None else credentials.credentials, self.scope, tenant)


Reader = Annotated[Caller, Depends(Needs(KeyScope.READ))]
Submitter = Annotated[Caller, Depends(Needs(KeyScope.SUBMIT))]
Operator = Annotated[Caller, Depends(Needs(KeyScope.OPERATE))]
Admin = Annotated[Caller, Depends(Needs(KeyScope.ADMIN))]


class Guard:
    """Looks at every request before anything else: the host it names, the page it comes from, the size it has."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, file_bytes_max: int) -> None:
        self._app = app
        self._settings = settings
        self._file_bytes_max = file_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit, too_large = self._limit(scope)
        host = headers.get("host", "")
        if not self._knows(host):
            name = _name(host)
            message = f"this server is not called {name!r}; if it is, add that to the setting api.allowed_hosts"
            await error_answer(421, message, param="host")(scope, receive, send)
        elif not self._trusts(headers.get("origin"), f"{scope['scheme']}://{host}"):
            message = "pages of another origin may not call this server; see the setting api.allowed_origins"
            await error_answer(403, message, code="wrong_origin", param="origin")(scope, receive, send)
        elif _announced(headers) > limit:
            await too_large(scope, receive, send)
        else:
            await self._app(scope, _counted(receive, limit), send)

    def _limit(self, scope: Scope) -> tuple[int, ASGIApp]:
        """How many bytes the body may have, and the answer to more."""
        if scope["method"] == "POST" and scope["path"] == FILES:
            text = file_too_large(self._file_bytes_max)
            return self._file_bytes_max + FORM_BYTES_MAX, error_answer(400, text, code=None, param="file")
        if scope["method"] == "POST" and _PARTS.fullmatch(scope["path"]):
            return PART_BYTES_MAX + FORM_BYTES_MAX, error_answer(400, PART_TOO_LARGE, code=None, param="data")
        limit = self._settings.body_bytes_max
        return limit, error_answer(413, _too_large(limit), param="body")

    def _knows(self, host: str) -> bool:
        name = _name(host)
        bound = self._settings.host
        if name in _LOOPBACK_NAMES or name in (bound, f"[{bound}]"):
            return True
        if any(fnmatchcase(name, _pattern(allowed)) for allowed in self._settings.allowed_hosts):
            return True
        return not self._settings.is_loopback and bound in _WILDCARDS and (_is_address(name) or name == _own_name())

    def _trusts(self, origin: str | None, own: str) -> bool:
        return (
            origin is None
            or origin == own
            or origin in self._settings.allowed_origins
            or ("*" in self._settings.allowed_origins)
        )


def _counted(receive: Receive, limit: int) -> Receive:
    total = 0

    async def count() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > limit:
            raise HTTPException(413, _too_large(limit))
        return message

    return count


def _too_large(limit: int) -> str:
    return f"the body is larger than {limit} bytes, the limit of this server"


def _name(host: str) -> str:
    """The host without its port, lower-cased; an IPv6 address keeps its brackets."""
    name = host.lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]


def _pattern(allowed: str) -> str:
    """Brackets stand around IPv6 addresses here, not around letters to choose from."""
    return allowed.lower().replace("[", "[[]")


def _announced(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _own_name() -> str:
    return socket.gethostname().lower()
