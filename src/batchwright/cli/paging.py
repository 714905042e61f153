"""Lists that are longer than a page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def read_pages(fetch: Callable[[T | None, int], Awaitable[Sequence[T]]], limit: int, *, page: int) -> list[T]:
    """At most `limit`, a page at a time: `fetch` takes the last one that was read, and how many more it may answer."""
    found: list[T] = []
    while len(found) < limit:
        wanted = min(page, limit - len(found))
        some = await fetch(found[-1] if found else None, wanted)
        found += some
        if len(some) < wanted:
            break
    return found
