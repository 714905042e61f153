"""The environment of a section: its own database and folder, real workers, and a provider that keeps a bill."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from batchwright.app import AsyncBatchwright
from batchwright.ingest.config import Overrides
from batchwright.ingest.part import IngestPart
from batchwright.ingest.runs import QUEUE, Run
from batchwright.ingest.sources import local_roots
from batchwright.ingest.submission import WantedRun
from batchwright.settings import load_settings
from batchwright.states import RunStatus
from benchmarks.tools.sections import Ground
from benchmarks.tools.workers import environment_of, in_thread, running_worker, worker_log

COLLECTION = "papers"
CHUNK = {"ingest_chunk_characters": 1_500, "ingest_chunk_overlap": 150}
LOOK_SECONDS = 0.05
MODEL = "bench-embedding"
TENANT = "default"
ROOT = Path(__file__).parents[2]
STEPS = """
    SELECT count(*) FILTER (WHERE step.state = 'done'), coalesce(sum(step.starts), 0),
        coalesce(sum(step.starts) FILTER (WHERE step.step = 'CONTENT_EXTRACTED'), 0)
    FROM batchwright.ingest_item AS item
    JOIN batchwright.ingest_step AS step ON step.item_id = item.id
    WHERE item.run_id = %(run_id)s
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One database with its workers."""

    client: AsyncBatchwright
    environment: dict[str, str]
    folder: Path

    @property
    def part(self) -> IngestPart:
        return self.client.part(IngestPart)

    def worker(self) -> AbstractAsyncContextManager[psutil.Process]:
        return running_worker(self.folder, self.environment)

    async def submit(self, papers: Path) -> str:
        sources = [str(papers)]
        overrides = Overrides(roots=local_roots(sources))
        wanted = WantedRun(tenant=TENANT, collection=COLLECTION, sources=sources, overrides=overrides)
        run, _ = await self.part.submission.create(wanted)
        self.client.doorbell.ring([QUEUE])
        return run.id

    async def run(self, papers: Path, seconds: float = 300.0) -> Run:
        """Run completely; raises if anything fails."""
        run = await self.until(await self.submit(papers), lambda run: run.has_ended, seconds)
        return check(run)

    async def until(self, id: str, is_enough: Callable[[Run], bool], seconds: float) -> Run:
        try:
            async with asyncio.timeout(seconds):
                while not is_enough(run := await self.part.runs.get(id, tenant=None)):
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"the run has not got there in {seconds:g} s: {worker_log(self.folder)}") from None
        return run

    async def steps(self, run: Run) -> dict[str, int]:
        """Steps that are done, starts of steps, and starts of extractions."""
        ((done, starts, extractions),) = await self.sql(STEPS, run_id=run.id)
        return {"done": done, "starts": int(starts), "extractions": int(extractions)}

    async def chunks(self) -> int:
        return int((await self.part.collections.get(TENANT, COLLECTION)).chunks)

    async def sql(self, statement: str, **params: Any) -> Any:
        return await self.client.pool.rows(statement, params)


def check(run: Run) -> Run:
    if run.status is not RunStatus.COMPLETED:
        raise RuntimeError(f"a run ended {run.status.value}: {run.error}")
    return run


def seconds_of(run: Run) -> float:
    """From the moment when it was submitted until it ended, by the clock of PostgreSQL."""
    assert run.ended_at is not None
    return (run.ended_at - run.created_at).total_seconds()


@asynccontextmanager
async def stage(ground: Ground, *, gateway_url: str = "", **settings: Any) -> AsyncIterator[Stage]:
    """A fresh database and folder, with settings such as worker_concurrency=5."""
    folder = Path(tempfile.mkdtemp(dir=ground.folder))
    try:
        async with in_thread(ground.server.database()) as url:
            environment = environment_of(folder, url, gateway_url, {**CHUNK, **settings})
            client = AsyncBatchwright(settings=load_settings({}, environment=environment))
            await client.open(migrated=False)
            try:
                await client.migrate()
                yield Stage(client=client, environment=environment, folder=folder)
            finally:
                await client.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provider:
    """An OpenAI-compatible server in a process of its own, which keeps a bill of every text that it has embedded."""

    url: str

    async def bill(self) -> list[dict[str, Any]]:
        async with httpx.AsyncClient() as client:
            found: list[dict[str, Any]] = (await client.get(f"{self.url}/bill")).json()["entries"]
            return found

    async def texts(self) -> list[str]:
        """Checksums of all texts, in order, as often as they were paid for."""
        return [text for entry in await self.bill() for text in entry["texts"]]


@asynccontextmanager
async def provider(*, delay_seconds: float = 0.0) -> AsyncIterator[Provider]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.ingest.fake_provider"), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        found = Provider(url=f"http://127.0.0.1:{port}")
        async with httpx.AsyncClient() as client:
            (await client.post(f"{found.url}/faults", json={"delay_seconds": delay_seconds})).raise_for_status()
        yield found
    finally:
        process.kill()
        await process.wait()
