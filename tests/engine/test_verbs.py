"""Every verb: what it does, and what it must not do."""

import asyncio
import random
from collections import Counter
from datetime import timedelta

import pytest

from batchwright import Conflict, Context, JobStatus, NewJob, NotFound, Wait, operation
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import new_id
from batchwright.engine.outcomes import Settle
from batchwright.engine.queue import Lane, Watermark
from batchwright.errors import Fenced, InvalidInput
from batchwright.operations.registry import Registry
from tests.engine.steps import (
    another,
    blocked,
    claim_one,
    dead,
    end,
    hand_over,
    pause,
    release,
    retry,
    snapshot,
    status,
)
from tests.support import (
    BASIC,
    event_names,
    fail,
    listed,
    make_worker,
    noop,
    other,
    put,
    put_one,
    raw,
    run_job,
    snooze,
    succeed,
    take,
    take_one,
)

QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobStatus


# enqueue ------------------------------------------------------------------------------------------------------------


async def test_enqueue_inserts_many_and_returns_ids_in_the_order_of_the_list(queue):
    new = [NewJob("noop", {"n": n}) for n in range(2000)]
    rows = await Catalog(queue.database, BASIC).prepare(new)
    answers = await queue.enqueue(rows)
    assert answers == [(job.id, True) for job in new]
    assert [claim.payload["n"] for claim in sorted(await take(queue, 2000), key=lambda claim: claim.id)] == list(
        range(2000)
    )
    events = await raw(queue, "SELECT count(*) FROM batchwright.job_event WHERE event = 'job.enqueued'")
    assert events == [(2000,)]


async def test_jobs_enqueued_together_are_taken_in_the_order_of_the_list(queue):
    ids = await put(queue, *[NewJob("noop") for _ in range(30)])
    assert [(await take_one(queue, slots=1)).id for _ in range(30)] == ids


async def test_enqueue_of_nothing_does_nothing(queue):
    assert await queue.enqueue([]) == []


async def test_an_enqueue_whose_answer_was_lost_can_be_repeated(queue):
    new = [NewJob("noop", {"n": n}) for n in range(3)]
    rows = await Catalog(queue.database, BASIC).prepare(new)
    await queue.enqueue(rows)
    assert await queue.enqueue(rows) == [(job.id, False) for job in new]
    assert len(await listed(queue)) == 3
    assert await event_names(queue, new[0].id) == ["job.enqueued"]


async def test_the_same_idempotency_key_and_body_return_the_first_job(queue):
    first = await put_one(queue, payload={"n": 1}, idempotency_key="x")
    assert await put_one(queue, payload={"n": 1}, idempotency_key="x") == first
    await succeed(queue, await take_one(queue))
    assert await put_one(queue, payload={"n": 1}, idempotency_key="x") == first, (
        "the first job is returned even after it has ended"
    )


async def test_the_same_idempotency_key_twice_in_one_call_makes_one_job(queue):
    one, two, three = await put(
        queue, NewJob("noop", idempotency_key="x"), NewJob("noop", idempotency_key="x"), NewJob("noop")
    )
    assert one == two != three
    assert len(await listed(queue)) == 2


async def test_the_same_idempotency_key_with_another_body_is_a_conflict(queue):
    first = await put_one(queue, payload={"n": 1}, idempotency_key="x")
    for changed in (
        NewJob("noop", {"n": 2}, idempotency_key="x"),
        NewJob("other", {"n": 1}, idempotency_key="x"),
        NewJob("noop", {"n": 1}, idempotency_key="x", queue="elsewhere"),
        NewJob("noop", {"n": 1}, idempotency_key="x", exclusive_key="k"),
    ):
        with pytest.raises(Conflict, match="'x' was used before with another body") as refused:
            await put(queue, changed)
        assert refused.value.holder == str(first)
    assert len(await listed(queue)) == 1


async def test_an_enqueue_that_is_refused_for_one_job_inserts_none_of_them(queue):
    await put_one(queue, payload={"n": 1}, idempotency_key="x")
    with pytest.raises(Conflict):
        await put(queue, NewJob("noop", {"n": 5}), NewJob("noop", {"n": 2}, idempotency_key="x"))
    assert len(await listed(queue)) == 1


async def test_idempotency_keys_are_separate_for_each_tenant(queue):
    one = await put_one(queue, payload={"n": 1}, idempotency_key="x", tenant="a")
    two = await put_one(queue, payload={"n": 2}, idempotency_key="x", tenant="b")
    assert one != two


async def test_concurrent_enqueues_of_one_idempotency_key_make_one_job(queue, pool):
    async with another(queue, pool) as second:
        for n in range(30):
            one, two = await asyncio.gather(
                put_one(queue, idempotency_key=str(n)), put_one(second, idempotency_key=str(n))
            )
            assert one == two
    assert len(await listed(queue, limit=100)) == 30


@pytest.mark.parametrize("policy", ["reject", "coalesce", "supersede"])
async def test_an_idempotent_repeat_returns_the_first_job_whatever_the_policy_of_its_key(queue, policy):
    """The policy applies to other jobs of the key, not to the same enqueue sent twice."""
    first = await put_one(queue, exclusive_key="k", on_held=policy, idempotency_key="x")
    assert await put_one(queue, exclusive_key="k", on_held=policy, idempotency_key="x") == first
    claim = await claim_one(queue, first)
    assert await put_one(queue, exclusive_key="k", on_held=policy, idempotency_key="x") == first
    assert await status(queue, first) is RUNNING
    assert await succeed(queue, claim)
    assert len(await listed(queue)) == 1


async def test_an_old_enqueue_sent_again_does_not_supersede_its_successor(queue):
    old, new = (NewJob("noop", exclusive_key="k", on_held="supersede") for _ in range(2))
    await put(queue, old)
    await put(queue, new)
    assert await put(queue, old) == [old.id]
    assert [await status(queue, job.id) for job in (old, new)] == [CANCELLED, QUEUED]


async def test_run_after_is_never_before_now_and_never_after_the_deadline(queue, clock):
    now = await clock.advance(queue, 0)
    hour = timedelta(hours=1)
    past, later, clamped, missed, delayed = await queue.get_many(
        await put(
            queue,
            NewJob("noop", run_after=now - hour),
            NewJob("noop", run_after=now + hour),
            NewJob("noop", run_after=now + hour, deadline=now + hour / 2),
            NewJob("noop", run_after=now + hour, deadline=now - hour),
            NewJob("noop", delay_seconds=90, deadline=timedelta(seconds=120)),
        )
    )
    assert past.run_after == now
    assert later.run_after == now + hour
    assert clamped.run_after == clamped.deadline == now + hour / 2
    assert (missed.run_after, missed.deadline) == (now, now - hour)
    assert (delayed.run_after, delayed.deadline) == (now + timedelta(seconds=90), now + timedelta(seconds=120))


@pytest.mark.parametrize("give_back", [snooze, retry])
async def test_a_job_delayed_beyond_its_deadline_becomes_due_at_the_deadline(queue, clock, give_back):
    now = await clock.advance(queue, 0)
    soon, late, free = await put(
        queue,
        NewJob("noop", deadline=timedelta(seconds=100)),
        NewJob("noop", deadline=timedelta(seconds=30)),
        NewJob("noop"),
    )
    for claim in await take(queue):
        assert await give_back(queue, claim, 60)
    at = {job.id: (job.run_after - now).total_seconds() for job in await queue.get_many([soon, late, free])}
    assert at == {soon: 60, late: 30, free: 60}


# claim --------------------------------------------------------------------------------------------------------------


async def test_claim_takes_by_priority_then_by_run_after(queue, clock):
    await clock.advance(queue, 0)
    specs = [(5, 0), (0, 20), (9, 0), (5, 10), (0, 5)]
    ids = await put(queue, *[NewJob("noop", priority=p, delay_seconds=d) for p, d in specs])
    await clock.advance(queue, 60)
    order = [ids.index((await take_one(queue, slots=1)).id) for _ in specs]
    assert order == [4, 1, 0, 3, 2]


