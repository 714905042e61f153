"""Live events: in order and each once, with followers that come and go, and at no cost while nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random

import psycopg
import pytest

from batchwright import NewJob
from batchwright.db.database import Database
from batchwright.engine import event_streams as module
from batchwright.engine.catalog import Catalog
from batchwright.engine.event_streams import SQL, EventStreams
from batchwright.engine.outcomes import Settle, Wait
from batchwright.engine.queue import Queue
from batchwright.errors import DatabaseUnavailable
from tests.engine.planning import nodes, plan
from tests.support import BASIC, emit, fail, put, raw, snooze, succeed, take, take_one


class Time:
    """A clock that stands still until the test moves it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Spy:
    """The pool, which records every statement; while `is_down`, it is like an unavailable database."""

    def __init__(self, pool):
        self.pool = pool
        self.asked = []
        self.is_down = False
        self.refused = asyncio.Event()
        self.held = None
        """A statement whose answers are held until `arrived` is set."""
        self.answered = asyncio.Event()
        self.arrived = asyncio.Event()

    async def rows(self, sql, params=None):
        name = next((name for name, text in SQL.items() if text == sql), "other")
        self.asked.append(name)
        if self.is_down:
            self.refused.set()
            raise DatabaseUnavailable("the database is away")
        rows = await self.pool.rows(sql, params)
        if name == self.held:
            self.answered.set()
            await self.arrived.wait()
        return rows

    def transaction(self):
        return self.pool.transaction()

    def take(self):
        asked, self.asked = self.asked, []
        return asked


