"""Jobs that are enqueued in the caller's own transaction: accepted connections, and when the doorbell rings."""

from __future__ import annotations

from contextlib import contextmanager

import django
import django.db
import psycopg
import pytest
import sqlalchemy
from django.conf import settings as django_settings
from django.db import transaction
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.string import TextLoader
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from batchwright import AsyncBatchwright, Batchwright, NewJob, NotFound
from batchwright.db.doorbell import CHANNEL, Ring
from batchwright.errors import ConfigurationError, Conflict
from batchwright.settings import load_settings
from tests.db.pgbouncer import IGNORING, pgbouncer
from tests.support import noop, working


@pytest.fixture
def plain(database_url):
    with Batchwright(database_url=database_url, operations=[noop]) as client:
        yield client


@pytest.fixture
def stranger(database_url):
    """A client without operations, like a web application that enqueues jobs by name."""
    with Batchwright(database_url=database_url) as client:
        yield client


@pytest.fixture
def alchemy_url(database_url):
    parts = conninfo_to_dict(database_url)
    return sqlalchemy.URL.create(
        "postgresql+psycopg",
        username=parts.get("user"),
        password=parts.get("password"),
        database=parts["dbname"],
        query={name: str(parts[name]) for name in ("host", "port") if name in parts},
    )


@pytest.fixture
def django_connection(database_url):
    """`django.db.connection`, on the database of this test."""
    set_up_django()
    django.db.connections.settings["default"].update(django_database(database_url))
    yield django.db.connection
    django.db.connections.close_all()
    del django.db.connections["default"]


def set_up_django() -> None:
    if not django_settings.configured:
        databases = {"default": {"ENGINE": "django.db.backends.postgresql"}}
        django_settings.configure(DATABASES=databases, LOGGING_CONFIG=None, USE_TZ=True)
        django.setup()


def django_database(url: str) -> dict[str, str]:
    parts = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    return {name: parts.get(key, "") for name, key in (("NAME", "dbname"), ("USER", "user"), ("PASSWORD", "password"),
                                                       ("HOST", "host"), ("PORT", "port"))}  # fmt: skip


