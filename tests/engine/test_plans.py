"""Every statement can be prepared, and the frequent ones get the plans for which they were designed.

The plans are the generic ones of prepared statements, on a table with 20,000 finished and 10,000 queued jobs. The tests
limit the number of pages that a statement reads, not its time.
"""

import dataclasses
from datetime import UTC, datetime, timedelta
from uuid import UUID

import orjson
import pytest

from batchwright import NewJob
from batchwright.db.database import Database, Pool
from batchwright.engine import (
    attention,
    briefs,
    catalog,
    event_streams,
    metrics,
    named_queues,
    queue,
    retention,
    samples,
    schedules,
    upkeep,
    views,
    workers,
)
from batchwright.engine.queue import NOWHERE, Queue
from tests.engine.planning import QUEUED, indexes, nodes, numbered, plan, scanned, touched, whole_table_scans
from tests.support import BASIC, DATABASE, put, take

SOURCES = (
    attention,
    briefs,
    catalog,
    event_streams,
    metrics,
    named_queues,
    queue,
    retention,
    samples,
    schedules,
    upkeep,
    views,
    workers,
)
ID = UUID("00000000-0000-0000-0000-000000000001")
LATER = datetime(2100, 1, 1, tzinfo=UTC)
SETTLES = ("succeed", "fail", "retry", "snooze", "release")
ERROR = {"kind": "fatal", "code": "c", "type": "t", "message": "m"}


def lanes(slots=20, after=NOWHERE, queues=("default",)):
    places = [(name, priority) for priority in range(10) for name in queues]
    return {
        "worker": "w1",
        "lease_seconds": 30.0,
        "queues": [name for name, _ in places],
        "priorities": [priority for _, priority in places],
        "quotas": [slots] * len(places),
        "after_times": [after.run_after] * len(places),
        "after_ids": [after.id] * len(places),
        "job_types": BASIC.names(),
        "slots": slots,
        "keyed": True,
        "freed_tenants": [],
        "freed_keys": [],
        "ids": [],
        "suspect": False,
    }


def held(connection, n=20):
    """Jobs that the worker of the test data holds, as rows for a settle."""
    rows = connection.execute("SELECT id, claims FROM batchwright.job WHERE locked_by = 'w1' LIMIT %s", [n]).fetchall()
    done = [{"id": id, "claim": claim, "result": 1, "error": ERROR, "delay_seconds": 1.0} for id, claim in rows]
    return orjson.dumps(done).decode()


# Prepare --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "name"), [(source, name) for source in SOURCES for name in source.SQL])
def test_every_statement_can_be_prepared(crowd, source, name):
    text, _ = numbered(name, source.SQL)
    crowd.execute(f"PREPARE probe AS {text}".encode())
    assert crowd.execute("SELECT count(*) FROM pg_prepared_statements WHERE name = 'probe'").fetchone() == (1,)


# Explain --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", SETTLES)
def test_a_settle_finds_its_jobs_by_the_primary_key_and_reads_nothing_else(crowd, verb):
    settled = plan(crowd, verb, run=True, settles=held(crowd, 20), worker="w1")
    assert whole_table_scans(settled) == []
    assert indexes(settled) == {"job_pkey"}
    assert scanned(settled) <= 20
    assert settled["Actual Rows"] == 20, "the settles were accepted"


@pytest.mark.parametrize("verb", SETTLES)
def test_a_fenced_settle_reads_only_the_rows_it_names(crowd, verb):
    rows = [{**row, "claim": row["claim"] + 1} for row in orjson.loads(held(crowd, 20))]
    settled = plan(crowd, verb, run=True, settles=orjson.dumps(rows).decode(), worker="w1")
    assert settled["Actual Rows"] == 0
    assert scanned(settled) <= 20


