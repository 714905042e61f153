"""One batch on 1, 2, 4 and 8 workers: requests per second compared with the ideal."""

import statistics
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

from benchmarks.batches.stage import Ground, Stage, fixed, write_lines
from benchmarks.tools import report

NAME = "scale"
TITLE = "One batch on several workers"
SECONDS_MAX = 1_200.0
FLEETS = (1, 2, 4, 8)
SLOTS = 16
ANSWER_SECONDS = 0.5
TOKENS = 130
SMALL = 1_000
SMALL_RUNS = 5
SHARE_MIN = 90
SPEED_UP_MIN = 6
SIMULATOR = ("--profile", "instant", "--any-model", "--decode", str(TOKENS / ANSWER_SECONDS))
SETTINGS = f"""
    Workers with {SLOTS} requests in flight each, answers of {ANSWER_SECONDS} s. Workers are added until there are 1, 2,
    4 and 8. A batch has 1,000 requests for each worker and 1,000 more. One of {SMALL:,} is sent by one worker and
    by eight ({SMALL_RUNS} times, the median counts). The clock runs from the submission of a batch until its files are
    written. The ideal is {SLOTS} ÷ {ANSWER_SECONDS} requests per second and worker, and no time for anything else.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    sizes = FLEETS if not ground.is_quick else (1, 4)
    large: dict[int, dict[str, float]] = {}
    small: dict[int, float] = {}
    async with ground.stage(*SIMULATOR, **fixed(SLOTS)) as stage, AsyncExitStack() as workers:
        for before, size in pairwise((0, *sizes)):
            for _ in range(size - before):
                await workers.enter_async_context(stage.worker())
            await run(stage, 200 * size)
            large[size] = await compare(ground, stage, size, ground.pick(1_000 * (size + 1), 250 * (size + 1)))
            ground.tell(
                f"  {size} workers: {large[size]['rate']:.1f} requests/s, {large[size]['share']:.1f} % of the ideal"
            )
            if size in (sizes[0], sizes[-1]):
                runs = 1 if size == 1 else SMALL_RUNS
                small[size] = statistics.median([await run(stage, SMALL) for _ in range(runs)])
                ground.tell(f"  {size} workers: {SMALL:,} requests in {small[size]:.2f} s")
    return {"large": large, "small": small, "speed_up": small[sizes[0]] / small[sizes[-1]]}


async def compare(ground: Ground, stage: Stage, workers: int, requests: int) -> dict[str, float]:
    cpu, log = ground.server.cpu_seconds() or 0.0, ground.server.wal_bytes()
    seconds = await run(stage, requests)
    rate, ideal = requests / seconds, workers * SLOTS / ANSWER_SECONDS
    return {
        "requests": requests,
        "seconds": seconds,
        "rate": rate,
        "ideal": ideal,
        "share": 100 * rate / ideal,
        "core_percent": 100 * ((ground.server.cpu_seconds() or 0.0) - cpu) / seconds,
        "wal_bytes": (ground.server.wal_bytes() - log) / seconds,
    }


async def run(stage: Stage, requests: int) -> float:
    """Seconds from the submission of a batch to its files."""
    file = write_lines(stage.folder / "scale.jsonl", requests, line_bytes=1024, max_tokens=TOKENS)
    began = time.monotonic()
    await stage.run(file, seconds=600.0)
    return time.monotonic() - began


def kept(figures: dict[str, Any]) -> dict[str, float | None]:
    """`busy_` is what each further worker that has requests adds per second, whatever their number."""
    large = figures["large"]
    few, many = min(large), max(large)
    busy = {
        f"busy_{name}": max(0.0, (large[many][name] - large[few][name]) / (many - few))
        for name in ("core_percent", "wal_bytes")
    }
    shares = {f"share_{size}": one["share"] for size, one in large.items()}
    return {**shares, **busy, "share": large[many]["share"], "speed_up": figures["speed_up"], "workers": many}


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    most = max(figures["large"]) if figures else FLEETS[-1]
    share = figures["large"][most]["share"] if figures else None
    speed_up = figures["speed_up"] if figures else None
    return [
        report.at_least(f"9,000 requests on {most} workers, of the ideal", SHARE_MIN, share, " %"),
        report.at_least(f"{SMALL:,} requests on {most} workers, faster than on one", SPEED_UP_MIN, speed_up, " x"),
    ]


def tables(figures: dict[str, Any]) -> str:
    rows = [
        [
            f"{size} workers",
            f"{one['requests']:,.0f}",
            *(f"{one[name]:.1f}" for name in ("seconds", "rate", "ideal", "share", "core_percent")),
        ]
        for size, one in figures["large"].items()
    ]
    rows += [
        [f"{size} workers", f"{SMALL:,}", f"{seconds:.2f}", f"{SMALL / seconds:.1f}", "", "", ""]
        for size, seconds in figures["small"].items()
    ]
    return report.table(["", "requests", "seconds", "requests/s", "ideal", "% of it", "PostgreSQL, % of a core"], rows)