@contextmanager
def hearing(url: str):
    """A function that returns the rings of the doorbell since its last call."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")

        def heard() -> list[str]:
            # Notifications of earlier commits have arrived once a later statement of this session has been answered.
            connection.execute("SELECT 1")
            return [Ring.read(ring.payload).queue for ring in connection.notifies(timeout=0)]

        yield heard


def is_there(client: Batchwright, id: object) -> bool:
    try:
        return client.get(id) is not None
    except NotFound:
        return False


# Connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["the proxy", "the wrapper", "the driver's"])
def test_djangos_connection_takes_jobs_by_name(plain, stranger, django_connection, given):
    """Django reads jsonb as text on its connections; the operations of workers once came as strings."""
    plain.call(published(plain.client))
    with transaction.atomic():
        django_connection.ensure_connection()
        connection = {
            "the proxy": django_connection,
            "the wrapper": django.db.connections["default"],
            "the driver's": django_connection.connection,
        }[given]
        kept = stranger.enqueue("noop", {"n": 1}, connection=connection)
        assert not is_there(plain, kept), "the job exists before the commit"
    assert plain.get(kept).payload == {"n": 1, "note": None}


async def published(client: AsyncBatchwright) -> None:
    worker = client.worker()
    await worker.register()
    await worker.close()


def test_what_django_rolls_back_was_never_enqueued(plain, django_connection):
    with transaction.atomic():
        kept = plain.enqueue(noop, {"n": 1}, connection=django_connection)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            dropped = plain.enqueue(noop, {"n": 2}, connection=django_connection)
            _ = 1 / 0
    assert is_there(plain, kept)
    assert not is_there(plain, dropped)


def test_outside_of_atomic_a_list_of_jobs_is_enqueued_whole_or_not_at_all(plain, django_connection):
    jobs = [NewJob(noop, {"n": 1}), NewJob(noop, exclusive_key="k", on_held="reject")]
    first = plain.enqueue(noop, connection=django_connection, exclusive_key="k")
    with pytest.raises(Conflict, match="is held by job"):
        plain.enqueue(jobs, connection=django_connection)
    assert is_there(plain, first)
    assert not is_there(plain, jobs[0].id)
    assert django_connection.get_autocommit(), "the connection's autocommit is unchanged"


def test_in_a_broken_transaction_djangos_own_error_is_raised(plain, django_connection):
    with pytest.raises(transaction.TransactionManagementError), transaction.atomic():
        transaction.set_rollback(True)
        plain.enqueue(noop, connection=django_connection)


def test_djangos_other_databases_are_refused_by_name(plain):
    from django.db.backends.sqlite3.base import DatabaseWrapper

    set_up_django()
    options = {"NAME": ":memory:", "OPTIONS": {}, "AUTOCOMMIT": True, "CONN_HEALTH_CHECKS": False, "CONN_MAX_AGE": 0,
               "TIME_ZONE": None, "ATOMIC_REQUESTS": False}  # fmt: skip
    wrapper = DatabaseWrapper(options)
    try:
        with pytest.raises(ConfigurationError, match=r"psycopg://…\), not sqlite3\.Connection"):
            plain.enqueue(noop, connection=wrapper)
    finally:
        wrapper.close()


def test_loaders_that_the_caller_registered_do_not_affect_us(plain, stranger, database_url):
    plain.call(published(plain.client))
    with psycopg.connect(database_url) as connection:
        for kind in ("jsonb", "uuid", "text", "bool"):
            connection.adapters.register_loader(kind, TextLoader)
        first = stranger.enqueue("noop", {"n": 1}, connection=connection, idempotency_key="a")
        assert stranger.enqueue("noop", {"n": 1}, connection=connection, idempotency_key="a") == first
        assert connection.execute("SELECT '{}'::jsonb").fetchone() == ("{}",), "the caller's loaders stay registered"


def test_a_scoped_session_as_in_flask_is_accepted(plain, alchemy_url):
    engine = sqlalchemy.create_engine(alchemy_url)
    session = scoped_session(sessionmaker(engine))
    kept = plain.enqueue(noop, connection=session)
    session.commit()
    dropped = plain.enqueue(noop, connection=session)
    session.rollback()
    session.remove()
    engine.dispose()
    assert (is_there(plain, kept), is_there(plain, dropped)) == (True, False)


# The doorbell -----------------------------------------------------------------------------------------------------


@pytest.mark.direct("listens")
def test_the_doorbell_rings_at_commit_once_for_each_queue(plain, database_url):
    with hearing(database_url) as heard, psycopg.connect(database_url) as connection:
        for n in range(5):
            plain.enqueue(noop, {"n": n}, connection=connection)
        plain.enqueue(noop, queue="slow", connection=connection)
        plain.enqueue(noop, queue="tomorrow", delay_seconds=86_400, connection=connection)
        assert heard() == []
        connection.commit()
        assert sorted(heard()) == ["default", "slow"]


@pytest.mark.direct("listens")
def test_nothing_rings_for_what_is_rolled_back(plain, database_url):
    with hearing(database_url) as heard, psycopg.connect(database_url) as connection:
        plain.enqueue(noop, connection=connection)
        connection.rollback()
        with connection.transaction(), connection.transaction(force_rollback=True):
            plain.enqueue(noop, connection=connection)
        assert heard() == []


@pytest.mark.direct("listens")
def test_the_doorbell_rings_for_django_and_for_sqlalchemy_sessions_too(
    plain, database_url, django_connection, alchemy_url
):
    engine = sqlalchemy.create_engine(alchemy_url)
    with hearing(database_url) as heard:
        plain.enqueue(noop, connection=django_connection)
        assert heard() == ["default"]
        with Session(engine) as session:
            plain.enqueue(noop, connection=session)
            assert heard() == []
            session.commit()
        assert heard() == ["default"]
    engine.dispose()


@pytest.mark.direct("listens")
def test_the_ring_at_commit_can_be_turned_off(database_url):
    tables = {"database": {"url": database_url}, "engine": {"ring_at_commit": False}}
    settings = load_settings(tables, environment={})
    with (
        Batchwright(settings=settings, operations=[noop]) as plain,
        hearing(database_url) as heard,
        psycopg.connect(database_url) as connection,
    ):
        plain.enqueue(noop, connection=connection)
        connection.commit()
        assert heard() == []


@pytest.mark.direct("the doorbell of its worker needs a session")
@pytest.mark.timed("waits less than a poll takes")
async def test_an_idle_worker_starts_at_once_what_an_async_session_commits(database_url, alchemy_url):
    """Without the doorbell, the job would wait for the next poll, here ten seconds."""
    engine = create_async_engine(alchemy_url)
    async with (
        AsyncBatchwright(database_url=database_url, operations=[noop]) as client,
        working(client.pool, noop, poll_seconds_min=10.0, poll_seconds_max=10.0),
    ):
        async with AsyncSession(engine) as session:
            id = await client.enqueue(noop, {"n": 7}, connection=session)
            await session.commit()
        assert await client.wait(id, timeout=8) == 7
    await engine.dispose()


@pytest.mark.direct("brings a pooler of its own")
def test_the_ring_gets_through_a_pooler_in_transaction_mode(plain, database_url, tmp_path):
    tmp_path.chmod(0o755)
    with pgbouncer(tmp_path, database_url, "transaction", IGNORING) as pooled, hearing(database_url) as heard:
        with psycopg.connect(pooled, prepare_threshold=None) as connection:
            kept = plain.enqueue(noop, connection=connection)
            assert heard() == []
        assert heard() == ["default"]
    assert is_there(plain, kept)