async def test_claim_does_not_take_what_is_not_due(queue, clock):
    id = await put_one(queue, delay_seconds=10)
    assert await take(queue) == []
    await clock.advance(queue, 9)
    assert await take(queue) == []
    await clock.advance(queue, 2)
    assert [claim.id for claim in await take(queue)] == [id]


async def test_claim_leaves_paused_queues_alone_and_their_jobs_where_they_are(queue):
    here, there = await put(queue, NewJob("noop"), NewJob("noop", queue="slow"))
    await pause(queue, "slow")
    assert [claim.id for claim in await take(queue, queues=("default", "slow"))] == [here]
    before = await snapshot(queue, there)
    assert await take(queue, queues=("slow",)) == []
    assert await snapshot(queue, there) == before
    await pause(queue, "slow", paused=False)
    assert (await take_one(queue, queues=("slow",))).id == there


async def test_claim_leaves_jobs_of_unknown_types_for_a_worker_that_knows_them(queue):
    strange, known = await put(queue, NewJob("other"), NewJob("noop"))
    before = await snapshot(queue, strange)
    assert [claim.id for claim in await take(queue, types=["noop"])] == [known]
    assert await queue.claim_job("w1", strange, ["noop"]) is None
    assert await queue.unknown_types(["noop"]) == {"other": 1}
    assert await snapshot(queue, strange) == before
    assert (await take_one(queue, types=["other"])).id == strange


async def test_claim_takes_no_more_than_its_slots(queue):
    await put(queue, *[NewJob("noop", priority=n % 3) for n in range(30)])
    assert len(await take(queue, 7)) == 7
    assert len(await take(queue, 100)) == 23


async def test_a_queues_quota_holds_over_all_its_priorities(queue):
    await put(queue, *[NewJob("noop", queue="slow", priority=n % 10) for n in range(20)])
    await put(queue, *[NewJob("noop", priority=n % 10) for n in range(20)])
    lanes = [Lane(name, p, {"slow": 3, "default": 8}[name]) for p in range(10) for name in ("slow", "default")]
    claimed = await queue.claim("w1", lanes, BASIC.names(), 100)
    assert Counter(claim.queue for claim in claimed.jobs) == {"slow": 3, "default": 8}
    assert sorted(claim.priority for claim in claimed.jobs if claim.queue == "slow") == [0, 0, 1]


async def test_a_worker_runs_no_more_jobs_of_a_queue_than_its_limit(queue, pool):
    running, most = Counter(), Counter()

    @operation("noop")
    async def count(ctx: Context, n: int = 0, note: str | None = None) -> None:
        running[note] += 1
        most[note] = max(most[note], running[note])
        await asyncio.sleep(0)
        running[note] -= 1

    for name in ("slow", "default"):
        await put(queue, *[NewJob("noop", {"note": name}, queue=name) for _ in range(10)])
    worker = make_worker(pool, count, queue_limits={"slow": 2}, concurrency=6)
    while await worker.run_once():
        pass
    await worker.close()
    assert most["slow"] <= 2
    assert most["default"] > 2
    assert len(await listed(queue, status=SUCCEEDED, limit=100)) == 20


async def test_claim_behind_a_watermark_sees_only_what_comes_after_it(queue, clock):
    await clock.advance(queue, 0)
    first, second = await put(queue, NewJob("noop"), NewJob("noop", delay_seconds=1))
    await clock.advance(queue, 2)
    row = await queue.get(first)
    claimed = await queue.claim("w1", [Lane("default", 5, 9, Watermark(row.run_after, row.id))], BASIC.names(), 9)
    assert [claim.id for claim in claimed.jobs] == [second]
    assert claimed.at == clock.time


async def test_a_claim_without_lanes_returns_the_databases_time(queue, clock):
    now = await clock.advance(queue, 0)
    assert await queue.claim("w1", [Lane("default", 5, 9)], BASIC.names(), 9) == (now, [], False)


async def test_a_claim_returns_everything_a_worker_needs(queue, clock):
    now = await clock.advance(queue, 0)
    id = await put_one(queue, payload={"n": 3}, priority=2, tenant="t", deadline=timedelta(hours=1), traceparent="00-1")
    claim = await take_one(queue)
    assert (claim.id, claim.claim, claim.attempts, claim.max_attempts) == (id, 1, 1, 3)
    assert (claim.payload["n"], claim.priority, claim.tenant, claim.queue) == (3, 2, "t", "default")
    assert (claim.pipeline_id, claim.parent_job_id, claim.deadline) == (id, None, now + timedelta(hours=1))
    assert (claim.traceparent, claim.waits, claim.claimed_at) == ("00-1", 0, now)


# renew --------------------------------------------------------------------------------------------------------------


async def test_renew_lengthens_the_leases_of_live_claims_only(queue, clock):
    await put(queue, *[NewJob("noop") for _ in range(4)])
    claims = await take(queue)
    live, settled, cancelled, waiting = claims
    await succeed(queue, settled)
    await queue.cancel([cancelled.id])
    await hand_over(queue, waiting, 1)
    now = await clock.advance(queue, 20)
    held = [(claim.id, claim.claim) for claim in claims] + [(live.id, live.claim + 1)]
    assert await queue.renew(held) == {live.id}
    assert (await queue.get(live.id)).lease_until == now + timedelta(seconds=30)


async def test_renew_skips_a_row_that_another_session_is_changing(queue, pool):
    id = await put_one(queue)
    claim = await take_one(queue)
    async with pool.transaction() as session:
        await session.rows("SELECT FROM batchwright.job WHERE id = %(id)s FOR UPDATE", {"id": id})
        assert await queue.renew([(id, claim.claim)]) == set()
    assert await queue.renew([(id, claim.claim)]) == {id}


async def test_holdings_are_the_jobs_that_a_worker_has_locked(queue):
    await put(queue, *[NewJob("noop") for _ in range(4)])
    live, settled, cancelled, _ = await take(queue)
    await succeed(queue, settled)
    await queue.cancel([cancelled.id])
    found = await queue.holdings("w1")
    assert found[(live.id, live.claim)] is RUNNING
    assert found[(cancelled.id, cancelled.claim)] is CANCELLED
    assert len(found) == 3
    assert await queue.holdings("w2") == {}


# settles ------------------------------------------------------------------------------------------------------------

SETTLES = [succeed, fail, snooze, retry, release]


async def test_every_settle_does_its_move_once(queue):
    targets = {succeed: SUCCEEDED, fail: FAILED, snooze: QUEUED, retry: QUEUED, release: QUEUED}
    for settle, target in targets.items():
        id = await put_one(queue)
        claim = await claim_one(queue, id)
        assert await settle(queue, claim)
        row = await queue.get(id)
        assert (row.status, row.locked_by, row.lease_until) == (target, None, None), settle.__name__
        before = await snapshot(queue, id)
        for again in SETTLES:
            assert not await again(queue, claim), f"{again.__name__} after {settle.__name__}"
        assert await snapshot(queue, id) == before
        await queue.cancel([id])


async def test_every_settle_is_fenced_by_a_newer_claim(queue, clock):
    id = await put_one(queue)
    zombie = await take_one(queue)
    await dead(queue, clock, zombie)
    again = await take_one(queue, worker="w2")
    before = await snapshot(queue, id)
    for settle in SETTLES:
        assert not await settle(queue, zombie), settle.__name__
    with pytest.raises(Fenced):
        await hand_over(queue, zombie, 1)
    assert await snapshot(queue, id) == before
    assert await succeed(queue, again, worker="w2")


async def test_every_settle_is_fenced_after_a_rescue(queue, clock):
    id = await put_one(queue)
    zombie = await take_one(queue)
    await dead(queue, clock, zombie)
    before = await snapshot(queue, id)
    for settle in SETTLES:
        assert not await settle(queue, zombie), settle.__name__
    assert await snapshot(queue, id) == before


async def test_a_settle_after_the_lease_has_expired_is_accepted_if_the_job_was_not_rescued(queue, clock):
    await put_one(queue)
    claim = await take_one(queue)
    await clock.advance(queue, 3600)
    assert await succeed(queue, claim)


