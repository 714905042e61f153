"""PgBouncer in transaction mode in front of the database: everything works, without sessions or with a second URL."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from batchwright import Done, NewJob
from batchwright.app import VERSION
from batchwright.db.check import Level, check_database, explained
from batchwright.db.database import Blocking, Database, Pool, complete
from batchwright.db.doorbell import Doorbell
from batchwright.db.migrate import migrate, migrations
from batchwright.db.sessions import Mode
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.errors import ConfigurationError, DatabaseError, DatabaseUnavailable
from batchwright.operations.decorator import operation
from batchwright.states import BatchStatus, JobStatus
from tests.api.streaming import Stream, serving
from tests.batches.stage import request, staged
from tests.conftest import database
from tests.db.pgbouncer import IGNORING, keeping, pgbouncer, version
from tests.support import (
    DATABASE,
    INTERRUPT_SECONDS_MAX,
    emit,
    finished,
    noop,
    put,
    put_one,
    succeed,
    take_one,
    within,
    working,
)

SMALL = "default_pool_size = 3"


@pytest.fixture
def pooled(database_url: str, tmp_path) -> Iterator[str]:
    """The test's database through a pooler with few sessions."""
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, SMALL) as url:
        yield url


@pytest.fixture
async def pool(pooled: str) -> AsyncIterator[Pool]:
    async with Pool(DATABASE, pooled) as pool:
        yield pool


def listeners(database_url: str) -> int:
    """The number of sessions whose last statement is the LISTEN for the doorbell."""
    with psycopg.connect(database_url) as connection:
        sql = (
            "SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN batchwright' AND datname = current_database()"
        )
        ((n,),) = connection.execute(sql).fetchall()
        return int(n)


# The pooler ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["default_pool_size = 1", "default_pool_size = 20", "server_round_robin = 1"])
async def test_transaction_mode_is_recognized_whatever_its_pool(database_url, tmp_path, size) -> None:
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, size) as url:
        async with Pool(DATABASE, url) as pool:
            assert pool.route.mode is Mode.TRANSACTION
            assert not pool.route.keeps_sessions


@pytest.mark.parametrize("kept", [0, 100])
async def test_statements_stay_prepared_where_the_pooler_keeps_track_of_them(database_url, tmp_path, kept) -> None:
    """With an older pooler, no prepared statement is left in the sessions, where it would disturb the next client."""
    can_keep = version() >= (1, 22)
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, "default_pool_size = 1", *keeping(kept)) as url:
        for _ in range(2):
            async with Pool(DATABASE, url) as pool:
                assert pool.route.prepares is (can_keep and kept > 0)
                for n in range(3):
                    assert await pool.rows("SELECT %(n)s::integer", {"n": n}) == [(n,)]
                found = await pool.rows("SELECT name FROM pg_prepared_statements")
                assert all(name.startswith("PGBOUNCER_") for (name,) in found)
                assert bool(found) is pool.route.prepares


async def test_many_processes_that_start_at_once_behind_a_small_pool_all_recognize_it(database_url, tmp_path) -> None:
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, "default_pool_size = 2") as url:
        pools = [Pool(DATABASE, url) for _ in range(20)]
        try:
            await asyncio.gather(*[pool.open() for pool in pools])
            assert {pool.route.mode for pool in pools} == {Mode.TRANSACTION}
        finally:
            await asyncio.gather(*[pool.close() for pool in pools])


async def test_statement_mode_is_refused(database_url, tmp_path) -> None:
    with (
        pgbouncer(tmp_path, database_url, "statement", IGNORING) as url,
        pytest.raises(ConfigurationError, match="set pool_mode = transaction or session for this database"),
    ):
        await Pool(DATABASE, url).open()


async def test_a_mode_that_changes_under_a_process_is_explained(database_url, tmp_path) -> None:
    """These connections do not know that their sessions are shared."""
    said = "a pooler changed its pool_mode while this process ran: restart it"
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, SMALL, *keeping(0)) as url:
        first, second = Blocking(DATABASE, url), Blocking(DATABASE, url)
        complete(first.rows("SELECT %(n)s::integer", {"n": 1}))
        with pytest.raises(DatabaseError, match=said):
            complete(second.rows("SELECT %(n)s::text", {"n": 1}))
        first.close()
        second.close()


