"""The environment of the failover chaos: machines that share a database and a store, and their users."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from batchwright import JobId, NewJob
from batchwright.app import AsyncBatchwright
from batchwright.batches.output.verify import verify
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch, NewBatch
from batchwright.batches.submission import create, store_input
from batchwright.db.check import Finding
from batchwright.engine.named_queues import NamedQueues
from batchwright.errors import DatabaseUnavailable
from batchwright.settings import load_settings
from tests.chaos.batch_client import CHAT, Workload
from tests.chaos.batch_fleet import Fleet, Post
from tests.chaos.operations import EFFECTS, OPERATIONS
from tests.storage.conftest import S3

T = TypeVar("T")
StoreKind = Literal["folder", "s3"]
MACHINES = ("machine-a", "machine-b")
_ANSWER_SECONDS_MAX = 60.0
_INPUT_BYTES_MAX = 1 << 30
_LOOK_SECONDS = 0.02
_PAUSE_SECONDS = 0.05
_S3 = Path(__file__).parents[1] / "storage" / "s3_server.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all machines of a round share."""

    database_url: str
    gateway_url: str
    storage_url: str
    environment: Mapping[str, str]
    """Where the store is, and its keys, if it is not a folder."""
    checkpoint_seconds: float
    in_flight: int
    lease_seconds: float


def configure(machine: Path, shared: Shared) -> Path:
    """Write the settings of one machine, whose work folder is its own."""
    machine.mkdir()
    path = machine / "batchwright.toml"
    path.write_text(
        f"""
        [database]
        url = "{shared.database_url}"
        folder = "{machine}"
        [storage]
        url = "{shared.storage_url}"
        [batches]
        work_dir = "{machine / "work"}"
        checkpoint_seconds = {min(1.0, shared.checkpoint_seconds)}
        shared_checkpoint_seconds = {shared.checkpoint_seconds}
        cancel_grace_seconds = 2.0
        [engine]
        lease_seconds = {shared.lease_seconds}
        [worker]
        stop_grace_seconds = 3.0
        [log]
        form = "json"
        [inference]
        concurrency = {shared.in_flight}
        model_concurrency_min = 10
        model_concurrency_start = 10
        [global_inference_gateway]
        url = "{shared.gateway_url}"
        initial_backoff = 0.1
        max_backoff = 1.0
        """
    )
    return path


def machines(folder: Path, shared: Shared, launchers: Mapping[str, Sequence[str]] | None = None) -> Fleet:
    """One worker on each machine, each with its own host name. A launcher starts a command on its machine."""
    posts = []
    logs = folder / "logs"
    logs.mkdir()
    for name in MACHINES:
        command = ("batchwright", "worker", "tests.chaos.operations", "--config", str(configure(folder / name, shared)))
        environment = {**shared.environment, "HOSTNAME": name}
        launcher = (launchers or {}).get(name, ())
        posts.append(Post(kind="worker", command=command, environment=environment, launcher=launcher))
    return Fleet(posts, folder, logs)


