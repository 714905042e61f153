"""Single items: a test claims, runs and settles their jobs by hand, with its own steps or with ours."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from batchwright.db.database import Database
from batchwright.engine import policy
from batchwright.engine.context import Context
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.outcomes import Done, Settle, Snooze
from batchwright.engine.owned import Held
from batchwright.engine.queue import Queue
from batchwright.errors import Fenced, RetryLater
from batchwright.ingest.context import StepContext, Tools
from batchwright.ingest.coordinator import item_job
from batchwright.ingest.items import ITEM_JOB, Item, Items
from batchwright.ingest.machine import Machine
from batchwright.ingest.pipeline import Graph, step
from batchwright.ingest.process import ItemRunner
from batchwright.ingest.runs import Run
from tests.ingest.fake_provider import FakeProvider
from tests.ingest.stage import Stage

FIRST = "FETCHED"
BRANCHES = ("LEFT", "MIDDLE", "RIGHT")
LAST = "JOINED"
GIVE_BACK = """
UPDATE batchwright.job SET status = 'QUEUED', locked_by = NULL, lease_until = NULL, attempts = attempts - 1,
    run_after = now()
WHERE id = %(id)s AND status = 'RUNNING' RETURNING id
"""
"""Sets a job to the state in which a rescue leaves it after its worker died."""
HURRY = """
WITH job AS (UPDATE batchwright.job SET run_after = now() WHERE id = %(job_id)s AND status = 'QUEUED')
UPDATE batchwright.ingest_step SET not_before = NULL WHERE item_id = %(id)s RETURNING step
"""


def remote(provider: FakeProvider, **ingest: Any) -> dict[str, Any]:
    """Tables for a stage whose models are at the provider."""
    gateway = {"url": provider.url, "max_retries": 0}
    prices = {"embedder": {"input": 1.0, "output": 0.0}, "reader": {"input": 2.0, "output": 8.0}}
    return {
        "ingest": {
            "embedding_model": "embedder",
            "entities": "reader",
            "lane": "realtime",
            "sandboxes": 1,
            "prices": prices,
            **ingest,
        },
        "model_gateways": {"embedder": gateway, "reader": gateway},
    }


class Quiet:
    """Drops the events and the progress of the job itself."""

    def emit(self, claim: Claim, event: Any) -> None:
        pass

    def progress(self, claim: Claim, current: int | None, total: int | None) -> None:
        pass


@dataclass
class Script:
    """Steps that follow a script: each call of a step gives its next answer; after the last one, calls succeed."""

    answers: dict[str, list[Any]] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)

    async def call(self, name: str) -> Any:
        self.called.append(name)
        answer = self.answers.get(name, [])
        said = answer.pop(0) if answer else {"from": name, "sha256": "0"}
        if isinstance(said, BaseException):
            raise said
        return await said() if callable(said) else said

    def graph(self) -> Graph:
        """One step, three branches, and one that waits for them."""

        def make(name: str, after: Any) -> Any:
            async def run(ctx: StepContext) -> Any:
                return await self.call(name)

            return step(name, after=after)(run).__batchwright_step__

        return Graph([make(FIRST, ()), *(make(name, FIRST) for name in BRANCHES), make(LAST, BRANCHES)])


class Bench:
    """Items of one run, whose jobs no worker takes."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.queue = stage.batchwright.queue
        self.items = Items(self.queue)
        stage.part.core.add_operations()
        self.tools: Tools = stage.part.make_tools(stage.batchwright.store)
        self.outcomes: list[Any] = []

    async def put(self, count: int = 1, **values: Any) -> list[Item]:
        """Create a run over some files; return its open items, each with a job."""
        for number in range(count):
            if not (self.stage.folder / f"{number}.txt").exists():
                self.stage.write(f"{number}.txt", f"Anna met Berta in town number {number}.")
        run = await self.stage.get(await self.stage.submit(**values))
        await self.stage.part.runs.begin(run.id)
        listing = self.tools.sources.list(run.sources, roots=run.config["roots"])
        rows = [
            {"source": one.uri, "name": one.name, "etag": one.etag, "size": one.size, "metadata": {}}
            async for one in listing
        ]
        async with self.queue.database.transaction() as session:
            await self.stage.part.runs.add_items(run, rows, force=run.config["force"], session=session)
            await self.stage.part.runs.end_listing(run.id, is_complete=True, skipped={}, session=session)
        items = [item for item in await self.items.list(run.id) if not item.has_ended]
        await self.enqueue(run, items)
        return items

    async def enqueue(self, run: Run, items: list[Item]) -> None:
        jobs = [item_job(run, item.id, JobId(item.job_id)) for item in items]
        await self.queue.enqueue(await self.stage.part.core.catalog.prepare(jobs))

    async def get(self, item: Item) -> Item:
        return await self.items.get(item.id, tenant=None)

    async def claim(self, item: Item, worker: str = "w1", queue: Queue | None = None) -> Claim:
        await (queue or self.queue).database.rows(HURRY, {"id": item.id, "job_id": item.job_id})
        claim = await (queue or self.queue).claim_job(worker, JobId(item.job_id), [ITEM_JOB])
        assert claim is not None, await self.queue.get(JobId(item.job_id))
        return claim

    async def give_back(self, item: Item) -> None:
        assert await self.queue.database.rows(GIVE_BACK, {"id": item.job_id})

    async def open(self, item: Item, graph: Graph, *, worker: str = "w1", max_retries: int = 2) -> Machine:
        """Claim the item's job and open its step machine, as a worker does."""
        claim = await self.claim(item, worker)
        run = await self.stage.get(item.run_id)
        held = Held(claim.id, claim.claim, worker)
        return await Machine.open(self.queue, graph, held, run, await self.get(item), max_retries)

    async def drive(self, item: Item, graph: Graph | None = None, *, worker: str = "w1") -> Item:
        """Claim the item's job once, run it and settle it."""
        claim = await self.claim(item, worker)
        await self.run_and_settle(claim, item, graph, worker=worker)
        return await self.get(item)

    async def live(self, item: Item, graph: Graph | None = None, rounds: int = 30) -> Item:
        """Drive the item to its end, however often it must wait."""
        for _ in range(rounds):
            if (await self.queue.get(JobId(item.job_id))).finished_at is not None:
                return await self.get(item)
            await self.drive(item, graph)
        raise AssertionError(f"{item.id} did not end: {self.outcomes[-5:]}")

    async def run_and_settle(
        self,
        claim: Claim,
        item: Item,
        graph: Graph | None = None,
        *,
        worker: str = "w1",
        tools: Tools | None = None,
    ) -> None:
        tools = tools or self.tools
        ctx = Context(claim, Quiet(), worker=worker)
        settle: Settle
        try:
            outcome = await ItemRunner(tools, graph or self.stage.part.graph).run(ctx, item.id)
            self.outcomes.append(outcome)
            if isinstance(outcome, Done):
                settle = policy.succeed(claim, outcome.result, outcome.progress)
                with suppress(Fenced):
                    await tools.queue.succeed_with(settle, worker, write=outcome.write, then=())
                return
            assert isinstance(outcome, Snooze)
            settle = policy.snooze(claim, outcome)
        except RetryLater as error:
            self.outcomes.append(error)
            settle = policy.snooze(claim, Snooze(error.delay_seconds, error.reason))
        await tools.queue.settle([settle], worker)

    def at(self, clock: Any) -> Queue:
        """The same queue with a clock of the test."""
        return Queue(Database(self.stage.batchwright.pool, clock=clock), self.queue.settings)

    async def rows_of(self, item: Item) -> dict[str, Any]:
        return {row.step: row for row in await self.items.steps(item.id)}
