"""Operations that the tests of the command line run in real worker processes."""

from __future__ import annotations

import asyncio
import time

from batchwright import Context, Done, Fatal, NewJob, Wait, operation


@operation("sample.greet")
async def greet(name: str = "you") -> str:
    return f"hello {name}"


@operation("sample.linger", max_attempts=1)
async def linger(ctx: Context) -> None:
    """Never ends by itself."""
    ctx.emit("linger.began", "it has begun")
    ctx.logger.info("the job has begun")
    await asyncio.Event().wait()


@operation("sample.slow")
async def slow(seconds: float) -> None:
    await asyncio.sleep(seconds)


@operation("sample.block")
async def block(ctx: Context) -> None:
    """Blocks the event loop for a minute."""
    ctx.logger.info("the job has begun")
    time.sleep(60)


@operation("sample.sulk")
def sulk(ctx: Context) -> None:
    """Runs in a thread and ignores requests to stop."""
    ctx.emit("sulk.began")
    time.sleep(60)


@operation("sample.fail")
async def fail() -> None:
    raise Fatal("the paper is out", code="no_paper")


@operation("sample.family")
async def family(ctx: Context, children: int) -> Done | Wait:
    if ctx.joined is None:
        return Wait([NewJob(greet, {"name": str(n)}) for n in range(children)], on_join="resume")
    return Done(ctx.joined.succeeded)
