"""The twelve holes in the sources' own SQL (reference/queues.md, section 9) are closed.

Holes 7, 9, 10 and 12 are about providers and batches; these tests cover the engine's part of them.
"""

import asyncio
import os
import socket
from collections import Counter
from datetime import timedelta

import pytest

from batchwright import Context, Done, JobStatus, NewJob, Snooze, Transient, operation
from batchwright.engine import policy
from batchwright.engine.outcomes import Settle
from batchwright.engine.worker.worker import worker_id
from batchwright.errors import Conflict, Fenced
from batchwright.operations.registry import Registry
from tests.engine.steps import another, claim_one, dead, hand_over, retry, snapshot, status
from tests.support import (
    event_names,
    fail,
    listed,
    make_worker,
    noop,
    put,
    put_one,
    raw,
    run_job,
    snooze,
    succeed,
    take,
    take_one,
)


def settle_done(claim, result=None):
    return Settle("succeed", claim, {"result": result, "progress_current": None, "progress_total": None})


async def running_of_key(queue):
    count = "SELECT count(*) FROM batchwright.job WHERE status = 'RUNNING' AND exclusive_key = '[\"k\"]'"
    return (await raw(queue, count))[0][0]


async def test_hole_1_a_running_job_never_loses_its_key_to_a_later_claim(queue):
    one, two = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    first = await claim_one(queue, one)
    assert await queue.claim_job("w2", two, ["noop"]) is None
    assert await take(queue, worker="w2") == []
    assert await running_of_key(queue) == 1
    assert (await queue.get(one)).is_current
    await succeed(queue, first)
    await claim_one(queue, two)
    assert await running_of_key(queue) == 1
    assert [(await queue.get(id)).is_current for id in (one, two)] == [False, True]


async def test_hole_1_the_database_refuses_a_running_job_with_a_key_that_is_not_current(queue):
    await put_one(queue, exclusive_key="k")
    await take_one(queue)
    with pytest.raises(Exception, match="running_with_a_key_is_current"):
        await raw(queue, "UPDATE batchwright.job SET is_current = false")


async def test_hole_2_simultaneous_polls_take_and_lock_different_jobs(queue, pool):
    async with another(queue, pool) as second:
        for _ in range(15):
            ids = await put(queue, *[NewJob("noop") for _ in range(20)])
            taken = await asyncio.gather(*[take(one, 10, worker=f"w{n}") for n, one in enumerate([queue, second] * 2)])
            counts = Counter(claim.id for batch in taken for claim in batch)
            assert counts == Counter(ids), "every job once, none left, none twice"


async def test_hole_2_polls_take_the_oldest_first_so_that_no_job_starves(queue, clock):
    await clock.advance(queue, 0)
    late, early, middle = await put(
        queue,
        NewJob("noop", delay_seconds=30),
        NewJob("noop", delay_seconds=10),
        NewJob("noop", delay_seconds=20),
    )
    await clock.advance(queue, 60)
    assert [(await take_one(queue, slots=1)).id for _ in range(3)] == [early, middle, late]


async def test_hole_2_a_job_whose_attempts_are_used_up_fails_and_is_not_scanned_for_ever(queue, pool):
    @operation("shaky", max_attempts=3, backoff_seconds=0.0)
    async def shaky() -> None:
        raise Transient("the network is away")

    (id,) = await put(queue, NewJob(shaky), operations=Registry([shaky]))
    worker = make_worker(pool, shaky)
    for _ in range(3):
        assert await worker.run_once() == 1
    assert await worker.run_once() == 0
    await worker.close()
    job = await queue.get(id)
    assert (job.status, job.attempts, job.error["kind"]) == (JobStatus.FAILED, 3, "transient")
    names = await event_names(queue, id)
    assert names.count("job.retried") == 2
    assert names[-1] == "job.failed"


async def test_hole_3_a_redelivered_child_is_counted_once(queue):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 2)
    first, _ = await take(queue)
    assert await succeed(queue, first)
    before = await snapshot(queue, parent)
    assert not await succeed(queue, first)
    assert not await fail(queue, first)
    assert await queue.settle([settle_done(first), settle_done(first)], "w1") == set()
    assert await snapshot(queue, parent) == before
    assert before[0].children_open == 1


