"""The claim of one job, races for keys, recovery by hand, and the safety poller."""

import asyncio
import dataclasses
from collections import Counter

import pytest

from batchwright import Conflict, JobStatus, NewJob, NotFound, operation
from batchwright.db.database import Pool
from batchwright.engine.queue import EngineSettings
from batchwright.errors import UniqueViolation
from tests.engine.steps import another, blocked, claim_one, end, hand_over, pause, retry, snapshot, status
from tests.support import (
    BASIC,
    DATABASE,
    event_names,
    finished,
    listed,
    make_worker,
    put,
    put_one,
    raw,
    run_job,
    succeed,
    take,
    take_one,
    working,
)

TERMINAL = [JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED]


# claim_job success path


async def test_claim_job_makes_the_job_running_and_current_and_unsets_the_previous_current_row(queue):
    previous, job = await put(queue, NewJob("noop", exclusive_key="2026"), NewJob("noop", exclusive_key="2026"))
    await succeed(queue, await claim_one(queue, previous))
    assert (await queue.get(previous)).is_current

    claim = await queue.claim_job("pod-1", job, BASIC.names())

    assert claim is not None
    row = await queue.get(job)
    assert (row.status, row.is_current, row.locked_by, row.attempts) == (JobStatus.RUNNING, True, "pod-1", 1)
    assert row.locked_at is not None
    assert row.lease_until is not None
    assert not (await queue.get(previous)).is_current
    assert (await queue.get(previous)).status is JobStatus.SUCCEEDED


async def test_claim_job_leaves_the_current_rows_of_other_keys_and_tenants_alone(queue):
    ids = await put(
        queue,
        NewJob("noop", exclusive_key="2025"),
        NewJob("noop", exclusive_key="2026", tenant="other"),
        NewJob("noop", exclusive_key="2026"),
    )
    for id in ids[:2]:
        await succeed(queue, await claim_one(queue, id))
    await claim_one(queue, ids[2])
    assert [job.is_current for job in await queue.get_many(ids)] == [True, True, True]


async def test_run_job_returns_true_and_runs_the_operation(queue, pool):
    id = await put_one(queue, payload={"n": 5})
    worker = make_worker(pool)
    assert await run_job(worker, id) is True
    await worker.close()
    assert (await queue.get(id)).result == 5


# claim_job duplicate


async def test_a_second_claim_of_the_same_job_is_refused_and_changes_nothing(queue):
    id = await put_one(queue)
    await claim_one(queue, id)
    before = await snapshot(queue, id)
    assert await queue.claim_job("pod-2", id, BASIC.names()) is None
    assert await snapshot(queue, id) == before


# claim_job exceeds max_attempts


async def test_claim_job_refuses_a_job_whose_attempts_are_used_up(queue):
    id = await put_one(queue, max_attempts=2)
    for _ in range(2):
        assert await retry(queue, await claim_one(queue, id))
    before = await snapshot(queue, id)
    assert await queue.claim_job("w1", id, BASIC.names()) is None
    assert await take(queue) == []
    assert await snapshot(queue, id) == before


async def test_claim_job_accepts_a_job_with_its_last_attempt_left(queue):
    id = await put_one(queue, max_attempts=2)
    assert await retry(queue, await claim_one(queue, id))
    assert (await claim_one(queue, id)).attempts == 2


# claim_job already FINISHED


@pytest.mark.parametrize("how", TERMINAL)
async def test_claim_job_refuses_a_job_that_has_ended(queue, how):
    id = await put_one(queue)
    await end(queue, await claim_one(queue, id), how)
    before = await snapshot(queue, id)
    assert await queue.claim_job("w1", id, BASIC.names()) is None
    assert await snapshot(queue, id) == before


async def test_claim_job_refuses_a_job_that_does_not_exist(queue):
    id = await put_one(queue)
    await raw(queue, "DELETE FROM batchwright.job WHERE id = %(id)s", id=id)
    assert await queue.claim_job("w1", id, BASIC.names()) is None


async def test_claim_job_honours_run_after_and_pause(queue, clock):
    id = await put_one(queue, delay_seconds=60)
    assert await queue.claim_job("w1", id, BASIC.names()) is None
    await clock.advance(queue, 61)
    await pause(queue)
    assert await queue.claim_job("w1", id, BASIC.names()) is None
    await pause(queue, paused=False)
    assert (await claim_one(queue, id)).id == id


# Concurrent claim race (real Postgres)


async def test_of_two_concurrent_claims_for_one_key_exactly_one_wins(queue, pool):
    async with another(queue, pool) as second:
        winners = Counter()
        for n in range(60):
            first_id, second_id = await put(
                queue, NewJob("noop", exclusive_key=["race", n]), NewJob("noop", exclusive_key=["race", n])
            )
            claims = await asyncio.gather(
                queue.claim_job("pod-1", first_id, BASIC.names()),
                second.claim_job("pod-2", second_id, BASIC.names()),
            )
            won = [claim for claim in claims if claim is not None]
            assert len(won) == 1, f"round {n}: {len(won)} of two claims for one key won"
            winners[won[0].id == first_id] += 1
            loser = await queue.get(second_id if won[0].id == first_id else first_id)
            assert (loser.status, loser.is_current, loser.attempts) == (JobStatus.QUEUED, False, 0)
            assert await event_names(queue, loser.id) == ["job.enqueued"]


