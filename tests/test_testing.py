"""The public test kit: drain(), and the fixtures of the plugin."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

from batchwright import AsyncBatchwright, Batchwright, Context, Done, NewJob, Snooze, Transient, Wait, operation
from batchwright.db import throwaway
from batchwright.db.embedded import EmbeddedPostgres
from batchwright.errors import BatchwrightError, ConfigurationError, Conflict, UnknownOperation
from batchwright.states import JobStatus
from batchwright.testing import drain
from tests.support import make_worker, working


@operation("page")
def page(n: int) -> int:
    return n * n


@operation("report")
async def report(ctx: Context, pages: int) -> object:
    if ctx.joined is None:
        return Wait([NewJob(page, {"n": n}) for n in range(pages)], on_join="resume")
    return Done(sum([child.result async for child in ctx.joined]), then=[NewJob(page, {"n": 3})])


@operation("stubborn", backoff_seconds=3600)
async def stubborn(ctx: Context) -> int:
    if ctx.attempt < 3:
        raise Transient("not yet")
    return ctx.attempt


@operation("endless")
async def endless() -> Snooze:
    return Snooze(60)


async def test_drain_runs_parents_children_and_chained_jobs(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[page, report]) as batchwright:
        job = await batchwright.enqueue(report, {"pages": 5})
        assert await drain(batchwright) == 5 + 2 + 1
        assert await batchwright.wait(job, timeout=1) == 30


async def test_drain_skips_delays_and_backoffs_with_fast_forward(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[stubborn]) as batchwright:
        job = await batchwright.enqueue(stubborn, delay_seconds=86_400)
        assert await drain(batchwright, fast_forward=True) == 3
        assert await batchwright.wait(job, timeout=1) == 3


@pytest.mark.parametrize("fast_forward", [False, True])
async def test_drain_names_jobs_that_this_client_cannot_run(database_url, fast_forward):
    """It left them, and `wait()` after it never returned."""
    async with AsyncBatchwright(database_url=database_url) as batchwright:
        job = await batchwright.enqueue(page, {"n": 1})
        with pytest.raises(UnknownOperation, match="due jobs of 'page', which this client does not know: return the"):
            await drain(batchwright, fast_forward=fast_forward)
        assert (await batchwright.get(job)).status is JobStatus.QUEUED


async def test_drain_leaves_a_job_of_next_week_alone(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[page]) as batchwright:
        later = await batchwright.enqueue(page, {"n": 1}, delay_seconds=7 * 86_400)
        now = await batchwright.enqueue(page, {"n": 2})
        assert await drain(batchwright) == 1
        assert (await batchwright.get(now)).status is JobStatus.SUCCEEDED
        assert (await batchwright.get(later)).status is JobStatus.QUEUED


async def test_drain_refuses_a_database_that_a_live_worker_serves(database_url):
    """Otherwise it would run jobs of the user's real database."""
    async with AsyncBatchwright(database_url=database_url, operations=[page]) as batchwright:
        job = await batchwright.enqueue(page, {"n": 1}, queue="elsewhere")
        async with working(batchwright.pool, page, queues=("default",)) as worker:
            for fast_forward in (False, True):
                with pytest.raises(Conflict, match=f"the worker {worker.id} serves this database") as caught:
                    await drain(batchwright, fast_forward=fast_forward)
            assert caught.value.holder == worker.id
        assert (await batchwright.get(job)).status is JobStatus.QUEUED
        assert await drain(batchwright) == 1, "a worker that has stopped does not prevent it"
        assert await drain(batchwright) == 0, "an earlier drain does not prevent it either"


async def test_drain_does_not_skip_ahead_if_a_worker_starts_meanwhile(database_url):
    workers = []

    @operation("hire")
    async def hire() -> None:
        worker = make_worker(batchwright.pool, page)
        await worker.register()
        workers.append(worker)

    async with AsyncBatchwright(database_url=database_url, operations=[hire, page]) as batchwright:
        await batchwright.enqueue(hire)
        later = await batchwright.enqueue(page, {"n": 1}, delay_seconds=3600)
        with pytest.raises(Conflict, match="serves this database"):
            await drain(batchwright, fast_forward=True)
        assert (await batchwright.get(later)).status is JobStatus.QUEUED
        await workers[0].close()


