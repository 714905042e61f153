"""Cron expressions, and one fire per tick: with many workers, crashes, pauses and clocks that go back."""

import asyncio
import bisect
import contextlib
import itertools
import logging
import re
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql

from batchwright import NewJob
from batchwright.db.database import Database, Pool, connect_arguments
from batchwright.db.doorbell import Ring
from batchwright.engine.catalog import Catalog
from batchwright.engine.cron import Cron, preview
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.engine.schedules import SQL, TICKS_PER_ROUND_MAX, Missed, Schedules
from batchwright.engine.upkeep import Upkeep
from batchwright.errors import Conflict, InvalidInput, NotFound, PayloadInvalid, UnknownOperation
from batchwright.operations.decorator import operation
from batchwright.operations.registry import Registry
from tests.support import DATABASE, Clock, put, raw, take_one

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
EVERY_MINUTE = "* * * * *"


class Report(pydantic.BaseModel):
    title: str = "all"


@operation("report")
async def report(at: datetime | None = None, title: str = "all") -> None: ...


@operation("picky", exclusive_key=("title",), on_held="reject")
async def picky(title: str = "all") -> None: ...


@operation("whole")
async def whole(report: Report) -> None: ...


OPERATIONS = Registry([report, picky, whole])
REPORT = NewJob("report")


def make(queue: Queue, clock: Clock, operations: Registry = OPERATIONS) -> Schedules:
    return Schedules(queue, Catalog(queue.database, operations))


@pytest.fixture
def schedules(queue, clock):
    clock.time = NOON
    return make(queue, clock)


async def fire(queue, schedules) -> int:
    async with queue.database.transaction() as session:
        return await schedules.fire_due(session)


async def fired_ticks(queue, schedule) -> list[datetime]:
    """The tick of each job that the schedule has made, by the jobs' idempotency keys."""
    rows = await raw(queue, "SELECT idempotency_key FROM batchwright.job WHERE idempotency_key IS NOT NULL")
    keys = sorted(key.split("/") for (key,) in rows)
    return [datetime.fromisoformat(tick) for word, id, tick in keys if (word, id) == ("schedule", str(schedule.id))]


def until(last, ticks) -> list[datetime]:
    return list(itertools.takewhile(lambda tick: tick <= last, ticks))


# Cron -----------------------------------------------------------------------------------------------------------------


def shown(cron, timezone, after, n=3):
    return [f"{tick:%m-%d %H:%M}" for tick in preview(cron, timezone, n, after=after)]


@pytest.mark.parametrize(
    ("cron", "ticks"),
    [
        ("*/5 * * * *", ["05-04 12:05", "05-04 12:10", "05-04 12:15"]),
        ("0 6 * * MON-FRI", ["05-05 06:00", "05-06 06:00", "05-07 06:00"]),
        ("0 0 L * *", ["05-31 00:00", "06-30 00:00", "07-31 00:00"]),
        ("0 0 LW * *", ["05-29 00:00", "06-30 00:00", "07-31 00:00"]),
        ("0 0 * * 5L", ["05-29 00:00", "06-26 00:00", "07-31 00:00"]),
        ("0 0 * * FRI#2", ["05-08 00:00", "06-12 00:00", "07-10 00:00"]),
        ("0 0 13 * 5", ["05-08 00:00", "05-13 00:00", "05-15 00:00"]),
    ],
)
def test_ticks_are_those_of_cron(cron, ticks):
    assert shown(cron, "UTC", NOON) == ticks


def test_leap_days_come_every_four_years_but_not_in_2100():
    ticks = preview("0 0 29 2 *", n=20, after=NOON)
    assert [tick.year for tick in ticks[:3]] == [2028, 2032, 2036]
    assert {2096, 2104} <= {tick.year for tick in ticks}
    assert 2100 not in {tick.year for tick in ticks}


