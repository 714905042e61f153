"""A whole Batchwright in this process, with two workers, an HTTP server, and a client for each of several tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import openai

from batchwright.access.keys import DEFAULT_SCOPES
from batchwright.batches.journal.envelopes import RequestIds
from batchwright.simulator import Profile, SimulatorSettings
from tests.batches.stage import CHAT, Stage, jsonl, request, staged
from tests.support import raw

ENDED = {"completed", "failed", "expired", "cancelled"}
MODELS = ("large", "medium", "small")
TENANTS = ("ada", "bob", "cyd")
BAD = " [[fault:400]]"
"""A prompt with this text is refused by the model server with a final error."""
SERVER = SimulatorSettings(any_model=Profile(decode_rate=100.0, output_sigma=0.0, max_running=10_000))


@dataclass(kw_only=True)
class Told:
    """A batch, its lines, and the endings that it may have."""

    id: str
    tenant: str
    lines: Sequence[dict[str, Any]]
    endings: set[str] = field(default_factory=lambda: {"completed"})

    @property
    def request_ids(self) -> list[str]:
        ids, batch_ids, offset = [], RequestIds(self.id), 0
        for line in self.lines:
            ids.append(batch_ids.on_the_wire(offset))
            offset += len(jsonl([line]))
        return ids


@dataclass(kw_only=True)
class Company:
    """Users who do random things, and what became of their batches."""

    stage: Stage
    url: str
    chance: Random
    clients: dict[str, openai.AsyncOpenAI]
    made: list[Told] = field(default_factory=list)

    @property
    def stories(self) -> Sequence[Callable[[Told], Awaitable[None]]]:
        return [self.wait, self.wait, self.wait, self.cancel, self.pause, self.limit, self.hurry, self.shorten]

    async def live(self, place: int, *watchers: Callable[[Told], Awaitable[None]]) -> None:
        """One batch: created at a random time, over HTTP or in Python, then a random story, and a check of its end."""
        await self.some_time()
        told = await (self.create if place % 3 else self.submit)(place)
        async with asyncio.TaskGroup() as group:
            for watch in watchers:
                group.create_task(watch(told))
            await self.chance.choice(self.stories)(told)
            await self.check(told, await self.ended(told))

    async def some_time(self) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, 0.6))

    # Creation -----------------------------------------------------------------------------------------------------

    def lines(self, place: int) -> list[dict[str, Any]]:
        models = self.chance.sample(MODELS, self.chance.randint(1, len(MODELS)))
        count = self.chance.randint(1, 16)
        return [
            request(f"{place}-{n}", model=models[n % len(models)], prompt=f"{place}, {n}{BAD * (n % 7 == 6)}")
            for n in range(count)
        ]

    async def create(self, place: int) -> Told:
        tenant, lines = self.chance.choice(TENANTS), self.lines(place)
        client = self.clients[tenant]
        file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        return self.remember(Told(id=batch.id, tenant=tenant, lines=lines))

    async def submit(self, place: int) -> Told:
        tenant, lines = self.chance.choice(TENANTS), self.lines(place)
        return self.remember(Told(id=await self.stage.submit(lines, tenant=tenant), tenant=tenant, lines=lines))

    def remember(self, told: Told) -> Told:
        self.made.append(told)
        return told

    # Stories ------------------------------------------------------------------------------------------------------

    async def wait(self, told: Told) -> None:
        """Do nothing with the batch."""

    async def cancel(self, told: Told) -> None:
        await self.some_time()
        if await self.post(told, "cancel"):
            told.endings = {"cancelled"}

    async def pause(self, told: Told) -> None:
        await self.some_time()
        if await self.post(told, "pause"):
            await self.some_time()
            await self.post(told, "resume")

    async def limit(self, told: Told) -> None:
        if await self.post(told, "limits", {"max_in_flight": 1}):
            await self.some_time()
            await self.post(told, "limits", {})

    async def hurry(self, told: Told) -> None:
        await self.post(told, "priority", {"priority": self.chance.randrange(10)})

    async def shorten(self, told: Told) -> None:
        sql = "UPDATE batchwright.batch SET expires_at = now() + interval '0.5 seconds' WHERE id = %(id)s"
        await raw(self.stage.batchwright.queue, sql, id=told.id)
        told.endings = {"completed", "expired"}

    async def post(self, told: Told, verb: str, body: object = None) -> bool:
        """Returns False if it was too late for that."""
        try:
            await self.clients[told.tenant].post(f"/batches/{told.id}/{verb}", body=body, cast_to=object)
        except openai.ConflictError:
            return False
        return True

    def headers(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.clients[tenant].api_key}"}

    # Ends ---------------------------------------------------------------------------------------------------------

    async def ended(self, told: Told) -> Any:
        """Wait until the batch has ended; bounded by the test's timeout."""
        while (batch := await self.clients[told.tenant].batches.retrieve(told.id)).status not in ENDED:
            self.check_workers()
            await asyncio.sleep(0.1)
        return batch

    def check_workers(self) -> None:
        for _, task in self.stage.workers:
            if task.done():
                task.result()

    async def check(self, told: Told, batch: Any) -> None:
        assert batch.status in told.endings, (batch, told.endings)
        begun = await self.stage.get(told.id)
        output, errors = await self.stage.results(begun)
        expected = [line["custom_id"] for line in told.lines] if begun.in_progress_at else []
        assert sorted(line["custom_id"] for line in [*output, *errors]) == sorted(expected)
        counts = (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed)
        assert counts == (len(expected), len(output), len(errors)), batch
        asked = self.asked(told)
        if batch.status == "completed":
            assert set(asked) <= {1}, asked
            assert len(asked) == len(expected)
            assert len(errors) == sum(BAD in line["body"]["messages"][0]["content"] for line in told.lines)
        else:
            assert set(asked) <= {0, 1}, asked
            assert len(output) <= sum(asked)

    def asked(self, told: Told) -> list[int]:
        """How often each line was sent to the model server."""
        found = self.stage.simulator.asked(by="request_id", limit=1_000_000)["requests"]
        return [found.get(id, 0) for id in told.request_ids]


@asynccontextmanager
async def company(database_url: str, folder: Path, chance: Random) -> AsyncIterator[Company]:
    parts = {
        "api": {"port": 0},
        "database": {"pool_size": 20},
        "batches": {"checkpoint_seconds": 0.1, "cancel_grace_seconds": 5.0},
    }
    async with staged(database_url, folder, simulator=SERVER, **parts) as stage:
        server = await stage.batchwright.server()
        server.start()
        clients = {}
        for tenant in TENANTS:
            key = await stage.batchwright.keys.create("test", tenant=tenant, scopes=DEFAULT_SCOPES)
            url = f"{server.url}/v1"
            clients[tenant] = openai.AsyncOpenAI(base_url=url, api_key=key.secret, timeout=60, max_retries=0)
        for _ in range(2):
            await stage.work().started.wait()
        try:
            yield Company(stage=stage, url=server.url, chance=chance, clients=clients)
        finally:
            for client in clients.values():
                await client.close()
            await server.close()
