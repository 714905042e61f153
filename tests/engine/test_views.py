"""What users see of jobs: lists and their cursors, filters, reasons for waiting, pipelines, the inbox, and more."""

import asyncio
import base64
import random
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchwright import JobStatus, NewJob, NotFound
from batchwright.db.doorbell import Doorbell
from batchwright.engine import views as views_module
from batchwright.engine.catalog import Catalog
from batchwright.engine.named_queues import NamedQueues
from batchwright.engine.outcomes import Settle
from batchwright.engine.views import SQL, Cursor, JobFilter, Views
from batchwright.engine.workers import Workers
from batchwright.errors import InvalidInput
from tests.engine.planning import indexes, nodes, numbered, plan, scanned, touched, whole_table_scans
from tests.engine.steps import claim_one, dead, end, hand_over
from tests.support import BASIC, fail, noop, put, raw, snooze, succeed, take, working

QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobStatus
EVERYTHING = JobFilter()


@pytest.fixture
def views(queue):
    return Views(queue)


async def walk(views, wanted=EVERYTHING, *, limit=7, between=None, pages_max=2000):
    """Every id of the list, read page by page; `between` is called after each page."""
    found, after = [], None
    for _ in range(pages_max):
        ids, after = await views.ids(wanted, limit=limit, after=after)
        assert len(ids) <= limit
        found += ids
        if after is None:
            return found
        after = Cursor.parse(str(after))
        if between is not None:
            await between()
    raise AssertionError(f"more than {pages_max} pages")


async def newest_first(queue, where="true"):
    rows = await raw(queue, f"SELECT id FROM batchwright.job WHERE {where} ORDER BY created_at DESC, id DESC")
    return [id for (id,) in rows]


async def some(queue, n, /, **options):
    return await put(queue, *(NewJob("noop", {"n": k}, **options) for k in range(n)))


async def single(queue, /, **options):
    (id,) = await some(queue, 1, **options)
    return id


async def end_as(queue, id, how):
    await end(queue, await claim_one(queue, id), how)


async def chain(queue, claim, job):
    """End a held job with one that follows it."""
    (row,) = await Catalog(queue.database, BASIC).prepare([job], before=claim)
    values = {"result": None, "progress_current": None, "progress_total": None}
    await queue.succeed_with(Settle("succeed", claim, values), "w1", write=None, then=[row])
    return row["id"]


# The cursor -----------------------------------------------------------------------------------------------------------


@given(st.datetimes(timezones=st.just(UTC)), st.uuids())
@example(datetime(2300, 1, 1, 0, 0, 0, 1, tzinfo=UTC), UUID(int=0))
def test_a_cursor_survives_its_text_form_to_the_microsecond(moment, id):
    assert Cursor.parse(str(Cursor(moment, id))) == Cursor(moment, id)


@given(st.one_of(st.text(max_size=60), st.text("0123456789abcdefABCDEF-_=.+/", max_size=60)))
@example("")
@example("Lg")
@example("ÿ")
@example(str(Cursor(datetime(2026, 1, 1, tzinfo=UTC), UUID(int=7)))[:-3])
@example("ZmZmZmZmZmZmZmZmZmZmZmZmZmZmLjAw")
def test_a_text_that_is_not_a_cursor_is_refused_with_a_clear_message(text):
    with pytest.raises(InvalidInput, match="is not a cursor; use the next_cursor of a list") as refused:
        Cursor.parse(text)
    assert refused.value.param == "cursor"


@given(st.binary(max_size=40), st.integers(), st.text("0123456789abcdef{}:-urnid", max_size=50))
def test_any_text_like_a_cursor_is_either_parsed_or_refused(noise, number, id):
    for inner in (noise, f"{number:x}.{id}".encode(), f"{number}.{UUID(int=3)}".encode()):
        text = base64.urlsafe_b64encode(inner).decode().rstrip("=")
        try:
            assert isinstance(Cursor.parse(text), Cursor)
        except InvalidInput:
            continue


@pytest.mark.parametrize("limit", [1, 2, 7, 50, 1000])
async def test_pages_of_any_size_list_every_job_once_and_the_newest_first(queue, views, limit):
    for n in (1, 30, 3, 26):
        await some(queue, n)  # jobs of one call have the same creation time
    assert await walk(views, limit=limit) == await newest_first(queue)


@pytest.mark.parametrize("tenant", [None, "a"])
@pytest.mark.parametrize("scan_max", [3, 20_000])
async def test_a_list_is_stable_while_jobs_are_added_and_change(queue, views, monkeypatch, scan_max, tenant):
    monkeypatch.setattr(views_module, "_SCAN_MAX", scan_max)
    chance = random.Random(7)
    for n in range(12):
        await some(queue, chance.randint(1, 9), tenant="abc"[n % 3])
    there = await newest_first(queue, "true" if tenant is None else f"tenant = '{tenant}'")

    async def stir():
        (new,) = await some(queue, 1, tenant=chance.choice("abcd"))
        one, two, three = chance.sample(there, 3)
        await queue.cancel([one, new])
        for claim in await take(queue, 2):
            await (succeed if claim.id == two else snooze)(queue, claim)
        if (await queue.get(three)).status is CANCELLED:
            await queue.rerun(three)

    found = await walk(views, JobFilter(tenant=tenant), limit=4, between=stir)
    assert [id for id in found if id in set(there)] == there
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("scan_max", [1, 2, 5, 12])
async def test_a_search_that_is_cut_short_continues_and_loses_nothing(queue, views, monkeypatch, scan_max):
    """Many jobs of a tenant that do not match must not hide those of others, nor older matching ones of its own."""
    monkeypatch.setattr(views_module, "_SCAN_MAX", scan_max)
    for _ in range(3):
        await some(queue, 4, tenant="a", queue="rare")
        await some(queue, 5, tenant="b", queue="rare")
        await some(queue, 12, tenant="a")
        await some(queue, 1, tenant="b")
    rare = JobFilter(queue="rare")
    for limit in (1, 3, 100):
        assert await walk(views, rare, limit=limit) == await newest_first(queue, "queue = 'rare'")
    first = await views.page(JobFilter(queue="rare", tenant="a"), limit=5)
    assert (first.jobs, first.next is None) == ([], False)


