"""Counts of workers are summed in the database exactly once; the contents of queues are read at low cost."""

import asyncio
import dataclasses
import random
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchwright import Context, Fatal, NewJob, Snooze, Transient, Wait, operation
from batchwright.db.database import Database, Pool
from batchwright.engine import metrics as counts_module
from batchwright.engine.exposition import CONTENT_TYPE, STANDING_METRICS, Exposition, process_counts
from batchwright.engine.metrics import SQL, WORKER_METRICS, CountsWriter, WorkerCounts, fold, read_counts, read_standing
from batchwright.engine.queue import Queue
from batchwright.engine.upkeep import lock_round
from batchwright.engine.workers import Workers
from batchwright.errors import DatabaseError
from batchwright.operations.registry import Registry
from batchwright.telemetry.metrics import Counts, LabelLimit, Metric, series
from tests.engine.faulty import Fault, Faulty
from tests.engine.planning import indexes, plan, scanned, touched, whole_table_scans
from tests.support import DATABASE, fail, make_worker, put, raw, take, take_one, working

GONE = counts_module._SILENT_SECONDS + 1
FORGOTTEN = counts_module._FOLDED_SECONDS + 1


async def total(queue, name="jobs_rescued_total"):
    return sum(series(await read_counts(queue.database)).get(name, {}).values())


async def page(queue, own=None, **options):
    """The page as Prometheus reads it: samples by name and label values."""
    text = (await Exposition(queue.database, own or process_counts(), **options).render()).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            bound = [sample.labels.pop("le")] if "le" in sample.labels else []
            found[sample.name.removeprefix("batchwright_"), *sample.labels.values(), *bound] = sample.value
    return found


def writer(queue, name):
    counts = WorkerCounts()
    return counts, CountsWriter(queue.database, name, counts)


# Sums ---------------------------------------------------------------------------------------------------------------


async def test_the_page_shows_the_sums_of_several_workers(pool, queue):
    workers = [make_worker(pool, concurrency=10) for _ in range(3)]
    await put(queue, *(NewJob("noop", queue="q") for _ in range(25)))
    ran = [await worker.run_once() for worker in workers]
    assert ran == [10, 10, 5]
    for worker in workers:
        await worker.close()
    found = await page(queue)
    assert found["jobs_claimed_total", "q"] == 25
    assert found["jobs_settled_total", "noop", "succeed"] == 25
    assert found["job_run_seconds_count", "noop"] == 25
    assert found["job_claim_latency_seconds_count", "q"] == 25
    assert found["job_claim_latency_seconds_bucket", "q", "+Inf"] == 25
    assert 1 <= found["settle_seconds_count",] <= 25


async def test_a_running_worker_writes_its_counts_regularly_and_at_its_end(pool, queue, monkeypatch):
    monkeypatch.setattr(counts_module, "_WRITE_SECONDS", 0.01)
    async with working(pool) as worker:
        await put(queue, *(NewJob("noop") for _ in range(5)))
        while await total(queue, "jobs_settled_total") < 5:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(counts_module, "_WRITE_SECONDS", 60)
        worker.counts.add("leases_lost_total", 7)
    assert await total(queue, "leases_lost_total") == 7


@operation("varied", max_attempts=2, backoff_seconds=600, backoff_seconds_max=600)
async def varied(ctx: Context, how: str) -> object:
    match how:
        case "fail":
            raise Fatal("no")
        case "retry":
            raise Transient("later")
        case "snooze":
            return Snooze(60)
        case "wait":
            return Wait([NewJob("varied", {"how": "child"}, delay_seconds=600)])
        case "release":
            await asyncio.Event().wait()
    return None


async def test_settles_are_counted_by_their_outcome(pool, queue):
    worker = make_worker(pool, varied, concurrency=10)
    outcomes = ["succeed", "succeed", "fail", "retry", "snooze", "wait"]
    await put(queue, *(NewJob("varied", {"how": how}) for how in outcomes), operations=Registry([varied]))
    await worker.run_once()
    await put(queue, NewJob("varied", {"how": "release"}), operations=Registry([varied]))
    running = asyncio.create_task(worker.run_once())
    while not (worker._runner.held and all(one.context for one in worker._runner.held.values())):
        await asyncio.sleep(0)
    worker._runner.interrupt_all("stop")
    await running
    await worker.close()
    settled = series(await read_counts(queue.database))["jobs_settled_total"]
    expected = {"succeed": 2, "fail": 1, "retry": 1, "snooze": 1, "wait": 1, "release": 1}
    assert settled == {("varied", outcome): n for outcome, n in expected.items()}
    assert series(await read_counts(queue.database))["operations_interrupted_total"] == {("stop",): 1}
    assert worker.counts.total("jobs_settled_total") == 7
    assert worker.counts.total("operations_interrupted_total") == 1


