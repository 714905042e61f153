"""`batchwright demo --documents`: a folder of documents, a worker that is killed, and questions to the collection.

documents ─▶ a run ─▶ SIGKILL ─▶ a second worker resumes it ─▶ every step counted ─▶ questions, with sources
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchwright.app import AsyncBatchwright
from batchwright.cli.show import number
from batchwright.demo.papers import FACTS, Fact, write_papers
from batchwright.demo.stage import (
    LEASE_SECONDS,
    LOOK_SECONDS,
    SQL,
    Say,
    Tethered,
    make_say,
    own_environment,
    own_folder,
    run_workers,
    show_dashboard,
    wait_until_ready,
)
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.errors import BatchwrightError
from batchwright.ingest.config import Overrides
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import QUEUE, Run
from batchwright.ingest.search import Hit
from batchwright.ingest.sources import local_roots
from batchwright.ingest.submission import WantedRun
from batchwright.settings import load_settings
from batchwright.states import RunStatus

COLLECTION = "demo"
_KILL_AT = 1 / 3
_SECONDS_MAX = 180.0
_PASSAGE_CHARACTERS = 240
_SETTINGS = """\
[database]
folder = "{folder}"

[api]
port = 0

[engine]
lease_seconds = {lease}
rescue_jitter_seconds = 0.5

[worker]
concurrency = 4
stop_grace_seconds = 5

[ingest]
chunk_characters = 500
chunk_overlap = 0
sandboxes = 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A question, and the passage that answers it; if search found none, its first passage."""

    question: str
    wanted: str
    name: str | None
    page: int | None
    passage: str | None
    is_right: bool
    searched_by: str
    """What the search used, and what it left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentReport:
    """The figures of the database at the end."""

    documents: int
    status: RunStatus
    done: int
    failed: int
    done_when_killed: int
    steps_when_killed: int
    steps_wanted: int
    steps_completed: int
    steps_doubled: int
    steps_started: int
    chunks: int
    seconds: float
    second_run_steps: int
    """Steps that a second run over the same files did; must be 0."""
    answers: Sequence[Answered]
    problems: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "problems", list(self._problems()))

    @property
    def is_right(self) -> bool:
        return not self.problems

    def _problems(self) -> Iterator[str]:
        if self.status is not RunStatus.COMPLETED or self.done != self.documents:
            yield f"the run is {self.status.value}, with {self.done} of {self.documents} documents done"
        if self.steps_completed != self.steps_wanted or self.steps_doubled:
            yield f"{self.steps_completed} steps were completed, {self.steps_doubled} of them twice"
        if self.second_run_steps:
            yield f"a second run over the same files did {self.second_run_steps} steps"
        for one in self.answers:
            if not one.is_right:
                yield f"wrong passage for: {one.question} ({one.searched_by})"


async def run_documents(reports: int, out: Console, *, keep: bool = False) -> DocumentReport:
    say = make_say(out)
    say("Batchwright demo: documents", "bold")
    with own_folder() as folder:
        papers = folder / "papers"
        documents = await asyncio.to_thread(write_papers, papers, reports)
        environment = own_environment(folder, _SETTINGS.format(folder=folder / "postgres", lease=LEASE_SECONDS))
        say(f"starting its own PostgreSQL in {folder}", "")
        async with (
            AsyncBatchwright(settings=load_settings(environment=environment)) as batchwright,
            show_dashboard(batchwright, say) as dashboard,
        ):
            stage = _Stage(batchwright, environment, folder, say)
            report = await stage.play(papers, documents)
            print_documents(report, out)
            if keep:
                await dashboard.stay()
        return report


