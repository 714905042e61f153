"""The worker against a real PostgreSQL: what it runs at once, what interrupts it, and what it survives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import psycopg
import pydantic
import pytest

from batchwright import (
    AsyncBatchwright,
    Context,
    Done,
    Fatal,
    JobStatus,
    NewJob,
    RateLimited,
    RetryLater,
    SchemaInvalid,
    Snooze,
    Transient,
    Wait,
    operation,
)
from batchwright.db.database import Blocking, Database, complete
from batchwright.engine import jobs
from batchwright.engine.outcomes import check_outcome
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.engine.views import Views
from batchwright.engine.worker import runner as runner_module
from batchwright.engine.worker import worker as worker_module
from batchwright.engine.worker.lanes import PRIVATE
from batchwright.engine.worker.lease import Lease
from batchwright.engine.worker.worker import Worker
from batchwright.errors import DatabaseUnavailable, WorkerBroken
from batchwright.operations.registry import Registry
from tests.engine import deadly
from tests.engine.faulty import Faulty
from tests.support import (
    DATABASE,
    INTERRUPT_SECONDS_MAX,
    OneDuty,
    event_names,
    finished,
    listed,
    make_worker,
    noop,
    put,
    put_one,
    raw,
    run_job,
    take,
    within,
    working,
)

SHORT = EngineSettings(lease_seconds=1.0, rescue_jitter_seconds=0.0)
QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobStatus


async def run(pool, queue, *functions, jobs=None, **settings):
    """Enqueue one job of the first function (or these jobs), run one round, and return the jobs."""
    worker = make_worker(pool, *functions, **settings)
    new = jobs if jobs is not None else [NewJob(functions[0])]
    ids = await put(queue, *new, operations=Registry(functions))
    assert await worker.run_once() == len(ids)
    await worker.close()
    return [await queue.get(id) for id in ids]


async def run_one(pool, queue, *functions, **settings):
    (job,) = await run(pool, queue, *functions, **settings)
    return job


async def there(path) -> str:
    """Wait for a file and return its text; bounded by the test's timeout."""
    while not path.exists() or not (text := path.read_text()):
        await asyncio.sleep(0.01)
    return text


class Gauge:
    """Measures how many tasks are inside at the same time."""

    def __init__(self) -> None:
        self.inside = self.most = 0

    async def hold(self, turns: int = 20) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        for _ in range(turns):
            await asyncio.sleep(0)
        self.inside -= 1


# Concurrency ------------------------------------------------------------------------------------------------------


async def test_one_claim_takes_200_jobs_and_few_commits_settle_them(pool, queue):
    database = Faulty(pool)
    worker = make_worker(pool, queue=Queue(Database(database)), concurrency=200)
    ids = await put(queue, *(NewJob("noop", {"n": n}) for n in range(200)))
    assert await worker.run_once() == 200
    assert database.ran["claim"] == 1
    assert database.ran["succeed"] <= 10, "200 settles need only a few group commits"
    assert {(await queue.get(id)).status for id in ids} == {SUCCEEDED}
    assert worker.counts.total("jobs_settled_total") == 200
    await worker.close()


async def test_a_lone_settle_is_sent_at_once(pool, queue):
    database = Faulty(pool)
    worker = make_worker(pool, queue=Queue(Database(database)))
    await put_one(queue)
    assert await worker.run_once() == 1
    assert database.ran["succeed"] == 1
    await worker.close()


async def test_a_process_never_runs_more_jobs_than_its_concurrency(pool, queue):
    gauge = Gauge()

    @operation("gauged")
    async def gauged() -> None:
        await gauge.hold()

    async with working(pool, gauged, concurrency=3) as worker:
        ids = await put(queue, *[NewJob("gauged") for _ in range(30)], operations=worker._operations)
        for id in ids:
            await finished(queue, id)
    assert gauge.most == 3


async def test_a_job_that_only_waits_for_its_settle_frees_its_slot_for_one_more(pool, queue):
    database, begun = Faulty(pool), []

    @operation("counted")
    async def counted(n: int) -> None:
        begun.append(n)

    arrived, go = database.hold("succeed")
    jobs = [NewJob("counted", {"n": n}) for n in range(4)]
    async with working(pool, counted, queue=Queue(Database(database)), concurrency=1) as worker:
        ids = await put(queue, *jobs, operations=worker._operations)
        await arrived.wait()
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        while worker._slots_used():
            await asyncio.sleep(0.01)
        assert worker._slots_free() == 0, "no more settles may be waiting"
        assert begun == [0, 1]
        go.set()
        assert {(await finished(queue, id)).status for id in ids} == {SUCCEEDED}
    assert begun == [0, 1, 2, 3]
    assert +worker._runner.over_per_queue == {}


async def test_a_queue_never_runs_more_jobs_than_its_limit(pool, queue):
    gauges = {"gpu": Gauge(), "free": Gauge()}

    @operation("gauged")
    async def gauged(name: str) -> None:
        await gauges[name].hold()

    jobs = [NewJob("gauged", {"name": name}, queue=name, priority=n % 3) for n in range(12) for name in gauges]
    async with working(pool, gauged, concurrency=8, queue_limits={"gpu": 2}) as worker:
        for id in await put(queue, *jobs, operations=worker._operations):
            await finished(queue, id)
    assert gauges["gpu"].most == 2
    assert gauges["free"].most > 2


async def test_plain_functions_run_side_by_side_in_threads(pool, queue):
    both = threading.Barrier(2, timeout=10)

    @operation("meets")
    def meets() -> str:
        both.wait()
        return threading.current_thread().name

    jobs = await run(pool, queue, meets, jobs=[NewJob("meets"), NewJob("meets")])
    assert [job.status for job in jobs] == [SUCCEEDED, SUCCEEDED]
    assert all(job.result.startswith("batchwright-operation") for job in jobs)


