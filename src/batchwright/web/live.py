"""The data of open pages, loaded once for all viewers of the same page.

    viewers ──▶ Feed of (template, tenant, address) ── at most one load a second ──▶ the page's `load()`
       ▲                    │
       └── changed regions ─┘

A feed exists while there are requests for it. All requests during a load get that load's value. Followers of a feed are
notified of each new version; viewers with the same scopes share the rendering as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Mapping
from typing import Any

from batchwright.errors import DatabaseUnavailable, NotFound

log = logging.getLogger(__name__)

_FEEDS_MAX = 2_000
_LOAD_SHARE = 4.0
"""A slow load runs less often: loads may take at most a fifth of the time."""
_LOAD_SECONDS_MAX = 10.0

Load = Callable[[], Awaitable[Mapping[str, Any]]]
Fragments = dict[str, str]
Draw = Callable[[Mapping[str, Any]], Fragments]


class Gone(Exception):
    """The object of the page no longer exists."""


class Feed:
    """One page, shared by all its viewers."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.value: Mapping[str, Any] = {}
        self.loaded_at = -float("inf")
        self.version = 0
        self.followers = 0
        self.trouble: str | None = None
        self.is_gone = False
        self.changed = asyncio.Event()
        self.loading = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None
        self.drawn: dict[Hashable, tuple[int, Fragments]] = {}

    def note(self, value: Mapping[str, Any], now: float) -> None:
        if value != self.value or self.trouble or not self.version:
            self.value, self.trouble = value, None
            self.turn()
        self.loaded_at = now

    def turn(self) -> None:
        """Notify followers of a new version."""
        self.version += 1
        self.changed.set()
        self.changed = asyncio.Event()

    def fragments(self, variant: Hashable, draw: Draw) -> Fragments:
        """The regions of the page, rendered once for all viewers of this variant."""
        version, fragments = self.drawn.get(variant, (-1, {}))
        if version != self.version:
            fragments = draw(self.value)
            self.drawn[variant] = (self.version, fragments)
        return fragments


class Live:
    """The feeds of one server process."""

    def __init__(self, refresh_seconds: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._refresh_seconds = refresh_seconds
        self._monotonic = monotonic
        self._feeds: dict[Hashable, Feed] = {}
        self.is_closed = False

    @property
    def viewers(self) -> int:
        """Number of pages that are open with live updates."""
        return sum(feed.followers for feed in self._feeds.values())

    async def value(self, key: Hashable, load: Load) -> Mapping[str, Any]:
        """The page's data: at most `refresh_seconds` old, and loaded once for all concurrent requests."""
        feed = self._feed(key, load)
        async with feed.loading:
            if self._monotonic() - feed.loaded_at >= self._refresh_seconds:
                feed.note(await load(), self._monotonic())
            return feed.value

    def forget(self) -> None:
        """Make the next request load new data, because something has changed."""
        for feed in self._feeds.values():
            feed.loaded_at = -float("inf")

    async def follow(
        self, key: Hashable, load: Load, *, variant: Hashable, draw: Draw, idle_seconds: float
    ) -> AsyncGenerator[Fragments | str | None, None]:
        """The regions that changed; a text when loads fail; None after a quiet period. Raises `Gone` at the end."""
        sent: Fragments = {}
        sent_trouble: str | None = None
        with self._join(key, load) as feed:
            while not self.is_closed:
                changed = feed.changed
                if feed.is_gone:
                    raise Gone
                if feed.trouble != sent_trouble:
                    sent_trouble = feed.trouble
                    yield sent_trouble or {}
                if feed.version and not feed.trouble:
                    drawn = feed.fragments(variant, draw)
                    news = {name: html for name, html in drawn.items() if sent.get(name) != html}
                    sent = drawn
                    if news:
                        yield news
                if changed is feed.changed and not await _within(changed, idle_seconds):
                    yield None

    def close(self) -> None:
        """Release every follower."""
        self.is_closed = True
        for feed in self._feeds.values():
            feed.changed.set()
            if feed.task is not None:
                feed.task.cancel()

    @contextlib.contextmanager
    def _join(self, key: Hashable, load: Load) -> Iterator[Feed]:
        feed = self._feed(key, load)
        feed.followers += 1
        if feed.task is None or feed.task.done():
            feed.task = asyncio.get_running_loop().create_task(self._refresh(key, feed))
        try:
            yield feed
        finally:
            feed.followers -= 1

    def _feed(self, key: Hashable, load: Load) -> Feed:
        feed = self._feeds.get(key)
        if feed is None or feed.is_gone:
            self._drop_old()
            feed = self._feeds[key] = Feed(load)
        return feed

    def _drop_old(self) -> None:
        """Drop the pages that have no viewers, and the oldest ones beyond the maximum."""
        now = self._monotonic()
        idle = [key for key, feed in self._feeds.items() if not feed.followers and not feed.loading.locked()]
        surplus = len(self._feeds) - _FEEDS_MAX
        for n, key in enumerate(idle):
            if n < surplus or now - self._feeds[key].loaded_at >= self._refresh_seconds:
                del self._feeds[key]

    async def _refresh(self, key: Hashable, feed: Feed) -> None:
        """Runs as long as the feed has followers."""
        while feed.followers and not self.is_closed:
            began = self._monotonic()
            await self._attempt(key, feed)
            if feed.is_gone:
                return
            took = self._monotonic() - began
            await asyncio.sleep(min(max(self._refresh_seconds, _LOAD_SHARE * took), _LOAD_SECONDS_MAX))

    async def _attempt(self, key: Hashable, feed: Feed) -> None:
        """Followers rely on the next load, so a failed load must not end the loop."""
        try:
            await self.value(key, feed.load)
        except NotFound:
            feed.is_gone = True
            feed.turn()
        except DatabaseUnavailable as error:
            self._note_trouble(feed, "The database does not answer. The page updates again when it does.")
            log.warning("a page cannot be updated for now: %s", error)
        except Exception:
            self._note_trouble(feed, "This page could not be updated; the server's log says why.")
            log.exception("updating a page failed")

    def _note_trouble(self, feed: Feed, words: str) -> None:
        if feed.trouble != words:
            feed.trouble = words
            feed.turn()


async def _within(changed: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await changed.wait()
    except TimeoutError:
        return False
