"""Live events for any number of followers, read by two tasks: followers hold no connection and cost nothing when idle.

    ┌ tail ───────────────────────────────────────────┐
    │ last_written ── moved? ──▶ since(all streams) ──▶ stream ──▶ follower · follower · follower
    └ no: nothing to ask ─────────────────────────────┘            ▲
      past ── since(places) ── pages, shared ──────────────────────┘ while it is behind its stream
A stream keeps the latest events of one job as ready-made text. All events of a job are numbered under the lock of its
row, so within a job ids grow in commit order: a follower that has seen one has seen all before it.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar
from uuid import UUID

from batchwright.db.database import Database
from batchwright.db.statements import statements
from batchwright.engine.jobs import Job, JobEvent, JobId
from batchwright.engine.queue import as_event
from batchwright.errors import DatabaseUnavailable
from batchwright.states import JOB

SQL = statements(__package__, "event_streams.sql")
log = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_SECONDS_MIN = 0.1
_LOOK_SECONDS_MAX = 1.0
_LOOK_SHARE = 5
"""After a slow query, the pause is this many times longer than the query."""
_FAILED_SECONDS = 0.5
_LATE_FACTOR = 1.5
"""An event is committed after it takes its number, so the tail looks again, after pauses that grow by this factor."""
_SWEEP_SECONDS = 60.0
"""The longest of those pauses; also the interval at which the tail checks that the jobs still exist."""
_PAGE = 100
_PAGE_BYTES = 128 * 1024
"""A page ends with the event that reaches this size."""
_STREAMS_PER_FETCH = 200
_PLACES_PER_READ = 20
_EVENTS_PER_TURN = 500
"""Number of events rendered before other tasks get a turn on the loop."""
_KEPT_MAX = 2_000
_KEPT_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of all streams together; each has an equal share."""
_ENTRY_BYTES = 200
"""Memory of an entry besides its text."""


class Entry(NamedTuple):
    """An event as followers receive it."""

    id: int
    frame: bytes
    ends: bool | None
    """Whether the job ended with it; None for an event that does not change the status."""

    @property
    def size(self) -> int:
        return len(self.frame) + _ENTRY_BYTES


class Place(NamedTuple):
    """A position in the events of a job."""

    id: UUID
    after: int


@dataclass(slots=True)
class Page:
    """The next events after a position; after a full page there may be more."""

    entries: list[Entry] = field(default_factory=list)
    is_full: bool = False


