"""Verbs on many jobs: they change exactly the counted jobs, in bounded calls."""

import asyncio

import pytest

from batchwright import Done, JobStatus, NewJob, NotFound, Wait, operation
from batchwright.engine import bulk as bulk_module
from batchwright.engine import views as views_module
from batchwright.engine.bulk import Bulk, Changed
from batchwright.engine.views import JobFilter, Views
from batchwright.operations.registry import Registry
from tests.engine.steps import claim_one, hand_over, status
from tests.engine.test_views import chain, end_as, failed, single, some, walk
from tests.support import fail, noop, put, raw, take, working

QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobStatus
EVERYTHING = JobFilter()


@pytest.fixture
def bulk(queue):
    return Bulk(queue, Views(queue))


async def statuses(queue, ids):
    return [job.status for job in await queue.get_many(ids)]


async def to_the_end(verb, wanted):
    """Call a verb again with its cursor until nothing is left; return the results."""
    calls, after = [], None
    for _ in range(1000):
        calls.append(await verb(wanted, after=after))
        after = calls[-1].next
        if after is None:
            return calls
    raise AssertionError("the calls of a verb do not end")


async def test_cancel_changes_exactly_the_counted_jobs(queue, bulk):
    mine = await some(queue, 5, queue="letters")
    others = [*await some(queue, 3), *await some(queue, 2, queue="letters", tenant="b")]
    done = await single(queue, queue="letters")
    await end_as(queue, done, SUCCEEDED)
    wanted = JobFilter(queue="letters", tenant="default")
    assert await bulk.count("cancel", wanted) == 5
    assert await bulk.cancel(wanted, reason="not today") == Changed(5, 5, None)
    assert set(await statuses(queue, mine)) == {CANCELLED}
    assert (await queue.get(mine[0])).error["message"] == "not today"
    assert set(await statuses(queue, others)) == {QUEUED}
    assert await bulk.count("cancel", wanted) == 0
    assert await bulk.cancel(wanted) == Changed(0, 0, None)


async def test_rerun_and_dismiss_change_exactly_the_counted_jobs(queue, bulk):
    broken = await failed(queue, 3)
    paper = await failed(queue, 2, code="no_paper")
    cancelled = await single(queue)
    await queue.cancel([cancelled])
    causes = JobFilter(error_code="broken")
    assert await bulk.count("dismiss", causes) == 3
    assert await bulk.dismiss(causes) == Changed(3, 3, None)
    assert await bulk.count("dismiss", causes) == 0, "they are dismissed already"
    assert await bulk.count("dismiss", EVERYTHING) == 2
    assert await bulk.count("rerun", causes) == 3
    assert await bulk.rerun(causes) == Changed(3, 3, None)
    assert await bulk.count("rerun", EVERYTHING) == 3
    assert await bulk.rerun(EVERYTHING) == Changed(3, 3, None)
    assert set(await statuses(queue, [*broken, *paper, cancelled])) == {QUEUED}


@pytest.mark.parametrize(
    ("verb", "wanted"),
    [
        ("cancel", {"statuses": (FAILED, SUCCEEDED)}),
        ("rerun", {"statuses": (QUEUED,)}),
        ("dismiss", {"statuses": (CANCELLED,)}),
        ("dismiss", {"dismissed": True}),
        ("cancel", {"owned": True}),
    ],
)
async def test_a_filter_that_contradicts_the_verb_matches_no_job(queue, bulk, verb, wanted):
    ids = [*await failed(queue, 2), *await some(queue, 2)]
    before = await queue.get_many(ids)
    assert await bulk.count(verb, JobFilter(**wanted)) == 0
    assert await getattr(bulk, verb)(JobFilter(**wanted)) == Changed(0, 0, None)
    assert await queue.get_many(ids) == before


@pytest.mark.parametrize("scan_max", [4, 20_000])
async def test_a_call_is_bounded_and_its_cursor_continues(queue, bulk, monkeypatch, scan_max):
    monkeypatch.setattr(bulk_module, "BULK_MAX", 5)
    monkeypatch.setattr(bulk_module, "_PER_STEP", 2)
    monkeypatch.setattr(bulk_module, "_COUNTED_PER_STEP", 3)
    monkeypatch.setattr(views_module, "_SCAN_MAX", scan_max)
    ids = []
    for _ in range(6):
        ids += await some(queue, 2, queue="letters")
        await some(queue, 5)
    wanted = JobFilter(queue="letters")
    assert await bulk.count("cancel", wanted) == 12
    calls = await to_the_end(bulk.cancel, wanted)
    assert [call.matched for call in calls] == [5, 5, 2]
    assert sum(call.changed for call in calls) == 12
    assert set(await statuses(queue, ids)) == {CANCELLED}
    assert len(await walk(Views(queue), JobFilter(statuses=(QUEUED,)))) == 30


