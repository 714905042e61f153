"""Live events for any number of followers, read by one task: a follower costs no connection, and none when idle.

            ┌ one task ──────────────────────────────┐
    last_written ── moved? ──▶ since(all feeds) ──▶ Feed ──▶ follower · follower · follower
            └ no: nothing to ask ────────────────────┘
A feed keeps the latest events of one job as ready-made text. A follower that is further behind reads pages from the
database, a few followers at a time, until it has caught up.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple
from uuid import UUID

from windlass.db.statements import statements
from windlass.engine.jobs import Job, JobEvent, JobId
from windlass.engine.queue import Queue, as_event
from windlass.errors import DatabaseUnavailable
from windlass.states import JOB

SQL = statements(__package__, "feeds.sql")
log = logging.getLogger(__name__)

_LOOK_SECONDS_MIN = 0.1
_LOOK_SHARE = 5
"""A look that took long is followed by a pause that much longer."""
_LATE_SECONDS = 15.0
"""An event may be committed this long after it took its id; no transaction of ours lasts longer."""
_SWEEP_SECONDS = 60.0
"""Look now and then even though nothing seems to have happened."""
_PAGE = 200
_FEEDS_PER_LOOK = 500
_KEPT_MAX = 2_000
_READERS_MAX = 2


class Entry(NamedTuple):
    """An event as its followers get it."""

    id: int
    frame: bytes
    ends: bool | None
    """Whether the job has ended with it; None for an event that is no move."""


class Feed:
    """The latest events of one job; everything after `floor` is here once the feed has one."""

    def __init__(self) -> None:
        self.floor: int | None = None
        self.followers = 0
        self._entries: list[Entry] = []
        self.changed = asyncio.Event()

    @property
    def last(self) -> int:
        return self._entries[-1].id if self._entries else self.floor or 0

    def begin(self, floor: int) -> None:
        self.floor = floor
        self._wake()

    def add(self, entries: list[Entry]) -> None:
        self._entries += entries
        if len(self._entries) > _KEPT_MAX:
            gone = len(self._entries) - _KEPT_MAX // 2
            self.floor = self._entries[gone - 1].id
            del self._entries[:gone]
        self._wake()

    def after(self, cursor: int) -> list[Entry] | None:
        """What a follower at this place has not seen; None when the feed does not reach back so far."""
        if self.floor is None or cursor < self.floor:
            return None
        return self._entries[bisect.bisect_right(self._entries, cursor, key=lambda entry: entry.id) :]

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Feeds:
    """Follows the events of many jobs for many followers."""

    def __init__(self, queue: Queue, render: Callable[[JobEvent], bytes]) -> None:
        self._queue = queue
        self._render = render
        self._feeds: dict[UUID, Feed] = {}
        self._tail: asyncio.Task[None] | None = None
        self._readers = asyncio.Semaphore(_READERS_MAX)
        self._written = -1
        self._late_until = self._sweep_at = 0.0
        self._is_closed = False
        self.followers = 0

    async def follow(self, job: Job, after: int, *, idle_seconds: float) -> AsyncIterator[list[bytes]]:
        """Events after this id, in order, each once, until the job has ended; an empty list after a silence."""
        ended, cursor = job.status in JOB.terminal, after
        with self._joined(job.id) as feed:
            while not self._is_closed:
                changed = feed.changed
                entries = feed.after(cursor)
                if entries is None:
                    entries = await self._read(job.id, cursor)
                for entry in entries:
                    ended = ended if entry.ends is None else entry.ends
                if entries:
                    cursor = entries[-1].id
                    yield [entry.frame for entry in entries]
                elif ended:
                    return
                elif feed.floor is not None and cursor < feed.floor:
                    cursor = feed.floor  # what was there is gone: retention has taken it
                elif not await _within(changed, idle_seconds):
                    yield []

    async def close(self) -> None:
        """Let every follower go."""
        self._is_closed = True
        for feed in self._feeds.values():
            feed.changed.set()
        if self._tail is not None:
            self._tail.cancel()
            await asyncio.gather(self._tail, return_exceptions=True)

    @contextlib.contextmanager
    def _joined(self, id: UUID) -> Iterator[Feed]:
        feed = self._feeds.setdefault(id, Feed())
        feed.followers += 1
        self.followers += 1
        if self._tail is None or self._tail.done():
            self._tail = asyncio.get_running_loop().create_task(self._look_on())
        try:
            yield feed
        finally:
            feed.followers -= 1
            self.followers -= 1
            if feed.followers == 0:
                del self._feeds[id]

    async def _read(self, id: JobId, after: int) -> list[Entry]:
        """A page of the past; few followers read at a time, so that they cannot take all connections."""
        while not self._is_closed:
            async with self._readers:
                with contextlib.suppress(DatabaseUnavailable):
                    return [self._entry(event) for event in await self._queue.events(id, after=after, limit=_PAGE)]
            await asyncio.sleep(random.uniform(0.5, 1.0))
        return []

    async def _look_on(self) -> None:
        """For as long as anybody follows anything."""
        while self._feeds:
            began = time.monotonic()
            try:
                await self.look()
            except DatabaseUnavailable as error:
                log.warning("events cannot be followed for now: %s", error)
            except Exception:  # followers rely on this task; a stumble must not end it
                log.exception("looking for events failed")
            took = time.monotonic() - began
            await asyncio.sleep(max(_LOOK_SECONDS_MIN, _LOOK_SHARE * took))

    async def look(self) -> None:
        """Ask for news, if there can be any."""
        if new := [id for id, feed in self._feeds.items() if feed.floor is None]:
            for id, last in await self._queue.ask(SQL["last_of_each"], {"ids": new}):
                if id in self._feeds:
                    self._feeds[id].begin(last)
        ((written,),) = await self._queue.ask(SQL["last_written"], {})
        now = time.monotonic()
        if written != self._written or now >= self._sweep_at:
            self._written, self._late_until = written, now + _LATE_SECONDS
            self._sweep_at = now + _SWEEP_SECONDS
        if now < self._late_until:
            feeds = [id for id, feed in self._feeds.items() if feed.floor is not None]
            for start in range(0, len(feeds), _FEEDS_PER_LOOK):
                await self._fetch(feeds[start : start + _FEEDS_PER_LOOK])

    async def _fetch(self, ids: list[UUID]) -> None:
        while wanted := {id: self._feeds[id].last for id in ids if id in self._feeds}:
            params = {"ids": list(wanted), "afters": list(wanted.values()), "limit": _PAGE}
            news: dict[UUID, list[Entry]] = {}
            for row in await self._queue.ask(SQL["since"], params):
                event = as_event(row)
                news.setdefault(event.job_id, []).append(self._entry(event))
            for id, entries in news.items():
                feed = self._feeds.get(id)
                if feed is not None and feed.floor is not None:  # else all followers have gone, and others come
                    feed.add(entries)
            ids = [id for id, entries in news.items() if len(entries) == _PAGE]

    def _entry(self, event: JobEvent) -> Entry:
        ends = None if event.status is None else event.status in JOB.terminal
        return Entry(event.id, self._render(event), ends)


async def _within(changed: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return False
    return True
