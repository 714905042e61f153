"""Limits on event streams: in all, per key, and per tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any
from uuid import UUID

from starlette.types import Receive, Scope, Send

from batchwright.access.gate import Caller
from batchwright.access.settings import ApiSettings
from batchwright.api.errors import Refusal
from batchwright.api.routes import Streamed


class StreamPlaces:
    """Counts the streams of one server, each from the moment it is admitted."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._all = 0
        self._of_key: Counter[UUID | None] = Counter()
        self._of_tenant: Counter[str | None] = Counter()

    def take(self, caller: Caller) -> StreamPlace:
        """Reserve a place; the error names the limit that was reached."""
        self.check(caller)
        self._count(caller, 1)
        return StreamPlace(self, caller)

    def check(self, caller: Caller) -> None:
        limits = self._settings
        if self._all >= limits.streams_max:
            raise _refusal(503, limits.streams_max, "are open already, the limit of this server", "unavailable")
        if self._of_key[caller.key] >= limits.streams_per_key_max:
            raise _refusal(429, limits.streams_per_key_max, "of this key are open already, the limit for one key")
        if self._of_tenant[caller.tenant] >= limits.streams_per_tenant_max:
            raise _refusal(
                429, limits.streams_per_tenant_max, "of this tenant are open already, the limit for one tenant"
            )

    def give_back(self, caller: Caller) -> None:
        self._count(caller, -1)

    def _count(self, caller: Caller, n: int) -> None:
        self._all += n
        self._of_key[caller.key] += n
        self._of_tenant[caller.tenant] += n
        if n < 0:  # drop entries without streams: unary plus keeps counts above zero
            self._of_key, self._of_tenant = +self._of_key, +self._of_tenant


class StreamPlace:
    """One reserved place; it is released once."""

    def __init__(self, places: StreamPlaces, caller: Caller) -> None:
        self._places = places
        self._caller: Caller | None = caller

    def give_back(self) -> None:
        if self._caller is not None:
            self._places.give_back(self._caller)
            self._caller = None


class LiveStream(Streamed):
    """A response that stays open; it holds its place until it ends."""

    def __init__(self, place: StreamPlace, content: AsyncGenerator[bytes, None], **options: Any) -> None:
        super().__init__(content, **options)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._place.give_back()


def _refusal(status: int, n: int, words: str, code: str = "too_many_streams") -> Refusal:
    return Refusal(f"{n} event streams {words}", status=status, code=code, headers={"Retry-After": "5"})