async def test_attempts_count_failures_only(queue):
    id = await put_one(queue, max_attempts=9)
    for settle, expected in ((snooze, 0), (release, 0), (retry, 1), (snooze, 1), (retry, 2)):
        assert await settle(queue, await claim_one(queue, id))
        assert (await queue.get(id)).attempts == expected, settle.__name__


async def test_a_batch_of_different_settles_is_one_commit_and_each_is_fenced_separately(queue):
    await put(queue, *[NewJob("noop") for _ in range(5)])
    claims = await take(queue)
    await queue.cancel([claims[0].id])
    error = {"kind": "fatal", "code": "c", "type": "t", "message": "m"}
    done = {"result": 1, "progress_current": None, "progress_total": None}
    later = {"delay_seconds": 0.0, "reason": None, "error_kind": None}
    settles = [
        Settle("succeed", claims[0], done),
        Settle("succeed", claims[1], done),
        Settle("fail", claims[2], {"error": error}),
        Settle("snooze", claims[3], later),
        Settle("retry", claims[4], {"error": error, "delay_seconds": 0.0}),
    ]
    assert await queue.settle(settles, "w1") == {claim.id for claim in claims[1:]}
    assert [await status(queue, claim.id) for claim in claims] == [CANCELLED, SUCCEEDED, FAILED, QUEUED, QUEUED]
    commits = await raw(queue, "SELECT count(DISTINCT xmin::text) FROM batchwright.job WHERE status <> 'CANCELLED'")
    assert commits == [(1,)]


async def test_success_clears_the_error_of_an_earlier_try(queue):
    id = await put_one(queue)
    await retry(queue, await take_one(queue))
    assert (await queue.get(id)).error["message"] == "not now"
    await succeed(queue, await take_one(queue))
    assert (await queue.get(id)).error is None


# wait and join ------------------------------------------------------------------------------------------------------


async def test_a_claim_can_wait_only_once(queue):
    parent = await put_one(queue)
    claim = await take_one(queue)
    await hand_over(queue, claim, 2)
    with pytest.raises(Fenced):
        await hand_over(queue, claim, 2)
    assert await queue.count_children(parent) == {QUEUED: 2}
    assert (await queue.get(parent)).children_open == 2


async def test_a_waiting_parent_cannot_be_settled_renewed_rescued_or_claimed(queue, clock):
    parent = await put_one(queue)
    claim = await take_one(queue)
    await hand_over(queue, claim, [NewJob("other")])
    before = await snapshot(queue, parent)
    for settle in SETTLES:
        assert not await settle(queue, claim), settle.__name__
    assert await queue.renew([(parent, claim.claim)]) == set()
    await clock.advance(queue, 3600)
    assert await queue.rescue() == []
    assert await take(queue, types=["noop"]) == []
    assert await queue.claim_job("w1", parent, BASIC.names()) is None
    assert await snapshot(queue, parent) == before


@pytest.mark.parametrize("on_join", ["close", "resume"])
async def test_waiting_for_no_children_joins_at_once(queue, on_join):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 0, on_join=on_join, result="nothing to do")
    row = await queue.get(parent)
    assert row.status is (SUCCEEDED if on_join == "close" else QUEUED)
    assert (row.children_open, row.attempts, row.waits) == (0, 0, 1)
    assert (await event_names(queue, parent))[-1] == "job.joined"
    if on_join == "close":
        assert (row.result, row.finished_at is not None) == ("nothing to do", True)
    else:
        assert (await take_one(queue)).waits == 1


async def test_a_job_that_waits_for_no_children_counts_for_its_own_parent(queue):
    grandparent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 1)
    await hand_over(queue, await take_one(queue), 0)
    assert await status(queue, grandparent) is SUCCEEDED


@pytest.mark.parametrize(
    ("allowed", "failures", "expected"),
    [(0, 0, SUCCEEDED), (0, 1, FAILED), (1, 1, SUCCEEDED), (1, 2, FAILED), (True, 3, SUCCEEDED)],
)
async def test_a_parent_tolerates_allow_failures_and_not_one_more(queue, allowed, failures, expected):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 3, allow_failures=allowed)
    claims = await take(queue)
    for n, claim in enumerate(claims):
        assert await status(queue, parent) is RUNNING, "no fail-fast"
        await end(queue, claim, FAILED if n < failures else SUCCEEDED)
    row = await queue.get(parent)
    assert (row.status, row.children_failed, row.children_open) == (expected, failures, 0)
    if expected is FAILED:
        assert row.error["code"] == "children_failed"
        assert row.error["message"] == f"{failures} of 3 children did not succeed"


async def test_too_many_failures_fail_a_parent_that_would_be_resumed(queue):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 2, on_join="resume")
    for claim in await take(queue):
        await fail(queue, claim)
    assert (await queue.get(parent)).error["code"] == "children_failed"


async def test_a_resumed_parent_may_wait_again_and_counts_its_second_children_separately(queue):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 3, on_join="resume", allow_failures=True)
    for claim in await take(queue):
        await fail(queue, claim)
    again = await take_one(queue)
    assert (again.id, again.waits) == (parent, 1)
    assert await queue.joined(parent, 1) == (3, 0, 3, 0)
    await hand_over(queue, again, 2)
    for claim in await take(queue):
        await succeed(queue, claim)
    row = await queue.get(parent)
    assert (row.status, row.waits, row.children_failed) == (SUCCEEDED, 2, 0)
    assert await queue.joined(parent, 2) == (2, 2, 0, 0)


@pytest.mark.parametrize("how", ["fail", "cancel", "expire", "poison", "abandoned"])
async def test_every_way_to_end_badly_counts_for_the_parent(queue, clock, how):
    parent = await put_one(queue)
    options = {"expire": {"deadline": timedelta(seconds=5)}, "abandoned": {"max_attempts": 1}}.get(how, {})
    (child,) = await hand_over(queue, await take_one(queue), [NewJob("noop", **options)])
    if how == "fail":
        await fail(queue, await take_one(queue))
    elif how == "cancel":
        await queue.cancel([child])
    elif how == "expire":
        await clock.advance(queue, 6)
        assert await queue.expire() == 1
    else:
        for n in range(3 if how == "poison" else 1):
            await dead(queue, clock, await claim_one(queue, child, suspect=n == 2))
    row = await queue.get(parent)
    assert (row.status, row.children_open, row.children_failed) == (FAILED, 0, 1)


async def test_three_levels_end_together_from_the_bottom_up(queue):
    top = await put_one(queue)
    middles = await hand_over(queue, await take_one(queue), 2)
    for middle in middles:
        await hand_over(queue, await claim_one(queue, middle), 2)
    leaves = await take(queue)
    assert len(leaves) == 4
    done = {"result": None, "progress_current": None, "progress_total": None}
    for leaf in leaves[:3]:
        assert await succeed(queue, leaf)
    assert await status(queue, top) is RUNNING
    assert await queue.settle([Settle("succeed", leaves[3], done)], "w1") == {leaves[3].id}
    assert {job.status for job in await queue.get_many([top, *middles])} == {SUCCEEDED}
    row = await queue.get(leaves[0].id)
    assert (row.pipeline_id, row.parent_job_id) == (top, middles[0])


async def test_a_failure_at_the_bottom_fails_every_level_above_that_does_not_tolerate_it(queue):
    top = await put_one(queue)
    (middle,) = await hand_over(queue, await take_one(queue), 1, allow_failures=1)
    (leaf,) = await hand_over(queue, await take_one(queue), 1)
    await fail(queue, await claim_one(queue, leaf))
    assert [await status(queue, id) for id in (leaf, middle, top)] == [FAILED, FAILED, SUCCEEDED]


async def test_two_last_children_that_wait_for_each_others_parent_lock_join_once(queue, pool):
    """The second child updates a row that has changed since its statement began."""
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 2)
    claims = await take(queue)
    async with pool.transaction() as session:
        await session.rows("SELECT FROM batchwright.job WHERE id = %(id)s FOR UPDATE", {"id": parent})
        settles = [asyncio.create_task(succeed(queue, claim)) for claim in claims]
        await blocked(queue, 2)
    assert await asyncio.gather(*settles) == [True, True]
    row = await queue.get(parent)
    assert (row.status, row.children_open, row.progress_current) == (SUCCEEDED, 0, 2)
    assert (await event_names(queue, parent)).count("job.joined") == 1


