"""Random events at once: users change batches, workers start and stop, the store and the database fail.

Whatever happens, a batch ends once and in the right state, each line is in one of its files, and nothing is left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchwright.batches import process
from batchwright.batches.journal.workspace import JOURNAL
from batchwright.batches.part import BatchesPart
from batchwright.batches.runtime import Runtime
from batchwright.batches.send import shard as execution
from batchwright.batches.store import Batch
from batchwright.db.database import Pool
from batchwright.engine.worker.worker import Worker
from batchwright.errors import Conflict, DatabaseUnavailable, StorageFull, StorageUnavailable
from batchwright.simulator import Profile, SimulatorSettings
from batchwright.states import BatchStatus
from batchwright.storage import Store
from tests.batches.stage import Stage, request, staged
from tests.support import raw

SEEDS = [int(seed) for seed in os.environ.get("BATCHWRIGHT_STORM_SEEDS", "1 4 23 106").split()]
BATCHES = 2
REQUESTS = 90
MOVES = 12
WEATHER = SimulatorSettings(
    any_model=Profile(decode_rate=100.0, output_sigma=0.0, max_running=1000),
    faults=("429:0.05:retry_after=0.1:times=1", "500:0.05:times=1", "drop:0.05:times=1", "400:0.03"),
)


@dataclass(kw_only=True)
class Weather:
    """What fails at the moment."""

    chance: Random
    database: bool = False
    store: bool = False

    def breaks(self) -> bool:
        return self.database and self.chance.random() < 0.7


@pytest.fixture
def weather(monkeypatch):
    """Let the database fail before or after it has run a statement, and let the store refuse writes."""
    now = Weather(chance=Random())
    rows, transaction, put, put_file = Pool.rows, Pool.transaction, Store.put, Store.put_file

    async def broken_rows(self, *args):
        if now.breaks():
            raise DatabaseUnavailable("away")
        found = await rows(self, *args)
        if now.breaks():
            raise DatabaseUnavailable("the answer is lost")
        return found

    @asynccontextmanager
    async def broken_transaction(self):
        if now.breaks():
            raise DatabaseUnavailable("away")
        async with transaction(self) as session:
            yield session
        if now.breaks():
            raise DatabaseUnavailable("nobody knows whether it was committed")

    async def broken_put(self, key, *args, **options):
        if now.store:
            raise StorageFull("no room") if key.startswith("files/") else StorageUnavailable("away")
        return await put(self, key, *args, **options)

    async def broken_put_file(self, key, *args):
        if now.store:
            raise StorageUnavailable("away")
        return await put_file(self, key, *args)

    for module in (execution, process):
        monkeypatch.setattr(module, "AWAY_SECONDS", 0.1)
    monkeypatch.setattr(Pool, "rows", broken_rows)
    monkeypatch.setattr(Pool, "transaction", broken_transaction)
    monkeypatch.setattr(Store, "put", broken_put)
    monkeypatch.setattr(Store, "put_file", broken_put_file)
    return now


@dataclass(kw_only=True)
class Storm:
    """One run. Its moves depend only on `chance`, their effects also on timing."""

    stage: Stage
    weather: Weather
    chance: Random
    ids: list[str]
    crew: list[tuple[Worker, Runtime]] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    shortened: set[str] = field(default_factory=set)

    async def rage(self) -> None:
        verbs: list[Callable[[str], Awaitable[Any]]] = [
            *(self.pause, self.resume, self.limit, self.hurry, self.relieve, self.reinforce),
            *(self.break_store, self.break_database, self.break_connections),
        ]
        rare = [self.cancel, self.shorten]
        for _ in range(MOVES):
            verb = self.chance.choice(verbs if self.chance.random() < 0.9 else rare)
            await verb(self.chance.choice(self.ids))
            await asyncio.sleep(self.chance.uniform(0.0, 0.2))

    async def calm(self) -> None:
        self.weather.database = self.weather.store = False
        for id in self.ids:
            await self.resume(id)
        if not self.crew:
            await self.reinforce("")

    # Users

    async def insist(self, call: Callable[[], Awaitable[Any]]) -> bool:
        """Call a verb again until it answers; False if it is refused."""
        while True:
            try:
                await call()
            except DatabaseUnavailable:
                await asyncio.sleep(0.01)
            except Conflict:
                return False
            else:
                return True

    async def cancel(self, id: str) -> None:
        if await self.insist(lambda: self.stage.batchwright.part(BatchesPart).batches.cancel(id, tenant=None)):
            self.cancelled.add(id)

    async def pause(self, id: str) -> None:
        await self.insist(lambda: self.stage.batchwright.part(BatchesPart).batches.pause(id, tenant=None))

    async def resume(self, id: str) -> None:
        await self.insist(lambda: self.stage.batchwright.part(BatchesPart).batches.resume(id, tenant=None))

    async def limit(self, id: str) -> None:
        limits = self.chance.choice([{}, {"max_in_flight": 1}, {"max_in_flight": 5}])
        await self.insist(lambda: self.stage.batchwright.part(BatchesPart).batches.set_limits(id, limits, tenant=None))

    async def hurry(self, id: str) -> None:
        priority = self.chance.randrange(10)
        await self.insist(
            lambda: self.stage.batchwright.part(BatchesPart).batches.set_priority(id, priority, tenant=None)
        )

    async def shorten(self, id: str) -> None:
        sql = "UPDATE batchwright.batch SET expires_at = now() + interval '0.5 seconds' WHERE id = %(id)s"
        self.shortened.add(id)
        await self.insist(lambda: raw(self.stage.batchwright.queue, sql, id=id))

    # Operators

    async def reinforce(self, _: str) -> None:
        """Start a worker; one that finds no database exits and is started again."""
        while True:
            worker, runtime = self.stage.work(), self.stage.batchwright.part(BatchesPart).runtime
            assert runtime is not None
            _, running = self.stage.workers[-1]
            started = asyncio.create_task(worker.started.wait())
            await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                self.crew.append((worker, runtime))
                return
            started.cancel()
            assert isinstance(running.exception(), DatabaseUnavailable)
            self.stage.workers.pop()

    async def relieve(self, _: str) -> None:
        if self.crew:
            worker, _ = self.crew.pop(self.chance.randrange(len(self.crew)))
            worker.stop()

    async def break_store(self, _: str) -> None:
        self.weather.store = True
        asyncio.get_running_loop().call_later(self.chance.uniform(0.0, 0.6), setattr, self.weather, "store", False)

    async def break_database(self, _: str) -> None:
        self.weather.database = True
        asyncio.get_running_loop().call_later(self.chance.uniform(0.0, 0.4), setattr, self.weather, "database", False)

    async def break_connections(self, _: str) -> None:
        sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        with suppress(DatabaseUnavailable):
            await raw(self.stage.batchwright.queue, sql)

    # Afterwards

    async def check(self, id: str) -> None:
        batch = await self.stage.ended(id, 30)
        assert batch.status in self.endings(batch), (batch.status, batch.errors, self.endings(batch))
        output, errors = await self.stage.results(batch)
        expected = [f"r{n}" for n in range(REQUESTS)] if batch.in_progress_at else []
        places = [[expected.index(line["custom_id"]) for line in lines] for lines in (output, errors)]
        assert all(one == sorted(one) for one in places)
        assert sorted(places[0] + places[1]) == list(range(len(expected)))
        assert (batch.total, batch.completed, batch.done) == (len(expected), len(output), len(expected))
        if batch.in_progress_at:
            assert batch.manifest is not None
            assert sum(n for n, _ in batch.error_summary.values()) == len(errors)

    def endings(self, batch: Batch) -> set[BatchStatus]:
        if batch.id in self.cancelled:
            return {BatchStatus.CANCELLED}
        return {BatchStatus.COMPLETED} | ({BatchStatus.EXPIRED} if batch.id in self.shortened else set())

    async def check_that_nothing_is_left(self) -> None:
        """Check this after a moment in which workers release what they have lost."""
        left: list[Any] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while left := await self.leftovers():
                    await asyncio.sleep(0.02)
        assert left == []

    async def leftovers(self) -> list[Any]:
        held = "lease_until IS NOT NULL OR status IN ('QUEUED', 'RUNNING')"
        jobs = await raw(self.stage.batchwright.queue, f"SELECT job_type, status FROM batchwright.job WHERE {held}")
        journals = [path for path in _open_files() if path.suffix == JOURNAL]
        in_hand = [one for _, runtime in self.crew for one in _in_hand(runtime)]
        in_flight = self.stage.simulator.stats()["in_flight"]
        return [*jobs, *journals, *in_hand, *([in_flight] if in_flight else [])]


def _in_hand(runtime: Runtime) -> list[Any]:
    """What a worker still holds for batches."""
    dispatcher, limits = runtime.dispatcher, runtime.dispatcher.limits
    senders = dispatcher.senders.values()
    slots = [limits.total, limits.bytes, *(sender.limit.slots for sender in senders)]
    schedules = [(sender.schedule.unsent, sender.schedule.in_flight, sender.schedule.retrying) for sender in senders]
    return [
        *((one.name, one.in_use, len(one._waiting)) for one in slots if one.in_use or one._waiting),
        *(counts for counts in schedules if any(counts)),
        *(work for sender in senders for work in sender.work.values()),
        *(what for what in (runtime.shards.held, dispatcher.broken) if what),
    ]


def _open_files() -> list[Path]:
    """The number of open files, on systems that can say it."""
    found, folder = [], Path("/proc/self/fd")
    for descriptor in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):
            found.append(descriptor.readlink())
    return found


@pytest.mark.parametrize("seed", SEEDS)
async def test_after_random_failures_every_line_is_in_one_file_and_nothing_is_left_behind(
    database_url, tmp_path, weather, seed
):
    chance = Random(seed)
    weather.chance = Random(seed)
    parts = {
        "inference": {"concurrency": 12},
        "batches": {"checkpoint_seconds": 0.1, "shared_checkpoint_seconds": 0.2, "cancel_grace_seconds": 0.3},
        "worker": {"stop_grace_seconds": chance.choice([0.05, 2.0])},
        "engine": {"lease_seconds": 2.0, "rescue_jitter_seconds": 0.0},
        **({"storage": {"url": f"file://{tmp_path}/store"}} if chance.random() < 0.5 else {}),
    }
    async with staged(database_url, tmp_path, simulator=WEATHER, **parts) as stage:
        lines = [request(f"r{n}", model=f"model-{n % 3}") for n in range(REQUESTS)]
        ids = [await stage.submit(lines, tenant=f"tenant-{n}") for n in range(BATCHES)]
        storm = Storm(stage=stage, weather=weather, chance=chance, ids=ids)
        await storm.reinforce("")
        await storm.rage()
        await storm.calm()
        for id in ids:
            await storm.check(id)
        await storm.check_that_nothing_is_left()
