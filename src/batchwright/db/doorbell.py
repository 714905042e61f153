"""LISTEN/NOTIFY as a doorbell: it only shortens the wait, so any ring may be lost, repeated or late.

NOTIFY takes a lock on the whole cluster at commit, so enqueue never rings inside its own transaction: rings are sent
afterwards, on another connection, at most one per queue every 50 ms. After a quiet period a short burst is allowed,
so that single jobs do not wait for each other's rings.

In a caller's transaction the ring is part of the transaction (`ring_at_commit`): only the caller knows when it commits.

A job gets its time when it is written and is seen when that is committed. A worker that searched the queue in between
must look back, so the ring for a slow commit says since when, by the database's clock, there may be jobs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import NamedTuple

import psycopg

from batchwright.db.database import DatabaseSettings, Pool, Session, connect_arguments, keep_cancellation
from batchwright.errors import DatabaseError

log = logging.getLogger(__name__)

CHANNEL = "batchwright"
_RING = """
SELECT pg_notify(
    %(channel)s, concat_ws(' ', extract(epoch FROM clock_timestamp() - make_interval(secs => age)), queue))
FROM unnest(%(queues)s::text[], %(ages)s::float8[]) AS ring (queue, age)
"""
_RING_AT_COMMIT = """
SELECT pg_notify(%(channel)s, extract(epoch FROM transaction_timestamp()) || ' ' || queue)
FROM unnest(%(queues)s::text[]) AS queue
"""
_AGE_SECONDS = 1.0
_PROMPT_SECONDS = 0.025
"""Workers look back this far anyway."""
_DELAY_SECONDS = 1.0
"""A ring may take this long to reach the server."""
_QUIET_SECONDS = 0.05
_BURST = 5
_RECONNECT_SECONDS_MAX = 5.0


class Ring(NamedTuple):
    """There may be new jobs in this queue, written at this time or later."""

    queue: str
    since: datetime | None
    """None if the commit was quick."""

    @classmethod
    def read(cls, payload: str) -> Ring:
        since, _, queue = payload.partition(" ")
        try:
            return cls(queue, datetime.fromtimestamp(float(since), UTC))
        except (ValueError, OverflowError, OSError):
            return cls(payload, None)


class Doorbell:
    """Rings for queues that have new jobs."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: dict[str, float | None] = {}
        """By queue, when the oldest job of a slow commit was written, by the monotonic clock."""
        self._task: asyncio.Task[None] | None = None
        self._paused_until = 0.0
        """Every ring adds the quiet time to this; we wait only when it is ahead of the clock by a burst."""

    def ring(self, queues: Iterable[str], *, age_seconds: float = _AGE_SECONDS) -> None:
        """Ring for jobs that were committed just now, and written at most this long ago."""
        since = time.monotonic() - age_seconds if age_seconds > _PROMPT_SECONDS else None
        for queue in queues:
            earlier = self._waiting.get(queue)
            self._waiting[queue] = since if earlier is None else min(earlier, since or earlier)
        if self._waiting and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send())

    async def close(self) -> None:
        """Send the last ring."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=1)

    async def _send(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, {}
                now = time.monotonic() + _DELAY_SECONDS
                ages = [None if since is None else now - since for since in waiting.values()]
                try:
                    await self._pool.rows(_RING, {"channel": CHANNEL, "queues": list(waiting), "ages": ages})
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

    The ring has the time when the transaction began: so PostgreSQL sends one for each queue, however many jobs the
    transaction enqueues.
    """
    if found := sorted(set(queues)):
        await session.rows(_RING_AT_COMMIT, {"channel": CHANNEL, "queues": found})


async def listen(settings: DatabaseSettings, url: str, on_ring: Callable[[Ring], None]) -> None:
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
                        on_ring(Ring.read(ring.payload))
        except psycopg.Error as error:
            log.debug("the doorbell is not connected: %s", error)
        await asyncio.sleep(pause)
        pause = min(_RECONNECT_SECONDS_MAX, pause * 2)