@contextlib.contextmanager
def store(kind: StoreKind, folder: Path, address: str = "127.0.0.1") -> Iterator[tuple[str, Mapping[str, str]]]:
    """The URL of a store that all machines share, and the environment that it needs."""
    if kind == "folder":
        yield f"file://{folder / 'store'}", {}
        return
    with subprocess.Popen([sys.executable, _S3, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        s3 = S3(int(server.stdout.readline()), address)
        keys = {"AWS_ACCESS_KEY_ID": "the-key-id", "AWS_SECRET_ACCESS_KEY": "the-secret", "AWS_REGION": "us-east-1"}
        try:
            yield f"s3://{s3.bucket}/batchwright", {"AWS_ENDPOINT_URL": s3.endpoint, **keys}
        finally:
            server.stdin.close()


class User:
    """Creates the batch, polls it and cancels it; a call that got no answer is repeated."""

    def __init__(self, batchwright: AsyncBatchwright) -> None:
        self.batchwright = batchwright
        self.repeated = 0
        self.batch_id = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def at(cls, config: Path) -> AsyncIterator[User]:
        """A user on this machine, with the schema and the table for effects."""
        batchwright = AsyncBatchwright(settings=load_settings({}, environment={}, file=config), operations=OPERATIONS)
        await batchwright.open(migrated=False)
        try:
            await batchwright.migrate()
            for statement in EFFECTS.split(";"):
                await batchwright.pool.rows(statement)
            yield cls(batchwright)
        finally:
            await batchwright.close()

    async def submit(self, work: Workload, folder: Path) -> None:
        """Called before workers have registered their operations, so it is not checked whether batches are served."""
        path = folder / "input.jsonl"
        path.write_bytes(work.data)
        files, batches = self.batchwright.part(BatchesPart).files, self.batchwright.part(BatchesPart).batches
        file = await store_input(files, path, tenant="default", bytes_max=_INPUT_BYTES_MAX)
        new = NewBatch(tenant="default", endpoint=CHAT, input_file_id=file.id, completion_window="24h")
        batch, _ = await create(batches, self.batchwright.catalog, new, must_be_served=False)
        self.batch_id = batch.id

    async def batch(self) -> Batch:
        return await self.answered(lambda: self.batchwright.part(BatchesPart).batches.get(self.batch_id, tenant=None))

    async def cancel(self) -> Batch:
        return await self.answered(
            lambda: self.batchwright.part(BatchesPart).batches.cancel(self.batch_id, tenant=None)
        )

    async def pause(self, model: str) -> None:
        """Keep workers from claiming shards of this model, which has none yet."""
        sql = "INSERT INTO batchwright.queue (name, paused_at) VALUES (%(name)s, now())"
        await self.answered(lambda: self.batchwright.pool.rows(sql, {"name": f"shard/{model}"}))

    async def resume(self, model: str) -> None:
        await self.answered(lambda: NamedQueues(self.batchwright.queue.database).resume(f"shard/{model}"))

    async def ended(self) -> Batch:
        while not (batch := await self.batch()).has_ended:
            await asyncio.sleep(_LOOK_SECONDS)
        return batch

    async def content(self, file_id: str | None) -> bytes:
        if file_id is None:
            return b""
        files = self.batchwright.part(BatchesPart).files
        file = await files.get(file_id, tenant=None)
        return b"".join([part async for part in files.content(file)])

    async def findings(self, batch: Batch) -> list[Finding]:
        return await verify(self.batchwright.part(BatchesPart).files, batch)

    async def until(self, sql: str, **params: Any) -> None:
        """Wait until a query returns true."""
        while True:
            ((is_true,),) = await self.answered(lambda: self.batchwright.pool.rows(sql, params or None))
            if is_true:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def answered(self, call: Callable[[], Awaitable[T]]) -> T:
        async with asyncio.timeout(_ANSWER_SECONDS_MAX):
            while True:
                try:
                    return await call()
                except DatabaseUnavailable:
                    self.repeated += 1
                    await asyncio.sleep(_PAUSE_SECONDS)


@dataclass(slots=True)
class Ledger:
    """When the database confirmed each job."""

    enqueued: dict[JobId, float] = field(default_factory=dict)
    held_at: float = float("inf")
    """From then on, confirmed commits were not safe."""

    @property
    def safe(self) -> set[JobId]:
        return {id for id, at in self.enqueued.items() if at <= self.held_at}


class Feed:
    """Ordinary jobs beside the batch, each with an effect in the commit that ends it."""

    def __init__(self, user: User) -> None:
        self.ledger = Ledger()
        self.between_calls = asyncio.Lock()
        """While it is held, every enqueue call has been answered."""
        self._user = user
        self._is_over = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        feeding = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._is_over = True
            await feeding

    async def _run(self) -> None:
        while not self._is_over:
            async with self.between_calls:
                await self._put()
            await asyncio.sleep(2 * _PAUSE_SECONDS)

    async def _put(self) -> None:
        """The id is chosen here, so a call whose answer was lost can be repeated."""
        job = NewJob("chaos.write", {"seconds": 0.05})
        (id,) = await self._user.answered(lambda: self._user.batchwright.enqueue([job]))
        self.ledger.enqueued[id] = time.time()
