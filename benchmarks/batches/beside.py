"""How much a large batch slows down a small one of the same tenant."""

import asyncio
import statistics
from datetime import datetime
from typing import Any

from batchwright.batches.store import Batch
from benchmarks.batches.stage import MODEL, Ground, Stage, fixed, write_lines
from benchmarks.tools import report

NAME = "beside"
TITLE = "50 lines beside 50,000, same tenant, limit 10"
SECONDS_MAX = 240.0
FEW = 50
MANY = 50_000
LEAD = 256
LIMIT = 10
RATIO_MAX = 1.2
SIMULATOR = (
    *("--model", f"{MODEL}:fast", "--prefill", "0", "--decode", "800", "--decode-total", "0"),
    *("--cache-blocks", "0", "--output-tokens", "128", "--output-sigma", "0.6"),
)
SETTINGS = f"""
    Two stages, each with a worker of limit {LIMIT} and a simulator whose answers take lognormal times (median 0.16 s,
    sigma 0.6; the same request takes the same time on both). On one a batch of {MANY:,} requests runs all the time and
    had its first {LEAD} answers; on both, at the same moment, {FEW} lines are submitted, other ones in every run. A run
    is measured from created_at to completed_at in the row of the small batch, and from in_progress_at to
    finalizing_at, which leaves out plan, files and the way to the worker; no polling is in it.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    runs = []
    async with (
        ground.stage(*SIMULATOR, **fixed(LIMIT)) as quiet,
        ground.stage(*SIMULATOR, **fixed(LIMIT)) as busy,
        quiet.worker(),
        busy.worker(),
    ):
        large = write_lines(busy.folder / "many.jsonl", MANY, line_bytes=300, max_tokens=None, mark="many")
        many = await busy.submit(large)
        await busy.until(many.id, lambda batch: batch.completed >= LEAD, 90)
        await small(quiet, "warm-up")
        for number in range(ground.pick(20, 5)):
            alone, beside = await asyncio.gather(small(quiet, f"few-{number}"), small(busy, f"few-{number}"))
            runs.append({"alone": alone, "beside": beside})
    return {"runs": runs}


async def small(stage: Stage, mark: str) -> dict[str, float]:
    file = write_lines(stage.folder / f"{mark}.jsonl", FEW, line_bytes=300, max_tokens=None, mark=mark)
    return times(await stage.run(file, 60))


def times(batch: Batch) -> dict[str, float]:
    return {
        "whole": seconds(batch.created_at, batch.completed_at),
        "sending": seconds(batch.in_progress_at, batch.finalizing_at),
    }


def seconds(start: datetime | None, end: datetime | None) -> float:
    assert start is not None
    assert end is not None
    return (end - start).total_seconds()


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    runs = figures["runs"] if figures else []
    name = f"{FEW} lines beside {MANY:,} ÷ alone, submitted to completed"
    return [report.at_most(name, RATIO_MAX, ratio(runs, "whole"))]


def ratio(runs: list[dict[str, Any]], what: str) -> float | None:
    """Of the medians."""
    if not runs:
        return None
    beside, alone = (statistics.median(run[how][what] for run in runs) for how in ("beside", "alone"))
    return beside / alone


def tables(figures: dict[str, Any]) -> str:
    runs = figures["runs"]
    rows = []
    for what, text in (("whole", "submitted to completed"), ("sending", "in_progress to finalizing")):
        medians = [statistics.median(run[how][what] for run in runs) for how in ("alone", "beside")]
        paired = statistics.median(run["beside"][what] / run["alone"][what] for run in runs)
        rows.append([text, *(f"{value:.2f} s" for value in medians), f"{medians[1] / medians[0]:.2f}", f"{paired:.2f}"])
    return report.table(
        [f"median of {len(runs)} runs", "alone", "beside", "ratio of medians", "median of ratios"], rows
    )
