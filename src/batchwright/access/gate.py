"""Turns credentials into a caller: who asks, in whose name, and with which scopes."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from uuid import UUID

from batchwright.access.keys import PREFIX, Keys, Scope
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.errors import ConfigurationError, Forbidden, InvalidInput, Unauthorized

ALL_TENANTS = "*"
LIVE_SECONDS = 10.0
"""How old the answer may be whether a key with open streams still lives."""


async def require_key(keys: Keys, *, host: str, is_loopback: bool) -> None:
    """Refuse to answer strangers: on any but a loopback address there must be a key."""
    if not is_loopback and not await keys.any():
        raise ConfigurationError(
            f"without a key the server answers on a loopback address only, not on {host}; "
            "make one: batchwright key create NAME"
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and in whose name."""

    tenant: str | None
    """The tenant whose objects are seen; None sees all of them."""
    scopes: frozenset[Scope]
    key: UUID | None
    """The key that opened; None where none is needed yet."""

    @property
    def own_tenant(self) -> str:
        """The tenant for something new."""
        if self.tenant is None:
            raise InvalidInput("tenant=* means all tenants; name one tenant here")
        return self.tenant


class Gate:
    """Turns a request's credentials into a caller."""

    def __init__(self, keys: Keys, *, is_loopback: bool) -> None:
        self._keys = keys
        self._is_loopback = is_loopback
        self._looking = asyncio.Lock()
        self._live: dict[UUID | None, tuple[float, bool]] = {}

    async def enter(self, secret: str | None, needed: Scope, tenant: str | None) -> Caller:
        key = None
        holder = None if secret is None else await self._keys.find(secret)
        if holder is not None:
            key, home, scopes = holder
        elif not (secret or "").startswith(PREFIX) and await self._is_open_to_all():  # clients that must send a key
            home, scopes = DEFAULT_TENANT, frozenset(Scope)
        elif secret is None:
            raise Unauthorized("this needs a key: send the header Authorization: Bearer bw_…")
        else:
            raise Unauthorized("this key is unknown, revoked or too old; batchwright key create makes a new one")
        if needed not in scopes:
            raise Forbidden(f"this needs the scope {needed.value!r}, which the key does not have")
        if tenant is None or tenant == home:
            return Caller(home, scopes, key)
        if Scope.ADMIN not in scopes:
            raise Forbidden("acting in another tenant needs the scope 'admin'")
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
        return self._is_loopback and not await self._keys.any()