async def test_a_full_page_of_one_tenant_does_not_skip_another_tenant_whose_search_stopped_earlier(
    queue, views, monkeypatch
):
    monkeypatch.setattr(views_module, "_SCAN_MAX", 3)
    await some(queue, 3, tenant="b", queue="rare")
    await some(queue, 1, tenant="a", queue="rare")
    await some(queue, 6, tenant="a")
    assert await walk(views, JobFilter(queue="rare"), limit=2) == await newest_first(queue, "queue = 'rare'")


async def test_the_listing_has_every_job_as_long_as_the_job_exists(queue):
    async def listed():
        return await raw(queue, "SELECT tenant, created_at, id FROM batchwright.listing ORDER BY id")

    kept = await some(queue, 3)
    gone = await some(queue, 3, tenant="other")
    every = await raw(queue, "SELECT tenant, created_at, id FROM batchwright.job ORDER BY id")
    assert await listed() == every
    await raw(queue, "DELETE FROM batchwright.job WHERE id = ANY(%(ids)s)", ids=gone)
    assert [id for _, _, id in await listed()] == sorted(kept)


async def test_an_empty_list_is_one_page(views):
    assert await views.page(EVERYTHING) == ([], None)
    assert await views.page(JobFilter(tenant="nobody")) == ([], None)


async def test_a_page_holds_whole_jobs_in_its_order(queue, views):
    ids = await some(queue, 3)
    page = await views.page(EVERYTHING, limit=2)
    assert [job.id for job in page.jobs] == ids[:0:-1]
    assert page.next == Cursor(page.jobs[-1].created_at, page.jobs[-1].id)


# Filters --------------------------------------------------------------------------------------------------------------


async def test_each_filter_alone_and_all_together(queue, views, clock):
    first = await clock.advance(queue, 0)
    a = await single(queue, queue="letters")
    (b,) = await put(queue, NewJob("other"))
    await clock.advance(queue, 60)
    c = await single(queue, owner="batch 7")
    d = await single(queue, tenant="else")
    await fail(queue, await claim_one(queue, b), code="no_paper")
    await queue.dismiss([b])
    await fail(queue, await claim_one(queue, d), code="no_ink")

    async def found(**wanted):
        return await walk(views, JobFilter(**wanted))

    assert await found(tenant="else") == [d]
    assert await found(tenant="default") == [c, b, a]
    assert await found(statuses=(FAILED,)) == [d, b]
    assert await found(statuses=(FAILED, QUEUED)) == [d, c, b, a]
    assert await found(statuses=(RUNNING,)) == []
    assert await found(job_type="other") == [b]
    assert await found(queue="letters") == [a]
    assert await found(error_code="no_ink") == [d]
    assert await found(dismissed=True) == [b]
    assert await found(dismissed=False, statuses=(FAILED,)) == [d]
    assert await found(owned=True) == [c]
    assert await found(owned=False) == [d, b, a]
    assert await found(created_from=first) == [d, c, b, a]
    assert await found(created_to=first) == []
    assert await found(created_from=first + timedelta(seconds=1)) == [d, c]
    assert await found(created_to=first + timedelta(seconds=60)) == [b, a], "the end of the range is excluded"
    every = {
        "tenant": "default",
        "statuses": (FAILED,),
        "job_type": "other",
        "queue": "default",
        "pipeline_id": b,
        "error_code": "no_paper",
        "dismissed": True,
        "owned": False,
        "created_from": first,
        "created_to": first + timedelta(seconds=1),
    }
    assert await found(**every) == [b]
    for name, value in {"tenant": "else", "queue": "letters", "error_code": "no_ink", "dismissed": False}.items():
        assert await found(**{**every, name: value}) == []


@pytest.fixture
async def family(queue):
    """A root that waits for two children, one of which waits for two more, and a job that a grandchild chains."""
    root = await single(queue, tenant="a")
    left, right = await hand_over(queue, await claim_one(queue, root), 2)
    below = await hand_over(queue, await claim_one(queue, left), 2)
    follower = await chain(queue, await claim_one(queue, below[0]), NewJob("other"))
    await single(queue, tenant="a")
    return {"root": root, "left": left, "right": right, "below": below, "follower": follower}


async def test_children_and_pipelines_are_listed_completely_and_in_pages(queue, views, family):
    everyone = [family["follower"], *family["below"][::-1], family["right"], family["left"], family["root"]]
    children = [family["right"], family["left"]]
    for limit in (1, 2, 50):
        assert await walk(views, JobFilter(pipeline_id=family["root"]), limit=limit) == everyone
        assert await walk(views, JobFilter(parent_job_id=family["root"]), limit=limit) == children
    assert await walk(views, JobFilter(pipeline_id=family["root"], job_type="other")) == [family["follower"]]
    assert await walk(views, JobFilter(pipeline_id=family["root"], parent_job_id=family["root"])) == children
    assert await walk(views, JobFilter(pipeline_id=uuid4(), parent_job_id=family["root"])) == []
    assert await walk(views, JobFilter(pipeline_id=family["left"])) == [], "a child is not a separate pipeline"


