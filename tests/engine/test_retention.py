"""Retention: what is removed, what must stay, and that other work does not wait for it."""

import asyncio
import logging
import math
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest

from batchwright import AsyncBatchwright, JobStatus, NewJob, NotFound
from batchwright.db.database import DatabaseSettings
from batchwright.engine import retention as module
from batchwright.engine.catalog import Catalog
from batchwright.engine.outcomes import Settle
from batchwright.engine.queue import SQL as JOBS
from batchwright.engine.retention import SQL, Removed, Retention, RetentionSettings
from batchwright.engine.upkeep import Upkeep, lock_round, make_event_partitions
from batchwright.engine.worker.processes import Processes
from batchwright.errors import ConfigurationError
from batchwright.settings import load_settings
from tests.conftest import database
from tests.engine import planning
from tests.engine.planning import indexes, nodes, scanned, touched, whole_table_scans
from tests.engine.steps import another, blocked, claim_one, end, hand_over, snapshot, status
from tests.support import BASIC, event_names, fail, make_settings, put, put_one, raw, snooze, succeed, take, take_one

QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobStatus
HOUR, DAY = 3600.0, 86_400.0
OLD_MONDAY = datetime(2026, 1, 5, tzinfo=UTC)
OLD_WEEK = "job_event_2026_w02"


@pytest.fixture
def retention(queue, clock):
    return Retention(queue.database, RetentionSettings())


async def ended(queue, how=SUCCEEDED, **options):
    id = await put_one(queue, **options)
    await end(queue, await claim_one(queue, id), how)
    return id


async def swept(queue, retention):
    """Run a whole sweep; return its rounds."""
    rounds = []
    while not rounds or rounds[-1].has_more:
        async with queue.database.transaction() as session:
            rounds.append(await retention.sweep(session))
    return rounds


async def dropped(queue, retention):
    """Drop all partitions that can be dropped; return their number."""
    for n in range(100):
        async with queue.database.transaction() as session:
            if not (await retention.drop_partition(session)).has_more:
                return n
    raise AssertionError("the drops do not end")


async def left(queue, *ids):
    """Those of these jobs that still exist."""
    return [job.id for job in await queue.get_many(ids)]


async def count(queue, table):
    ((n,),) = await raw(queue, f"SELECT count(*) FROM batchwright.{table}")
    return n


async def partitions(queue):
    rows = await raw(
        queue, "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'batchwright.job_event'::regclass"
    )
    return {name.removeprefix("batchwright.") for (name,) in rows}


async def go_to(queue, clock, moment):
    """Move the clock to this moment, and create the partition for its events."""
    clock.time = moment
    await make_event_partitions(queue.database)


# Jobs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "days"), [(SUCCEEDED, 7), (FAILED, 30), (CANCELLED, 30)])
async def test_a_job_is_kept_to_the_cutoff_of_its_status_and_not_longer(queue, clock, retention, how, days):
    await clock.advance(queue, 0)
    id = await ended(queue, how)
    await clock.advance(queue, days * DAY)
    assert await swept(queue, retention) == [Removed()]
    assert await left(queue, id) == [id]
    await clock.advance(queue, 1)
    assert await swept(queue, retention) == [Removed(jobs=1)]
    with pytest.raises(NotFound):
        await queue.get(id)


async def test_days_can_be_configured_and_inf_keeps_for_ever(queue, clock):
    await clock.advance(queue, 0)
    succeeded, failed = await ended(queue), await ended(queue, FAILED)
    retention = Retention(queue.database, RetentionSettings(succeeded_days=math.inf, ended_days=0.5))
    await clock.advance(queue, 0.5 * DAY + 1)
    assert await swept(queue, retention) == [Removed(jobs=1)]
    assert await left(queue, succeeded, failed) == [succeeded]
    await clock.advance(queue, 30_000 * DAY)
    assert await swept(queue, retention) == [Removed()]


async def test_jobs_that_have_not_ended_stay(queue, clock, retention):
    await clock.advance(queue, 0)
    queued, running, snoozing, waiting = await put(queue, *(NewJob("noop") for _ in range(4)))
    await claim_one(queue, running)
    await snooze(queue, await claim_one(queue, snoozing), 1000 * DAY)
    done, open = await hand_over(queue, await claim_one(queue, waiting), 2)
    await succeed(queue, await claim_one(queue, done))
    await clock.advance(queue, 100 * DAY)
    assert await swept(queue, retention) == [Removed()]
    everything = [queued, running, snoozing, waiting, done, open]
    assert await left(queue, *everything) == everything


