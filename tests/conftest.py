"""Fixtures: one server per run (embedded, and BATCHWRIGHT_TEST_DATABASE_URL when set), one database per test."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from batchwright.app import VERSION
from batchwright.db.database import Blocking, Database, Pool, complete
from batchwright.db.embedded import EmbeddedPostgres
from batchwright.db.migrate import migrate
from batchwright.engine.queue import EngineSettings, Queue
from tests.support import DATABASE, Clock, let_children_hear_signals

pytest_plugins = ("tests.perturb",)
EXTERNAL = os.environ.get("BATCHWRIGHT_TEST_DATABASE_URL")
MEMORY_BYTES_MIN = 4 * 1024**3
POOL_MODE = os.environ.get("BATCHWRIGHT_TEST_POOL_MODE")
MAJOR = int(os.environ.get("BATCHWRIGHT_TEST_POSTGRES_MAJOR", "18"))

hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    """Name the run in the environment: xdist's workers inherit the name, and so share one server."""
    let_children_hear_signals()
    os.environ.setdefault("BATCHWRIGHT_TEST_RUN", uuid.uuid4().hex[:12])
    global SERVER_ROOT
    SERVER_ROOT = roomy_folder() / f"batchwright-tests-{os.environ['BATCHWRIGHT_TEST_RUN']}"
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(roomy_folder()))  # where `tmp_path` is


def roomy_folder() -> Path:
    """A folder in memory if there is room: each test copies a database of 300 files, ten times as slow on disk."""
    memory = Path("/dev/shm")
    is_roomy = memory.is_dir() and shutil.disk_usage(memory).free >= MEMORY_BYTES_MIN
    return memory if is_roomy else Path(tempfile.gettempdir())


def skip(reason: str, *, allow_module_level: bool = False) -> None:
    """Skip because something is missing; with BATCHWRIGHT_REQUIRE_ALL=1 that is a failure."""
    if os.environ.get("BATCHWRIGHT_REQUIRE_ALL") == "1":
        pytest.fail(f"BATCHWRIGHT_REQUIRE_ALL=1, but {reason}")
    pytest.skip(reason, allow_module_level=allow_module_level)


SERVERS = ["embedded", *(["external"] if EXTERNAL else [])]
if only := os.environ.get("BATCHWRIGHT_TEST_SERVERS"):
    SERVERS = [name for name in SERVERS if name == only]


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server. xdist's processes share one embedded server, and the last one to end stops it."""
    if request.param == "external":
        assert EXTERNAL is not None
        yield EXTERNAL
        return
    fast = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    with EmbeddedPostgres(SERVER_ROOT, major=MAJOR, settings=fast) as embedded:
        yield embedded.url


@pytest.fixture(scope="session")
def batchwright_server(server: str) -> str:
    """Let the fixtures of the test kit use this run's server."""
    return server


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `thorough` tests unless they are asked for, and, on another server, tests that do not use a server."""
    # Chaos tests must run one at a time: each starts workers and checks how long they take. This group has no effect
    # with xdist 3.8, which writes it to `_nodeid`, and pytest 9.2, which does not read that; so `make test-thorough`
    # runs chaos separately.
    for item in items:
        if item.get_closest_marker("chaos"):
            item.add_marker(pytest.mark.xdist_group("chaos"))
    if os.environ.get("BATCHWRIGHT_TEST_THOROUGH") != "1":
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    if POOL_MODE is not None:
        direct = [item for item in items if item.get_closest_marker("direct")]
        config.hook.pytest_deselected(items=direct)
        items[:] = [item for item in items if not item.get_closest_marker("direct")]
    if os.environ.get("BATCHWRIGHT_TEST_SERVERS") or MAJOR != 18:
        by_use: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            by_use["server" in getattr(item, "fixturenames", ())].append(item)
        config.hook.pytest_deselected(items=by_use[False])
        items[:] = by_use[True]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the server's folder, in xdist's controller, which ends last."""
    if not hasattr(session.config, "workerinput"):
        shutil.rmtree(SERVER_ROOT, ignore_errors=True)


@pytest.fixture(scope="session")
def template(server: str) -> Iterator[str]:
    """A migrated database that every test copies."""
    name = f"batchwright_template_{uuid.uuid4().hex[:12]}"
    with database(server, name) as url:
        blocking = Blocking(DATABASE, url)
        complete(migrate(blocking, VERSION))
        blocking.close()
        yield name


@pytest.fixture(scope="session")
def way(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """How tests reach the server: directly, or through a PgBouncer in the mode BATCHWRIGHT_TEST_POOL_MODE."""
    if POOL_MODE is None:
        yield {}
        return
    from tests.db.pgbouncer import IGNORING, pgbouncer

    folder = tmp_path_factory.mktemp("pgbouncer")
    folder.chmod(0o755)
    with pgbouncer(folder, server, POOL_MODE, IGNORING, "max_client_conn = 1000") as url:
        parts = conninfo_to_dict(url)
        yield {name: parts[name] for name in ("host", "port", "user")}


@pytest.fixture
def database_url(server: str, way: dict[str, object], template: str) -> Iterator[str]:
    """A fresh, migrated database of this test's own."""
    with database(server, f"batchwright_test_{uuid.uuid4().hex[:12]}", template) as url:
        yield make_conninfo(url, **way)


@pytest.fixture
def empty_database_url(server: str, way: dict[str, object]) -> Iterator[str]:
    """A fresh database without a schema."""
    with database(server, f"batchwright_test_{uuid.uuid4().hex[:12]}") as url:
        yield make_conninfo(url, **way)


@contextlib.contextmanager
def database(server: str, name: str, template: str = "template1") -> Iterator[str]:
    with psycopg.connect(make_conninfo(server, dbname="postgres"), autocommit=True) as admin:
        # Copying files is fast on the embedded server, which syncs nothing to disk; elsewhere it costs two checkpoints.
        strategy = "wal_log" if server == EXTERNAL else "file_copy"
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY {strategy}")
        try:
            yield make_conninfo(server, dbname=name)
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(autouse=True)
def log_level_as_it_was() -> Iterator[None]:
    """Restore the log level: commands that a test runs set it, and the next test may expect a warning."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool(DATABASE, database_url) as pool:
        yield pool


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(pool: Pool, clock: Clock) -> Queue:
    return Queue(Database(pool, clock=clock), EngineSettings())
