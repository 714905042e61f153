"""Operations that break their own worker, like a bug in its counts of slots."""

from __future__ import annotations

import asyncio
from pathlib import Path

from batchwright import Context, operation
from batchwright.batches.send.dispatch import Dispatcher


@operation("guarded.hold", max_attempts=1)
async def hold(ctx: Context) -> None:
    """Runs until it is interrupted, and then until it is released."""
    ctx.emit("hold.began")
    try:
        await asyncio.Event().wait()
    finally:
        while not Path("go").exists():
            await asyncio.sleep(0.02)


@operation("guarded.trip")
async def trip(ctx: Context) -> None:
    """Gives back a slot that was never taken."""
    ctx.service(Dispatcher).limits.total.give(1)
