"""Access to PostgreSQL: what callers see when the driver fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psycopg
import pytest

from batchwright.db.database import DatabaseSettings, Pool
from batchwright.db.doorbell import listen
from batchwright.errors import DatabaseBusy, DatabaseUnavailable
from tests import perturb
from tests.support import DATABASE

BACKENDS = "pg_stat_activity WHERE datname = current_database() AND query LIKE '%%pg_sleep(60)%%' AND pid <> %s"


async def sleep_alone(pool):
    await pool.rows("SELECT pg_sleep(60)")


async def sleep_in_transaction(pool):
    async with pool.transaction() as session:
        await session.rows("SELECT pg_sleep(60)")


@pytest.mark.direct("it looks for its own backend")
@pytest.mark.parametrize("sleep", [sleep_alone, sleep_in_transaction])
async def test_a_task_that_is_cancelled_while_its_connection_is_lost_ends_as_cancelled(database_url, sleep):
    """If the task took this for an outage and continued, its worker could never stop."""
    async with Pool(DATABASE, database_url) as pool:
        sleeping = asyncio.create_task(sleep(pool))
        with psycopg.connect(database_url, autocommit=True) as other:
            me = (other.info.backend_pid,)
            async with asyncio.timeout(20):
                while not other.execute(f"SELECT FROM {BACKENDS}", me).rowcount:
                    await asyncio.sleep(0.01)
            other.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM {BACKENDS}", me)
        sleeping.cancel()
        await asyncio.wait([sleeping])
        assert sleeping.cancelled()


async def test_a_cancelled_task_that_waits_for_the_doorbell_ends_as_cancelled_too(monkeypatch):
    waits = asyncio.Event()

    async def lost(*_, **__):
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise psycopg.OperationalError("the connection is lost") from error

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", lost)
    listening = asyncio.create_task(listen(DATABASE, "postgresql://", print))
    await waits.wait()
    listening.cancel()
    await asyncio.wait([listening], timeout=5)
    assert listening.cancelled()


@pytest.mark.direct("it expects our timeouts")
async def test_a_slow_database_is_not_taken_for_a_lost_connection(database_url):
    """In both cases the call may succeed later, but only a lost connection means that others lost theirs, too."""
    impatient = DatabaseSettings(pool_size=1, statement_timeout_seconds=0.5)
    async with asyncio.timeout(30), Pool(impatient, database_url) as pool:
        with pytest.raises(DatabaseBusy, match="statement timeout"):
            await pool.rows("SELECT pg_sleep(60)")
        async with pool._pool.connection():  # hold the only connection; an idle transaction would be ended too early
            with pytest.raises(DatabaseBusy, match="no connection"):
                await pool.rows("SELECT 1")
        with psycopg.connect(database_url) as other:
            other.execute("LOCK batchwright.queue")
            with pytest.raises(DatabaseBusy, match="timeout"):
                await pool.rows("SELECT FROM batchwright.queue")
        with pytest.raises(DatabaseUnavailable) as lost:
            await pool.rows("SELECT pg_terminate_backend(pg_backend_pid())")
        assert not isinstance(lost.value, DatabaseBusy)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_task_that_is_cancelled_twice_while_waiting_for_a_connection_does_not_block_others(
    database_url, monkeypatch, steps
):
    """Cancel scopes cancel repeatedly until a task ends. The test wakes tasks in 40 different orders."""

    async def play():
        async with asyncio.timeout(5), Pool(replace(DATABASE, pool_size=1), database_url) as pool:
            async with pool.transaction() as held:
                waiting = asyncio.create_task(pool.rows("SELECT 1"))
                while not pool._pool.get_stats().get("requests_waiting"):
                    await held.rows("SELECT 2")
                waiting.cancel()
                for _ in range(steps):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            return await pool.rows("SELECT 3")

    for seed in range(40):
        monkeypatch.setattr(perturb, "_active", [perturb.Perturbation(str(seed), seconds_max=0.0)])
        with asyncio.Runner(loop_factory=perturb.PerturbedLoop) as runner:
            assert runner.run(play()) == [(3,)]


async def test_a_connection_returns_to_the_pool_whenever_its_user_is_cancelled(database_url):
    """The cancel comes between the request for the connection and its arrival, or while it is returned."""
    single = replace(DATABASE, pool_size=1)
    async with asyncio.timeout(60), Pool(single, database_url) as pool:
        for steps in range(40):
            using = asyncio.create_task(pool.rows("SELECT 1"))
            for _ in range(steps):
                await asyncio.sleep(0)
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)
            assert await pool.rows("SELECT 3") == [(3,)]
