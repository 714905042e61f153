"""What the tests of `batchwright batch` share: input files, a simulated model server, and batches in any state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from batchwright.batches.store import Batch
from tests.batches.stage import Stage, jsonl, request, staged

GOOD = [request(f"r{n}") for n in range(4)]
MIXED = [request("good"), request("bad", prompt="[[fault:400:code=odd]]"), request("also good", model="large")]


def write(path: Path, lines: Sequence[Any] = GOOD) -> Path:
    path.write_bytes(jsonl(lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def ids(lines: Sequence[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def on_stage(database_url: str, folder: Path, act: Callable[[Stage], Awaitable[Batch]], **parts: Any) -> Batch:
    """Run `act` in this process with its own stage and simulator, as another process would meanwhile."""

    async def go() -> Batch:
        async with staged(database_url, folder, **parts) as stage:
            return await act(stage)

    return asyncio.run(go())


def ended(database_url: str, folder: Path, lines: Sequence[Any] = GOOD, **parts: Any) -> Batch:
    async def act(stage: Stage) -> Batch:
        stage.work()
        return await stage.ended(await stage.submit(lines))

    return on_stage(database_url, folder, act, **parts)


def waiting(database_url: str, folder: Path, lines: Sequence[Any] = GOOD) -> Batch:
    """A batch that no worker has started."""

    async def act(stage: Stage) -> Batch:
        return await stage.get(await stage.submit(lines))

    return on_stage(database_url, folder, act)
