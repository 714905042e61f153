"""A statement was committed but its answer was lost: every verb is repeated without taking effect twice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from batchwright import Context, Done, Fatal, NewJob, Snooze, Transient, Wait, operation
from batchwright.db.database import Blocking, Database, complete
from batchwright.engine.catalog import Catalog
from batchwright.engine.outcomes import Settle
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.engine.worker.lease import Holder, Lease
from batchwright.engine.worker.outbox import Outbox
from batchwright.errors import DatabaseUnavailable, Deadlock
from batchwright.states import JobStatus
from tests.engine.faulty import Fault, Faulty
from tests.support import (
    BASIC,
    DATABASE,
    event_names,
    fail,
    finished,
    listed,
    make_worker,
    noop,
    put,
    put_one,
    raw,
    run_job,
    succeed,
    take,
    take_one,
    working,
)

ENGINE = EngineSettings(lease_seconds=3.0)


@operation("done")
async def done() -> int:
    return 7


@operation("failed")
async def failed() -> None:
    raise Fatal("it broke")


@operation("retried", backoff_seconds=100.0)
async def retried() -> None:
    raise Transient("busy")


@operation("snoozed")
async def snoozed() -> Snooze:
    return Snooze(60, "later")


@operation("written")
async def written() -> Done:
    async def write(connection) -> None:
        await connection.execute("INSERT INTO effect DEFAULT VALUES")

    return Done(7, write=write)


@operation("chained")
async def chained() -> Done:
    return Done(7, then=[NewJob("noop"), NewJob("noop")])


@operation("waited")
async def waited() -> Wait:
    return Wait([NewJob("noop"), NewJob("noop")], result=7)


@operation("parent")
async def parent(child: str) -> Wait:
    return Wait([NewJob(child), NewJob("noop", delay_seconds=60)], allow_failures=True)


OPERATIONS = [noop, done, failed, retried, snoozed, written, chained, waited, parent]

SETTLES = [
    ("done", "succeed", JobStatus.SUCCEEDED, "job.succeeded"),
    ("failed", "fail", JobStatus.FAILED, "job.failed"),
    ("retried", "retry", JobStatus.QUEUED, "job.retried"),
    ("snoozed", "snooze", JobStatus.QUEUED, "job.retry_later"),
    ("written", "succeed", JobStatus.SUCCEEDED, "job.succeeded"),
    ("chained", "succeed", JobStatus.SUCCEEDED, "job.succeeded"),
    ("waited", "wait", JobStatus.RUNNING, "job.waited"),
]


@pytest.fixture
def database(pool):
    return Faulty(pool)


@pytest.fixture
async def worker(pool, database):
    """A worker whose database loses answers as planned."""
    await pool.rows("CREATE TABLE effect (id serial)")
    worker = make_worker(pool, *OPERATIONS, queue=Queue(Database(database), ENGINE))
    await worker.register()
    yield worker
    await worker.close()


async def enqueue(queue, name, **options):
    (id,) = await put(queue, NewJob(name, **options), operations=queue_catalog())
    return id


def queue_catalog():
    from batchwright.operations.registry import Registry

    return Registry(OPERATIONS)


async def effects(queue) -> int:
    return (await raw(queue, "SELECT count(*) FROM effect"))[0][0]


async def hand_over(queue, claim, *jobs, **options):
    outcome = Wait(jobs, **options)
    await queue.wait(claim, "w1", outcome, await Catalog(queue.database, BASIC).prepare(jobs, parent=claim))


# Claim ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_claim_whose_answer_was_lost_loses_no_job_and_no_attempt(queue, pool, database, when):
    fault = Fault("claim", when)
    database.plan(fault)
    ids = await put(queue, *(NewJob("noop", {"n": n}, max_attempts=1) for n in range(5)))
    async with working(pool, queue=Queue(Database(database), ENGINE)):
        jobs = [await finished(queue, id) for id in ids]
    assert fault.struck == 1
    assert [(job.result, job.attempts, job.rescues) for job in jobs] == [(n, 1, 0) for n in range(5)]
    if when == "after":
        expected = ["job.enqueued", "job.started", "job.released", "job.started", "job.succeeded"]
        assert [await event_names(queue, id) for id in ids] == [expected] * 5


@pytest.mark.parametrize("kind", ["unique", "deadlock"])
async def test_a_claim_that_lost_a_race_for_a_key_takes_the_plain_jobs(database, kind):
    queue = Queue(Database(database), ENGINE)
    keyed, plain = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop"))
    database.plan(Fault("claim", "before", kind))
    assert [claim.id for claim in await take(queue)] == [plain]
    assert [claim.id for claim in await take(queue)] == [keyed]


@pytest.mark.parametrize("kind", ["unique", "deadlock"])
async def test_claim_job_that_lost_a_race_answers_none(database, kind):
    queue = Queue(Database(database), ENGINE)
    id = await put_one(queue, exclusive_key="k")
    database.plan(Fault("claim", "before", kind))
    assert await queue.claim_job("w1", id, BASIC.names()) is None
    assert await queue.claim_job("w1", id, BASIC.names()) is not None


# Renew ------------------------------------------------------------------------------------------------------------


async def test_a_renewal_whose_answer_was_lost_lengthens_the_lease_and_is_repeated(queue, database_url):
    blocking = Blocking(DATABASE, database_url)
    database = Faulty(blocking)
    id = await put_one(queue)
    claim = await take_one(queue)
    mine = SimpleNamespace(leased_until=0.0)
    lease = Lease(
        Queue(Database(database), EngineSettings(lease_seconds=100.0)),
        "w1",
        Holder(
            held=lambda: {(id, claim.claim): mine},
            claims_under_way=lambda: (0, 0),
            on_news=lambda news: pytest.fail(f"{news} although the lease is alive"),
        ),
        close_database=blocking.close,
    )
    before = (await queue.get(id)).lease_until
    database.plan(Fault("renew", "after"))
    with pytest.raises(DatabaseUnavailable):
        lease.renew()
    between = (await queue.get(id)).lease_until
    assert between > before
    assert mine.leased_until == 0.0, "it is unknown whether the renewal was committed"
    assert lease.renew()
    assert 0.0 < mine.leased_until - time.monotonic() <= 100.0
    lease.look()
    assert (await queue.get(id)).lease_until > between
    blocking.close()


async def test_a_release_of_orphans_whose_answer_was_lost_happens_once(queue, database_url):
    blocking = Blocking(DATABASE, database_url)
    database = Faulty(blocking)
    id = await put_one(queue)
    await take_one(queue)
    lease = Lease(
        Queue(Database(database), ENGINE),
        "w1",
        Holder(
            held=dict,
            claims_under_way=lambda: (0, 0),
            on_news=lambda news: pytest.fail(f"{news} although nothing is held"),
        ),
        close_database=blocking.close,
    )
    database.plan(Fault("release", "after"))
    with pytest.raises(DatabaseUnavailable):
        lease.look()
    lease.look()
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.released"]
    assert (await queue.get(id)).attempts == 0
    blocking.close()


async def test_orphans_are_not_released_while_a_claim_is_under_way(queue, database_url):
    blocking = Blocking(DATABASE, database_url)
    id = await put_one(queue)
    await take_one(queue)
    for states in ([(1, 0), (1, 0)], [(0, 0), (0, 1)], [(0, 0), (1, 0)], [(1, 0), (0, 1)]):
        lease = Lease(
            Queue(Database(blocking), ENGINE),
            "w1",
            Holder(
                held=dict,
                claims_under_way=iter(states).__next__,
                on_news=lambda _: None,
            ),
            close_database=blocking.close,
        )
        lease.look()
        assert (await queue.get(id)).status is JobStatus.RUNNING
    blocking.close()


# Settle -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "statement", "status", "event"), SETTLES, ids=[one[0] for one in SETTLES])
async def test_a_settle_whose_answer_was_lost_happens_once(worker, queue, database, name, statement, status, event):
    for when in ("after", "before"):
        id = await enqueue(queue, name)
        database.plan(fault := Fault(statement, when, times=2))
        assert await run_job(worker, id)
        assert fault.struck == 2
        assert (await queue.get(id)).status is status
        assert await event_names(queue, id) == ["job.enqueued", "job.started", event]
    assert worker.counts.total("writes_fenced_total") == 0
    assert await effects(queue) == (2 if name == "written" else 0)
    assert len(await listed(queue)) == (6 if name in ("chained", "waited") else 2)


@pytest.mark.parametrize(("name", "statement", "status", "event"), SETTLES, ids=[one[0] for one in SETTLES])
async def test_a_childs_settle_whose_answer_was_lost_counts_once(
    worker, queue, database, name, statement, status, event
):
    mother = await enqueue(queue, "parent", payload={"child": name})
    assert await run_job(worker, mother)
    (id,) = (job.id for job in await listed(queue, parent_job_id=mother, job_type=name))
    database.plan(fault := Fault(statement, "after"))
    assert await run_job(worker, id)
    assert fault.struck == 1
    assert (await queue.get(id)).status is status
    assert await event_names(queue, id) == ["job.enqueued", "job.started", event]
    counted = await queue.get(mother)
    has_ended = status in (JobStatus.SUCCEEDED, JobStatus.FAILED)
    assert (counted.children_open, counted.children_failed) == (2 - has_ended, int(status is JobStatus.FAILED))


async def test_a_settle_is_rolled_back_and_repeated_if_counting_on_the_parent_fails(worker, queue, database):
    mother = await enqueue(queue, "parent", payload={"child": "written"})
    assert await run_job(worker, mother)
    (id,) = (job.id for job in await listed(queue, parent_job_id=mother, job_type="written"))
    database.plan(fault := Fault("join", "before", times=3))
    assert await run_job(worker, id)
    assert fault.struck == 3
    assert (await queue.get(mother)).children_open == 1
    assert await effects(queue) == 1
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.succeeded"]


async def test_chained_jobs_are_written_together_with_the_success(worker, queue, database):
    id = await enqueue(queue, "chained")
    database.plan(fault := Fault("enqueue", "before", times=2))
    assert await run_job(worker, id)
    assert fault.struck == 2
    assert len(await listed(queue, job_type="noop")) == 2


async def test_a_batch_of_settles_whose_answer_was_lost_is_accepted_once(pool, queue, database):
    worker = make_worker(pool, queue=Queue(Database(database), ENGINE), concurrency=20)
    ids = await put(queue, *(NewJob("noop", {"n": n}) for n in range(20)))
    database.plan(Fault("succeed", "after", times=3))
    assert await worker.run_once() == 20
    for n, id in enumerate(ids):
        assert (await queue.get(id)).result == n
        assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.succeeded"]
    assert worker.counts.total("writes_fenced_total") == 0
    await worker.close()


async def test_a_settle_is_refused_if_the_job_was_cancelled_before_its_repetition(pool, queue, database):
    """The first settle is lost before its commit, a user cancels, and the repeated settle must be refused."""
    worker = make_worker(pool, queue=Queue(Database(database), ENGINE))
    id = await put_one(queue)
    arrived, go = database.hold("succeed")
    database.plan(Fault("succeed", "before"))
    running = asyncio.create_task(run_job(worker, id))
    await arrived.wait()
    await queue.cancel([id])
    go.set()
    await running
    assert (await queue.get(id)).status is JobStatus.CANCELLED
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.cancelled"]
    await worker.close()


async def test_a_release_at_stop_whose_answer_was_lost_is_done_once(pool, queue, database):
    database.plan(fault := Fault("release", "after"))
    entered = asyncio.Event()

    @operation("endless")
    async def endless() -> None:
        entered.set()
        await asyncio.Event().wait()

    async with working(pool, endless, queue=Queue(Database(database), ENGINE), stop_grace_seconds=0.05) as worker:
        (id,) = await put(queue, NewJob("endless"), operations=worker._operations)
        await entered.wait()
    assert fault.struck == 1
    job = await queue.get(id)
    assert (job.status, job.attempts, job.rescues) == (JobStatus.QUEUED, 0, 0)
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "job.released"]


# Events and progress --------------------------------------------------------------------------------------------------


async def test_an_event_whose_answer_was_lost_is_not_lost(pool, queue, database):
    @operation("emits")
    async def emits(ctx: Context) -> None:
        ctx.emit("one", "first")
        ctx.emit("two", "second", _progress_current=3, _progress_total=4)

    worker = make_worker(pool, emits, queue=Queue(Database(database), ENGINE))
    for when in ("before", "after"):
        (id,) = await put(queue, NewJob("emits"), operations=worker._operations)
        database.plan(Fault("emit", when), Fault("progress", when))
        assert await run_job(worker, id)
        names = await event_names(queue, id)
        assert names[:2] == ["job.enqueued", "job.started"]
        assert names[-3:] == ["one", "two", "job.succeeded"], "a repeated event may be written twice, but is never lost"
        job = await queue.get(id)
        assert (job.message, job.progress_current, job.progress_total) == ("second", 3, 4)
    await worker.close()


async def test_a_settle_waits_for_events_that_are_being_written(pool, queue, database):
    arrived, go = database.hold("emit")

    @operation("emits")
    async def emits(ctx: Context) -> None:
        ctx.emit("half")
        await arrived.wait()
        asyncio.get_running_loop().call_later(0.2, go.set)

    worker = make_worker(pool, emits, queue=Queue(Database(database), ENGINE))
    (id,) = await put(queue, NewJob("emits"), operations=worker._operations)
    assert await run_job(worker, id)
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "half", "job.succeeded"]
    await worker.close()


async def test_events_and_progress_that_the_database_refuses_are_dropped_alone(pool, queue, database):
    both = asyncio.Barrier(2)

    @operation("emits")
    async def emits(ctx: Context, bad: bool) -> None:
        ctx.emit("used", prompt_tokens="many" if bad else 5)
        ctx.progress(10**30 if bad else 5)
        await both.wait()

    worker = make_worker(pool, emits, queue=Queue(Database(database), ENGINE))
    bad, good = await put(
        queue, NewJob("emits", {"bad": True}), NewJob("emits", {"bad": False}), operations=worker._operations
    )
    assert await worker.run_once() == 2
    assert await event_names(queue, bad) == ["job.enqueued", "job.started", "job.succeeded"]
    assert await event_names(queue, good) == ["job.enqueued", "job.started", "used", "job.succeeded"]
    assert (await queue.get(good)).progress_current == 5
    await worker.close()


async def test_a_deadlock_loses_no_event_and_no_progress(pool, queue, database):
    @operation("emits")
    async def emits(ctx: Context) -> None:
        ctx.emit("one", _progress_current=3)

    worker = make_worker(pool, emits, queue=Queue(Database(database), ENGINE))
    (id,) = await put(queue, NewJob("emits"), operations=worker._operations)
    database.plan(Fault("emit", "before", "deadlock"), Fault("progress", "before", "deadlock"))
    assert await run_job(worker, id)
    assert await event_names(queue, id) == ["job.enqueued", "job.started", "one", "job.succeeded"]
    assert (await queue.get(id)).progress_current == 3
    await worker.close()


# Deadlocks --------------------------------------------------------------------------------------------------------


async def _held(queue):
    await put_one(queue)
    return await take_one(queue)


async def _family(queue, **options):
    """A parent that waits for two children, which a worker holds."""
    mother = await _held(queue)
    await hand_over(queue, mother, NewJob("noop"), NewJob("noop"), **options)
    return mother.id, await take(queue)


async def settle_of_a_child(queue, faults):
    mother, (first, _) = await _family(queue)
    faults()
    assert await succeed(queue, first)
    assert (await queue.get(mother)).children_open == 1


async def succeed_with(queue, faults):
    claim = await _held(queue)
    rows = await Catalog(queue.database, BASIC).prepare([NewJob("noop")], before=claim)
    faults()
    values = {"result": 1, "progress_current": None, "progress_total": None}
    await queue.succeed_with(Settle("succeed", claim, values), "w1", write=None, then=rows)
    assert len(await listed(queue)) == 2


async def wait(queue, faults):
    claim = await _held(queue)
    faults()
    await hand_over(queue, claim, NewJob("noop"))
    assert (await queue.get(claim.id)).children_open == 1
    assert len(await listed(queue)) == 2


async def cancel(queue, faults):
    mother, children = await _family(queue)
    faults()
    assert await queue.cancel([mother]) == 3
    assert await event_names(queue, children[0].id) == ["job.enqueued", "job.started", "job.cancelled"]


async def rerun(queue, faults):
    mother, children = await _family(queue)
    for child in children:
        assert await fail(queue, child)
    faults()
    await queue.rerun(mother)
    assert (await queue.get(mother)).children_open == 2


async def recover(queue, faults):
    claim = await _held(queue)
    await raw(queue, "UPDATE batchwright.job SET lease_until = now() - interval '1 second'")
    faults()
    await queue.recover(claim.id)
    assert (await queue.get(claim.id)).status is JobStatus.QUEUED


async def rescue(queue, faults):
    claim = await _held(queue)
    faults()
    assert [one.id for one in await queue.rescue(dead=[(claim.id, claim.claim)])] == [claim.id]
    assert await event_names(queue, claim.id) == ["job.enqueued", "job.started", "job.rescued"]


async def expire(queue, faults):
    id = await put_one(queue, delay_seconds=60)
    await raw(queue, "UPDATE batchwright.job SET deadline = now() - interval '1 second'")
    faults()
    assert await queue.expire() == 1
    assert await event_names(queue, id) == ["job.enqueued", "job.expired"]


async def enqueue_by_policy(queue, faults):
    await put_one(queue, exclusive_key="k")
    faults()
    await put_one(queue, exclusive_key="k", on_held="supersede")
    assert sorted(job.status for job in await listed(queue)) == ["CANCELLED", "QUEUED"]


DEADLOCKS = [
    (settle_of_a_child, "join"),
    (succeed_with, "enqueue"),
    (wait, "enqueue"),
    (cancel, "open_children"),
    (rerun, "rerun"),
    (recover, "recover"),
    (rescue, "rescue"),
    (expire, "expire"),
    (enqueue_by_policy, "enqueue"),
]


@pytest.mark.parametrize(("verb", "statement"), DEADLOCKS, ids=[verb.__name__ for verb, _ in DEADLOCKS])
async def test_a_deadlock_victim_is_repeated_as_if_nothing_had_happened(database, verb, statement):
    fault = Fault(statement, "before", "deadlock", times=3)
    await verb(Queue(Database(database), ENGINE), lambda: database.plan(fault))
    assert fault.struck == 3


async def test_a_deadlock_that_repeats_too_often_is_an_error(database):
    queue = Queue(Database(database), ENGINE)
    id = await put_one(queue)
    database.plan(Fault("owners", "before", "deadlock", times=1000))
    with pytest.raises(Deadlock):
        await queue.cancel([id])
    assert database.ran["owners"] == 10


async def test_a_deadlock_in_the_callers_transaction_is_raised_to_the_caller(database, pool):
    queue = Queue(Database(database), ENGINE)
    rows = await Catalog(queue.database, BASIC).prepare([NewJob("noop")])
    database.plan(Fault("enqueue", "before", "deadlock"))
    with pytest.raises(Deadlock):
        async with database.transaction() as session:
            await queue.enqueue(rows, session=session)
    assert await listed(queue) == []


async def test_progress_that_could_not_be_written_keeps_what_a_newer_report_leaves_out(database):
    """The total was reported before the outage, and the current number, without a total, during it."""
    queue = Queue(Database(database), ENGINE)
    claim = await _held(queue)
    outbox = Outbox(queue, "w1")
    outbox.progress(claim, 1, 10)
    arrived, go = database.hold("progress")
    database.plan(Fault("progress", "before"))
    writing = asyncio.create_task(outbox.flush())
    await arrived.wait()
    outbox.progress(claim, 4, None)
    go.set()
    with pytest.raises(DatabaseUnavailable):
        await writing
    await outbox.flush()
    job = await queue.get(claim.id)
    assert (job.progress_current, job.progress_total) == (4, 10)


# Upkeep -----------------------------------------------------------------------------------------------------------


async def test_a_rescue_whose_answer_was_lost_gives_one_attempt_back(database):
    queue = Queue(Database(database), ENGINE)
    claim = await _held(queue)
    database.plan(Fault("rescue", "after"))
    with pytest.raises(DatabaseUnavailable):
        await queue.rescue(dead=[(claim.id, claim.claim)])
    assert await queue.rescue(dead=[(claim.id, claim.claim)]) == []
    job = await queue.get(claim.id)
    assert (job.attempts, job.rescues) == (0, 1)
    assert await event_names(queue, claim.id) == ["job.enqueued", "job.started", "job.rescued"]


@pytest.mark.parametrize("statement", ["upkeep_lock", "rescue", "expire", "queues", "claim", "holdings"])
async def test_a_worker_continues_after_one_of_its_statements_failed(queue, pool, database, statement):
    database.plan(Fault(statement, "before", times=2))
    async with working(pool, queue=Queue(Database(database), ENGINE)):
        id = await put_one(queue, payload={"n": 4})
        assert (await finished(queue, id)).result == 4


async def test_the_wrapper_really_injects_its_faults(pool, queue):
    """A fault test that injects nothing proves nothing."""
    database = Faulty(pool, [Fault("enqueue", "after")])
    with pytest.raises(DatabaseUnavailable):
        await put_one(Queue(Database(database)))
    assert len(await listed(queue)) == 1
    database.plan(Fault("enqueue", "before"))
    with pytest.raises(DatabaseUnavailable):
        await put_one(Queue(Database(database)))
    assert len(await listed(queue)) == 1
    database.plan(Fault("enqueue", "after"))
    with contextlib.suppress(DatabaseUnavailable):
        await put_one(Queue(Database(database)), exclusive_key="k", on_held="reject")
    assert len(await listed(queue)) == 2


def test_the_wrapper_works_over_a_blocking_database(database_url):
    database = Faulty(blocking := Blocking(DATABASE, database_url))
    assert complete(database.rows("SELECT 1")) == [(1,)]
    blocking.close()