async def test_a_job_that_its_worker_still_holds_stays(queue, clock, retention):
    await clock.advance(queue, 0)
    id = await put_one(queue)
    await claim_one(queue, id)
    await queue.cancel([id])
    await clock.advance(queue, 31 * DAY)
    await raw(queue, "UPDATE batchwright.job SET lease_until = %(until)s", until=clock.time + timedelta(seconds=1))
    assert await swept(queue, retention) == [Removed()]
    await clock.advance(queue, 2)
    assert await swept(queue, retention) == [Removed(jobs=1)]


async def test_a_job_with_an_owner_stays(queue, clock, retention):
    await clock.advance(queue, 0)
    id = await ended(queue, owner="batch_1")
    await clock.advance(queue, 1000 * DAY)
    assert await swept(queue, retention) == [Removed()]
    assert await left(queue, id) == [id]


# Parents and children -----------------------------------------------------------------------------------------------


async def test_children_stay_while_their_parent_can_be_rerun_and_the_join_counts_them_all(queue, clock, retention):
    await clock.advance(queue, 0)
    parent = await put_one(queue)
    good, bad = await hand_over(queue, await claim_one(queue, parent), 2)
    await succeed(queue, await claim_one(queue, good))
    await fail(queue, await claim_one(queue, bad))
    assert await status(queue, parent) is FAILED
    await clock.advance(queue, 29 * DAY)
    assert await swept(queue, retention) == [Removed()]
    await queue.rerun(parent)
    await succeed(queue, await take_one(queue))
    assert await status(queue, parent) is SUCCEEDED
    assert await queue.joined(parent, 1) == (2, 2, 0, 0)


async def test_children_are_removed_after_their_parents_one_generation_per_sweep(queue, clock, retention):
    await clock.advance(queue, 0)
    parent = await put_one(queue)
    (child,) = await hand_over(queue, await claim_one(queue, parent), 1)
    (grandchild,) = await hand_over(queue, await claim_one(queue, child), 1)
    await succeed(queue, await claim_one(queue, grandchild))
    await clock.advance(queue, 8 * DAY)
    seen = []
    for _ in range(4):
        seen.append(await left(queue, parent, child, grandchild))
        await swept(queue, retention)
    assert seen == [[parent, child, grandchild], [child, grandchild], [grandchild], []]


async def test_a_failed_child_is_kept_longer_than_its_parent_and_can_then_be_rerun_alone(queue, clock, retention):
    await clock.advance(queue, 0)
    parent = await put_one(queue)
    good, bad = await hand_over(queue, await claim_one(queue, parent), 2, allow_failures=1)
    await succeed(queue, await claim_one(queue, good))
    await fail(queue, await claim_one(queue, bad))
    await clock.advance(queue, 8 * DAY)
    await swept(queue, retention)
    await swept(queue, retention)
    assert await left(queue, parent, good, bad) == [bad]
    await queue.rerun(bad)
    await succeed(queue, await take_one(queue))
    assert await status(queue, bad) is SUCCEEDED


async def test_a_chained_job_runs_after_the_root_of_its_pipeline_was_removed(queue, clock, retention):
    await clock.advance(queue, 0)
    root = await put_one(queue)
    claim = await claim_one(queue, root)
    then = await Catalog(queue.database, BASIC).prepare([NewJob("noop", delay_seconds=8 * DAY, pipeline_id=root)])
    done = Settle("succeed", claim, {"result": None, "progress_current": None, "progress_total": None})
    await queue.succeed_with(done, "w1", write=None, then=then)
    await clock.advance(queue, 8 * DAY)
    assert await swept(queue, retention) == [Removed(jobs=1)]
    chained = await take_one(queue)
    assert chained.pipeline_id == root
    await succeed(queue, chained)
    assert await queue.cancel([chained.id]) == 0


# Keys ---------------------------------------------------------------------------------------------------------------


