"""Lists that are longer than a page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def read_pages(fetch: Callable[[T | None, int], Awaitable[Sequence[T]]], limit: int, *, page: int) -> list[T]:
    """Read at most `limit` items page by page; `fetch` takes the last item so far, and how many to return at most."""
    found: list[T] = []
    while len(found) < limit:
        wanted = min(page, limit - len(found))
        some = await fetch(found[-1] if found else None, wanted)
        found += some
        if len(some) < wanted:
            break
    return found