async def test_a_job_of_an_unknown_type_is_left_and_logged(pool, queue, caplog):
    id = await put_one(queue)
    (stranger,) = await put(queue, NewJob("other"))
    worker = make_worker(pool, noop)
    assert await worker.run_once() == 1
    assert await worker.run_once() == 0
    assert not await run_job(worker, stranger)
    assert (await queue.get(id)).status is SUCCEEDED
    left = await queue.get(stranger)
    assert (left.status, left.attempts) == (QUEUED, 0)
    with caplog.at_level(logging.WARNING):
        await worker._upkeep._report_unknown_types()
    assert "1 due jobs of type 'other' wait for a worker that knows it" in caplog.text
    await worker.close()


async def test_jobs_of_a_private_queue_wait_for_their_own_process_and_are_not_reported(pool, queue, caplog):
    """Such as those of a `batch run` that was stopped: no worker can do anything for them."""
    await put(queue, NewJob("other", queue=f"{PRIVATE}run-1"))
    worker = make_worker(pool, noop)
    with caplog.at_level(logging.WARNING):
        await worker._upkeep._report_unknown_types()
    assert "wait for a worker" not in caplog.text
    await worker.close()


# Interruption -----------------------------------------------------------------------------------------------------


async def test_an_operation_that_takes_too_long_is_interrupted_and_retried(pool, queue):
    @operation("slow", timeout_seconds=0.05, backoff_seconds=50.0)
    async def slow() -> None:
        await asyncio.Event().wait()

    job = await run_one(pool, queue, slow)
    assert (job.status, job.attempts, job.error["kind"], job.error["code"]) == (QUEUED, 1, "transient", "timeout")
    assert job.error["message"] == "it did not end within its timeout_seconds of 0.05"
    (job,) = await run(pool, queue, slow, jobs=[NewJob("slow", max_attempts=1)])
    assert (job.status, job.error["code"]) == (FAILED, "timeout")


async def test_a_thread_past_its_time_limit_is_a_failed_try_and_its_late_result_and_reports_are_refused(
    pool, queue, monkeypatch, caplog
):
    monkeypatch.setattr(runner_module, "_THREAD_GRACE_SECONDS", 0.0)
    go_on, ended = threading.Event(), threading.Event()

    @operation("hangs", timeout_seconds=0.05, backoff_seconds=50.0)
    def hangs(ctx: Context) -> str:
        go_on.wait(60)
        ctx.emit("too.late")
        ctx.progress(1, 1)
        ended.set()
        return "late"

    worker = make_worker(pool, hangs)
    (id,) = await put(queue, NewJob(hangs))
    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(20):
            assert await worker.run_once() == 1
        job = await queue.get(id)
        assert (job.status, job.attempts, job.error["kind"], job.error["code"]) == (QUEUED, 1, "transient", "timeout")
        assert (worker.jobs, worker._slots_used(), worker.has_abandoned_threads) == (0, 0, True)
        assert "the operation hangs did not end within its time limit of 0.05 s" in caplog.text
        go_on.set()
        assert await asyncio.to_thread(ended.wait, 10)
        async with asyncio.timeout(10):
            while worker.has_abandoned_threads:
                await asyncio.sleep(0.01)
        assert "a thread of the operation hangs has ended after its time limit" in caplog.text
    await worker.close()
    job = await queue.get(id)
    assert (job.status, job.result, job.progress_current) == (QUEUED, None, None)
    assert "too.late" not in [event.event for event in await queue.events(id)]


async def test_a_thread_that_ends_within_the_grace_is_a_failed_try_too_and_leaves_no_thread_behind(pool, queue):
    @operation("obeys", timeout_seconds=0.05, max_attempts=1)
    def obeys(ctx: Context) -> str:
        while not ctx.cancelled:
            time.sleep(0.005)
        return "too late"

    worker = make_worker(pool, obeys)
    (id,) = await put(queue, NewJob(obeys))
    async with asyncio.timeout(20):
        await worker.run_once()
    job = await queue.get(id)
    assert (job.status, job.result, job.error["code"]) == (FAILED, None, "timeout")
    assert not worker.has_abandoned_threads
    await worker.close()


async def test_threads_that_hang_take_no_slot_and_too_many_of_them_break_the_worker(pool, queue, monkeypatch):
    """Jobs hang in threads: others still run, until four threads hang and the worker must be restarted."""
    monkeypatch.setattr(runner_module, "_THREAD_GRACE_SECONDS", 0.0)
    go_on = threading.Event()

    @operation("hangs", timeout_seconds=0.05, max_attempts=1)
    def hangs() -> None:
        go_on.wait(60)

    @operation("works", timeout_seconds=10)
    def works() -> str:
        return "done"

    worker = make_worker(pool, hangs, works, concurrency=4)
    try:
        async with asyncio.timeout(30):
            await put(queue, *[NewJob(hangs) for _ in range(3)])
            assert await worker.run_once() == 3
            ids = await put(queue, *[NewJob(works) for _ in range(4)])
            assert await worker.run_once() == 4
        assert {(await queue.get(id)).status for id in ids} == {SUCCEEDED}
        assert worker.broken is None
        await put(queue, NewJob(hangs))
        async with asyncio.timeout(30):
            with pytest.raises(WorkerBroken, match=r"4 threads did not end within the time limits .*: hangs \(4\)"):
                await worker.run()
    finally:
        go_on.set()


async def test_cancel_interrupts_an_async_operation_and_its_late_result_is_refused(pool, queue):
    entered, interrupted = asyncio.Event(), asyncio.Event()

    @operation("stubborn")
    async def stubborn() -> str:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupted.set()
        return "a late result"

    async with working(pool, stubborn) as worker:
        (id,) = await put(queue, NewJob("stubborn", exclusive_key="k"), operations=worker._operations)
        await entered.wait()
        async with within(INTERRUPT_SECONDS_MAX):
            await queue.cancel([id])
            await interrupted.wait()
        while (await queue.get(id)).lease_until is not None:
            await asyncio.sleep(0.01)
    job = await queue.get(id)
    assert (job.status, job.result) == (CANCELLED, None)
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.cancelled"]