async def test_other_tenants_cannot_see_a_pipeline(views, family):
    for wanted in ({"pipeline_id": family["root"]}, {"parent_job_id": family["root"]}, {}):
        assert await walk(views, JobFilter(tenant="b", **wanted)) == []
    with pytest.raises(NotFound, match="there is no pipeline"):
        await views.pipeline(family["root"], tenant="b")
    assert await views.inbox(tenant="b") == []
    assert await views.queues_of_tenant("b") == ([], True)
    assert await views.open_members(family["root"], tenant="b", limit=10) == []


async def test_a_pipeline_id_chosen_by_the_user_groups_its_jobs_per_tenant(queue, views, family):
    mine = uuid4()
    one, two = await put(queue, NewJob("noop", pipeline_id=mine), NewJob("other", pipeline_id=mine))
    three = await single(queue, pipeline_id=mine, tenant="b")
    (child,) = await hand_over(queue, await claim_one(queue, one), 1)
    assert await walk(views, JobFilter(pipeline_id=mine, tenant="default")) == [child, two, one]
    assert await walk(views, JobFilter(pipeline_id=mine, tenant="b")) == [three]
    assert (await views.pipeline(mine, tenant="default")).counts == {QUEUED: 2, RUNNING: 1}
    stranger = await single(queue, pipeline_id=family["root"], tenant="b")
    assert stranger not in await walk(views, JobFilter(pipeline_id=family["root"], tenant="a"))


# Pipelines ------------------------------------------------------------------------------------------------------------


async def test_a_pipeline_counts_its_jobs_by_type_and_status(queue, views, family):
    seen = await views.pipeline(family["root"], tenant="a")
    assert (seen.status, seen.finished_at) == (RUNNING, None)
    assert seen.counts == {RUNNING: 2, QUEUED: 3, SUCCEEDED: 1}
    assert {step.job_type: step.counts for step in seen.steps} == {
        "noop": {RUNNING: 2, QUEUED: 2, SUCCEEDED: 1},
        "other": {QUEUED: 1},
    }
    root = await queue.get(family["root"])
    assert (seen.created_at, seen.started_at) == (root.created_at, root.started_at)


async def test_a_pipeline_is_open_until_its_last_job_and_then_as_bad_as_its_worst(queue, views):
    root = await single(queue)
    assert (await views.pipeline(root)).status is QUEUED
    claim = await claim_one(queue, root)
    assert (await views.pipeline(root)).status is RUNNING
    follower = await chain(queue, claim, NewJob("other"))
    assert (await views.pipeline(root)).status is RUNNING, "a pipeline that is half done is not QUEUED"
    await end_as(queue, follower, CANCELLED)
    assert (await views.pipeline(root)).status is CANCELLED
    await queue.rerun(follower)
    await end_as(queue, follower, FAILED)
    seen = await views.pipeline(root)
    assert (seen.status, seen.finished_at) == (FAILED, (await queue.get(follower)).finished_at)
    await queue.rerun(follower)
    await end_as(queue, follower, SUCCEEDED)
    assert (await views.pipeline(root)).status is SUCCEEDED


async def test_children_that_were_allowed_to_fail_do_not_fail_the_pipeline(queue, views):
    root = await single(queue)
    good, bad = await hand_over(queue, await claim_one(queue, root), 2, allow_failures=1)
    await end_as(queue, good, SUCCEEDED)
    await end_as(queue, bad, FAILED)
    seen = await views.pipeline(root)
    assert (seen.status, seen.counts) == (SUCCEEDED, {SUCCEEDED: 2, FAILED: 1})


# Why a job waits ------------------------------------------------------------------------------------------------------


async def crew(queue, name="w9", *, running=0, stopping=False, operations=("noop", "other"), queues=None):
    """Register a worker with a fresh heartbeat."""
    await Workers(queue.database).register(
        id=name, host="h", pid=1, version="1", queues=queues, operations=list(operations), concurrency=2
    )
    await Workers(queue.database).heartbeat(name, running=running, stopping=stopping)


async def why(queue, id):
    job = await queue.get(id)
    return (await Views(queue).waiting_on([job]))[id]


async def reasons(queue, id):
    return [one.reason for one in await why(queue, id)]


async def test_a_job_that_may_start_runs_or_has_ended_waits_for_nothing(queue):
    await crew(queue)
    id = await single(queue)
    assert await why(queue, id) == []
    claim = await claim_one(queue, id)
    assert await why(queue, id) == []
    await succeed(queue, claim)
    assert await why(queue, id) == []


async def test_it_waits_for_its_time(queue, clock):
    await crew(queue)
    id = await single(queue, delay_seconds=20)
    job = await queue.get(id)
    (found,) = await why(queue, id)
    assert (found.reason, found.until) == ("run_after", job.run_after)
    assert job.run_after.isoformat() in found.message
    await clock.advance(queue, 21)
    assert await why(queue, id) == []


async def test_it_waits_for_a_paused_queue(queue):
    await crew(queue)
    id = await single(queue)
    await NamedQueues(queue.database).pause("default")
    (found,) = await why(queue, id)
    assert (found.reason, found.message) == ("paused_queue", "the queue 'default' is paused")
    await NamedQueues(queue.database).resume("default")
    assert await why(queue, id) == []