SPRING = datetime(2026, 3, 28, 22, 59, tzinfo=UTC)
AUTUMN = datetime(2026, 10, 24, 21, 59, tzinfo=UTC)
SECOND_PASS = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "begin", "ticks"),
    [
        # The hour from two to three does not exist: its jobs run right after the clocks have jumped.
        ("30 2 * * *", SPRING, ["03-29 01:00", "03-30 00:30", "03-31 00:30"]),
        ("30 3 * * *", SPRING, ["03-29 01:30", "03-30 01:30", "03-31 01:30"]),
        ("0 * * * *", SPRING, ["03-28 23:00", "03-29 00:00", "03-29 01:00"]),
        # That hour exists twice: a fixed time of day fires once, and an interval continues evenly.
        ("30 2 * * *", AUTUMN, ["10-25 00:30", "10-26 01:30", "10-27 01:30"]),
        ("40 2 * * *", SECOND_PASS, ["10-26 01:40", "10-27 01:40", "10-28 01:40"]),
        ("0 3 * * *", AUTUMN, ["10-25 02:00", "10-26 02:00", "10-27 02:00"]),
        ("30 * * * *", AUTUMN, ["10-24 22:30", "10-24 23:30", "10-25 00:30"]),
    ],
)
def test_summer_time_is_handled_as_in_debians_cron(cron, begin, ticks):
    assert shown(cron, "Europe/Berlin", begin) == ticks


@pytest.mark.parametrize("cron", ["30 2 * * *", "0,30 1-3 * * *", "*/20 * * * *", "* 2 * * *", "0 0 L * *"])
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Havana", "Australia/Lord_Howe", "UTC"])
def test_ticks_do_not_depend_on_where_they_are_counted_from_and_the_newest_is_found_backwards(cron, zone):
    when = Cron.parse(cron, zone)
    for begin in (datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 10, 1, tzinfo=UTC)):
        every = until(begin + timedelta(days=40), when.ticks(begin))
        assert every == sorted(set(every))
        for hours in range(1, 40 * 24, 13):
            now = begin + timedelta(hours=hours, minutes=hours % 60)
            place = bisect.bisect_right(every, now)
            later = every[place : place + 2]
            assert list(itertools.islice(when.ticks(now), len(later))) == later
            assert place == 0 or when.newest(every[0], now) == every[place - 1]


def test_the_newest_tick_of_a_long_outage_is_found_quickly():
    now = NOON + timedelta(days=3650)
    assert Cron.parse(EVERY_MINUTE, "Europe/Berlin").newest(NOON, now) == now


@pytest.mark.parametrize(
    ("cron", "why"),
    [
        ("61 * * * *", "the minute '61' is not possible; use 0 to 59"),
        ("* 24 * * *", "the hour '24' is not possible; use 0 to 23"),
        ("0 0 30 2 *", "the day-of-month '30' is not possible; use 1 to 31 or L for the last day, and a month that"),
        ("* * * FEBRUARY *", "the month 'FEBRUARY' is not possible; use 1 to 12 or JAN to DEC"),
        ("* * * * 8", "the day-of-week '8' is not possible; use 0 to 7 or SUN to SAT; FRI#2"),
        ("0 0 */16 * MON#5", "'0 0 */16 * MON#5' does not fire in 50 years"),
        ("0 * * * * *", "six fields; leave out the field for seconds"),
        ("* * *", "3 fields; write five fields: minute hour day-of-month month day-of-week"),
        ("@daily", "nicknames are not supported; write '0 0 * * *'"),
        ("1" * 300, "300 characters; the limit is 200"),
    ],
)
def test_an_invalid_cron_expression_is_refused_with_the_reason(cron, why):
    with pytest.raises(InvalidInput, match=re.escape(why)) as refused:
        preview(cron)
    assert refused.value.param == "cron"


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("Europe/Brelin", "did you mean 'Europe/Berlin'?"),
        ("europe/berlin", "did you mean 'Europe/Berlin'?"),
        ("new york", "did you mean 'America/New_York'?"),
        ("Europe", "did you mean 'Europe/"),
        ("localtime", "'localtime' differs from machine to machine"),
        ("../../etc/passwd", "write it as 'Europe/Berlin' or 'UTC'"),
        ("", "write it as 'Europe/Berlin' or 'UTC'"),
    ],
)
def test_an_unknown_time_zone_is_refused_with_a_similar_one(zone, hint):
    with pytest.raises(InvalidInput, match=re.escape(hint)) as refused:
        preview(EVERY_MINUTE, zone)
    assert refused.value.param == "timezone"