HOT = {
    "wait": {"id": ID, "claim": 1, "worker": "w1", "children": 2, "on_join": "close", "allow_failures": 0},
    "join": {"parents": [ID], "failed": [False]},
    "renew": {"ids": [ID], "claims": [1], "lease_seconds": 30.0},
    "progress": {"ids": [ID], "claims": [1], "currents": [1], "totals": [2]},
    "emit": {"events": orjson.dumps([{"id": str(ID), "claim": 1, "place": 1, "event": "e", "level": "info"}]).decode()},
    "let_go": {"ids": [ID], "claims": [1]},
    "holdings": {"worker": "w1"},
    "cancel": {"ids": [ID], "reason": "r"},
    "open_children": {"ids": [ID]},
    "expire": {"limit": 1000},
    "overdue_parents": {"limit": 1000},
    "rescue": {"lease_seconds": 30.0, "jitter_seconds": 1.0, "ids": [], "claims": [], "limit": 1000},
    "recover": {"id": ID, "stale_seconds": 1800.0},
    "rerun": {"id": ID, "children": 1},
    "uncount": {"id": ID, "round": 1},
    "lock_job": {"id": ID},
    "owners": {"ids": [ID]},
    "disown": {"id": ID, "owner": "batch"},
    "unsuccessful_children": {"id": ID, "round": 1},
    "joined": {"id": ID, "round": 1},
    "children_after": {"id": ID, "round": 1, "after": UUID(int=0), "limit": 500},
    "count_children": {"id": ID, "count_max": 1000},
    "unknown_types": {"job_types": ["other"], "lane_max": 500, "scan_max": 5000},
    "suspects": {"job_types": ["noop"], "limit": 4, "private": []},
    "open_jobs_of_key": {"tenant": "default", "key": '["k",7]'},
    "find_enqueued": {"jobs": orjson.dumps([{"id": str(ID), "tenant": "default", "idempotency_key": "x"}]).decode()},
    "get": {"ids": [ID]},
    "outcome": {"id": ID},
    "claim": lanes(),
}


@pytest.mark.parametrize("name", list(HOT))
def test_no_statement_of_a_running_system_scans_the_whole_table(crowd, name):
    assert whole_table_scans(plan(crowd, name, **HOT[name])) == []


@pytest.mark.parametrize("name", ["wait", "renew", "progress", "emit", "let_go", "uncount", "recover", "rerun"])
def test_statements_that_name_a_job_find_it_by_the_primary_key(crowd, name):
    found = plan(crowd, name, **HOT[name])
    assert "job_pkey" in indexes(found)
    assert indexes(found) <= {"job_pkey", "job_current"}


def test_a_scan_of_the_whole_table_is_detected(crowd):
    (everything,) = crowd.execute("EXPLAIN (FORMAT JSON) SELECT FROM batchwright.job WHERE message = 'x'").fetchone()
    assert len(whole_table_scans(everything[0]["Plan"])) == 1


# Counts and lists -----------------------------------------------------------------------------------------------------


def test_unknown_types_are_searched_only_at_the_heads_of_the_queues(crowd):
    looked = plan(crowd, "unknown_types", run=True, job_types=["noop"], lane_max=100, scan_max=1000)
    assert scanned(looked) <= 100 + 10, "ten thousand jobs of a known type wait"
    assert touched(looked) < 100 * 5


def test_children_are_counted_up_to_the_limit(crowd):
    counted = plan(crowd, "count_children", run=True, id=ID, count_max=100)
    assert scanned(counted) == 100, "there are three thousand"


@pytest.mark.parametrize("after", [UUID(int=0), UUID(int=2**127)])
def test_a_level_of_a_tree_reads_the_children_that_it_shows(crowd, after):
    values = {"parents": [ID], "after_round": 1, "after_id": after, "limit": 26, "words_max": 300}
    found = plan(crowd, "children", source=briefs.SQL, run=True, **values)
    assert found["Actual Rows"] == 26
    assert "job_children" in indexes(found)
    assert scanned(found) <= 26
    assert touched(found) < 26 * 10


def test_a_look_reads_only_the_head_of_each_queue_and_priority(crowd):
    looked = plan(crowd, "look", source=upkeep.SQL, run=True, names=["rescue"], every_seconds=[5.0])
    assert scanned(looked) < 20
    assert touched(looked) < 100