async def test_times_come_in_utc_whatever_the_zone_of_the_server(database_url, tmp_path) -> None:
    """The ticks of schedules are compared as text."""
    with psycopg.connect(database_url, autocommit=True) as admin:
        name = admin.info.dbname
        admin.execute(f"ALTER DATABASE {name} SET timezone = 'Asia/Kolkata'")
    sql = "SELECT current_setting('timezone'), now(), %(n)s::integer, pg_sleep(0.05)"
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING) as url:
        async with Pool(DATABASE, url) as pool:
            asked = [pool.rows(sql, {"n": n}) for n in range(6)]  # in several sessions of the server
            blocking = Blocking(DATABASE, url, prepares=False)
            found = [*await asyncio.gather(*asked), complete(blocking.rows(sql, {"n": 6}))]
            blocking.close()
    assert [(zone, now.utcoffset()) for ((zone, now, _, _),) in found] == [("UTC", timedelta(0))] * 7


async def test_the_schema_is_migrated_through_it_once(empty_database_url, tmp_path) -> None:
    with pgbouncer(tmp_path, empty_database_url, "transaction", IGNORING, SMALL) as url:
        async with Pool(DATABASE, url) as one, Pool(DATABASE, url) as two:
            applied = await asyncio.gather(migrate(one, VERSION), migrate(two, VERSION))
    assert sorted(map(len, applied)) == [0, len(migrations())]


# Workers ------------------------------------------------------------------------------------------------------------


async def test_a_worker_claims_renews_is_cancelled_and_settles_without_a_session(pool, database_url, caplog) -> None:
    caplog.set_level(logging.INFO)
    entered, interrupted = asyncio.Event(), asyncio.Event()

    @operation("stay")
    async def stay() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupted.set()
            raise

    queue = Queue(Database(pool), EngineSettings(lease_seconds=1.5))
    async with working(pool, stay, noop, queue=queue) as worker:
        id, done = await put(queue, NewJob("stay"), NewJob("noop", {"n": 7}), operations=worker._operations)
        await entered.wait()
        assert (await finished(queue, done)).result == 7
        first = (await queue.get(id)).lease_until
        assert first is not None
        while (await queue.get(id)).lease_until == first:
            await asyncio.sleep(0.01)
        async with within(INTERRUPT_SECONDS_MAX):
            await queue.cancel([id])
            await interrupted.wait()
        assert (await finished(queue, id)).status is JobStatus.CANCELLED
        assert listeners(database_url) == 0
    assert "statements go through a pooler in transaction mode" in caplog.text
    assert "leases too, which wait when the pool is full; no doorbell: new jobs are found within 2 s" in caplog.text


async def test_without_a_session_the_poller_finds_jobs(pool) -> None:
    queue = Queue(Database(pool))
    async with working(pool, poll_seconds_max=0.2):
        assert (await finished(queue, await put_one(queue))).status is JobStatus.SUCCEEDED


async def test_by_the_url_for_leases_the_doorbell_wakes(pooled, database_url) -> None:
    """The poller alone would poll after 7.5 s at the earliest."""
    settings = dataclasses.replace(DATABASE, lease_url=database_url)
    async with Pool(settings, pooled) as pool:
        queue, doorbell = Queue(Database(pool)), Doorbell(pool)
        async with working(pool, poll_seconds_min=10.0, poll_seconds_max=10.0):
            while listeners(database_url) == 0:
                await asyncio.sleep(0.01)
            async with within(3.0):
                id = await put_one(queue)
                doorbell.ring(["default"])
                assert (await finished(queue, id)).status is JobStatus.SUCCEEDED
        await doorbell.close()