FIELD = st.text(alphabet="0123456789*/,-#LW MONFRI", min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.text(max_size=30), st.lists(FIELD, min_size=5, max_size=5).map(" ".join)), st.text(max_size=10))
def test_any_cron_text_gives_ticks_or_our_own_error(cron, zone):
    for name in ("Europe/Berlin", zone):
        with contextlib.suppress(InvalidInput):
            ticks = preview(cron, name, 3, after=NOON)
            assert NOON < ticks[0] < ticks[1] < ticks[2]


# Create, replace, read ------------------------------------------------------------------------------------------------


async def test_a_schedule_keeps_its_template_and_knows_its_next_tick(schedules):
    job = NewJob(
        report,
        {"title": "sales"},
        queue="slow",
        priority=2,
        max_attempts=7,
        exclusive_key=["report", 1],
        on_held="coalesce",
        deadline=timedelta(hours=1),
    )
    made = await schedules.create("daily", "0  6 * * *", job, timezone="Europe/Berlin", missed="skip")
    assert made == await schedules.get("daily") == await schedules.get(made.id) == await schedules.get(str(made.id))
    assert (made.cron, made.timezone, made.missed) == ("0 6 * * *", "Europe/Berlin", Missed.SKIP)
    assert made.next_at == datetime(2026, 5, 5, 4, tzinfo=UTC)
    assert (made.created_at, made.fires, made.last_error, made.paused_at) == (NOON, 0, None, None)
    assert made.job == {
        "operation": "report",
        "payload": {"title": "sales"},
        "queue": "slow",
        "priority": 2,
        "max_attempts": 7,
        "exclusive_key": ["report", 1],
        "on_held": "coalesce",
        "deadline_seconds": 3600.0,
    }
    assert made.upcoming(2) == [made.next_at, made.next_at + timedelta(days=1)]


async def test_a_payload_of_models_is_kept_as_json(schedules):
    made = await schedules.create("models", EVERY_MINUTE, NewJob(whole, Report(title="x")))
    assert made.job["payload"] == {"title": "x"}


REFUSED = [
    ({"job": NewJob("repord")}, UnknownOperation, "did you mean 'report'?"),
    ({"job": NewJob("report", {"title": 7})}, PayloadInvalid, "report: title: "),
    ({"job": NewJob("report", {}), "tick_field": "when"}, PayloadInvalid, "report: when: "),
    ({"tick_field": ""}, InvalidInput, "tick_field must have 1 to 100 characters, not 0"),
    ({"job": NewJob(whole, Report()), "tick_field": "title"}, InvalidInput, "the payload must be an object"),
    ({"job": NewJob("report", priority=10)}, InvalidInput, "priority is 10"),
    ({"job": NewJob("report", delay_seconds=1)}, InvalidInput, "cannot have delay_seconds"),
    ({"job": NewJob("report", idempotency_key="x")}, InvalidInput, "cannot have idempotency_key"),
    ({"job": NewJob("report", deadline=NOON)}, InvalidInput, "give a timedelta"),
    ({"missed": "some"}, InvalidInput, "missed is 'some'; use skip, latest or all"),
    ({"cron": "0 0 31 2 *"}, InvalidInput, "day-of-month"),
    ({"timezone": "Mars"}, InvalidInput, "there is no time zone 'Mars'"),
    ({"name": ""}, InvalidInput, "is not a schedule name"),
    ({"name": "a/b"}, InvalidInput, "is not a schedule name"),
    ({"name": "x" * 201}, InvalidInput, "is not a schedule name"),
    ({"name": str(uuid4())}, InvalidInput, "it must not look like an id"),
]


async def test_a_schedule_that_could_not_fire_is_refused_at_creation(queue, schedules):
    for words, error, says in REFUSED:
        shape = {"name": "bad", "cron": EVERY_MINUTE, "job": REPORT, **words}
        with pytest.raises(error, match=re.escape(says)):
            await schedules.create(**shape)
    assert await raw(queue, "SELECT FROM batchwright.schedule") == []


