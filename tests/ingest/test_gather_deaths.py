"""A job that gathers requests dies after each commit and after each stored object: nothing is lost or paid twice."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from batchwright.batches.part import BatchesPart
from batchwright.batches.store import Batches
from batchwright.db.database import Database
from batchwright.engine.queue import Queue
from batchwright.files.store import Files
from batchwright.ingest import collect, gather
from batchwright.ingest.gather import Gatherer, GatherTools
from batchwright.ingest.ledger import Answers
from batchwright.ingest.part import IngestPart
from tests.ingest.fake_provider import FakeProvider
from tests.ingest.test_lanes import billed_texts, check_books, lanes, write


class Died(Exception):
    """The job dies: its memory is lost, and it runs again."""


class Deaths:
    """Lets the job die at each place in the code, `each` times."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.seen: Counter[str] = Counter()

    def strike(self) -> None:
        place = _place()
        self.seen[place] += 1
        if self.seen[place] <= self.each:
            raise Died(place)


def _place() -> str:
    """The place in our code, from the stack."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(("ingest/gather.py", "ingest/collect.py", "ingest/pending.py")):
            found.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


class DeadlySource:
    """Connections after whose commits the job may die."""

    def __init__(self, pool, deaths: Deaths) -> None:
        self._pool, self._deaths = pool, deaths

    async def rows(self, sql, params=None):
        found = await self._pool.rows(sql, params)
        if not sql.lstrip().upper().startswith("SELECT"):
            self._deaths.strike()
        return found

    @asynccontextmanager
    async def transaction(self):
        async with self._pool.transaction() as session:
            yield session
        self._deaths.strike()


class DeadlyStore:
    def __init__(self, store, deaths: Deaths) -> None:
        self._store, self._deaths = store, deaths

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def put(self, *args, **options):
        stored = await self._store.put(*args, **options)
        self._deaths.strike()
        return stored


@pytest.fixture
def deaths(monkeypatch):
    deaths = Deaths(2)

    def make(part, tools):
        core = part.core
        queue = Queue(Database(DeadlySource(core.pool, deaths)), core.queue.settings)
        batches = core.part(BatchesPart)
        return Gatherer(
            GatherTools(
                tools=dataclasses.replace(tools, queue=queue, answers=Answers(queue.database)),
                batches=Batches(queue),
                catalog=core.catalog,
                files=Files(queue.database, DeadlyStore(core.store, deaths)),
                limits=batches.settings,
                settings=part.settings,
                ring=core.doorbell.ring,
            )
        )

    monkeypatch.setattr(IngestPart, "make_gatherer", make)
    monkeypatch.setattr(gather, "POLL_SECONDS", (0.1, 0.2))
    monkeypatch.setattr(gather, "_TROUBLE_SECONDS", 0.0)
    monkeypatch.setattr(gather, "ROWS_MAX", 5)
    monkeypatch.setattr(collect, "_LINES_PER_COMMIT", 2)
    monkeypatch.setattr("batchwright.ingest.requests._GATHER_SECONDS", 0.1)
    return deaths


async def test_dying_after_every_commit_loses_nothing_and_pays_nothing_twice(database_url, tmp_path, deaths):
    async with FakeProvider() as provider, lanes(database_url, tmp_path, provider) as stage:
        write(stage, 8)
        stage.work()
        run = await stage.succeed(seconds=90)
        assert run.item_count_done == 8
        billed = billed_texts(provider)
        assert len(billed) == len(set(billed))
        await check_books(stage, provider, run.id)
        assert await stage.rows("SELECT hash FROM batchwright.ingest_request") == []
        died = " ".join(deaths.seen)
        for place in ("_place:", "_send:", "_commit:", "close:", "_wake_some:", "_withdraw:"):
            assert place in died, deaths.seen


async def test_a_second_gatherer_of_the_same_run_is_harmless(database_url, tmp_path, monkeypatch):
    """It has lost its claim but continues to write: each of its commits is refused."""
    from batchwright.engine.owned import Held
    from batchwright.errors import Fenced

    monkeypatch.setattr("batchwright.ingest.requests._GATHER_SECONDS", 3600.0)
    async with FakeProvider() as provider, lanes(database_url, tmp_path, provider) as stage:
        write(stage, 2)
        stage.work()
        run_id = await stage.submit()
        await stage.until(run_id, lambda run: run.gather_job_ids)
        run = await stage.get(run_id)
        gatherer = stage.workers[0][0]._duties.service(Gatherer)
        with pytest.raises(Fenced):
            await gather.Round(gatherer, run, Held(run.gather_job_ids[-1], 99, "a zombie")).go()
        assert await stage.rows("SELECT id FROM batchwright.batch") == []
        assert await stage.rows("SELECT id FROM batchwright.ingest_call") == []
