"""The operations of the chaos run: one of every kind, each leaving a trace that the verdict can count."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from batchwright import Context, Done, Fatal, NewJob, RetryLater, Snooze, Transient, Wait, operation
from batchwright.engine.outcomes import Outcome

BULK = 8
"""The priority of the most frequent jobs: rescued jobs must not wait behind them."""
EFFECTS = """
CREATE SCHEMA chaos;
CREATE TABLE chaos.effect (job_id uuid NOT NULL, claim bigint NOT NULL)
"""
"""No unique index on purpose: a doubled effect must be visible, not refused."""


@operation("chaos.plain")
async def plain(ctx: Context, seconds: float) -> float:
    ctx.emit("chaos.plain.begun", f"sleeps {seconds:.3f} s")
    await asyncio.sleep(seconds)
    return seconds


@operation("chaos.once", max_attempts=1)
async def once(seconds: float) -> float:
    """May be abandoned when its worker dies; must never start a second time."""
    await asyncio.sleep(seconds)
    return seconds


@operation("chaos.thread")
def thread(ctx: Context, seconds: float) -> float:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ctx.cancelled:
        time.sleep(0.02)
    return seconds


@operation("chaos.cpu", cpu=True)
def cpu(ctx: Context, rounds: int) -> int:
    total = 0
    for part in range(rounds):
        total += sum(n * n for n in range(20_000))
        ctx.progress(part + 1, rounds)
    return total


@operation("chaos.write")
async def write(ctx: Context, seconds: float) -> Done:
    await asyncio.sleep(seconds)
    return Done(seconds, write=_effect(ctx))


@operation("chaos.chain")
async def chain(ctx: Context, chain: str, step: int, steps: int, seconds: float) -> Done:
    """Every link but the last enqueues the next one, and every second link has an effect as well."""
    await asyncio.sleep(seconds)
    following = {"chain": chain, "step": step + 1, "steps": steps, "seconds": seconds}
    then = [NewJob("chaos.chain", following)] if step < steps else []
    return Done(step, then=then, write=_effect(ctx) if has_effect(step) else None)


def has_effect(step: int) -> bool:
    return step % 2 == 0


@operation("chaos.snooze")
async def snooze(ctx: Context, times: int, seconds: float) -> Snooze | int:
    """Snoozes exactly this number of times; its own progress counts them."""
    done = ctx.progress_current or 0
    await asyncio.sleep(0.02)
    if done < times:
        return Snooze(seconds, f"snooze {done + 1} of {times}", progress=(done + 1, times))
    return done


@operation("chaos.later")
async def later(probability: float) -> str:
    if random.random() < probability:
        raise RetryLater("the resource is busy", delay_seconds=random.uniform(0.05, 0.4))
    return "got it"


@operation("chaos.flaky", max_attempts=4, backoff_seconds=0.2)
async def flaky(ctx: Context, failures: int) -> int:
    """Fails in its first attempts; a rescue, release or snooze gives the attempt back, so the count is exact."""
    await asyncio.sleep(0.02)
    if ctx.attempt <= failures:
        raise Transient(f"attempt {ctx.attempt} of {failures} that fail", code="flaky")
    return ctx.attempt


@operation("chaos.keyed")
async def keyed(ctx: Context, seconds: float, snoozes: bool = False) -> Snooze | float:
    if snoozes and not ctx.progress_current:
        return Snooze(0.1, "keeps its key meanwhile", progress=(1, 2))
    ctx.progress(2, 2)
    await asyncio.sleep(seconds)
    return seconds


@operation("chaos.leaf")
async def leaf(ctx: Context, index: int, seconds: float, fails: bool = False, writes: bool = False) -> Done:
    await asyncio.sleep(seconds)
    if fails:
        raise Fatal("this leaf was made to fail", code="made_to_fail")
    return Done(index, write=_effect(ctx) if writes else None)


@operation("chaos.parent")
async def parent(
    ctx: Context,
    width: int,
    levels: int = 1,
    index: int = 0,
    seconds: float = 0.02,
    rounds: int = 1,
    on_join: Literal["close", "resume"] = "close",
    allow_failures: int | bool = 0,
    failures: int = 0,
) -> Outcome | dict[str, int]:
    """Has `width` children in each round; with more than one level those are parents too."""
    joined = ctx.joined
    if joined is not None and (joined.round >= rounds or ctx.deadline_passed):
        seen = [child.payload["index"] async for child in joined]
        return {"round": joined.round, "succeeded": joined.succeeded, "total": joined.total, "distinct": len(set(seen))}
    common = {"seconds": seconds}
    if levels > 1:
        below = {"width": width, "levels": levels - 1, "on_join": on_join, **common}
        children = [NewJob("chaos.parent", {**below, "index": n}) for n in range(width)]
    else:
        leaves = [{**common, "index": n, "fails": n < failures, "writes": n % 5 == 4} for n in range(width)]
        children = [NewJob("chaos.leaf", leaf) for leaf in leaves]
    return Wait(children, result={"children": width}, on_join=on_join, allow_failures=allow_failures)


@operation("chaos.poison")
async def poison() -> None:
    """Kills its whole process, every time."""
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def _effect(ctx: Context) -> Callable[[Any], Awaitable[None]]:
    async def insert(connection: Any) -> None:
        await connection.execute(
            "INSERT INTO chaos.effect (job_id, claim) VALUES (%s, %s)", [ctx.job_id, ctx._claim.claim]
        )

    return insert


OPERATIONS = (plain, once, thread, cpu, write, chain, snooze, later, flaky, keyed, leaf, parent, poison)