class EventStream:
    """The latest events of one job. Once `floor` is set, the stream has every event after it."""

    def __init__(self, id: UUID) -> None:
        self.id = id
        self.floor: int | None = None
        self.followers = 0
        self.is_over = False
        """The job is gone: there will be no more events."""
        self.changed = asyncio.Event()
        self._entries: list[Entry] = []
        self._bytes = 0

    @property
    def place(self) -> Place:
        return Place(self.id, self._entries[-1].id if self._entries else self.floor or 0)

    def begin(self, floor: int) -> None:
        self.floor = floor
        self._wake()

    def add(self, entries: list[Entry], bytes_max: int) -> None:
        self._entries += entries
        self._bytes += sum(entry.size for entry in entries)
        if len(self._entries) > _KEPT_MAX or self._bytes > bytes_max:
            self._forget(_KEPT_MAX // 2, bytes_max // 2)
        self._wake()

    def end(self) -> None:
        self.is_over = True
        self._wake()

    def after(self, cursor: int) -> list[Entry] | None:
        """The next events after this position; None if the stream does not reach back that far."""
        if self.floor is None or cursor < self.floor:
            return None
        start = bisect.bisect_right(self._entries, cursor, key=lambda entry: entry.id)
        return _cut(self._entries[start : start + _PAGE])

    def _forget(self, kept: int, bytes_kept: int) -> None:
        gone = 0
        while gone < len(self._entries) and (len(self._entries) - gone > kept or self._bytes > bytes_kept):
            self._bytes -= self._entries[gone].size
            gone += 1
        self.floor = self._entries[gone - 1].id
        del self._entries[:gone]

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class EventStreams:
    """Follows the events of many jobs for many followers."""

    def __init__(
        self,
        database: Database,
        render: Callable[[JobEvent], bytes],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.followers = 0
        self.is_closed = False
        self._database = database
        self._render = render
        self._monotonic = monotonic
        self._streams: dict[UUID, EventStream] = {}
        self._wanted: dict[Place, list[asyncio.Future[list[Entry]]]] = {}
        self._tail: asyncio.Task[None] | None = None
        self._past: asyncio.Task[None] | None = None
        self._is_failing = False
        self._written = -1
        self._late_seconds = _LOOK_SECONDS_MIN
        self._late_at = self._sweep_at = 0.0

    async def follow(self, job: Job, after: int, *, idle_seconds: float) -> AsyncGenerator[list[bytes], None]:
        """Events after this id, in order, each once, until the job has ended; an empty list after each idle period.

        It also ends when the job is gone or the object is closed. Close it (`aclosing`) to free its resources at once.
        """
        ended, cursor = job.status in JOB.terminal, after
        with self._join(job.id) as stream:
            while not self.is_closed:
                changed, floor = stream.changed, stream.floor
                entries = None if ended else stream.after(cursor)  # the stream may lag: only the database knows the end
                if entries is None:
                    entries = await _within(self._page(Place(job.id, cursor)), idle_seconds)
                if entries is None:
                    yield []
                elif entries:
                    ended = next((entry.ends for entry in reversed(entries) if entry.ends is not None), ended)
                    cursor = entries[-1].id
                    yield [entry.frame for entry in entries]
                elif floor is not None and cursor < floor:
                    # Retention has removed the events at this position. Only the floor from before the page was read
                    # proves that; after a floor that was set later there may be events that are newer than the page.
                    cursor = floor
                elif ended or stream.is_over:
                    return
                elif not await _within(changed.wait(), idle_seconds):
                    yield []

    async def last(self, id: JobId) -> int:
        """The id of the job's latest event; 0 when it has none."""
        ((_, last),) = await self._database.ask(SQL["last_of_each"], {"ids": [id]})
        return int(last)

    async def close(self) -> None:
        """Release every follower."""
        self.is_closed = True
        for stream in self._streams.values():
            stream.changed.set()
        tasks = [task for task in (self._tail, self._past) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in self._wanted.values():
            _answer(waiting, [])

    @contextlib.contextmanager
    def _join(self, id: UUID) -> Iterator[EventStream]:
        stream = self._streams.setdefault(id, EventStream(id))
        stream.followers += 1
        self.followers += 1
        if not self.is_closed and (self._tail is None or self._tail.done()):
            self._tail = asyncio.get_running_loop().create_task(self._run_tail())
        try:
            yield stream
        finally:
            stream.followers -= 1
            self.followers -= 1
            if stream.followers == 0:
                del self._streams[id]

    # The tail ---------------------------------------------------------------------------------------------------

    async def _run_tail(self) -> None:
        """Runs as long as there are followers."""
        while self._streams:
            pause = await self._attempt(self.look)
            await asyncio.sleep(pause)

    async def look(self) -> bool:
        """Query for new events, if there can be any; returns whether there are more than one query reads."""
        await self._begin()
        ((written,),) = await self._database.ask(SQL["last_written"], {})
        now = self._monotonic()
        if now >= self._sweep_at:
            await self._sweep()
            self._sweep_at = now + _SWEEP_SECONDS
        if written != self._written:
            self._late_seconds = _LOOK_SECONDS_MIN
        elif now >= self._late_at:
            self._late_seconds = min(_SWEEP_SECONDS, _LATE_FACTOR * self._late_seconds)
        else:
            return False
        has_more = await self._fetch()
        if not has_more:  # set at the end, so that a failed query is repeated
            self._written, self._late_at = written, now + self._late_seconds
        return has_more

    async def _begin(self) -> None:
        new = {id: stream for id, stream in self._streams.items() if stream.floor is None}
        if new:
            for id, last in await self._database.ask(SQL["last_of_each"], {"ids": list(new)}):
                new[id].begin(last)

    async def _fetch(self) -> bool:
        """One page for every stream. A stream may be closed and created again meanwhile: then its page is dropped."""
        has_more = False
        streams = [stream for stream in self._streams.values() if stream.floor is not None]
        for start in range(0, len(streams), _STREAMS_PER_FETCH):
            some = streams[start : start + _STREAMS_PER_FETCH]
            for stream, page in zip(some, await self._pages([stream.place for stream in some]), strict=True):
                if page.entries:
                    stream.add(page.entries, _KEPT_BYTES_MAX // max(1, len(self._streams)))
                    has_more |= page.is_full
        return has_more

    async def _sweep(self) -> None:
        """Jobs may disappear without an event: by retention, or when the database is restored from an older backup."""
        streams = dict(self._streams)
        for (id,) in await self._database.ask(SQL["gone"], {"ids": list(streams)}):
            streams[id].end()

    # The past ---------------------------------------------------------------------------------------------------

    def _page(self, place: Place) -> Awaitable[list[Entry]]:
        """Requests for the same page share it until it is read; a later request gets a new one, with newer events."""
        page: asyncio.Future[list[Entry]] = asyncio.get_running_loop().create_future()
        self._wanted.setdefault(place, []).append(page)
        if self._past is None or self._past.done():
            self._past = asyncio.get_running_loop().create_task(self._run_past())
        return page

    async def _run_past(self) -> None:
        while self._wanted:
            pause = await self._attempt(self._read)
            await asyncio.sleep(pause)

    async def _read(self) -> bool:
        asked = {place: self._wanted.pop(place) for place in list(self._wanted)[:_PLACES_PER_READ]}
        try:
            pages = await self._pages(list(asked))
        except BaseException:
            for place, waiting in asked.items():
                self._wanted.setdefault(place, []).extend(waiting)
            raise
        for waiting, page in zip(asked.values(), pages, strict=True):
            _answer(waiting, page.entries)
        return True

    # ------------------------------------------------------------------------------------------------------------

    async def _attempt(self, step: Callable[[], Awaitable[bool]]) -> float:
        """Run a step; returns the pause after it. Followers rely on these steps, so an error must not end the loop."""
        began = time.monotonic()
        try:
            has_more = await step()
        except DatabaseUnavailable as error:
            if not self._is_failing:
                log.warning("events cannot be followed for now: %s", error)
            self._is_failing = True
            return _FAILED_SECONDS
        except Exception:
            log.exception("looking for events failed")
            return _FAILED_SECONDS
        self._is_failing = False
        pause = max(_LOOK_SECONDS_MIN, _LOOK_SHARE * (time.monotonic() - began))
        return 0.0 if has_more else min(_LOOK_SECONDS_MAX, pause)

    async def _pages(self, places: Sequence[Place]) -> list[Page]:
        ids, afters = [place.id for place in places], [place.after for place in places]
        params = {"ids": ids, "afters": afters, "limit": _PAGE, "bytes": _PAGE_BYTES}
        pages = [Page() for _ in places]
        rows = await self._database.ask(SQL["since"], params)
        for n, (turn, is_full, *row) in enumerate(rows, 1):
            if n % _EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
            pages[turn - 1].entries.append(self._entry(as_event(tuple(row))))
            pages[turn - 1].is_full = is_full
        return pages

    def _entry(self, event: JobEvent) -> Entry:
        ends = None if event.status is None else event.status in JOB.terminal
        return Entry(event.id, self._render(event), ends)


def _cut(entries: list[Entry]) -> list[Entry]:
    """As many events as fit in a page."""
    size = 0
    for n, entry in enumerate(entries, 1):
        size += len(entry.frame)
        if size >= _PAGE_BYTES:
            return entries[:n]
    return entries


def _answer(waiting: list[asyncio.Future[list[Entry]]], entries: list[Entry]) -> None:
    for page in waiting:
        if not page.done():  # otherwise the requester has left
            page.set_result(entries)


async def _within(awaited: Awaitable[T], seconds: float) -> T | None:
    try:
        async with asyncio.timeout(seconds):
            return await awaited
    except TimeoutError:
        return None