async def test_hole_3_a_child_settled_twice_in_one_batch_is_counted_once(queue):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 2)
    first, _ = await take(queue)
    await queue.settle([settle_done(first), settle_done(first)], "w1")
    assert (await queue.get(parent)).children_open == 1
    assert (await event_names(queue, first.id)).count("job.succeeded") == 1


async def test_hole_3_a_rescued_child_is_counted_by_its_end_only(queue, clock):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 1)
    zombie = await take_one(queue)
    await dead(queue, clock, zombie)
    assert (await queue.get(parent)).children_open == 1
    again = await take_one(queue, worker="w2")
    assert not await succeed(queue, zombie)
    assert (await queue.get(parent)).children_open == 1
    assert await succeed(queue, again, worker="w2")
    assert await status(queue, parent) is JobStatus.SUCCEEDED


async def test_hole_3_the_number_of_children_is_set_in_the_commit_that_makes_them(queue, pool):
    """A child can neither be claimed nor end before its parent counts on it."""
    parent = await put_one(queue)
    claim = await take_one(queue)
    seen = []
    original = queue.enqueue

    async def enqueue(rows, **options):
        answer = await original(rows, **options)
        async with another(queue, pool) as second:
            seen.append((await take(second), (await second.get(parent)).children_open))
        return answer

    queue.enqueue = enqueue
    await hand_over(queue, claim, 3)
    assert seen == [([], 0)]
    assert (await queue.get(parent)).children_open == 3
    assert len(await take(queue)) == 3


async def test_hole_3_a_cancelled_parent_never_becomes_succeeded(queue):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 1)
    child = await take_one(queue)
    await queue.cancel([parent])
    before = await snapshot(queue, parent)
    assert not await succeed(queue, child)
    await queue.let_go([(child.id, child.claim)])
    assert await snapshot(queue, parent) == before


async def test_hole_4_a_long_job_that_renews_is_never_rescued(queue, clock):
    id = await put_one(queue)
    claim = await take_one(queue)
    for _ in range(400):  # 400 x 10 s is more than an hour, twice the sources' 30 minutes
        await clock.advance(queue, 10)
        assert await queue.renew([(id, claim.claim)]) == {id}
    assert await queue.rescue() == []
    assert await succeed(queue, claim)


async def test_hole_4_a_poison_job_is_parked_after_three_deaths(queue, clock):
    id = await put_one(queue)
    for n in range(2):
        rescued = await dead(queue, clock, await claim_one(queue, id))
        assert rescued.status is JobStatus.QUEUED
        assert (await queue.get(id)).rescues == n + 1
    assert await take(queue) == [], "after the second death, ordinary claims skip the job"
    rescued = await dead(queue, clock, await claim_one(queue, id, suspect=True))
    assert rescued.status is JobStatus.FAILED
    job = await queue.get(id)
    assert (job.error["code"], job.rescues) == ("poison", 3)


async def test_hole_4_the_fence_survives_verbs_that_reset_attempts(queue, clock):
    id = await put_one(queue)
    zombie = await take_one(queue)
    await clock.advance(queue, 31)
    await queue.recover(id)
    again = await take_one(queue, worker="w2")
    assert (zombie.attempts, again.attempts) == (1, 1), "attempts alone could not tell them apart"
    assert not await succeed(queue, zombie, "stale")
    assert await succeed(queue, again, "fresh", worker="w2")
    assert (await queue.get(id)).result == "fresh"


async def test_hole_5_a_worker_is_known_by_host_process_and_boot(monkeypatch):
    monkeypatch.setenv("HOSTNAME", "pod-0")
    first, second = worker_id(), worker_id()
    host, pid, boot = first.split(":")
    assert (host, int(pid)) == ("pod-0", os.getpid())
    assert len(boot) == 12
    assert first != second, "a pod that comes back under the same name is another worker"
    monkeypatch.delenv("HOSTNAME")
    assert worker_id().startswith(f"{socket.gethostname()}:")


async def test_hole_5_a_worker_of_the_same_host_cannot_renew_what_another_boot_holds(queue, clock):
    id = await put_one(queue)
    old = await take_one(queue, worker="pod-0:1:aaaa")
    await dead(queue, clock, old)
    new = await take_one(queue, worker="pod-0:1:bbbb")
    assert await queue.renew([(id, old.claim)]) == set()
    assert await queue.holdings("pod-0:1:aaaa") == {}
    assert list(await queue.holdings("pod-0:1:bbbb")) == [(id, new.claim)]