async def test_a_name_is_unique_within_its_tenant(schedules):
    made = await schedules.create("daily", EVERY_MINUTE, REPORT)
    with pytest.raises(Conflict, match="a schedule 'daily' exists already"):
        await schedules.create("daily", EVERY_MINUTE, REPORT)
    theirs = await schedules.create("daily", EVERY_MINUTE, REPORT, tenant="others")
    assert theirs.id != made.id
    for schedule in (made.id, "nightly", "no\0name", "\ud800"):
        for verb in (schedules.get, schedules.pause, schedules.resume, schedules.delete, schedules.fire_now):
            with pytest.raises(NotFound, match="there is no schedule"):
                await verb(schedule, tenant="others")
    assert [one.id for one in await schedules.list()] == [made.id]


async def test_a_list_continues_after_a_name(schedules):
    for name in ("c", "a", "b"):
        await schedules.create(name, EVERY_MINUTE, REPORT)
    assert [one.name for one in await schedules.list(limit=2)] == ["a", "b"]
    assert [one.name for one in await schedules.list(limit=2, after="b")] == ["c"]
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after": "\0"}):
        with pytest.raises(InvalidInput):
            await schedules.list(**wrong)


async def test_replacing_keeps_id_history_and_pause_and_if_the_cron_is_the_same_the_next_tick(queue, clock, schedules):
    old = await schedules.create("daily", EVERY_MINUTE, REPORT)
    clock.time += MINUTE
    await fire(queue, schedules)
    await schedules.pause("daily")
    new = await schedules.create("daily", EVERY_MINUTE, NewJob("report", {"title": "x"}), missed="all", replace=True)
    assert (new.id, new.fires, new.paused_at, new.missed) == (old.id, 1, clock.time, Missed.ALL)
    assert (new.next_at, new.last_tick_at) == (NOON + 2 * MINUTE, NOON + MINUTE)
    assert new.job["payload"] == {"title": "x"}


async def test_a_new_cron_counts_from_now_and_never_from_before_the_last_tick(queue, clock, schedules):
    schedule = await schedules.create("daily", "*/10 * * * *", REPORT)
    clock.time = NOON + 31 * MINUTE
    await fire(queue, schedules)
    clock.time = NOON + 34 * MINUTE
    new = await schedules.create("daily", "*/5 * * * *", REPORT, replace=True)
    assert new.next_at == NOON + 35 * MINUTE
    clock.time = NOON
    new = await schedules.create("daily", "*/15 * * * *", REPORT, replace=True)
    assert new.next_at == NOON + 45 * MINUTE, "the tick at half past was fired, though the clock says noon"
    assert await fired_ticks(queue, schedule) == [NOON + 30 * MINUTE]


# Fire -----------------------------------------------------------------------------------------------------------------


async def test_a_tick_makes_one_job_from_the_template(queue, clock, schedules):
    job = NewJob("report", {"title": "x"}, queue="slow", priority=1, max_attempts=5, exclusive_key="k")
    schedule = await schedules.create("daily", EVERY_MINUTE, job, tick_field="at", tenant="them")
    assert await fire(queue, schedules) == 0
    clock.time = NOON + timedelta(seconds=61)
    assert await fire(queue, schedules) == 1
    assert await fire(queue, schedules) == 0
    after = await schedules.get("daily", tenant="them")
    made = await queue.get(after.last_job_id)
    assert (made.job_type, made.queue, made.tenant, made.priority, made.max_attempts) == (
        "report",
        "slow",
        "them",
        1,
        5,
    )
    assert made.payload == {"title": "x", "at": "2026-05-04T12:01:00Z"}
    assert (made.exclusive_key, made.idempotency_key) == ('["k"]', f"schedule/{schedule.id}/2026-05-04T12:01:00+00:00")
    assert (after.last_tick_at, after.next_at, after.fires) == (NOON + MINUTE, NOON + 2 * MINUTE, 1)
    assert after.updated_at == schedule.updated_at


@pytest.mark.parametrize(
    ("missed", "late", "ticks"),
    [
        (Missed.ALL, 630, range(1, 11)),
        (Missed.LATEST, 630, [10]),
        (Missed.SKIP, 630, [10]),
        (Missed.SKIP, 60, [1]),
    ],
)
async def test_missed_ticks_are_fired_by_the_policy(queue, clock, schedules, missed, late, ticks):
    schedule = await schedules.create("daily", EVERY_MINUTE, REPORT, missed=missed)
    clock.time = NOON + timedelta(seconds=late)
    assert await fire(queue, schedules) == len(ticks)
    assert await fired_ticks(queue, schedule) == [NOON + n * MINUTE for n in ticks]


