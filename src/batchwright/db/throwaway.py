"""Databases for tests: a separate server in a temporary folder, and a database that is dropped after its test.

    server     BATCHWRIGHT_TEST_DATABASE_URL, or an embedded one in a folder that is named after the test run
    database   CREATE DATABASE … TEMPLATE, and DROP DATABASE at the end

A killed test run leaves its folder and its server behind. The next run stops and removes both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier

from batchwright.db.database import translate_errors
from batchwright.db.embedded import EmbeddedPostgres
from batchwright.errors import BatchwrightError, ConfigurationError

_FOLDERS = "batchwright-pytest-*"
"""Pattern of the folders that the fixtures create."""
_YOUNG_SECONDS = 300.0
"""A newer folder may belong to a run that is about to take its lock."""
_WITHOUT_DURABILITY = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


@contextlib.contextmanager
def throwaway_server(folder: Path) -> Iterator[str]:
    """The URL of a server in this folder, which all processes of a test run share."""
    _remove_abandoned(folder.parent)
    with EmbeddedPostgres(folder, settings=_WITHOUT_DURABILITY) as embedded:
        yield embedded.url


def remove_server(folder: Path) -> None:
    """Stop a server that is no longer used, and remove its folder."""
    if (folder / "data" / "postmaster.pid").exists():
        with contextlib.suppress(BatchwrightError), EmbeddedPostgres(folder):
            pass  # the last user stops it
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def throwaway_database(server: str, template: str = "template1") -> Iterator[str]:
    """The URL of a new database on this server, a copy of the template; it is dropped afterwards."""
    name = f"batchwright_test_{uuid.uuid4().hex[:12]}"
    with translate_errors(), psycopg.connect(server, autocommit=True) as admin:
        try:
            admin.execute(SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(template)))
        except pg.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"the tests need a database of their own, and the user {admin.info.user} may not create one ({error}): "
                f"ALTER ROLE {admin.info.user} CREATEDB"
            ) from error
        try:
            yield make_conninfo(server, dbname=name)
        finally:
            admin.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed runs left. If no process holds the lock, no process uses the server."""
    for folder in parent.glob(_FOLDERS):
        with contextlib.suppress(OSError):
            lock = folder / "users.lock"
            if time.time() - folder.stat().st_mtime > _YOUNG_SECONDS and _is_free(lock):
                remove_server(folder)


def _is_free(lock: Path) -> bool:
    import fcntl  # imported here: a server given by URL does not need it

    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
