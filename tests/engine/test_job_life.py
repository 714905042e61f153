"""The life of a job: states, commits, parents and children, deferral, events, progress, cancellation."""

import asyncio
import signal
import sys
import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from batchwright import Context, Done, Fatal, JobStatus, NewJob, RetryLater, Snooze, Wait, operation
from batchwright.errors import Fenced, InvalidInput
from batchwright.operations.registry import Registry
from tests.engine import deadly
from tests.engine.steps import claim_one, end, hand_over, snapshot, status
from tests.support import (
    INTERRUPT_SECONDS_MAX,
    event_names,
    fail,
    finished,
    make_worker,
    put,
    put_one,
    raw,
    run_job,
    succeed,
    take,
    take_one,
    within,
    working,
)

OPEN_TRANSACTIONS = """
    SELECT pid, state, query FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
        AND backend_type = 'client backend'
"""


async def run(queue, pool, *functions, **options):
    """Enqueue one job of the first function, run it once, and return it."""
    (id,) = await put(queue, NewJob(functions[0], **options), operations=Registry(functions))
    worker = make_worker(pool, *functions)
    assert await run_job(worker, id)
    await worker.close()
    return await queue.get(id)


@asynccontextmanager
async def looking(pool):
    """A connection that is separate from the engine's."""
    async with await psycopg.AsyncConnection.connect(pool.url, autocommit=True) as connection:
        yield connection


# States


async def test_a_job_goes_from_queued_through_running_to_succeeded(queue, pool):
    seen = []

    @operation("watched")
    async def watched(ctx: Context) -> str:
        seen.append((await queue.get(ctx.job_id)).status)
        return "fine"

    (id,) = await put(queue, NewJob(watched), operations=Registry([watched]))
    seen.append(await status(queue, id))
    worker = make_worker(pool, watched)
    await run_job(worker, id)
    await worker.close()
    seen.append(await status(queue, id))
    assert seen == [JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.SUCCEEDED]
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.succeeded"]


async def test_an_exception_fails_the_job_and_its_event_names_class_and_message(queue, pool):
    @operation("broken")
    async def broken() -> None:
        raise KeyError("no such protein")

    job = await run(queue, pool, broken)
    assert job.status is JobStatus.FAILED
    assert (job.error["type"], job.error["kind"]) == ("KeyError", "fatal")
    assert "no such protein" in job.error["message"]
    event = (await queue.events(job.id))[-1]
    assert (event.event, event.level, event.fields["type"], event.error_kind) == (
        "job.failed",
        "error",
        "KeyError",
        "fatal",
    )
    assert "no such protein" in event.message


async def test_a_queued_job_can_be_cancelled_before_execution(queue):
    id = await put_one(queue)
    assert await queue.cancel([id]) == 1
    job = await queue.get(id)
    assert (job.status, job.started_at) == (JobStatus.CANCELLED, None)
    assert await take(queue) == []


# The two sessions


async def test_running_and_its_event_are_visible_to_others_before_the_operation_starts(queue, pool):
    seen = []

    @operation("visible")
    async def visible(ctx: Context) -> None:
        async with looking(pool) as connection:
            cursor = await connection.execute(
                "SELECT job.status::text, locked_by, event FROM batchwright.job JOIN batchwright.job_event "
                "ON job_id = job.id WHERE job.id = %s ORDER BY job_event.id DESC LIMIT 1",
                [ctx.job_id],
            )
            seen.append(await cursor.fetchone())

    job = await run(queue, pool, visible)
    assert job.status is JobStatus.SUCCEEDED
    ((running, worker, event),) = seen
    assert (running, event) == ("RUNNING", "job.started")
    assert worker


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_no_transaction_is_open_while_an_operation_runs(queue, pool, kind):
    open_transactions = []

    def look() -> None:
        with psycopg.connect(pool.url, autocommit=True) as connection:
            open_transactions.append(connection.execute(OPEN_TRANSACTIONS).fetchall())

    if kind == "async":

        @operation("quiet")
        async def quiet() -> None:
            await asyncio.to_thread(look)

    else:

        @operation("quiet")
        def quiet() -> None:
            look()

    assert (await run(queue, pool, quiet)).status is JobStatus.SUCCEEDED
    assert open_transactions == [[]]