async def test_hole_6_a_late_success_cannot_overwrite_cancelled(queue):
    id = await put_one(queue)
    claim = await take_one(queue)
    await queue.cancel([id])
    before = await snapshot(queue, id)
    assert not await succeed(queue, claim, "late")
    assert not await snooze(queue, claim)
    assert not await retry(queue, claim)
    with pytest.raises(Fenced):
        await queue.succeed_with(settle_done(claim), "w1", write=None, then=[])
    assert await snapshot(queue, id) == before


async def test_hole_7_a_job_is_written_once_however_often_it_is_enqueued(queue):
    """The engine's part: the idempotency key is the token, and a repeated enqueue returns the first job."""
    (first,) = await put(queue, NewJob("noop", {"n": 1}, idempotency_key="submit-42"))
    (again,) = await put(queue, NewJob("noop", {"n": 1}, idempotency_key="submit-42"))
    assert again == first
    assert len(await listed(queue)) == 1
    with pytest.raises(Conflict, match="submit-42"):
        await put(queue, NewJob("noop", {"n": 2}, idempotency_key="submit-42"))


async def test_hole_7_rows_of_the_operation_its_success_and_what_follows_are_one_commit(queue, pool):
    """The engine's part: `write` and `then` are committed with the success or not at all."""
    await raw(queue, "CREATE TABLE submission (token text PRIMARY KEY, external_id text)")

    @operation("submit")
    async def submit(token: str, crash: bool = False) -> Done:
        async def write(connection):
            await connection.execute("INSERT INTO submission VALUES (%s, 'batch_1')", [token])
            if crash:
                raise RuntimeError("the process dies here")

        return Done(write=write, then=[NewJob("noop", {"note": token})])

    operations = Registry([submit, noop])
    worker = make_worker(pool, submit, noop)
    (crashed,) = await put(queue, NewJob(submit, {"token": "a", "crash": True}), operations=operations)
    await run_job(worker, crashed)
    assert await status(queue, crashed) is JobStatus.FAILED
    assert await raw(queue, "SELECT * FROM submission") == []
    assert await listed(queue, job_type="noop") == []

    (done,) = await put(queue, NewJob(submit, {"token": "b"}), operations=operations)
    await run_job(worker, done)
    await worker.close()
    assert await status(queue, done) is JobStatus.SUCCEEDED
    assert await raw(queue, "SELECT token FROM submission") == [("b",)]
    (chained,) = await listed(queue, job_type="noop")
    assert (chained.pipeline_id, chained.parent_job_id) == (done, None)


async def test_hole_7_a_worker_that_lost_its_claim_writes_nothing(queue, clock):
    await raw(queue, "CREATE TABLE submission (token text)")
    id = await put_one(queue)
    zombie = await take_one(queue)
    await dead(queue, clock, zombie)
    called = []

    async def write(connection):
        called.append(connection)

    with pytest.raises(Fenced):
        await queue.succeed_with(settle_done(zombie), "w1", write=write, then=[])
    assert called == []
    assert await status(queue, id) is JobStatus.QUEUED


async def test_hole_8_keys_with_null_parts_collide_with_each_other_and_not_with_the_empty_string(queue):
    null, null_again, empty, text = await put(
        queue,
        NewJob("noop", exclusive_key=["ingest", None, 2026]),
        NewJob("noop", exclusive_key=["ingest", None, 2026]),
        NewJob("noop", exclusive_key=["ingest", "", 2026]),
        NewJob("noop", exclusive_key=["ingest", "null", 2026]),
    )
    assert {claim.id for claim in await take(queue)} == {null, empty, text}
    assert await queue.claim_job("w2", null_again, ["noop"]) is None