@dataclass(slots=True)
class _Stage:
    batchwright: AsyncBatchwright
    environment: dict[str, str]
    folder: Path
    say: Say

    @property
    def part(self) -> IngestPart:
        return self.batchwright.part(IngestPart)

    async def play(self, papers: Path, documents: int) -> DocumentReport:
        began = time.monotonic()
        run_id = await self._submit(papers)
        self.say(f"submitted {number(documents)} documents: Markdown pages, and PDF reports of four pages each", "")
        async with run_workers(self.environment, self.folder, "worker-1") as worker:
            await wait_until_ready(self.batchwright, [worker], 1)
            await self._until(run_id, lambda run: run.item_count_done >= documents * _KILL_AT, worker)
            worker.process.kill()
            await worker.process.wait()
        killed = await self.part.runs.get(run_id, tenant=None)
        steps_killed, _, _ = await self._count_steps(run_id)
        self.say(f"killed the worker after {killed.item_count_done} documents and {steps_killed} steps", "red")
        async with run_workers(self.environment, self.folder, "worker-2") as worker:
            self.say("a second worker continues the run", "")
            run = await self._until(run_id, lambda run: run.has_ended, worker)
            seconds = time.monotonic() - began
            again = await self._submit(papers)
            await self._until(again, lambda run: run.has_ended, worker)
        completed, doubled, started = await self._count_steps(run_id)
        second, _, _ = await self._count_steps(again)
        collection = await self.part.collections.get(DEFAULT_TENANT, COLLECTION)
        return DocumentReport(
            documents=documents,
            status=run.status,
            done=run.item_count_done,
            failed=run.item_count_failed,
            done_when_killed=killed.item_count_done,
            steps_when_killed=steps_killed,
            steps_wanted=documents * len(self.part.graph.steps),
            steps_completed=completed,
            steps_doubled=doubled,
            steps_started=started,
            chunks=collection.chunks,
            seconds=seconds,
            second_run_steps=second,
            answers=[await self._ask(fact) for fact in FACTS],
        )

    async def _submit(self, papers: Path) -> str:
        sources = [str(papers)]
        wanted = WantedRun(
            tenant=DEFAULT_TENANT,
            collection=COLLECTION,
            sources=sources,
            overrides=Overrides(roots=local_roots(sources)),
        )
        run, _ = await self.part.submission.create(wanted)
        self.batchwright.doorbell.ring([QUEUE])
        return run.id

    async def _until(self, run_id: str, is_enough: object, worker: Tethered) -> Run:
        assert callable(is_enough)
        try:
            async with asyncio.timeout(_SECONDS_MAX):
                while not is_enough(run := await self.part.runs.get(run_id, tenant=None)):
                    if worker.has_ended:
                        raise BatchwrightError(f"a worker of the demo has ended unexpectedly: {worker.last_lines()}")
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError as error:
            raise BatchwrightError(
                f"the run did not get this far within {_SECONDS_MAX:g} s: {worker.last_lines()}"
            ) from error
        return run

    async def _count_steps(self, run_id: str) -> tuple[int, int, int]:
        """Steps that were completed, completed more than once, and started."""
        ((completed, doubled, started),) = await self.batchwright.pool.rows(SQL["steps"], {"run_id": run_id})
        return completed, doubled, started

    async def _ask(self, fact: Fact) -> Answered:
        found = await self.part.search.search(DEFAULT_TENANT, COLLECTION, fact.question, limit=3)
        hit: Hit | None = next((hit for hit in found.hits if fact.answer in _unfold(hit.text)), None)
        first = hit or next(iter(found.hits), None)
        return Answered(
            question=fact.question,
            wanted=fact.answer,
            name=None if first is None else first.name,
            page=None if first is None else first.page_first,
            passage=None if first is None else _cut_around(_unfold(first.text), fact.answer),
            is_right=hit is not None,
            searched_by="; ".join(found.used),
        )


def print_documents(report: DocumentReport, out: Console) -> None:
    out.print(_table(report))
    for one in report.answers:
        sign, colour = ("✓", "green") if one.is_right else ("✗", "red")
        where = f"{one.name}, page {one.page}" if one.page is not None else str(one.name)
        out.print(Text.assemble((f"{sign} {one.question}", f"bold {colour}"), f"  {where}"), soft_wrap=True)
        passage = Text(f"  {one.passage}", "bright_black")
        passage.highlight_words([one.wanted], "bold")
        out.print(passage, soft_wrap=True)
    for problem in report.problems:
        out.print(Text(f"✗ {problem}", "bold red"), soft_wrap=True)
    if report.is_right:
        out.print(Text("✓ A worker died, and no step was lost or done twice.", "bold green"))
    else:
        out.print(Text("✗ The numbers do not add up: this is a bug in Batchwright.", "bold red"))


def _table(report: DocumentReport) -> Table:
    table = Table(show_header=False, title="Result", title_justify="left", title_style="bold")
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("the run", report.status.value)
    table.add_row("documents done", f"{number(report.done)} of {number(report.documents)}")
    table.add_row("steps completed before the kill, and kept", number(report.steps_when_killed))
    table.add_row("steps completed in total", f"{number(report.steps_completed)} of {number(report.steps_wanted)}")
    table.add_row("  of these twice", number(report.steps_doubled))
    started_again = report.steps_started - report.steps_completed
    table.add_row("steps restarted, because the worker died during them", number(started_again))
    table.add_row("steps of a second run over the same files", number(report.second_run_steps))
    table.add_row("passages in the search index", number(report.chunks))
    table.add_row("time, including the wait for the dead worker's lease", f"{report.seconds:.1f} s")
    return table


def _unfold(text: str) -> str:
    return " ".join(text.split())


def _cut_around(text: str, words: str) -> str:
    start = max(0, text.find(words) - _PASSAGE_CHARACTERS // 2)
    return f"…{text[start : start + _PASSAGE_CHARACTERS]}…"