async def test_the_check_for_open_transactions_finds_an_open_one(queue, pool):
    async with looking(pool) as connection, pool.transaction() as other:
        await other.rows("SELECT 1")
        assert len(await (await connection.execute(OPEN_TRANSACTIONS)).fetchall()) == 1


async def test_after_a_crash_in_the_middle_the_job_is_running_and_has_no_result(queue, database_url, tmp_path):
    """The dead process had stored nothing, and no other process has touched the job yet."""
    file, operations = tmp_path / "begun", Registry(deadly.OPERATIONS)
    (id,) = await put(queue, NewJob("endless", {"file": str(file)}), operations=operations)
    command = (sys.executable, "-m", "tests.engine.worker_process", database_url, "60")
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(30):
            while not file.exists():
                await asyncio.sleep(0.01)
    finally:
        process.kill()
        code = await process.wait()
    assert code == -signal.SIGKILL
    job = await queue.get(id)
    assert (job.status, job.claims, job.result, job.finished_at) == (JobStatus.RUNNING, 1, None, None)
    assert await event_names(queue, id) == ["job.enqueued", "job.started"]


async def test_the_result_and_its_event_are_one_commit(queue, pool):
    """`write` runs inside the settling transaction, of which another connection sees nothing yet."""
    seen = []

    async def write(connection):
        async with looking(pool) as outside:
            sql = "SELECT status::text, (SELECT count(*) FROM batchwright.job_event) FROM batchwright.job"
            inside = await (await connection.execute(sql)).fetchone()
            seen.append((inside, await (await outside.execute(sql)).fetchone()))

    @operation("writes")
    async def writes() -> Done:
        return Done("kept", write=write)

    await run(queue, pool, writes)
    assert seen == [(("SUCCEEDED", 3), ("RUNNING", 2))]


# Parents and children, deferral


async def test_a_deferred_parent_stays_running_until_its_last_child_has_ended(queue):
    parent = await put_one(queue)
    children = await hand_over(queue, await take_one(queue), 3, result={"batches": 3})
    assert {(await queue.get(child)).parent_job_id for child in children} == {parent}
    for done, child in enumerate(children):
        row = await queue.get(parent)
        assert (row.status, row.progress_current, row.progress_total) == (JobStatus.RUNNING, done, 3)
        assert row.is_waiting
        assert row.finished_at is None
        assert await succeed(queue, await claim_one(queue, child))
    row = await queue.get(parent)
    assert (row.status, row.result, row.progress_current) == (JobStatus.SUCCEEDED, {"batches": 3}, 3)
    assert row.finished_at is not None
    assert await event_names(queue, parent) == ["job.enqueued", "job.started", "job.waited", "job.joined"]


async def test_an_operation_defers_by_returning_wait_and_is_resumed_with_what_its_children_returned(queue, pool):
    @operation("square")
    async def square(n: int) -> int:
        return n * n

    @operation("coordinate")
    async def coordinate(ctx: Context, upto: int) -> Wait | int:
        if ctx.joined is None:
            return Wait([NewJob(square, {"n": n}) for n in range(upto)], on_join="resume")
        return sum([child.result async for child in ctx.joined])

    (id,) = await put(queue, NewJob(coordinate, {"upto": 5}), operations=Registry([square, coordinate]))
    worker = make_worker(pool, square, coordinate)
    await run_job(worker, id)
    assert (await queue.get(id)).is_waiting
    assert (await queue.get(id)).result is None
    while await worker.run_once():
        pass
    await worker.close()
    job = await queue.get(id)
    assert (job.status, job.result) == (JobStatus.SUCCEEDED, 0 + 1 + 4 + 9 + 16)


async def test_waiting_uses_no_attempt(queue):
    parent = await put_one(queue, max_attempts=1)
    await hand_over(queue, await take_one(queue), 1, on_join="resume")
    row = await queue.get(parent)
    assert (row.attempts, row.locked_by, row.lease_until) == (0, None, None)
    await succeed(queue, await take_one(queue))
    assert (await take_one(queue)).id == parent, "an operation with one attempt can still be resumed"


