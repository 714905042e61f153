"""Many readers at once: lists, event streams and results, while batches begin and end."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import orjson
import pytest

from tests.api.streaming import Stream
from tests.perturbed.company import TENANTS, company
from tests.perturbed.conftest import SCALE

pytestmark = pytest.mark.timeout(240)
BATCHES = 10 * SCALE


class Readers:
    """Readers that each must read everything once and in order."""

    def __init__(self, crowd):
        self._crowd = crowd
        self.over = asyncio.Event()

    async def follow_events(self, told):
        """Follow an event stream, disconnect at random, and resume."""
        queue, seen = self._crowd.stage.batchwright.queue, []
        job = (await self._crowd.stage.get(told.id)).job_id
        while True:
            last = seen[-1] if seen else None
            async with await Stream.open(
                self._crowd.url, job, last_id=last, **self._crowd.headers(told.tenant)
            ) as stream:
                if stream.status == 204 or await self._read_some(stream, seen):
                    break
        assert seen == [event.id for event in await queue.events(job)]

    async def _read_some(self, stream, seen):
        """Read one connection; return whether the end was reached."""
        patience = self._crowd.chance.randint(1, 4)
        while (message := await stream.next()) is not None:
            if message.get("event") == "end":
                return True
            if "id" in message:
                seen.append(int(message["id"]))
                patience -= 1
            if patience == 0:
                return False
        raise AssertionError("the server closed the connection")

    async def follow_results(self, told):
        url, headers = f"{self._crowd.url}/v1/batches/{told.id}/results", self._crowd.headers(told.tenant)
        async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
            async with http.stream("GET", url, params={"follow": "true"}) as answer:
                followed = await answer.aread()
            await self._check_results(told, followed)
            await self._check_results(told, await self._read_pages(http, url))

    async def _read_pages(self, http, url):
        read, cursor = b"", None
        while True:
            page = (await http.get(url, params={} if cursor is None else {"after": cursor})).raise_for_status()
            read += page.content
            cursor = page.headers.get("x-next-cursor")
            if cursor is None:
                return read

    async def _check_results(self, told, data):
        """Check the results against the files, which also contain lines that were never sent."""
        batch = await self._crowd.stage.get(told.id)
        assert batch.has_ended
        shown = Counter(orjson.loads(line)["custom_id"] for line in data.splitlines())
        output, errors = await self._crowd.stage.results(batch)
        assert set(shown.values()) <= {1}
        answered = {line["custom_id"] for line in [*output, *errors] if line["response"] is not None}
        assert answered <= shown.keys() <= {line["custom_id"] for line in told.lines}

    async def list_batches(self, tenant):
        """List repeatedly: batches that existed at the start of a list must be in it once, the newest first."""
        while not self.over.is_set():
            before = {told.id for told in self._crowd.made if told.tenant == tenant}
            found = [batch.id async for batch in self._crowd.clients[tenant].batches.list(limit=2)]
            assert found == sorted(set(found), reverse=True)
            assert before <= set(found)
            others = {told.id for told in self._crowd.made if told.tenant != tenant}
            assert not others & set(found)
            await self._crowd.some_time()


async def test_readers_see_everything_once_while_batches_begin_and_end(database_url, tmp_path, chance):
    async with company(database_url, tmp_path, chance) as crowd, asyncio.TaskGroup() as group:
        readers = Readers(crowd)
        for tenant in TENANTS:
            group.create_task(readers.list_batches(tenant))
        watchers = (readers.follow_events, readers.follow_results)
        await asyncio.gather(*(crowd.live(place, *watchers) for place in range(BATCHES)))
        readers.over.set()