async def test_cancel_is_visible_to_a_thread_and_its_late_result_is_refused(pool, queue):
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()

    @operation("polls")
    def polls(ctx: Context) -> str:
        loop.call_soon_threadsafe(entered.set)
        until = time.monotonic() + 10
        while not ctx.cancelled and time.monotonic() < until:
            time.sleep(0.01)
        return "a late result"

    async with working(pool, polls) as worker:
        (id,) = await put(queue, NewJob("polls"), operations=worker._operations)
        await entered.wait()
        async with within(INTERRUPT_SECONDS_MAX):
            await queue.cancel([id])
            while worker._runner.held:
                await asyncio.sleep(0.01)
    job = await queue.get(id)
    assert (job.status, job.result, job.lease_until) == (CANCELLED, None, None)


async def test_a_deadline_interrupts_a_running_operation(pool, queue):
    entered = asyncio.Event()

    @operation("slow")
    async def slow() -> None:
        entered.set()
        await asyncio.Event().wait()

    async with working(pool, slow) as worker:
        (id,) = await put(queue, NewJob("slow", deadline=timedelta(seconds=0.5)), operations=worker._operations)
        job = await finished(queue, id)
        assert (job.status, job.error["code"]) == (FAILED, "deadline_exceeded")
        while worker._runner.held:
            await asyncio.sleep(0.01)


async def test_stop_lets_jobs_that_check_stopping_succeed(pool, queue):
    entered = asyncio.Event()

    @operation("looks")
    async def looks(ctx: Context) -> str:
        entered.set()
        while not ctx.stopping:
            await asyncio.sleep(0.005)
        return "finished early"

    async with working(pool, looks, stop_grace_seconds=10.0) as worker:
        (id,) = await put(queue, NewJob("looks"), operations=worker._operations)
        await entered.wait()
    assert (await queue.get(id)).result == "finished early"
    assert await Views(queue).workers() == []


async def test_stop_releases_jobs_that_do_not_end_without_using_an_attempt(pool, queue):
    entered = asyncio.Barrier(3)
    let_go = threading.Event()
    loop = asyncio.get_running_loop()

    @operation("async")
    async def endless() -> None:
        await entered.wait()
        await asyncio.Event().wait()

    @operation("thread")
    def deaf() -> None:
        asyncio.run_coroutine_threadsafe(entered.wait(), loop).result()
        let_go.wait(10)

    worker = make_worker(pool, endless, deaf, stop_grace_seconds=0.05)
    running = asyncio.create_task(worker.run())
    await worker.started.wait()
    jobs = [NewJob("async", max_attempts=1), NewJob("thread", max_attempts=1)]
    ids = await put(queue, *jobs, operations=worker._operations)
    await entered.wait()
    worker.stop()
    assert await running is False, "the stop waited for a thread"
    let_go.set()
    for id in ids:
        job = await queue.get(id)
        assert (job.status, job.attempts, job.rescues, job.locked_by) == (QUEUED, 0, 0, None)
        assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.released"]


async def test_an_operation_that_fails_because_it_was_stopped_is_released(pool, queue):
    """Libraries turn a cancellation into errors of their own, but our stop must not count as a failure of the job."""
    entered = asyncio.Event()

    @operation("fragile")
    async def fragile() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise RuntimeError("the connection was closed under me") from error

    async with working(pool, fragile, stop_grace_seconds=0.05) as worker:
        (id,) = await put(queue, NewJob("fragile"), operations=worker._operations)
        await entered.wait()
    job = await queue.get(id)
    assert (job.status, job.attempts) == (QUEUED, 0)


# Leases -----------------------------------------------------------------------------------------------------------


@pytest.mark.direct("it has a connection of its own, which prepares statements")
async def test_an_operation_that_blocks_the_event_loop_keeps_its_lease(pool, queue, database_url):
    """Another session rescues all the time; the lease thread must work without the event loop."""
    ended = threading.Event()
    rescued = []

    def rescue() -> None:
        blocking = Blocking(DATABASE, database_url)
        while not ended.wait(0.1):
            rescued.extend(complete(Queue(Database(blocking), SHORT).rescue()))
        blocking.close()

    @operation("blocks")
    async def blocks() -> str:
        time.sleep(2.5)
        ended.set()
        return "still mine"

    rescuer = threading.Thread(target=rescue)
    rescuer.start()
    async with working(pool, blocks, engine=SHORT) as worker:
        (id,) = await put(queue, NewJob("blocks"), operations=worker._operations)
        job = await finished(queue, id)
    rescuer.join()
    assert (job.result, job.claims, job.rescues) == ("still mine", 1, 0)
    assert rescued == []


async def test_a_job_whose_lease_cannot_be_renewed_is_stopped(pool, queue, monkeypatch):
    entered, stopped = asyncio.Event(), asyncio.Event()

    @operation("zombie")
    async def zombie() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    class Gone(Blocking):
        async def rows(self, sql, params=None):
            if entered.is_set():
                raise DatabaseUnavailable("gone by plan")
            return await super().rows(sql, params)

    monkeypatch.setattr(worker_module, "Blocking", Gone)
    async with working(pool, zombie, engine=SHORT) as worker:
        (id,) = await put(queue, NewJob("zombie"), operations=worker._operations)
        await entered.wait()
        worker.stop()  # so that it is not claimed again
        await asyncio.wait_for(stopped.wait(), 5)
        while worker._runner.held:
            await asyncio.sleep(0.01)
        assert worker.counts.total("leases_lost_total") == 1
    job = await queue.get(id)
    assert (job.status, job.claims) == (RUNNING, 1), "the worker wrote nothing, so a rescue will find the job"