# RetryLater


async def test_retry_later_puts_the_job_back_and_writes_reason_and_delay(queue, pool):
    @operation("embed")
    async def embed() -> None:
        raise RetryLater("GPU busy", delay_seconds=60)

    job = await run(queue, pool, embed)
    assert (job.status, job.attempts, job.message, job.error) == (JobStatus.QUEUED, 0, "GPU busy", None)
    event = (await queue.events(job.id))[-1]
    assert (event.event, event.message, event.fields) == ("job.retry_later", "GPU busy", {"delay_seconds": 60})
    assert event.status is JobStatus.QUEUED
    assert job.run_after == event.ts + timedelta(seconds=60)


async def test_a_delayed_job_runs_after_its_delay_and_not_before(queue, pool, clock):
    tries = []

    @operation("embed")
    async def embed() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise RetryLater("GPU busy", delay_seconds=60)
        return "embedded"

    (id,) = await put(queue, NewJob(embed, max_attempts=1), operations=Registry([embed]))
    worker = make_worker(pool, embed, queue=queue)
    await clock.advance(queue, 0)
    for expected in (1, 2, 3):
        assert await worker.run_once() == 1
        assert len(tries) == expected
        await clock.advance(queue, 59)
        assert await worker.run_once() == 0
        await clock.advance(queue, 2)
    await worker.close()
    job = await queue.get(id)
    assert (job.status, job.result, job.attempts) == (JobStatus.SUCCEEDED, "embedded", 1)


async def test_retry_later_with_an_infinite_delay_does_not_rerun_the_job_at_once(queue, pool):
    @operation("never")
    async def never() -> None:
        raise RetryLater("not in this life", delay_seconds=float("inf"))

    before = datetime.now(UTC)
    job = await run(queue, pool, never)
    assert (job.status, job.attempts) == (JobStatus.QUEUED, 0)
    assert timedelta(days=366) <= job.run_after - before < timedelta(days=366, minutes=10)
    assert (await event_names(queue, job.id))[-1] == "job.retry_later"


async def test_snooze_is_the_same_as_a_value(queue, pool):
    @operation("poll")
    async def poll() -> Snooze:
        return Snooze(120, "still working", progress=(1, 4))

    job = await run(queue, pool, poll)
    assert (job.status, job.attempts, job.message) == (JobStatus.QUEUED, 0, "still working")
    assert (job.progress_current, job.progress_total) == (1, 4)
    assert (await queue.events(job.id))[-1].event == "job.retry_later"


# Event log


async def test_emit_writes_event_message_fields_level_and_the_servers_time(queue, pool, clock):
    now = await clock.advance(queue, 86_400)

    @operation("insert_proteins")
    async def insert_proteins(ctx: Context) -> None:
        ctx.emit("insert_proteins.page_done", "page 3", count=100, url="https://example.org/3")
        ctx.emit("insert_proteins.slow", level="warning")
        ctx.emit("insert_proteins.skipped", "bad row", level="error", error_kind="schema_invalid")

    (id,) = await put(queue, NewJob(insert_proteins), operations=Registry([insert_proteins]))
    worker = make_worker(pool, insert_proteins, queue=queue)
    await run_job(worker, id)
    await worker.close()

    first, slow, skipped = (await queue.events(id))[2:-1]
    assert (first.event, first.message, first.level) == ("insert_proteins.page_done", "page 3", "info")
    assert first.fields == {"count": 100, "url": "https://example.org/3"}
    assert (first.ts, first.attempt, first.claim, first.worker) == (now, 1, 1, worker.id)
    assert (slow.level, slow.message, slow.fields) == ("warning", None, None)
    assert (skipped.level, skipped.error_kind) == ("error", "schema_invalid")
    assert (await queue.get(id)).message == "bad row"


