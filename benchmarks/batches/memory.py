"""How much memory a worker takes for a small batch and for a large one."""

import itertools
from pathlib import Path
from typing import Any

import psutil

from batchwright.batches.store import Batch
from benchmarks.batches.stage import MODEL, Ground, Stage, Track, tracked, write_lines
from benchmarks.tools import report

NAME = "memory"
TITLE = "Memory of the worker, 512 requests in flight, 1 kB answers"
SECONDS_MAX = 300.0
IN_FLIGHT = 512
LARGE = 50_000
LINE_BYTES = 4180
MEGABYTES_MAX = 120
RATIO_MAX = 1.1
SMALL = 5_000
SIMULATOR = (
    *("--model", f"{MODEL}:fast", "--prefill", "0", "--decode", "325", "--decode-total", "0"),
    *("--max-running", "1024", "--cache-blocks", "0"),
)
SETTINGS = f"""
    A fresh worker process for each batch. Idle is VmRSS after a first batch of 200 requests, the peak is VmHWM after
    the end: {IN_FLIGHT} requests in flight (each takes about 0.4 s) and result files are all in it; a large file is
    planned in a process of its own. The parts beside it are read every 20 ms. Lines have {LINE_BYTES} bytes and share
    nothing.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    settings = {"inference_concurrency": IN_FLIGHT, "inference_model_concurrency_start": IN_FLIGHT}
    found = []
    async with ground.stage(*SIMULATOR, **settings) as stage:
        for count in (ground.pick(SMALL, 1_000), ground.pick(LARGE, 10_000)):
            found.append(await one(stage, count))
            ground.tell(f"  {count:,} requests: {found[-1]['above_idle']:.0f} MB above idle")
    return {"batches": found}


async def one(stage: Stage, count: int) -> dict[str, float]:
    file = write_lines(stage.folder / f"{count}.jsonl", count, line_bytes=LINE_BYTES)
    stage.simulator.reset()
    async with stage.worker() as worker:
        await stage.warm_up(LINE_BYTES)
        idle = megabytes(worker, "VmRSS")
        with tracked(lambda: megabytes(worker, "VmRSS")) as (resident,):
            batch = await stage.run(file)
        peak = megabytes(worker, "VmHWM")
    seen = await stage.stats()
    assert batch.completed_at is not None
    return {
        "requests": count,
        "file_megabytes": file.stat().st_size / 1e6,
        "idle": idle,
        "peak": peak,
        "above_idle": peak - idle,
        **{name: most - idle for name, most in by_phase(batch, resident).items()},
        "in_flight_max": seen["in_flight_max"],
        "seconds": (batch.completed_at - batch.created_at).total_seconds(),
    }


def by_phase(batch: Batch, resident: Track) -> dict[str, float]:
    """Peak memory while the batch was planned, while it was sent, and while its files were written."""
    marks = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    moments = [mark.timestamp() for mark in marks if mark is not None]
    seen = list(zip(resident.times, resident.values, strict=True))
    return {
        name: max((value for at, value in seen if start <= at <= end), default=resident.at(end))
        for name, (start, end) in zip(("plan", "sending", "files"), itertools.pairwise(moments), strict=True)
    }


def megabytes(process: psutil.Process, name: str) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(row.split()[1]) for row in status.splitlines() if row.startswith(name)) / 1024


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    small, large = figures["batches"] if figures else (None, None)
    ratio = large["peak"] / small["peak"] if small and large else None
    return [
        report.at_most(
            f"memory above idle, {LARGE:,} requests / 200 MB", MEGABYTES_MAX, large and large["above_idle"], " MB"
        ),
        report.at_most(f"peak memory, {LARGE:,} ÷ {SMALL:,} requests", RATIO_MAX, ratio),
    ]


def tables(figures: dict[str, Any]) -> str:
    columns = ("file_megabytes", "idle", "peak", "above_idle", "plan", "sending", "files", "in_flight_max", "seconds")
    rows = [[f"{one['requests']:,}", *(report.number(one[name]) for name in columns)] for one in figures["batches"]]
    headings = ["requests", "file MB", "idle MB", "peak MB", "above idle", "planning", "sending", "writing files"]
    return report.table([*headings, "in flight", "seconds"], rows)
