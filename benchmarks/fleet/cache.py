"""How much a server's prefix cache suffers when a batch is divided among eight workers."""

from contextlib import AsyncExitStack
from typing import Any

from benchmarks.batches.prefix import SYSTEMS, Workload
from benchmarks.batches.stage import MODEL, Ground, fixed
from benchmarks.tools import report

NAME = "cache"
TITLE = "Prefix cache of the server, one batch on several workers"
SECONDS_MAX = 300.0
WORKERS = 8
IN_FLIGHT = 16
SHARE_MIN = 95
SETTINGS = f"""
    {SYSTEMS} system prompts, documents under each, and about seven questions on each document, in random order;
    {WORKERS} workers with {IN_FLIGHT} requests in flight each. The simulator's block cache holds four times the largest
    group for each worker, because each works on groups of its own. The share is cached ÷ (total - distinct) tokens of
    blocks.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    workload = Workload(ground.pick(4_000, 2_000))
    blocks = 4 * workload.largest_group() * WORKERS
    simulator = ("--model", f"{MODEL}:fast", "--cache-blocks", str(blocks), "--time-scale", "1")
    async with ground.stage(*simulator, **fixed(IN_FLIGHT)) as stage, AsyncExitStack() as workers:
        for _ in range(WORKERS):
            await workers.enter_async_context(stage.worker())
        await stage.run(workload.write(stage.folder / "prefix.jsonl", range(len(workload.lines))))
        found = (await stage.stats())["models"][MODEL]["block_tokens"]
    return {"requests": len(workload.lines), "cache_blocks": blocks, "found": found}


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    share = 100 * figures["found"]["cached_share"] if figures else None
    return [report.at_least(f"prefix cache, found of what could be, {WORKERS} workers", SHARE_MIN, share, " %")]


def tables(figures: dict[str, Any]) -> str:
    found = figures["found"]
    row = [*(f"{found[key]:,}" for key in ("total", "distinct", "cached")), f"{100 * found['cached_share']:.1f} %"]
    heading = f"{figures['requests']:,} requests, cache of {figures['cache_blocks']} blocks"
    return report.table([heading, "block tokens", "distinct", "cached", "of possible"], [[f"{WORKERS} workers", *row]])