async def test_skip_fires_a_tick_up_to_a_minute_late_and_never_afterwards(queue, clock, schedules):
    schedule = await schedules.create("daily", "0 * * * *", REPORT, missed=Missed.SKIP)
    clock.time = NOON + timedelta(hours=1, seconds=60)
    assert await fire(queue, schedules) == 1
    clock.time = NOON + timedelta(hours=2, seconds=61)
    assert await fire(queue, schedules) == 0
    after = await schedules.get("daily")
    assert (after.last_tick_at, after.next_at) == (NOON + timedelta(hours=1), NOON + timedelta(hours=3))
    assert await fired_ticks(queue, schedule) == [NOON + timedelta(hours=1)]


async def test_a_round_fires_up_to_a_thousand_ticks_of_all_schedules_together(queue, clock, schedules):
    long = await schedules.create("long", EVERY_MINUTE, REPORT, missed=Missed.ALL)
    clock.time = NOON + 1500 * MINUTE
    assert await fire(queue, schedules) == TICKS_PER_ROUND_MAX
    other = await schedules.create("other", EVERY_MINUTE, REPORT)
    clock.time += MINUTE
    assert await fire(queue, schedules) == 501, "each had room for 500"
    assert await fire(queue, schedules) == 1
    assert await fired_ticks(queue, long) == [NOON + n * MINUTE for n in range(1, 1502)]
    assert await fired_ticks(queue, other) == [NOON + 1501 * MINUTE]


async def test_a_crash_between_enqueue_and_commit_fires_later_and_once(queue, clock, schedules):
    schedule = await schedules.create("daily", EVERY_MINUTE, REPORT)
    clock.time += MINUTE
    with pytest.raises(RuntimeError):
        async with queue.database.transaction() as session:
            assert await schedules.fire_due(session) == 1
            raise RuntimeError("the worker died here")
    assert await schedules.get("daily") == schedule
    assert await fired_ticks(queue, schedule) == []
    assert await fire(queue, schedules) == 1
    assert await fired_ticks(queue, schedule) == [NOON + MINUTE]


async def test_a_next_tick_that_was_moved_back_by_hand_makes_no_second_job(queue, clock, schedules):
    schedule = await schedules.create("daily", EVERY_MINUTE, REPORT)
    clock.time += MINUTE
    await fire(queue, schedules)
    first = (await schedules.get("daily")).last_job_id
    await raw(queue, "UPDATE batchwright.schedule SET next_at = %(next)s", next=NOON + MINUTE)
    await fire(queue, schedules)
    assert (await schedules.get("daily")).last_job_id == first
    assert await fired_ticks(queue, schedule) == [NOON + MINUTE]


@pytest.mark.direct("it waits for the doorbell")
async def test_the_doorbell_for_new_jobs_rings_at_the_commit(queue, clock, schedules, database_url):
    await schedules.create("daily", EVERY_MINUTE, NewJob("report", queue="slow"))
    clock.time += MINUTE
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as ear:
        await ear.execute("LISTEN batchwright")
        async with queue.database.transaction() as session:
            await schedules.fire_due(session)
            assert [ring async for ring in ear.notifies(timeout=0.05)] == []
        assert [Ring.read(ring.payload).queue async for ring in ear.notifies(timeout=10, stop_after=1)] == ["slow"]


# Five at once, and clocks that jump -----------------------------------------------------------------------------------


STEPS = (70, -300, 400, 61, -60, 0, 185, -20, 3600, -7200, 7000, 90, -1, 1, 1200)


@contextlib.asynccontextmanager
async def five_rounds(url, clocks):
    """Schedules with separate pools, like those of five processes."""
    async with contextlib.AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(Pool(DATABASE, url)) for _ in clocks]
        queues = [
            Queue(Database(pool, clock=clock), EngineSettings()) for pool, clock in zip(pools, clocks, strict=True)
        ]
        yield [(queue, make(queue, clock)) for queue, clock in zip(queues, clocks, strict=True)]


