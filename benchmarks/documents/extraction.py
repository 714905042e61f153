"""How fast text comes out of PDF files, in the sandbox with all its limits."""

import random
import time
from pathlib import Path
from typing import Any

import psutil

from batchwright.ingest.sandbox import Sandbox
from benchmarks.documents.corpus import PAGE_CHARACTERS, Writer
from benchmarks.tools import report
from benchmarks.tools.measure import cpu_seconds
from benchmarks.tools.sections import Ground

NAME = "extract"
TITLE = "Pages per second out of text PDFs, in the sandbox"
SECONDS_MAX = 120.0
PAGES = (20, 50)
PAGES_PER_SECOND_MIN = 300
SETTINGS = f"""
    Files of {PAGES[0]} to {PAGES[1]} pages with about {PAGE_CHARACTERS:,} characters each, one line of text after the
    other, read one by one by one sandbox. A document has a process of its own, which is forked and limited; its
    processor seconds, and those of the process that forks it, are counted. "With the worker" adds what the caller
    spends to take over the text. One file is read before, so that the libraries are loaded.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    files = write(ground.folder, ground.pick(60, 8))
    async with Sandbox() as sandbox:
        await sandbox.extract(files[0][0])
        assert sandbox._server is not None
        child, own = psutil.Process(sandbox._server.pid), psutil.Process()
        before, began = (cpu_seconds(child), cpu_seconds(own)), time.monotonic()
        characters = 0
        for file, pages in files:
            text = await sandbox.extract(file)
            assert len(text.pages) == pages
            characters += len(text.text)
        seconds = time.monotonic() - began
        sandbox_seconds, worker_seconds = cpu_seconds(child) - before[0], cpu_seconds(own) - before[1]
    pages = sum(count for _, count in files)
    return {
        "files": len(files),
        "pages": pages,
        "characters_per_page": characters / pages,
        "pages_per_cpu_second": pages / sandbox_seconds,
        "pages_per_cpu_second_with_worker": pages / (sandbox_seconds + worker_seconds),
        "pages_per_second": pages / seconds,
    }


def write(folder: Path, count: int) -> list[tuple[Path, int]]:
    draw = random.Random(7)
    files = []
    for number in range(count):
        pages, file = draw.randint(*PAGES), folder / f"extract-{number}.pdf"
        file.write_bytes(Writer(number).pdf(pages))
        files.append((file, pages))
    return files


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    value = figures and figures["pages_per_cpu_second_with_worker"]
    return [report.at_least("extraction of text PDFs, per core", PAGES_PER_SECOND_MIN, value, " pages/s")]


def tables(figures: dict[str, Any]) -> str:
    names = {
        "pages_per_cpu_second": "pages per processor second of the sandbox",
        "pages_per_cpu_second_with_worker": "with the worker",
        "pages_per_second": "pages per second by the clock",
        "pages": "pages",
        "files": "files",
        "characters_per_page": "characters of a page",
    }
    return report.table(["extraction", ""], [[text, report.number(figures[name])] for name, text in names.items()])
