"""The environment of a section: its own database and folder, a simulated model server, and real workers."""

import asyncio
import shutil
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from batchwright.app import AsyncBatchwright
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch, Batches, NewBatch
from batchwright.batches.submission import create, store_input
from batchwright.files.store import Files
from batchwright.settings import load_settings
from batchwright.simulator import Remote, running_process
from benchmarks.tools import sections
from benchmarks.tools.measure import cpu_seconds
from benchmarks.tools.prefixes import TEXT
from benchmarks.tools.workers import environment_of, in_thread, running_worker, worker_log

BYTES_MAX = 1 << 30
ENDPOINT = "/v1/chat/completions"
INSTANT = ("--profile", "instant", "--any-model")
LOOK_SECONDS = 0.02
MODEL = "bench"
WARM_UP_REQUESTS = 200


class Ground(sections.Ground):
    """What all sections share."""

    __slots__ = ()

    @asynccontextmanager
    async def stage(self, *simulator: str, **settings: Any) -> AsyncIterator["Stage"]:
        """A fresh database and folder, a simulator with these arguments, and settings such as worker_concurrency=5."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            async with (
                in_thread(self.server.database()) as url,
                in_thread(running_process(*(simulator or INSTANT))) as remote,
            ):
                environment = environment_of(folder, url, remote.url, settings)
                client = AsyncBatchwright(settings=load_settings({}, environment=environment))
                await client.open(migrated=False)
                try:
                    await client.migrate()
                    yield Stage(client=client, environment=environment, folder=folder, simulator=remote)
                finally:
                    await client.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def fixed(limit: int) -> dict[str, int]:
    """Settings for exactly this number of requests in flight."""
    return {
        "inference_concurrency": limit,
        "inference_model_concurrency_start": limit,
        "inference_model_concurrency_min": limit,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One database with its workers and its model server."""

    client: AsyncBatchwright
    environment: dict[str, str]
    folder: Path
    simulator: Remote

    @property
    def batches(self) -> Batches:
        return self.client.part(BatchesPart).batches

    @property
    def files(self) -> Files:
        return self.client.part(BatchesPart).files

    def worker(self) -> AbstractAsyncContextManager[psutil.Process]:
        return running_worker(self.folder, self.environment)

    def worker_log(self) -> str:
        return worker_log(self.folder)

    async def submit(self, file: Path, *, seconds: float | None = None, window: str = "24h") -> Batch:
        """`seconds` is a shorter window than users can set; it is written into the row before workers are notified."""
        stored = await store_input(self.files, file, tenant="default", bytes_max=BYTES_MAX)
        new = NewBatch(tenant="default", endpoint=ENDPOINT, input_file_id=stored.id, completion_window=window)
        batch, _ = await create(self.batches, self.client.catalog, new, must_be_served=False)
        if seconds is not None:
            await self.sql(
                "UPDATE batchwright.batch SET expires_at = clock_timestamp() + make_interval(secs => %(seconds)s) "
                "WHERE id = %(id)s RETURNING id",
                id=batch.id,
                seconds=seconds,
            )
        self.client.doorbell.ring([batch.queue])
        return batch

    async def get(self, id: str) -> Batch:
        return await self.batches.get(id, tenant=None)

    async def until(self, id: str, condition: Callable[[Batch], bool], seconds: float) -> Batch:
        async with asyncio.timeout(seconds):
            while True:
                batch = await self.get(id)
                if condition(batch):
                    return batch
                if batch.has_ended:
                    raise RuntimeError(f"the batch ended {batch.status} too soon: {batch.errors} {self.worker_log()}")
                await asyncio.sleep(LOOK_SECONDS)

    async def ended(self, id: str, seconds: float) -> Batch:
        return await self.until(id, lambda batch: batch.has_ended, seconds)

    async def run(self, file: Path, seconds: float = 300.0) -> Batch:
        """Run a whole batch; raises unless it completes with every line answered."""
        batch = await self.ended((await self.submit(file)).id, seconds)
        if batch.completed != batch.total or not batch.total:
            raise RuntimeError(f"a batch ended {batch.status}, {batch.completed} of {batch.total}: {batch.errors}")
        return batch

    async def warm_up(self, line_bytes: int = 4096) -> None:
        await self.run(write_lines(self.folder / "warm-up.jsonl", WARM_UP_REQUESTS, line_bytes=line_bytes))

    async def stats(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.simulator.stats)

    async def sql(self, statement: str, **params: Any) -> Any:
        return await self.client.pool.rows(statement, params)


def write_lines(
    file: Path, count: int, *, line_bytes: int = 4096, max_tokens: int | None = 130, mark: str = "r", model: str = MODEL
) -> Path:
    """Requests that share nothing; with 130 tokens an answer of the simulator has 1 kB."""
    most = "" if max_tokens is None else f',"max_tokens":{max_tokens}'
    with file.open("w") as target:
        for number in range(count):
            head = (
                f'{{"custom_id":"{mark}-{number}","method":"POST","url":"{ENDPOINT}","body":{{"model":"{model}"{most},'
            )
            head += f'"messages":[{{"role":"user","content":"{mark} {number:08} '
            start = number * 997 % (len(TEXT) - line_bytes)
            target.write(f'{head}{TEXT[start : start + max(0, line_bytes - len(head) - 6)]}"}}]}}}}\n')
    return file


@dataclass(slots=True)
class Track:
    """Samples of a growing number; `at` is its value at a moment between two samples."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.times.append(time.time())
        self.values.append(value)

    def at(self, moment: datetime | float) -> float:
        when = moment if isinstance(moment, float) else moment.timestamp()
        place = bisect_right(self.times, when)
        if place == 0 or place == len(self.times):
            return self.values[min(place, len(self.values) - 1)]
        share = (when - self.times[place - 1]) / (self.times[place] - self.times[place - 1])
        return self.values[place - 1] + share * (self.values[place] - self.values[place - 1])


@contextmanager
def tracked(*figures: Callable[[], float], seconds: float = 0.02) -> Iterator[list[Track]]:
    """Reads the figures continuously, in its own thread, and once more at the end."""
    tracks = [Track() for _ in figures]
    done = threading.Event()

    def read() -> None:
        for figure, track in zip(figures, tracks, strict=True):
            track.add(figure())

    def keep_reading() -> None:
        read()
        while not done.wait(seconds):
            read()
        read()

    thread = threading.Thread(target=keep_reading, daemon=True)
    thread.start()
    try:
        yield tracks
    finally:
        done.set()
        thread.join()


def spent(process: psutil.Process) -> Callable[[], float]:
    return lambda: cpu_seconds(process)