async def test_a_worker_that_lost_its_job_stops_it_and_cannot_settle_it(pool, queue):
    entered, interrupted = asyncio.Event(), asyncio.Event()

    @operation("loses")
    async def loses() -> str:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupted.set()
        return "a zombie's result"

    async with working(pool, loses) as worker:
        (id,) = await put(queue, NewJob("loses"), operations=worker._operations)
        await entered.wait()
        await raw(queue, "UPDATE batchwright.job SET locked_by = 'thief', claims = claims + 1")
        await asyncio.wait_for(interrupted.wait(), 3)
    job = await queue.get(id)
    assert (job.status, job.locked_by, job.claims, job.result) == (RUNNING, "thief", 2, None)


@pytest.mark.parametrize(
    "how",
    [
        "batch",
        "alone",
    ],
)
async def test_the_lease_thread_does_not_release_jobs_whose_claim_is_not_answered_yet(pool, queue, monkeypatch, how):
    looks = threading.Semaphore(0)
    look = Lease.look

    def counted_look(lease):
        look(lease)
        looks.release()

    monkeypatch.setattr(Lease, "look", counted_look)
    database = Faulty(pool)
    answered, go = database.hold_answer("claim")
    id = await put_one(queue)
    worker = make_worker(pool, queue=Queue(Database(database), SHORT))
    if how == "alone":
        await raw(queue, "UPDATE batchwright.job SET rescues = 2")
        running = asyncio.create_task(worker.run_alone(id, lambda _: None))
    else:
        running = asyncio.create_task(worker.run())
    await answered.wait()
    for _ in range(3):
        await asyncio.to_thread(looks.acquire)
    names = await event_names(queue, id)
    go.set()
    if how == "batch":
        await finished(queue, id)
        worker.stop()
    await running
    assert names == ["job.enqueued", "job.started"]
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.succeeded"]


@pytest.mark.direct("it has a connection of its own, which prepares statements")
async def test_jobs_survive_a_database_that_closes_all_connections_repeatedly(pool, queue, database_url):
    await raw(queue, "CREATE TABLE effect (n int)")

    @operation("writes")
    async def writes(n: int) -> Done:
        async def write(connection) -> None:
            await connection.execute("INSERT INTO effect VALUES (%s)", [n])

        await asyncio.sleep(0.01)
        return Done(n, write=write if n % 2 else None)

    ids = await put(queue, *(NewJob("writes", {"n": n}) for n in range(60)), operations=Registry([writes]))
    throw_out = """
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
    """
    async with (
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as admin,
        working(pool, writes, engine=EngineSettings(lease_seconds=3.0), concurrency=5),
    ):
        for _ in range(15):
            await admin.execute(throw_out)
            await asyncio.sleep(0.1)
        counts = {}
        while counts.get("SUCCEEDED") != len(ids):
            cursor = await admin.execute("SELECT status::text, count(*) FROM batchwright.job GROUP BY 1")
            counts = dict(await cursor.fetchall())
            assert "FAILED" not in counts
            await asyncio.sleep(0.05)
        cursor = await admin.execute("SELECT n FROM effect ORDER BY n")
        assert [n for (n,) in await cursor.fetchall()] == list(range(1, 60, 2)), "each write exactly once"
        cursor = await admin.execute(
            "SELECT count(*) FROM batchwright.job_event WHERE event = 'job.succeeded' GROUP BY job_id "
            "HAVING count(*) > 1"
        )
        assert await cursor.fetchall() == []
        await admin.execute(throw_out)
    assert len(ids) == 60


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_worker_whose_clock_is_wrong_by_an_hour_changes_nothing(pool, queue, monkeypatch, hours):
    real_time, real_time_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real_time() + 3600 * hours)
    monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + 3600 * hours * 10**9)
    monkeypatch.setattr(jobs, "_last", 0)  # ids only grow, so ids of later tests would be an hour ahead
    entered, go = asyncio.Event(), asyncio.Event()

    @operation("waits")
    async def waits() -> None:
        entered.set()
        await go.wait()

    async with working(pool, waits, engine=SHORT) as worker:
        now, later = await put(queue, NewJob("waits"), NewJob("waits", delay_seconds=30), operations=worker._operations)
        await entered.wait()
        for _ in range(3):
            assert await queue.rescue() == [], "by the database's clock, its lease is still valid"
            assert await queue.expire() == 0
        job = await queue.get(now)
        real_now = datetime.fromtimestamp(real_time(), UTC)
        for moment in (job.created_at, job.locked_at, job.lease_until):
            assert abs(moment - real_now) < timedelta(seconds=30)
        go.set()
        assert (await finished(queue, now)).rescues == 0
        assert (await queue.get(later)).status is QUEUED


# Results ----------------------------------------------------------------------------------------------------------


class Model(pydantic.BaseModel):
    n: int


RESULTS = {
    "large": ("x" * 1_100_000, "result_too_large", "the limit is 1048576"),
    "object": (object(), "result_not_storable", "object"),
    "nul": ({"text": "a\x00b"}, "result_not_storable", ""),
    "surrogate": ("\ud800", "result_not_storable", ""),
    "wide": (2**70, "result_not_storable", ""),
    "keys": ({(1, 2): 3}, "result_not_storable", ""),
    "progress": (Done(1, progress=(2**70, 2**70)), "result_not_storable", ""),
}


async def test_a_result_that_cannot_be_stored_fails_only_its_own_job(pool, queue):
    barrier = asyncio.Barrier(len(RESULTS) + 4)

    @operation("returns")
    async def returns(name: str | None = None) -> object:
        await barrier.wait()
        return RESULTS[name][0] if name else "good"

    new = [NewJob("returns", {"name": name}) for name in RESULTS]
    for place in (0, 3, 5, 9):
        new.insert(place, NewJob("returns"))
    jobs = await run(pool, queue, returns, jobs=new)
    for job in jobs:
        name = job.payload["name"]
        if name is None:
            assert (job.status, job.result) == (SUCCEEDED, "good")
        else:
            assert (job.status, job.error["code"]) == (FAILED, RESULTS[name][1]), name
            assert RESULTS[name][2] in job.error["message"]


