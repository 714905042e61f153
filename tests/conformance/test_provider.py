"""Another Batchwright as a provider: our adapter of OpenAI's protocol, against a real server of it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from batchwright.errors import Fatal
from batchwright.inference.http import Http
from batchwright.providers.contract import Adapter, Cancelled, Ending, Input, Job, Phase, Request, Status
from batchwright.providers.registry import find_adapters, make_adapter
from batchwright.providers.tools import AdapterTools
from tests.batches.stage import jsonl, request
from tests.conformance.conftest import SLOW, Running


class Elsewhere:
    """An adapter whose provider is another Batchwright."""

    def __init__(self, http: Http, url: str, secret: str) -> None:
        self._stored: dict[str, bytes] = {}
        tools = AdapterTools(http, open_stored=self._open, environment={"KEY": secret})
        self.adapter: Adapter = make_adapter(find_adapters(), "openai", {"base_url": url, "api_key_env": "KEY"}, tools)

    async def _open(self, id: str) -> Any:
        yield self._stored[id]

    def request(self, *lines: Any) -> Request:
        self._stored["f"] = data = jsonl(list(lines))
        input = Input(id="i", uri="file:f", filename="in.jsonl", bytes=len(data))
        return Request(key="bw-1", task_type="completion", model=None, inputs=[input])

    async def submit(self, asked: Request) -> tuple[Job, dict[str, Any]]:
        assert not await self.adapter.inspect(asked)
        staged: dict[str, Any] = {}
        async for committed in self.adapter.stage(asked, staged):
            staged = dict(committed)
        return await self.adapter.submit(asked, staged), staged

    async def ended(self, job: Job) -> Status:
        while (status := await self.adapter.poll(job)).phase is not Phase.ENDED:
            await asyncio.sleep(0.05)
        return status


async def elsewhere(http: Http, running: Running, tenant: str) -> Elsewhere:
    return Elsewhere(http, running.url, await asyncio.to_thread(running.secret, tenant))


async def test_a_batch_runs_on_another_batchwright(running: Running, tenant: str) -> None:
    async with Http() as http:
        other = await elsewhere(http, running, tenant)
        asked = other.request(request("a"), request("b"), request("c"))
        job, staged = await other.submit(asked)
        since = datetime.now(UTC) - timedelta(seconds=60)
        found = await other.adapter.find(asked, staged, since)
        assert [one.external_id for one in found] == [job.external_id]
        status = await other.ended(job)
        assert (status.ending, status.counts.succeeded) == (Ending.SUCCEEDED, 3)
        results = [one async for one in other.adapter.results(asked, job, status)]
        assert sorted(one.key for one in results) == ["a", "b", "c"]
        assert all(one.value is not None and one.usage.output_tokens for one in results)
        assert await other.adapter.cancel(job) is Cancelled.ENDED_ALREADY
        await other.adapter.clean_up(asked, staged, job)
        await other.adapter.clean_up(asked, staged, job)


async def test_a_batch_on_another_batchwright_is_cancelled(running: Running, tenant: str) -> None:
    async with Http() as http:
        other = await elsewhere(http, running, tenant)
        asked = other.request(request("a", model=SLOW), request("b", model=SLOW))
        job, _ = await other.submit(asked)
        assert await other.adapter.cancel(job) is Cancelled.REQUESTED
        status = await other.ended(job)
        assert status.ending is Ending.CANCELLED
        results = [one async for one in other.adapter.results(asked, job, status)]
        assert [one.value for one in results] == [None, None]


async def test_a_wrong_key_is_refused_by_another_batchwright(running: Running, tenant: str) -> None:
    async with Http() as http:
        right = await elsewhere(http, running, tenant)  # this first: a server needs no key until one exists
        assert "accepts the key" in await right.adapter.check()
        with pytest.raises(Fatal) as caught:
            await Elsewhere(http, running.url, "bw-wrong").adapter.check()
        assert caught.value.scope == "credential"
