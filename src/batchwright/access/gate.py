"""Turns credentials into a caller: its key, its tenant and its scopes."""

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
"""How long the check that a key with open streams is still valid may be cached."""


async def require_key(keys: Keys, *, host: str, is_loopback: bool) -> None:
    """Refuse to start without a key, unless the address is a loopback address."""
    if not is_loopback and not await keys.any():
        raise ConfigurationError(
            f"without a key the server listens only on a loopback address, not on {host}; "
            "create one: batchwright key create NAME"
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and for which tenant."""

    tenant: str | None
    """The tenant whose objects are visible; None means all tenants."""
    scopes: frozenset[Scope]
    key: UUID | None
    """The key that was used; None where none is needed yet."""

    @property
    def own_tenant(self) -> str:
        """The tenant for a new object."""
        if self.tenant is None:
            raise InvalidInput("tenant=* means all tenants; name one tenant here")
        return self.tenant


EVERYBODY = Caller(DEFAULT_TENANT, frozenset(Scope), None)
"""A user of this machine, until the first key is created."""


class Gate:
    """Turns a request's credentials into a caller."""

    def __init__(self, keys: Keys, *, is_loopback: bool) -> None:
        self._keys = keys
        self._is_loopback = is_loopback
        self._looking = asyncio.Lock()
        self._live: dict[UUID | None, tuple[float, bool]] = {}
        self._has_keys = False

    async def identify(self, secret: str | None) -> Caller:
        """The caller that this key belongs to, in the key's own tenant."""
        holder = None if secret is None else await self._keys.find(secret)
        if holder is not None:
            return Caller(holder.tenant, holder.scopes, holder.id)
        if not (secret or "").startswith(PREFIX) and await self.is_open_to_all():  # some clients always send some key
            return EVERYBODY
        if secret is None:
            raise Unauthorized("this needs a key: send the header Authorization: Bearer bw_…")
        raise Unauthorized("this key is unknown, revoked or expired; create a new one: batchwright key create NAME")

    async def is_still_open(self, caller: Caller) -> bool:
        """Whether the caller would still be admitted; checked every ten seconds per key, not per stream."""
        async with self._looking:
            looked_at, live = self._live.get(caller.key, (-math.inf, True))
            if time.monotonic() - looked_at >= LIVE_SECONDS:
                live = await (self._keys.is_live(caller.key) if caller.key else self.is_open_to_all())
                self._live[caller.key] = (time.monotonic(), live)
            return live

    async def is_open_to_all(self) -> bool:
        """On a loopback address, until the first key is created, users of this machine may do everything."""
        if self._is_loopback and not self._has_keys:  # once a key exists, requests without one cause no queries
            self._has_keys = await self._keys.any()
        return self._is_loopback and not self._has_keys


def admit(caller: Caller, needed: Scope, tenant: str | None) -> Caller:
    """The caller in the requested tenant, if its scopes allow that."""
    if needed not in caller.scopes:
        raise Forbidden(f"this needs the scope {needed.value!r}, which the key does not have")
    if tenant is None or tenant == caller.tenant:
        return caller
    if Scope.ADMIN not in caller.scopes:
        raise Forbidden("acting in another tenant needs the scope 'admin'")
    return Caller(None if tenant == ALL_TENANTS else tenant, caller.scopes, caller.key)
