"""The commands behind a real PgBouncer, in session mode and in transaction mode."""

from __future__ import annotations

import signal

import pytest
from psycopg.conninfo import make_conninfo

from batchwright.db.database import Pool
from batchwright.db.sessions import Mode
from batchwright.errors import DatabaseUnavailable
from tests.cli.conftest import SAMPLE, Cli, Inside
from tests.db.far import far_away
from tests.db.pgbouncer import IGNORING, pgbouncer
from tests.support import DATABASE


def test_a_pooler_that_refuses_our_options_is_explained(inside: Inside, database_url: str, tmp_path) -> None:
    remedy = "set ignore_startup_parameters = options there, or connect to PostgreSQL directly"
    with pgbouncer(tmp_path, database_url, "session") as url:
        code, out, _ = inside("check", "--database-url", url)
        assert (code, remedy in out) == (1, True)
        for command in (("job", "list"), ("migrate",)):
            code, _, err = inside(*command, "--database-url", url)
            assert (code, err.count("\n"), remedy in err) == (1, 1, True)


@pytest.mark.thorough
async def test_a_session_pool_that_is_too_small_is_explained(database_url: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("batchwright.db.sessions._ANSWER_SECONDS_MAX", 0.5)
    said = r"second of two connections no answer within 0\.5 s, while answers on the first took up to \d\.\d\d s"
    with (
        pgbouncer(tmp_path, database_url, "session", IGNORING, "default_pool_size = 1") as url,
        pytest.raises(DatabaseUnavailable, match=said),
    ):
        await Pool(DATABASE, url).open()


@pytest.mark.timed("it takes 3 s already")
async def test_the_mode_of_a_pool_200_ms_away_is_recognized(database_url, tmp_path) -> None:
    """The time limit is for each round trip; all of them together take longer."""
    size = "default_pool_size = 20"
    with pgbouncer(tmp_path, database_url, "session", IGNORING, size) as url:
        async with far_away(url, 0.1) as far, Pool(DATABASE, far) as pool:
            assert pool.route.mode is Mode.SESSION
            assert pool.route.answer_seconds >= 0.2
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, size) as url:
        async with far_away(url, 0.1) as far, Pool(DATABASE, far) as pool:
            assert pool.route.mode is Mode.TRANSACTION


COMMANDS = (
    "migrate",
    "workers",
    "operations",
    "job submit sample.greet",
    "job list",
    "queue list",
    "inbox list",
    "key list",
    "schedule list",
    "batch list",
)


def test_every_command_works_in_transaction_mode(inside: Inside, publish: None, database_url: str, tmp_path) -> None:
    """The commands share one session, in which each must leave nothing that disturbs the next."""
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, "default_pool_size = 1") as url:
        for command in COMMANDS * 2:
            code, _, err = inside(*command.split(), "--database-url", url)
            assert (code, "prepared statement" in err) == (0, False), (command, err)


def test_the_check_says_what_is_used_how(inside: Inside, database_url: str, tmp_path, monkeypatch) -> None:
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING) as url:
        found = {one["name"]: one for one in inside.json("check", "--processes", "1000", "--database-url", url)}
        assert found["database"]["level"] == "ok"
        assert "reached; statements go through a pooler in transaction mode, " in found["database"]["text"]
        assert (
            "leases too, which wait when the pool is full; no doorbell: new jobs are found within 2 s; an answer takes"
            in (found["database"]["text"])
        )
        assert found["connections"]["level"] == "ok"
        assert "1000 worker process(es) use up to 0 of " in found["connections"]["text"]
        assert "up to 9000 of the pooler's (max_client_conn)" in found["connections"]["text"]
        monkeypatch.setenv("BATCHWRIGHT_DATABASE_LEASE_URL", database_url)
        found = {one["name"]: one for one in inside.json("check", "--database-url", url)}
        assert "leases by database.lease_url, directly; the doorbell as well" in found["database"]["text"]
    found = {one["name"]: one for one in inside.json("check")}
    assert "reached; statements go directly; leases too; the doorbell as well" in found["database"]["text"]


def test_a_wrong_url_for_leases_stops_every_worker_before_it_runs(inside: Inside, database_url, monkeypatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_LEASE_URL", make_conninfo(database_url, dbname="postgres"))
    elsewhere = "database.lease_url refers to another database than database.url"
    code, out, _ = inside("check")
    assert (code, "✗ database" in out, elsewhere in out) == (1, True, True)
    for command in (f"worker {SAMPLE}", f"up {SAMPLE}"):
        code, out, err = inside(*command.split())
        assert (code, out) == (1, "")
        assert elsewhere in err
    assert inside("job", "list")[0] == 0, "a command without leases still works"
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_LEASE_URL", "postgresql://some one")
    assert "URL cannot be read" in inside("job", "list")[2]


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_up_works_behind_a_pooler(inside: Inside, cli: Cli, tmp_path, mode: str) -> None:
    """Only the timeouts do not get through; the check says so."""
    with pgbouncer(tmp_path, cli.url, mode, IGNORING, "default_pool_size = 50") as url:
        found = {one["name"]: one for one in inside.json("check", "--database-url", url)}
        assert found["database"]["level"] == "ok"
        assert found["session"]["level"] == "warning"
        assert "if no other program uses this role in this database" in found["session"]["remedy"]
        cli.environment["BATCHWRIGHT_DATABASE_URL"] = url
        with cli.start("up", SAMPLE) as up:
            up.until("runs .*sample.block")
            if mode == "transaction":
                up.until("no doorbell: new jobs are found within 2 s")
            assert cli("job", "submit", "sample.greet", "--wait").stdout.endswith('"hello you"\n')
            up.signal(signal.SIGTERM)
            assert up.ended() == 0