async def test_of_two_concurrent_claims_of_one_job_exactly_one_wins(queue, pool):
    async with another(queue, pool) as second:
        for _ in range(60):
            id = await put_one(queue)
            claims = await asyncio.gather(
                queue.claim_job("pod-1", id, BASIC.names()), second.claim_job("pod-2", id, BASIC.names())
            )
            assert [claim is None for claim in claims].count(True) == 1
            assert (await queue.get(id)).claims == 1


async def test_concurrent_claims_of_different_keys_both_win(queue, pool):
    async with another(queue, pool) as second:
        one, two = await put(queue, NewJob("noop", exclusive_key="a"), NewJob("noop", exclusive_key="b"))
        claims = await asyncio.gather(
            queue.claim_job("pod-1", one, BASIC.names()), second.claim_job("pod-2", two, BASIC.names())
        )
        assert None not in claims


async def test_concurrent_batch_claims_never_run_two_jobs_of_one_key(queue, pool):
    async with another(queue, pool) as second:
        await put(queue, *[NewJob("noop", exclusive_key=["k", n % 7]) for n in range(140)])
        done = 0
        while done < 140:
            batches = await asyncio.gather(take(queue, 50, worker="pod-1"), take(second, 50, worker="pod-2"))
            running = await raw(
                queue,
                "SELECT exclusive_key, count(*) FROM batchwright.job WHERE status = 'RUNNING' GROUP BY 1",
            )
            assert all(n == 1 for _, n in running)
            for worker, batch in zip(("pod-1", "pod-2"), batches, strict=True):
                for claim in batch:
                    assert await succeed(queue, claim, worker=worker)
                    done += 1
        assert all(job.claims == 1 for job in await listed(queue, limit=200))


async def test_a_claim_that_violates_the_unique_index_is_rolled_back_and_refused(queue, pool):
    """The other claim takes no lock of the key, so only the index can refuse this one."""
    old, mine, theirs = await put(queue, *[NewJob("noop", exclusive_key="2026") for _ in range(3)])
    await succeed(queue, await claim_one(queue, old))
    async with pool.transaction() as other:
        await other.rows("UPDATE batchwright.job SET is_current = false WHERE id = %(id)s", {"id": old})
        claiming = asyncio.create_task(queue.claim_job("pod-1", mine, BASIC.names()))
        await blocked(queue, 1)
        await other.rows(
            "UPDATE batchwright.job SET status = 'RUNNING', is_current = true, locked_by = 'pod-2', locked_at = now(), "
            "lease_until = now() + interval '30 seconds', claims = 1, attempts = 1 WHERE id = %(id)s",
            {"id": theirs},
        )
    assert await claiming is None
    row = await queue.get(mine)
    assert (row.status, row.attempts, row.claims, row.is_current) == (JobStatus.QUEUED, 0, 0, False)
    assert await event_names(queue, mine) == ["job.enqueued"]


async def test_a_batch_claim_that_violates_the_unique_index_still_returns_the_jobs_without_a_key(queue, pool):
    old, _, theirs = await put(queue, *[NewJob("noop", exclusive_key="2026") for _ in range(3)])
    await succeed(queue, await claim_one(queue, old))
    plain = await put_one(queue)
    async with pool.transaction() as other:
        await other.rows("UPDATE batchwright.job SET is_current = false WHERE id = %(id)s", {"id": old})
        claiming = asyncio.create_task(take(queue))
        await blocked(queue, 1)
        await other.rows(
            "UPDATE batchwright.job SET status = 'RUNNING', is_current = true, locked_by = 'pod-2', locked_at = now(), "
            "lease_until = now() + interval '30 seconds', claims = 1, attempts = 1 WHERE id = %(id)s",
            {"id": theirs},
        )
    assert [claim.id for claim in await claiming] == [plain]


async def test_the_database_itself_refuses_a_second_current_row_of_a_key(queue):
    one, two = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    await claim_one(queue, one)
    with pytest.raises(UniqueViolation):
        await raw(queue, "UPDATE batchwright.job SET is_current = true WHERE id = %(id)s", id=two)


# The sequential case, which the source's own test does not cover


async def test_a_claim_while_another_job_of_the_key_runs_is_refused_and_the_holder_stays_current(queue):
    holder, second = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    claim = await claim_one(queue, holder)
    before = await snapshot(queue, holder)
    assert await queue.claim_job("pod-2", second, BASIC.names()) is None
    assert await take(queue) == []
    assert await snapshot(queue, holder) == before
    assert await succeed(queue, claim)
    assert (await take_one(queue)).id == second


# claim guards: run_sync_task and run_recalculation_task


