"""Decides which request starts next, when there are many at once.

A limited number of requests run; the others wait, and the keys take turns. So if one key sends a thousand requests, a
request of another key waits for one of them, not for all. All requests without a known key share one turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CALLER = "batchwright.caller"
"""The key in a request's scope of the sender, once that is known."""
AT_ONCE = 32
"""Number of requests running at a time; each counts until it reads its body or answers."""
_TURN_SECONDS_MAX = 1.0
"""A request that takes longer is waiting for something else, such as a model server, and no longer counts."""
_KNOWN_MAX = 1_000
_UNKNOWN = 0


def credentials(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """What distinguishes one client from another: its key, or its session cookie."""
    for name, value in headers:
        if name in (b"authorization", b"cookie"):
            return hash(value)
    return _UNKNOWN


class Turns:
    """Starts requests, a limited number at a time."""

    def __init__(self) -> None:
        self._running = 0
        self._known: dict[int, None] = {}
        self._waiting: dict[int, deque[Callable[[], bool]]] = {}
        """By client; the client whose turn is next comes first."""

    def ask(self, who: int, begin: Callable[[], bool]) -> None:
        """Start the request now or later; `begin` returns whether there was still anything to start."""
        self._waiting.setdefault(who if self.knows(who) else _UNKNOWN, deque()).append(begin)
        self._start_next()

    def done(self) -> None:
        self._running -= 1
        self._start_next()

    def knows(self, who: int) -> bool:
        return who in self._known

    def remember(self, who: int) -> None:
        """Record that these credentials are valid. Only valid ones get their own turns: others can be invented."""
        self._known.pop(who, None)
        self._known[who] = None
        if len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _start_next(self) -> None:
        while self._waiting and self._running < AT_ONCE:
            who, queue = next(iter(self._waiting.items()))
            del self._waiting[who]
            begin = queue.popleft()
            if queue:
                self._waiting[who] = queue
            if begin():
                self._running += 1


class InTurn:
    """Wraps the application; a request's turn ends as soon as it waits for a body or begins to answer."""

    def __init__(self, app: ASGIApp, turns: Turns, who: int) -> None:
        self._app = app
        self._turns = turns
        self._who = who
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_after() -> Message:
            self._end(scope)
            return await receive()

        async def send_after(message: Message) -> None:
            self._end(scope)
            await send(message)

        timer = asyncio.get_running_loop().call_later(_TURN_SECONDS_MAX, self._end, scope)
        try:
            await self._app(scope, receive_after, send_after)
        finally:
            timer.cancel()
            self._end(scope)

    def _end(self, scope: Scope) -> None:
        if not self._is_over:
            self._is_over = True
            if CALLER in scope:
                self._turns.remember(self._who)
            self._turns.done()