async def test_an_error_that_cannot_be_stored_fails_only_its_own_job(pool, queue):
    barrier = asyncio.Barrier(4)
    codes = {"object": object(), "surrogate": "\ud800", "nul": "a\x00b"}

    @operation("raises")
    async def raises(name: str | None = None) -> str:
        await barrier.wait()
        if name:
            raise Fatal(f"\ud800 \x00 {name}", code=codes[name])
        return "good"

    jobs = await run(pool, queue, raises, jobs=[NewJob("raises", {"name": name}) for name in (*codes, None)])
    assert [job.status for job in jobs] == [FAILED, FAILED, FAILED, SUCCEEDED]
    assert {job.error["code"] for job in jobs[:3]} == {"error_not_storable"}


NONSENSE = [
    Done(1, then=["noop"]),
    Done(1, then=7),
    Done(1, progress="half"),
    Done(1, write="nothing to call"),
    Snooze("soon"),
    Snooze(-1),
    Snooze(float("nan")),
    Snooze(float("inf")),
    Snooze(True),
    Snooze(1, progress=5),
    Wait("noop"),
    Wait([noop]),
    Wait([], on_join="later"),
    Wait([], allow_failures=-1),
    Wait([], allow_failures="all"),
    Wait(None),
]


def test_an_operation_that_returns_an_invalid_outcome_fails_and_says_why():
    for outcome in NONSENSE:
        with pytest.raises(Fatal, match="the operation returned an invalid outcome") as caught:
            check_outcome(outcome)
        assert caught.value.code == "invalid_outcome"


async def test_an_invalid_outcome_fails_its_job(pool, queue):
    @operation("nonsense")
    async def nonsense() -> Snooze:
        return Snooze("soon")

    job = await run_one(pool, queue, nonsense)
    assert (job.status, job.error["code"], job.attempts) == (FAILED, "invalid_outcome", 1)


async def test_models_and_dataclasses_are_results(pool, queue):
    @operation("models")
    async def models() -> dict[str, object]:
        return {"model": Model(n=3), "day": datetime(2026, 1, 2, tzinfo=UTC)}

    assert (await run_one(pool, queue, models)).result["model"] == {"n": 3}


async def test_a_waiting_job_may_keep_a_model_as_its_result(pool, queue):
    @operation("keeps")
    async def keeps() -> Wait:
        return Wait([], result=Model(n=3))

    job = await run_one(pool, queue, keeps)
    assert (job.status, job.result) == (SUCCEEDED, {"n": 3})


async def test_chained_jobs_or_children_of_an_unknown_type_fail_the_job_and_nothing_is_written(pool, queue):
    wrote = []

    @operation("goes_on")
    async def goes_on(how: str) -> object:
        async def write(connection) -> None:
            wrote.append(how)

        unknown = [NewJob("goes_on", {"how": "none"}), NewJob("nobody_knows_me")]
        return Done(1, then=unknown, write=write) if how == "then" else Wait(unknown)

    jobs = await run(pool, queue, goes_on, jobs=[NewJob("goes_on", {"how": how}) for how in ("then", "wait")])
    for job in jobs:
        assert (job.status, job.error["kind"], job.error["type"]) == (FAILED, "schema_invalid", "UnknownOperation")
        assert "no worker knows the operation 'nobody_knows_me'" in job.error["message"]
    assert wrote == []
    assert len(await listed(queue)) == 2


# write= -----------------------------------------------------------------------------------------------------------


WRITE_ERRORS = [
    (ValueError("no"), FAILED, "fatal"),
    (Transient("busy"), QUEUED, "transient"),
    (RetryLater("busy"), QUEUED, None),
    (SchemaInvalid("odd"), FAILED, "schema_invalid"),
    (SystemExit(3), FAILED, "fatal"),
    (psycopg.errors.UniqueViolation("taken"), FAILED, "fatal"),
]


async def write_and_raise(pool, queue, errors):
    """Run jobs whose writes insert a row and raise these errors; return the jobs."""
    await raw(queue, "CREATE TABLE effect (n int)")

    @operation("writes", backoff_seconds=50.0)
    async def writes(n: int) -> Done:
        async def write(connection) -> None:
            await connection.execute("INSERT INTO effect VALUES (1)")
            raise errors[n]

        return Done(1, then=[NewJob("writes", {"n": n})], write=write)

    async with asyncio.timeout(3):
        jobs = await run(pool, queue, writes, jobs=[NewJob("writes", {"n": n}) for n in range(len(errors))])
    assert await raw(queue, "SELECT count(*) FROM effect") == [(0,)]
    assert len(await listed(queue)) == len(errors)
    return jobs


async def test_a_write_that_raises_is_rolled_back_and_is_the_operations_own_error(pool, queue):
    jobs = await write_and_raise(pool, queue, [error for error, _, _ in WRITE_ERRORS])
    for job, (error, status, kind) in zip(jobs, WRITE_ERRORS, strict=True):
        assert (job.status, job.error and job.error["kind"]) == (status, kind), repr(error)


async def test_a_write_that_loses_a_connection_of_its_own_is_the_operations_own_error(pool, queue):
    """A write may use another database; if that one is unavailable, we must not repeat our commit for ever."""
    (job,) = await write_and_raise(pool, queue, [psycopg.OperationalError("the other database is away")])
    assert (job.status, job.error["kind"]) == (QUEUED, "transient")


async def test_a_write_that_swallows_a_failed_statement_does_not_succeed(pool, queue):
    @operation("swallows")
    async def swallows() -> Done:
        async def write(connection) -> None:
            with contextlib.suppress(psycopg.Error):
                await connection.execute("SELECT nonsense")

        return Done(1, write=write)

    job = await run_one(pool, queue, swallows)
    assert (job.status, job.error["kind"]) == (FAILED, "fatal")
    assert "nothing can be committed" in job.error["message"]


