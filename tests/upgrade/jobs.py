"""The operations of the fixture: the previous version started jobs of them, and today's workers finish those."""

from __future__ import annotations

import asyncio

from batchwright import Context, Fatal, NewJob, Wait, operation


@operation("note")
async def note(text: str = "") -> str:
    return text


@operation("spoil", max_attempts=1)
async def spoil() -> None:
    raise Fatal("there is no paper", code="no_paper")


@operation("linger")
async def linger(ctx: Context) -> str:
    """Held until its worker is killed; the next one finishes it."""
    if not ctx.after_death:
        ctx.progress(1, 2)
        await asyncio.sleep(600)
    return "after a death"


@operation("family")
async def family() -> Wait:
    """A parent that waits when the worker is killed: one child has ended, one is held, one is not due yet."""
    children = [NewJob(note, {"text": "first"}), NewJob(linger), NewJob(note, {"text": "last"}, delay_seconds=60)]
    return Wait(children, result="all are back")
