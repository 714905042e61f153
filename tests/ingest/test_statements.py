"""Every statement of documents can be prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from batchwright.db.database import DatabaseSettings, connect_arguments
from batchwright.ingest import (
    collections,
    exact,
    export,
    items,
    ledger,
    library,
    machine,
    pending,
    runs,
    search,
    spaces,
)
from batchwright.ingest.embeddings import ledger as embedding_ledger
from tests.engine.planning import numbered

SOURCES = (runs, items, machine, pending, ledger, library, spaces, exact, search, collections, export, embedding_ledger)


@pytest.fixture(scope="module")
def connection(server: str, template: str) -> Iterator[psycopg.Connection[Any]]:
    from tests.conftest import database

    with (
        database(server, f"batchwright_documents_{template[-12:]}", template) as url,
        psycopg.connect(url, autocommit=True, **connect_arguments(DatabaseSettings())) as connection,
    ):
        yield connection


@pytest.mark.parametrize(("source", "name"), [(one, name) for one in SOURCES for name in one.SQL])
def test_every_statement_can_be_prepared(connection: psycopg.Connection[Any], source: Any, name: str) -> None:
    text, _ = numbered(name, source.SQL)
    connection.execute(f"PREPARE probe AS {text}".encode())
    connection.execute("DEALLOCATE probe")
