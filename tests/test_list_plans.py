"""Lists of batches, tasks, documents, files, keys and schedules read only the rows that they show."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from batchwright.access import keys
from batchwright.batches import store
from batchwright.db.database import connect_arguments
from batchwright.engine import schedules
from batchwright.files import store as files
from batchwright.ingest import items, runs
from batchwright.providers import tasks
from tests.conftest import database
from tests.engine.planning import nodes, plan, touched
from tests.support import DATABASE

CROWD = """
    ALTER TABLE batchwright.batch DISABLE TRIGGER legal_batch_births;
    ALTER TABLE batchwright.task DISABLE TRIGGER legal_task_births;
    INSERT INTO batchwright.batch (id, tenant, job_id, queue, priority, endpoint, input_file_id, completion_window,
        family, created_at, expires_at, status, failed_at)
    SELECT 'batch_' || lpad(to_hex(n), 32, '0'), 'tenant_' || n % 3, gen_random_uuid(), 'q', 5, '/v1/embeddings',
        'file', '24h', 'family', now(), now(),
        (CASE WHEN n <= 9 THEN 'in_progress' ELSE 'failed' END)::batchwright.batch_status,
        CASE WHEN n > 9 THEN now() END
    FROM generate_series(1, 6000) AS n;
    INSERT INTO batchwright.task (id, tenant, task_type, targets, inputs, job_id, queue, priority, created_at,
        deadline_at, status, ended_at)
    SELECT 'task_' || lpad(to_hex(n), 32, '0'), 'tenant_' || n % 3, 't', '[]', '[]', gen_random_uuid(), 'q', 5, now(),
        now(), (CASE WHEN n <= 9 THEN 'PENDING' ELSE 'FAILED' END)::batchwright.task_status,
        CASE WHEN n > 9 THEN now() END
    FROM generate_series(1, 6000) AS n;
    INSERT INTO batchwright.ingest_collection (tenant, name, created_at) VALUES ('tenant_0', 'c', now());
    INSERT INTO batchwright.ingest_run (id, tenant, collection_id, kind, sources, config, recipe, lane, priority,
        job_id, created_at)
    SELECT 'run_' || repeat('0', 32), 'tenant_0', id, 'k', '[]', '{}', 'r', 'auto', 5, gen_random_uuid(), now()
    FROM batchwright.ingest_collection;
    INSERT INTO batchwright.ingest_item (id, run_id, tenant, collection_id, document_id, source, name, job_ids,
        created_at, status, ended_at, last_error_kind, last_error, cause)
    SELECT 'item_' || lpad(to_hex(n), 32, '0'), 'run_' || repeat('0', 32), 'tenant_0', 1, n, 's', 'n',
        ARRAY[gen_random_uuid()], now(),
        (CASE WHEN n % 100 = 0 THEN 'OPEN' WHEN n % 2 = 0 THEN 'FAILED' ELSE 'DONE' END)::batchwright.item_status,
        CASE WHEN n % 100 > 0 THEN now() END, 'fatal', '{}', 'cause'
    FROM generate_series(1, 6000) AS n;
    UPDATE batchwright.ingest_item SET cause = 'cause ' || document_id % 7, last_error = '{"code": "c", "step": "s"}'
    WHERE status = 'FAILED';
    INSERT INTO batchwright.ingest_step (item_id, generation, step, waiting)
    SELECT id, 1, 's', '{"for": "rate", "message": "m"}' FROM batchwright.ingest_item WHERE status = 'OPEN';
    ALTER TABLE batchwright.ingest_run DISABLE TRIGGER legal_run_births;
    INSERT INTO batchwright.ingest_run (id, tenant, collection_id, kind, sources, config, recipe, lane, priority,
        job_id, created_at, status, ended_at, parked_reason)
    SELECT 'run_' || lpad(to_hex(n), 32, '0'), 'tenant_' || n % 3, collection.id, 'k', '[]', '{}', 'r', 'auto', 5,
        gen_random_uuid(), now(), (CASE WHEN n <= 9 THEN 'PARKED' ELSE 'FAILED' END)::batchwright.run_status,
        CASE WHEN n > 9 THEN now() END, CASE WHEN n <= 9 THEN 'user' END
    FROM generate_series(1, 6000) AS n, batchwright.ingest_collection AS collection;
    INSERT INTO batchwright.task (id, tenant, task_type, targets, inputs, job_id, queue, priority, created_at,
        deadline_at, waiting_message, waiting_at, cancel_requested_at)
    SELECT 'task_e' || lpad(to_hex(n), 31, '0'), 'waiting', 't', '[{"provider": "p"}]', '[]', gen_random_uuid(), 'q', 5,
        now(), now(), CASE WHEN n % 2 = 0 THEN 'm' END, now(), CASE WHEN n % 500 = 0 THEN now() + interval '1 day' END
    FROM generate_series(1, 6000) AS n;
    INSERT INTO batchwright.provider_hold (provider, code, message, since, next_try_at)
    VALUES ('p', 'c', 'm', now(), now());
    INSERT INTO batchwright.file (id, tenant, purpose, filename, bytes, sha256, key, created_at)
    SELECT 'file-' || lpad(to_hex(n), 32, '0'), 'tenant_' || n % 3,
        CASE WHEN n <= 9 THEN 'batch' ELSE 'batch_output' END, 'f', 1, repeat('0', 64), 'k' || n, now()
    FROM generate_series(1, 6000) AS n;
    INSERT INTO batchwright.api_key (id, digest, hint, name, tenant, scopes, created_at)
    SELECT gen_random_uuid(), sha256(n::text::bytea), 'h', 'n', 'tenant_' || n % 3, '{read}', now()
    FROM generate_series(1, 6000) AS n;
    INSERT INTO batchwright.schedule (id, tenant, name, cron, timezone, missed, job, next_at, created_at, updated_at)
    SELECT gen_random_uuid(), 'tenant_' || n % 3, 'n' || n, '* * * * *', 'UTC', 'skip', '{}',
        now() + n * interval '1 hour' - interval '10 hours', now(), now()
    FROM generate_series(1, 6000) AS n;
