"""Fixtures: a database with many jobs, for tests of query plans."""

import psycopg
import pytest

from batchwright.db.database import connect_arguments
from tests.conftest import database
from tests.engine.planning import CROWD
from tests.support import DATABASE


@pytest.fixture(scope="module")
def crowded_url(server, template):
    with database(server, "batchwright_test_crowd_" + template[-8:], template) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(CROWD)
            connection.execute("VACUUM ANALYZE batchwright.job")
        yield url


@pytest.fixture
def crowd(crowded_url):
    """A connection as the engine makes them; all changes of the test are rolled back."""
    with psycopg.connect(crowded_url, **connect_arguments(DATABASE)) as connection:
        yield connection
        connection.rollback()