async def test_two_last_children_on_two_connections_always_join_exactly_once(queue, pool):
    async with another(queue, pool) as second:
        for n in range(40):
            on_join = ("close", "resume")[n % 2]
            parent = await put_one(queue)
            await hand_over(queue, await claim_one(queue, parent), 2, on_join=on_join, allow_failures=1)
            one, two = await take(queue)
            settle = (succeed, fail)[n % 3 == 0]
            assert await asyncio.gather(settle(queue, one), succeed(second, two)) == [True, True]
            assert await status(queue, parent) is (SUCCEEDED if on_join == "close" else QUEUED)
            assert (await event_names(queue, parent)).count("job.joined") == 1
            await queue.cancel([parent])


async def test_many_children_on_many_connections_are_counted_correctly(queue, pool):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 120, allow_failures=True)
    claims = await take(queue, 200)
    random.Random(7).shuffle(claims)
    done = {"result": None, "progress_current": None, "progress_total": None}
    error = {"kind": "fatal", "code": "c", "type": "t", "message": "m"}

    def settle(n, claim):
        return Settle("fail", claim, {"error": error}) if n % 5 == 0 else Settle("succeed", claim, done)

    batches = [[settle(n, claim) for n, claim in enumerate(claims)][start::12] for start in range(12)]
    async with another(queue, pool) as second:
        moved = await asyncio.gather(*[(queue, second)[n % 2].settle(batch, "w1") for n, batch in enumerate(batches)])
    assert sum(map(len, moved)) == 120
    row = await queue.get(parent)
    assert (row.status, row.children_failed, row.progress_current) == (SUCCEEDED, 24, 120)


async def test_a_child_that_is_not_new_is_refused_so_that_its_parent_does_not_wait_for_ever(queue):
    shared = NewJob("noop")
    taken = await put_one(queue, idempotency_key="taken")
    standing = await put_one(queue, exclusive_key="k")
    same = NewJob("noop", id=taken)
    for children in (
        [shared, shared],
        [same],
        [NewJob("noop", idempotency_key="taken")],
        [NewJob("noop", exclusive_key="k", on_held="coalesce")],
    ):
        parent = await put_one(queue)
        claim = await claim_one(queue, parent)
        with pytest.raises((InvalidInput, Conflict)):
            await hand_over(queue, claim, children)
        assert await status(queue, parent) is RUNNING
        assert (await queue.get(parent)).lease_until is not None
        assert await fail(queue, claim), "the wait changed nothing, so the operation's error can be settled"
    assert await status(queue, standing) is QUEUED


async def test_an_operation_that_waits_for_one_job_twice_fails_at_once(queue, pool):
    @operation("double")
    async def double() -> Wait:
        return Wait([NewJob("noop")] * 3)

    (id,) = await put(queue, NewJob(double), operations=Registry([double]))
    worker = make_worker(pool, double, noop, other)
    await run_job(worker, id)
    await worker.close()
    job = await queue.get(id)
    assert (job.status, job.error["kind"]) == (FAILED, "schema_invalid")
    assert "the same NewJob is twice" in job.error["message"]
    assert await queue.count_children(id) == {}


async def test_a_child_with_the_key_of_its_waiting_parent_is_refused(queue):
    """It could never start: the parent keeps the key until the child has ended."""
    parent = await put_one(queue, exclusive_key="k")
    claim = await take_one(queue)
    for policy in ("queue", "reject", "coalesce", "supersede"):
        with pytest.raises(InvalidInput, match="exclusive key"):
            await hand_over(queue, claim, [NewJob("noop", exclusive_key="k", on_held=policy)])
    assert await status(queue, parent) is RUNNING
    assert await succeed(queue, claim)


async def test_a_grandchild_with_the_key_of_its_waiting_grandparent_is_refused_too(queue):
    await put_one(queue, exclusive_key="k")
    (child,) = await hand_over(queue, await take_one(queue), [NewJob("noop")])
    claim = await take_one(queue)
    assert claim.id == child
    with pytest.raises(InvalidInput, match="exclusive key"):
        await hand_over(queue, claim, [NewJob("noop", exclusive_key="k")])
    assert await hand_over(queue, claim, [NewJob("noop", exclusive_key="other")])


async def test_children_inherit_tenant_pipeline_priority_and_deadline(queue, clock):
    now = await clock.advance(queue, 0)
    parent = await put_one(queue, tenant="t", priority=2, deadline=timedelta(seconds=60), traceparent="00-a")
    children = await hand_over(
        queue,
        await take_one(queue),
        [
            NewJob("noop", tenant="other"),
            NewJob("noop", priority=7, deadline=timedelta(seconds=30)),
            NewJob("noop", deadline=timedelta(seconds=90)),
        ],
    )
    rows = await queue.get_many(children)
    assert {(row.tenant, row.pipeline_id, row.parent_job_id, row.traceparent) for row in rows} == {
        ("t", parent, parent, "00-a")
    }
    assert [row.priority for row in rows] == [2, 7, 2]
    assert [(row.deadline - now).total_seconds() for row in rows] == [60, 30, 60]


# cancel -------------------------------------------------------------------------------------------------------------


async def test_cancel_takes_the_whole_subtree_with_grandchildren_and_held_jobs(queue):
    top = await put_one(queue)
    middle, sibling = await hand_over(queue, await take_one(queue), 2)
    leaves = await hand_over(queue, await claim_one(queue, middle), 2)
    held = await claim_one(queue, leaves[0])
    stranger = await put_one(queue)
    assert await queue.cancel([top], reason="enough") == 5
    rows = await queue.get_many([top, middle, sibling, *leaves])
    assert {(row.status, row.error["message"], row.children_open) for row in rows} == {(CANCELLED, "enough", 0)}
    assert (await queue.get(leaves[0])).locked_by == "w1", "the held job keeps its lease until its worker releases it"
    assert await status(queue, stranger) is QUEUED
    await queue.let_go([(held.id, held.claim)])
    assert (await queue.get(leaves[0])).locked_by is None
    assert await event_names(queue, leaves[0]) == ["job.enqueued", "job.started", "job.cancelled"]


async def test_cancelling_one_child_counts_for_its_parent_and_leaves_the_others(queue):
    parent = await put_one(queue)
    one, two = await hand_over(queue, await take_one(queue), 2, allow_failures=1)
    assert await queue.cancel([one]) == 1
    assert (await queue.get(parent)).children_open == 1
    assert await succeed(queue, await claim_one(queue, two))
    assert await status(queue, parent) is SUCCEEDED


async def test_a_cancelled_job_keeps_its_key_until_its_worker_has_released_it(queue, clock):
    held, next_one = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    claim = await take_one(queue)
    await queue.cancel([held])
    assert await take(queue) == []
    assert await queue.claim_job("w2", next_one, BASIC.names()) is None
    await queue.let_go([(held, claim.claim + 1)])
    assert await take(queue) == [], "another claim cannot release it"
    await queue.let_go([(held, claim.claim)])
    assert (await take_one(queue)).id == next_one


async def test_a_cancelled_jobs_key_is_free_when_its_dead_workers_lease_has_expired(queue, clock):
    held, next_one = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    await take_one(queue)
    await queue.cancel([held])
    await clock.advance(queue, 31)
    assert (await take_one(queue)).id == next_one


async def test_cancel_of_several_jobs_refuses_all_when_one_does_not_exist(queue):
    id = await put_one(queue)
    with pytest.raises(NotFound):
        await queue.cancel([id, new_id()])
    assert await status(queue, id) is QUEUED


async def test_cancel_finds_children_that_are_created_while_it_waits(queue, pool):
    """The parent creates children while the cancel waits for its lock, so they are not in the tree that was read."""
    parent = await put_one(queue)
    claim = await take_one(queue)
    async with pool.transaction() as session:
        await session.rows("SELECT FROM batchwright.job WHERE id = %(id)s FOR UPDATE", {"id": parent})
        waiting = asyncio.create_task(hand_over(queue, claim, 3))
        await blocked(queue, 1)
        cancelling = asyncio.create_task(queue.cancel([parent]))
        await blocked(queue, 2)
    children = await waiting
    assert await cancelling == 4
    assert {row.status for row in await queue.get_many([parent, *children])} == {CANCELLED}