async def test_fields_that_are_often_summed_have_their_own_columns(queue, pool):
    @operation("ask")
    async def ask(ctx: Context) -> None:
        ctx.emit("ask.done", model="small", prompt_tokens=12, completion_tokens=3, cost="0.000006", page=1)

    job = await run(queue, pool, ask)
    event = (await queue.events(job.id))[2]
    assert (event.model, event.prompt_tokens, event.completion_tokens) == ("small", 12, 3)
    assert str(event.cost) == "0.000006"
    assert event.fields == {"page": 1}


@pytest.mark.parametrize(("event", "level"), [("", "info"), ("x" * 201, "info"), ("fine", "debug")])
async def test_emit_refuses_bad_names_and_levels(queue, pool, event, level):
    refused = []

    @operation("talk")
    async def talk(ctx: Context) -> None:
        try:
            ctx.emit(event, level=level)
        except InvalidInput as error:
            refused.append(error.param)

    job = await run(queue, pool, talk)
    assert refused == ["level" if event == "fine" else "event"]
    assert await event_names(queue, job.id) == ["job.enqueued", "job.started", "job.succeeded"]


async def test_the_database_refuses_levels_that_do_not_exist(queue):
    id = await put_one(queue)
    with pytest.raises(Exception, match="level"):
        await raw(
            queue,
            "INSERT INTO batchwright.job_event (job_id, ts, event, level) VALUES (%(id)s, now(), 'x', 'debug')",
            id=id,
        )


async def test_events_of_an_operation_are_between_start_and_end_in_the_order_of_their_emits(queue, pool):
    @operation("count")
    def count(ctx: Context) -> None:
        for n in range(500):
            ctx.emit("count.step", n=n)

    job = await run(queue, pool, count)
    events = await queue.events(job.id)
    assert [event.fields["n"] for event in events[2:-1]] == list(range(500))
    assert events[-1].event == "job.succeeded"
    assert [event.id for event in events] == sorted(event.id for event in events)


async def test_a_worker_that_lost_its_claim_can_write_neither_events_nor_progress(queue, clock):
    id = await put_one(queue)
    zombie = await claim_one(queue, id)
    await clock.advance(queue, 31)
    await queue.recover(id)
    await claim_one(queue, id, worker="w2")
    before = await snapshot(queue, id)
    event = {"id": id, "claim": zombie.claim, "place": 1, "event": "late", "level": "info", "message": "m"}
    assert await queue.emit([event]) == set()
    assert await queue.progress([(id, zombie.claim, 99, 100)]) == set()
    assert await snapshot(queue, id) == before


async def test_the_timeline_can_be_read_page_by_page_with_a_cursor(queue):
    id = await put_one(queue)
    claim = await take_one(queue)
    for n in range(5):
        await queue.emit([{"id": id, "claim": claim.claim, "place": n, "event": f"step.{n}", "level": "info"}])
    names, after = [], 0
    while page := await queue.events(id, after=after, limit=2):
        names += [event.event for event in page]
        after = page[-1].id
    assert names == ["job.enqueued", "job.started", *[f"step.{n}" for n in range(5)]]


# Progress


async def test_progress_in_the_fields_of_an_emit_reaches_the_job_and_not_the_event(queue, pool):
    @operation("steps")
    async def steps(ctx: Context) -> None:
        ctx.emit("steps.page_done", "page", _progress_current=3, _progress_total=10, rows=5)

    job = await run(queue, pool, steps)
    assert (job.progress_current, job.progress_total) == (3, 10)
    assert (await queue.events(job.id))[2].fields == {"rows": 5}


async def test_progress_returned_with_the_result_is_kept(queue, pool):
    @operation("returns")
    async def returns(ctx: Context) -> Done:
        ctx.progress(1, 7)
        return Done("ok", progress=(7, 7))

    job = await run(queue, pool, returns)
    assert (job.progress_current, job.progress_total) == (7, 7)