async def test_it_waits_for_the_holder_of_its_key(queue, clock):
    await crew(queue)
    holder = await single(queue, exclusive_key="k")
    claim = await claim_one(queue, holder)
    id = await single(queue, exclusive_key="k")
    elsewhere = await single(queue, exclusive_key="k", tenant="b")
    (found,) = await why(queue, id)
    assert (found.reason, found.job_id) == ("exclusive_key", holder)
    assert found.message == f'its key ["k"] is held by job {holder} (RUNNING)'
    assert await why(queue, elsewhere) == [], "a key is one tenant's"
    await snooze(queue, claim, 5)
    assert (await why(queue, id))[0].message.endswith("(QUEUED)"), "a snoozing job keeps its key"
    assert await reasons(queue, holder) == ["run_after"]
    await clock.advance(queue, 6)
    claim = await claim_one(queue, holder)
    await queue.cancel([holder])
    assert (await why(queue, id))[0].message.endswith("(CANCELLED)"), "its operation has not ended yet"
    await queue.let_go([(holder, claim.claim)])
    assert await why(queue, id) == []


async def test_it_waits_for_an_earlier_job_of_its_key(queue):
    await crew(queue)
    first, second = await put(queue, NewJob("noop", exclusive_key="k"), NewJob("noop", exclusive_key="k"))
    (found,) = await why(queue, second)
    assert (found.reason, found.job_id) == ("exclusive_key", first)
    assert found.message == f'its key ["k"] goes to job {first} first'
    assert await why(queue, first) == []
    await queue.cancel([first])
    assert await why(queue, second) == []


@pytest.mark.parametrize("hindrance", ["paused", "unknown", "later", "elsewhere"])
async def test_it_does_not_wait_for_an_earlier_job_that_cannot_be_claimed(queue, hindrance):
    """As in a claim, another job of the key goes first only if the worker could run it."""
    options = {
        "paused": {"queue": "letters"},
        "unknown": {"operation": "other"},
        "later": {"delay_seconds": 60},
        "elsewhere": {"queue": "letters"},
    }[hindrance]
    first = NewJob(**{"operation": "noop", "exclusive_key": "k", "priority": 0, **options})
    _, second = await put(queue, first, NewJob("noop", exclusive_key="k"))
    if hindrance == "paused":
        await NamedQueues(queue.database).pause("letters")
    await crew(queue, operations=["noop"], queues=["default"] if hindrance == "elsewhere" else None)
    assert await why(queue, second) == []
    types = ["noop"] if hindrance == "unknown" else BASIC.names()
    queues = ["default"] if hindrance == "elsewhere" else ["default", "letters"]
    assert [claim.id for claim in await take(queue, queues=queues, types=types)] == [second]


async def test_it_waits_for_a_live_worker_that_knows_its_operation(queue, clock):
    id = await single(queue, queue="letters")
    for name, options in {
        "another": {"operations": ["other"]},
        "elsewhere": {"queues": ["default"]},
        "stopping": {"stopping": True},
    }.items():
        await crew(queue, name, **options)
    (found,) = await why(queue, id)
    assert found.reason == "no_worker"
    assert found.message == "no live worker knows the operation 'noop' and serves the queue 'letters'"
    await crew(queue, "able", queues=["letters"])
    assert await why(queue, id) == []
    await clock.advance(queue, 31)
    assert await reasons(queue, id) == ["no_worker"], "the worker has been silent for too long"
    await Workers(queue.database).heartbeat("able", running=0, stopping=False)
    assert await why(queue, id) == []


async def test_it_waits_for_a_free_slot(queue):
    id = await single(queue)
    await crew(queue, "busy", running=2)
    (found,) = await why(queue, id)
    assert (found.reason, found.message) == ("no_free_slot", "every worker that could run it is busy")
    await crew(queue, "other", running=0, operations=["other"])
    assert await reasons(queue, id) == ["no_free_slot"], "that worker does not know the operation"
    await crew(queue, "idle", running=1)
    assert await why(queue, id) == []


async def test_a_parent_waits_for_its_children(queue):
    await crew(queue)
    id = await single(queue)
    children = await hand_over(queue, await claim_one(queue, id), 2)
    (found,) = await why(queue, id)
    assert (found.reason, found.message) == ("children", "2 of its children have not ended")
    for child in children:
        await end_as(queue, child, SUCCEEDED)
    assert await why(queue, id) == []


async def test_a_job_whose_workers_died_waits_to_run_alone(queue, clock):
    id = await single(queue)
    for _ in range(2):
        await dead(queue, clock, await claim_one(queue, id))
    await crew(queue)
    (found,) = await why(queue, id)
    assert (found.reason, found.message) == ("isolation", "its worker died twice, so it runs alone next")
    await claim_one(queue, id, suspect=True)
    assert await why(queue, id) == []


async def test_all_reasons_at_once_and_a_job_among_others(queue):
    holder = await single(queue, exclusive_key="k")
    await claim_one(queue, holder)
    id = await single(queue, exclusive_key="k", delay_seconds=60)
    plain = await single(queue, queue="letters")
    await NamedQueues(queue.database).pause("default")
    await raw(queue, "UPDATE batchwright.job SET rescues = 2 WHERE id = %(id)s", id=id)
    jobs = await queue.get_many([id, plain, holder])
    found = await Views(queue).waiting_on(jobs)
    named = {one: [reason.reason for reason in found[one]] for one in (id, plain, holder)}
    assert named == {
        id: ["run_after", "paused_queue", "exclusive_key", "no_worker", "isolation"],
        plain: ["no_worker"],
        holder: [],
    }
    await queue.cancel([plain])
    assert (await Views(queue).waiting_on(jobs))[plain] == [], "the slots that were read before do not count"


@pytest.mark.direct("it waits for the doorbell")
async def test_a_worker_starts_the_jobs_of_a_queue_soon_after_it_was_resumed(pool, queue):
    """The worker's poller would sleep for longer than the test, so only the doorbell can wake it."""
    await single(queue)
    await NamedQueues(queue.database).pause("default")
    async with working(pool, noop, poll_seconds_min=10.0, poll_seconds_max=10.0), asyncio.timeout(5):
        id = await single(queue)
        assert await reasons(queue, id) == ["paused_queue"]
        await NamedQueues(queue.database).resume("default")
        bell = Doorbell(pool)
        while (await queue.get(id)).finished_at is None:
            bell.ring(["default"])  # the worker may not listen yet
            await bell.close()