async def test_of_cancel_and_settle_at_the_same_time_exactly_one_wins(queue, pool):
    """In some rounds one goes first on purpose, so that both orders occur; the other rounds are a race."""
    ends = {"job.succeeded": SUCCEEDED, "job.failed": FAILED, "job.cancelled": CANCELLED}
    wins = Counter()

    async def after(turns, first, action):
        if first is not None:
            await first.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        return await action

    async with another(queue, pool) as second:
        for n in range(100):
            id = await put_one(queue)
            claim = await claim_one(queue, id)
            settle = (succeed, fail, snooze, retry, release)[n % 5]
            done = asyncio.Event() if n < 10 else None

            async def cancel_first(id=id, done=done):
                answer = await second.cancel([id])
                if done is not None:
                    done.set()
                return answer

            settled, cancelled = await asyncio.gather(
                after(n % 7, done, settle(queue, claim)), after(n % 11, None, cancel_first())
            )
            row, names = await queue.get(id), await event_names(queue, id)
            terminal = [name for name in names if name in ends]
            assert len(terminal) == 1
            assert row.status is ends[terminal[0]]
            if settle in (succeed, fail):
                assert settled is not (cancelled == 1)
            else:
                assert cancelled == 1
            wins[settled] += 1
    assert set(wins) == {True, False}, f"both orders must have happened: {wins}"


async def test_of_cancel_of_the_parent_and_the_end_of_its_last_child_exactly_one_closes_it(queue, pool):
    async with another(queue, pool) as second:
        for _ in range(40):
            parent = await put_one(queue)
            (child,) = await hand_over(queue, await claim_one(queue, parent), 1)
            claim = await claim_one(queue, child)
            settled, cancelled = await asyncio.gather(succeed(queue, claim), second.cancel([parent]))
            states = [await status(queue, id) for id in (parent, child)]
            if settled:
                assert cancelled in (0, 1)
                assert states == [SUCCEEDED if cancelled == 0 else CANCELLED, SUCCEEDED]
            else:
                assert (cancelled, states) == (2, [CANCELLED, CANCELLED])
            assert (await queue.get(parent)).children_open == 0


# expire -------------------------------------------------------------------------------------------------------------


async def test_a_queued_job_past_its_deadline_fails(queue, clock):
    id, other = await put(queue, NewJob("noop", deadline=timedelta(seconds=10)), NewJob("noop"))
    await clock.advance(queue, 9)
    assert await queue.expire() == 0
    await clock.advance(queue, 2)
    assert await queue.expire() == 1
    row = await queue.get(id)
    assert (row.status, row.error["code"], row.error["kind"]) == (FAILED, "deadline_exceeded", "deadline")
    assert (await event_names(queue, id))[-1] == "job.expired"
    assert await status(queue, other) is QUEUED
    assert await queue.expire() == 0


async def test_a_held_job_past_its_deadline_fails_and_keeps_its_lease_until_its_worker_releases_it(queue, clock):
    id = await put_one(queue, deadline=timedelta(seconds=10), exclusive_key="k")
    waiting = await put_one(queue, exclusive_key="k")
    claim = await take_one(queue)
    await clock.advance(queue, 11)
    assert await queue.expire() == 1
    row = await queue.get(id)
    assert (row.status, row.locked_by) == (FAILED, "w1")
    assert await queue.holdings("w1") == {(id, claim.claim): FAILED}
    assert not await succeed(queue, claim)
    assert await take(queue) == []
    await queue.let_go([(id, claim.claim)])
    assert (await take_one(queue)).id == waiting


async def test_a_waiting_parent_past_its_deadline_fails_and_its_children_with_it(queue, clock):
    parent = await put_one(queue, deadline=timedelta(seconds=10))
    done, held, queued = await hand_over(queue, await take_one(queue), 3)
    await succeed(queue, await claim_one(queue, done))
    await claim_one(queue, held)
    await clock.advance(queue, 11)
    await queue.expire()
    rows = await queue.get_many([parent, done, held, queued])
    assert [row.status for row in rows] == [FAILED, SUCCEEDED, FAILED, FAILED]
    assert rows[0].error["code"] == "deadline_exceeded"
    assert (rows[0].children_open, rows[0].finished_at is not None) == (0, True)


async def test_a_waiting_parent_with_on_join_resume_is_resumed_at_its_deadline(queue, clock):
    parent = await put_one(queue, deadline=timedelta(seconds=10))
    await hand_over(queue, await take_one(queue), 2, on_join="resume")
    await clock.advance(queue, 11)
    await queue.expire()
    assert await status(queue, parent) is QUEUED
    assert await queue.expire() == 0, "the resumed job has no deadline any more, so it can write its ending"
    claim = await take_one(queue)
    assert (claim.id, claim.deadline_passed) == (parent, True)
    assert await queue.joined(parent, 1) == (2, 0, 2, 0)
    assert await queue.expire() == 0
    assert await succeed(queue, claim, "a sad ending")


async def test_a_parent_that_was_joined_by_its_deadline_is_rerun_as_joined(queue, clock):
    """The rerun removes the deadline; the parent does not wait again for the children that the deadline ended."""
    parent = await put_one(queue, deadline=timedelta(seconds=10))
    await hand_over(queue, await take_one(queue), 2, on_join="resume")
    await clock.advance(queue, 11)
    await queue.expire()
    await queue.cancel([parent])
    await queue.rerun(parent)
    claim = await take_one(queue)
    assert (claim.id, claim.deadline, claim.deadline_passed) == (parent, None, False)
    assert await queue.joined(parent, 1) == (2, 0, 2, 0)
    assert await succeed(queue, claim, "a sad ending")


async def test_children_without_a_deadline_are_cancelled_when_that_of_their_parent_passes(queue, clock):
    """Children inherit the deadline; a child that lost it by a rerun still ends with its parent."""
    parent = await put_one(queue, deadline=timedelta(seconds=10))
    (child,) = await hand_over(queue, await take_one(queue), 1)
    await raw(queue, "UPDATE batchwright.job SET deadline = NULL WHERE id = %(id)s", id=child)
    await clock.advance(queue, 11)
    await queue.expire()
    assert [await status(queue, id) for id in (child, parent)] == [CANCELLED, FAILED]


# rescue -------------------------------------------------------------------------------------------------------------


async def test_rescue_gives_the_attempt_back_and_counts_the_death(queue, clock):
    id = await put_one(queue)
    await retry(queue, await take_one(queue))
    claim = await take_one(queue)
    assert claim.attempts == 2
    rescued = await dead(queue, clock, claim)
    assert (rescued.status, rescued.was_running, rescued.is_poison) == (QUEUED, True, False)
    row = await queue.get(id)
    assert (row.status, row.attempts, row.rescues, row.locked_by) == (QUEUED, 1, 1, None)
    event = (await queue.events(id))[-1]
    assert (event.event, event.level, event.worker) == ("job.rescued", "warning", "w1")


async def test_only_the_next_claim_after_a_death_is_marked(queue, clock):
    await put_one(queue)
    claim = await take_one(queue)
    assert not claim.after_death
    await dead(queue, clock, claim)
    await clock.advance(queue, 2)
    heir = await take_one(queue)
    assert heir.after_death
    await queue.release([(heir.id, heir.claim)], "w1", "a deploy")
    assert not (await take_one(queue)).after_death


async def test_deaths_in_a_private_queue_do_not_lead_to_isolation(queue, clock):
    """Its worker has no other jobs to protect, and its user may kill it at any time."""
    (id,) = await put(queue, NewJob("noop", queue="~run-1"))
    for _ in range(4):
        (claim,) = await take(queue, queues=["~run-1"])
        await dead(queue, clock, claim)
        await clock.advance(queue, 2)
    row = await queue.get(id)
    assert (row.status, row.rescues, row.attempts, row.claims) == (QUEUED, 0, 0, 4)


