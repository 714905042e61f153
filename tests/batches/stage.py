"""A stage for whole batches: a database, a store in a folder, a simulated model server, and workers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from batchwright.app import AsyncBatchwright
from batchwright.batches import process, store
from batchwright.batches.operations import process_job
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch, NewBatch
from batchwright.engine.worker.worker import Worker
from batchwright.files.store import NewFile, new_file_id, object_key
from batchwright.settings import Settings, load_settings
from batchwright.simulator import Simulator, SimulatorSettings, running
from batchwright.states import BatchStatus

CHAT = "/v1/chat/completions"


def request(custom_id: str, *, model: str = "small", prompt: str | None = None, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt or f"Say {custom_id}."}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": model, "messages": messages, "max_tokens": 4, **body},
    }


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


@dataclass(slots=True, kw_only=True)
class Stage:
    batchwright: AsyncBatchwright
    simulator: Simulator
    workers: list[tuple[Worker, asyncio.Task[bool]]] = field(default_factory=list)

    async def upload(self, data: bytes, *, tenant: str = "default") -> str:
        id = new_file_id()
        stored = await self.batchwright.store.put(object_key(id), data)
        new = NewFile(id=id, tenant=tenant, purpose="batch", filename="in.jsonl", stored=stored)
        file, _ = await self.batchwright.part(BatchesPart).files.add(new)
        return file.id

    async def submit(self, lines: Sequence[Any] | bytes, *, tenant: str = "default", **options: Any) -> str:
        data = lines if isinstance(lines, bytes) else jsonl(lines)
        values = {"endpoint": CHAT, "completion_window": "24h", **options}
        return await self.create(
            NewBatch(tenant=tenant, input_file_id=await self.upload(data, tenant=tenant), **values)
        )

    async def repeat(self, first: Batch, codes: Sequence[str] | None = None) -> str:
        new = NewBatch(
            tenant=first.tenant,
            endpoint=first.endpoint,
            input_file_id=first.input_file_id,
            completion_window=first.completion_window,
            retry_of=first.id,
            retry_codes=codes,
            family=first.family,
        )
        return await self.create(new)

    async def create(self, new: NewBatch) -> str:
        (row,) = await self.batchwright.catalog.prepare([process_job(new)])
        batch, _ = await self.batchwright.part(BatchesPart).batches.create(new, row)
        self.batchwright.doorbell.ring([batch.queue])
        return batch.id

    async def get(self, id: str) -> Batch:
        return await self.batchwright.part(BatchesPart).batches.get(id, tenant=None)

    def work(self) -> Worker:
        worker = self.batchwright.worker()
        self.workers.append((worker, asyncio.create_task(worker.run())))
        return worker

    async def ended(self, id: str, seconds: float = 60.0) -> Batch:
        """Wait for the end; an error of a worker fails the test at once."""
        async with asyncio.timeout(seconds):
            while not (batch := await self.get(id)).has_ended:
                for _, task in self.workers:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)
        return batch

    async def until(self, id: str, condition: Any, seconds: float = 30.0) -> Batch:
        async with asyncio.timeout(seconds):
            while not condition(batch := await self.get(id)):
                assert not batch.has_ended, f"the batch ended {batch.status} before the condition was met"
                await asyncio.sleep(0.01)
        return batch

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        file = await self.batchwright.part(BatchesPart).files.get(file_id, tenant=None)
        data = b"".join([part async for part in self.batchwright.part(BatchesPart).files.content(file)])
        return [orjson.loads(line) for line in data.splitlines()]

    async def results(self, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return await self.lines(batch.output_file_id), await self.lines(batch.error_file_id)

    async def close(self) -> None:
        for worker, _ in self.workers:
            worker.stop()
        for _, task in self.workers:
            with suppress(asyncio.CancelledError):
                await task


async def given_up(stage: Stage, monkeypatch: Any, id: str) -> Batch:
    """Let the window of a batch pass while it waits for the store; return it as it ended."""
    monkeypatch.setattr(process, "AWAY_SECONDS", 0.05)
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.0)
    async with asyncio.timeout(30):
        while not (await stage.get(id)).waits:
            await asyncio.sleep(0.02)
    sql = "UPDATE batchwright.batch SET expires_at = now() - interval '1 second' WHERE id = %(id)s RETURNING id"
    await stage.batchwright.pool.rows(sql, {"id": id})
    return await stage.ended(id)


def stage_settings(database_url: str, folder: Path, url: str, **parts: Any) -> Settings:
    flags: dict[str, Any] = {
        "database": {"url": database_url, "folder": str(folder)},
        "global_inference_gateway": {"url": url, "initial_backoff": 0.05, "max_backoff": 0.5},
        "worker": {"stop_grace_seconds": 5.0},
        "batches": {"checkpoint_seconds": 0.1},
        "api": {"port": 0},
    }
    if "model_gateways" in parts:
        del flags["global_inference_gateway"]
    for name, values in parts.items():
        flags[name] = {**flags.get(name, {}), **values}
    return load_settings(flags, environment={})


@asynccontextmanager
async def staged(
    database_url: str, folder: Path, *, simulator: SimulatorSettings | None = None, **parts: Any
) -> AsyncIterator[Stage]:
    async with running(simulator) as server:
        settings = stage_settings(database_url, folder, server.url, **parts)
        async with AsyncBatchwright(settings=settings) as batchwright:
            stage = Stage(batchwright=batchwright, simulator=server)
            try:
                yield stage
            finally:
                await stage.close()


ENDED = {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
