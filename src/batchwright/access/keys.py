"""API keys: who may do what, in which tenant. A key is shown once; the database stores only its hash."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from batchwright.db.database import Database, Row
from batchwright.db.statements import statements
from batchwright.engine.jobs import DEFAULT_TENANT, new_id
from batchwright.errors import Conflict, InvalidInput, NotFound

SQL = statements(__package__, "keys.sql")

PREFIX = "bw_"
_SECRET_BYTES = 32
_HINT_CHARACTERS = 10
_KEYS_MAX = 1000
_LIFETIME_MAX = timedelta(days=36_525)


class Scope(StrEnum):
    """What a key allows; no scope includes another."""

    READ = "read"
    """View the tenant's jobs, pipelines, schedules, queues, files and batches."""
    SUBMIT = "submit"
    """Enqueue jobs; upload and delete files; create, cancel, pause, limit and retry batches."""
    OPERATE = "operate"
    """Cancel, recover, rerun and dismiss jobs; create and change schedules."""
    ADMIN = "admin"
    """See workers and metrics, pause queues, and act in other tenants with `?tenant=`."""


DEFAULT_SCOPES = (Scope.READ, Scope.SUBMIT, Scope.OPERATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A stored key: everything but its secret."""

    id: UUID
    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    hint: str
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


class Created(NamedTuple):
    """A new key with its secret, which is known only now."""

    key: ApiKey
    secret: str


class Holder(NamedTuple):
    """The owner of a secret."""

    id: UUID
    tenant: str
    scopes: frozenset[Scope]


class Keys:
    """The table of keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        scopes: Iterable[Scope | str] = DEFAULT_SCOPES,
        lifetime: timedelta | None = None,
        id: UUID | None = None,
    ) -> Created:
        """Create a key. With the `id` of one that has never been used, that key gets a new secret instead."""
        for param, text in (("name", name), ("tenant", tenant)):
            if not 1 <= len(text) <= 100:
                raise InvalidInput(f"the {param} of a key must have 1 to 100 characters, not {len(text)}", param=param)
        if tenant == "*":
            raise InvalidInput("'*' means all tenants; choose another name", param="tenant")
        if lifetime is not None and not timedelta(0) < lifetime <= _LIFETIME_MAX:
            raise InvalidInput("the lifetime of a key must be more than 0 and at most 100 years", param="lifetime")
        wanted = _wanted(scopes)
        secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        rows = await self._database.ask(
            SQL["create"],
            {
                "id": id or new_id(),
                "digest": _digest(secret),
                "hint": secret[:_HINT_CHARACTERS],
                "name": name,
                "tenant": tenant,
                "scopes": [scope.value for scope in wanted],
                "lifetime_seconds": None if lifetime is None else lifetime.total_seconds(),
            },
        )
        if not rows:
            raise Conflict(f"the key {name!r} was created before and is in use; to have another one, start anew")
        return Created(_key(rows[0]), secret)

    async def list(self, *, tenant: str | None = None) -> list[ApiKey]:
        return [_key(row) for row in await self._database.ask(SQL["list"], {"tenant": tenant, "limit": _KEYS_MAX})]

    async def revoke(self, id: UUID) -> ApiKey:
        """Revoke the key: it is refused from the next request on."""
        rows = await self._database.ask(SQL["revoke"], {"id": id})
        if not rows:
            raise NotFound(f"there is no key {id}; batchwright key list shows them")
        return _key(rows[0])

    async def find(self, secret: str) -> Holder | None:
        """The owner of this secret; None if it is unknown, revoked or expired."""
        if not secret.startswith(PREFIX) or not secret.isascii():
            return None
        rows = await self._database.ask(SQL["find"], {"digest": _digest(secret)})
        return Holder(rows[0][0], rows[0][1], frozenset(map(Scope, rows[0][2]))) if rows else None

    async def is_live(self, id: UUID) -> bool:
        """Whether the key is still valid."""
        ((live,),) = await self._database.ask(SQL["live"], {"id": id})
        return bool(live)

    async def any(self) -> bool:
        """Whether a key was ever created. A revoked one counts, so revoking the last one does not open the server."""
        ((found,),) = await self._database.ask(SQL["any"], {})
        return bool(found)


def _wanted(scopes: Iterable[Scope | str]) -> tuple[Scope, ...]:
    given = [str(scope) for scope in scopes]
    if unknown := [scope for scope in given if scope not in set(Scope)]:
        raise InvalidInput(f"there is no scope {unknown[0]!r}; use {', '.join(Scope)}", param="scopes")
    if not given:
        raise InvalidInput("a key needs at least one scope", param="scopes")
    return tuple(dict.fromkeys(map(Scope, given)))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _key(row: Row) -> ApiKey:
    values = dict(zip(ApiKey.__dataclass_fields__, row, strict=True))
    values["scopes"] = tuple(map(Scope, values["scopes"]))
    return ApiKey(**values)