async def test_rescues_are_counted_by_the_worker_that_saw_them(pool, queue, clock):
    worker = make_worker(pool, queue=queue)
    await put(queue)
    await take(queue)
    await clock.advance(queue, 31)
    await worker._upkeep.run_all()
    await worker.close()
    found = await page(queue)
    assert found["jobs_rescued_total",] == 1
    assert found["jobs_poisoned_total",] == 0


async def test_claim_latency_is_the_time_since_the_job_became_due(pool, queue, clock):
    await clock.advance(queue, 0)
    await put(queue, delay_seconds=100)
    await clock.advance(queue, 107)
    worker = make_worker(pool, queue=queue)
    await worker.run_once()
    await worker.close()
    found = await page(queue)
    assert found["job_claim_latency_seconds_sum", "default"] == pytest.approx(7)
    assert found["job_claim_latency_seconds_bucket", "default", "5.0"] == 0
    assert found["job_claim_latency_seconds_bucket", "default", "15.0"] == 1


# Exactly once -------------------------------------------------------------------------------------------------------


async def test_folding_the_counts_of_dead_workers_changes_no_sum(queue, clock):
    await clock.advance(queue, 0)
    for n in range(4):
        counts, row = writer(queue, f"w{n}")
        counts.add("jobs_rescued_total", n + 1)
        counts.observe("settle_seconds", 0.1 * (n + 1))
        await row.write()
    before = await read_counts(queue.database)
    assert await fold(queue.database) == 0, "all workers are alive"
    await clock.advance(queue, GONE)
    assert await fold(queue.database) == 4
    assert await fold(queue.database) == 0
    assert await read_counts(queue.database) == before
    assert await total(queue) == 10
    rows = await raw(queue, "SELECT worker FROM batchwright.worker_counts WHERE folded_at IS NULL")
    assert rows == [("",)]


async def test_counts_of_workers_that_die_later_are_added_to_the_folded_ones(queue, clock):
    for n in range(3):
        counts, row = writer(queue, f"w{n}")
        counts.add("jobs_rescued_total", 10)
        await row.write()
        await clock.advance(queue, FORGOTTEN)
        assert await fold(queue.database) == 1
    assert await total(queue) == 30
    assert len(await raw(queue, "SELECT FROM batchwright.worker_counts")) <= 2, "old marks are removed"


async def test_a_worker_that_was_frozen_and_folded_is_not_counted_twice(queue, clock):
    counts, row = writer(queue, "w1")
    counts.add("jobs_rescued_total", 5)
    await row.write()
    for round in range(3):
        await clock.advance(queue, GONE)
        assert await fold(queue.database) == 1
        assert await total(queue) == 5 + round
        counts.add("jobs_rescued_total")
        await row.write()
        assert await total(queue) == 6 + round


async def test_a_worker_frozen_until_its_mark_is_gone_is_not_counted_twice(queue, clock):
    counts, row = writer(queue, "w1")
    counts.add("jobs_rescued_total", 5)
    await row.write()
    await clock.advance(queue, GONE)
    await fold(queue.database)
    await clock.advance(queue, FORGOTTEN)
    await fold(queue.database)
    counts.add("jobs_rescued_total", 2)
    await row.write()
    assert await total(queue) == 7


