"""The operations of `batchwright demo`: a parent, its children, and a step that follows."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from batchwright.engine.context import Context
from batchwright.engine.jobs import NewJob
from batchwright.engine.outcomes import Done, Wait
from batchwright.operations.decorator import operation

SECONDS_MIN = 0.3
SECONDS_MAX = 0.9


@operation("demo.plan")
async def plan(ctx: Context, children: int) -> Done | Wait:
    """Fan out; when the last child has ended, add up the results."""
    if ctx.joined is None:
        ctx.emit("demo.planned", f"{children} children, and a report when all are done")
        return Wait([NewJob(work, {"number": n}) for n in range(children)], on_join="resume")
    total = 0
    async for child in ctx.joined:
        total += child.result
    ctx.emit("demo.collected", f"{ctx.joined.succeeded} results add up to {total}")
    return Done(total, then=[NewJob(report, {"total": total})])


@operation("demo.work")
async def work(number: int) -> Done:
    """Work for half a second, and write a row in the same commit as the job's success."""
    await asyncio.sleep(random.uniform(SECONDS_MIN, SECONDS_MAX))

    async def write(connection: Any) -> None:
        await connection.execute("INSERT INTO demo.effect (number) VALUES (%s)", [number])

    return Done(number, write=write)


@operation("demo.report")
async def report(total: int) -> str:
    """The step that runs once, after the parent."""
    return f"the total is {total}"
