"""A real PgBouncer between the tests and PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.conftest import skip

IGNORING = "ignore_startup_parameters = options"
_LISTEN_SECONDS_MAX = 20.0
_PROGRAM = os.environ.get("BATCHWRIGHT_TEST_PGBOUNCER")
"""The path of a PgBouncer to use instead of the system's."""


def keeping(statements: int) -> list[str]:
    """The setting with which PgBouncer keeps this many statements prepared, if its version can."""
    return [f"max_prepared_statements = {statements}"] if version() >= (1, 22) else []


def version() -> tuple[int, ...]:
    said = subprocess.run([_find(), "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, said.split()[1].split(".")))


def _find() -> str:
    program = _PROGRAM or shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        skip("pgbouncer is not installed")
    return str(program)


@contextlib.contextmanager
def pgbouncer(folder: Path, url: str, mode: str, *settings: str, connect_query: str = "") -> Iterator[str]:
    """The URL of a PgBouncer in this mode in front of the database of that URL."""
    program = _find()
    parts = conninfo_to_dict(url)
    port = _free_port()
    target = " ".join(f"{name}={parts[name]}" for name in ("host", "port", "user", "password") if parts.get(name))
    if connect_query:
        target += " connect_query='{}'".format(connect_query.replace("'", "''"))
    options = [f"listen_port = {port}", f"pool_mode = {mode}", "listen_addr = 127.0.0.1", "unix_socket_dir ="]
    text = ["[databases]", f"* = {target}", "[pgbouncer]", "auth_type = any", *options, *settings]
    file = folder / f"pgbouncer-{port}.ini"
    file.write_text("\n".join(text) + "\n")
    as_user = ["-u", _user(Path(str(parts["host"])))] if os.geteuid() == 0 else []
    process = subprocess.Popen([program, "-q", *as_user, str(file)], stderr=subprocess.DEVNULL)
    try:
        _until_listening(port)
        yield make_conninfo(host="127.0.0.1", port=port, user="anyone", dbname=str(parts["dbname"]))
    finally:
        process.kill()  # after SIGTERM, newer versions would wait for their clients
        process.wait()


def _user(host: Path) -> str:
    """PgBouncer does not run as root; the owner of the server's socket may use it."""
    return host.owner() if host.is_absolute() else "nobody"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + _LISTEN_SECONDS_MAX
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline, "PgBouncer did not listen in time"
        time.sleep(0.02)