# The inbox ------------------------------------------------------------------------------------------------------------


async def failed(queue, n, /, *, code="broken", **options):
    ids = await some(queue, n, **options)
    for id in ids:
        assert await fail(queue, await claim_one(queue, id), code=code)
    return ids


async def test_the_inbox_groups_by_type_and_cause_with_the_latest_as_samples(queue, views, clock):
    await clock.advance(queue, 0)
    ids = []
    for _ in range(4):
        ids += await failed(queue, 1)
        await clock.advance(queue, 1)
    (ink,) = await failed(queue, 1, code="no_ink", tenant="b")
    await end_as(queue, await single(queue), CANCELLED)
    (other,) = await put(queue, NewJob("other"))
    await fail(queue, await claim_one(queue, other))
    broken, *rest = await views.inbox()
    assert (broken.job_type, broken.code, broken.kind, broken.count) == ("noop", "broken", "fatal", 4)
    assert broken.samples == ids[:0:-1]
    assert broken.message == "it broke"
    assert broken.first_at + timedelta(seconds=3) == broken.last_at
    assert {(one.job_type, one.code, one.count) for one in rest} == {("noop", "no_ink", 1), ("other", "broken", 1)}
    assert [one.samples for one in await views.inbox(tenant="b")] == [[ink]]
    assert [one.samples for one in await views.inbox(job_type="other")] == [[other]]
    assert len(await views.inbox(limit=1)) == 1


async def test_the_inbox_says_what_may_succeed_when_it_is_run_again(queue, views):
    for kind in ("transient", "rate_limited", "deadline", "fatal", "schema_invalid"):
        claim = await claim_one(queue, await single(queue))
        error = {"kind": kind, "code": kind, "type": "T", "message": "m"}
        await queue.settle([Settle("fail", claim, {"error": error})], "w1")
    retryable = {one.code for one in await views.inbox() if one.is_retryable}
    assert retryable == {"transient", "rate_limited", "deadline"}


async def test_an_error_without_a_code_is_a_group_as_well(queue, views):
    claim = await claim_one(queue, await single(queue))
    await queue.settle([Settle("fail", claim, {"error": {"kind": "fatal"}})], "w1")
    (group,) = await views.inbox()
    assert (group.code, group.message, group.samples) == (None, None, [claim.id])


async def test_dismissed_jobs_leave_the_inbox_and_come_back_when_they_fail_again(queue, views):
    one, two = await failed(queue, 2)
    assert await queue.dismiss([one]) == 1
    assert [group.samples for group in await views.inbox()] == [[two]]
    assert await queue.dismiss([one]) == 0
    await queue.rerun(one)
    assert (await queue.get(one)).dismissed_at is None
    await fail(queue, await claim_one(queue, one))
    assert [sorted(group.samples) for group in await views.inbox()] == [[one, two]]


async def test_a_small_group_is_not_hidden_behind_a_large_one(queue, views, monkeypatch):
    monkeypatch.setattr(views_module, "INBOX_COUNT_MAX", 1)
    large = await failed(queue, 23, code="a")
    (small,) = await failed(queue, 1, code="z")
    first, last = await views.inbox()
    assert (first.code, first.count, first.has_more, first.samples) == ("a", 21, True, large[:-4:-1])
    assert (last.code, last.count, last.has_more, last.samples) == ("z", 1, False, [small])


async def test_jobs_with_an_owner_are_not_in_the_inbox(queue, views):
    """No verb of the inbox applies to them, so they could never leave it."""
    await failed(queue, 1, owner="batch 7")
    assert await views.inbox() == []


# Queues, workers and operations ---------------------------------------------------------------------------------------


async def test_queues_show_how_many_jobs_are_due_scheduled_and_running(queue, views, clock):
    await clock.advance(queue, 0)
    await some(queue, 2)
    await some(queue, 1, delay_seconds=60)
    await some(queue, 1, tenant="b", queue="letters")
    await claim_one(queue, await single(queue))
    await NamedQueues(queue.database).pause("letters")
    await clock.advance(queue, 10)
    default, letters = await views.queues()
    assert (default.name, default.due, default.scheduled, default.running) == ("default", 2, 1, 1)
    assert (default.oldest_due_seconds, default.paused_at) == (10.0, None)
    assert (letters.name, letters.due, letters.paused_at) == ("letters", 1, clock.time - timedelta(seconds=10))
    ((mine,), _) = await views.queues_of_tenant("b")
    assert (mine.name, mine.due) == ("letters", 1)
    await queue.cancel(await walk(views, JobFilter(queue="letters")))
    assert (await views.queues())[1].oldest_due_seconds is None
    assert await views.queues_of_tenant("b") == ([], True)


async def test_pausing_again_keeps_the_first_time_and_an_unknown_queue_is_named(queue, views, clock):
    await clock.advance(queue, 0)
    await single(queue)
    await NamedQueues(queue.database).pause("default")
    since = clock.time
    await clock.advance(queue, 10)
    await NamedQueues(queue.database).pause("default")
    assert (await views.queues())[0].paused_at == since
    with pytest.raises(NotFound, match="there is no queue 'defalt'; did you mean 'default'"):
        await NamedQueues(queue.database).resume("defalt")