async def test_progress_and_events_are_visible_while_the_operation_still_runs(queue, pool):
    go_on = asyncio.Event()

    @operation("long")
    async def long(ctx: Context) -> None:
        ctx.progress(4, 8)
        ctx.emit("long.half")
        await go_on.wait()

    (id,) = await put(queue, NewJob(long), operations=Registry([long]))
    worker = make_worker(pool, long)
    running = asyncio.create_task(run_job(worker, id))
    while (job := await queue.get(id)).progress_current is None:
        await asyncio.sleep(0.01)
    assert (job.status, job.progress_current, job.progress_total) == (JobStatus.RUNNING, 4, 8)
    assert "long.half" in await event_names(queue, id)
    go_on.set()
    assert await running
    await worker.close()


async def test_progress_without_a_value_keeps_the_earlier_value(queue):
    id = await put_one(queue)
    claim = await take_one(queue)
    await queue.progress([(id, claim.claim, None, 10)])
    await queue.progress([(id, claim.claim, 2, None)])
    job = await queue.get(id)
    assert (job.progress_current, job.progress_total) == (2, 10)


# Cancellation


@pytest.mark.parametrize("how", [JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED])
async def test_cancel_is_a_no_op_on_a_job_that_has_ended(queue, how):
    id = await put_one(queue)
    await end(queue, await take_one(queue), how)
    before = await snapshot(queue, id)
    assert await queue.cancel([id]) == 0
    assert await snapshot(queue, id) == before


@pytest.mark.parametrize("settle", [succeed, fail])
async def test_a_late_result_cannot_overwrite_cancelled(queue, settle):
    id = await put_one(queue)
    claim = await take_one(queue)
    assert await queue.cancel([id], reason="not needed") == 1
    before = await snapshot(queue, id)
    assert not await settle(queue, claim)
    assert await snapshot(queue, id) == before
    job, events = before
    assert (job.status, job.result, job.error["message"]) == (JobStatus.CANCELLED, None, "not needed")
    assert events[-1].event == "job.cancelled"


async def test_a_late_wait_creates_no_children(queue):
    id = await put_one(queue)
    claim = await take_one(queue)
    await queue.cancel([id])
    with pytest.raises(Fenced):
        await hand_over(queue, claim, 3)
    assert await queue.count_children(id) == {}
    assert await take(queue) == []


async def test_an_async_operation_is_interrupted_when_its_job_is_cancelled(queue, pool):
    started, interrupted = asyncio.Event(), asyncio.Event()

    @operation("sleepy")
    async def sleepy() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupted.set()
            raise
        return "late"

    (id,) = await put(queue, NewJob(sleepy), operations=Registry([sleepy]))
    async with working(pool, sleepy):
        await started.wait()
        async with within(INTERRUPT_SECONDS_MAX):
            await queue.cancel([id])
            await interrupted.wait()
            while (job := await queue.get(id)).locked_by is not None:
                await asyncio.sleep(0.01)
    assert (job.status, job.result) == (JobStatus.CANCELLED, None)


async def test_a_thread_operation_sees_that_its_job_is_cancelled_and_its_result_is_not_kept(queue, pool):
    started = threading.Event()

    @operation("stubborn")
    def stubborn(ctx: Context) -> str:
        started.set()
        while not ctx.cancelled:
            threading.Event().wait(0.01)
        return "late"

    (id,) = await put(queue, NewJob(stubborn), operations=Registry([stubborn]))
    async with working(pool, stubborn):
        await asyncio.to_thread(started.wait)
        async with within(INTERRUPT_SECONDS_MAX):
            await queue.cancel([id])
            while (job := await queue.get(id)).locked_by is not None:
                await asyncio.sleep(0.01)
    assert (job.status, job.result) == (JobStatus.CANCELLED, None)
    assert (await event_names(queue, id))[-1] == "job.cancelled"


async def test_cancelling_a_parent_cancels_its_queued_children_in_the_same_commit(queue, pool):
    parent = await put_one(queue)
    children = await hand_over(queue, await take_one(queue), 5)
    async with pool.transaction() as session:
        assert await queue.cancel([parent], session=session) == 6
        assert {job.status for job in await queue.get_many([parent, *children])} == {
            JobStatus.RUNNING,
            JobStatus.QUEUED,
        }, "other sessions see nothing before the commit"
    assert {job.status for job in await queue.get_many([parent, *children])} == {JobStatus.CANCELLED}