async def test_a_job_whose_attempts_are_used_up_neither_blocks_its_key_nor_is_a_suspect(queue):
    first, second = await put(queue, *(NewJob("noop", exclusive_key="k") for _ in range(2)))
    await raw(queue, "UPDATE batchwright.job SET attempts = max_attempts WHERE id = %(id)s", id=first)
    assert [claim.id for claim in await take(queue)] == [second]
    await raw(queue, "UPDATE batchwright.job SET rescues = 2 WHERE id = %(id)s", id=first)
    assert await queue.suspects(BASIC.names(), limit=10) == []


async def test_a_worker_that_was_wrongly_taken_for_dead_can_undo_the_counted_death(queue, clock):
    id = await put_one(queue)
    claim = await take_one(queue)
    await dead(queue, clock, claim)
    assert await queue.forgive([(id, claim.claim + 1)]) == 0
    assert (await queue.get(id)).rescues == 1
    assert await queue.forgive([(id, claim.claim)]) == 1
    assert (await queue.get(id)).rescues == 0
    assert await queue.forgive([(id, claim.claim)]) == 0, "it can be undone once"
    await clock.advance(queue, 2)
    assert not (await take_one(queue)).after_death


async def test_a_claim_number_that_was_assigned_twice_is_settled_by_the_second_worker(queue):
    """A failover may lose a claim, and then its number is assigned again; the first worker does not know that."""
    for settle in SETTLES:
        await put_one(queue)
        zombie = await take_one(queue)
        forget = "UPDATE batchwright.job SET status = 'QUEUED', claims = 0, locked_by = NULL, lease_until = NULL"
        await raw(queue, f"{forget} WHERE id = %(id)s", id=zombie.id)
        (claim,) = await take(queue, worker="w2")
        assert (claim.id, claim.claim) == (zombie.id, zombie.claim)
        assert not await settle(queue, zombie), settle
        assert await status(queue, claim.id) is RUNNING
        assert await settle(queue, claim, worker="w2"), settle
        await queue.cancel([claim.id])


async def test_rescue_leaves_jobs_whose_lease_is_alive(queue, clock):
    await put(queue, NewJob("noop"), NewJob("noop"))
    one, two = await take(queue)
    await clock.advance(queue, 100)
    await queue.renew([(one.id, one.claim)])
    assert [rescued.id for rescued in await queue.rescue()] == [two.id]


async def test_rescued_jobs_become_due_spread_over_the_jitter_and_not_in_the_past(queue, clock):
    await put(queue, *[NewJob("noop") for _ in range(40)])
    await take(queue)
    now = await clock.advance(queue, 100)
    await queue.rescue()
    delays = [(job.run_after - now).total_seconds() for job in await listed(queue, limit=100)]
    assert min(delays) >= 0
    assert max(delays) <= queue.settings.rescue_jitter_seconds
    assert len(set(delays)) > 10


async def test_no_job_is_rescued_during_the_first_lease_after_the_server_started(queue, clock):
    id = await put_one(queue)
    ((started,),) = await raw(queue, "SELECT pg_postmaster_start_time()")
    clock.time = started - timedelta(seconds=25)
    await raw(queue, "UPDATE batchwright.job SET run_after = %(at)s", at=clock.time)
    await take_one(queue)
    clock.time = started + timedelta(seconds=29)
    assert await queue.rescue() == [], (
        "the lease has expired, but it could not be renewed while the database was unavailable"
    )
    clock.time = started + timedelta(seconds=31)
    assert [rescued.id for rescued in await queue.rescue()] == [id]


async def test_a_job_that_may_start_only_once_is_abandoned_when_its_worker_dies(queue, clock):
    id = await put_one(queue, max_attempts=1)
    rescued = await dead(queue, clock, await take_one(queue))
    assert (rescued.status, rescued.is_poison) == (FAILED, False)
    row = await queue.get(id)
    assert (row.error["code"], row.attempts) == ("abandoned", 1)
    assert await take(queue) == []


async def test_after_two_deaths_a_job_is_a_suspect_and_its_third_death_parks_it(queue, clock):
    id = await put_one(queue)
    for n in (1, 2):
        await dead(queue, clock, await take_one(queue))
        assert await queue.suspects(BASIC.names(), 10) == ([] if n == 1 else [id])
    assert await take(queue) == []
    assert await queue.claim_job("w1", id, BASIC.names()) is None
    claim = await claim_one(queue, id, suspect=True)
    rescued = await dead(queue, clock, claim)
    row = await queue.get(id)
    assert (rescued.status, rescued.is_poison, row.status, row.error["code"]) == (FAILED, True, FAILED, "poison")
    assert "3 times" in row.error["message"]


async def test_an_ordinary_job_is_not_a_suspect(queue):
    id = await put_one(queue)
    assert await queue.suspects(BASIC.names(), 10) == []
    assert await queue.claim_job("w1", id, BASIC.names(), suspect=True) is None


async def test_a_suspect_of_a_private_queue_is_returned_only_if_that_queue_is_named(queue):
    (id,) = await put(queue, NewJob("noop", queue="~run-1/shard/small"))
    await raw(queue, "UPDATE batchwright.job SET rescues = 2")
    assert await queue.suspects(BASIC.names(), 10) == []
    assert await queue.suspects(BASIC.names(), 10, private=["~run-2"]) == []
    assert await queue.suspects(BASIC.names(), 10, private=["~run-1"]) == [id]


@pytest.mark.parametrize(("settle", "left"), [(snooze, 0), (retry, 0), (release, 1)])
async def test_a_settle_resets_the_count_of_deaths_but_a_release_does_not(queue, clock, settle, left):
    id = await put_one(queue)
    await dead(queue, clock, await take_one(queue))
    assert (await queue.get(id)).rescues == 1
    await settle(queue, await take_one(queue))
    assert (await queue.get(id)).rescues == left


async def test_only_progress_that_grows_resets_the_count_of_deaths(queue, clock):
    id = await put_one(queue)
    first = await take_one(queue)
    await queue.progress([(id, first.claim, 10, 100)])
    await dead(queue, clock, first)
    again = await take_one(queue)
    await queue.progress([(id, again.claim, 10, 100)])
    assert (await queue.get(id)).rescues == 1
    await queue.progress([(id, again.claim, 5, 100)])
    assert (await queue.get(id)).rescues == 1
    await queue.progress([(id, again.claim, 11, 100)])
    assert (await queue.get(id)).rescues == 0


async def test_a_cancelled_job_whose_worker_died_only_loses_its_lock(queue, clock):
    id = await put_one(queue)
    await take_one(queue)
    await queue.cancel([id])
    before = await queue.events(id)
    await clock.advance(queue, 100)
    (rescued,) = await queue.rescue()
    row = await queue.get(id)
    assert (rescued.status, rescued.was_running) == (CANCELLED, False)
    assert (row.status, row.locked_by, row.lease_until, row.rescues) == (CANCELLED, None, None, 0)
    assert await queue.events(id) == before


async def test_rescuing_a_job_that_is_cancelled_at_the_same_time_does_not_requeue_it(queue, pool, clock):
    id = await put_one(queue)
    await take_one(queue)
    await clock.advance(queue, 100)
    cancelling, rescued = await asyncio.gather(queue.cancel([id]), queue.rescue())
    assert cancelling == 1
    assert await status(queue, id) is CANCELLED
    assert len(rescued) <= 1


async def test_a_worker_can_rescue_a_job_whose_process_died(queue):
    await put(queue, NewJob("noop"), NewJob("noop"))
    one, two = await take(queue)
    assert await queue.rescue(dead=[(one.id, one.claim + 1)]) == []
    (rescued,) = await queue.rescue(dead=[(one.id, one.claim)])
    assert rescued.id == one.id
    assert await status(queue, two.id) is RUNNING


# rerun --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [FAILED, CANCELLED])
async def test_rerun_requeues_a_job_and_resets_its_attempts(queue, clock, how):
    id = await put_one(queue, max_attempts=3)
    await retry(queue, await take_one(queue))
    await end(queue, await take_one(queue), how)
    now = await clock.advance(queue, 5)
    await queue.rerun(id)
    row = await queue.get(id)
    assert (row.status, row.attempts, row.rescues, row.error, row.finished_at) == (QUEUED, 0, 0, None, None)
    assert row.run_after == now
    again = await take_one(queue)
    assert (again.claim, again.attempts) == (3, 1), "the fence only grows"
    assert await succeed(queue, again)