@pytest.mark.parametrize("shared", [True, False], ids=["one clock", "five clocks"])
async def test_five_rounds_with_jumping_clocks_fire_each_tick_exactly_once(database_url, queue, shared):
    common = Clock()
    clocks = [common if shared else Clock() for _ in range(5)]
    for clock in clocks:
        clock.time = NOON
    async with five_rounds(database_url, clocks) as rounds:
        _, first = rounds[0]
        every = [
            await first.create(f"all-{n}", cron, REPORT, missed=Missed.ALL, timezone="Europe/Berlin")
            for n, cron in enumerate([EVERY_MINUTE, "*/3 * * * *", "7 * * * *"])
        ]
        latest = await first.create("latest", EVERY_MINUTE, REPORT, missed=Missed.LATEST)
        furthest = NOON
        for turn, step in enumerate(STEPS):
            for place, clock in enumerate({id(clock): clock for clock in clocks}.values()):
                clock.time += timedelta(seconds=step if place == turn % 5 or shared else 17 * place)
                furthest = max(furthest, clock.time)
            await asyncio.gather(*(fire(*one) for one in rounds for _ in range(2)))
        for clock in clocks:
            clock.time = furthest
        await asyncio.gather(*(fire(*one) for one in rounds))
    for schedule in every:
        when = Cron.parse(schedule.cron, schedule.timezone)
        expected = until(furthest, when.ticks(NOON))
        assert expected
        assert await fired_ticks(queue, schedule) == expected
    ticks = await fired_ticks(queue, latest)
    assert len(ticks) == len(set(ticks)) > 3
    assert await raw(queue, "SELECT name FROM batchwright.schedule WHERE last_error IS NOT NULL") == []
    counted = await raw(
        queue, "SELECT sum(fires)::int, (SELECT count(*) FROM batchwright.job)::int FROM batchwright.schedule"
    )
    assert counted[0][0] == counted[0][1], "no job existed before its fire: next_at alone prevented duplicates"


async def test_a_round_leaves_schedules_that_another_round_holds(database_url, clock):
    clock.time = NOON
    async with five_rounds(database_url, [clock, clock]) as ((queue, one), (_, two)):
        await one.create("daily", EVERY_MINUTE, REPORT)
        clock.time += MINUTE
        async with queue.database.transaction() as session:
            assert await one.fire_due(session) == 1
            assert await asyncio.wait_for(fire(queue, two), 5) == 0


async def test_upkeep_fires_schedules(queue, clock, schedules, pool):
    from tests.support import make_worker

    worker = make_worker(pool, queue=queue)
    upkeep = Upkeep(queue, worker._processes, OPERATIONS, schedules.rounds())
    await schedules.create("daily", EVERY_MINUTE, REPORT)
    await upkeep.run_due()
    clock.time += MINUTE
    await upkeep.run_due()
    assert (await schedules.get("daily")).fires == 1


# Pause and by hand ----------------------------------------------------------------------------------------------------


async def test_a_paused_schedule_fires_nothing_and_skips_the_ticks_of_the_pause(queue, clock, schedules):
    schedule = await schedules.create("daily", EVERY_MINUTE, REPORT, missed=Missed.ALL)
    paused = await schedules.pause("daily")
    assert (paused.paused_at, paused.upcoming()) == (NOON, [])
    clock.time = NOON + timedelta(seconds=330)
    assert (await schedules.pause("daily")).paused_at == NOON
    assert await fire(queue, schedules) == 0
    resumed = await schedules.resume("daily")
    assert (resumed.paused_at, resumed.next_at) == (None, NOON + 6 * MINUTE)
    assert await fire(queue, schedules) == 0
    clock.time = NOON + 6 * MINUTE
    assert await fire(queue, schedules) == 1
    assert await fired_ticks(queue, schedule) == [NOON + 6 * MINUTE]


async def test_resuming_after_the_clock_went_back_fires_no_tick_again(queue, clock, schedules):
    schedule = await schedules.create("daily", EVERY_MINUTE, REPORT, missed=Missed.ALL)
    clock.time = NOON + 5 * MINUTE
    await fire(queue, schedules)
    clock.time = NOON
    await schedules.pause("daily")
    assert (await schedules.resume("daily")).next_at == NOON + 6 * MINUTE
    clock.time = NOON + 6 * MINUTE
    assert await fire(queue, schedules) == 1
    assert len(await fired_ticks(queue, schedule)) == 6