async def test_a_write_that_takes_too_long_is_rolled_back_and_retried(pool, queue, monkeypatch):
    monkeypatch.setattr(runner_module, "_WRITE_SECONDS_MAX", 0.05)

    @operation("slow_write")
    async def slow_write() -> Done:
        async def write(connection) -> None:
            await connection.execute("SELECT pg_sleep(30)")

        return Done(1, write=write)

    job = await run_one(pool, queue, slow_write)
    assert (job.status, job.error["kind"], job.error["code"]) == (QUEUED, "transient", "timeout")


# Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_no_exception_of_an_operation_kills_the_worker(pool, queue, kind):
    errors = [SystemExit(1), KeyboardInterrupt(), BaseException("rare"), asyncio.CancelledError()]

    def raise_it(index: int) -> None:
        raise errors[index]

    async def raise_it_async(index: int) -> None:
        raise errors[index]

    raises = operation("raises")(raise_it_async if kind == "async" else raise_it)
    new = [*(NewJob("raises", {"index": n}) for n in range(len(errors))), NewJob("noop")]
    async with asyncio.timeout(20):
        jobs = await run(pool, queue, raises, noop, jobs=new)
    assert [job.status for job in jobs] == [FAILED] * len(errors) + [SUCCEEDED]


async def test_a_stop_iteration_of_an_async_operation_fails_its_job(pool, queue):
    @operation("empty")
    async def empty() -> None:
        next(iter(()))

    job = await run_one(pool, queue, empty)
    assert (job.status, job.error["kind"]) == (FAILED, "fatal")


async def test_a_stop_iteration_of_a_plain_function_fails_its_job(pool, queue):
    @operation("empty")
    def empty() -> None:
        next(iter(()))

    async with asyncio.timeout(2):
        job = await run_one(pool, queue, empty)
    assert (job.status, job.error["kind"]) == (FAILED, "fatal")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("even my name is an error")


ODD_ERRORS = {
    "unspeakable": Unspeakable(),
    "retry_after_text": RateLimited("slow down", retry_after="120"),
    "retry_after_date": RateLimited("slow down", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"),
    "delay_text": RetryLater("busy", delay_seconds="soon"),
    "delay_infinite": RetryLater("busy", delay_seconds=float("inf")),
    "reason_error": RetryLater(ValueError("busy"), delay_seconds=5),
}


async def test_an_error_with_odd_parts_is_still_settled(pool, queue):
    """The job must not get stuck in the worker, and must use an attempt, or it would fail in the same way for ever."""

    @operation("odd")
    async def odd(name: str) -> None:
        raise ODD_ERRORS[name]

    async with asyncio.timeout(10):
        jobs = await run(pool, queue, odd, jobs=[NewJob("odd", {"name": name}) for name in ODD_ERRORS])
    for job in jobs:
        name = job.payload["name"]
        assert job.status in (QUEUED, FAILED), name
        assert job.status is FAILED or job.run_after > job.created_at + timedelta(seconds=1), name


async def test_rate_limited_and_retry_later_give_the_attempt_back(pool, queue):
    @operation("limited", max_attempts=1)
    async def limited(how: str) -> None:
        raise RateLimited("slow down", retry_after=40) if how == "limited" else RetryLater("busy", delay_seconds=40)

    jobs = await run(pool, queue, limited, jobs=[NewJob("limited", {"how": how}) for how in ("limited", "later")])
    for job, kind in zip(jobs, ["rate_limited", "retry_later"], strict=True):
        assert (job.status, job.attempts) == (QUEUED, 0)
        assert timedelta(seconds=39) < job.run_after - job.created_at < timedelta(seconds=60)
        assert (await queue.events(job.id))[-1].error_kind == kind


async def test_transient_errors_use_up_the_attempts(pool, queue):
    @operation("flaky", max_attempts=2, backoff_seconds=0.0)
    async def flaky() -> None:
        raise Transient("not now", code="busy")

    (id,) = await put(queue, NewJob("flaky"), operations=Registry([flaky]))
    worker = make_worker(pool, flaky)
    assert [await worker.run_once() for _ in range(3)] == [1, 1, 0]
    job = await queue.get(id)
    assert (job.status, job.attempts, job.error["code"]) == (FAILED, 2, "busy")
    assert await event_names(queue, id) == [
        "job.enqueued", "job.started", "job.retried", "job.started", "job.failed",
    ]  # fmt: skip
    await worker.close()


async def test_a_job_resumed_after_its_deadline_can_snooze(pool, queue):
    @operation("closes")
    async def closes(ctx: Context) -> object:
        return Snooze(60) if ctx.deadline_passed else Wait([NewJob("noop", delay_seconds=60)], on_join="resume")

    worker = make_worker(pool, closes, noop)
    (id,) = await put(queue, NewJob("closes", deadline=timedelta(hours=1)), operations=worker._operations)
    assert await worker.run_once() == 1
    await raw(queue, "UPDATE batchwright.job SET deadline = now()")
    await queue.expire()
    assert await worker.run_once() == 1
    assert await worker.run_once() == 0
    assert (await queue.get(id)).status is QUEUED
    await worker.close()


# Processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def child(database_url):
    """How a worker of these operations starts its children."""
    async with AsyncBatchwright(database_url=database_url, operations=deadly.OPERATIONS) as batchwright:
        yield batchwright._child_program()


async def test_cpu_operations_run_in_other_processes(pool, queue, child):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child)
    ids = await put(queue, *[NewJob("cpu.pid") for _ in range(4)], operations=worker._operations)
    while await worker.run_once():
        pass
    pids = [(await queue.get(id)).result for id in ids]
    assert os.getpid() not in pids
    assert all(isinstance(one, int) for one in pids)
    await worker.close()


async def test_no_more_processes_run_at_once_than_allowed(pool, queue, child, tmp_path):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child, processes_max=1, concurrency=5)
    new = [NewJob("cpu.counts", {"folder": str(tmp_path)}) for _ in range(5)]
    ids = await put(queue, *new, operations=worker._operations)
    while await worker.run_once():
        pass
    assert [(await queue.get(id)).result for id in ids] == [1] * 5
    await worker.close()


