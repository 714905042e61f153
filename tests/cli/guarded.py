"""Operations that break their own worker, as a bug in its accounts of slots would."""

from __future__ import annotations

import asyncio
from pathlib import Path

from batchwright import Context, operation
from batchwright.batches.send.dispatch import Dispatcher


@operation("guarded.hold", max_attempts=1)
async def hold(ctx: Context) -> None:
    """Goes on until it is interrupted; from then on not before somebody says so."""
    ctx.emit("hold.began")
    try:
        await asyncio.Event().wait()
    finally:
        while not Path("go").exists():
            await asyncio.sleep(0.02)


@operation("guarded.trip")
async def trip(ctx: Context) -> None:
    """Gives a slot back that nobody has taken."""
    ctx.service(Dispatcher).limits.total.give(1)