async def test_resuming_a_schedule_that_is_not_paused_changes_nothing(clock, schedules):
    schedule = await schedules.create("daily", EVERY_MINUTE, REPORT)
    clock.time += 5 * MINUTE
    assert await schedules.resume("daily") == schedule, "its missed ticks are still due"


async def test_a_run_by_hand_makes_a_job_and_moves_no_tick(queue, schedules):
    schedule = await schedules.create("daily", EVERY_MINUTE, REPORT, tick_field="at")
    await schedules.pause("daily")
    ids = {await schedules.fire_now("daily"), await schedules.fire_now(schedule.id)}
    after = await schedules.get("daily")
    assert len(ids) == 2
    assert after.last_job_id in ids
    assert (after.fires, after.next_at, after.last_tick_at) == (2, schedule.next_at, None)
    assert (await queue.get(after.last_job_id)).payload["at"] == "2026-05-04T12:00:00Z"


async def test_a_run_by_hand_that_is_refused_says_so_and_leaves_nothing(queue, schedules):
    schedule = await schedules.create("picky", EVERY_MINUTE, NewJob("picky"))
    await schedules.fire_now("picky")
    with pytest.raises(Conflict, match="is held by job"):
        await schedules.fire_now("picky")
    assert (await schedules.get("picky")).fires == 1
    assert schedule.last_error is None


async def test_a_deleted_schedule_leaves_its_jobs(queue, clock, schedules):
    schedule = await schedules.create("daily", EVERY_MINUTE, REPORT)
    clock.time += MINUTE
    await fire(queue, schedules)
    assert (await schedules.delete("daily")).id == schedule.id
    clock.time += MINUTE
    assert await fire(queue, schedules) == 0
    assert await fired_ticks(queue, schedule) == [NOON + MINUTE]
    with pytest.raises(NotFound):
        await schedules.get("daily")


# What cannot fire -----------------------------------------------------------------------------------------------------


async def test_a_held_key_is_recorded_and_the_schedule_continues(queue, clock, schedules, caplog):
    schedule = await schedules.create("picky", EVERY_MINUTE, NewJob("picky", {"title": "secret"}), missed=Missed.ALL)
    clock.time = NOON + 3 * MINUTE
    with caplog.at_level(logging.WARNING):
        assert await fire(queue, schedules) == 1, (
            "the job of the first tick holds the key, so the two others are refused"
        )
    after = await schedules.get("picky")
    assert after.last_error.startswith('2026-05-04T12:03:00+00:00: the key ["picky","secret"] is held by job ')
    assert (after.fires, after.last_tick_at, after.next_at) == (1, NOON + 3 * MINUTE, NOON + 4 * MINUTE)
    assert [record.getMessage() for record in caplog.records] == [
        f"schedule 'picky' of tenant default: the tick 2026-05-04T12:0{n}:00+00:00 was refused (Conflict); "
        "see its last_error"
        for n in (2, 3)
    ]
    await queue.cancel([after.last_job_id], reason="out of the way")
    clock.time = NOON + 4 * MINUTE
    assert await fire(queue, schedules) == 1
    assert (await schedules.get("picky")).last_error is None
    assert await fired_ticks(queue, schedule) == [NOON + MINUTE, NOON + 4 * MINUTE]


async def test_a_coalesced_tick_counts_as_fired_with_the_existing_job(queue, clock, schedules):
    (standing,) = await put(queue, NewJob("report", exclusive_key="k"), operations=OPERATIONS)
    await schedules.create("daily", EVERY_MINUTE, NewJob("report", exclusive_key="k", on_held="coalesce"))
    clock.time += MINUTE
    assert await fire(queue, schedules) == 1
    after = await schedules.get("daily")
    assert (after.last_job_id, after.fires, after.last_error) == (standing, 1, None)


async def test_a_superseding_tick_cancels_the_one_before(queue, clock, schedules):
    await schedules.create("daily", EVERY_MINUTE, NewJob("report", exclusive_key="k", on_held="supersede"))
    for _ in range(2):
        clock.time += MINUTE
        assert await fire(queue, schedules) == 1
    rows = await raw(queue, "SELECT status::text FROM batchwright.job ORDER BY created_at")
    assert rows == [("CANCELLED",), ("QUEUED",)]


