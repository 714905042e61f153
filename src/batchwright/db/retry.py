"""Repeats calls after a deadlock, or when the database did not answer."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from batchwright.errors import DatabaseUnavailable, Deadlock

P = ParamSpec("P")
T = TypeVar("T")

_DEADLOCKS_MAX = 10
_PAUSE_SECONDS_MIN = 0.05
_PAUSE_SECONDS_FIRST = 0.1
_PAUSE_SECONDS_MAX = 1.0


def retry_deadlocks(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Run a verb again after a deadlock: the database has rolled its whole transaction back, so nothing happens twice.

    Within the caller's transaction (`session=`) only the caller can do that.
    """

    @functools.wraps(verb)
    async def retry(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(_DEADLOCKS_MAX - 1):
            try:
                return await verb(*args, **kwargs)
            except Deadlock:
                if kwargs.get("session") is not None:
                    raise
        return await verb(*args, **kwargs)

    return retry


async def retry_unavailable(
    call: Callable[[], Awaitable[T]],
    *,
    tries_max: int | None = None,
    on_failure: Callable[[DatabaseUnavailable], object] = lambda error: None,
) -> T:
    """Repeat a call until the database answers, at most `tries_max` times.

    The answer to an earlier try may have been lost, so only idempotent calls are safe here.
    """
    tries, pause = 1, _PAUSE_SECONDS_FIRST
    while True:
        try:
            return await call()
        except DatabaseUnavailable as error:
            if tries == tries_max:
                raise
            on_failure(error)
        await asyncio.sleep(random.uniform(_PAUSE_SECONDS_MIN, pause))
        tries, pause = tries + 1, min(_PAUSE_SECONDS_MAX, 2 * pause)
