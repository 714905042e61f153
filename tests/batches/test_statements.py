"""The statements of files and batches: each can be prepared, and queries of users read few pages among many rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from batchwright.batches import samples, store
from batchwright.batches.upkeep import collector
from batchwright.db.database import DatabaseSettings, connect_arguments
from batchwright.engine import owned
from batchwright.files import store as files
from batchwright.files import uploads
from tests.engine.planning import indexes, nodes, numbered, plan, touched

BATCHES, FILES, SEGMENTS = 20_000, 20_000, 20_000
CROWD = f"""
    INSERT INTO batchwright.batch (id, tenant, job_id, queue, priority, endpoint, input_file_id, completion_window,
        family, created_at, expires_at, in_progress_at, idempotency_key)
    SELECT 'batch_' || lpad(to_hex(n), 32, '0'), CASE n % 100 WHEN 0 THEN 'few' ELSE 'many' END, gen_random_uuid(),
        'batches', 5, '/v1/embeddings', 'file-' || n, '24h', 'batch_' || n, now(), now() + interval '1 day', now(),
        CASE n % 2 WHEN 0 THEN 'key ' || n END
    FROM generate_series(1, {BATCHES}) AS n;
    INSERT INTO batchwright.file (id, tenant, purpose, filename, bytes, sha256, key, created_at, idempotency_key)
    SELECT 'file-' || lpad(to_hex(n), 32, '0'), CASE n % 100 WHEN 0 THEN 'few' ELSE 'many' END, 'batch', 'f', 1,
        repeat('0', 64), 'files/' || n, now(), CASE n % 2 WHEN 0 THEN 'key ' || n END
    FROM generate_series(1, {FILES}) AS n;
    INSERT INTO batchwright.batch_segment (batch_id, shard, claim, seq, host, start_byte, end_byte, lines, tally,
        registered_at)
    SELECT 'batch_' || lpad('1', 32, '0'), 0, 1, n, 'h', 0, 1, 1, '{{}}', now()
    FROM generate_series(1, {SEGMENTS}) AS n;
    ANALYZE batchwright.batch, batchwright.file, batchwright.batch_segment;
"""
IN_THE_MIDDLE = f"{BATCHES // 2:032x}"
PAGES_MAX = 300
SOURCES = (store, collector, owned, files, samples, uploads)


@pytest.fixture(scope="module")
def crowd(server: str, template: str) -> Iterator[psycopg.Connection[Any]]:
    from tests.conftest import database

    with database(server, f"batchwright_statements_{template[-12:]}", template) as url:
        arguments = connect_arguments(DatabaseSettings())
        with psycopg.connect(url, autocommit=True, **arguments) as connection:
            connection.execute(CROWD.encode())
            yield connection


@pytest.mark.parametrize(("source", "name"), [(one, name) for one in SOURCES for name in one.SQL])
def test_every_statement_can_be_prepared(crowd: psycopg.Connection[Any], source: Any, name: str) -> None:
    text, _ = numbered(name, source.SQL)
    crowd.execute(f"PREPARE probe AS {text}".encode())
    crowd.execute("DEALLOCATE probe")


@pytest.mark.parametrize("tenant", ["few", "many"])
@pytest.mark.parametrize("after", [None, IN_THE_MIDDLE])
@pytest.mark.parametrize(
    ("source", "name", "kind", "index"),
    [
        (store, "list", "batch_", "batch_listed"),
        (files, "list_newest", "file-", "file_listed"),
        (files, "list_oldest", "file-", "file_listed"),
    ],
)
def test_any_page_of_a_list_reads_few_database_pages_for_any_tenant(
    crowd: psycopg.Connection[Any], source: Any, name: str, kind: str, index: str, after: str | None, tenant: str
) -> None:
    place = None if after is None else kind + after
    found = plan(crowd, name, source=source.SQL, run=True, tenant=tenant, after=place, limit=21)
    assert (found["Actual Rows"], index in indexes(found)) == (21, True)
    assert touched(found) < PAGES_MAX


def test_a_page_of_a_list_of_all_tenants_reads_few_database_pages(crowd: psycopg.Connection[Any]) -> None:
    found = plan(crowd, "list_everywhere", source=store.SQL, run=True, after=f"batch_{IN_THE_MIDDLE}", limit=21)
    assert (found["Actual Rows"], indexes(found)) == (21, {"batch_pkey"})
    assert touched(found) < PAGES_MAX


@pytest.mark.parametrize(("source", "kind"), [(store, "batch_"), (files, "file-")])
def test_an_idempotency_key_is_found_by_an_index(crowd: psycopg.Connection[Any], source: Any, kind: str) -> None:
    found = plan(
        crowd, "known", source=source.SQL, run=True, tenant="many", idempotency_key="key 2", id=kind + "f" * 32
    )
    assert found["Actual Rows"] == 1
    assert touched(found) < 50


def test_the_pace_of_a_batch_with_many_segments_reads_only_the_newest(crowd: psycopg.Connection[Any]) -> None:
    ids = [f"batch_{1:032x}"]
    found = plan(crowd, "paces", source=store.SQL, run=True, ids=ids, seconds=60.0, segments=500)
    assert found["Actual Rows"] == 1
    read = [node["Actual Rows"] for node in nodes(found) if node.get("Relation Name") == "batch_segment"]
    assert read == [500]
    assert touched(found) < PAGES_MAX


def test_postgresql_merges_the_view_of_jobs_into_the_statement(crowd: psycopg.Connection[Any]) -> None:
    found = plan(crowd, "stalled", source=store.SQL, run=True, after_time="2000-01-01", after_id="", limit=200)
    assert found["Actual Rows"] == 200, "none of them has a job"
    assert indexes(found) == {"batch_open", "job_pkey"}
    assert not any(node["Node Type"] == "Subquery Scan" for node in nodes(found))