async def test_a_key_whose_last_job_was_removed_is_free(queue, clock, retention):
    await clock.advance(queue, 0)
    await ended(queue, exclusive_key="k")
    ((current,),) = await raw(queue, "SELECT is_current FROM batchwright.job")
    assert current
    waiting = await put_one(queue, exclusive_key="k", delay_seconds=8 * DAY)
    await clock.advance(queue, 8 * DAY)
    assert await swept(queue, retention) == [Removed(jobs=1)]
    assert (await take_one(queue)).id == waiting


async def test_an_idempotency_key_can_be_used_again_when_its_job_was_removed(queue, clock, retention):
    await clock.advance(queue, 0)
    first = await ended(queue, idempotency_key="once")
    assert await put_one(queue, idempotency_key="once") == first
    await clock.advance(queue, 8 * DAY)
    await swept(queue, retention)
    second = await put_one(queue, payload={"n": 2}, idempotency_key="once")
    assert second != first
    assert await status(queue, second) is QUEUED


@pytest.mark.parametrize("is_overtaken", [False, True])
async def test_an_enqueue_whose_first_job_is_removed_meanwhile_still_returns_an_existing_job(queue, is_overtaken):
    first = await ended(queue, idempotency_key="once")
    overtaking = []

    class Removing:
        """Retention removes the job between the insert that finds the key in use and the query for its job."""

        async def rows(self, sql, params=None):
            if sql == JOBS["find_enqueued"] and await left(queue, first):
                await raw(queue, "DELETE FROM batchwright.job WHERE id = %(id)s", id=first)
                if is_overtaken:
                    rows = await queue.database.rows(sql, params)
                    overtaking.append(await put_one(queue, idempotency_key="once"))
                    return rows
            return await queue.database.rows(sql, params)

    new, other = NewJob("noop", idempotency_key="once"), NewJob("noop")
    answers = await queue.enqueue(await Catalog(queue.database, BASIC).prepare([new, other]), session=Removing())
    assert answers == [(overtaking[0], False) if is_overtaken else (new.id, True), (other.id, True)]
    assert [await status(queue, answer.id) for answer in answers] == [QUEUED, QUEUED]


async def test_requests_of_the_api_are_removed_after_seven_days(queue, clock, retention):
    await clock.advance(queue, 0)
    insert = "INSERT INTO batchwright.api_request VALUES ('t', %(key)s, '', '{}', %(at)s)"
    await raw(queue, insert, key="old", at=clock.time - timedelta(days=7, seconds=1))
    await raw(queue, insert, key="new", at=clock.time - timedelta(days=7))
    assert await swept(queue, retention) == [Removed(requests=1)]
    assert await raw(queue, "SELECT key FROM batchwright.api_request") == [("new",)]


# Rounds -------------------------------------------------------------------------------------------------------------


async def _finish(queue, n):
    await put(queue, *(NewJob("noop") for _ in range(n)))
    claims = await take(queue, n)
    values = {"result": None, "progress_current": None, "progress_total": None}
    assert len(await queue.settle([Settle("succeed", claim, values) for claim in claims], "w1")) == n
    return [claim.id for claim in claims]


async def test_a_round_looks_at_a_limited_number_of_rows_and_the_next_continues_behind_them(queue, clock, monkeypatch):
    monkeypatch.setattr(module, "_ROWS_PER_STATEMENT", 4)
    await clock.advance(queue, 0)
    await _finish(queue, 25)
    await raw(
        queue,
        "UPDATE batchwright.job SET owner = 'batch' WHERE id IN (SELECT id FROM batchwright.job ORDER BY id LIMIT 12)",
    )
    await clock.advance(queue, 8 * DAY)
    retention = Retention(queue.database, RetentionSettings(jobs_per_round=10))
    rounds = await swept(queue, retention)
    assert [(round.jobs, round.has_more) for round in rounds] == [(0, True), (8, True), (5, False)]
    assert await swept(queue, retention) == [Removed(has_more=True), Removed()], (
        "jobs that stay are passed once per sweep"
    )


async def test_a_round_that_takes_long_stops_between_two_statements(queue, clock, monkeypatch):
    monkeypatch.setattr(module, "_ROUND_SECONDS_MAX", 0.0)
    retention = Retention(queue.database, RetentionSettings())
    async with queue.database.transaction() as session:
        assert await retention.sweep(session) == Removed(has_more=True)


def upkeep(queue, *rounds):
    return Upkeep(queue, Processes(None, 1), BASIC, rounds)