async def test_children_that_ended_before_keep_their_end_when_the_parent_is_cancelled(queue):
    parent = await put_one(queue)
    done, open = await hand_over(queue, await take_one(queue), 2)
    await succeed(queue, await claim_one(queue, done))
    assert await queue.cancel([parent]) == 2
    assert await status(queue, done) is JobStatus.SUCCEEDED
    assert await status(queue, open) is JobStatus.CANCELLED


async def test_a_cancelled_parent_is_not_closed_by_its_last_child(queue):
    parent = await put_one(queue)
    (child,) = await hand_over(queue, await take_one(queue), 1)
    claim = await claim_one(queue, child)
    await queue.cancel([parent])
    assert not await succeed(queue, claim)
    assert await status(queue, parent) is JobStatus.CANCELLED


async def test_a_job_cancelled_before_its_claim_never_starts(queue, pool):
    called = []

    @operation("noop")
    async def spy(n: int = 0, note: str | None = None) -> None:
        called.append(n)

    id = await put_one(queue)
    await queue.cancel([id])
    worker = make_worker(pool, spy)
    assert await run_job(worker, id) is False
    assert await worker.run_once() == 0
    await worker.close()
    assert called == []


async def test_a_failure_raised_in_an_interrupted_operation_does_not_replace_cancelled(queue, pool):
    started = asyncio.Event()

    @operation("angry")
    async def angry() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Fatal("I was interrupted") from None

    (id,) = await put(queue, NewJob(angry), operations=Registry([angry]))
    async with working(pool, angry):
        await started.wait()
        async with within(INTERRUPT_SECONDS_MAX):
            await queue.cancel([id])
            while (job := await queue.get(id)).locked_by is not None:
                await asyncio.sleep(0.01)
    assert job.status is JobStatus.CANCELLED
    assert "job.failed" not in await event_names(queue, id)


@pytest.mark.parametrize("reason", ["stop", "timeout"])
async def test_if_an_interrupted_operation_raises_another_error_the_interruption_decides(queue, pool, reason):
    """Drivers and clients often turn a cancelled wait into an error such as ConnectionError."""
    started = asyncio.Event()

    @operation("wraps", timeout_seconds=0.05 if reason == "timeout" else None)
    async def wraps() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the connection was lost") from None

    (id,) = await put(queue, NewJob(wraps), operations=Registry([wraps]))
    worker = make_worker(pool, wraps)
    running = asyncio.create_task(run_job(worker, id))
    await started.wait()
    if reason == "stop":
        for held in worker._runner.held.values():
            worker._runner.interrupt(held, "stop")
    await running
    await worker.close()
    job = await queue.get(id)
    assert job.status is JobStatus.QUEUED
    assert job.attempts == (0 if reason == "stop" else 1)
    assert (await event_names(queue, id))[-1] == ("job.released" if reason == "stop" else "job.retried")


async def test_a_thread_operation_that_is_cancelled_before_it_begins_never_begins(queue, pool):
    """A resumed parent first reads its children; a cancel may arrive meanwhile."""
    begun = []

    @operation("noop")
    def late(ctx: Context, n: int = 0, note: str | None = None) -> None:
        begun.append(ctx.job_id)

    id = await put_one(queue)
    await hand_over(queue, await take_one(queue), 0, on_join="resume")
    worker = make_worker(pool, late)
    original = worker.queue.joined

    async def joined(*of):
        await queue.cancel([id])
        worker._runner.hear(dict.fromkeys(worker._runner.held, JobStatus.CANCELLED))
        return await original(*of)

    worker.queue.joined = joined
    assert await run_job(worker, id)
    await worker.close()
    job = await queue.get(id)
    assert (begun, job.status, job.locked_by, job.lease_until) == ([], JobStatus.CANCELLED, None, None)


async def test_a_finished_job_can_be_waited_for(queue, pool):
    async with working(pool):
        id = await put_one(queue, payload={"n": 2})
        assert (await finished(queue, id)).status is JobStatus.SUCCEEDED
