"""A stage for batches that go to outside providers: the stage for whole batches, and the contract server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.app import AsyncBatchwright
from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batch, Batches
from batchwright.providers.jobs import RemoteJob
from batchwright.providers.part import ProvidersPart
from batchwright.simulator import SimulatorSettings, running
from batchwright.simulator.providers import Server
from batchwright.simulator.providers import running as running_providers
from tests.batches.stage import Stage, stage_settings

SECRET = "bw-test-secret-0123456789"
PROVIDERS = ("openai", "anthropic", "gemini", "mistral", "groq")
MODELS = {
    "gpt": {"provider": "openai", "provider_model": "gpt-5-mini"},
    "claude": {"provider": "anthropic"},
    "gemini-2.5-flash": {"provider": "gemini"},
}


@dataclass(slots=True, kw_only=True)
class ProviderStage(Stage):
    providers: Server
    key_file: Path

    @property
    def batches(self) -> Batches:
        return self.batchwright.part(BatchesPart).batches

    def pass_time(self, seconds: float | None = None) -> None:
        """Advance the providers' clock, by default until their jobs have ended."""
        settings = self.providers.settings
        self.providers.advance(settings.queue_seconds + settings.run_seconds + 1 if seconds is None else seconds)

    def remote(self, provider: str | None = None) -> list[Any]:
        """The jobs that the contract server has."""
        jobs = self.providers.world.jobs.values()
        return [job for job in jobs if provider in (None, job.provider)]

    async def rows(self, id: str) -> list[RemoteJob]:
        sql = "SELECT owner FROM batchwright.provider_job WHERE owner LIKE %(id)s ORDER BY owner"
        owners = {owner for (owner,) in await self.batchwright.pool.rows(sql, {"id": f"{id}/%"})}
        jobs = self.batchwright.part(ProvidersPart).jobs
        return [row for owner in sorted(owners) for row in await jobs.of(owner)]

    async def submitted(self, id: str, count: int = 1, seconds: float = 30.0) -> list[RemoteJob]:
        """Wait until this number of jobs of the batch is at the providers."""
        async with asyncio.timeout(seconds):
            while len(rows := [row for row in await self.rows(id) if row.phase == "submitted"]) < count:
                self.look()
                await asyncio.sleep(0.02)
        return rows

    async def finished(self, id: str, count: int = 1) -> Batch:
        """Wait until the providers have received this number of jobs, let them finish, and wait for the batch's end."""
        async with asyncio.timeout(30.0):
            while len(self.remote()) < count:
                self.look()
                await asyncio.sleep(0.02)
        self.pass_time()
        return await self.ended(id)

    def look(self) -> None:
        for _, task in self.workers:
            if task.done():
                task.result()


@asynccontextmanager
async def provider_stage(
    database_url: str,
    folder: Path,
    *,
    models: dict[str, dict[str, Any]] | None = None,
    tables: dict[str, dict[str, Any]] | None = None,
    simulator: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    own_simulator: SimulatorSettings | None = None,
    **parts: Any,
) -> AsyncIterator[ProviderStage]:
    key_file = folder / "key"
    key_file.write_text(SECRET)
    async with running(own_simulator) as server, running_providers(**(simulator or {})) as providers:
        small = {"url": server.url, "initial_backoff": 0.05, "max_backoff": 0.5, **(own or {})}
        written = {
            name: {"base_url": providers.urls[name], "api_key_file": str(key_file), "settle_seconds": 0.5}
            for name in PROVIDERS
        }
        for name, values in (tables or {}).items():
            written[name] = {**written.get(name, {}), **values}
        settings = stage_settings(
            database_url,
            folder,
            server.url,
            model_gateways={"small": small} | (MODELS if models is None else models),
            providers=written,
            tasks={"poll_interval_seconds": 0.1},
            **parts,
        )
        async with AsyncBatchwright(settings=settings) as batchwright:
            stage = ProviderStage(batchwright=batchwright, simulator=server, providers=providers, key_file=key_file)
            try:
                yield stage
            finally:
                await stage.close()
