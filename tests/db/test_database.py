"""The door to PostgreSQL: what callers see when the driver stumbles."""

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
    """One that took it for an outage and went on would keep its worker from ever stopping."""
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


async def test_so_does_one_that_waits_for_the_doorbell(monkeypatch):
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
    """The same call may succeed later in both cases, but only who lost its connection knows that others lost theirs."""
    impatient = DatabaseSettings(pool_size=1, statement_timeout_seconds=0.5)
    async with asyncio.timeout(30), Pool(impatient, database_url) as pool:
        with pytest.raises(DatabaseBusy, match="statement timeout"):
            await pool.rows("SELECT pg_sleep(60)")
        async with pool._pool.connection():  # the only one; an idle transaction would not last as long
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
def test_who_is_cancelled_twice_while_waiting_for_a_connection_keeps_nobody_else_waiting(
    database_url, monkeypatch, steps
):
    """Cancel scopes cancel again and again until a task ends. Tasks are woken in 40 orders."""

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


async def test_a_connection_comes_back_whenever_its_user_is_cancelled(database_url):
    """Between asking and having it, and while it is returned."""
    single = replace(DATABASE, pool_size=1)
    async with asyncio.timeout(60), Pool(single, database_url) as pool:
        for steps in range(40):
            using = asyncio.create_task(pool.rows("SELECT 1"))
            for _ in range(steps):
                await asyncio.sleep(0)
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)
            assert await pool.rows("SELECT 3") == [(3,)]
