"""How long it takes to check and plan a file of the largest size."""

import asyncio
from typing import Any

from benchmarks import plan
from benchmarks.batches.stage import Ground
from benchmarks.tools import prefixes, report

NAME = "plan"
TITLE = "Checking and planning 50,000 requests / 200 MB"
SECONDS_MAX = 240.0
REQUESTS = 50_000
SETTINGS = """
    The rounds of `make bench-plan`, each a process of its own, on its file of prompts that share beginnings; medians.
    Clock and processor time are shown side by side, because this machine may be shared.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    file = ground.folder / "plan.jsonl"
    count = ground.pick(REQUESTS, 5_000)
    size = await asyncio.to_thread(prefixes.write, file, count, plan.LINE_BYTES)
    found = await asyncio.to_thread(plan.rounds, file, ground.pick(3, 1))
    file.unlink()
    return {"requests": count, "bytes": size, **found}


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    found = figures or {}
    return [
        report.at_most("check and plan 50,000 / 200 MB, clock", plan.SECONDS_MAX, found.get("seconds"), " s"),
        report.at_most(
            "check and plan 50,000 / 200 MB, processor", plan.SECONDS_MAX, found.get("processor_seconds"), " s"
        ),
    ]


def tables(figures: dict[str, Any]) -> str:
    cells = [figures[name] for name in ("bytes", "seconds", "processor_seconds", "megabytes_above_idle")]
    headings = ["requests", "bytes", "seconds", "processor seconds", "MB above idle"]
    return report.table(headings, [[f"{figures['requests']:,}", *map(report.number, cells)]])