async def test_upkeep_repeats_the_round_until_the_backlog_is_gone_and_then_waits(queue, clock, caplog):
    await clock.advance(queue, 0)
    await _finish(queue, 25)
    await clock.advance(queue, 8 * DAY)
    keeper = upkeep(queue, *Retention(queue.database, RetentionSettings(jobs_per_round=10)).rounds())
    await keeper.run_due()
    await clock.advance(queue, DAY)
    seen = []
    with caplog.at_level(logging.INFO, "batchwright.engine.retention"):
        for _ in range(4):
            await keeper.run_due()
            seen.append(await count(queue, "job"))
    assert seen == [15, 5, 0, 0]
    assert [record.message for record in caplog.records] == [f"retention removed jobs: {n}" for n in (10, 10, 5)]
    await _finish(queue, 1)
    await raw(queue, "UPDATE batchwright.job SET finished_at = finished_at - interval '8 days' RETURNING id")
    await keeper.run_due()
    assert await count(queue, "job") == 1, "the next sweep is not due yet"


async def test_a_round_runs_in_one_process_at_a_time(queue, clock, pool):
    await clock.advance(queue, 0)
    await _finish(queue, 5)
    await clock.advance(queue, 8 * DAY)
    first, second = (Retention(queue.database, RetentionSettings()).rounds()[0] for _ in range(2))
    async with another(queue, pool) as elsewhere, lock_round(queue.database, first.name) as session:
        assert session is not None
        assert await upkeep(elsewhere).run_round(second) is False
    assert await upkeep(queue).run_round(second) is True
    assert await count(queue, "job") == 0


async def test_a_round_that_dies_between_two_statements_has_done_nothing(queue, clock, retention):
    """Its lost position does no harm either: the next sweep passes the same rows again."""
    await clock.advance(queue, 0)
    (id, *_) = await _finish(queue, 5)
    failed = await ended(queue, FAILED)
    before = await snapshot(queue, id), await snapshot(queue, failed)
    await clock.advance(queue, 31 * DAY)

    class Dying:
        def __init__(self, session):
            self.session, self.left = session, 1

        async def rows(self, sql, params=None):
            if not self.left:
                raise ConnectionResetError
            self.left -= 1
            return await self.session.rows(sql, params)

    with pytest.raises(ConnectionResetError):
        async with queue.database.transaction() as session:
            await retention.sweep(Dying(session))
    assert (await snapshot(queue, id), await snapshot(queue, failed)) == before
    assert sum(round.jobs for round in await swept(queue, retention) + await swept(queue, retention)) == 6


async def test_two_rounds_at_once_beside_busy_workers_remove_each_row_once_without_deadlocks(queue, clock, pool):
    """The rounds run without their lock, so that they really overlap; keys and events could cause conflicts."""
    await clock.advance(queue, 0)
    for _ in range(3):
        await _finish(queue, 300)
    for n in range(20):
        await ended(queue, exclusive_key=f"key {n}")
    await clock.advance(queue, 8 * DAY)

    async def work(on, worker):
        for n in range(20):
            await put(on, *(NewJob("noop", exclusive_key=f"key {n}") for _ in range(2)), NewJob("noop"))
            for claim in await take(on, 5, worker=worker):
                event = {"event": "e", "level": "info", "message": "m", "place": 1}
                await on.emit([{"id": claim.id, "claim": claim.claim, **event}])
                assert await succeed(on, claim, worker=worker)

    async with another(queue, pool) as elsewhere:
        settings = RetentionSettings(jobs_per_round=50)
        sweeps = [swept(on, Retention(queue.database, settings)) for on in (queue, elsewhere)]
        first, second, *_ = await asyncio.gather(*sweeps, work(queue, "w1"), work(elsewhere, "w2"))
    await swept(queue, final := Retention(queue.database, settings))
    assert sum(round.jobs for round in first + second) <= 920
    assert await raw(queue, "SELECT FROM batchwright.job WHERE created_at < %(now)s", now=clock.time) == []
    assert await swept(queue, final) == [Removed()]
    assert await count(queue, "job") == 120