STREAM = {"ids": [ID], "afters": [0], "bytes": 1_000_000, "limit": 20}
EVENTS = {
    "events": (queue, {"id": ID, "after": 0, "limit": 20}),
    "events_of_many": (queue, {"ids": [ID], "after": 0, "limit": 20}),
    "latest_events": (queue, {"id": ID, "limit": 20}),
    "since": (event_streams, STREAM),
    "last_of_each": (event_streams, STREAM),
    "gone": (event_streams, STREAM),
}


def test_the_plan_of_every_query_of_events_is_tested():
    assert set(event_streams.SQL) - {"last_written"} <= set(EVENTS)


@pytest.mark.parametrize("name", list(EVENTS))
def test_events_of_a_job_are_found_by_an_index(crowd, name):
    crowd.execute(
        "INSERT INTO batchwright.job_event (job_id, ts, event) "
        "SELECT CASE WHEN turn <= 50 THEN %s ELSE gen_random_uuid() END, now() - turn %% 9 * interval '1 week', 'step' "
        "FROM generate_series(1, 20000) AS turn",
        [ID],
    )
    crowd.execute("ANALYZE batchwright.job_event")
    source, values = EVENTS[name]
    found = plan(crowd, name, source=source.SQL, run=True, **values)
    scans = [node for node in nodes(found) if node["Node Type"] == "Seq Scan"]
    assert [node for node in scans if node["Relation Name"].startswith("job_event_2")] == []
    assert touched(found) < 200


# Claim ----------------------------------------------------------------------------------------------------------------


def test_claim_finds_due_jobs_by_their_index_and_stops_when_it_has_enough(crowd):
    claimed = plan(crowd, "claim", run=True, **lanes(20))
    assert claimed["Actual Rows"] == 20
    assert "job_due" in indexes(claimed)
    assert scanned(claimed) < 20 * 10
    assert touched(claimed) < 20 * 150


def test_a_claim_of_one_job_reads_few_pages(crowd):
    claimed = plan(crowd, "claim", run=True, **lanes(1))
    assert claimed["Actual Rows"] == 1
    assert touched(claimed) < 300


def test_a_claim_behind_its_watermark_reads_no_jobs_before_it(crowd):
    nothing = plan(crowd, "claim", run=True, **lanes(20, NOWHERE._replace(run_after=LATER)))
    assert scanned(nothing) == 0
    assert touched(nothing) < 100


def _mark(connection):
    """A worker's watermark after a claim that found all due jobs."""
    ((now,),) = connection.execute("SELECT now()").fetchall()
    return NOWHERE._replace(run_after=now - timedelta(milliseconds=50))


def _newcomer(connection):
    """Insert a job that any worker may take, behind all the others."""
    connection.execute(
        "INSERT INTO batchwright.job (id, job_type, queue, tenant, priority, run_after, payload, max_attempts, "
        "pipeline_id, created_at) VALUES (%(id)s, 'noop', 'default', 'default', 5, now(), '{}', 3, %(id)s, now())",
        {"id": ID},
    )


def _only(connection, change):
    """Change all queued jobs of the test data, and update the planner's statistics."""
    connection.execute(f"UPDATE batchwright.job SET {change} WHERE status = 'QUEUED'")
    connection.execute("ANALYZE batchwright.job")


def test_ten_thousand_jobs_of_a_busy_key_cost_a_few_pages_each_but_none_behind_the_watermark(crowd):
    _only(crowd, "exclusive_key = '[\"busy\"]', is_current = false")
    crowd.execute(
        "UPDATE batchwright.job SET is_current = false, exclusive_key = NULL WHERE locked_by IS NOT NULL; "
        "UPDATE batchwright.job SET is_current = true, exclusive_key = '[\"busy\"]' "
        "WHERE id = (SELECT id FROM batchwright.job WHERE locked_by IS NOT NULL LIMIT 1)"
    )
    _newcomer(crowd)
    crowd.execute("SAVEPOINT before")
    full = plan(crowd, "claim", run=True, **lanes(20))
    assert full["Actual Rows"] == 1, "only the new job"
    assert whole_table_scans(full) == []
    assert touched(full) < QUEUED * 12
    crowd.execute("ROLLBACK TO before")
    quick = plan(crowd, "claim", run=True, **lanes(20, _mark(crowd)))
    assert quick["Actual Rows"] == 1
    assert touched(quick) < 300


