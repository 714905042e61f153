"""A PostgreSQL that fails over on demand: with a streaming standby beside it, or alone.

    asynchronous    primary ── walsender ──▶ standby     a commit is answered before the standby has it
    synchronous     primary ── walsender ──▶ standby     a commit is answered once the standby has it
    crash           server  ── walwriter ──▶ its disk    a commit is answered before it is on disk

`hold()` stops the process in the middle column with SIGSTOP, so that commits are not copied. `fail_over()` kills the
server with SIGKILL, and promotes the standby or restarts the same server. What was held back is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import psutil
import psycopg

from batchwright.db.as_user import Owner, give, run, system_user
from batchwright.db.embedded import EmbeddedPostgres
from tests.chaos.batch_fleet import free_port
from tests.conftest import roomy_folder

Mode = Literal["asynchronous", "synchronous", "crash"]
MODES: tuple[Mode, ...] = ("asynchronous", "synchronous", "crash")
DATABASE = "batchwright"
LOOPBACK = "127.0.0.1"
USER = "batchwright"
_DEBIAN = Path("/usr/lib/postgresql")
_MAJOR_MIN = 15
_POLL_SECONDS = 0.01
_SECONDS_MAX = 60.0
_SETTINGS: Mapping[str, str] = {
    "autovacuum": "off",  # it flushes the log, which would write what the walwriter is to hold back
    "bgwriter_lru_maxpages": "0",  # and so does writing a dirty page
    "checkpoint_timeout": "1h",
    "fsync": "off",  # the operating system survives, and so does all that was written
    "max_connections": "60",
    "max_wal_size": "4GB",
    "shared_buffers": "64MB",
    "unix_socket_directories": "",
    "wal_buffers": "64MB",
    "wal_keep_size": "1GB",
    "wal_receiver_timeout": "0",  # a stopped walsender must not time out
    "wal_sender_timeout": "0",
    "wal_writer_flush_after": "1GB",
}
_HELD: Mapping[Mode, str] = {"asynchronous": "walsender", "synchronous": "walsender", "crash": "walwriter"}
_CLEAN_UP = 'read -r _; for data in "$@"; do "$0" -D "$data" -m immediate -w stop; done'


def binaries(folder: Path) -> Path:
    """The newest PostgreSQL of Debian's packages; if there is none, that of our own wheel.

    `folder` is where the wheel's programs are copied to if the user that runs the servers cannot read them.
    """
    found = [path for path in _DEBIAN.glob("*/bin") if path.parent.name.isdecimal() and (path / "initdb").exists()]
    newest = max(found, key=lambda path: int(path.parent.name), default=None)
    if newest is not None and int(newest.parent.name) >= _MAJOR_MIN:
        return newest
    return EmbeddedPostgres(folder).bin_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One PostgreSQL: its programs, its data folder, its address and the user that it runs as."""

    programs: Path
    data: Path
    port: int
    owner: Owner | None
    address: str = LOOPBACK

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{self.address}:{self.port}/{DATABASE}"

    def create(self) -> None:
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-instructions", "--no-sync"]
        self._run("initdb", *options, f"--username={USER}", "-D", str(self.data))
        if self.address != LOOPBACK:
            with (self.data / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {self.address}/24 trust\n")

    def copy_from(self, other: Server) -> None:
        """Become a standby of the other server, which is running."""
        source = f"host={other.address} port={other.port} user={USER} application_name=standby"
        options = ["--checkpoint=fast", "--no-sync", "--wal-method=stream", "--write-recovery-conf"]
        self._run("pg_basebackup", *options, "-d", source, "-D", str(self.data))

    def start(self, **settings: str) -> None:
        chosen = {**_SETTINGS, "listen_addresses": self.address, "port": str(self.port), **settings}
        options = " ".join(f"-c {name}='{value}'" for name, value in chosen.items())
        self.pg_ctl("-l", f"{self.data}.log", "-o", options, "start")

    def pg_ctl(self, *arguments: str) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-w", "-t", f"{_SECONDS_MAX:g}", *arguments)

    def kill(self) -> None:
        """Kill all of its processes. They are stopped first, so that none of them sees another one die."""
        pid = int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
        postmaster = psutil.Process(pid)
        postmaster.suspend()
        processes = [postmaster, *postmaster.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        _await(lambda: all(map(_is_dead, processes)), "the processes of a PostgreSQL ended")
        (self.data / "postmaster.pid").unlink()

    def value(self, sql: str, *, dbname: str = DATABASE) -> object:
        """The first value of the first row, None if there is no row."""
        with psycopg.connect(self.url, autocommit=True, dbname=dbname, connect_timeout=5) as connection:
            row = connection.execute(sql).fetchone()
        return None if row is None else row[0]

    def execute(self, *statements: str, dbname: str = DATABASE) -> None:
        with psycopg.connect(self.url, autocommit=True, dbname=dbname, connect_timeout=5) as connection:
            for statement in statements:
                connection.execute(statement)

    def _run(self, program: str, *arguments: str) -> None:
        run([self.programs / program, *arguments], self.owner, seconds=2 * _SECONDS_MAX)


@contextlib.contextmanager
def temporary_folder(*, keep: bool = False) -> Iterator[Path]:
    """A folder in memory if there is room, which the user that runs the servers can enter."""
    folder = Path(tempfile.mkdtemp(prefix="batchwright-failover-", dir=roomy_folder()))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """The database of a round; its address stays the same through a failover. Every call blocks."""

    def __init__(self, folder: Path, mode: Mode, address: str = LOOPBACK) -> None:
        self.mode: Mode = mode
        owner = system_user() if os.geteuid() == 0 else None
        give(folder, owner)
        programs = binaries(folder)
        names = ["primary"] if mode == "crash" else ["primary", "standby"]
        self.servers = [
            Server(programs=programs, data=folder / name, port=free_port(), owner=owner, address=address)
            for name in names
        ]
        self.primary = self.servers[0]
        """The server that takes writes; after a failover it is another one."""
        self._cleaner: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL as users write it: it names all servers, and the driver chooses the one that accepts writes."""
        hosts = ",".join(f"{server.address}:{server.port}" for server in self.servers)
        return f"postgresql://{USER}@{hosts}/{DATABASE}?target_session_attrs=read-write"

    @property
    def version(self) -> str:
        return str(self.primary.value("SHOW server_version")).split(" ")[0]

    def __enter__(self) -> Self:
        self._cleaner = self._start_cleaner()
        try:
            self._set_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _set_up(self) -> None:
        self.primary.create()
        self.primary.start(synchronous_commit="off" if self.mode == "crash" else "on")
        self.primary.execute(f"CREATE DATABASE {DATABASE}", dbname="postgres")
        for standby in self.servers[1:]:
            standby.copy_from(self.primary)
            standby.start()
            self._await("SELECT state = 'streaming' FROM pg_stat_replication")
        if self.mode == "synchronous":
            self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
            self._await("SELECT sync_state = 'sync' FROM pg_stat_replication")

    def __exit__(self, *_: object) -> None:
        if self._cleaner is not None:
            assert self._cleaner.stdin is not None
            self._cleaner.stdin.close()
            self._cleaner.wait(_SECONDS_MAX)

    def catch_up(self) -> None:
        """Wait until everything committed so far is safe: at the standby, or on disk."""
        lsn = self.primary.value("SELECT pg_current_wal_insert_lsn()")
        if self.mode == "crash":
            # A commit that waits for the disk writes all earlier ones too.
            self.primary.execute("SET synchronous_commit = on", "SELECT pg_logical_emit_message(true, 'chaos', '')")
        else:
            self._await(f"SELECT replay_lsn >= '{lsn}'::pg_lsn FROM pg_stat_replication")

    def hold(self) -> None:
        """From now on no commit is safe; in synchronous mode none is confirmed either."""
        backend = _HELD[self.mode]
        pid = self.primary.value(f"SELECT pid FROM pg_stat_activity WHERE backend_type = '{backend}'")
        psutil.Process(int(str(pid))).suspend()

    def fail_over(self, pause_seconds: float = 0.0) -> float:
        """Kill the server; returns the seconds until the next one, or the same one again, accepts writes.

        The pause simulates the time in which a failover is noticed and decided.
        """
        began = time.monotonic()
        self.primary.kill()
        time.sleep(pause_seconds)
        if self.mode == "crash":
            self.primary.start(synchronous_commit="off")
        else:
            self.primary = self.servers[1]
            self.primary.pg_ctl("promote")
        self._await("SELECT NOT pg_is_in_recovery()")
        return time.monotonic() - began

    def _await(self, sql: str) -> None:
        """Wait until this query returns true on the primary."""
        _await(lambda: self.primary.value(sql), sql)

    def _start_cleaner(self) -> subprocess.Popen[bytes]:
        """A process that stops the servers when we close its standard input, or die."""
        uid, gid = self.primary.owner or (None, None)
        folders = [str(server.data) for server in self.servers]
        return subprocess.Popen(
            ["/bin/sh", "-c", _CLEAN_UP, str(self.primary.programs / "pg_ctl"), *folders],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            user=uid,
            group=gid,
        )


def _is_dead(process: psutil.Process) -> bool:
    """A zombie process counts as gone: it keeps neither its port nor its memory."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _await(is_true: Callable[[], object], what: str) -> None:
    until = time.monotonic() + _SECONDS_MAX
    while time.monotonic() < until:
        with contextlib.suppress(psycopg.OperationalError):
            if is_true():
                return
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"this did not come true within {_SECONDS_MAX:g} s: {what}")
