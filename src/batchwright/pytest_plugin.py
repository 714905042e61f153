"""Fixtures for pytest, which finds this module by its entry point. `batchwright.testing` lists them.

pytest loads this in every environment that has Batchwright, so a fixture imports its modules only when it is used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from batchwright.app import AsyncBatchwright
    from batchwright.blocking import Batchwright
    from batchwright.settings import Settings

_FOLDER = "BATCHWRIGHT_TEST_SERVER_FOLDER"
_URL = "BATCHWRIGHT_TEST_DATABASE_URL"
_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder inside is private
_MEMORY_BYTES_MIN = 2 * 1024**3
_is_ours = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the server's folder. The processes of pytest-xdist inherit the choice, and so share one server."""
    config.stash[_is_ours] = _FOLDER not in os.environ
    os.environ.setdefault(_FOLDER, str(_roomy_folder() / f"batchwright-pytest-{uuid.uuid4().hex[:12]}"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """The process that chose the folder ends last. It removes the server, if there was one."""
    if config.stash.get(_is_ours, False) and (folder := Path(os.environ.pop(_FOLDER))).exists():
        from batchwright.db.throwaway import remove_server

        remove_server(folder)


def _roomy_folder() -> Path:
    """A folder in memory if there is space: a database has 300 files, and each test copies them."""
    is_roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES_MIN
    return _MEMORY if is_roomy else Path(tempfile.gettempdir())


@pytest.fixture(scope="session")
def batchwright_server() -> Iterator[str]:
    """The URL of the PostgreSQL server for this test run: embedded, or BATCHWRIGHT_TEST_DATABASE_URL."""
    if url := os.environ.get(_URL):
        yield url
        return
    from batchwright.db.throwaway import throwaway_server

    with throwaway_server(Path(os.environ[_FOLDER])) as url:
        yield url


@pytest.fixture(scope="session")
def _batchwright_template(batchwright_server: str) -> Iterator[str]:
    """The name of a database with Batchwright's schema, which each test copies."""
    from batchwright.app import VERSION
    from batchwright.db.database import Blocking, DatabaseSettings, complete
    from batchwright.db.migrate import migrate
    from batchwright.db.throwaway import throwaway_database

    with throwaway_database(batchwright_server) as url:
        blocking = Blocking(DatabaseSettings(), url)
        try:
            complete(migrate(blocking, VERSION))
            ((name,),) = complete(blocking.rows("SELECT current_database()"))
        finally:
            blocking.close()
        yield name


@pytest.fixture
def batchwright_database(batchwright_server: str, _batchwright_template: str) -> Iterator[str]:
    """The URL of this test's own new database, with Batchwright's schema; dropped after the test."""
    from batchwright.db.throwaway import throwaway_database

    with throwaway_database(batchwright_server, _batchwright_template) as url:
        yield url


@pytest.fixture
def batchwright_operations() -> Sequence[Any]:
    """The operations that `batchwright_client` knows: override this fixture in your `conftest.py`."""
    return ()


@pytest.fixture
def batchwright_settings() -> Mapping[str, Any]:
    """Tables of the configuration for the clients, nested as in `batchwright.toml`: override this fixture."""
    return {}


@pytest.fixture
def _batchwright_all_settings(
    batchwright_database: str, batchwright_settings: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Settings:
    """Settings without the user's own configuration: an empty file replaces the one in the current folder."""
    from batchwright.settings import load_settings

    folder = tmp_path_factory.mktemp("batchwright")
    (file := folder / "batchwright.toml").touch()
    database = {"folder": str(folder), **batchwright_settings.get("database", {}), "url": batchwright_database}
    return load_settings({**batchwright_settings, "database": database}, environment={}, file=file)


@pytest.fixture
def batchwright_async_client(
    batchwright_operations: Sequence[Any], _batchwright_all_settings: Settings
) -> AsyncBatchwright:
    """An `AsyncBatchwright` on this test's own database. Open it in the test: `async with … as batchwright:`."""
    from batchwright.app import AsyncBatchwright

    return AsyncBatchwright(operations=batchwright_operations, settings=_batchwright_all_settings)


@pytest.fixture
def batchwright_client(
    batchwright_operations: Sequence[Any], _batchwright_all_settings: Settings
) -> Iterator[Batchwright]:
    """An open `Batchwright` on this test's own database."""
    from batchwright.blocking import Batchwright

    with Batchwright(operations=batchwright_operations, settings=_batchwright_all_settings) as client:
        yield client