def test_ten_thousand_jobs_waiting_for_a_free_key_do_not_make_the_claim_quadratic(crowd):
    """For each job, the check whether another one of its key goes first is one lookup in an index."""
    _only(crowd, "exclusive_key = '[\"line\"]', is_current = false")
    crowd.execute("UPDATE batchwright.job SET is_current = false, exclusive_key = NULL WHERE locked_by IS NOT NULL")
    claimed = plan(crowd, "claim", run=True, **lanes(20))
    assert claimed["Actual Rows"] == 1
    assert scanned(claimed) < QUEUED * 6
    assert touched(claimed) < QUEUED * 20


def test_ten_thousand_jobs_of_an_unknown_type_cost_three_pages_each_but_none_behind_the_watermark(crowd):
    _only(crowd, "job_type = 'somebody_elses'")
    _newcomer(crowd)
    crowd.execute("SAVEPOINT before")
    full = plan(crowd, "claim", run=True, **lanes(20))
    assert full["Actual Rows"] == 1
    assert scanned(full) < QUEUED * 1.5
    assert touched(full) < QUEUED * 3
    crowd.execute("ROLLBACK TO before")
    quick = plan(crowd, "claim", run=True, **lanes(20, _mark(crowd)))
    assert quick["Actual Rows"] == 1
    assert touched(quick) < 300


def test_the_next_job_of_a_freed_key_is_found_without_reading_all_its_jobs(crowd):
    _only(crowd, "exclusive_key = '[\"line\"]', is_current = false")
    crowd.execute("UPDATE batchwright.job SET is_current = false, exclusive_key = NULL WHERE locked_by IS NOT NULL")
    freed = {"freed_tenants": ["default"], "freed_keys": ['["line"]']}
    claimed = plan(crowd, "claim", run=True, **{**lanes(20, NOWHERE._replace(run_after=LATER)), **freed})
    assert claimed["Actual Rows"] == 1
    assert "job_key" in indexes(claimed)
    assert touched(claimed) < 400


# Renewals are HOT -----------------------------------------------------------------------------------------------------


async def test_renewals_progress_and_emits_are_hot(database_url):
    """There is one job, whose versions all fit on its page, and one connection, whose counters are the only ones."""
    async with Pool(dataclasses.replace(DATABASE, pool_size=1), database_url) as pool:
        queue = Queue(Database(pool))
        await put(queue, NewJob("noop", exclusive_key="k", deadline=timedelta(hours=1)))
        (claim,) = await take(queue)
        before = await _updates(pool)
        for n in range(4):
            assert await queue.renew([(claim.id, claim.claim)]) == {claim.id}
            assert await queue.progress([(claim.id, claim.claim, n, 4)]) == {claim.id}
            event = {"event": "e", "level": "info", "message": f"step {n}", "place": 1}
            assert await queue.emit([{"id": claim.id, "claim": claim.claim, **event}]) == {claim.id}
        after = await _updates(pool)
    assert (after[0] - before[0], after[1] - before[1]) == (12, 12)


async def _updates(pool):
    await pool.rows("SELECT pg_stat_force_next_flush()")
    await pool.rows("SELECT pg_stat_clear_snapshot()")
    table = "'batchwright.job'::regclass"
    ((updated, hot),) = await pool.rows(
        f"SELECT pg_stat_get_tuples_updated({table}), pg_stat_get_tuples_hot_updated({table})"
    )
    return updated, hot


async def test_lease_progress_and_message_are_in_no_index(queue):
    rows = await queue.database.rows(
        "SELECT DISTINCT attname FROM pg_index JOIN pg_attribute ON attrelid = indexrelid OR "
        "(attrelid = indrelid AND attnum = ANY(indkey)) WHERE indrelid = 'batchwright.job'::regclass"
    )
    named = {name for (name,) in rows}
    predicates = await queue.database.rows(
        "SELECT string_agg(pg_get_indexdef(indexrelid), ' ') FROM pg_index WHERE indrelid = 'batchwright.job'::regclass"
    )
    for column in ("lease_until", "progress_current", "progress_total", "message"):
        assert column not in named
        assert column not in predicates[0][0]
