"""What the death of a worker costs: time until another worker resumes, and requests that are resent."""

import asyncio
import time
from collections import Counter
from typing import Any

import orjson

from batchwright.batches.store import SHARD, Batch
from benchmarks.batches.stage import MODEL, Ground, Stage, fixed, write_lines
from benchmarks.tools import report
from benchmarks.tools.measure import percentile

NAME = "crash"
TITLE = "kill -9 of the worker that has the shard, another one idle"
SECONDS_MAX = 240.0
IN_FLIGHT = 32
LEASE_SECONDS = 3.0
REQUESTS = 1_000
SLACK_SECONDS = 2.0
SIMULATOR = ("--model", f"{MODEL}:fast", "--decode", "520", "--decode-total", "0", "--cache-blocks", "0")
SETTINGS = f"""
    A batch of one shard with {REQUESTS:,} requests, {IN_FLIGHT} in flight, lease {LEASE_SECONDS:g} s. Two
    workers wait for it, one gets it; once 300 requests are answered that one gets SIGKILL. Seconds run from
    the kill to the next answer of the simulator, read every 10 ms. Lost and doubled are custom_ids in the result
    files, asked again is what the simulator got more than once.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    runs = []
    for _ in range(ground.pick(5, 1)):
        async with ground.stage(*SIMULATOR, **fixed(IN_FLIGHT), engine_lease_seconds=LEASE_SECONDS) as stage:
            runs.append(await one(stage))
        ground.tell(f"  {runs[-1]}")
    return {"runs": runs}


async def one(stage: Stage) -> dict[str, float]:
    file = write_lines(stage.folder / "crash.jsonl", REQUESTS, line_bytes=600)
    async with stage.worker() as one_worker, stage.worker() as another:
        batch = await stage.submit(file)
        await answers(stage, 300)
        pid = await shard_holder(stage)
        in_flight = (await stage.stats())["in_flight"]
        next(worker for worker in (one_worker, another) if worker.pid == pid).kill()
        killed_at = time.time()
        await asyncio.sleep(0.2)
        before = answered(await stage.stats())
        seconds = await answers(stage, before + 1) - killed_at
        ended = await stage.ended(batch.id, 60)
    asked = await asyncio.to_thread(stage.simulator.asked, by="body")
    return {
        "seconds": seconds,
        "in_flight": max(in_flight, IN_FLIGHT),
        "asked_again": asked["repeated"],
        **await accounts(stage, ended),
    }


async def shard_holder(stage: Stage) -> int:
    """The process that runs the shard: its pid is part of a worker's name."""
    statement = "SELECT locked_by FROM batchwright.job WHERE job_type = %(type)s AND status = 'RUNNING'"
    ((name,),) = await stage.sql(statement, type=SHARD)
    return int(name.split(":")[-2])


async def answers(stage: Stage, count: int) -> float:
    """When the simulator had sent this number of answers."""
    async with asyncio.timeout(60):
        while answered(await stage.stats()) < count:
            await asyncio.sleep(0.01)
    return time.time()


def answered(stats: dict[str, Any]) -> int:
    return int(stats["answered"].get("200", 0))


async def accounts(stage: Stage, batch: Batch) -> dict[str, int]:
    times: Counter[str] = Counter()
    for id in (batch.output_file_id, batch.error_file_id):
        if id is not None:
            file = await stage.files.get(id, tenant=None)
            data = b"".join([part async for part in stage.files.content(file)])
            times.update(orjson.loads(line)["custom_id"] for line in data.splitlines())
    return {"lost": REQUESTS - len(times), "doubled": sum(times.values()) - len(times)}


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    runs = figures["runs"] if figures else []
    worst = {name: max((run[name] for run in runs), default=None) for name in ("seconds", "lost", "doubled")}
    again = max((run["asked_again"] - run["in_flight"] for run in runs), default=None)
    return [
        report.at_most(
            "kill -9: next answer of the shard, worst", LEASE_SECONDS + SLACK_SECONDS, worst["seconds"], " s"
        ),
        report.at_most("kill -9: answers lost", 0, worst["lost"]),
        report.at_most("kill -9: answers doubled", 0, worst["doubled"]),
        report.at_most("kill -9: asked again beyond those in flight", 0, again),
    ]


def tables(figures: dict[str, Any]) -> str:
    columns = ("seconds", "in_flight", "asked_again", "lost", "doubled")
    rows = []
    for name, percent in (("median", 50), ("worst", 100)):
        cells = [percentile([run[column] for run in figures["runs"]], percent) for column in columns]
        rows.append([f"{name} of {len(figures['runs'])} runs", *map(report.number, cells)])
    return report.table(["after the kill", "seconds", "in flight", "asked again", "lost", "doubled"], rows)