async def test_leases_may_use_a_separate_pool_in_transaction_mode(pooled, database_url, tmp_path) -> None:
    """So leases do not wait for other statements, and a thousand workers need few sessions for them."""
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, "default_pool_size = 1") as leases:
        async with Pool(dataclasses.replace(DATABASE, pool_size=4, lease_url=leases), pooled) as pool:
            queue = Queue(Database(pool), EngineSettings(lease_seconds=4.0))
            entered = asyncio.Event()

            @operation("stay")
            async def stay() -> None:
                entered.set()
                await asyncio.Event().wait()

            async with working(pool, stay, queue=queue, stop_grace_seconds=0.0) as worker, AsyncExitStack() as stack:
                (id,) = await put(queue, NewJob("stay"), operations=worker._operations)
                await entered.wait()
                for _ in range(3):  # all sessions of the pool for statements
                    await stack.enter_async_context(pool.transaction())
                with psycopg.connect(database_url) as beside:
                    for _ in range(3):
                        await _renewed(beside, id)
            ((claims,),) = await pool.rows("SELECT claims FROM batchwright.job")
            assert claims == 1


async def _renewed(connection: psycopg.Connection[tuple[object, ...]], id: object) -> None:
    sql = "SELECT lease_until FROM batchwright.job WHERE id = %s"
    before = connection.execute(sql, [id]).fetchone()
    while True:
        connection.commit()
        if connection.execute(sql, [id]).fetchone() != before:
            return
        await asyncio.sleep(0.01)


async def test_jobs_survive_a_server_that_closes_the_poolers_connections_repeatedly(pool, database_url) -> None:
    """Clients then get two errors at once: the server's and the pooler's."""
    queue = Queue(Database(pool), EngineSettings(lease_seconds=3.0))
    await pool.rows("CREATE TABLE effect (n int)")

    @operation("writes")
    async def writes(n: int) -> Done:
        async def write(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
            await connection.execute("INSERT INTO effect VALUES (%s)", [n])

        return Done(n, write=write)

    throw_out = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with psycopg.connect(database_url, autocommit=True) as admin:
        async with working(pool, writes, queue=queue, concurrency=5, poll_seconds_max=0.2) as worker:
            ids = await put(queue, *[NewJob("writes", {"n": n}) for n in range(100)], operations=worker._operations)
            while admin.execute("SELECT FROM effect").rowcount < len(ids):
                admin.execute(throw_out)
                for _ in range(10):  # so that a statement has a chance to succeed
                    await asyncio.sleep(0.01)
            while admin.execute("SELECT FROM batchwright.job WHERE finished_at IS NULL").rowcount:
                await asyncio.sleep(0.01)
        found = admin.execute("SELECT status::text, attempts, error FROM batchwright.job GROUP BY 1, 2, 3").fetchall()
        assert found == [("SUCCEEDED", 1, None)]
        assert admin.execute("SELECT n FROM effect ORDER BY n").fetchall() == [(n,) for n in range(100)]


@pytest.mark.thorough
async def test_many_workers_share_few_sessions_and_run_each_job_once(pooled) -> None:
    runs: Counter[int] = Counter()

    @operation("count")
    async def count(n: int) -> None:
        runs[n] += 1

    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(Pool(DATABASE, pooled)) for _ in range(20)]
        queue = Queue(Database(pools[0]))
        workers = [await stack.enter_async_context(working(pool, count, poll_seconds_max=0.2)) for pool in pools]
        ids = await put(queue, *[NewJob("count", {"n": n}) for n in range(2_000)], operations=workers[0]._operations)
        for id in ids:
            assert (await finished(queue, id)).status is JobStatus.SUCCEEDED
    assert runs == Counter(range(2_000))


# Batches and the API ------------------------------------------------------------------------------------------------


async def test_a_batch_goes_through_it(pooled, tmp_path) -> None:
    async with staged(pooled, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit([request(f"r{n}") for n in range(50)]))
        assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 50)
        output, _ = await stage.results(batch)
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(50)]


async def test_event_streams_follow_through_it(pooled) -> None:
    async with serving(pooled, noop) as (batchwright, server):
        id = await put_one(batchwright.queue)
        claim = await take_one(batchwright.queue)
        async with await Stream.open(server.url, id) as stream:
            await emit(batchwright.queue, claim, event="step.live")
            await succeed(batchwright.queue, claim)
            seen = []
            while (message := await stream.next()).get("event") != "end":
                seen += [message.json["event"]] if "data" in message else []
        assert seen == ["job.enqueued", "job.started", "step.live", "job.succeeded"]


# What is wrong ------------------------------------------------------------------------------------------------------