async def test_rerun_refuses_jobs_that_have_not_ended_badly(queue):
    queued, running, done = await put(queue, *[NewJob("noop") for _ in range(3)])
    await claim_one(queue, running)
    await succeed(queue, await claim_one(queue, done))
    for id, found in ((queued, "QUEUED"), (running, "RUNNING"), (done, "SUCCEEDED")):
        with pytest.raises(Conflict, match=f"is {found}; only a FAILED or CANCELLED job can be rerun"):
            await queue.rerun(id)
    with pytest.raises(NotFound):
        await queue.rerun(new_id())


async def test_rerun_refuses_a_job_whose_operation_is_still_being_interrupted(queue, clock):
    id = await put_one(queue)
    claim = await take_one(queue)
    await queue.cancel([id])
    with pytest.raises(Conflict, match="still being interrupted"):
        await queue.rerun(id)
    await queue.let_go([(id, claim.claim)])
    await queue.rerun(id)
    assert await status(queue, id) is QUEUED


async def test_rerun_of_a_parent_waits_again_for_its_unsuccessful_children_only(queue):
    parent = await put_one(queue)
    await hand_over(queue, await take_one(queue), 4, result="whole")
    good, bad, worse, also_good = await take(queue)
    for claim, how in ((good, SUCCEEDED), (bad, FAILED), (worse, CANCELLED), (also_good, SUCCEEDED)):
        await end(queue, claim, how)
    assert await status(queue, parent) is FAILED
    await queue.rerun(parent)
    row = await queue.get(parent)
    assert (row.status, row.is_waiting, row.children_open, row.children_failed) == (RUNNING, True, 2, 0)
    assert (row.progress_current, row.progress_total, row.finished_at) == (2, 4, None)
    again = await take(queue)
    assert {claim.id for claim in again} == {bad.id, worse.id}
    for claim in again:
        await succeed(queue, claim)
    row = await queue.get(parent)
    assert (row.status, row.result, row.children_failed, row.error) == (SUCCEEDED, "whole", 0, None)


async def test_rerun_of_a_tree_reruns_the_leaves_that_failed(queue):
    top = await put_one(queue)
    (middle,) = await hand_over(queue, await take_one(queue), 1)
    good, bad = await hand_over(queue, await take_one(queue), 2)
    await succeed(queue, await claim_one(queue, good))
    await fail(queue, await claim_one(queue, bad))
    assert {await status(queue, id) for id in (top, middle, bad)} == {FAILED}
    await queue.rerun(top)
    assert [await status(queue, id) for id in (top, middle, good, bad)] == [RUNNING, RUNNING, SUCCEEDED, QUEUED]
    await succeed(queue, await take_one(queue))
    assert {await status(queue, id) for id in (top, middle, bad)} == {SUCCEEDED}


async def test_rerun_of_a_cancelled_tree_refuses_while_one_of_its_operations_still_runs(queue):
    """Otherwise two workers would run that job at once."""
    parent = await put_one(queue)
    (child,) = await hand_over(queue, await take_one(queue), 1)
    claim = await claim_one(queue, child)
    await queue.cancel([parent])
    with pytest.raises(Conflict, match=f"job {child} is still being interrupted"):
        await queue.rerun(parent)
    assert [await status(queue, id) for id in (parent, child)] == [CANCELLED, CANCELLED]
    await queue.let_go([(child, claim.claim)])
    await queue.rerun(parent)
    assert [await status(queue, id) for id in (parent, child)] == [RUNNING, QUEUED]


async def test_rerun_of_a_child_whose_parent_has_ended_names_the_parent(queue):
    parent = await put_one(queue)
    (child,) = await hand_over(queue, await take_one(queue), 1)
    await fail(queue, await take_one(queue))
    with pytest.raises(Conflict, match=f"rerun job {parent} instead") as refused:
        await queue.rerun(child)
    assert refused.value.holder == str(parent)
    assert await status(queue, child) is FAILED


async def test_rerun_of_a_child_whose_parent_still_waits_is_counted_again(queue):
    parent = await put_one(queue)
    bad, other = await hand_over(queue, await take_one(queue), 2)
    await fail(queue, await claim_one(queue, bad))
    await queue.rerun(bad)
    row = await queue.get(parent)
    assert (row.children_open, row.children_failed, row.progress_current) == (2, 0, 0)
    for id in (bad, other):
        await succeed(queue, await claim_one(queue, id))
    assert await status(queue, parent) is SUCCEEDED


async def test_rerun_of_a_child_while_its_sibling_ends_the_wait_leaves_no_job_stuck(queue, pool):
    async with another(queue, pool) as second:
        for _ in range(25):
            parent = await put_one(queue)
            bad, last = await hand_over(queue, await claim_one(queue, parent), 2, allow_failures=1)
            await fail(queue, await claim_one(queue, bad))
            claim = await claim_one(queue, last)
            settled, rerun = await asyncio.gather(succeed(queue, claim), second.rerun(bad), return_exceptions=True)
            assert settled is True
            if rerun is None:
                assert await status(queue, parent) is RUNNING
                await succeed(queue, await claim_one(queue, bad))
            else:
                assert isinstance(rerun, Conflict)
                assert await status(queue, bad) is FAILED
            row = await queue.get(parent)
            assert (row.status, row.children_open) == (SUCCEEDED, 0)


async def test_rerun_of_a_job_past_its_deadline_takes_the_deadline_away(queue, clock):
    gone, ahead = await put(
        queue, NewJob("noop", deadline=timedelta(seconds=10)), NewJob("noop", deadline=timedelta(seconds=100))
    )
    await fail(queue, await claim_one(queue, ahead))
    await clock.advance(queue, 11)
    await queue.expire()
    await queue.rerun(gone)
    await queue.rerun(ahead)
    assert (await queue.get(gone)).deadline is None
    assert (await queue.get(ahead)).deadline is not None
    assert await queue.expire() == 0
    assert await status(queue, gone) is QUEUED


async def test_rerun_of_a_parent_past_its_deadline_removes_the_deadlines_of_its_children(queue, clock):
    parent = await put_one(queue, deadline=timedelta(seconds=10))
    (child,) = await hand_over(queue, await take_one(queue), 1)
    await clock.advance(queue, 11)
    await queue.expire()
    await queue.rerun(parent)
    assert await queue.expire() == 0
    await succeed(queue, await claim_one(queue, child))
    assert await status(queue, parent) is SUCCEEDED


async def test_rerun_of_a_keyed_parent_takes_the_key_from_a_job_that_has_ended(queue):
    parent = await put_one(queue, exclusive_key="k")
    (child,) = await hand_over(queue, await take_one(queue), 1)
    await fail(queue, await take_one(queue))
    later = await put_one(queue, exclusive_key="k")
    await succeed(queue, await take_one(queue))
    assert (await queue.get(later)).is_current
    await queue.rerun(parent)
    assert [(await queue.get(id)).is_current for id in (parent, later)] == [True, False]
    await succeed(queue, await claim_one(queue, child))
    assert await status(queue, parent) is SUCCEEDED


async def test_rerun_of_a_keyed_parent_is_refused_while_another_job_holds_the_key(queue):
    parent = await put_one(queue, exclusive_key="k")
    (child,) = await hand_over(queue, await take_one(queue), 1)
    await fail(queue, await take_one(queue))
    await put_one(queue, exclusive_key="k")
    await take_one(queue)
    with pytest.raises(Conflict, match="another job holds its exclusive key"):
        await queue.rerun(parent)
    assert [await status(queue, id) for id in (parent, child)] == [FAILED, FAILED]


# Keys and their policies --------------------------------------------------------------------------------------------


async def test_jobs_of_a_key_run_one_after_the_other(queue):
    ids = await put(queue, *[NewJob("noop", exclusive_key="k") for _ in range(3)])
    for id in ids:
        claim = await take_one(queue)
        assert claim.id == id
        await succeed(queue, claim)


