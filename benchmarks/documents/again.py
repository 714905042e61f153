"""Calls of a second run over the same folder: none; after edits, few more than for the edited text."""

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.documents.corpus import Writer, write_texts
from benchmarks.documents.stage import MODEL, Provider, Stage, provider, stage
from benchmarks.tools import report
from benchmarks.tools.sections import Ground

NAME = "again"
TITLE = "Calls of the model in a second run, and after 1 % of the text was edited"
SECONDS_MAX = 900.0
CHARACTERS = 48_000
EDITED_SHARE = 0.01
EDITS = {"a section": 9_600, "a page": 2_400, "a paragraph": 600}
GOAL_EDIT = "a section"
PERCENT_MAX = 2
SETTINGS = f"""
    Text files of {CHARACTERS:,} characters, chunks of 1,500 that repeat 150, vectors from a provider in a process of
    its own that keeps a bill. A call is one text in a request for vectors. After the run over the unchanged folder,
    {EDITED_SHARE:.0%} of the characters are replaced by other words three times, each time elsewhere: as long sections,
    as pages, or as paragraphs, at random places. An edit also touches the chunks that it begins and ends in, and some
    behind it until the chunks end again where they did: of one that is shorter than a chunk, no chunker can keep the
    calls within twice its share. The goal is for sections of {EDITS[GOAL_EDIT]:,} characters.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    count = ground.pick(100, 20)
    settings = {"ingest_embedding_model": MODEL, "ingest_lane": "realtime"}
    async with provider() as server, stage(ground, gateway_url=server.url, **settings) as on, on.worker():
        papers = on.folder / "papers"
        await asyncio.to_thread(write_texts, papers, count, CHARACTERS)
        figures = {"the first": await one_run(on, server, papers)}
        figures["the same again"] = await one_run(on, server, papers)
        for number, (name, length) in enumerate(EDITS.items()):
            documents, percent = edit(papers, length, seed=number)
            figures[f"edited, {name} each"] = one = await one_run(on, server, papers)
            one["edited_percent"] = percent
            if one["documents_done"] != documents:
                raise RuntimeError(f"{documents} documents were edited, and {one['documents_done']} done again")
    return figures


async def one_run(on: Stage, server: Provider, papers: Path) -> dict[str, float]:
    before = await server.bill()
    run = await on.run(papers)
    bill = (await server.bill())[len(before) :]
    steps = await on.steps(run)
    return {
        "calls": sum(entry["inputs"] for entry in bill),
        "requests": len(bill),
        "steps": steps["starts"],
        "documents_done": run.item_count_done,
        "documents_unchanged": run.item_count_unchanged,
    }


def edit(papers: Path, length: int, *, seed: int) -> tuple[int, float]:
    """Replace passages of this length; returns the number of documents and the percentage of the text."""
    files = sorted(papers.iterdir())
    total = sum(file.stat().st_size for file in files)
    writer = Writer(1_000_000 + seed)
    edits = max(1, round(total * EDITED_SHARE / length))
    edited = set()
    for number in range(edits):
        file = files[(number * 7 + seed) % len(files)]
        edited.add(file)
        text = file.read_text()
        start = writer.draw.randrange(0, max(1, len(text) - length))
        file.write_text(text[:start] + writer.text(length)[:length] + text[start + length :])
    return len(edited), 100 * edits * length / total


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    again = figures["the same again"] if figures else {}
    name = f"edited, {GOAL_EDIT} each"
    value = figures and 100 * figures[name]["calls"] / figures["the first"]["calls"]
    return [
        report.at_most("second run over the same folder: calls", 0, again.get("calls")),
        report.at_most("second run over the same folder: steps", 0, again.get("steps")),
        report.at_most(
            "calls after editing 1 % of the text, section by section", PERCENT_MAX, value, " % of the first"
        ),
    ]


def tables(figures: dict[str, Any]) -> str:
    first = figures["the first"]["calls"]
    rows = [
        [
            name,
            f"{one.get('edited_percent', 0):.2f} %",
            *(f"{one[key]:,}" for key in ("calls", "requests", "steps", "documents_done", "documents_unchanged")),
            f"{100 * one['calls'] / first:.2f} %",
        ]
        for name, one in figures.items()
    ]
    return report.table(["run", "edited", "calls", "requests", "steps", "done", "unchanged", "of the first"], rows)