async def test_an_exception_in_a_process_is_the_operations_error_and_not_a_death(pool, queue, child):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child, processes_max=1)
    names = {"ConnectionError": (QUEUED, "transient"), "EOFError": (FAILED, "fatal"), "ValueError": (FAILED, "fatal")}
    ids = await put(queue, *(NewJob("cpu.raises", {"name": n}) for n in names), operations=worker._operations)
    async with asyncio.timeout(30):
        for id in ids:
            assert await run_job(worker, id)
    jobs = [await queue.get(id) for id in ids]
    assert [(job.status, job.error["kind"]) for job in jobs] == list(names.values())
    assert [job.rescues for job in jobs] == [0, 0, 0]
    await worker.close()


async def test_every_kind_of_operation_can_read_its_children(pool, queue, child):
    def children() -> Wait:
        return Wait([NewJob("innocent", {"n": n}) for n in (1, 2, 3)], on_join="resume")

    @operation("async.sums")
    async def sums(ctx: Context) -> object:
        return children() if ctx.joined is None else sum([one.result async for one in ctx.joined])

    @operation("thread.sums")
    def thread_sums(ctx: Context) -> object:
        return children() if ctx.joined is None else sum(one.result for one in ctx.joined)

    worker = make_worker(pool, *deadly.OPERATIONS, sums, thread_sums, child=child)
    names = ("async.sums", "thread.sums", "cpu.sums")
    ids = await put(queue, *(NewJob(name) for name in names), operations=worker._operations)
    while await worker.run_once():
        pass
    assert [(await queue.get(id)).result for id in ids] == [6, 6, 6]
    await worker.close()


async def test_a_process_that_dies_counts_as_a_rescue_and_uses_no_attempt(pool, queue, child):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child)
    (id,) = await put(queue, NewJob("cpu.dies"), operations=worker._operations)
    assert await run_job(worker, id)
    job = await queue.get(id)
    assert (job.status, job.attempts, job.rescues) == (QUEUED, 0, 1)
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.rescued"]
    (single,) = await put(queue, NewJob("cpu.dies", max_attempts=1), operations=worker._operations)
    assert await run_job(worker, single)
    assert (await queue.get(single)).error["code"] == "abandoned"
    await worker.close()


async def test_the_job_of_a_dead_process_is_rescued_although_another_lease_has_expired_too(pool, queue, child):
    await put(queue, NewJob("innocent", {"n": 1}), operations=Registry(deadly.OPERATIONS))
    await take(queue, worker="long gone", types=["innocent"])
    await raw(queue, "UPDATE batchwright.job SET lease_until = now() - interval '1 second'")
    worker = make_worker(pool, *deadly.OPERATIONS, child=child, engine=SHORT)
    (id,) = await put(queue, NewJob("cpu.dies"), operations=worker._operations)
    assert await run_job(worker, id)
    job = await queue.get(id)
    assert (job.status, job.rescues) == (QUEUED, 1)
    await worker.close()


async def test_a_process_is_killed_when_its_time_is_over(pool, queue, child, tmp_path):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child)
    await run_job(worker, (await put(queue, NewJob("cpu.pid"), operations=worker._operations))[0])  # a warm child
    file = tmp_path / "pid"
    (id,) = await put(queue, NewJob("cpu.times_out", {"file": str(file)}), operations=worker._operations)
    assert await run_job(worker, id)
    job = await queue.get(id)
    assert (job.status, job.error["code"], job.rescues) == (FAILED, "timeout", 0)
    await gone(int(file.read_text()))
    await worker.close()


async def test_a_process_is_killed_on_cancel(pool, queue, child, tmp_path):
    file = tmp_path / "pid"
    async with working(pool, *deadly.OPERATIONS, child=child) as worker:
        (id,) = await put(queue, NewJob("cpu.hangs", {"file": str(file)}), operations=worker._operations)
        pid = int(await there(file))
        async with within(INTERRUPT_SECONDS_MAX):
            await queue.cancel([id])
            await gone(pid)
        while worker._runner.held:
            await asyncio.sleep(0.01)
    job = await queue.get(id)
    assert (job.status, job.rescues, job.lease_until) == (CANCELLED, 0, None)


async def test_an_interrupt_while_the_process_starts_is_not_lost(pool, queue, child, tmp_path):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child)
    file = tmp_path / "pid"
    (id,) = await put(queue, NewJob("cpu.hangs", {"file": str(file)}), operations=worker._operations)
    spawn, spawning = worker._processes._spawn, asyncio.Event()

    async def slow_spawn(*arguments):
        started = await spawn(*arguments)
        spawning.set()
        while not any(running.reason for running in worker._runner.held.values()):
            await asyncio.sleep(0.01)
        return started

    worker._processes._spawn = slow_spawn
    running = asyncio.create_task(run_job(worker, id))
    await spawning.wait()
    await queue.cancel([id])
    for held in worker._runner.held.values():
        worker._runner.interrupt(held, "cancelled")
    try:
        async with asyncio.timeout(10):
            await running
    finally:
        await worker.close()
    assert not file.exists()
    assert (await queue.get(id)).lease_until is None


async def test_a_job_that_waits_for_a_free_process_can_be_interrupted(pool, queue, child, tmp_path):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child, processes_max=1, concurrency=2)
    files = [tmp_path / "first", tmp_path / "second"]
    new = [NewJob("cpu.hangs", {"file": str(file)}) for file in files]
    ids = await put(queue, *new, operations=worker._operations)
    running = [asyncio.create_task(run_job(worker, id)) for id in ids]
    while not any(file.exists() for file in files) or len(worker._runner.held) < 2:
        await asyncio.sleep(0.01)
    await queue.cancel(ids)
    for held in reversed(list(worker._runner.held.values())):
        worker._runner.interrupt(held, "cancelled")
    try:
        async with asyncio.timeout(10):
            await asyncio.gather(*running)
    finally:
        await worker.close()
    assert sum(file.exists() for file in files) == 1, "the second job must never begin"
    assert [(await queue.get(id)).lease_until for id in ids] == [None, None]


