"""Dashboard sessions: a browser holds a session instead of the key; it ends with that key."""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime
from typing import NamedTuple

from batchwright.access.keys import Holder, Scope
from batchwright.db.database import Database
from batchwright.db.statements import statements
from batchwright.errors import Unauthorized

SQL = statements(__package__, "sessions.sql")
_TOKEN_BYTES = 32
_SWEPT_MAX = 1_000


class Opened(NamedTuple):
    """A new session with its token, which is known only now."""

    token: str
    expires_at: datetime


class SessionHolder(NamedTuple):
    """The owner of a session, and the name of its key."""

    holder: Holder
    name: str


class Sessions:
    """The table of sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self, holder: Holder, *, lifetime_seconds: float) -> Opened:
        """Create a session for this key; also removes some expired ones, so no upkeep round is needed."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        params = {"digest": _digest(token), "key_id": holder.id, "lifetime_seconds": lifetime_seconds}
        rows = await self._database.ask(SQL["open"], params)
        if not rows:
            raise Unauthorized("this key was just removed; create a new one: batchwright key create NAME")
        await self._database.ask(SQL["sweep"], {"limit": _SWEPT_MAX})
        return Opened(token, rows[0][0])

    async def find(self, token: str) -> SessionHolder | None:
        """The owner of the session; None if it has expired, or its key was revoked or has expired."""
        rows = await self._database.ask(SQL["find"], {"digest": _digest(token)})
        if not rows:
            return None
        id, tenant, scopes, name = rows[0]
        return SessionHolder(Holder(id, tenant, frozenset(map(Scope, scopes))), name)

    async def close(self, token: str) -> None:
        await self._database.ask(SQL["close"], {"digest": _digest(token)})


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
