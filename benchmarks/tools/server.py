"""The PostgreSQL that a benchmark runs on, and the CPU time that it used."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import psycopg
from psycopg import sql

SETTINGS = {
    "checkpoint_timeout": "30min",
    "fsync": "on",
    "max_connections": "500",
    "max_wal_size": "4GB",
    "shared_buffers": "1GB",
    "synchronous_commit": "on",
}
SHOWN = (
    "fsync",
    "synchronous_commit",
    "shared_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "wal_compression",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server. `postmaster` is None when it runs elsewhere; its processor time is then unknown."""

    postmaster: psutil.Process | None
    url: str

    def cpu_seconds(self) -> float | None:
        """Postmaster, its living children, and (by its own account of them) its dead ones."""
        if self.postmaster is None:
            return None
        own = self.postmaster.cpu_times()
        total = own.user + own.system + own.children_user + own.children_system
        for child in self.postmaster.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                total += times.user + times.system
        return total

    def private_bytes(self) -> int:
        """Memory of all its processes that they share with no other; 0 when it runs elsewhere."""
        total = 0
        for child in self.postmaster.children(recursive=True) if self.postmaster else ():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += child.memory_full_info().uss
        return total

    def wal_bytes(self) -> int:
        return int(self.scalar("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"))

    def disk_bytes(self, url: str) -> int:
        return int(self.scalar("SELECT pg_database_size(current_database())", url))

    def describe(self) -> dict[str, str]:
        names = ("server_version", *SHOWN)
        return {name: self.scalar(f"SHOW {name}") for name in names}

    def checkpoint(self) -> None:
        self.scalar("CHECKPOINT")

    @contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database, removed afterwards."""
        name = f"bench_{uuid4().hex[:12]}"
        self.scalar(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield with_database(self.url, name)
        finally:
            self.scalar(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def scalar(self, statement: str | sql.Composed, url: str | None = None) -> str:
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            row = cursor.fetchone() if cursor.description else None
        return str(row[0]) if row else ""


@contextmanager
def server(database_url: str | None, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """The server at `database_url`, or one of our own with these settings, in a temporary folder."""
    if database_url is not None:
        yield connect(database_url)
        return
    from batchwright.db.embedded import EmbeddedPostgres

    with tempfile.TemporaryDirectory(prefix="batchwright-bench-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # root's server runs as another user, who has to reach it
        embedded = EmbeddedPostgres(Path(folder) / "postgres", settings={**SETTINGS, **(settings or {})})
        try:
            yield connect(embedded.start())
        finally:
            embedded.stop()


def connect(url: str) -> Server:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        postmaster = parent_of_backend(row[0])
    return Server(postmaster=postmaster, url=url)


def parent_of_backend(pid: int) -> psutil.Process | None:
    try:
        backend = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
    return backend.parent() if "postgres" in backend.name() else None


@contextmanager
def pinned_horizon(url: str) -> Iterator[None]:
    """An idle transaction whose snapshot keeps vacuum from removing any row that dies meanwhile."""
    with psycopg.connect(url) as connection:
        connection.execute("SET idle_in_transaction_session_timeout = 0")
        connection.commit()
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM pg_class")
        yield
        connection.rollback()


def with_database(url: str, name: str) -> str:
    """The same server, another database: postgresql://user@host:port/NAME?options."""
    address, question, options = url.partition("?")
    return f"{address.rsplit('/', 1)[0]}/{name}{question}{options}"
