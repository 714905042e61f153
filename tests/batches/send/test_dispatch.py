"""What a worker sends: slots are always given back, and a batch with a limit does not delay others."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace

from batchwright.batches.journal.envelopes import RequestIds
from batchwright.batches.journal.journal import Journal
from batchwright.batches.part import BatchesPart
from batchwright.batches.plan.planfile import Entry
from batchwright.batches.send.dispatch import FIRST_SHARDS_MAX
from batchwright.batches.send.work import End, Work
from batchwright.engine.metrics import WorkerCounts
from batchwright.engine.worker.duty import Site, metrics_of
from batchwright.inference.budgets import Budget, Rate, RateBudget, RateLimits
from batchwright.simulator import Profile, SimulatorSettings
from tests.batches.stage import jsonl, request, staged

BATCH = "batch_" + "0" * 32
ROOM = FIRST_SHARDS_MAX + 1


@asynccontextmanager
async def prepared(database_url, folder, count, *, settings=None, **fields):
    """A dispatcher, a shard with this number of requests, and their entries; the shard has not begun."""
    async with staged(database_url, folder, **settings or {}) as stage:
        data = jsonl([request(f"r{n}", **fields) for n in range(count)])
        input = folder / "in.jsonl"
        input.write_bytes(data)
        descriptor = os.open(input, os.O_RDONLY)
        journal = Journal(folder / "0.1.seg")
        core = stage.batchwright
        site = Site(counts=WorkerCounts(metrics_of(core.parts)), queue=core.queue, queues=None)
        runtime = stage.batchwright.part(BatchesPart).make_runtime(site)
        work = Work(
            batch_id=BATCH,
            tenant="default",
            place=0,
            total=count,
            model="small",
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
            work.stop(End.LOST)
            work.abort()

        dispatcher.on_demand = abort_at_once
        dispatcher.begin(work, entries, priority=5)
        async with asyncio.timeout(5):
            await work.quiet.wait()
        assert (work.sender.limit.slots.in_use, dispatcher.limits.total.in_use, work.sender.schedule.in_flight) == (
            0,
            0,
            0,
        )


async def test_a_request_past_the_deadline_is_not_sent_and_ends_its_shard(database_url, tmp_path):
    async with prepared(database_url, tmp_path, 1) as (dispatcher, work, entries):
        work.deadline = 0.0
        dispatcher.begin(work, entries, priority=5)
        async with asyncio.timeout(5):
            await work.quiet.wait()
        assert (work.end, work.journal.lines) == (End.DEADLINE, 0)


async def test_a_retry_that_falls_due_between_two_readings_of_the_clock_is_sent(database_url, tmp_path):
    async with prepared(database_url, tmp_path, 1, prompt="[[fault:500:times=1]]") as (dispatcher, work, entries):
        dispatcher.begin(work, entries, priority=5)
        looks, began = 0, time.monotonic()

        def clock():
            nonlocal looks
            looks += work.backlog.retrying
            return began if looks <= 1 else began + 10

        work.sender.clock = clock
        async with asyncio.timeout(5):
            await work.quiet.wait()
        assert work.journal.lines == 1


async def test_a_sender_that_waits_for_a_budget_holds_no_slots(database_url, queue, tmp_path):
    async with prepared(database_url, tmp_path, 2) as (dispatcher, work, entries):
        held = []

        async def pause(seconds):
            held.append((dispatcher.limits.total.in_use, dispatcher.limits.bytes.in_use))
            if work.backlog.in_flight == 1:  # the first one has been answered
                work.stop(End.STOP)
            await asyncio.sleep(0)

        dispatcher.begin(work, entries, priority=5)
        work.sender.budget = Budget(queue.database, "slow", Rate(requests=0.001, tokens=1e9), pause)
        async with asyncio.timeout(5):
            await work.quiet.wait()
        assert held[-1] == (0, 0)


async def test_a_429_lowers_the_budget_for_everyone_who_shares_it(database_url, queue, tmp_path):
    async with prepared(database_url, tmp_path, 1, prompt="[[fault:429:times=1]]") as (dispatcher, work, entries):
        dispatcher.begin(work, entries, priority=5)
        work.sender.budget = Budget(queue.database, "server", Rate(requests=100.0, tokens=1e12))
        async with asyncio.timeout(10):
            await work.quiet.wait()
        assert work.journal.lines == 1
        other = RateBudget(queue.database, "server", RateLimits(requests_per_minute=6000))
        assert 0.65 < (await other.describe()).share < 0.75


async def test_every_request_has_a_uuid_that_maps_to_the_id_of_its_line(database_url, tmp_path):
    """Some servers silently refuse an x-request-id that is not a UUID."""
    async with staged(database_url, tmp_path) as stage:
        lines = [request("good"), request("bad", prompt="[[fault:400]]"), request("last")]
        id = await stage.submit(lines)
        stage.work()
        batch = await stage.ended(id)
        output, errors = await stage.results(batch)
        asked = stage.simulator.asked(by="request_id", limit=10)["requests"]
        assert {str(uuid.UUID(one)) for one in asked} == set(asked)
        written = {line["custom_id"]: line["id"] for line in [*output, *errors]}
        offsets = [0, len(jsonl(lines[:1])), len(jsonl(lines[:2]))]
        ids = RequestIds(id)
        assert [written[line["custom_id"]] for line in lines] == [ids.in_files(offset) for offset in offsets]
        assert {ids.on_the_wire(offset) for offset in offsets} == set(asked)
        assert {line["response"]["request_id"] for line in output} <= set(asked)


async def test_a_limit_for_all_workers_applies_from_the_first_request(database_url, tmp_path):
    shared = {"concurrency_total": 2}
    slow = SimulatorSettings(any_model=Profile(), faults=("slow:seconds=0.05",))
    async with staged(database_url, tmp_path, simulator=slow, global_inference_gateway=shared) as stage:
        id = await stage.submit([request(f"r{n}", model=f"m{n % 3}") for n in range(30)])
        stage.work()
        assert (await stage.ended(id)).completed == 30
        assert stage.simulator.counters.in_flight_max == 2


async def test_requests_that_wait_for_the_limit_of_their_batch_do_not_stop_claiming(database_url, tmp_path):
    async with prepared(database_url, tmp_path, 100) as (dispatcher, work, entries):
        dispatcher.begin(work, entries, priority=5)
        schedule = work.sender.schedule
        assert dispatcher.wanted("small", 6, ROOM) == 0
        schedule.change(BATCH, in_flight_max=1)
        assert dispatcher.wanted("small", 6, ROOM) == 1
        assert dispatcher.wanted("small", 6, FIRST_SHARDS_MAX) == 0, "room is kept for the first shards of batches"
        assert dispatcher.wanted("small", 5, FIRST_SHARDS_MAX) == FIRST_SHARDS_MAX
        schedule.change(BATCH, in_flight_max=None)
        assert dispatcher.wanted("small", 6, ROOM) == 0
        work.stop(End.STOP)
        work.abort()
        await work.quiet.wait()


async def test_a_tenant_that_weighs_three_sends_three_requests_for_one_of_the_others(database_url, tmp_path):
    settings = {"batches": {"tenant_weights": {"heavy": 3}}}
    async with prepared(database_url, tmp_path, 40, settings=settings) as (dispatcher, work, entries):
        works = [replace(work, batch_id=f"batch_{n:032}", tenant=tenant) for n, tenant in enumerate(("light", "heavy"))]
        for one in works:
            dispatcher.begin(one, entries, priority=5)
        tenants = {one.backlog: one.tenant for one in works}
        schedule = dispatcher.senders["small"].schedule
        taken = [schedule.next(0.0) for _ in range(20)]
        assert Counter(tenants[item.backlog] for item in taken) == {"heavy": 15, "light": 5}
        for item in taken:
            schedule.finished(item)
        for one in works:
            one.stop(End.STOP)