async def test_drain_gives_up_on_a_job_that_never_ends(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=[endless]) as batchwright:
        await batchwright.enqueue(endless)
        with pytest.raises(BatchwrightError, match="snooze forever"):
            await drain(batchwright, fast_forward=True, limit=20)


def test_drain_works_with_the_blocking_client_too(database_url):
    with Batchwright(database_url=database_url, operations=[page]) as batchwright:
        job = batchwright.enqueue(page, {"n": 4})
        assert drain(batchwright) == 1
        assert batchwright.wait(job) == 16


# The plugin of pytest ---------------------------------------------------------------------------------------------


class TestWithOperations:
    """Uses the fixtures like a user's test module."""

    @pytest.fixture
    def batchwright_operations(self):
        return [page, report]

    @pytest.fixture
    def batchwright_settings(self):
        return {"worker": {"concurrency": 3}}

    def test_the_client_knows_the_operations_and_settings_of_the_fixtures(self, batchwright_client):
        assert batchwright_client.client.settings.worker.concurrency == 3
        job = batchwright_client.enqueue("report", {"pages": 3})
        drain(batchwright_client)
        assert batchwright_client.wait(job, timeout=1) == 5

    async def test_async_tests_open_their_client_themselves(self, batchwright_async_client):
        async with batchwright_async_client as batchwright:
            job = await batchwright.enqueue(page, {"n": 3})
            await drain(batchwright)
            assert await batchwright.wait(job, timeout=1) == 9


def test_the_clients_read_nothing_of_the_users_own_configuration(request, monkeypatch, tmp_path, batchwright_database):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batchwright.toml").write_text('[database]\nurl = "postgresql://the.real/one"\n')
    monkeypatch.setenv("BATCHWRIGHT_STORAGE_URL", "s3://the-real-one")
    client = request.getfixturevalue("batchwright_client")
    settings = client.client.settings
    assert (settings.database.url, settings.storage.url) == (batchwright_database, None)
    assert settings.database.folder is not None


def test_each_test_has_a_database_of_its_own_which_is_dropped(batchwright_server):
    with throwaway.throwaway_database(batchwright_server) as url, psycopg.connect(url) as connection:
        ((name,),) = connection.execute("SELECT current_database()").fetchall()
    with psycopg.connect(batchwright_server) as connection:
        assert connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone() is None


def test_an_error_for_a_role_that_may_not_create_databases_says_how_to_allow_it(batchwright_server):
    with psycopg.connect(batchwright_server, autocommit=True) as admin:
        admin.execute("CREATE ROLE visitor LOGIN PASSWORD 'visitor'")
        try:
            visitor = psycopg.conninfo.make_conninfo(
                batchwright_server, user="visitor", password="visitor", dbname="postgres"
            )
            with (
                pytest.raises(ConfigurationError, match="ALTER ROLE visitor CREATEDB"),
                throwaway.throwaway_database(visitor),
            ):
                pass
        finally:
            admin.execute("DROP ROLE visitor")


@pytest.fixture
def enterable():
    """A folder that the user of the embedded server may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.thorough
def test_a_server_that_a_killed_run_left_is_stopped_and_removed(enterable):
    left, young = enterable / "batchwright-pytest-left", enterable / "batchwright-pytest-young"
    run = "import os, sys; from pathlib import Path; from batchwright.db.throwaway import throwaway_server as server\n"
    run += "with server(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", run, str(left)], timeout=60).returncode == -9
    assert (left / "data" / "postmaster.pid").exists(), "the server still runs"
    young.mkdir()
    (young / "users.lock").touch()
    os.utime(left, (0, time.time() - 3600))
    throwaway._remove_abandoned(enterable)
    assert not left.exists()
    assert young.exists()


def test_a_server_that_is_in_use_is_left_alone(tmp_path):
    folder = tmp_path / "batchwright-pytest-busy"
    folder.mkdir()
    holder = EmbeddedPostgres(folder)
    holder._hold()
    try:
        os.utime(folder, (0, 0))
        throwaway._remove_abandoned(tmp_path)
        assert folder.exists()
    finally:
        holder._let_go()