async def test_workers_and_operations_are_shown_with_their_heartbeats(pool, queue, views, clock):
    async with working(pool, noop, concurrency=3) as worker:
        (seen,) = await views.workers()
        assert (seen.id, seen.concurrency, seen.operations, seen.is_alive) == (worker.id, 3, ["noop"], True)
        (operation,) = await views.operations()
        assert (operation.name, operation.workers, operation.defaults["max_attempts"]) == ("noop", 1, 3)
        assert set(operation.payload_schema["properties"]) == {"n", "note"}
        await clock.advance(queue, 120)
        assert [one.is_alive for one in await views.workers()] == [False]
        assert [one.workers for one in await views.operations()] == [0]
    assert await views.workers() == []


async def test_a_long_queue_is_counted_to_a_limit_and_says_so(queue, views, monkeypatch):
    monkeypatch.setattr(views_module, "_QUEUE_COUNT_MAX", 3)
    await some(queue, 3)
    await some(queue, 2, queue="short", run_after=datetime(2099, 1, 1, tzinfo=UTC))
    long, short = await views.queues()
    assert (long.name, long.due, long.has_more) == ("default", 3, True)
    assert (short.name, short.scheduled, short.has_more, short.oldest_due_seconds) == ("short", 2, False, None)
    assert await views.queues(name="short") == [short]


async def test_many_queues_share_the_limit_of_all_of_them(queue, views, monkeypatch):
    monkeypatch.setattr(views_module, "_QUEUES_COUNT_MAX", 200)
    await some(queue, 102)
    await some(queue, 2, queue="short")
    long, short = await views.queues()
    assert (long.due, long.has_more, short.due, short.has_more) == (100, True, 2, False)
    (alone,) = await views.queues(name="default")
    assert (alone.due, alone.has_more) == (102, False)


async def test_a_tenant_sees_its_own_jobs_behind_those_of_others(queue, views, monkeypatch):
    """The first thousand jobs of a queue may all belong to others; most tenants have few jobs, so these are read."""
    monkeypatch.setattr(views_module, "_QUEUE_COUNT_MAX_OF_TENANT", 4)
    await some(queue, 9, tenant="b")
    await some(queue, 2, tenant="a")
    await some(queue, 1, tenant="a", queue="letters", run_after=datetime(2099, 1, 1, tzinfo=UTC))
    (default, letters), is_complete = await views.queues_of_tenant("a")
    assert (default.name, default.due, default.has_more) == ("default", 2, False)
    assert default.oldest_due_seconds is not None
    assert (letters.name, letters.scheduled, letters.oldest_due_seconds) == ("letters", 1, None)
    assert is_complete


async def test_the_queues_of_a_tenant_with_many_jobs_are_marked_as_incomplete(queue, views, monkeypatch):
    monkeypatch.setattr(views_module, "_QUEUE_COUNT_MAX_OF_TENANT", 4)
    monkeypatch.setattr(views_module, "_LISTED_MAX_OF_TENANT", 2)
    others = await some(queue, 5, tenant="b")
    hidden = await some(queue, 1, tenant="a")
    newer = await some(queue, 3, tenant="a", queue="letters")
    for id in newer:
        await end_as(queue, id, CANCELLED)
    assert await views.queues_of_tenant("a") == ([], False), (
        "the job is neither among the first of the queue nor among the tenant's newest"
    )
    await queue.cancel([*hidden, others[0]])
    assert await views.queues_of_tenant("a") == ([], True)


async def test_jobs_among_the_newest_and_the_first_of_a_queue_are_counted_once(queue, views, monkeypatch):
    monkeypatch.setattr(views_module, "_QUEUE_COUNT_MAX_OF_TENANT", 4)
    monkeypatch.setattr(views_module, "_LISTED_MAX_OF_TENANT", 2)
    await some(queue, 3, tenant="a")
    (seen,), is_complete = await views.queues_of_tenant("a")
    assert (seen.due, seen.has_more, is_complete) == (3, False, True)
    await some(queue, 6, tenant="a")
    (seen,), is_complete = await views.queues_of_tenant("a")
    assert (seen.due, seen.has_more, is_complete) == (8, True, False), "the first five and the newest three"


@pytest.mark.parametrize("scan_max", [2, 10_000])
async def test_lists_by_status_are_the_same_however_many_jobs_match(queue, views, monkeypatch, scan_max):
    monkeypatch.setattr(views_module, "_SCAN_MAX", scan_max)
    await failed(queue, 4)
    await queue.cancel(await some(queue, 3))
    await some(queue, 3, tenant="other")
    running = await take(queue, 2)
    for status in ("FAILED", "CANCELLED", "QUEUED", "RUNNING"):
        for tenant in (None, "other", "default"):
            whose = "true" if tenant is None else f"tenant = '{tenant}'"
            wanted = JobFilter(statuses=(JobStatus(status),), tenant=tenant)
            assert await walk(views, wanted, limit=2) == await newest_first(queue, f"status = '{status}' AND {whose}")
    both = JobFilter(statuses=(FAILED, CANCELLED))
    assert await walk(views, both, limit=3) == await newest_first(queue, "status IN ('FAILED', 'CANCELLED')")
    assert len(running) == 2


async def test_a_pipeline_is_counted_to_a_limit_and_says_so(queue, views, monkeypatch):
    id = await single(queue)
    assert not (await views.pipeline(id)).has_more
    monkeypatch.setattr(views_module, "_PIPELINE_COUNT_MAX", 0)
    assert (await views.pipeline(id)).has_more


async def test_a_pipeline_is_open_while_a_chained_job_beyond_the_count_is_open(queue, views, monkeypatch):
    monkeypatch.setattr(views_module, "_PIPELINE_COUNT_MAX", 1)
    root = await single(queue)
    chained = await some(queue, 4, pipeline_id=root)
    for id in [root, *chained[:3]]:
        await end_as(queue, id, CANCELLED)
    seen = await views.pipeline(root)
    assert (seen.has_more, seen.status, seen.finished_at) == (True, RUNNING, None)
    await end_as(queue, chained[3], CANCELLED)
    assert (await views.pipeline(root)).status is CANCELLED


