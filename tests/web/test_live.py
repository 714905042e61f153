"""A page is loaded once for all its viewers; followers get changes and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from batchwright.errors import DatabaseUnavailable, NotFound
from batchwright.web.live import Gone, Live


class Page:
    """A page that counts how often it was loaded."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {"n": 1}
        self.error: Exception | None = None
        self.loads = 0
        self.draws = 0
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self) -> dict[str, Any]:
        self.loads += 1
        await self.may_load.wait()
        if self.error is not None:
            raise self.error
        return dict(self.value)

    def draw(self, value: Any) -> dict[str, str]:
        self.draws += 1
        return {"live_n": f"<b>{value['n']}</b>", "live_other": "<i>same</i>"}

    @asynccontextmanager
    async def followed(self, live: Live) -> AsyncIterator[Any]:
        news = live.follow("page", self.load, variant=1, draw=self.draw, idle_seconds=5)
        async with aclosing(news):
            yield news


@pytest.fixture
def page() -> Page:
    return Page()


async def test_all_requests_during_a_load_share_it(page):
    live = Live(1.0)
    page.may_load.clear()
    asked = [asyncio.create_task(live.value("page", page.load)) for _ in range(200)]
    await asyncio.sleep(0)
    page.may_load.set()
    assert await asyncio.gather(*asked) == [{"n": 1}] * 200
    assert page.loads == 1


async def test_two_hundred_viewers_cost_one_load_for_each_refresh(page):
    live = Live(0.01)
    feeds = [live.follow("page", page.load, variant=1, draw=page.draw, idle_seconds=5) for _ in range(200)]
    try:
        for n in range(1, 6):
            page.value = {"n": n}
            news = await asyncio.gather(*(anext(feed) for feed in feeds))
            assert all(one["live_n"] == f"<b>{n}</b>" for one in news)
        assert live.viewers == 200
        assert page.draws == 5
        assert page.loads < 50
    finally:
        for feed in feeds:
            await feed.aclose()
    assert live.viewers == 0


async def test_followers_get_only_the_regions_that_changed(page):
    async with page.followed(Live(0.01)) as news:
        assert await anext(news) == {"live_n": "<b>1</b>", "live_other": "<i>same</i>"}
        page.value = {"n": 2}
        assert await anext(news) == {"live_n": "<b>2</b>"}


async def test_a_load_that_fails_is_reported_and_retried(page, caplog):
    async with page.followed(Live(0.01)) as news:
        await anext(news)
        page.error = DatabaseUnavailable("gone")
        assert "does not answer" in await anext(news)
        page.error, page.value = None, {"n": 3}
        assert await anext(news) == {}
        assert await anext(news) == {"live_n": "<b>3</b>"}


async def test_a_removed_object_ends_the_stream_of_its_page(page):
    async with page.followed(Live(0.01)) as news:
        await anext(news)
        page.error = NotFound("gone")
        with pytest.raises(Gone):
            await anext(news)


async def test_after_a_change_by_a_user_the_page_is_loaded_again(page):
    live = Live(60.0)
    await live.value("page", page.load)
    page.value = {"n": 2}
    assert await live.value("page", page.load) == {"n": 1}
    live.forget()
    assert await live.value("page", page.load) == {"n": 2}


async def test_pages_without_viewers_are_forgotten(page):
    now = 0.0
    live = Live(1.0, monotonic=lambda: now)
    for n in range(50):
        await live.value(n, page.load)
    now = 5.0
    await live.value("another", page.load)
    assert len(live._feeds) == 1


async def test_closing_ends_all_followers(page):
    live = Live(60.0)
    async with page.followed(live) as news:
        await anext(news)
        waiting = asyncio.create_task(anext(news, "over"))
        await asyncio.sleep(0)
        live.close()
        assert await asyncio.wait_for(waiting, 2) == "over"
