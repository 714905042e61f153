"""Operations that log through their own loggers, which do not know Batchwright."""

from __future__ import annotations

import asyncio
import logging
import threading

from batchwright import Context, operation

log = logging.getLogger("somebody.else")
MEETING = threading.Barrier(10)


@operation("chatty.async")
async def talks(ctx: Context, turns: int = 5) -> None:
    for _ in range(turns):
        log.info("I am %s", ctx.job_id)
        await asyncio.sleep(0.001)
    await asyncio.create_task(_helps(ctx))


async def _helps(ctx: Context) -> None:
    log.info("I am %s", ctx.job_id)


@operation("chatty.thread")
def talks_in_a_thread(ctx: Context, turns: int = 5) -> None:
    MEETING.wait(10)  # all ten really run at the same time
    for _ in range(turns):
        log.info("I am %s", ctx.job_id)
    ctx.logger.info("I am %s", ctx.job_id, extra={"pages": 3})


@operation("chatty.cpu", cpu=True)
def talks_in_a_process(ctx: Context) -> None:
    log.info("I am %s", ctx.job_id)


@operation("chatty.fails", max_attempts=1)
async def fails(secret: str) -> None:
    raise ValueError("it broke")


OPERATIONS = [talks, talks_in_a_thread, talks_in_a_process, fails]
