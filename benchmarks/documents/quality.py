"""How often search finds the passage that answers a question: by words, by vectors, and by both."""

import pydoc_data.topics
from pathlib import Path
from typing import Any

from batchwright.ingest.search import MODES
from benchmarks.documents.questions import QUESTIONS
from benchmarks.documents.stage import COLLECTION, TENANT, Stage, stage
from benchmarks.tools import report
from benchmarks.tools.sections import Ground

NAME = "quality"
TITLE = "Answers among the first ten passages"
SECONDS_MAX = 240.0
HITS = 10
SETTINGS = f"""
    {len(QUESTIONS)} questions in other words than the text, most of them, over the Python language reference that comes
    with every Python, so that anybody can repeat it offline. Chunks of 500 characters that repeat 100, wordllama's
    vectors. A question is answered if one of the first {HITS} passages holds the words that were written down for it;
    those whose words are in no chunk, because this Python's text is another or they were cut apart, are left out. The
    rank counts as 1 ÷ rank, and 0 beyond the tenth.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    chunks = {"ingest_chunk_characters": 500, "ingest_chunk_overlap": 100}
    async with stage(ground, ingest_entities="none", **chunks) as on:
        papers = write(on.folder / "papers")
        async with on.worker():
            await on.run(papers)
        texts = [unfold(text) for (text,) in await on.sql("SELECT text FROM batchwright.ingest_chunk")]
        known = {question: words for question, words in QUESTIONS.items() if any(words in text for text in texts)}
        modes = {mode: await ask(on, known, mode) for mode in MODES}
        return {"chunks": len(texts), "questions": len(known), "left_out": len(QUESTIONS) - len(known), "modes": modes}


def write(papers: Path) -> Path:
    papers.mkdir()
    for name, text in pydoc_data.topics.topics.items():
        (papers / f"{name}.txt").write_text(text)
    return papers


async def ask(on: Stage, questions: dict[str, str], mode: Any) -> dict[str, float]:
    ranks = []
    for question, words in questions.items():
        found = await on.part.search.search(TENANT, COLLECTION, question, limit=HITS, mode=mode)
        places = (rank for rank, hit in enumerate(found.hits, 1) if words in unfold(hit.text))
        ranks.append(next(places, None))
    answered = [rank for rank in ranks if rank is not None]
    return {"recall": len(answered) / len(ranks), "rank": sum(1 / rank for rank in answered) / len(ranks)}


def unfold(text: str) -> str:
    return " ".join(text.split())


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    recall = {mode: round(100 * one["recall"], 1) for mode, one in figures["modes"].items()} if figures else {}
    alone = [mode for mode in MODES if mode != "hybrid"]
    name = f"recall@{HITS} of hybrid, at least that of"
    return [report.at_least(f"{name} {mode}", recall.get(mode, 0), recall.get("hybrid"), " %") for mode in alone]


def tables(figures: dict[str, Any]) -> str:
    rows = [[mode, f"{one['recall']:.1%}", f"{one['rank']:.3f}"] for mode, one in figures["modes"].items()]
    said = f"{figures['questions']} questions ({figures['left_out']} left out) over {figures['chunks']:,} chunks"
    return f"{report.table(['by', f'recall@{HITS}', '1 ÷ rank, mean'], rows)}\n\n{said}"