BROKEN = {
    "payload-has-changed": ('job = job || \'{"payload": {"old": 1}}\'', "report: old: "),
    "operation-is-gone": ('job = job || \'{"operation": "gone"}\'', "no worker knows the operation 'gone'"),
    "queue-is-refused": ("job = jsonb_set(job, '{queue}', to_jsonb(repeat('q', 201)))", "job_queue_check"),
    "template-is-none": ("job = '{}'", "KeyError"),
    "zone-was-abolished": ("timezone = 'Mars/Olympus'", "there is no time zone 'Mars/Olympus'"),
    "cron-is-none": ("cron = 'at tea time'", "3 fields"),
}


async def test_errors_of_schedules_are_recorded_and_do_not_stop_other_schedules(queue, clock, schedules):
    first = await schedules.create("a", EVERY_MINUTE, REPORT)
    for name, (damage, _) in BROKEN.items():
        await schedules.create(name, EVERY_MINUTE, REPORT, missed=Missed.ALL)
        await raw(queue, f"UPDATE batchwright.schedule SET {damage} WHERE name = %(name)s", name=name)
    last = await schedules.create("z", EVERY_MINUTE, REPORT)
    clock.time += MINUTE
    assert await fire(queue, schedules) == 2
    for schedule in (first, last):
        assert await fired_ticks(queue, schedule) == [NOON + MINUTE]
    for name, (_, says) in BROKEN.items():
        after = await schedules.get(name)
        assert says in after.last_error
        assert after.next_at == (None if name in ("zone-was-abolished", "cron-is-none") else NOON + 2 * MINUTE)
        mended = await schedules.create(name, EVERY_MINUTE, REPORT, replace=True)
        assert (mended.id, mended.last_error, mended.next_at) == (after.id, None, NOON + 2 * MINUTE)
    clock.time += MINUTE
    assert await fire(queue, schedules) == 2 + len(BROKEN)


async def test_a_key_that_a_long_transaction_holds_delays_its_own_schedule_only(queue, clock, schedules, caplog):
    slow = NewJob("report", exclusive_key="k", on_held="coalesce")
    held = await schedules.create("held", EVERY_MINUTE, slow, missed=Missed.ALL)
    free = await schedules.create("free", EVERY_MINUTE, REPORT)
    await put(queue, REPORT, operations=OPERATIONS)
    clock.time = NOON + 2 * MINUTE
    async with queue.database.transaction() as theirs:
        rows = await Catalog(queue.database, OPERATIONS).prepare([slow])
        (standing,) = await queue.enqueue(rows, session=theirs)
        assert await fire(queue, schedules) == 1
        after = await schedules.get("held")
        assert (after.next_at, after.fires, after.last_error) == (NOON + MINUTE, 0, None)
    assert "schedule 'held' of tenant default cannot fire now and is retried" in caplog.text
    assert await fire(queue, schedules) == 2
    assert (await schedules.get("held")).last_job_id == standing.id
    assert await fired_ticks(queue, free) == [NOON + 2 * MINUTE]
    assert await fired_ticks(queue, held) == []


async def test_a_scheduled_job_runs(queue, clock, schedules):
    await schedules.create("daily", EVERY_MINUTE, REPORT)
    clock.time += MINUTE
    await fire(queue, schedules)
    claim = await take_one(queue, types=["report"])
    assert claim.id == (await schedules.get("daily")).last_job_id


# Statements -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def probe(database_url):
    with psycopg.connect(database_url, **connect_arguments(DATABASE)) as connection:
        yield connection
        connection.rollback()


def prepared(connection, name):
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", SQL[name])))
    text = SQL[name]
    for number, parameter in enumerate(names, 1):
        text = text.replace(f"%({parameter})s", f"${number}")
    connection.execute(f"PREPARE probe AS {text}".encode())
    return names


def test_every_statement_can_be_prepared(probe):
    for name in SQL:
        prepared(probe, name)
        probe.execute("DEALLOCATE probe")


def test_due_schedules_are_found_by_an_index(probe):
    values = {"limit": 200, "now": None}
    arguments = sql.SQL(", ").join(sql.Literal(values[name]) for name in prepared(probe, "due"))
    plan = probe.execute(sql.SQL("EXPLAIN EXECUTE probe ({})").format(arguments)).fetchall()
    assert "schedule_due" in str(plan)