async def test_hole_9_polling_rewrites_one_small_row_and_not_the_state_of_every_task(queue):
    """The engine's part: each external job is a row that snoozes with its own `run_after`; its payload stays.

    The compressed payload is stored out of line; an UPDATE that does not change it writes no new TOAST rows.
    """
    noise = "".join(os.urandom(2).hex() for _ in range(20_000))
    id = await put_one(queue, payload={"note": noise})
    toast = await raw(
        queue, "SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = 'batchwright.job'::regclass"
    )
    count = f"SELECT count(*) FROM {toast[0][0]}"
    before = await raw(queue, count)
    assert before[0][0] > 0
    for _ in range(5):
        assert await snooze(queue, await claim_one(queue, id))
    assert await raw(queue, count) == before
    assert (await queue.get(id)).payload["note"] == noise


async def test_hole_10_two_reconcilers_share_the_due_rows_each_under_its_own_lease(queue, pool, clock):
    """The engine's part: a poll is a claim with a lease per row, and each row has its own interval and deadline."""
    now = await clock.advance(queue, 0)
    ids = await put(queue, *[NewJob("noop", {"n": n}, deadline=timedelta(hours=26)) for n in range(20)])
    async with another(queue, pool) as second:
        for poll in range(3):
            batches = await asyncio.gather(take(queue, 15, worker="w1"), take(second, 15, worker="w2"))
            claims = [(claim, f"w{n}") for n, batch in enumerate(batches, 1) for claim in batch]
            assert sorted(claim.id for claim, _ in claims) == sorted(ids)
            leases = await raw(queue, "SELECT DISTINCT locked_by, lease_until FROM batchwright.job")
            assert {lease for _, lease in leases} == {clock.time + timedelta(seconds=30)}
            for n, (claim, worker) in enumerate(claims):
                assert await snooze(queue, claim, 60 + n, worker=worker)
            assert await take(queue) == [], f"nothing is due right after poll {poll}"
            await clock.advance(queue, 120)
    job = await queue.get(ids[0])
    assert (job.attempts, job.claims, job.deadline) == (0, 3, now + timedelta(hours=26))
    await clock.advance(queue, 26 * 3600)
    assert await queue.expire() == 20
    assert (await queue.get(ids[0])).error["code"] == "deadline_exceeded"


def test_hole_10_retries_back_off_per_row_with_jitter_and_a_limit():
    @operation("polls", backoff_seconds=2.0, backoff_seconds_max=60.0)
    async def polls() -> None: ...

    made = Registry([polls]).get("polls")
    for attempt, limit in ((1, 2.0), (2, 4.0), (3, 8.0), (10, 60.0), (1000, 60.0)):
        delays = [policy.backoff(attempt, made) for _ in range(300)]
        assert 0.0 <= min(delays) < limit * 0.1
        assert limit * 0.9 < max(delays) <= limit


def test_hole_10_the_backoff_of_a_job_with_thousands_of_attempts_is_still_the_limit():
    @operation("polls", max_attempts=5000, backoff_seconds_max=60.0)
    async def polls() -> None: ...

    made = Registry([polls]).get("polls")
    assert made is not None
    assert 0.0 <= policy.backoff(2000, made) <= 60.0


async def test_hole_11_a_job_that_was_put_off_survives_the_process_that_put_it_off(queue, clock):
    """The delay is the row's `run_after`, not a timer in the memory of a process."""
    id = await put_one(queue)
    await clock.advance(queue, 0)
    assert await snooze(queue, await take_one(queue), 60)
    await clock.advance(queue, 59)
    assert await take(queue, worker="a process started later") == []
    await clock.advance(queue, 1)
    assert (await take_one(queue, worker="a process started later")).id == id


async def test_hole_12_an_operation_resumes_from_its_last_checkpoint(queue, pool, clock):
    """The engine's part: fenced progress outlives the worker, and `ctx.progress_current` hands it to the next."""
    begun_at = []

    @operation("lines")
    async def lines(ctx: Context) -> Snooze | str:
        begun_at.append(ctx.progress_current)
        start = ctx.progress_current or 0
        if start >= 200:
            return "all lines"
        return Snooze(0, progress=(start + 100, 200))

    (id,) = await put(queue, NewJob(lines), operations=Registry([lines]))
    doomed = await queue.claim_job("doomed", id, ["lines"])
    await queue.progress([(id, doomed.claim, 50, 200)])
    await dead(queue, clock, doomed)
    worker = make_worker(pool, lines, queue=queue)
    while await worker.run_once():
        pass
    await worker.close()
    assert begun_at == [50, 150, 250]
    assert (await queue.get(id)).result == "all lines"
