"""Documents per second from the file to the index, with vectors made in the worker."""

from typing import Any

from benchmarks.documents.corpus import write_mixed
from benchmarks.documents.stage import seconds_of, stage
from benchmarks.documents.steps import spent
from benchmarks.tools import report
from benchmarks.tools.sections import Ground

NAME = "items"
TITLE = "Documents per second end to end, with the local embedder"
SECONDS_MAX = 600.0
PAGES = 8
SETTINGS = f"""
    Documents of {PAGES} pages ({PAGES * 2400:,} characters), every other one a PDF file, the others Markdown; chunks of
    1,500 characters that repeat 150; vectors of wordllama (256 numbers), entities by patterns: what one gets without
    any setting. One and two worker processes on the same two cores as PostgreSQL. Seconds are those of the run, from
    its submission to its end; processor time is that of workers, sandboxes and PostgreSQL. A first run with other
    documents is not counted.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    return {str(workers): await measure_one(ground, ground.pick(120, 10), workers) for workers in (1, 2)}


async def measure_one(ground: Ground, count: int, workers: int) -> dict[str, float]:
    async with stage(ground) as on, on.worker() as first:
        if workers == 1:
            return await one_run(ground, on, [first], count)
        async with on.worker() as second:
            return await one_run(ground, on, [first, second], count)


async def one_run(ground: Ground, on: Any, workers: list[Any], count: int) -> dict[str, float]:
    write_mixed(on.folder / "first", 4 * len(workers), 2)
    await on.run(on.folder / "first")
    write_mixed(on.folder / "papers", count, PAGES)
    chunks = await on.chunks()
    before = total_spent(ground, workers)
    run = await on.run(on.folder / "papers")
    cpu, seconds = total_spent(ground, workers) - before, seconds_of(run)
    return {
        "documents": count,
        "seconds": seconds,
        "items_per_second": count / seconds,
        "pages_per_second": count * PAGES / seconds,
        "chunks_per_second": (await on.chunks() - chunks) / seconds,
        "cpu_milliseconds_per_item": cpu / count * 1000,
    }


def total_spent(ground: Ground, workers: list[Any]) -> float:
    postgres = ground.server.cpu_seconds() or 0.0
    return postgres + sum(sum(spent(ground, worker)[:2]) for worker in workers)


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    return []


def tables(figures: dict[str, Any]) -> str:
    columns = ("items_per_second", "pages_per_second", "chunks_per_second", "cpu_milliseconds_per_item")
    rows = [
        [f"{name} worker processes", *(report.number(one[key]) for key in columns)] for name, one in figures.items()
    ]
    return report.table(["", "documents/s", "pages/s", "chunks/s", "CPU ms per document"], rows)
