"""What a request costs: CPU time and requests per second, compared with sending it without Batchwright."""

import asyncio
import itertools
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from batchwright.batches.store import Batch
from benchmarks.batches import senders, traffic
from benchmarks.batches.stage import WARM_UP_REQUESTS, Ground, Stage, spent, tracked, write_lines
from benchmarks.tools import measure as machine
from benchmarks.tools import report

NAME = "cost"
TITLE = "CPU per request, 100 connections, no TLS, 4 kB in, 1 kB out"
SECONDS_MAX = 900.0
CONNECTIONS = 100
OF_OPENAI_MAX = 1 / 20
OF_BARE_MAX = 1.6
SENDER_SECONDS_MAX = 120.0
UNEVEN = 1.5
"""Two figures are not compared if the machine was this many times slower for one of them than for the other."""
SETTINGS = f"""
    Every contestant is a process of its own, on uvloop, warmed up with {WARM_UP_REQUESTS} requests, {CONNECTIONS} in
    flight; rounds are interleaved, figures are medians of rounds, ratios are medians of the ratios of rounds, without
    those in which a calibration loop took more than {UNEVEN} times as long beside one of the two as beside the other.
    Batchwright is `batchwright worker` with concurrency {CONNECTIONS} and everything else at its defaults (journal
    with fsync, checkpoints, metrics); its CPU is that of the worker process between in_progress_at and finalizing_at,
    planning and writing the files are separate. The bare loop sends with the same client, settings and event loop,
    splits lines with the same function, parses answers, writes the same lines, and does not fsync. openai and aiohttp
    have a task per line and a semaphore. The model server is the simulator, which answers at once.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    counts = {
        "batchwright": ground.pick(20_000, 3_000),
        "bare": ground.pick(20_000, 3_000),
        "aiohttp": ground.pick(3_000, 1_500),
        "openai": ground.pick(1_000, 300),
    }
    settings = {"inference_concurrency": CONNECTIONS, "inference_model_concurrency_start": CONNECTIONS}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in counts}
    async with ground.stage(**settings) as stage:
        warm_up = write_lines(stage.folder / "warm-up.jsonl", WARM_UP_REQUESTS)
        files = {name: write_lines(stage.folder / f"{name}.jsonl", count) for name, count in counts.items()}
        for number in range(ground.pick(9, 3)):
            for name in random.sample(list(counts), k=len(counts)):
                found = await one(ground, stage, name, files[name], warm_up, counts[name])
                rounds[name].append(found)
                ground.tell(f"  round {number + 1}: {name}, {found['cpu']:.0f} µs, {found['rate']:,.0f}/s")
    return {"counts": counts, "rounds": rounds, "versions": senders.versions()}


async def one(ground: Ground, stage: Stage, name: str, file: Path, warm_up: Path, count: int) -> dict[str, float]:
    before, loop = await stage.stats(), machine.calibrate()
    if name == "batchwright":
        found = await ours(ground, stage, file, count)
    else:
        found = await theirs(stage, name, file, warm_up, count)
    after = await stage.stats()
    if after["received"] - before["received"] != count + WARM_UP_REQUESTS:
        raise RuntimeError(f"{name} sent {after['received'] - before['received']:,} requests instead of {count:,}")
    simulator = (after["cpu_seconds"] - before["cpu_seconds"]) / (count + WARM_UP_REQUESTS) * 1e6
    return {**found, "simulator": simulator, "loop": max(loop, machine.calibrate())}


async def theirs(
    stage: Stage, name: str, file: Path, warm_up: Path, count: int, connections: int = CONNECTIONS
) -> dict[str, float]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.batches.senders", name, "--url", stage.simulator.url),
        *("--file", str(file), "--output", str(stage.folder / "output.jsonl"), "--warm-up", str(warm_up)),
        *("--connections", str(connections)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SENDER_SECONDS_MAX):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    found = json.loads(said)
    if found["lines"] != count:
        raise RuntimeError(f"{name} wrote {found['lines']:,} lines for {count:,} requests")
    return {"cpu": found["cpu_seconds"] / count * 1e6, "rate": count / found["seconds"]}


async def ours(ground: Ground, stage: Stage, file: Path, count: int) -> dict[str, float]:
    async with stage.worker() as worker:
        await stage.warm_up()
        before = traffic.read(ground, stage, worker)
        with tracked(spent(worker), lambda: ground.server.cpu_seconds() or 0.0) as (own, postgres):
            batch = await stage.run(file)
        moved = traffic.since(before, traffic.read(ground, stage, worker), count)
    of_postgres = phases(batch, postgres, count)
    everything = sum(of_postgres[phase] for phase in ("plan", "cpu", "files"))
    return {**phases(batch, own, count), "postgres": of_postgres["cpu"], "postgres_all": everything, **moved}


def phases(batch: Batch, track: Any, count: int) -> dict[str, float]:
    """Microseconds per request of each part of a batch's life, by the stamps in its row."""
    began, sent, done = batch.in_progress_at, batch.finalizing_at, batch.completed_at
    assert began
    assert sent
    assert done
    marks = [track.at(moment) for moment in (batch.created_at, began, sent, done)]
    plan, cpu, files = (1e6 * (later - earlier) / count for earlier, later in itertools.pairwise(marks))
    return {"plan": plan, "cpu": cpu, "files": files, "rate": count / (sent - began).total_seconds()}


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    rounds = figures["rounds"] if figures else {}
    return [
        report.at_most("CPU per request, Batchwright ÷ AsyncOpenAI", OF_OPENAI_MAX, ratio(rounds, "openai")),
        report.at_most("CPU per request, Batchwright ÷ bare loop", OF_BARE_MAX, ratio(rounds, "bare")),
    ]


def ratio(rounds: dict[str, list[dict[str, float]]], peer: str) -> float | None:
    pairs = list(zip(rounds.get("batchwright", []), rounds.get(peer, []), strict=False))
    even = [pair for pair in pairs if max(one["loop"] for one in pair) <= UNEVEN * min(one["loop"] for one in pair)]
    return statistics.median(ours["cpu"] / theirs["cpu"] for ours, theirs in even or pairs) if pairs else None


def kept(figures: dict[str, Any]) -> dict[str, float | None]:
    """The figures of one request for the capacity page: microseconds of the worker in all phases, and bytes."""
    rounds = figures["rounds"]["batchwright"]
    names = ("rate", "postgres_all", *traffic.NAMES)
    worker = statistics.median(one["plan"] + one["cpu"] + one["files"] for one in rounds)
    found = {name: statistics.median(one[name] for one in rounds) for name in names}
    return {**found, "worker_us": worker, "requests": figures["counts"]["batchwright"]}


def tables(figures: dict[str, Any]) -> str:
    names = {"batchwright": "Batchwright", "bare": "bare loop on wreq", "aiohttp": "aiohttp, semaphore"}
    names["openai"] = f"AsyncOpenAI {figures['versions']['openai']}, semaphore"
    columns = ("cpu", "rate", "plan", "files", "postgres", "simulator", "loop")
    rows = []
    for name, label in names.items():
        found = figures["rounds"][name]
        values = [[one[column] for one in found if column in one] for column in columns]
        cells = [report.number(statistics.median(each) if each else None) for each in values]
        rows.append([label, f"{figures['counts'][name]:,}", *cells])
    headings = ["sending", "requests", "CPU µs", "requests/s", "+ plan µs", "+ files µs", "PostgreSQL µs"]
    return report.table([*headings, "simulator µs", "loop ms"], rows)