@pytest.mark.parametrize("ending", ["join", "cancel", "deadline"])
async def test_no_child_is_open_when_its_parent_has_ended_so_the_status_of_parents_is_enough(
    queue, views, clock, monkeypatch, ending
):
    """Otherwise a pipeline would be shown as ended while a child that was not counted is open."""
    monkeypatch.setattr(views_module, "_PIPELINE_COUNT_MAX", 0)
    await clock.advance(queue, 0)
    root = await single(queue, deadline=clock.time + timedelta(seconds=60))
    good, bad, last = await hand_over(queue, await claim_one(queue, root), 3)
    await end_as(queue, good, SUCCEEDED)
    await end_as(queue, bad, FAILED)
    seen = await views.pipeline(root)
    assert (seen.status, seen.counts, seen.has_more) == (RUNNING, {RUNNING: 1}, True), (
        "too many failures do not end the parent while a child is open"
    )
    if ending == "join":
        await end_as(queue, last, SUCCEEDED)
    elif ending == "cancel":
        await queue.cancel([root])
    else:
        await clock.advance(queue, 61)
        await queue.expire()
    seen = await views.pipeline(root)
    assert seen.counts == {CANCELLED if ending == "cancel" else FAILED: 1}
    assert seen.status in seen.counts
    assert (await queue.get(last)).finished_at is not None


# Plans ----------------------------------------------------------------------------------------------------------------

ID = UUID("00000000-0000-0000-0000-000000000001")
LIST = {
    "statuses": [],
    "before_time": datetime(9999, 1, 1, tzinfo=UTC),
    "before_id": UUID(int=2**128 - 1),
    "scan_max": 10_000,
    "limit": 51,
    "is_failed": False,
}
ASKED = {
    "list_jobs": LIST,
    "list_by_status": {**LIST, "statuses": ["QUEUED", "RUNNING"]},
    "list_children": {**LIST, "parent_job_id": ID},
    "list_pipeline": {**LIST, "pipeline_id": ID},
    "pipeline": {"pipeline_id": ID, "count_max": 10_000},
    "open_members": {"pipeline_id": ID, "limit": 200, "scan_max": 10_000},
    "with_ancestors": {**LIST, "ids": [ID]},
    "waiting_on": {"ids": [ID], "silent_seconds": 30.0},
    "inbox": {"limit": 100, "count_max": 20_000, "groups_max": 1000, "samples": 3},
    "queue_depths": {"limit": 1000, "count_max": 10_000},
    "queues_of_tenant": {"tenant": "default", "limit": 1000, "count_max": 1000, "listed_max": 5000},
    "workers": {"limit": 1000, "silent_seconds": 30.0},
    "operations": {"limit": 1000, "silent_seconds": 30.0},
}


@pytest.mark.parametrize("name", list(SQL))
def test_every_view_can_be_prepared_and_none_scans_the_whole_table(crowd, name):
    text, _ = numbered(name, SQL)
    crowd.execute(f"PREPARE probe_of_it AS {text}".encode())
    assert whole_table_scans(plan(crowd, name, source=SQL, **ASKED[name])) == []


@pytest.mark.parametrize("tenant", [None, "default"])
def test_a_page_of_a_list_among_thirty_thousand_jobs_reads_few_database_pages(crowd, tenant):
    first = plan(crowd, "list_jobs", source=SQL, run=True, **LIST, tenant=tenant)
    assert first["Actual Rows"] == 51
    assert touched(first) < 300
    place = crowd.execute("SELECT created_at, id FROM batchwright.job ORDER BY created_at, id OFFSET 15000 LIMIT 1")
    created_at, id = place.fetchone()
    deep = {**LIST, "before_time": created_at, "before_id": id, "tenant": tenant}
    assert touched(plan(crowd, "list_jobs", source=SQL, run=True, **deep)) < 300


@pytest.mark.parametrize("tenant", [None, "default"])
@pytest.mark.parametrize(("is_failed", "index"), [(False, "listing"), (True, "job_failed")])
def test_a_search_that_finds_nothing_stops_at_its_limit(crowd, tenant, is_failed, index):
    """There are a thousand failed jobs, and thirty thousand in all."""
    wanted = {**LIST, "job_type": "rare", "scan_max": 200, "tenant": tenant, "is_failed": is_failed}
    walked = plan(crowd, "list_jobs", source=SQL, run=True, **wanted)
    assert walked["Actual Rows"] == 1, "the row is the place where the search stopped"
    assert any(name.startswith(index) for name in _used(walked))
    assert touched(walked) < 200 * 7


def _used(plan):
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node and node["Actual Loops"]}


@pytest.mark.parametrize(
    ("wanted", "rows", "touched_max"),
    [
        ({"statuses": ["RUNNING"]}, 50, 600),  # fifty of all jobs run
        ({"statuses": ["RUNNING", "CANCELLED"], "queue": "default"}, 50, 600),
        ({"statuses": ["CANCELLED"]}, 0, 30),
        ({"statuses": ["QUEUED"], "queue": "empty"}, 0, 30),
        ({"statuses": ["QUEUED"]}, 1, 300),  # there are too many, and the row says so
        ({"statuses": ["QUEUED"], "queue": "default"}, 1, 300),
        ({"statuses": ["SUCCEEDED"]}, 1, 300),
    ],
)
def test_jobs_of_a_status_are_sorted_only_if_they_are_few(crowd, wanted, rows, touched_max):
    found = plan(crowd, "list_by_status", source=SQL, run=True, **{**LIST, "scan_max": 200, **wanted})
    assert found["Actual Rows"] == rows
    assert touched(found) < touched_max