async def test_a_job_that_is_being_rerun_is_not_removed_and_a_removed_one_cannot_be_rerun(queue, clock, pool):
    await clock.advance(queue, 0)
    id = await ended(queue, FAILED)
    await clock.advance(queue, 31 * DAY)
    retention = Retention(queue.database, RetentionSettings())
    async with another(queue, pool) as elsewhere:
        async with elsewhere.database.transaction() as session:
            await elsewhere._lock(session, id, None)
            assert await swept(queue, retention) == [Removed()]
        async with queue.database.transaction() as session:
            assert (await retention.sweep(session)).jobs == 1
            late = asyncio.create_task(elsewhere.rerun(id))
            await blocked(queue, 1)
        with pytest.raises(NotFound):
            await late


# Events -------------------------------------------------------------------------------------------------------------


async def test_a_week_of_events_whose_jobs_are_gone_is_dropped_as_a_whole_and_not_too_early(queue, clock, retention):
    await go_to(queue, clock, OLD_MONDAY)
    await _finish(queue, 10)
    over = OLD_MONDAY + timedelta(days=7)
    await go_to(queue, clock, over + timedelta(days=8))
    await swept(queue, retention)
    assert await count(queue, "job") == 0
    assert await count(queue, "job_event") == 30, "removing a job does not touch its events"
    assert await dropped(queue, retention) == 0
    clock.time += timedelta(seconds=1)
    assert await dropped(queue, retention) == 1
    assert OLD_WEEK not in await partitions(queue)
    assert await count(queue, "job_event") == 0


async def test_the_partition_of_a_dropped_week_is_not_created_again(queue, clock, retention):
    await go_to(queue, clock, OLD_MONDAY)
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=60))
    assert await dropped(queue, retention) > 0
    after = await partitions(queue)
    assert await make_event_partitions(queue.database) == 0
    assert await partitions(queue) == after
    assert {"job_event_default", "job_event_2026_w10", "job_event_2026_w11"} <= after
    assert OLD_WEEK not in after


async def test_jobs_that_outlive_their_week_keep_their_whole_history(queue, clock, retention):
    await go_to(queue, clock, OLD_MONDAY)
    snoozing, failed = await put_one(queue), await ended(queue, FAILED, tenant="another")
    await snooze(queue, await claim_one(queue, snoozing), 20 * DAY)
    await _finish(queue, 10)
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=20))
    before = await snapshot(queue, snoozing), await snapshot(queue, failed)
    await swept(queue, retention)
    assert await dropped(queue, retention) >= 1
    assert OLD_WEEK not in await partitions(queue)
    assert (await snapshot(queue, snoozing), await snapshot(queue, failed)) == before
    assert await count(queue, "job_event_default") == 6
    (claim,) = await take(queue)
    await succeed(queue, claim)
    assert await event_names(queue, snoozing) == [
        "job.enqueued", "job.started", "job.retry_later", "job.started", "job.succeeded"
    ]  # fmt: skip
    assert await event_names(queue, failed) == ["job.enqueued", "job.started", "job.failed"]


async def test_events_in_the_default_partition_are_removed_after_their_job_in_bounded_rounds(queue, clock):
    clock.time = OLD_MONDAY
    kept = await ended(queue, FAILED)
    await _finish(queue, 10)
    assert await count(queue, "job_event_default") == 33
    clock.time += timedelta(days=8)
    retention = Retention(queue.database, RetentionSettings(jobs_per_round=12))
    rounds = await swept(queue, retention)
    assert sum(round.events for round in rounds) == 30
    assert max(round.events for round in rounds) <= 12
    assert await event_names(queue, kept) == ["job.enqueued", "job.started", "job.failed"]
    clock.time += timedelta(days=30)
    assert sum(round.events for round in await swept(queue, retention)) == 3


@pytest.mark.parametrize("limit", ["_SURVIVING_JOBS_MAX", "_SURVIVING_EVENTS_MAX"])
async def test_a_week_with_too_many_remaining_jobs_stays_but_does_not_delay_other_weeks(
    queue, clock, retention, monkeypatch, limit
):
    await go_to(queue, clock, OLD_MONDAY)
    await put(queue, *(NewJob("noop") for _ in range(5)))
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=40))
    monkeypatch.setattr(module, limit, 4)
    before = await partitions(queue)
    async with queue.database.transaction() as session:
        await retention.drop_partition(session)
    async with queue.database.transaction() as session:
        await retention.drop_partition(session)
    now = await partitions(queue)
    assert OLD_WEEK in now
    assert (len(before - now) > 0) is (limit == "_SURVIVING_EVENTS_MAX"), (
        "the week after has the same jobs but no events"
    )
    assert await count(queue, "job_event") == 5
    monkeypatch.setattr(module, limit, 5)
    await dropped(queue, retention)
    assert OLD_WEEK not in await partitions(queue)
    assert await count(queue, "job_event_default") == 5