async def test_a_call_that_finds_little_stops_after_some_pages_and_its_cursor_continues(queue, bulk, monkeypatch):
    monkeypatch.setattr(bulk_module, "_STEPS_MAX", 2)
    monkeypatch.setattr(views_module, "_SCAN_MAX", 3)
    (old,) = await failed(queue, 1, queue="letters")
    await queue.cancel(await some(queue, 20))
    calls = await to_the_end(bulk.rerun, JobFilter(queue="letters"))
    assert len(calls) > 2
    assert [(call.matched, call.changed) for call in calls if call.matched] == [(1, 1)]
    assert await status(queue, old) is QUEUED


async def test_the_count_stops_at_its_limit(queue, bulk, monkeypatch):
    monkeypatch.setattr(bulk_module, "COUNT_MAX", 7)
    monkeypatch.setattr(bulk_module, "_COUNTED_PER_STEP", 3)
    await some(queue, 10)
    assert await bulk.count("cancel", EVERYTHING) == 7


async def test_jobs_with_an_owner_are_left_alone(queue, bulk):
    owned = [await single(queue, owner="batch 7") for _ in range(3)]
    await end_as(queue, owned[0], FAILED)
    await single(queue)
    assert await bulk.cancel(EVERYTHING) == Changed(1, 1, None)
    assert await bulk.rerun(JobFilter(statuses=(FAILED,))) == Changed(0, 0, None)
    assert await bulk.dismiss(EVERYTHING) == Changed(0, 0, None)
    assert await statuses(queue, owned) == [FAILED, QUEUED, QUEUED]


async def test_a_child_of_an_ended_parent_is_rerun_only_with_its_parent(queue, bulk):
    parent = await single(queue)
    (child,) = await hand_over(queue, await claim_one(queue, parent), [NewJob("other")])
    await fail(queue, await claim_one(queue, child))
    assert await status(queue, parent) is FAILED
    assert await bulk.rerun(JobFilter(job_type="other")) == Changed(1, 0, None)
    assert await statuses(queue, [parent, child]) == [FAILED, FAILED]
    assert await bulk.rerun(EVERYTHING) == Changed(2, 1, None)
    assert await statuses(queue, [parent, child]) == [RUNNING, QUEUED], "the parent's rerun includes the child"


async def test_a_child_of_a_parent_that_waits_is_rerun(queue, bulk):
    parent = await single(queue)
    one, _ = await hand_over(queue, await claim_one(queue, parent), 2)
    await end_as(queue, one, FAILED)
    assert await bulk.rerun(EVERYTHING) == Changed(1, 1, None)
    assert (await queue.get(parent)).children_open == 2


@pytest.mark.parametrize("per_step", [1, 3, 200])
async def test_parents_are_cancelled_with_their_children_and_not_failed_by_them(queue, bulk, monkeypatch, per_step):
    """Children are newer, so they are found first; that must not fail a parent that is to be cancelled as well."""
    monkeypatch.setattr(bulk_module, "_PER_STEP", per_step)
    root = await single(queue)
    left, right = await hand_over(queue, await claim_one(queue, root), 2)
    below = await hand_over(queue, await claim_one(queue, left), 4)
    everyone = [root, left, right, *below]
    assert await bulk.count("cancel", EVERYTHING) == 7
    (call,) = await to_the_end(bulk.cancel, EVERYTHING)
    assert call.changed == 7
    assert set(await statuses(queue, everyone)) == {CANCELLED}


async def test_a_parent_that_does_not_match_counts_its_cancelled_children_as_failed(queue, bulk):
    parent = await single(queue)
    children = await hand_over(queue, await claim_one(queue, parent), [NewJob("other"), NewJob("other")])
    assert await bulk.cancel(JobFilter(job_type="other")) == Changed(2, 2, None)
    assert set(await statuses(queue, children)) == {CANCELLED}
    assert await status(queue, parent) is FAILED
    assert await bulk.cancel(JobFilter(parent_job_id=parent)) == Changed(0, 0, None)


async def test_cancel_includes_the_descendants_of_matching_jobs(queue, bulk):
    parent = await single(queue, queue="letters")
    children = await hand_over(queue, await claim_one(queue, parent), 3)
    assert await bulk.cancel(JobFilter(queue="letters")) == Changed(1, 4, None)
    assert set(await statuses(queue, children)) == {CANCELLED}


