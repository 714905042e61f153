"""A client, workers and a folder of documents, for tests of whole runs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.app import AsyncBatchwright
from batchwright.engine.jobs import JobEvent, JobId
from batchwright.engine.worker.worker import Worker
from batchwright.ingest.config import Overrides
from batchwright.ingest.items import Item
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import QUEUE, Run
from batchwright.ingest.sources import local_roots
from batchwright.ingest.submission import WantedRun
from batchwright.settings import load_settings
from batchwright.states import RunStatus


@dataclass
class Stage:
    batchwright: AsyncBatchwright
    folder: Path
    workers: list[tuple[Worker, asyncio.Task[bool]]] = field(default_factory=list)
    written: int = 0

    @property
    def part(self) -> IngestPart:
        return self.batchwright.part(IngestPart)

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file with an old time, a second later for each file: the time of a new file is not trusted."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.written += 1
        moment = time.time() - 100_000 + self.written
        os.utime(path, (moment, moment))
        return path

    async def submit(
        self, sources: Sequence[str] | None = None, *, collection: str = "papers", overrides: Any = None, **values: Any
    ) -> str:
        sources = [str(self.folder)] if sources is None else sources
        changed = {"roots": local_roots(sources), **(overrides or {})}
        wanted = WantedRun(
            tenant="default", collection=collection, sources=sources, overrides=Overrides(**changed), **values
        )
        run, is_new = await self.part.submission.create(wanted)
        assert is_new
        self.batchwright.doorbell.ring([QUEUE])
        return run.id

    async def run(self, *args: Any, seconds: float = 20.0, **values: Any) -> Run:
        """Submit, and wait for the end."""
        return await self.ended(await self.submit(*args, **values), seconds)

    async def succeed(self, *args: Any, **values: Any) -> Run:
        """A run in which nothing fails."""
        run = await self.run(*args, **values)
        errors = [(name, item.last_error) for name, item in (await self.items(run.id)).items() if item.last_error]
        assert run.status is RunStatus.COMPLETED, (run.error, errors)
        return run

    async def get(self, id: str) -> Run:
        return await self.part.runs.get(id, tenant=None)

    async def items(self, id: str, **values: Any) -> dict[str, Item]:
        return {item.name: item for item in await self.part.items.list(id, limit=10_000, **values)}

    async def events(self, item: Item) -> list[JobEvent]:
        return [event for job in item.job_ids for event in await self.batchwright.events(JobId(job))]

    async def step_events(self, item: Item) -> list[tuple[str, str]]:
        """The events of the steps of an item: (event, step)."""
        events = await self.events(item)
        return [(one.event, one.fields["step"]) for one in events if one.fields and "step" in one.fields]

    def work(self) -> Worker:
        worker = self.batchwright.worker()
        self.workers.append((worker, asyncio.create_task(worker.run())))
        return worker

    async def until(self, id: str, condition: Any, seconds: float = 30.0) -> Run:
        try:
            async with asyncio.timeout(seconds):
                while not condition(run := await self.get(id)):
                    for _, running in self.workers:
                        if running.done():
                            running.result()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(await self.describe(id)) from None
        return run

    async def describe(self, id: str) -> str:
        """Describe a run that does not end, for the message of a failure."""
        jobs = await self.rows(
            "SELECT job_type, status::text, attempts, error, message FROM batchwright.job ORDER BY id LIMIT 20"
        )
        steps = await self.rows("SELECT item_id, step, state, waiting FROM batchwright.ingest_step LIMIT 20")
        return "\n".join(map(str, [await self.get(id), *jobs, *steps]))

    async def ended(self, id: str, seconds: float = 60.0) -> Run:
        return await self.until(id, lambda run: run.has_ended, seconds)

    async def rows(self, sql: str, **params: Any) -> list[Any]:
        return await self.batchwright.pool.rows(sql, params)

    async def close(self) -> None:
        for worker, _ in self.workers:
            worker.stop()
        for _, task in self.workers:
            with suppress(asyncio.CancelledError):
                await task
        self.workers.clear()


@asynccontextmanager
async def ingest_stage(database_url: str, folder: Path, **tables: Any) -> AsyncIterator[Stage]:
    flags: dict[str, Any] = {
        "database": {"url": database_url, "folder": str(folder / "home")},
        "ingest": {"embedding_model": "hash", "sandboxes": 1},
        "worker": {"stop_grace_seconds": 5.0},
        "api": {"port": 0},
    }
    for name, values in tables.items():
        flags[name] = {**flags.get(name, {}), **values}
    async with AsyncBatchwright(settings=load_settings(flags, environment={})) as batchwright:
        papers = folder / "papers"
        papers.mkdir(exist_ok=True)
        stage = Stage(batchwright=batchwright, folder=papers)
        try:
            yield stage
        finally:
            await stage.close()
