"""Fixtures: a sandbox for each test, and collections."""

from __future__ import annotations

import pytest

from batchwright.db.database import Database
from batchwright.ingest.limits import Limits
from batchwright.ingest.sandbox import Sandbox
from tests.ingest.stored import Shelf

PARSERS = "tests.ingest.parsers"
SMALL = Limits(
    cpu_seconds=20, memory_bytes=600_000_000, output_bytes=5_000_000, seconds=30, unpacked_bytes=10_000_000, pages=1_000
)


@pytest.fixture
async def extract(tmp_path):
    """Extracts bytes under a name; `parser` replaces the parser of plain text."""
    sandboxes: dict[str, Sandbox] = {}

    async def call(data, name="document", *, parser="", limits=SMALL):
        path = tmp_path / "stored"
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        if parser not in sandboxes:
            from batchwright.ingest.extract.dispatch import EXTRACTORS

            replaced = {"text": f"{PARSERS}:{parser}"} if parser else {}
            sandboxes[parser] = Sandbox(extractors={**EXTRACTORS, **replaced})
        return await sandboxes[parser].extract(path, name=name, limits=limits)

    call.sandboxes = sandboxes
    yield call
    for sandbox in sandboxes.values():
        await sandbox.close()


@pytest.fixture(params=["pgvector", "without"])
async def shelf(request, pool, clock) -> Shelf:
    """Collections with pgvector and without it; on a server that lacks pgvector, one of the two cases is skipped."""
    shelf = Shelf(Database(pool, clock=clock), use_pgvector=request.param == "pgvector")
    if request.param == "pgvector" and not await shelf.spaces.has_pgvector():
        pytest.skip("this server has no pgvector, so the other case already runs without it")
    return shelf
