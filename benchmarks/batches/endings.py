"""How soon a batch that was cancelled, or whose window is over, stops sending and ends."""

import asyncio
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from batchwright.batches.store import Batch
from benchmarks.batches.stage import MODEL, Ground, Stage, write_lines
from benchmarks.tools import report
from benchmarks.tools.measure import percentile

NAME = "endings"
TITLE = "Cancel and expiry, local store"
SECONDS_MAX = 330.0
ANSWERED = 1_400
ANSWER_TOKENS = 5_000
BYTES_MAX = 50_000_000
CANCEL_QUIET_MAX = 1.0
CANCEL_END_MAX = 5.0
EXPIRY_QUIET_MAX = 0.2
EXPIRY_ABORTED_MAX = 1.0
EXPIRY_END_MAX = 2.0
IN_FLIGHT = 200
WINDOW_SECONDS = 4.0
SIMULATOR = (
    *("--model", f"{MODEL}:fast", "--prefill", "0", "--decode", "10000", "--decode-total", "0"),
    *("--max-running", "1024", "--cache-blocks", "0"),
)
SETTINGS = f"""
    One worker, {IN_FLIGHT} requests in flight of 0.5 s each, answers of 20 kB, many requests left to send. Cancel: when
    {ANSWERED:,} answers are registered; from just before the call to the last request that reached the simulator, and
    from the last answer in flight to cancelled_at. Expiry: the window is set to {WINDOW_SECONDS:g} s in the row,
    which users cannot (theirs has at least a minute); from expires_at to the last request that reached the simulator,
    the last connection that was closed on it, and expired_at. All by the stamps of the simulator and of the row,
    without polling.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    settings = {"inference_concurrency": IN_FLIGHT, "inference_model_concurrency_start": IN_FLIGHT}
    async with ground.stage(*SIMULATOR, **settings) as stage, stage.worker():
        await stage.warm_up()
        file = write_lines(stage.folder / "long.jsonl", 10_000, line_bytes=600, max_tokens=ANSWER_TOKENS)
        cancelled = [await cancel(stage, file) for _ in range(ground.pick(12, 2))]
        ground.tell(f"  cancelled: {cancelled[-1]}")
        expired = [await expire(stage, file) for _ in range(ground.pick(10, 2))]
        ground.tell(f"  expired: {expired[-1]}")
    return {"cancelled": cancelled, "expired": expired}


async def cancel(stage: Stage, file: Path) -> dict[str, float]:
    stage.simulator.reset()
    batch = await stage.submit(file)
    await stage.until(batch.id, lambda found: found.completed >= ANSWERED, 60)
    asked_at = time.time()
    await stage.batches.cancel(batch.id, tenant=None)
    call_seconds = time.time() - asked_at
    ended = await stage.ended(batch.id, 60)
    seen = await stage.stats()
    return {
        "call": call_seconds,
        "quiet": seen["last_received_at"] - asked_at,
        "end": stamp(ended.cancelled_at) - max(seen["last_answered_at"], seen["last_aborted_at"] or 0.0),
        "aborted": seen["aborted"]["total"],
        "bytes": await output_bytes(stage, ended),
    }


async def expire(stage: Stage, file: Path) -> dict[str, float]:
    stage.simulator.reset()
    batch = await stage.submit(file, seconds=WINDOW_SECONDS)
    ended = await stage.ended(batch.id, 60)
    await asyncio.sleep(0.1)
    seen = await stage.stats()
    due = stamp(ended.expires_at)
    return {
        "quiet": seen["last_received_at"] - due,
        "gone": max(seen["last_aborted_at"] or 0.0, seen["last_answered_at"] or 0.0) - due,
        "end": stamp(ended.expired_at) - due,
        "aborted": seen["aborted"]["total"],
        "bytes": await output_bytes(stage, ended),
    }


def stamp(moment: datetime | None) -> float:
    if moment is None:
        raise RuntimeError("the batch did not end as expected")
    return moment.timestamp()


async def output_bytes(stage: Stage, batch: Batch) -> int:
    ids = [id for id in (batch.output_file_id, batch.error_file_id) if id is not None]
    files = [await stage.files.get(id, tenant=None) for id in ids]
    total = sum(file.bytes for file in files)
    if total > BYTES_MAX:
        raise RuntimeError(f"results of {total:,} bytes are more than the goal covers")
    return total


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    def p95(how: str, name: str) -> float | None:
        return percentile([run[name] for run in figures[how]], 95) if figures else None

    return [
        report.at_most("cancel: nothing new is sent, p95", CANCEL_QUIET_MAX, p95("cancelled", "quiet"), " s"),
        report.at_most("cancel: terminal after the last answer, p95", CANCEL_END_MAX, p95("cancelled", "end"), " s"),
        report.at_most("expiry: dispatch stops, p95", EXPIRY_QUIET_MAX, p95("expired", "quiet"), " s"),
        report.at_most("expiry: requests in flight gone, p95", EXPIRY_ABORTED_MAX, p95("expired", "gone"), " s"),
        report.at_most("expiry: terminal, p95", EXPIRY_END_MAX, p95("expired", "end"), " s"),
    ]


def tables(figures: dict[str, Any]) -> str:
    texts = {
        ("cancelled", "call"): "cancel: the call itself",
        ("cancelled", "quiet"): "cancel: until the last new request",
        ("cancelled", "end"): "cancel: from the last in flight to cancelled",
        ("expired", "quiet"): "expiry: until the last new request",
        ("expired", "gone"): "expiry: until nothing is in flight",
        ("expired", "end"): "expiry: until expired",
    }
    rows = []
    for (how, name), text in texts.items():
        values = [run[name] for run in figures[how]]
        rows.append([text, str(len(values)), *(f"{percentile(values, percent):.3f}" for percent in (50, 95, 100))])
    sizes = [run["bytes"] / 1e6 for how in ("cancelled", "expired") for run in figures[how]]
    table = report.table(["seconds", "runs", "p50", "p95", "max"], rows)
    return f"{table}\n\nresult files: {min(sizes):.0f} to {max(sizes):.0f} MB"
