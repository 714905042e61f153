"""A client, workers and stored files, for tests of `compute_embeddings`."""

from __future__ import annotations

import asyncio
import io
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from batchwright.app import AsyncBatchwright
from batchwright.engine.jobs import Job, JobId
from batchwright.files.part import FilesPart
from batchwright.files.store import NewFile, new_file_id, object_key
from batchwright.inference.local import HashEmbedder
from tests.ingest.stage import ingest_stage

COMPUTE = "compute_embeddings"
HASH = HashEmbedder()


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def rows(count: int, text: str = "text number {}") -> list[dict[str, Any]]:
    return [{"id": f"row-{n}", "text": text.format(n)} for n in range(count)]


def near(found: list[float], text: str) -> bool:
    expected = array("f", HASH.vectors([text])[0])
    return len(found) == len(expected) and all(abs(a - b) < 1e-6 for a, b in zip(found, expected, strict=True))


class EmbeddingStage:
    def __init__(self, batchwright: AsyncBatchwright, workers: Any) -> None:
        self.batchwright = batchwright
        self._stage = workers

    def work(self) -> Any:
        return self._stage.work()

    async def upload(self, data: bytes, *, tenant: str = "default") -> str:
        id = new_file_id()
        stored = await self.batchwright.store.put(object_key(id), data)
        new = NewFile(id=id, tenant=tenant, purpose="user_data", filename="rows", stored=stored)
        await self.batchwright.part(FilesPart).files.add(new)
        return id

    async def submit(self, source: Any, **payload: Any) -> JobId:
        if isinstance(source, bytes):
            source = await self.upload(source)
        self.batchwright.add_operations() if COMPUTE not in self.batchwright.operations.names() else None
        return await self.batchwright.enqueue(COMPUTE, {"source": source, "model": "hash", **payload})

    async def run(self, source: Any, *, seconds: float = 60.0, **payload: Any) -> dict[str, Any]:
        """Submit, and wait for the result."""
        return await self.batchwright.wait(await self.submit(source, **payload), timeout=seconds)

    async def content(self, id: str, *, tenant: str = "default") -> bytes:
        files = self.batchwright.part(FilesPart).files
        file = await files.get(id, tenant=tenant)
        data = b"".join([chunk async for chunk in files.content(file)])
        assert len(data) == file.bytes
        return data

    async def lines(self, id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.content(id)).splitlines()]

    async def table(self, id: str) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.read_table(io.BytesIO(await self.content(id)))

    async def children(self, id: JobId) -> list[Job]:
        found = await self.rows("SELECT id FROM batchwright.job WHERE parent_job_id = %(id)s ORDER BY id", id=id)
        return [await self.batchwright.get(child) for (child,) in found]

    async def parts(self) -> list[str]:
        """The objects that batches have left in the store."""
        return [found.key async for found in self.batchwright.store.list("embeddings")]

    async def files(self) -> list[tuple[str, str]]:
        return await self.rows("SELECT purpose, id FROM batchwright.file WHERE purpose LIKE 'embeddings%%' ORDER BY 1")

    async def rows(self, sql: str, **params: Any) -> list[Any]:
        return await self.batchwright.pool.rows(sql, params)

    async def until(self, condition: Any, seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not await condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def embedding_stage(database_url: str, folder: Path, **tables: Any) -> AsyncIterator[EmbeddingStage]:
    async with ingest_stage(database_url, folder, **tables) as stage:
        yield EmbeddingStage(stage.batchwright, stage)