async def test_a_worker_whose_claim_is_refused_does_not_call_the_operation(queue, pool):
    called = []

    @operation("noop")
    async def spy(n: int = 0, note: str | None = None) -> None:
        called.append(n)

    id = await put_one(queue)
    await claim_one(queue, id, worker="pod-2")
    worker = make_worker(pool, spy)
    assert await run_job(worker, id) is False
    await worker.close()
    assert called == []
    assert await status(queue, id) is JobStatus.RUNNING


async def test_a_worker_does_not_call_the_operation_while_another_job_of_the_key_runs(queue, pool):
    called = []

    @operation("noop")
    async def spy(n: int = 0, note: str | None = None) -> None:
        called.append(n)

    holder, second = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    claim = await claim_one(queue, holder, worker="pod-2")
    worker = make_worker(pool, spy)
    assert await run_job(worker, second) is False
    assert await worker.run_once() == 0
    assert called == []
    assert await succeed(queue, claim, worker="pod-2")
    assert await run_job(worker, second) is True
    await worker.close()
    assert called == [0]


# POST /jobs/{id}/recover stale


async def test_recover_frees_a_job_whose_lease_has_expired_and_resets_its_attempts(queue, clock):
    id = await put_one(queue, max_attempts=3)
    assert await retry(queue, await claim_one(queue, id))
    zombie = await claim_one(queue, id)
    now = await clock.advance(queue, 31)

    await queue.recover(id)

    row = await queue.get(id)
    assert (row.status, row.attempts, row.rescues, row.run_after) == (JobStatus.QUEUED, 0, 0, now)
    assert (row.locked_by, row.locked_at, row.lease_until) == (None, None, None)
    assert (await queue.events(id))[-1].event == "job.recovered"
    assert not await succeed(queue, zombie), "the old worker must be fenced"
    assert (await claim_one(queue, id)).claim == zombie.claim + 1
    assert not await succeed(queue, zombie), "the old worker must stay fenced when the job runs again"


async def test_recover_frees_a_job_locked_longer_than_the_stale_timeout_even_if_its_lease_is_alive(queue, clock):
    id = await put_one(queue)
    claim = await claim_one(queue, id)
    await clock.advance(queue, queue.settings.stale_job_timeout_seconds + 1)
    assert await queue.renew([(id, claim.claim)]) == {id}
    await queue.recover(id)
    assert await status(queue, id) is JobStatus.QUEUED


# POST /jobs/{id}/recover not stale


async def test_recover_refuses_a_job_whose_lock_is_not_stale(queue, clock):
    id = await put_one(queue)
    claim = await claim_one(queue, id)
    await clock.advance(queue, queue.settings.stale_job_timeout_seconds - 1)
    await queue.renew([(id, claim.claim)])
    before = await snapshot(queue, id)
    with pytest.raises(Conflict, match="its lease is alive, held by w1"):
        await queue.recover(id)
    assert await snapshot(queue, id) == before
    assert await succeed(queue, claim)


async def test_recover_refuses_jobs_that_no_worker_holds(queue, clock):
    queued, waiting, done = await put(queue, *[NewJob("noop") for _ in range(3)])
    await hand_over(queue, await claim_one(queue, waiting), 1)
    await succeed(queue, await claim_one(queue, done))
    await clock.advance(queue, 3600)
    for id, why in ((queued, "it is QUEUED"), (waiting, "it waits for its children"), (done, "it is SUCCEEDED")):
        with pytest.raises(Conflict, match=why):
            await queue.recover(id)


async def test_recover_of_a_job_that_does_not_exist_is_not_a_conflict(queue):
    id = await put_one(queue)
    await raw(queue, "DELETE FROM batchwright.job WHERE id = %(id)s", id=id)
    with pytest.raises(NotFound):
        await queue.recover(id)


# Poller picks up orphan job


async def test_the_poller_picks_up_an_orphan_job_although_no_doorbell_rang(queue, pool):
    id = await put_one(queue, payload={"n": 11})
    async with working(pool) as worker:
        assert (await finished(queue, id)).result == 11
        later = await put_one(queue, payload={"n": 12})
        job = await finished(queue, later)
        assert job.result == 12
        assert (await queue.events(later))[1].worker == worker.id


async def test_the_poller_picks_up_a_job_of_a_crashed_pod(queue, pool):
    quick = EngineSettings(lease_seconds=1.0, rescue_jitter_seconds=0.0)
    id = await put_one(queue, payload={"n": 13})
    await claim_one(queue, id, worker="crashed-pod")
    await raw(queue, "UPDATE batchwright.job SET lease_until = now() - interval '1 second'")
    async with working(pool, engine=quick):
        job = await finished(queue, id)
    assert (job.result, job.attempts, job.claims) == (13, 1, 2)
    assert "job.rescued" in await event_names(queue, id)


async def test_several_pollers_never_start_one_job_twice(queue, pool):
    ids = await put(queue, *[NewJob("noop", {"n": n}) for n in range(300)])
    async with Pool(dataclasses.replace(DATABASE, pool_size=2), pool.url) as second, working(pool), working(second):
        for id in ids:
            await finished(queue, id)
    assert {job.claims for job in await queue.get_many(ids)} == {1}