async def test_the_next_job_of_a_freed_key_is_claimed_even_before_the_watermark(queue, clock):
    await clock.advance(queue, 0)
    first, second = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    await succeed(queue, await claim_one(queue, first))
    mark = Watermark(await clock.advance(queue, 5), new_id())
    lanes = [Lane("default", 5, 9, mark)]
    assert (await queue.claim("w1", lanes, BASIC.names(), 9)).jobs == []
    freed = [("default", '["k"]')]
    assert [c.id for c in (await queue.claim("w1", lanes, BASIC.names(), 9, freed_keys=freed)).jobs] == [second]


async def test_reject_names_the_holder_and_accepts_a_job_when_the_key_is_free(queue):
    holder = await put_one(queue, exclusive_key="k", on_held="reject")
    for _ in range(2):
        with pytest.raises(Conflict, match=str(holder)) as refused:
            await put_one(queue, exclusive_key="k", on_held="reject")
        assert refused.value.holder == str(holder)
    await succeed(queue, await take_one(queue))
    assert await put_one(queue, exclusive_key="k", on_held="reject") != holder


async def test_reject_refuses_the_whole_call(queue):
    await put_one(queue, exclusive_key="k")
    with pytest.raises(Conflict):
        await put(queue, NewJob("noop"), NewJob("noop", exclusive_key="k", on_held="reject"))
    assert len(await listed(queue)) == 1


async def test_coalesce_returns_the_job_that_has_not_started_and_adds_one_behind_a_running_one(queue):
    first = await put_one(queue, exclusive_key="k", on_held="coalesce")
    assert await put_one(queue, exclusive_key="k", on_held="coalesce") == first
    claim = await take_one(queue)
    second = await put_one(queue, exclusive_key="k", on_held="coalesce")
    assert second != first
    assert await put_one(queue, exclusive_key="k", on_held="coalesce") == second
    await snooze(queue, claim)
    assert await put_one(queue, exclusive_key="k", on_held="coalesce") == second, "a snoozing job counts as started"


async def test_supersede_cancels_every_open_job_of_the_key_and_waits_until_the_running_one_is_released(queue):
    running = await put_one(queue, exclusive_key="k")
    claim = await take_one(queue)
    waiting = await put_one(queue, exclusive_key="k")
    newest = await put_one(queue, exclusive_key="k", on_held="supersede")
    assert [await status(queue, id) for id in (running, waiting, newest)] == [CANCELLED, CANCELLED, QUEUED]
    assert (await queue.get(running)).error["message"] == f"superseded by job {newest}"
    assert await take(queue) == []
    await queue.let_go([(running, claim.claim)])
    assert (await take_one(queue)).id == newest


async def test_supersede_also_cancels_the_children_of_a_waiting_holder(queue):
    parent = await put_one(queue, exclusive_key="k")
    children = await hand_over(queue, await take_one(queue), 2)
    newest = await put_one(queue, exclusive_key="k", on_held="supersede")
    assert {await status(queue, id) for id in (parent, *children)} == {CANCELLED}
    assert (await take_one(queue)).id == newest


@pytest.mark.parametrize("policy", ["reject", "coalesce", "supersede"])
async def test_simultaneous_enqueues_of_a_key_are_decided_one_after_the_other(queue, pool, policy):
    async with another(queue, pool) as second:
        for n in range(25):
            answers = await asyncio.gather(
                put_one(queue, exclusive_key=["k", n], on_held=policy),
                put_one(second, exclusive_key=["k", n], on_held=policy),
                return_exceptions=True,
            )
            (open_jobs,) = await raw(
                queue,
                "SELECT count(*) FROM batchwright.job WHERE exclusive_key = %(key)s AND finished_at IS NULL",
                key=f'["k",{n}]',
            )
            assert open_jobs == (1,), f"{policy} in round {n}"
            refused = [answer for answer in answers if isinstance(answer, Conflict)]
            assert len(refused) == (1 if policy == "reject" else 0)
            if policy == "coalesce":
                assert answers[0] == answers[1]


async def test_a_policy_does_not_apply_without_a_key_or_across_tenants(queue):
    await put_one(queue, on_held="reject")
    await put_one(queue, on_held="reject")
    await put_one(queue, exclusive_key="k", tenant="a", on_held="reject")
    await put_one(queue, exclusive_key="k", tenant="b", on_held="reject")
    assert len(await take(queue)) == 4, "both tenants run their job of that key"


@pytest.mark.parametrize("give_back", [snooze, retry, release])
async def test_a_released_job_keeps_its_key_and_goes_before_jobs_that_wait_for_the_key(queue, clock, give_back):
    """The holder is due later than the other jobs and may be less urgent; it still goes first, so no job starves."""
    await clock.advance(queue, 0)
    holder = await put_one(queue, exclusive_key="k", priority=7)
    claim = await take_one(queue)
    rivals = await put(queue, NewJob("noop", exclusive_key="k", priority=1), NewJob("noop", exclusive_key="k"))
    await (give_back(queue, claim) if give_back is release else give_back(queue, claim, 60))
    if give_back is not release:
        assert await take(queue) == []
        assert await queue.claim_job("w2", rivals[0], BASIC.names()) is None
        await clock.advance(queue, 61)
    for expected in (holder, *rivals):
        claim = await take_one(queue)
        assert claim.id == expected
        await succeed(queue, claim)


async def test_a_rescued_job_keeps_its_key(queue, clock):
    holder, rival = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    await dead(queue, clock, await take_one(queue))
    assert (await take_one(queue)).id == holder
    assert await queue.claim_job("w2", rival, BASIC.names()) is None


async def test_a_waiting_parent_keeps_its_key(queue):
    holder, rival = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    await hand_over(queue, await take_one(queue), [NewJob("other")], on_join="resume")
    assert await take(queue, types=["noop"]) == []
    await succeed(queue, await take_one(queue, types=["other"]))
    resumed = await take_one(queue)
    assert resumed.id == holder
    await succeed(queue, resumed)
    assert (await take_one(queue)).id == rival


async def test_another_job_in_a_paused_queue_or_of_an_unknown_type_does_not_block_the_key(queue):
    await put(
        queue,
        NewJob("noop", exclusive_key="paused", queue="slow"),
        NewJob("other", exclusive_key="unknown"),
    )
    mine = await put(queue, NewJob("noop", exclusive_key="paused"), NewJob("noop", exclusive_key="unknown"))
    await pause(queue, "slow")
    claims = await take(queue, types=["noop"], queues=("default", "slow"))
    assert [claim.id for claim in claims] == mine


async def test_a_suspect_does_not_block_its_key_for_others_but_holds_it(queue, clock):
    holder, rival = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    for _ in range(2):
        await dead(queue, clock, await claim_one(queue, holder))
    assert await take(queue) == []
    await succeed(queue, await claim_one(queue, holder, suspect=True))
    assert (await take_one(queue)).id == rival


# Tenants and owners -------------------------------------------------------------------------------------------------


async def test_the_jobs_of_other_tenants_are_not_found(queue):
    id = await put_one(queue, tenant="a")
    await fail(queue, await take_one(queue))
    for verb in (queue.get, queue.recover, queue.rerun):
        with pytest.raises(NotFound):
            await verb(id, tenant="b")
    with pytest.raises(NotFound):
        await queue.cancel([id], tenant="b")
    assert await listed(queue, tenant="b") == []
    assert (await queue.get(id, tenant="a")).id == id


async def test_verbs_on_a_job_with_an_owner_are_refused_and_name_the_owner(queue, clock):
    id = await put_one(queue, owner="batch batch_7")
    verbs = {"cancel that": lambda: queue.cancel([id]), "is rescued": lambda: queue.recover(id)}
    for instead, verb in {**verbs, "retry that": lambda: queue.rerun(id)}.items():
        with pytest.raises(Conflict, match=f"belongs to batch batch_7; .*{instead}") as refused:
            await verb()
        assert refused.value.holder == "batch batch_7"
    assert await status(queue, id) is QUEUED
    assert await queue.cancel([id], owned=True) == 1, "the owner itself may cancel it"
