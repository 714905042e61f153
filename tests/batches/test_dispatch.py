"""What a worker sends: slots are given back whatever happens, and a batch with a limit holds up nobody else."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager

from tests.batches.stage import CHAT, jsonl, request, staged
from windlass.batches.dispatch import FIRST_SHARDS_MAX, End, Work
from windlass.batches.journal import Journal
from windlass.batches.planfile import Entry

BATCH = "batch_" + "0" * 32
ROOM = FIRST_SHARDS_MAX + 1


@asynccontextmanager
async def prepared(database_url, folder, count):
    """A dispatcher, a shard of so many requests, and their entries; nothing is begun yet."""
    async with staged(database_url, folder) as stage:
        data = jsonl([request(f"r{n}") for n in range(count)])
        input = folder / "in.jsonl"
        input.write_bytes(data)
        descriptor = os.open(input, os.O_RDONLY)
        journal = Journal(folder / "0.1.seg")
        runtime = stage.windlass.batch_runtime()
        work = Work(
            batch_id=BATCH,
            tenant="default",
            number=0,
            claim=1,
            total=count,
            model="small",
            endpoint=CHAT,
            traceparent=None,
            deadline=float("inf"),
            descriptor=descriptor,
            journal=journal,
        )
        try:
            yield runtime.dispatcher, work, entries_of(data)
        finally:
            await runtime.close()
            journal.close()
            os.close(descriptor)


def entries_of(data):
    offset, found = 0, []
    for line in data.splitlines():
        found.append(Entry(offset, len(line), 0))
        offset += len(line) + 1
    return found


async def test_a_request_that_is_aborted_before_it_began_gives_its_slots_back(database_url, tmp_path):
    async with prepared(database_url, tmp_path, 1) as (dispatcher, work, entries):

        def abort_at_once():
            dispatcher.end(work, End.LOST)
            work.abort()

        dispatcher.on_demand = abort_at_once
        dispatcher.begin(work, entries, priority=5)
        async with asyncio.timeout(5):
            await work.quiet.wait()
        assert (work.lane.room.slots.in_use, dispatcher.limits.total.in_use, work.lane.schedule.in_flight) == (0, 0, 0)


async def test_a_request_that_has_no_time_left_ends_its_shard_by_the_deadline(database_url, tmp_path):
    async with prepared(database_url, tmp_path, 1) as (dispatcher, work, entries):
        work.deadline = 0.0
        dispatcher.begin(work, entries, priority=5)
        async with asyncio.timeout(5):
            await work.quiet.wait()
        assert (work.end, work.journal.lines) == (End.DEADLINE, 0)


async def test_what_a_batch_with_a_limit_holds_back_keeps_nobody_from_claiming(database_url, tmp_path):
    async with prepared(database_url, tmp_path, 100) as (dispatcher, work, entries):
        dispatcher.begin(work, entries, priority=5)
        schedule = work.lane.schedule
        assert dispatcher.wanted("small", 6, ROOM) == 0
        schedule.change(BATCH, in_flight_max=1)
        assert dispatcher.wanted("small", 6, ROOM) == 1
        assert dispatcher.wanted("small", 6, FIRST_SHARDS_MAX) == 0, "room is kept for the first shards of batches"
        assert dispatcher.wanted("small", 5, FIRST_SHARDS_MAX) == FIRST_SHARDS_MAX
        schedule.change(BATCH, in_flight_max=None)
        assert dispatcher.wanted("small", 6, ROOM) == 0
        dispatcher.end(work, End.STOP)
        work.abort()
        await work.quiet.wait()
