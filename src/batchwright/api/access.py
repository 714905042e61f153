"""Access control: addresses, hosts and origins, keys and scopes, tenants."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.access.gate import Caller, Gate, admit
from batchwright.access.keys import Scope as KeyScope
from batchwright.access.settings import ApiSettings
from batchwright.api.errors import error_answer
from batchwright.api.schemas import NO_NUL
from batchwright.api.turns import CALLER
from batchwright.errors import BatchwrightError, Unauthorized
from batchwright.part import BodyLimit

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104  compared with, never bound
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[^\[\]:@/\\\s]{1,255})(?::\d{1,5})?", re.ASCII)
_JOBS = "/v1/jobs"
_LENGTH_DIGITS_MAX = 20
"""Enough for 64 bits, which no limit reaches."""

_bearer = HTTPBearer(auto_error=False, description="An API key, created with `batchwright key create`.")
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
    """A dependency that admits callers with this scope."""

    def __init__(self, scope: KeyScope) -> None:
        self.scope = scope

    async def __call__(
        self,
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
        tenant: TenantParam = None,
    ) -> Caller:
        return admit(await identify(request), self.scope, tenant)

    async def check(self, request: Request) -> None:
        """Refuse a request without a valid key or without the scope, before the rest of the request is read."""
        admit(await identify(request), self.scope, None)


async def identify(request: Request) -> Caller:
    """The sender of a request, by the credentials in its headers; looked up once, before the body is read."""
    if CALLER not in request.scope:
        gate: Gate = request.app.state.services.gate
        request.scope[CALLER] = await gate.identify(_secret(request.headers))
    caller: Caller = request.scope[CALLER]
    return caller


def _secret(headers: Headers) -> str | None:
    given = headers.get("authorization")
    scheme, _, secret = (given or "").partition(" ")
    if given is not None and (scheme.lower() != "bearer" or not secret.strip()):
        raise Unauthorized("the Authorization header must have the form: Bearer bw_…")
    return secret.strip() or None


Reader = Annotated[Caller, Depends(Needs(KeyScope.READ))]
Submitter = Annotated[Caller, Depends(Needs(KeyScope.SUBMIT))]
Operator = Annotated[Caller, Depends(Needs(KeyScope.OPERATE))]
Admin = Annotated[Caller, Depends(Needs(KeyScope.ADMIN))]


class Guard:
    """Checks every request before anything else: its Host header, its Origin header and its size."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, body_limits: Sequence[BodyLimit] = ()) -> None:
        self._app = app
        self._settings = settings
        self._body_limits = [(limit, re.compile(limit.path)) for limit in body_limits]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit, too_large = self._limit(scope)
        host = headers.get("host", "")
        if len(headers.getlist("host")) > 1:
            message = "the request has several Host headers; send one"
            await error_answer(400, message, param="host")(scope, receive, send)
        elif not self._knows(host):
            name = _name(host) or host[:100]
            message = f"the host {name!r} is not allowed; if it is this server, add it to the setting api.allowed_hosts"
            await error_answer(421, message, param="host")(scope, receive, send)
        elif not self._trusts(headers.get("origin"), f"{scope['scheme']}://{host}"):
            message = "pages of another origin may not call this server; see the setting api.allowed_origins"
            await error_answer(403, message, code="wrong_origin", param="origin")(scope, receive, send)
        elif _announced(headers) > limit:
            with suppress(BatchwrightError):  # a client with a key may finish sending, so that it sees the answer
                await identify(Request(scope))
            await too_large(scope, receive, send)
        else:
            await self._app(scope, _counted(receive, limit), send)

    def _limit(self, scope: Scope) -> tuple[int, ASGIApp]:
        """The maximum size of the body in bytes, and the answer to a larger one."""
        for limit, path in self._body_limits:
            if scope["method"] == limit.method and path.fullmatch(scope["path"]):
                return limit.bytes_max, error_answer(400, limit.too_large, code=None, param=limit.param)
        is_jobs = scope["method"] == "POST" and scope["path"] == _JOBS
        most = self._settings.jobs_bytes_max if is_jobs else self._settings.body_bytes_max
        return most, error_answer(413, _too_large(most), param="body")

    def _knows(self, host: str) -> bool:
        name = _name(host)
        bound = self._settings.host
        if name == "":
            return False
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
    return f"the body is larger than {limit} bytes, which is the limit of this server"


def _name(host: str) -> str:
    """The host without its port, in lower case; an IPv6 address keeps its brackets. Empty if it is not a host."""
    found = _HOST.fullmatch(host.lower())
    return "" if found is None else found[1]


def _pattern(allowed: str) -> str:
    """Brackets enclose IPv6 addresses here, not sets of characters."""
    return allowed.lower().replace("[", "[[]")


def _announced(headers: Headers) -> int:
    length = headers.get("content-length", "").lstrip("0")  # `int` refuses thousands of digits, also if they are zeros
    return int(length[:_LENGTH_DIGITS_MAX]) if length.isdecimal() else 0


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _own_name() -> str:
    return socket.gethostname().lower()