"""
LIST = {"limit": 21}
RUN = "run_" + "0" * 32
ITEMS = {**LIST, "run_id": RUN, "scan_max": 21}
PARKED_RUNS = {**LIST, "statuses": ["PARKED"]}
OPEN_BATCHES = {**LIST, "statuses": ["validating", "in_progress"]}
OPEN_TASKS = {**LIST, "statuses": ["PENDING", "IN_PROGRESS"]}


@pytest.fixture(scope="module")
def crowded_url(server, template):
    with database(server, "batchwright_test_lists_" + template[-8:], template) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(CROWD)
            vacuum(connection)
        yield url


def vacuum(connection):
    """Vacuum until all pages are marked all-visible, which an old snapshot, such as one of autovacuum, delays."""
    for _ in range(50):
        connection.execute("VACUUM ANALYZE")
        (unseen,) = connection.execute(
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'batchwright'::regnamespace AND relkind = 'r'"
            " AND relallvisible < relpages"
        ).fetchone()
        if not unseen:
            return
    pytest.fail("after 50 vacuums some pages are not all-visible: which session holds an old snapshot?")


@pytest.fixture
def crowd(crowded_url):
    with psycopg.connect(crowded_url, **connect_arguments(DATABASE)) as connection:
        yield connection
        connection.rollback()


@pytest.mark.parametrize(
    ("source", "name", "values", "rows"),
    [
        (store, "list", {**LIST, "tenant": "tenant_1"}, 21),
        (store, "list_everywhere", LIST, 21),
        (store, "list_by_status", {**OPEN_BATCHES, "tenant": "tenant_1"}, 3),
        (store, "list_by_status", OPEN_BATCHES, 9),
        (store, "list_by_status", {**LIST, "statuses": ["failed"], "tenant": "tenant_2"}, 21),
        (tasks, "list", {**LIST, "tenant": "tenant_1"}, 21),
        (tasks, "list_everywhere", LIST, 21),
        (tasks, "list_by_status", {**OPEN_TASKS, "tenant": "tenant_1"}, 3),
        (tasks, "list_by_status", OPEN_TASKS, 21),
        (items, "list", {**ITEMS, "statuses": ["OPEN"]}, 21),
        (items, "list", {**ITEMS, "statuses": ["OPEN", "DONE", "FAILED"]}, 21),
        (runs, "list", {**LIST, "tenant": "tenant_1"}, 21),
        (runs, "list_everywhere", LIST, 21),
        (runs, "list_by_status", {**PARKED_RUNS, "tenant": "tenant_1"}, 3),
        (runs, "list_by_status", PARKED_RUNS, 9),
        (runs, "list_of_collection", {**PARKED_RUNS, "collection": "c"}, 9),
        (runs, "parked", LIST, 9),
        (tasks, "parked", {**LIST, "target": "[]", "after_tenant": "", "after": ""}, 21),
        (tasks, "just_cancelled", LIST, 12),
        (files, "list_newest", {**LIST, "tenant": "tenant_1"}, 21),
        (files, "list_newest_of_purpose", {**LIST, "tenant": "tenant_1", "purpose": "batch"}, 3),
        (files, "list_oldest_of_purpose", {**LIST, "tenant": "tenant_1", "purpose": "batch_output"}, 21),
        (keys, "list", {**LIST, "tenant": "tenant_1"}, 21),
        (keys, "list", LIST, 21),
        (schedules, "list", {**LIST, "tenant": "tenant_1", "after": "n2"}, 21),
        (schedules, "list_everywhere", {**LIST, "after_tenant": "tenant_0", "after": "n2"}, 21),
        (schedules, "due", LIST, 10),
    ],
)
def test_a_page_is_read_from_an_index_in_its_order(crowd, source, name, values, rows):
    found = plan(crowd, name, source=source.SQL, run=True, **values)
    assert found["Actual Rows"] == rows
    scans = {node["Relation Name"] for node in nodes(found) if node["Node Type"] == "Seq Scan"}
    assert scans <= {"ingest_collection"}, "there is only one"
    assert touched(found) < 300


def test_what_batches_used_today_is_read_from_those_that_are_open_or_ended_today(crowd):
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    found = plan(crowd, "used_today", source=store.SQL, run=True, limit=5_000, now=tomorrow)
    scans = {node["Relation Name"] for node in nodes(found) if node["Node Type"] == "Seq Scan"}
    assert scans <= {"batch_sample"}, "it is empty"
    assert touched(found) < 300


def test_every_cause_of_failed_items_is_found_and_counted_up_to_its_share_of_the_limit(crowd):
    wanted = {"limit": 10, "count_max": 140, "groups_max": 100}
    for values in ({"tenant": "tenant_0"}, {}, {"run_id": RUN}):
        found = plan(crowd, "inbox", source=items.SQL, run=True, **wanted, **values)
        assert found["Actual Rows"] == 7
        assert touched(found) < 7 * 21 * 8, "nearly three thousand have failed"


@pytest.mark.parametrize("values", [{"tenant": "tenant_0"}, {"tenant": "tenant_0", "cause": "cause 3"}, {}])
def test_runs_with_failures_are_found_step_by_step_along_their_index(crowd, values):
    limits = {"limit": 10, "scan_max": 20, "heads_max": 100, "only_latest": True}
    found = plan(crowd, "runs_with_failures", source=items.SQL, run=True, **limits, **values)
    assert found["Actual Rows"] == 1
    assert touched(found) < 7 * 20 * 8


@pytest.mark.parametrize("name", ["funnel", "waits"])
def test_open_items_are_counted_up_to_the_limit(crowd, name):
    found = plan(crowd, name, source=items.SQL, run=True, run_id=RUN, count_max=20, limit=10)
    assert found["Actual Rows"] == 1
    assert touched(found) < 20 * 8, "sixty are open"


def test_a_search_for_items_reads_no_more_than_the_limit(crowd):
    wanted = {**ITEMS, "scan_max": 100, "cause": "nothing", "statuses": ["FAILED", "DONE"]}
    found = plan(crowd, "list", source=items.SQL, run=True, **wanted)
    assert found["Actual Rows"] == 1, "the cursor is where the search stopped"
    assert touched(found) < 2 * 100 * 4


@pytest.mark.parametrize("tenant", [None, "waiting"])
def test_waiting_tasks_are_counted_up_to_the_limit(crowd, tenant):
    found = plan(crowd, "count_parked", source=tasks.SQL, run=True, tenant=tenant, count_max=50)
    assert found["Actual Rows"] == 1
    assert touched(found) < 300, "three thousand wait"
