"""A worker dies at any point of an item's life: another one finishes it, with every step once and the right bill.

The n-th item dies at its n-th point: after each commit, and after each call to the model server or to the store.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from batchwright.db.database import Database
from batchwright.engine.queue import Queue
from batchwright.inference.gateway import Gateway
from batchwright.ingest.ledger import Answers
from batchwright.ingest.library import Library
from batchwright.ingest.rates import Rates
from batchwright.ingest.spaces import Spaces
from batchwright.states import ItemStatus
from tests.chaos.document_verdict import Evidence, judge
from tests.ingest.bench import Bench, remote
from tests.ingest.fake_provider import FakeProvider
from tests.ingest.stage import ingest_stage
from tests.providers.mortal import Mortal, MortalSource

POINTS_MAX = 80
pytestmark = [
    pytest.mark.timeout(300),
    # A worker that dies does not close anything.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Ward:
    """Items, and workers that die while they have them."""

    def __init__(self, bench, mortal):
        self.bench, self.mortal = bench, mortal
        self.deaths = 0
        stage, tools = bench.stage, bench.tools
        queue = Queue(Database(MortalSource(stage.batchwright.pool, mortal)), bench.queue.settings)
        spaces = Spaces(queue.database)
        self.tools = replace(
            tools,
            queue=queue,
            store=mortal.guard(tools.store, "store"),
            answers=Answers(queue.database),
            library=Library(queue.database, spaces),
            rates=Rates(queue.database, tools.models.gateway),
            spaces=spaces,
        )

    async def live(self, item):
        for _ in range(30):
            if (await self.bench.get(item)).has_ended:
                return
            claim = await self.bench.claim(item)
            await self.run(claim, item)
        raise AssertionError(self.bench.outcomes[-3:])

    async def run(self, claim, item):
        running = asyncio.create_task(self.bench.run_and_settle(claim, item, tools=self.tools))
        death = asyncio.create_task(self.mortal.died.wait())
        await asyncio.wait([running, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not self.mortal.died.is_set():
            await running
            return
        while not running.done():  # a dead worker's `finally` blocks may have no effect
            running.cancel()
            await asyncio.wait([running], timeout=0.3)
        self.deaths += 1
        self.mortal.dies_at = None
        self.mortal.revive()
        with suppress(AssertionError):  # the worker may have died after the settle
            await self.bench.give_back(item)


@pytest.fixture
async def provider():
    async with FakeProvider() as provider:
        yield provider


@pytest.fixture
async def ward(database_url, tmp_path, provider, monkeypatch):
    mortal = Mortal()
    send = Gateway.send
    monkeypatch.setattr(Gateway, "send", lambda gateway, request: mortal.around("model", send)(gateway, request))
    monkeypatch.setattr("batchwright.inference.sending._SETTLE_SECONDS", 0.02)
    async with ingest_stage(database_url, tmp_path, **remote(provider, chunk_characters=40, chunk_overlap=0)) as stage:
        bench = Bench(stage)
        yield Ward(bench, mortal)
        await bench.tools.sandboxes.close()


async def check(ward, provider, item):
    stage = ward.bench.stage
    found = await Evidence.collect(stage.batchwright, await stage.get(item.run_id), provider.entries, set())
    wrong = {goal: breaches for goal, breaches in judge(found).items() if breaches}
    wrong.pop("documents that have not ended as they should", None)  # no job drives the run here
    assert not wrong, (wrong, found.counts)
    assert [one.status for one in found.items] == [ItemStatus.DONE]
    return found


async def test_a_worker_that_dies_at_any_point_loses_no_step_and_no_payment(ward, provider):
    points = []
    in_doubt = 0
    for n in range(POINTS_MAX):
        provider.entries.clear()
        for path in ward.bench.stage.folder.iterdir():
            path.unlink()
        ward.bench.stage.write("0.txt", f"Anna{n} met Berta{n} in town. Then Carl{n} came along with Dora{n} as well.")
        (item,) = await ward.bench.put(collection=f"c{n}")
        ward.deaths = 0
        ward.mortal.revive()
        ward.mortal.dies_at = n or None
        await ward.live(item)
        found = await check(ward, provider, item)
        in_doubt += len(found.calls)
        if not ward.deaths:
            points = list(ward.mortal.passed)
            assert not found.calls
            if n:
                break
    assert n > len(points) > 20, (n, points)
    assert {"commit", "model", "store.put", "store.put_file"} <= set(points)
    assert in_doubt >= points.count("model")


async def test_an_item_whose_workers_die_in_every_claim_each_a_little_later_still_ends(ward, provider):
    ward.bench.stage.write("0.txt", "Anna met Berta in town. Then Carl came along with Dora as well.")
    (item,) = await ward.bench.put()
    for n in range(1, POINTS_MAX):
        if (await ward.bench.get(item)).has_ended:
            break
        ward.mortal.revive()
        ward.mortal.dies_at = n
        await ward.run(await ward.bench.claim(item), item)
    await check(ward, provider, item)
    assert ward.deaths > 5