async def test_events_that_are_older_than_their_job_because_the_clock_went_back_are_not_lost(queue, clock, retention):
    await go_to(queue, clock, OLD_MONDAY)
    clock.time = OLD_MONDAY + timedelta(days=7, minutes=5)
    id = await put_one(queue)
    clock.time -= timedelta(minutes=10)
    await raw(queue, "UPDATE batchwright.job SET run_after = %(now)s", now=clock.time)
    await claim_one(queue, id)
    assert await count(queue, OLD_WEEK) == 1
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=60))
    assert await dropped(queue, retention) >= 1
    assert await event_names(queue, id) == ["job.enqueued", "job.started"]


async def test_a_busy_events_table_is_not_blocked_and_the_drop_is_tried_again(queue, clock, retention, pool):
    await go_to(queue, clock, OLD_MONDAY)
    id = await put_one(queue)
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=20))
    before = await partitions(queue)
    async with another(queue, pool) as elsewhere:
        async with elsewhere.database.transaction() as reader:
            assert len(await reader.rows(JOBS["events"], {"id": id, "after": 0, "limit": 10})) == 1
            async with queue.database.transaction() as session:
                watched = Watched(session)
                assert await retention.drop_partition(watched) == Removed()
                assert watched.asked.count(SQL["drop_partition"]) == 1, (
                    "it must not try the other old weeks, which would wait as long"
                )
                # The failed drop releases its locks before this transaction ends.
                assert (
                    await elsewhere.emit([{"id": id, "claim": 0, "place": 1, "event": "e", "level": "info"}]) == set()
                )
        assert await partitions(queue) == before
        assert await dropped(queue, retention) >= 1
    assert OLD_WEEK not in await partitions(queue)


class Watched:
    """A session that records its statements."""

    def __init__(self, session):
        self.session, self.asked = session, []

    async def rows(self, sql, params=None):
        self.asked.append(sql)
        return await self.session.rows(sql, params)


async def test_a_drop_that_is_rolled_back_removes_nothing(queue, clock, retention):
    await go_to(queue, clock, OLD_MONDAY)
    id = await put_one(queue)
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=20))
    with pytest.raises(ConnectionResetError):
        async with queue.database.transaction() as session:
            assert (await retention.drop_partition(session)).partitions == 1
            assert await session.rows(f"SELECT to_regclass('batchwright.{OLD_WEEK}')") == [(None,)]
            raise ConnectionResetError
    assert await count(queue, OLD_WEEK) == 1
    assert await event_names(queue, id) == ["job.enqueued"]


@pytest.mark.direct("it expects our timeouts")
async def test_after_a_drop_the_server_ends_the_transaction_if_it_is_idle_for_a_second(queue, clock, retention):
    await go_to(queue, clock, OLD_MONDAY)
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=20))
    patience = "SHOW idle_in_transaction_session_timeout"
    async with queue.database.transaction() as session:
        assert await session.rows(patience) == [("10s",)]
        await retention.drop_partition(session)
        assert await session.rows(patience) == [("1s",)]
    assert await raw(queue, patience) == [("10s",)]


async def test_weeks_are_dropped_while_workers_work(queue, clock, pool):
    """No worker fails, and no event of an existing job is lost, in whatever order they run."""
    for week in range(6):
        await go_to(queue, clock, OLD_MONDAY + timedelta(weeks=week))
        await put(queue, NewJob("noop", delay_seconds=60 * DAY), NewJob("other"))
        await succeed(queue, await take_one(queue))
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=60))
    before = await partitions(queue)

    async def work(on, worker):
        for _ in range(30):
            (id,) = await put(on, NewJob("noop", queue="busy"))
            claim = await claim_one(on, id, worker=worker)
            event = {"event": "e", "level": "info", "message": "m", "place": 1}
            await on.emit([{"id": claim.id, "claim": claim.claim, **event}])
            assert await succeed(on, claim, worker=worker)
            await on.events(id)

    async def drop(on):
        retention = Retention(queue.database, RetentionSettings())
        for _ in range(10):
            async with on.database.transaction() as session:
                await retention.drop_partition(session)
            await swept(on, retention)

    async with another(queue, pool) as elsewhere:
        await asyncio.gather(work(queue, "w1"), work(elsewhere, "w2"), drop(queue), drop(elsewhere))
    await dropped(queue, Retention(queue.database, RetentionSettings()))
    assert len(before - await partitions(queue)) >= 6
    rows = await raw(
        queue,
        "SELECT status::text, queue, "
        "(SELECT array_agg(event ORDER BY id) FROM batchwright.job_event WHERE job_id = job.id) FROM batchwright.job",
    )
    asleep = [events for state, _, events in rows if state == "QUEUED"]
    assert asleep == [["job.enqueued"]] * 6
    worked = [events for _, name, events in rows if name == "busy"]
    assert worked == [["job.enqueued", "job.started", "e", "job.succeeded"]] * 60