async def test_events_and_progress_of_a_process_are_stored(pool, queue, child):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child)
    (id,) = await put(queue, NewJob("cpu.emits", {"bad": False}), operations=worker._operations)
    assert await run_job(worker, id)
    job = await queue.get(id)
    assert (job.result, job.message, job.progress_current, job.progress_total) == ("good", "it says", 1, 2)
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "fine", "job.succeeded"]
    await worker.close()


async def test_the_answer_of_one_job_is_never_used_for_the_next_one(pool, queue, child):
    worker = make_worker(pool, *deadly.OPERATIONS, child=child, processes_max=1)
    new = [NewJob("cpu.emits", {"bad": bad}) for bad in (True, False)]
    bad, good = await put(queue, *new, operations=worker._operations)
    try:
        assert await run_job(worker, bad)
        assert await run_job(worker, good)
        assert (await queue.get(good)).result == "good"
    finally:
        await worker.close()


async def test_slots_can_be_counted_by_another_thread_while_a_job_of_a_new_queue_starts(pool):
    """The lease thread counts them for its heartbeat."""

    class Demand:
        operations = ()
        broken = None

        def listen(self, on_demand):
            """Do not wake the worker."""

        def serves(self, queue):
            worker._runner.per_queue[f"new, beside {queue}"] += 1
            return False

    worker = Worker(pool, Registry([noop]), parts=[OneDuty(demand=Demand())])
    worker._runner.per_queue.update(a=1, b=2)
    assert worker._slots_used() == 3
    await worker.close()


async def gone(pid: int) -> None:
    """Wait until the process has ended; bounded by the test's timeout."""
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        await asyncio.sleep(0.01)


# Whole processes --------------------------------------------------------------------------------------------------


async def start_worker(database_url, log, lease_seconds=1.0):
    command = (sys.executable, "-m", "tests.engine.worker_process", database_url, str(lease_seconds))
    with log.open("ab") as stderr:
        return await asyncio.create_subprocess_exec(*command, stderr=stderr)


async def history(queue, id) -> str:
    return "\n".join(f"{one.ts} {one.event} {one.claim} {one.worker} {one.message}" for one in await queue.events(id))


@pytest.mark.thorough
async def test_a_job_that_kills_its_process_every_time_is_parked_and_its_neighbours_are_not(
    queue, database_url, tmp_path
):
    operations = Registry(deadly.OPERATIONS)
    new = [NewJob("innocent", {"n": n}) for n in range(30)]
    new.insert(3, NewJob("poison"))
    ids = await put(queue, *new, operations=operations)
    poison = ids.pop(3)
    deaths = 0
    log = tmp_path / "workers.log"
    process = await start_worker(database_url, log)
    try:
        async with asyncio.timeout(90):
            while (await queue.get(poison)).finished_at is None:
                if process.returncode is not None:
                    deaths += 1
                    process = await start_worker(database_url, log)
                await asyncio.sleep(0.02)
            innocents = [await finished(queue, id) for id in ids]
    except TimeoutError:
        pytest.fail(f"after {deaths} deaths:\n{await history(queue, poison)}\n{log.read_text()}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()
    assert deaths == 2, "the third time it runs alone, and no worker dies"
    parked = await queue.get(poison)
    assert (parked.status, parked.error["code"]) == (FAILED, "poison")
    assert [job.result for job in innocents] == list(range(30))
    assert {job.attempts for job in innocents} == {1}


async def test_sigterm_releases_running_jobs_at_once(queue, database_url, tmp_path):
    file = tmp_path / "started"
    process = await start_worker(database_url, tmp_path / "worker.log", 30.0)
    try:
        (id,) = await put(queue, NewJob("endless", {"file": str(file)}), operations=Registry(deadly.OPERATIONS))
        while not file.exists():
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    job = await queue.get(id)
    assert (job.status, job.attempts, job.rescues) == (QUEUED, 0, 0)
    assert await Views(queue).workers() == []


@operation("plan_two")
async def plan_two(ctx: Context) -> Any:
    if ctx.joined is None:
        return Wait([NewJob(noop, {"n": n}) for n in (1, 2)], on_join="resume")
    return ctx.joined.succeeded


@pytest.mark.direct("it waits for the doorbell")
async def test_a_parent_is_resumed_at_once_when_its_last_child_ends_and_not_at_the_next_poll(queue, pool):
    (id,) = await put(queue, NewJob(plan_two), operations=Registry([plan_two, noop]))
    async with working(pool, plan_two, noop, poll_seconds_min=10.0, poll_seconds_max=10.0):
        job = await finished(queue, id)
        assert job.result == 2
        assert (job.finished_at - job.started_at).total_seconds() < 5


async def test_a_claim_number_that_a_failover_assigned_twice_to_one_worker_costs_no_slot(pool, queue):
    """The worker still runs the job of the lost claim when it gets the same number again."""
    begun, ended = [], asyncio.Event()

    @operation("linger")
    async def linger(ctx: Context) -> int:
        begun.append(ctx)
        if len(begun) == 1:
            await asyncio.Event().wait()
        await ended.wait()
        return 2

    (id,) = await put(queue, NewJob(linger), operations=Registry([linger]))
    async with working(pool, linger, queue=queue) as worker:
        async with asyncio.timeout(20):
            while not begun:
                await asyncio.sleep(0.01)
            worker.lease.look = lambda: None  # otherwise it would hear of the loss a moment later
            forget = "status = 'QUEUED', claims = 0, attempts = 0, locked_by = NULL, lease_until = NULL"
            await raw(queue, f"UPDATE batchwright.job SET {forget}")
            while len(begun) < 2:
                await asyncio.sleep(0.01)
        assert begun[0].cancelled
        assert len(worker._runner.held) == 1
        ended.set()
        assert (await finished(queue, id)).result == 2
        assert +worker._runner.per_queue == {}