class Reader:
    """A follower that records the events it sees."""

    def __init__(self, streams, job, after=0):
        self.seen = []
        self.pings = 0
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._read(streams, job, after))

    async def _read(self, streams, job, after):
        async with contextlib.aclosing(streams.follow(job, after, idle_seconds=60)) as news:
            async for frames in news:
                self.seen += [int(frame) for frame in frames]
                self.pings += not frames
                self._more.set()

    async def until(self, last):
        """Wait until this event has been seen."""
        while not self.seen or self.seen[-1] < last:
            self._more.clear()
            await self._more.wait()

    async def leave(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def number(event):
    return b"%d" % event.id


async def settled():
    """Let all ready tasks run until they wait; the number of turns is unknown, so take plenty."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def spy(pool):
    return Spy(pool)


@pytest.fixture
def queue(spy, clock):
    return Queue(Database(spy, clock=clock))


@pytest.fixture
def time():
    return Time()


@pytest.fixture
async def streams(queue, time, monkeypatch):
    """EventStreams that do not look for events by themselves: the test calls `look`."""

    async def stand_still(_):
        await asyncio.Event().wait()

    monkeypatch.setattr(EventStreams, "_run_tail", stand_still)
    streams = EventStreams(queue.database, number, monotonic=time)
    yield streams
    await streams.close()


@pytest.fixture
async def live(queue, monkeypatch):
    """EventStreams that look for events by themselves, and often."""
    monkeypatch.setattr(module, "_LOOK_SECONDS_MIN", 0.005)
    monkeypatch.setattr(module, "_FAILED_SECONDS", 0.005)
    monkeypatch.setattr(module, "_LOOK_SHARE", 0)
    streams = EventStreams(queue.database, number)
    yield streams
    await streams.close()


async def running(queue, lane="default"):
    """A running job, and its claim."""
    (id,) = await put(queue, NewJob("noop", queue=lane))
    return await queue.get(id), await take_one(queue, queues=(lane,))


async def ids(queue, id, after=0):
    return [event.id for event in await queue.events(id, after=after, limit=100_000)]


async def test_an_event_between_an_empty_page_and_the_start_of_its_stream_is_not_missed(streams, queue, spy):
    """The page is read before the event, and arrives after the stream has started behind the event."""
    job, claim = await running(queue)
    spy.held = "since"
    reader = Reader(streams, job, after=(await ids(queue, job.id))[-1])
    await spy.answered.wait()
    await emit(queue, claim)
    last = (await ids(queue, job.id))[-1]
    await streams._begin()
    assert streams._streams[job.id].floor == last
    spy.arrived.set()
    async with asyncio.timeout(5):
        await reader.until(last)
    assert reader.seen == [last]
    await reader.leave()


async def last(queue, id):
    return (await ids(queue, id))[-1]


# Order, and once --------------------------------------------------------------------------------------------------


async def test_a_follower_sees_the_past_then_what_happens_and_then_the_end(queue, streams):
    job, claim = await running(queue)
    reader = Reader(streams, job)
    await reader.until(await last(queue, job.id))
    await streams.look()
    await emit(queue, claim, 3)
    await streams.look()
    await reader.until(await last(queue, job.id))
    await succeed(queue, claim)
    await streams.look()
    await reader.task
    assert reader.seen == await ids(queue, job.id)
    assert len(reader.seen) == 6
    assert streams.followers == 0


async def test_a_follower_starts_after_the_event_it_names(queue, streams):
    job, claim = await running(queue)
    await emit(queue, claim, 5)
    await succeed(queue, claim)
    whole = await ids(queue, job.id)
    reader = Reader(streams, await queue.get(job.id), whole[3])
    await reader.task
    assert reader.seen == whole[4:]


async def test_a_stream_of_an_ended_job_ends_at_once_if_all_events_were_seen(queue, streams):
    job, claim = await running(queue)
    await succeed(queue, claim)
    reader = Reader(streams, await queue.get(job.id), await last(queue, job.id))
    await reader.task
    assert reader.seen == []


async def test_a_long_history_is_read_page_by_page(queue, streams):
    job, claim = await running(queue)
    await emit(queue, claim, module._KEPT_MAX + 3 * module._PAGE + 7)
    await succeed(queue, claim)
    reader = Reader(streams, await queue.get(job.id))
    await reader.task
    assert reader.seen == await ids(queue, job.id)


async def test_one_look_reads_a_page_and_says_whether_there_is_more(queue, streams):
    job, claim = await running(queue)
    reader = Reader(streams, job)
    await settled()
    await streams.look()
    await emit(queue, claim, 2 * module._PAGE + 1)
    assert [await streams.look() for _ in range(3)] == [True, True, False]
    await reader.until(await last(queue, job.id))
    assert reader.seen == await ids(queue, job.id)


async def test_a_follower_that_falls_behind_the_kept_events_reads_from_the_database(queue, streams):
    job, claim = await running(queue)
    slow = streams.follow(job, 0, idle_seconds=60)
    async with contextlib.aclosing(slow):
        seen = [int(frame) for frame in await anext(slow)]
        await streams.look()
        await emit(queue, claim, module._KEPT_MAX + 500)
        while await streams.look():
            pass
        await succeed(queue, claim)
        await streams.look()
        async for frames in slow:
            assert len(frames) <= module._PAGE
            seen += map(int, frames)
    assert seen == await ids(queue, job.id)


async def test_the_bytes_that_a_stream_keeps_and_hands_out_are_limited(queue, streams, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES_MAX", 400_000)
    streams._render = lambda event: number(event).ljust(20_000)
    job, claim = await running(queue)
    slow = streams.follow(job, 0, idle_seconds=60)
    async with contextlib.aclosing(slow):
        seen = [int(frame) for frame in await anext(slow)]
        await streams.look()
        for _ in range(4):
            await emit(queue, claim, 10, message="x" * 20_000)
            while await streams.look():
                pass
        (stream,) = streams._streams.values()
        assert 0 < sum(entry.size for entry in stream._entries) <= 400_000
        await succeed(queue, claim)
        await streams.look()
        async for frames in slow:
            assert sum(map(len, frames)) < module._PAGE_BYTES + 20_000
            seen += map(int, frames)
    assert seen == await ids(queue, job.id)


async def test_an_event_larger_than_the_kept_bytes_still_arrives(queue, streams, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES_MAX", 1_000)
    streams._render = lambda event: number(event).ljust(5_000)
    job, claim = await running(queue)
    reader = Reader(streams, job)
    await settled()
    await streams.look()
    await emit(queue, claim, 3)
    await streams.look()
    await reader.until(await last(queue, job.id))
    assert reader.seen == await ids(queue, job.id)


@pytest.mark.timed("who asks for a page first, and so how many are read, depends on the order in which tasks wake")
async def test_followers_of_one_job_share_every_fetch_and_every_rendering(queue, spy, streams):
    rendered = []
    streams._render = lambda event: rendered.append(event.id) or number(event)
    job, claim = await running(queue)
    await emit(queue, claim, module._PAGE + 10)
    readers = [Reader(streams, job) for _ in range(50)]
    spy.take()
    for reader in readers:
        await reader.until(await last(queue, job.id))
    await settled()
    assert spy.take().count("since") == 3, "two pages, and an empty one that ends the history"
    await streams.look()
    await emit(queue, claim, 5)
    await streams.look()
    for reader in readers:
        await reader.until(await last(queue, job.id))
    whole = await ids(queue, job.id)
    assert all(reader.seen == whole for reader in readers)
    assert sorted(rendered) == whole


async def test_a_follower_that_leaves_while_a_page_is_read_does_not_stop_the_read_for_others(queue, spy, live):
    job, _ = await running(queue)
    spy.is_down = True
    one, other = Reader(live, job), Reader(live, job)
    await spy.refused.wait()
    await one.leave()
    spy.is_down = False
    await other.until(await last(queue, job.id))
    assert other.seen == await ids(queue, job.id)


async def test_a_follower_that_starts_after_the_end_sees_it_although_the_stream_has_not_read_it_yet(queue, streams):
    job, claim = await running(queue)
    early = Reader(streams, job)
    await early.until(await last(queue, job.id))
    await streams.look()
    await succeed(queue, claim)
    whole = await ids(queue, job.id)
    late = Reader(streams, await queue.get(job.id), whole[-2])
    await late.task
    assert late.seen == whole[-1:]


async def test_a_follower_that_starts_after_the_end_gets_no_page_that_was_read_before_it(queue, spy, streams):
    job, claim = await running(queue)
    whole = await ids(queue, job.id)
    real, read, given = spy.pool, asyncio.Event(), asyncio.Event()

    class Slow:
        async def rows(self, sql, params=None):
            found = await real.rows(sql, params)
            if sql == SQL["since"]:
                read.set()
                await given.wait()
            return found

    spy.pool = Slow()
    early = Reader(streams, job, whole[-1])
    await read.wait()
    spy.pool = real
    await succeed(queue, claim)
    late = Reader(streams, await queue.get(job.id), whole[-1])
    await settled()
    given.set()
    await late.task
    assert late.seen == (await ids(queue, job.id))[-1:]
    await early.leave()


# Moves ------------------------------------------------------------------------------------------------------------


async def test_an_end_that_was_followed_by_a_rerun_is_no_end(queue, streams):
    job, claim = await running(queue)
    slow = streams.follow(job, 0, idle_seconds=60)
    async with contextlib.aclosing(slow):
        seen = [int(frame) for frame in await anext(slow)]
        await streams.look()
        await fail(queue, claim)
        await streams.look()
        seen += map(int, await anext(slow))
        await queue.rerun(job.id)
        await streams.look()
        seen += map(int, await anext(slow))
        await succeed(queue, await take_one(queue))
        await streams.look()
        seen += [int(frame) async for frames in slow for frame in frames]
    assert seen == await ids(queue, job.id)


async def test_a_stream_of_a_removed_job_ends(queue, streams, time):
    job, _ = await running(queue)
    reader = Reader(streams, job)
    await reader.until(await last(queue, job.id))
    await streams.look()
    await raw(queue, "DELETE FROM batchwright.job WHERE id = %(id)s", id=job.id)
    await streams.look()
    await settled()
    assert not reader.task.done()
    time.now += module._SWEEP_SECONDS
    await streams.look()
    await reader.task


async def test_a_follower_whose_next_events_were_removed_continues_with_the_remaining_ones(queue, streams):
    job, claim = await running(queue)
    slow = streams.follow(job, 0, idle_seconds=60)
    async with contextlib.aclosing(slow):
        seen = [int(frame) for frame in await anext(slow)]
        await streams.look()
        await emit(queue, claim, module._KEPT_MAX + 10)
        while await streams.look():
            pass
        await succeed(queue, claim)
        await streams.look()
        whole = await ids(queue, job.id)
        (stream,) = streams._streams.values()
        await raw(queue, "DELETE FROM batchwright.job_event")
        seen += [int(frame) async for frames in slow for frame in frames]
    assert seen == whole[:2] + [id for id in whole if id > stream.floor]
    assert len(seen) > module._KEPT_MAX // 2


# Late commits -----------------------------------------------------------------------------------------------------


async def test_an_event_that_is_committed_late_is_seen_although_later_numbers_were_seen_first(queue, streams, time):
    late, _ = await running(queue)
    other, claim = await running(queue)
    readers = [Reader(streams, late), Reader(streams, other)]
    await settled()
    await streams.look()
    async with queue.database.transaction() as session:
        await queue.cancel([late.id], session=session)
        await emit(queue, claim, 3)
        await streams.look()
        await readers[1].until(await last(queue, other.id))
        assert readers[0].seen == (await ids(queue, late.id))
    time.now += module._LOOK_SECONDS_MIN * module._LATE_FACTOR
    await streams.look()
    await readers[0].task
    assert readers[0].seen == await ids(queue, late.id)
    assert readers[0].seen[-1] < readers[1].seen[-1]


@pytest.mark.timed("400 looks are made in a transaction, which the server ends when it was idle for 10 s")
async def test_a_late_commit_is_seen_within_a_multiple_of_its_delay(queue, streams, time):
    job, _ = await running(queue)
    reader = Reader(streams, job)
    await settled()
    await streams.look()
    began = time.now
    async with queue.database.transaction() as session:
        await queue.cancel([job.id], session=session)
        while time.now < began + 40:
            await streams.look()
            time.now += 0.1
    while not reader.task.done() and time.now < began + 100:
        await streams.look()
        await settled()
        time.now += 0.1
    assert time.now <= began + 40 * module._LATE_FACTOR + 1
    assert reader.seen == await ids(queue, job.id)


async def test_the_sequence_of_event_numbers_has_no_cache(queue):
    """With a cache, each connection would take several numbers at a time, and numbers would not be in order."""
    assert await raw(
        queue, "SELECT seqcache FROM pg_sequence WHERE seqrelid = 'batchwright.job_event_id'::regclass"
    ) == [(1,)]


async def retry(queue, claim):
    error = {"kind": "transient", "code": "x", "type": "X", "message": "again"}
    await queue.settle([Settle("retry", claim, {"error": error, "delay_seconds": 0})], "w1")


async def outlive_its_lease(queue, claim):
    sql = "UPDATE batchwright.job SET lease_until = now() - interval '1 minute' WHERE id = %(id)s"
    await raw(queue, sql, id=claim.id)


VERBS = {
    "succeed": (None, succeed),
    "fail": (None, fail),
    "retry": (None, retry),
    "snooze": (None, snooze),
    "release": (None, lambda queue, claim: queue.release([(claim.id, claim.claim)], "w1", "stop")),
    "wait": (None, lambda queue, claim: queue.wait(claim, "w1", Wait([]), [])),
    "cancel": (None, lambda queue, claim: queue.cancel([claim.id])),
    "emit": (None, emit),
    "recover": (outlive_its_lease, lambda queue, claim: queue.recover(claim.id)),
    "rerun": (fail, lambda queue, claim: queue.rerun(claim.id)),
    "dismiss": (fail, lambda queue, claim: queue.dismiss([claim.id])),
}
WRITTEN = "SELECT last_value FROM batchwright.job_event_id"


async def number_while_locked(queue, id, moving):
    """The last event number that was taken when the verb waits for the lock of this job."""
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with queue.database.transaction() as session:
        await session.rows("SELECT FROM batchwright.job WHERE id = %(id)s FOR UPDATE", {"id": id})
        task = asyncio.create_task(moving())
        while await raw(queue, blocked) == [(0,)]:
            await asyncio.sleep(0.01)  # only the server knows when a session waits for a lock
        ((number,),) = await raw(queue, WRITTEN)
    await task
    return number


async def test_every_event_takes_its_number_under_the_lock_of_its_job(queue):
    """So within a job, ids grow in the order of commits, and a reader who has seen one cannot miss an earlier one.

    `enqueue` writes a row that no other session sees; `claim`, `expire` and `rescue` never wait for a lock.
    """
    for verb, (prepare, move) in VERBS.items():
        job, claim = await running(queue, verb)
        if prepare:
            await prepare(queue, claim)
        before = await last(queue, job.id)
        number = await number_while_locked(queue, job.id, functools.partial(move, queue, claim))
        assert number == before, verb
        assert await last(queue, job.id) > number, verb


async def test_a_parent_that_joins_takes_its_number_under_its_own_lock(queue):
    parent, claim = await running(queue)
    rows = await Catalog(queue.database, BASIC).prepare([NewJob("noop")])
    await queue.wait(claim, "w1", Wait([NewJob("noop")]), [{**row, "parent_job_id": parent.id} for row in rows])
    child = await take_one(queue)
    number = await number_while_locked(queue, parent.id, lambda: succeed(queue, child))
    assert number == await last(queue, child.id)
    assert await last(queue, parent.id) > number


# Idle followers ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_a_thousand_idle_followers_cost_one_trivial_statement_per_look_and_no_connection(
    queue, spy, pool, streams, time
):
    jobs = await put(queue, *(NewJob("noop") for _ in range(1000)))
    readers = [Reader(streams, job) for job in await queue.get_many(jobs)]
    for reader in readers:
        await reader.until(1)
    await streams.look()
    spy.take()
    looks = since = 0
    end = time.now + 1800
    while time.now < end:
        await streams.look()
        time.now += 1.0
        looks += 1
        asked = spy.take()
        assert asked.count("last_written") == 1
        assert set(asked) <= {"last_written", "since", "gone"}
        since += "since" in asked
    assert since <= looks / module._SWEEP_SECONDS + 20
    stats = pool._pool.get_stats()
    assert stats["pool_available"] == stats["pool_size"]
    assert streams.followers == 1000
    assert all(not reader.task.done() for reader in readers)
    await asyncio.gather(*(reader.leave() for reader in readers))
    assert (streams.followers, streams._streams) == (0, {})


async def test_without_followers_no_statement_is_run(queue, spy, live):
    job, _ = await running(queue)
    reader = Reader(live, job)
    await reader.until(await last(queue, job.id))
    await reader.leave()
    await live._tail
    await live._past
    spy.take()
    assert live._tail.done()
    again = Reader(live, job)
    await again.until(await last(queue, job.id))
    assert not live._tail.done()


async def test_a_follower_without_news_gets_pings(queue, streams):
    job, _ = await running(queue)
    news = streams.follow(job, 0, idle_seconds=0.01)
    async with contextlib.aclosing(news):
        while not (frames := await anext(news)):
            pass  # pings also come while a page takes long
        assert len(frames) == 2
        assert await anext(news) == []
        assert await anext(news) == []


# Followers that come and go ---------------------------------------------------------------------------------------


async def test_many_followers_that_come_and_go_see_every_event_once(queue, live):
    dice = random.Random(7)
    jobs = await queue.get_many(await put(queue, *(NewJob("noop") for _ in range(12))))
    claims = await take(queue)

    async def wander(job):
        seen = []
        while True:
            news = live.follow(await queue.get(job.id), seen[-1] if seen else 0, idle_seconds=60)
            leaves_after = dice.randrange(1, 6)
            async with contextlib.aclosing(news):
                async for frames in news:
                    seen += map(int, frames)
                    leaves_after -= 1
                    if leaves_after == 0:
                        break
                else:
                    return seen

    async def write(claim):
        for _ in range(25):
            await emit(queue, claim, dice.randrange(1, 4))
            await asyncio.sleep(dice.random() * 0.01)
        await succeed(queue, claim)

    wanderers = [asyncio.create_task(wander(job)) for job in jobs for _ in range(20)]
    await asyncio.gather(*map(write, claims))
    seen = await asyncio.gather(*wanderers)
    for n, job in enumerate(jobs):
        whole = await ids(queue, job.id)
        assert all(one == whole for one in seen[n * 20 : n * 20 + 20])
    assert (live.followers, live._streams) == (0, {})


async def test_a_stream_that_is_closed_and_opened_again_during_a_look_misses_nothing(queue, spy, streams):
    job, claim = await running(queue)
    first = Reader(streams, job)
    await first.until(await last(queue, job.id))
    await streams.look()
    await emit(queue, claim, 2)
    real, second = spy.pool, []

    class Between:
        """While the statement runs, the only follower leaves and another one comes."""

        async def rows(self, sql, params=None):
            found = await real.rows(sql, params)
            if sql == SQL["since"] and not second:
                second.append(None)
                await first.leave()
                second[0] = Reader(streams, job)
            return found

    spy.pool = Between()
    await streams.look()
    spy.pool = real
    await second[0].until(await last(queue, job.id))
    await emit(queue, claim, 2)
    await streams.look()
    await second[0].until(await last(queue, job.id))
    assert second[0].seen == await ids(queue, job.id)


async def test_closing_ends_all_followers_also_those_that_wait_for_a_page(queue, spy, live):
    job, _ = await running(queue)
    ahead = Reader(live, job)
    await ahead.until(await last(queue, job.id))
    spy.is_down = True
    behind = Reader(live, job)
    await spy.refused.wait()
    await live.close()
    await asyncio.gather(ahead.task, behind.task)
    assert (live.followers, live.is_closed) == (0, True)


# Outages ----------------------------------------------------------------------------------------------------------


async def test_followers_survive_an_outage_and_miss_nothing(queue, spy, live, caplog):
    job, claim = await running(queue)
    ahead = Reader(live, job)
    await ahead.until(await last(queue, job.id))
    spy.is_down = True
    behind = Reader(live, job)
    for _ in range(10):
        spy.refused.clear()
        await spy.refused.wait()
    complaints = [record for record in caplog.records if "cannot be followed" in record.message]
    assert 1 <= len(complaints) <= 2, (
        "one log line per outage, not per attempt; a statement in flight may still have succeeded"
    )
    spy.is_down = False
    await emit(queue, claim, 3)
    await succeed(queue, claim)
    await asyncio.gather(ahead.task, behind.task)
    assert ahead.seen == behind.seen == await ids(queue, job.id)


async def test_followers_survive_the_loss_of_every_connection(queue, live, database_url):
    job, claim = await running(queue)
    reader = Reader(live, job)
    await reader.until(await last(queue, job.id))
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as admin:
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    while True:
        with contextlib.suppress(DatabaseUnavailable):
            await emit(queue, claim, 3)
            break
    await succeed(queue, claim)
    await reader.task
    assert reader.seen == await ids(queue, job.id)


async def test_after_a_look_that_failed_half_way_the_next_one_reads_everything(queue, spy, streams):
    job, claim = await running(queue)
    reader = Reader(streams, job)
    await reader.until(await last(queue, job.id))
    await streams.look()
    await emit(queue, claim, 2)
    real = spy.pool

    class Half:
        async def rows(self, sql, params=None):
            if sql == SQL["since"]:
                raise DatabaseUnavailable("lost in the middle")
            return await real.rows(sql, params)

    spy.pool = Half()
    with pytest.raises(DatabaseUnavailable):
        await streams.look()
    spy.pool = real
    await streams.look()
    await reader.until(await last(queue, job.id))
    assert reader.seen == await ids(queue, job.id)


async def test_a_follower_gets_pings_while_it_waits_for_the_database(queue, spy, live):
    job, _ = await running(queue)
    spy.is_down = True
    news = live.follow(job, 0, idle_seconds=0.01)
    async with contextlib.aclosing(news):
        assert await anext(news) == []
        spy.is_down = False
        while not (frames := await anext(news)):
            pass
    assert list(map(int, frames)) == await ids(queue, job.id)


async def test_an_error_while_rendering_does_not_stop_the_streams(queue, live, monkeypatch, caplog):
    job, claim = await running(queue)
    stumbles = iter([RuntimeError("stumbled")])

    def render(event):
        for error in stumbles:
            raise error
        return number(event)

    live._render = render
    reader = Reader(live, job)
    await succeed(queue, claim)
    await reader.task
    assert reader.seen == await ids(queue, job.id)
    assert "looking for events failed" in caplog.text


# Plans ------------------------------------------------------------------------------------------------------------


def test_a_page_is_read_in_the_order_of_an_index(crowd):
    found = plan(crowd, "since", source=SQL)
    limits = [node for node in nodes(found) if node["Node Type"] == "Limit"]
    below = {node["Node Type"] for limit in limits for node in nodes(limit)}
    assert limits
    assert not below & {"Sort", "Seq Scan", "Incremental Sort"}


def test_the_last_event_of_a_job_is_found_without_reading_its_history(crowd):
    found = plan(crowd, "last_of_each", source=SQL)
    assert "Aggregate" not in {node["Node Type"] for node in nodes(found)} or any(
        node["Node Type"] == "Limit" for node in nodes(found)
    )
    assert "Seq Scan" not in {node["Node Type"] for node in nodes(found)}