async def test_cancelling_while_a_worker_settles_leaves_every_job_with_one_end(pool, queue, bulk):
    @operation("parent")
    async def parent():
        return Wait([NewJob(noop) for _ in range(4)], allow_failures=True)

    for _ in range(10):
        await some(queue, 20)
        await put(queue, *(NewJob("parent") for _ in range(5)), operations=Registry([parent, noop]))
    async with working(pool, parent, noop, concurrency=10):
        while await bulk.count("cancel", EVERYTHING):
            await to_the_end(bulk.cancel, EVERYTHING)
        while await raw(queue, "SELECT FROM batchwright.job WHERE locked_by IS NOT NULL"):
            await asyncio.sleep(0.02)  # the worker releases jobs that were cancelled while it held them
    found = await raw(queue, "SELECT DISTINCT status::text, children_open FROM batchwright.job")
    assert set(found) <= {("SUCCEEDED", 0), ("CANCELLED", 0)}
    ends = await raw(
        queue,
        "SELECT job_id FROM batchwright.job_event WHERE event IN ('job.succeeded', 'job.cancelled', 'job.joined') "
        "GROUP BY job_id HAVING count(*) > 1",
    )
    assert ends == []


async def test_two_simultaneous_reruns_rerun_each_job_once(queue, bulk):
    ids = await failed(queue, 30)
    one, two = await asyncio.gather(bulk.rerun(EVERYTHING), bulk.rerun(EVERYTHING))
    assert one.changed + two.changed == 30
    assert await raw(queue, "SELECT count(*) FROM batchwright.job_event WHERE event = 'job.rerun'") == [(30,)]
    assert set(await statuses(queue, ids)) == {QUEUED}


# Pipelines ------------------------------------------------------------------------------------------------------------


async def test_a_whole_pipeline_is_cancelled(queue, bulk, monkeypatch):
    monkeypatch.setattr(bulk_module, "_PER_STEP", 2)
    root = await single(queue)
    children = await hand_over(queue, await claim_one(queue, root), 3)
    follower = await chain(queue, await claim_one(queue, children[0]), NewJob("other"))
    stranger = await single(queue)
    assert await bulk.cancel_pipeline(root) == 4
    assert await statuses(queue, [root, *children]) == [CANCELLED, SUCCEEDED, CANCELLED, CANCELLED]
    assert await statuses(queue, [follower, stranger]) == [CANCELLED, QUEUED]
    assert await bulk.cancel_pipeline(root) == 0


async def test_a_job_that_is_chained_while_its_pipeline_is_cancelled_is_cancelled_too(queue, bulk):
    """The first search finds only the root, which ends and chains a job before it can be cancelled."""
    root = await single(queue)
    claim = await claim_one(queue, root)
    followers = []
    look = bulk._views.open_members

    async def look_and_let_it_end(*arguments, **options):
        found = await look(*arguments, **options)
        if not followers:
            followers.append(await chain(queue, claim, NewJob("other")))
        return found

    bulk._views.open_members = look_and_let_it_end
    assert await bulk.cancel_pipeline(root) == 1
    assert await statuses(queue, [root, *followers]) == [SUCCEEDED, CANCELLED]


async def test_a_job_with_an_owner_does_not_prevent_the_cancellation_of_the_rest_of_its_pipeline(queue, bulk):
    root = await single(queue)
    claim = await claim_one(queue, root)
    owned = await chain(queue, claim, NewJob("other", owner="batch 7"))
    plain = await single(queue, pipeline_id=root)
    assert await bulk.cancel_pipeline(root) == 1
    assert await statuses(queue, [owned, plain]) == [QUEUED, CANCELLED]


async def test_a_pipeline_of_another_tenant_is_not_found(queue, bulk):
    root = await single(queue, tenant="a")
    with pytest.raises(NotFound):
        await bulk.cancel_pipeline(root, tenant="b")
    assert await status(queue, root) is QUEUED
    assert await bulk.cancel_pipeline(root, tenant="a") == 1


async def test_cancelling_a_running_pipeline_ends_it(pool, queue, bulk):
    """Each job chains the next: the cancellation must neither follow them for ever nor miss the last one."""

    @operation("link")
    async def link(n: int = 0):
        return Done(n, then=[NewJob("link", {"n": n + 1})])

    (root,) = await put(queue, NewJob("link"), operations=Registry([link]))
    async with working(pool, link):
        while len(await walk(Views(queue), JobFilter(pipeline_id=root), limit=100)) < 3:
            await asyncio.sleep(0)
        assert await bulk.cancel_pipeline(root) >= 1
        assert (await Views(queue).pipeline(root)).finished_at is not None
    assert await take(queue, types=["link"]) == []
    assert await raw(queue, "SELECT count(*) FROM batchwright.job WHERE status = 'CANCELLED'") == [(1,)]