def test_the_children_of_a_job_are_sorted_only_if_they_are_few(crowd):
    wanted = {**LIST, "parent_job_id": ID, "scan_max": 200}
    found = plan(crowd, "list_children", source=SQL, run=True, **wanted)
    assert found["Actual Rows"] == 1, "there are three thousand"
    assert touched(found) < 400


@pytest.mark.parametrize("name", ["list_pipeline", "pipeline"])
def test_a_pipeline_is_read_up_to_its_limit(crowd, name):
    crowd.execute(
        "INSERT INTO batchwright.job (id, job_type, queue, tenant, priority, run_after, payload, max_attempts, "
        "pipeline_id, created_at) VALUES (%(id)s, 'noop', 'default', 'default', 5, now(), '{}', 3, %(id)s, now())",
        {"id": ID},
    )
    wanted = {**LIST, "pipeline_id": ID, "scan_max": 200, "count_max": 200}
    found = plan(crowd, name, source=SQL, run=True, **wanted)
    assert touched(found) < 200 * 10, "it has three thousand jobs"


def test_a_queue_is_counted_up_to_its_limit(crowd):
    found = plan(crowd, "queue_depths", source=SQL, run=True, limit=10, count_max=100)
    assert scanned(found) <= 100 + 50 + 10, "waiting, running, and the oldest of each priority"
    assert touched(found) < 100 * 4 + 200


def test_a_tenants_queues_are_searched_up_to_the_limits(crowd):
    wanted = {"tenant": "default", "limit": 10, "count_max": 100, "listed_max": 100}
    found = plan(crowd, "queues_of_tenant", source=SQL, run=True, **wanted)
    assert scanned(found) <= 101 + 2 * 101 + 50, "the first jobs, the newest ones, and the running ones"
    assert touched(found) < 100 * 8 + 200


def test_open_jobs_of_a_pipeline_are_found_without_reading_its_ended_ones(crowd):
    crowd.execute(
        "UPDATE batchwright.job SET pipeline_id = %s WHERE status = 'SUCCEEDED' AND parent_job_id IS NULL", [ID]
    )
    crowd.execute("UPDATE batchwright.job SET pipeline_id = %s WHERE locked_by IS NOT NULL", [ID])
    crowd.execute("ANALYZE batchwright.job")
    found = plan(crowd, "open_members", source=SQL, run=True, pipeline_id=ID, limit=20, scan_max=200)
    assert found["Actual Rows"] == 20, "fifty of seventeen thousand are open"
    assert touched(found) < 400


def test_the_inbox_finds_every_group_and_counts_each_up_to_its_share_of_the_limit(crowd):
    crowd.execute(
        "UPDATE batchwright.job SET error = jsonb_build_object('code', 'c' || right(id::text, 1)) "
        "WHERE status = 'FAILED'"
    )
    wanted = {"limit": 100, "count_max": 320, "groups_max": 1000, "samples": 3}
    found = plan(crowd, "inbox", source=SQL, run=True, **wanted)
    assert found["Actual Rows"] == 16
    assert scanned(found) < 16 * 30, "a thousand have failed"


def test_a_later_page_of_children_is_read_from_the_index_in_its_order(crowd):
    page = {"id": ID, "round": 1, "limit": 100}
    ids = [
        id
        for (id,) in crowd.execute(
            "SELECT id FROM batchwright.job WHERE parent_job_id = %s ORDER BY id", [ID]
        ).fetchall()
    ]
    for after in (UUID(int=0), ids[1500], ids[-101]):
        found = plan(crowd, "children_after", run=True, after=after, **page)
        assert (found["Actual Rows"], indexes(found)) == (100, {"job_children"}), "there are three thousand"
        assert scanned(found) == 100


def test_the_reasons_for_a_page_of_waiting_jobs_of_one_key_read_few_database_pages(crowd):
    crowd.execute("UPDATE batchwright.job SET exclusive_key = '[\"line\"]', is_current = false WHERE status = 'QUEUED'")
    crowd.execute("ANALYZE batchwright.job")
    ids = [id for (id,) in crowd.execute("SELECT id FROM batchwright.job WHERE status = 'QUEUED' LIMIT 50").fetchall()]
    asked = plan(crowd, "waiting_on", source=SQL, run=True, ids=ids, silent_seconds=30.0)
    assert asked["Actual Rows"] == 50
    assert touched(asked) < 50 * 40


def test_the_inbox_reads_only_failed_jobs(crowd):
    asked = plan(crowd, "inbox", source=SQL, run=True, **ASKED["inbox"])
    assert touched(asked) < 1000 * 4, "a thousand of thirty thousand jobs have failed"


async def test_a_job_of_an_on_demand_queue_waits_for_a_worker_that_serves_the_queue(queue):
    columns = {"host": "h", "pid": 1, "version": "0", "queues": None, "operations": ["noop"], "concurrency": 1}
    demand = {"on_demand_types": ["noop"], "on_demand_queues": ["shard/small", "all/"]}
    await Workers(queue.database).register(id="w", **columns, **demand)
    await raw(queue, "UPDATE batchwright.worker SET running = 1")
    reasons = {}
    for name in ("shard/small", "shard/large", "all/large"):
        (id,) = await put(queue, NewJob("noop", queue=name))
        found = await Views(queue).waiting_on([await queue.get(id)])
        reasons[name] = [one.reason for one in found.get(id, [])]
    assert reasons == {"shard/small": [], "shard/large": ["no_worker"], "all/large": []}