async def test_nothing_is_dropped_when_jobs_are_kept_for_ever(queue, clock):
    await go_to(queue, clock, OLD_MONDAY)
    await go_to(queue, clock, OLD_MONDAY + timedelta(days=1000))
    before = await partitions(queue)
    for_ever = Retention(queue.database, RetentionSettings(succeeded_days=math.inf, ended_days=math.inf))
    assert await dropped(queue, for_ever) == 0
    assert await partitions(queue) == before


# Plans --------------------------------------------------------------------------------------------------------------


CROWD = """
    ALTER TABLE batchwright.job DISABLE TRIGGER legal_births;
    INSERT INTO batchwright.job (id, job_type, queue, tenant, owner, status, priority, run_after, payload, max_attempts,
        pipeline_id, created_at, finished_at, parent_job_id)
    SELECT id, 'noop', 'default', 'tenant ' || n % 50, CASE WHEN n <= 5000 THEN 'batch' END, 'SUCCEEDED', 5, now(),
           '{}', 3, id, now() - interval '90 days', now() - interval '60 days' + n * interval '1 second',
           CASE WHEN n BETWEEN 5001 AND 10000 THEN '00000000-0000-0000-0000-000000000001'::uuid END
    FROM (SELECT n, gen_random_uuid() AS id FROM generate_series(1, 30000) AS n) AS pile;
    INSERT INTO batchwright.job (id, job_type, queue, tenant, status, priority, run_after, payload, max_attempts,
        pipeline_id, created_at)
    SELECT id, 'noop', 'default', 'tenant', 'QUEUED', 5, now(), '{}', 3, id, now()
    FROM (VALUES ('00000000-0000-0000-0000-000000000001'::uuid)) AS parent (id);
    ALTER TABLE batchwright.job ENABLE TRIGGER legal_births;
    INSERT INTO batchwright.job_event (job_id, ts, event)
    SELECT id, created_at, 'e' FROM batchwright.job WHERE created_at < now() - interval '1 day';
"""


@pytest.fixture(scope="module")
def crowded_url(server, template):
    """A database with 30,000 old jobs, of which 10,000 must stay, and their events in the default partition."""
    with database(server, "batchwright_test_retention_" + template[-8:], template) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(CROWD)
            connection.execute("VACUUM ANALYZE batchwright.job, batchwright.job_event")
        yield url


WALK = {
    "remove_jobs": {
        "status": "SUCCEEDED",
        "keep_seconds": 7 * DAY,
        "after_time": datetime(1, 1, 1, tzinfo=UTC),
        "after_id": UUID(int=0),
        "limit": 1000,
    },
    "remove_events": {"after_job": UUID(int=0), "after_id": 0, "limit": 1000},
    "remove_requests": {"keep_seconds": 7 * DAY, "limit": 1000},
    "old_partitions": {"keep_seconds": 7 * DAY},
    "drop_partition": {"partition": OLD_WEEK, "created_before": OLD_MONDAY, "jobs_max": 1000, "events_max": 10_000},
}


def plan(connection, name, **values):
    return planning.plan(connection, name, source=SQL, run=True, **{**WALK[name], **values})


def jobs_left(connection):
    return connection.execute("SELECT count(*) FROM batchwright.job").fetchone()[0]


@pytest.mark.parametrize("name", list(SQL))
def test_every_statement_can_be_prepared_and_run(crowd, name):
    assert plan(crowd, name)["Actual Loops"] == 1


