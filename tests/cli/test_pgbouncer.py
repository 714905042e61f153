"""A real PgBouncer between us and PostgreSQL: session mode is welcome, everything else is refused with a reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from batchwright.db.database import Pool
from batchwright.errors import ConfigurationError, DatabaseUnavailable
from tests.cli.conftest import SAMPLE, SECONDS_MAX, Cli, Inside
from tests.conftest import skip
from tests.db.far import far_away
from tests.support import DATABASE

IGNORING = "ignore_startup_parameters = options"


@contextlib.contextmanager
def pgbouncer(folder: Path, url: str, mode: str, *settings: str) -> Iterator[str]:
    """The URL of a PgBouncer in this mode before the database of that URL."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        skip("pgbouncer is not installed")
    parts = conninfo_to_dict(url)
    port = _free_port()
    target = " ".join(f"{name}={parts[name]}" for name in ("host", "port", "user", "password") if parts.get(name))
    options = [f"listen_port = {port}", f"pool_mode = {mode}", "listen_addr = 127.0.0.1", "unix_socket_dir ="]
    text = ["[databases]", f"* = {target}", "[pgbouncer]", "auth_type = any", *options, *settings]
    file = folder / "pgbouncer.ini"
    file.write_text("\n".join(text) + "\n")
    as_user = ["-u", _user(Path(str(parts["host"])))] if os.geteuid() == 0 else []
    process = subprocess.Popen([str(program), "-q", *as_user, str(file)], stderr=subprocess.DEVNULL)
    try:
        _until_listening(port)
        yield make_conninfo(host="127.0.0.1", port=port, user="anyone", dbname=str(parts["dbname"]))
    finally:
        process.terminate()
        process.wait()


def _user(host: Path) -> str:
    """PgBouncer does not run as root; the owner of the server's socket may use it."""
    return host.owner() if host.is_absolute() else "nobody"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline, "PgBouncer does not listen"
        time.sleep(0.02)


@pytest.mark.parametrize("pool", ["default_pool_size = 1", "default_pool_size = 20", "server_round_robin = 1"])
async def test_transaction_mode_is_refused_whatever_its_pool(database_url: str, tmp_path, pool: str) -> None:
    with (
        pgbouncer(tmp_path, database_url, "transaction", IGNORING, pool) as url,
        pytest.raises(ConfigurationError, match="set pool_mode = session for this database, or connect to PostgreSQL"),
    ):
        await Pool(DATABASE, url).open()


async def test_statement_mode_is_refused(database_url: str, tmp_path) -> None:
    with (
        pgbouncer(tmp_path, database_url, "statement", IGNORING) as url,
        pytest.raises(ConfigurationError, match="pool_mode = transaction or statement"),
    ):
        await Pool(DATABASE, url).open()


def test_a_pooler_that_refuses_our_options_is_explained(inside: Inside, database_url: str, tmp_path) -> None:
    remedy = "use a pool with pool_mode = session and ignore_startup_parameters = options"
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
async def test_a_session_pool_200_ms_away_is_accepted_and_a_transaction_pool_refused(database_url, tmp_path) -> None:
    """The limit is one for each round trip: all of them together take longer than it."""
    size = "default_pool_size = 20"
    with pgbouncer(tmp_path, database_url, "session", IGNORING, size) as url:
        async with far_away(url, 0.1) as far, Pool(DATABASE, far) as pool:
            assert pool.answer_seconds >= 0.2
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING, size) as url:
        async with far_away(url, 0.1) as far:
            with pytest.raises(ConfigurationError, match="pool_mode = transaction or statement"):
                await Pool(DATABASE, far).open()


COMMANDS = (
    f"up {SAMPLE}",
    f"worker {SAMPLE}",
    "api",
    "migrate",
    "workers",
    "operations",
    "job submit sample.greet",
    "job list",
    "queue list",
    f"pipeline show {uuid4()}",
    "inbox list",
    "key list",
    "schedule list",
    "batch list",
)


def test_every_command_refuses_transaction_mode_in_words(inside: Inside, database_url: str, tmp_path) -> None:
    """Also those that would find a free backend for now, and leave their prepared statements there for the next."""
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING) as url:
        code, out, _ = inside("check", "--database-url", url)
        assert code == 1
        assert "✗ database" in out
        assert "pool_mode = session" in out
        for command in COMMANDS:
            code, out, err = inside(*command.split(), "--database-url", url)
            assert (code, out, err.count("\n")) == (1, "", 1), (command, err)
            assert "Batchwright needs sessions" in err
            assert "prepared statement" not in err.replace("LISTEN, prepared statements", "")


def test_session_mode_is_accepted_and_works(inside: Inside, cli: Cli, tmp_path) -> None:
    """Only the timeouts do not arrive; the check says so, and advises nothing that others with the role would feel."""
    with pgbouncer(tmp_path, cli.url, "session", IGNORING, "default_pool_size = 50") as url:
        found = {one["name"]: one for one in inside.json("check", "--database-url", url)}
        assert found["database"]["level"] == "ok"
        assert found["session"]["level"] == "warning"
        assert "set them for a role that no other program uses" in found["session"]["remedy"]
        assert "ALTER ROLE" not in found["session"]["remedy"]
        assert "enable_seqscan" not in found["session"]["remedy"]
        cli.environment["BATCHWRIGHT_DATABASE_URL"] = url
        with cli.start("up", SAMPLE) as up:
            up.until("runs .*sample.block")
            assert cli("job", "submit", "sample.greet", "--wait").stdout.endswith('"hello you"\n')
            up.signal(signal.SIGTERM)
            assert up.ended() == 0
