"""Lists of batches, tasks and documents by status read what they show, however many others there are."""

import psycopg
import pytest

from batchwright.batches import store
from batchwright.db.database import connect_arguments
from batchwright.ingest import items
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
"""
LIST = {"limit": 21}
RUN = "run_" + "0" * 32
OPEN_BATCHES = {**LIST, "statuses": ["validating", "in_progress"]}
OPEN_TASKS = {**LIST, "statuses": ["PENDING", "IN_PROGRESS"]}


@pytest.fixture(scope="module")
def crowded_url(server, template):
    with database(server, "batchwright_test_lists_" + template[-8:], template) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(CROWD)
            connection.execute("VACUUM ANALYZE")
        yield url


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
        (tasks, "list_by_status", OPEN_TASKS, 9),
        (items, "list", {**LIST, "run_id": RUN, "statuses": ["OPEN"]}, 21),
        (items, "list", {**LIST, "run_id": RUN, "statuses": ["OPEN", "DONE", "FAILED"]}, 21),
    ],
)
def test_a_page_is_read_from_an_index_in_its_order(crowd, source, name, values, rows):
    found = plan(crowd, name, source=source.SQL, run=True, **values)
    assert found["Actual Rows"] == rows
    assert [node for node in nodes(found) if node["Node Type"] == "Seq Scan"] == []
    assert touched(found) < 300


def test_failed_items_are_counted_no_further_than_the_limit(crowd):
    found = plan(crowd, "inbox", source=items.SQL, run=True, tenant="tenant_0", limit=10, count_max=50)
    assert touched(found) < 50 * 10, "nearly three thousand have failed"