def test_a_step_reads_the_index_and_removes_the_jobs_it_has_read(crowd):
    behind = crowd.execute(
        "SELECT finished_at, id FROM batchwright.job ORDER BY finished_at OFFSET 9999 LIMIT 1"
    ).fetchone()
    walked = plan(crowd, "remove_jobs", after_time=behind[0], after_id=behind[1])
    assert jobs_left(crowd) == 29_001
    assert whole_table_scans(walked) == []
    assert indexes(walked) == {"job_ended", "job_pkey"}
    assert scanned(walked) <= 1000 * 4, "each job is read three times: by the scan, for the lock, and for the removal"
    assert touched(walked) < 1000 * 25


@pytest.mark.parametrize("first", [0, 5_000], ids=["owned", "children"])
def test_a_step_over_jobs_that_must_stay_costs_no_more_than_one_that_removes(crowd, first):
    """Ten thousand of them come first: a step passes a thousand, and the next one continues behind those."""
    place = crowd.execute(
        "SELECT finished_at, id FROM batchwright.job ORDER BY finished_at OFFSET %s LIMIT 1", [first]
    ).fetchone()
    walked = plan(crowd, "remove_jobs", after_time=place[0], after_id=place[1])
    assert jobs_left(crowd) == 30_001
    assert whole_table_scans(walked) == []
    assert indexes(walked) == {"job_ended", "job_pkey"}
    assert scanned(walked) <= 1000 * 4
    assert touched(walked) < 1000 * 15


def test_a_step_with_nothing_to_do_reads_few_pages(crowd):
    assert touched(plan(crowd, "remove_jobs", status="FAILED")) < 30
    assert touched(plan(crowd, "remove_jobs", keep_seconds=100 * DAY)) < 30


def test_events_are_read_by_their_index_and_their_jobs_by_primary_key(crowd):
    crowd.execute("DELETE FROM batchwright.job WHERE id IN (SELECT id FROM batchwright.job ORDER BY id LIMIT 5000)")
    walked = plan(crowd, "remove_events")
    assert crowd.execute("SELECT count(*) FROM batchwright.job_event").fetchone() == (29_000,)
    assert whole_table_scans(walked) == []
    assert all(node["Node Type"] != "Seq Scan" for node in nodes(walked))
    assert touched(walked) < 1000 * 20


def test_the_remaining_jobs_of_a_week_are_counted_by_tenant_up_to_a_limit(crowd):
    """30,000 jobs are older than the week, but reading the first 1,001 is enough."""
    asked = plan(crowd, "drop_partition", partition="job_event_default", created_before=datetime.now(UTC))
    assert asked["Actual Rows"] == 1
    assert touched(asked) < 8_000


# Settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("days", [0, -1, 0.01, math.nan, 1e6])
@pytest.mark.parametrize("name", ["succeeded_days", "ended_days", "requests_days"])
def test_days_that_would_keep_nothing_or_overflow_are_refused(name, days):
    with pytest.raises(ConfigurationError, match=rf"{name} is .*; use 0\.042 .* or inf to keep them forever"):
        RetentionSettings(**{name: days})


@pytest.mark.parametrize("rows", [0, 100_001])
def test_a_round_size_of_zero_or_without_a_limit_is_refused(rows):
    with pytest.raises(ConfigurationError, match=f"jobs_per_round is {rows}; it must be from 1 to 100000"):
        RetentionSettings(jobs_per_round=rows)


def test_retention_is_configured_like_the_other_parts(tmp_path):
    file = tmp_path / "batchwright.toml"
    file.write_text("[retention]\nsucceeded_days = 1\nended_days = inf")
    settings = load_settings(environment={"BATCHWRIGHT_RETENTION_REQUESTS_DAYS": "inf"}, file=file)
    assert settings.retention == RetentionSettings(succeeded_days=1, ended_days=math.inf, requests_days=math.inf)


async def test_workers_of_a_client_run_the_rounds_of_retention(pool):
    settings = make_settings(database=DatabaseSettings(url=pool.url), retention=RetentionSettings(succeeded_days=1))
    async with AsyncBatchwright(settings=settings, operations=BASIC) as batchwright:
        worker = batchwright.worker()
        assert {"retention", "retention of events"} <= {round.name for round in worker._upkeep._rounds}