async def test_leases_that_would_go_to_another_database_are_refused(pool, pooled, server, database_url) -> None:
    with database(server, f"batchwright_test_{uuid4().hex[:12]}") as elsewhere:
        async with Pool(dataclasses.replace(DATABASE, lease_url=elsewhere), pooled) as pool:
            with pytest.raises(ConfigurationError, match="both must name the same database on the same server"):
                async with working(pool):
                    pass
            assert await pool.rows("SELECT id FROM batchwright.worker") == []


async def test_an_unreachable_url_for_leases_is_explained(pooled, database_url) -> None:
    nowhere = make_conninfo(database_url, host="127.0.0.1", port=1)
    async with Pool(dataclasses.replace(DATABASE, lease_url=nowhere), pooled) as pool:
        with pytest.raises(DatabaseUnavailable) as found:
            await pool.explore_leases()
    said = str(explained(found.value))
    assert said.startswith("database.lease_url: ")
    assert "correct host and port in BATCHWRIGHT_DATABASE_LEASE_URL" in said


async def test_a_url_for_leases_with_a_pooler_in_statement_mode_is_refused(pooled, database_url, tmp_path) -> None:
    with pgbouncer(tmp_path, database_url, "statement", IGNORING) as leases:
        async with Pool(dataclasses.replace(DATABASE, lease_url=leases), pooled) as pool:
            with pytest.raises(ConfigurationError, match=r"database\.lease_url: .*pool_mode = transaction or session"):
                await pool.explore_leases()


# What the check says ------------------------------------------------------------------------------------------------


async def test_the_check_prints_the_statements_that_apply_our_settings(database_url, tmp_path) -> None:
    """They can be pasted; afterwards the check has no complaint."""
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING) as url:
        async with Pool(DATABASE, url) as pool:
            found = {one.name: one for one in await check_database(pool, DATABASE)}["session"]
            prepares = pool.route.prepares
    assert found.level is Level.WARNING
    assert "statement_timeout (it is 0, not 10000)" in found.text
    assert ("plan_cache_mode" in found.text) is prepares, "otherwise no plan is cached"
    assert found.remedy is not None
    with psycopg.connect(database_url, autocommit=True) as admin:
        for rest in found.remedy.split("ALTER ROLE")[1:]:
            admin.execute(f"ALTER ROLE{rest.partition(';')[0]}")
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING) as url:
        async with Pool(DATABASE, url) as pool:
            found = {one.name: one for one in await check_database(pool, DATABASE)}["session"]
    assert (found.level, found.text) == (Level.OK, "timeouts of 10 s are in force")


async def test_a_pool_with_a_connect_query_needs_no_separate_role(database_url, tmp_path) -> None:
    """The pool is configured as in docs/operating.md."""
    query = "SET statement_timeout = '10s'; SET lock_timeout = '10s'; SET enable_seqscan = off; SET jit = off"
    query += "; SET idle_in_transaction_session_timeout = '10s'; SET plan_cache_mode = force_generic_plan"
    query += "; SET timezone = 'UTC'"
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, connect_query=query) as url:
        async with Pool(DATABASE, url) as pool:
            found = {one.name: one for one in await check_database(pool, DATABASE)}["session"]
    assert found.level is Level.OK, found.text


async def test_the_check_counts_connections_through_the_pooler_separately(pool, pooled, database_url) -> None:
    """A worker behind the pooler uses none of the server's connections, or two with a direct URL for leases."""
    found = {one.name: one for one in await check_database(pool, DATABASE, processes=1_000)}["connections"]
    assert found.level is Level.OK
    assert found.text.startswith("1000 worker process(es) use up to 0 of ")
    assert "up to 7000 of the pooler's (max_client_conn)" in found.text
    async with Pool(dataclasses.replace(DATABASE, lease_url=database_url), pooled) as apart:
        leases = await apart.explore_leases()
        assert leases.mode is Mode.DIRECT
        found = {one.name: one for one in await check_database(apart, DATABASE, leases=leases, processes=1_000)}[
            "connections"
        ]
    assert found.level is Level.WARNING
    assert found.text.startswith("1000 worker process(es) use up to 2000 of ")
    assert "up to 6000 of the pooler's" in found.text