@pytest.mark.parametrize("statement", ["insert_counts", "update_counts"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_counts_that_cannot_be_written_are_written_with_the_next_ones(pool, clock, statement, when):
    database = Faulty(pool)
    queue = Queue(Database(database, clock=clock))
    counts, row = writer(queue, "w1")
    counts.add("jobs_rescued_total", 2)
    if statement == "update_counts":
        await row.write()
        counts.add("jobs_rescued_total", 2)
    database.plan(Fault(SQL[statement], when, times=2))
    await row.write()
    await row.write()
    assert database.ran[SQL[statement]] == 2, "both writes were tried, and no error was raised"
    counts.add("jobs_rescued_total")
    await row.write()
    assert await total(queue) == counts.total("jobs_rescued_total")


async def test_after_a_lost_answer_and_a_fold_nothing_is_lost_or_counted_twice(pool, clock):
    for when in ("before", "after"):
        database = Faulty(pool)
        queue = Queue(Database(database, clock=clock))
        counts, row = writer(queue, f"w {when}")
        counts.add("jobs_poisoned_total", 3)
        await row.write()
        counts.add("jobs_poisoned_total", 4)
        database.plan(Fault(SQL["update_counts"], when))
        await row.write()
        await clock.advance(queue, GONE)
        assert await fold(queue.database) >= 1
        counts.add("jobs_poisoned_total", 5)
        await row.write()
    assert await total(queue, "jobs_poisoned_total") == 24


async def test_after_any_order_of_writes_folds_and_failures_the_sum_is_exact_and_never_fell(pool, clock):
    rolled = random.Random(11)
    database = Faulty(pool)
    queue = Queue(Database(database, clock=clock))
    await clock.advance(queue, 0)
    writers = [writer(queue, f"w{n}") for n in range(4)]
    seen = 0.0
    for _ in range(150):
        counts, row = rolled.choice(writers)
        match rolled.choice(["count", "write", "write", "lose", "fold", "time"]):
            case "count":
                counts.add("jobs_rescued_total", rolled.randint(1, 9))
            case "write":
                await row.write()
            case "lose":
                statement = rolled.choice(["insert_counts", "update_counts", "folded_counts"])
                database.plan(Fault(SQL[statement], rolled.choice(["before", "after"])))
                await row.write()
                database.plan()
            case "fold":
                async with lock_round(queue.database, "counts") as session:
                    await fold(queue.database, session=session)
            case "time":
                await clock.advance(queue, rolled.choice([1, 300, GONE]))
        now = await total(queue)
        assert seen <= now <= sum(counts.total("jobs_rescued_total") for counts, _ in writers)
        seen = now
    for _, row in writers:
        await row.write()
    assert await total(queue) == sum(counts.total("jobs_rescued_total") for counts, _ in writers)


async def test_a_write_and_a_fold_at_the_same_time_count_once(queue, clock):
    counts, row = writer(queue, "w1")
    for n in range(1, 21):
        counts.add("jobs_rescued_total")
        await clock.advance(queue, GONE)
        await asyncio.gather(row.write(), fold(queue.database))
        assert await total(queue) == n


async def test_upkeep_folds(pool, queue, clock):
    counts, row = writer(queue, "w1")
    counts.add("jobs_rescued_total", 3)
    await row.write()
    await clock.advance(queue, GONE)
    worker = make_worker(pool, queue=queue)
    await worker._upkeep.run_all()
    await worker.close()
    assert await raw(queue, "SELECT FROM batchwright.worker_counts WHERE worker = 'w1' AND folded_at IS NOT NULL")
    assert await total(queue) == 3


async def test_an_idle_worker_writes_nothing_until_its_row_must_be_touched(pool, clock, monkeypatch):
    database = Faulty(pool)
    queue = Queue(Database(database, clock=clock))
    counts, row = writer(queue, "w1")
    await row.write()
    assert not database.ran, "nothing was counted, so nothing is written"
    counts.add("jobs_rescued_total")
    await row.write()
    await row.write()
    assert sum(database.ran.values()) == 1
    row._touch_at = 0.0
    await row.write()
    assert database.ran[SQL["update_counts"]] == 1


# Gauges -------------------------------------------------------------------------------------------------------------

LOAD = Metric("load", "Load.", ("part",), "gauge")
WORK = Metric("work_total", "Work.", ("part",), prefix="")


async def loaded(queue, name, **parts):
    """A live worker that reports the load of its parts."""
    columns = {"host": "h", "pid": 1, "version": "0", "queues": None, "operations": [], "concurrency": 1}
    await Workers(queue.database).register(id=name, **columns)
    counts = WorkerCounts([LOAD, WORK])
    counts.set_all("load", {(part,): n for part, n in parts.items()})
    row = CountsWriter(queue.database, name, counts)
    await row.write()
    return counts, row


async def loads(queue):
    return {key[1]: n for key, n in (await page(queue, more=[LOAD])).items() if key[0] == "load"}


async def test_gauges_are_summed_over_live_workers(queue, clock):
    await clock.advance(queue, 0)
    await loaded(queue, "dead", a=100, b=100)
    await clock.advance(queue, 61)
    await loaded(queue, "w1", a=1, b=2)
    await loaded(queue, "w2", b=3, c=0)
    assert await loads(queue) == {"a": 1, "b": 5, "c": 0}
    await Workers(queue.database).leave("w1")
    assert await loads(queue) == {"b": 3, "c": 0}
    assert await read_counts(queue.database) == {}, "gauges are not kept in folded sums"


async def test_a_gauge_is_written_when_it_changes_or_is_removed_and_not_otherwise(pool, clock):
    database = Faulty(pool)
    queue = Queue(Database(database, clock=clock))
    counts, row = await loaded(queue, "w1", a=1, b=2)
    await row.write()
    assert database.ran[SQL["write_gauges"]] == 1
    counts.set_all("load", {("b",): 3})
    await row.write()
    assert await loads(queue) == {"b": 3}
    counts.set_all("load", {})
    await row.write()
    await row.write()
    assert await loads(queue) == {}
    assert database.ran[SQL["write_gauges"]] == 3


async def test_gauges_come_back_after_their_row_was_removed(queue):
    _, row = await loaded(queue, "w1", a=1)
    await Workers(queue.database).leave("w1")
    await loaded(queue, "w1")
    await row.write()
    assert await loads(queue) == {}
    row._gauges_touch_at = 0.0
    await row.write()
    assert await loads(queue) == {"a": 1}


async def test_gauges_of_a_worker_that_is_not_registered_yet_are_written_when_it_is(queue):
    counts = WorkerCounts([LOAD])
    counts.set_all("load", {("a",): 1})
    row = CountsWriter(queue.database, "w1", counts)
    await row.write()
    await loaded(queue, "w1")
    await row.write()
    assert await loads(queue) == {"a": 1}


async def test_metrics_that_a_part_brings_are_on_the_page_under_their_own_name(queue):
    counts, row = await loaded(queue, "w1", a=1)
    counts.add("work_total", 4, ("a",))
    await row.write()
    text = (await Exposition(queue.database, process_counts(), more=[LOAD, WORK]).render()).decode()
    assert 'work_total{part="a"} 4.0' in text.splitlines()
    assert 'batchwright_load{part="a"} 1.0' in text.splitlines()


async def test_workers_use_the_same_label_values_if_not_all_fit(queue):
    label_limits = {"part": LabelLimit(frozenset({"named"}), 2)}
    for name, parts in (("w1", "abc"), ("w2", "cba"), ("w3", "ba")):
        counts = WorkerCounts([WORK], label_limits)
        row = CountsWriter(queue.database, name, counts)
        await row.learn()
        for part in (*parts, "named"):
            counts.add("work_total", 1, (part,))
        await row.write()
    found = {
        key[1]: n
        for key, n in (await page(queue, more=[WORK], label_limits=label_limits)).items()
        if key[0] == "work_total"
    }
    assert found == {"a": 3, "b": 3, "other": 2, "named": 3}


async def test_a_running_worker_learns_the_label_values_that_others_use(pool, queue):
    counts, row = writer(queue, "earlier")
    counts.add("jobs_claimed_total", 1, ("seen before",))
    await row.write()
    async with working(pool) as worker:
        while "seen before" not in worker.counts._values.get("queue", ()):
            await asyncio.sleep(0.01)


async def test_a_worker_without_room_for_a_label_value_checks_again_which_ones_others_use(queue, monkeypatch):
    monkeypatch.setattr(counts_module, "_WRITE_SECONDS", 0.01)
    monkeypatch.setattr(counts_module, "_TOUCH_SECONDS", 0.0)
    label_limits = {"part": LabelLimit(others_max=1)}
    counts, others = WorkerCounts([WORK], label_limits), WorkerCounts([WORK], label_limits)
    row, learned = CountsWriter(queue.database, "w1", counts), asyncio.Event()
    learn = row.learn

    async def learn_and_say() -> None:
        await learn()
        learned.set()

    monkeypatch.setattr(row, "learn", learn_and_say)
    counts.add("work_total", 1, ("b",))
    running = asyncio.create_task(row.run())
    await learned.wait()
    others.add("work_total", 1, ("a",))
    await CountsWriter(queue.database, "w2", others).write()
    counts.add("work_total", 1, ("a",))
    assert counts.is_crowded, "no worker had used the other value when it learned first"
    while ("a",) not in series(counts.flat())["work_total"]:
        await asyncio.sleep(0.01)
        counts.add("work_total", 1, ("a",))
    running.cancel()


async def test_a_worker_that_cannot_learn_label_values_still_counts(pool, clock):
    database = Faulty(pool)
    database.plan(Fault(SQL["counted"], "before"))
    counts, row = writer(Queue(Database(database, clock=clock)), "w1")
    await row.learn()
    assert database.ran[SQL["counted"]] == 1
    assert counts.flat() == {}


# The page -----------------------------------------------------------------------------------------------------------


async def test_buckets_are_cumulative_and_equal_to_an_independent_count(queue):
    rolled = random.Random(3)
    metric = next(metric for metric in WORKER_METRICS if metric.name == "job_run_seconds")
    values = [rolled.choice([rolled.expovariate(0.1), *metric.bounds]) for _ in range(400)]
    for part in range(4):
        counts, row = writer(queue, f"w{part}")
        counts.ran["print"] += values[part::4]
        await row.write()
    found = await page(queue)
    for bound in metric.bounds:
        expected = sum(value <= bound for value in values)
        assert found["job_run_seconds_bucket", "print", str(bound)] == expected
    assert found["job_run_seconds_bucket", "print", "+Inf"] == found["job_run_seconds_count", "print"] == 400
    assert found["job_run_seconds_sum", "print"] == pytest.approx(sum(values))


async def test_counts_of_a_worker_of_another_version_with_other_bounds_and_metrics_can_be_read(queue):
    newer = Counts([Metric("settle_seconds", "", (), "histogram", (0.007, 99.0)), Metric("moons_total", "")])
    newer.observe("settle_seconds", 0.006)
    newer.observe("settle_seconds", 50.0)
    newer.add("moons_total")
    await CountsWriter(queue.database, "newer", newer).write()
    found = await page(queue)
    assert found["settle_seconds_bucket", "0.005"] == 0
    assert found["settle_seconds_bucket", "0.01"] == 1
    assert found["settle_seconds_bucket", "10.0"] == 1
    assert found["settle_seconds_count",] == 2
    assert not any("moons" in name for name, *_ in found)


async def test_the_queue_depths_of_known_jobs_are_correct(pool, queue, clock):
    await clock.advance(queue, 0)
    await put(queue, NewJob("noop", queue="a", priority=7))
    await clock.advance(queue, 50)
    await put(queue, *(NewJob("noop", queue="a") for _ in range(3)))
    await put(queue, *(NewJob("noop", queue="a", delay_seconds=1000) for _ in range(4)))
    await put(queue, NewJob("noop", queue="b"), NewJob("noop", queue="b"), NewJob("other", queue="b"))
    await fail(queue, await take_one(queue, queues=["b"], slots=1))
    assert len(await take(queue, slots=1, queues=["b"])) == 1
    await put(queue, NewJob("varied", {"how": "wait"}, queue="c"), operations=Registry([varied]))
    waiting = make_worker(pool, varied, queue=queue)
    await waiting.run_once()
    await waiting.close()
    await raw(queue, "UPDATE batchwright.queue SET paused_at = now() WHERE name = 'b'")
    await clock.advance(queue, 20)
    found = await page(queue)
    jobs = {key[1:]: n for key, n in found.items() if key[0] == "jobs"}
    assert jobs == {
        ("a", "due"): 4,
        ("a", "scheduled"): 4,
        ("b", "due"): 1,
        ("b", "scheduled"): 0,
        ("b", "running"): 1,
        ("c", "due"): 0,
        ("c", "scheduled"): 0,
        ("c", "waiting"): 1,
        ("default", "due"): 0,
        ("default", "scheduled"): 1,
    }
    ages = {key[1]: n for key, n in found.items() if key[0] == "oldest_due_age_seconds"}
    assert ages == {"a": pytest.approx(70), "b": pytest.approx(20), "c": 0, "default": 0}
    assert {key[1]: n for key, n in found.items() if key[0] == "queue_paused"} == {"a": 0, "b": 1, "c": 0, "default": 0}
    assert found["failed_jobs", "noop"] == 1


async def test_workers_and_their_slots_are_shown_while_they_are_alive(queue, clock):
    start = await clock.advance(queue, 0)
    for n, silent in enumerate([0, 30, 90]):
        await raw(
            queue,
            "INSERT INTO batchwright.worker (id, host, pid, version, operations, concurrency, running, started_at, "
            "heartbeat_at) VALUES (%(id)s, 'h', 1, '0', '{}', 20, %(n)s, %(at)s, %(at)s)",
            id=f"w{n}",
            n=n + 1,
            at=start - timedelta(seconds=silent),
        )
    found = await page(queue)
    assert (found["workers",], found["worker_slots",], found["worker_slots_used",]) == (2, 40, 3)


async def test_more_queues_than_the_limit_are_shown_under_other(queue, monkeypatch):
    monkeypatch.setattr(counts_module, "VALUES_MAX", 3)
    await put(queue, *(NewJob("noop", queue=f"q{n}") for n in range(10)))
    depths = (await read_standing(queue.database)).depths
    assert {depth.queue: depth.due for depth in depths} == {"q0": 1, "q1": 1, "q2": 1, "other": 7}


async def test_the_jobs_of_a_queue_are_counted_up_to_a_limit(queue, monkeypatch):
    monkeypatch.setattr(counts_module, "_JOBS_MAX", 5)
    await put(queue, *(NewJob("noop") for _ in range(10)))
    assert [depth.due for depth in (await read_standing(queue.database)).depths] == [5]


async def test_many_scrapes_read_the_database_once(pool):
    database = Faulty(pool)
    exposition = Exposition(Database(database), process_counts())
    pages = await asyncio.gather(*(exposition.render() for _ in range(20)))
    assert len(set(pages)) == 1
    assert set(database.ran.values()) == {1}
    exposition._fresh_until = 0.0
    await exposition.render()
    assert set(database.ran.values()) == {2}


async def test_the_counts_of_the_process_itself_are_never_cached(queue):
    own = process_counts()
    exposition = Exposition(queue.database, own)
    await exposition.render()
    own.add("http_requests_total", 1, ("/v1/jobs", "POST", "201"))
    own.observe("http_request_seconds", 0.02, ("/v1/jobs",))
    own.add("event_streams", 3)
    text = (await exposition.render()).decode()
    assert 'batchwright_http_requests_total{method="POST",route="/v1/jobs",status="201"} 1.0' in text
    assert 'batchwright_http_request_seconds_bucket{le="0.025",route="/v1/jobs"} 1.0' in text
    assert "batchwright_event_streams 3.0" in text
    assert CONTENT_TYPE.startswith("text/plain")


async def test_without_a_database_the_page_still_shows_the_counts_of_the_process(database_url):
    async with Pool(dataclasses.replace(DATABASE, pool_size=1), database_url) as pool:
        exposition = Exposition(Database(_Away(pool)), process_counts())
        text = (await exposition.render()).decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert "batchwright_database_up 0.0" in text
    assert "batchwright_event_streams" in names
    assert "batchwright_jobs" not in names


async def test_if_depths_cannot_be_read_the_sums_are_still_shown(pool, queue):
    database = Faulty(pool)
    database.plan(Fault(SQL["depths"], "before"))
    text = (await Exposition(Database(database), process_counts()).render()).decode()
    assert "batchwright_database_up 1.0" in text
    assert "batchwright_jobs_rescued_total 0.0" in text
    assert "batchwright_workers" not in text


class _Away:
    def __init__(self, pool):
        self.pool = pool

    async def rows(self, sql, params=None):
        raise DatabaseError("away")


async def test_every_metric_explains_itself_and_those_of_the_database_say_how_to_aggregate(queue):
    text = (await Exposition(queue.database, process_counts()).render()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in (*WORKER_METRICS, *STANDING_METRICS):
        family = families["batchwright_" + metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert "aggregate with max, not sum" in family.documentation
        assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert text.count("# TYPE") == len({line for line in text.splitlines() if line.startswith("# TYPE")})


# Plans --------------------------------------------------------------------------------------------------------------

LIMITS = {"queues_max": 200, "jobs_max": 1_000_000}


@pytest.mark.parametrize(
    ("name", "index"), [("depths", {"job_due"}), ("taken", {"job_held", "job_waiting"}), ("failed", {"job_inbox"})]
)
def test_depths_are_read_from_indexes_alone(crowd, name, index):
    found = plan(crowd, name, source=SQL, run=True, **LIMITS)
    assert whole_table_scans(found) == []
    assert {name for name in indexes(found) if name.startswith("job_")} == index


def test_counting_ten_thousand_jobs_reads_few_pages(crowd):
    """It reads the index, and pages of the table that are not all-visible yet."""
    assert touched(plan(crowd, "depths", source=SQL, run=True, **LIMITS)) < 800


def test_the_limit_bounds_what_is_counted(crowd):
    assert scanned(plan(crowd, "depths", source=SQL, run=True, queues_max=200, jobs_max=100)) <= 100 + 10
