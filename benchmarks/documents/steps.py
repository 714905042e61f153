"""The overhead of a step: documents of one line, so that the steps have almost nothing to do."""

from pathlib import Path
from typing import Any

import psutil

from benchmarks.documents.stage import seconds_of, stage
from benchmarks.tools import report
from benchmarks.tools.measure import cpu_seconds, family
from benchmarks.tools.sections import Ground

NAME = "steps"
TITLE = "Overhead of a step"
SECONDS_MAX = 600.0
MILLISECONDS_MAX = 15
CALL_SECONDS = """
    SELECT coalesce(sum((event.fields ->> 'seconds')::float8), 0)
    FROM batchwright.ingest_item AS item
    JOIN batchwright.job_event AS event ON event.job_id = ANY (item.job_ids)
    WHERE item.run_id = %(run_id)s AND event.event = 'step_completed'
"""
SETTINGS = f"""
    Text files of one line, the embedder that only hashes, and no entities, so that the seven steps have next to nothing
    to do. One worker process; "one by one" has one document at a time, "16 at once" sixteen. Processor time is that of
    the worker, of its sandbox, and of PostgreSQL, divided by the steps that were completed; listing the folder and the
    start and end of the documents' jobs are in it. "In the step itself" is what the events say that the steps' own code
    took. The goal of {MILLISECONDS_MAX} ms is held against the processor time of worker, sandbox and PostgreSQL
    together, and against the clock one by one. A first run with other documents is not counted.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    count = ground.pick(150, 20)
    return {
        "one by one": await measure_one(ground, count, 1),
        "16 at once": await measure_one(ground, count, 16),
    }


async def measure_one(ground: Ground, count: int, concurrency: int) -> dict[str, float]:
    settings = {"ingest_embedding_model": "hash", "ingest_entities": "none", "ingest_sandboxes": 1}
    async with stage(ground, worker_concurrency=concurrency, **settings) as on, on.worker() as worker:
        await on.run(write(on.folder / "first", 10, "first"))
        before = spent(ground, worker)
        run = await on.run(write(on.folder / "papers", count, "paper"))
        used = [now - then for now, then in zip(spent(ground, worker), before, strict=True)]
        steps = (await on.steps(run))["done"]
        ((call_seconds,),) = await on.sql(CALL_SECONDS, run_id=run.id)
    names = ("worker", "sandbox", "postgres")
    return {
        "steps": steps,
        "clock": seconds_of(run) / steps * 1000,
        "in_the_step": call_seconds / steps * 1000,
        "cpu": sum(used) / steps * 1000,
        **{name: value / steps * 1000 for name, value in zip(names, used, strict=True)},
    }


def write(folder: Path, count: int, word: str) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"This is {word} {number}, and it says nothing else.")
    return folder


def spent(ground: Ground, worker: psutil.Process) -> list[float]:
    """Processor seconds of the worker, of what it has started, and of PostgreSQL."""
    own, *others = family(worker.pid)
    return [cpu_seconds(own), sum(map(cpu_seconds, others)), ground.server.cpu_seconds() or 0.0]


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    cpu = figures and figures["16 at once"]["cpu"]
    clock = figures and figures["one by one"]["clock"]
    return [
        report.at_most("overhead of a step, processor time of Python and PostgreSQL", MILLISECONDS_MAX, cpu, " ms"),
        report.at_most("overhead of a step by the clock, one by one", MILLISECONDS_MAX, clock, " ms"),
    ]


def tables(figures: dict[str, Any]) -> str:
    columns = ("clock", "in_the_step", "cpu", "worker", "sandbox", "postgres")
    rows = [[name, *(f"{one[column]:.2f}" for column in columns)] for name, one in figures.items()]
    return report.table(["ms per step", "clock", "in the step itself", "CPU", "worker", "sandbox", "PostgreSQL"], rows)
