"""Several runs of two tenants at once, with delayed statements."""

from __future__ import annotations

import asyncio

import pytest

from batchwright.errors import Conflict
from batchwright.ingest.config import Overrides
from batchwright.ingest.runs import QUEUE
from batchwright.ingest.sources import local_roots
from batchwright.ingest.submission import WantedRun
from batchwright.states import RunStatus
from tests.chaos.document_verdict import Evidence, judge
from tests.ingest.bench import remote
from tests.ingest.fake_provider import MARKER, FakeProvider
from tests.ingest.stage import ingest_stage
from tests.perturbed.conftest import SCALE

pytestmark = pytest.mark.timeout(240)
RUNS = 4 * SCALE
DOCUMENTS = 5


class Crowd:
    """Runs of two tenants, and what their users do to them."""

    def __init__(self, stage, provider, chance):
        self._stage, self._provider, self._chance = stage, provider, chance

    async def live(self, place):
        folder = self._stage.folder / str(place)
        folder.mkdir()
        bad = set()
        for number in range(DOCUMENTS):
            name = f"{number}.txt"
            is_bad = self._chance.random() < 0.2
            bad |= {name} if is_bad else set()
            (folder / name).write_text(f"Anna{place}x{number} met Berta. {MARKER * is_bad}")
        await self.some_time()
        sources = [str(folder)]
        wanted = WantedRun(
            tenant=("ada", "bob")[place % 2],
            collection="papers",
            sources=sources,
            overrides=Overrides(roots=local_roots(sources)),
        )
        run, _ = await self._stage.part.submission.create(wanted)
        self._stage.batchwright.doorbell.ring([QUEUE])
        is_cancelled = await self._chance.choice([self.wait, self.park, self.cancel])(run)
        ended = await self._stage.ended(run.id, 120.0)
        await self.check(ended, bad, is_cancelled=is_cancelled)

    async def some_time(self):
        await asyncio.sleep(self._chance.uniform(0.0, 0.6))

    async def wait(self, run):
        return False

    async def park(self, run):
        """Park the run, and resume it only when no document is about to snooze, which would take minutes."""
        await self.some_time()
        try:
            await self._stage.part.submission.park(run.id, tenant=None)
        except Conflict:
            return False
        held = "SELECT FROM batchwright.job WHERE owner = %(id)s AND lease_until IS NOT NULL"
        while await self._stage.rows(held, id=run.id):
            await asyncio.sleep(0.02)
        await self._stage.part.submission.resume(run.id, tenant=None)
        return False

    async def cancel(self, run):
        await self.some_time()
        try:
            await self._stage.part.submission.cancel(run.id, tenant=None)
        except Conflict:
            return False
        return True

    async def check(self, run, bad, *, is_cancelled):
        mine = {item.id for item in await self._stage.part.items.list(run.id)}
        calls = await self._stage.rows(
            "SELECT fields ->> 'call' FROM batchwright.job_event AS event JOIN batchwright.ingest_item AS item "
            "ON event.job_id = ANY(item.job_ids) WHERE item.run_id = %(id)s AND event.event LIKE 'model_%%'",
            id=run.id,
        )
        ids = {id for (id,) in calls}
        bill = [entry for entry in self._provider.entries if entry["id"] in ids]
        found = await Evidence.collect(self._stage.batchwright, run, bill, bad)
        wrong = {goal: breaches for goal, breaches in judge(found).items() if breaches}
        if is_cancelled:
            assert run.status is RunStatus.CANCELLED
            wrong = {goal: wrong[goal] for goal in wrong if goal == "steps lost or completed twice"}
        else:
            assert run.status is (RunStatus.COMPLETED_WITH_ERRORS if bad else RunStatus.COMPLETED)
            assert (run.item_count_total, run.item_count_failed) == (DOCUMENTS, len(bad))
            assert len(mine) == DOCUMENTS
        assert not wrong, (wrong, found.counts)


async def test_runs_of_two_tenants_end_as_their_stories_require(database_url, tmp_path, chance):
    async with FakeProvider() as provider:
        tables = remote(provider)
        tables["database"] = {"url": database_url, "folder": str(tmp_path / "home"), "pool_size": 20}
        async with ingest_stage(database_url, tmp_path, **tables) as stage:
            for _ in range(2):
                await stage.work().started.wait()
            crowd = Crowd(stage, provider, chance)
            async with asyncio.TaskGroup() as group:
                for place in range(RUNS):
                    group.create_task(crowd.live(place))
            paid = [text for entry in provider.entries for text in [(entry["kind"], one) for one in entry["texts"]]]
            assert len(paid) == len(set(paid))
