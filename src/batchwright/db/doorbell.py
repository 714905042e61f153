"""LISTEN/NOTIFY as a doorbell: it only shortens the wait, so any ring may be lost, repeated or late.

NOTIFY takes a lock on the whole cluster at commit, so enqueue never rings inside its own transaction: rings are sent
afterwards, on another connection, at most one per queue every 50 ms. After a quiet period a short burst is allowed,
so that single jobs do not wait for each other's rings.

In a caller's transaction the ring is part of the transaction (`ring_at_commit`): only the caller knows when it commits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import psycopg

from batchwright.db.database import DatabaseSettings, Pool, Session, connect_arguments, keep_cancellation
from batchwright.errors import DatabaseError

log = logging.getLogger(__name__)

CHANNEL = "batchwright"
_RING = "SELECT pg_notify(%(channel)s, queue) FROM unnest(%(queues)s::text[]) AS queue"
_QUIET_SECONDS = 0.05
_BURST = 5
_RECONNECT_SECONDS_MAX = 5.0


class Doorbell:
    """Rings for queues that have new jobs."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._paused_until = 0.0
        """Every ring adds the quiet time to this; we wait only when it is ahead of the clock by a burst."""

    def ring(self, queues: Iterable[str]) -> None:
        self._waiting.update(queues)
        if self._waiting and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send())

    async def close(self) -> None:
        """Send the last ring."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=1)

    async def _send(self) -> None:
        try:
            while self._waiting:
                queues, self._waiting = sorted(self._waiting), set()
                try:
                    await self._pool.rows(_RING, {"channel": CHANNEL, "queues": queues})
                except DatabaseError as error:
                    log.debug("the doorbell did not ring: %s", error)
                await self._pause()
        finally:
            self._task = None

    async def _pause(self) -> None:
        now = time.monotonic()
        self._paused_until = max(self._paused_until, now) + _QUIET_SECONDS
        ahead = self._paused_until - now - _BURST * _QUIET_SECONDS
        if ahead > 0:
            await asyncio.sleep(ahead)


async def ring_at_commit(session: Session, queues: Iterable[str]) -> None:
    """Ring when the session's transaction commits, and never if it is rolled back.

    PostgreSQL sends equal rings of one transaction once, however many jobs it enqueues.
    """
    if found := sorted(set(queues)):
        await session.rows(_RING, {"channel": CHANNEL, "queues": found})


async def listen(settings: DatabaseSettings, url: str, on_ring: Callable[[str], None]) -> None:
    """Call `on_ring` for every ring, forever; without a connection the poller works alone."""
    pause = 0.1
    while True:
        try:
            arguments = connect_arguments(settings)
            with keep_cancellation():
                async with await psycopg.AsyncConnection.connect(url, autocommit=True, **arguments) as connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    pause = 0.1
                    async for ring in connection.notifies():
                        on_ring(ring.payload)
        except psycopg.Error as error:
            log.debug("the doorbell is not connected: %s", error)
        await asyncio.sleep(pause)
        pause = min(_RECONNECT_SECONDS_MAX, pause * 2)
