"""The clients: enqueue, wait, cancel, and enqueue inside the caller's own transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import uuid

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from batchwright import AsyncBatchwright, Batchwright, JobCancelled, JobFailed, NewJob, NotFound, WaitTimeout, operation
from batchwright.db.database import Database
from batchwright.engine.catalog import Catalog
from batchwright.engine.queue import Queue
from batchwright.errors import (
    ConfigurationError,
    Conflict,
    DatabaseUnavailable,
    Fatal,
    InvalidInput,
    PayloadInvalid,
    TooLarge,
    UnknownOperation,
)
from batchwright.states import JobStatus
from batchwright.testing import drain
from tests.engine.faulty import Fault, Faulty
from tests.support import finished, listed, noop, working


@operation("break")
async def broken() -> None:
    raise Fatal("it broke", code="broken")


OPERATIONS = [noop, broken]


@pytest.fixture
async def batchwright(database_url):
    async with AsyncBatchwright(database_url=database_url, operations=OPERATIONS) as client:
        yield client


@pytest.fixture
def plain(database_url):
    with Batchwright(database_url=database_url, operations=OPERATIONS) as client:
        yield client


@pytest.fixture
def alchemy_url(database_url):
    parts = psycopg.conninfo.conninfo_to_dict(database_url)
    return sqlalchemy.URL.create(
        "postgresql+psycopg",
        username=parts.get("user"),
        password=parts.get("password"),
        database=parts["dbname"],
        query={name: str(parts[name]) for name in ("host", "port") if name in parts},
    )


def faulty(batchwright: AsyncBatchwright, *faults: Fault) -> Faulty:
    """The database of this client, which can lose answers."""
    database = Faulty(batchwright.pool, list(faults))
    batchwright.queue = Queue(Database(database), batchwright.settings.engine)
    batchwright.catalog = Catalog(batchwright.queue.database, batchwright.operations)
    return database


# Waiting ----------------------------------------------------------------------------------------------------------


async def test_wait_returns_the_result(batchwright):
    id = await batchwright.enqueue(noop, {"n": 5})
    await drain(batchwright)
    assert await batchwright.wait(id) == 5
    assert await batchwright.wait(str(id)) == 5


async def test_wait_sees_a_job_end_while_it_waits(batchwright):
    id = await batchwright.enqueue(noop, {"n": 6})
    waiting = asyncio.create_task(batchwright.wait(id, timeout=30))
    async with working(batchwright.pool, noop):
        assert await waiting == 6


async def test_wait_raises_if_the_job_failed(batchwright):
    id = await batchwright.enqueue(broken)
    await drain(batchwright)
    with pytest.raises(JobFailed, match=f"job {id} failed: broken: it broke") as caught:
        await batchwright.wait(id)
    assert caught.value.job_id == str(id)
    assert caught.value.error["kind"] == "fatal"


async def test_wait_raises_when_the_job_was_cancelled(batchwright):
    id = await batchwright.enqueue(noop)
    assert await batchwright.cancel(id) == 1
    assert await batchwright.cancel(id) == 0
    with pytest.raises(JobCancelled, match=str(id)):
        await batchwright.wait(id)


async def test_wait_times_out_and_the_job_continues(batchwright):
    id = await batchwright.enqueue(noop)
    for timeout in (0, 0.02):
        why = "no live worker knows the operation 'noop' and serves the queue 'default'"
        with pytest.raises(WaitTimeout, match=f"still QUEUED after {timeout:g} seconds: {why}"):
            await batchwright.wait(id, timeout=timeout)
    assert (await batchwright.get(id)).status is JobStatus.QUEUED


async def test_wait_for_an_unknown_job_is_not_found(batchwright):
    with pytest.raises(NotFound, match="there is no job"):
        await batchwright.wait(uuid.uuid4())


async def test_a_bad_id_is_named(batchwright):
    for verb in ("wait", "get", "events", "cancel", "recover", "rerun"):
        for id in ("nonsense", "", 17, None):
            with pytest.raises(InvalidInput, match="is not a job id"):
                await getattr(batchwright, verb)(id)


async def test_an_unknown_id_is_not_found(batchwright):
    for verb in ("wait", "get", "cancel", "recover", "rerun"):
        with pytest.raises(NotFound):
            await getattr(batchwright, verb)(uuid.uuid4())


async def test_rerun_and_recover_refuse_a_job_in_another_state(batchwright):
    id = await batchwright.enqueue(noop)
    with pytest.raises(Conflict, match="only a FAILED or CANCELLED job can be rerun"):
        await batchwright.rerun(id)
    with pytest.raises(Conflict, match="QUEUED, not RUNNING"):
        await batchwright.recover(id)


# Enqueue ----------------------------------------------------------------------------------------------------------


async def test_a_list_is_enqueued_together_and_in_order(batchwright):
    ids = await batchwright.enqueue([NewJob(noop, {"n": n}) for n in range(3)])
    assert ids == sorted(ids)
    assert [(await batchwright.get(id)).payload["n"] for id in ids] == [0, 1, 2]


async def test_an_empty_list_enqueues_nothing(batchwright):
    assert await batchwright.enqueue([]) == []


BAD_INPUT = [
    (("nope",), {}, UnknownOperation, "no worker knows the operation 'nope'"),
    (("nooop",), {}, UnknownOperation, "did you mean 'noop'"),
    ((noop, {"n": "x"}), {}, PayloadInvalid, "noop: n:"),
    ((noop, {"m": 1}), {}, PayloadInvalid, "noop: m:"),
    ((noop, {"note": "x" * 1_100_000}), {}, TooLarge, "the limit is 1048576"),
    ((noop, {"note": "a\x00b"}), {}, PayloadInvalid, "NUL"),
    ((print,), {}, InvalidInput, "decorate it with @operation"),
    (
        (noop,),
        {"x": 1},
        InvalidInput,
        "enqueue has no option 'x'; a field of the payload goes into the payload",
    ),
    ((noop,), {"x": 1}, InvalidInput, r"enqueue\(operation, \{'x': \.\.\.\}\); options are "),
    ((noop,), {"delay": 1}, InvalidInput, "did you mean 'delay_seconds'"),
    ((NewJob(noop),), {"colour": "red"}, InvalidInput, "colour"),
    ((NewJob(noop), {"n": 1}), {}, InvalidInput, "has its own payload"),
    (([NewJob(noop)], {"n": 1}), {}, InvalidInput, "in each NewJob"),
    (([NewJob(noop), "noop"],), {}, InvalidInput, "expected a NewJob, found str"),
    ((noop,), {"priority": 10}, InvalidInput, "priority is 10"),
    ((noop,), {"max_attempts": -1}, InvalidInput, "max_attempts is -1"),
    ((noop,), {"max_attempts": 0}, InvalidInput, "max_attempts is 0; it must be at least 1"),
]


async def test_bad_input_is_refused_and_leaves_nothing(batchwright):
    for arguments, options, error, text in BAD_INPUT:
        with pytest.raises(error, match=text):
            await batchwright.enqueue(*arguments, **options)
    assert await listed(batchwright.queue) == []


async def test_an_enqueue_whose_answer_was_lost_is_repeated_without_doubling(batchwright):
    faulty(batchwright, Fault("enqueue", "after", times=2))
    ids = await batchwright.enqueue([NewJob(noop, {"n": n}) for n in range(3)])
    assert {job.id for job in await listed(batchwright.queue)} == set(ids)
    assert [len(await batchwright.events(id)) for id in ids] == [1, 1, 1]


async def test_an_enqueue_that_never_arrived_is_repeated(batchwright):
    faulty(batchwright, Fault("enqueue", "before", times=2))
    id = await batchwright.enqueue(noop)
    assert [job.id for job in await listed(batchwright.queue)] == [id]


async def test_an_enqueue_by_policy_whose_commit_was_lost_is_repeated_without_doubling(batchwright):
    database = faulty(batchwright)
    for policy in ("reject", "coalesce", "supersede"):
        database.plan(fault := Fault("enqueue", "after"))
        id = await batchwright.enqueue(noop, {"note": policy}, exclusive_key=policy, on_held=policy)
        assert fault.struck == 1
        assert (await batchwright.get(id)).status is JobStatus.QUEUED
    assert len(await listed(batchwright.queue)) == 3


async def test_an_enqueue_fails_when_the_database_stays_unavailable(batchwright):
    faulty(batchwright, Fault("enqueue", "before", times=100))
    with pytest.raises(DatabaseUnavailable):
        await batchwright.enqueue(noop)


async def test_an_enqueue_chosen_as_a_deadlock_victim_is_repeated(batchwright):
    faulty(batchwright, Fault("enqueue", "before", "deadlock", times=3))
    id = await batchwright.enqueue(noop)
    assert [job.id for job in await listed(batchwright.queue)] == [id]


# Life -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["wait", "get", "events", "cancel", "recover", "rerun", "enqueue"])
async def test_a_client_that_is_not_open_says_so(verb):
    argument = noop if verb == "enqueue" else uuid.uuid4()
    with pytest.raises(InvalidInput, match="not open"):
        await getattr(AsyncBatchwright(database_url="postgresql://nowhere", operations=OPERATIONS), verb)(argument)


@pytest.mark.parametrize("verb", ["wait", "get", "events", "cancel", "recover", "rerun", "enqueue"])
def test_a_plain_client_that_is_not_open_says_so(verb):
    argument = noop if verb == "enqueue" else uuid.uuid4()
    with pytest.raises(InvalidInput, match="not open"):
        getattr(Batchwright(database_url="postgresql://nowhere", operations=OPERATIONS), verb)(argument)


def test_a_plain_client_that_is_not_open_refuses_a_connection_too(database_url):
    with psycopg.connect(database_url) as connection, pytest.raises(InvalidInput, match="not open"):
        Batchwright(database_url=database_url, operations=OPERATIONS).enqueue(noop, connection=connection)


async def test_a_closed_client_says_so_at_once(database_url):
    client = AsyncBatchwright(database_url=database_url, operations=OPERATIONS)
    await client.open()
    await client.close()
    await client.close()
    with pytest.raises(InvalidInput, match="not open"):
        await client.enqueue(noop)


async def test_a_wrong_address_is_an_error_at_open():
    client = AsyncBatchwright(database_url="postgresql://nobody@127.0.0.1:1/x", operations=OPERATIONS)
    with pytest.raises(DatabaseUnavailable):
        await client.open()
    with pytest.raises(InvalidInput, match="not open"):
        await client.get(uuid.uuid4())


def test_a_plain_client_with_a_wrong_address_leaves_no_thread_behind():
    with pytest.raises(DatabaseUnavailable):
        Batchwright(database_url="postgresql://nobody@127.0.0.1:1/x").open()
    assert "batchwright-client" not in {thread.name for thread in threading.enumerate()}


def test_the_plain_client_has_every_verb(plain):
    done, failed, cancelled = plain.enqueue([NewJob(noop, {"n": 4}), NewJob(broken), NewJob(noop, delay_seconds=60)])
    assert plain.cancel(cancelled, reason="not needed") == 1
    assert drain(plain) == 2
    assert plain.wait(done, timeout=5) == 4
    with pytest.raises(JobFailed):
        plain.wait(failed)
    with pytest.raises(JobCancelled):
        plain.wait(cancelled)
    assert plain.get(cancelled).error["message"] == "not needed"
    assert [event.event for event in plain.events(done)] == ["job.enqueued", "job.started", "job.succeeded"]
    plain.rerun(failed)
    assert plain.get(failed).status is JobStatus.QUEUED
    with pytest.raises(Conflict):
        plain.recover(failed)
    with pytest.raises(WaitTimeout):
        plain.wait(failed, timeout=0)


def test_the_plain_client_can_be_used_from_many_threads(plain):
    ids = []
    threads = [threading.Thread(target=lambda n=n: ids.append(plain.enqueue(noop, {"n": n}))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({plain.get(id).payload["n"] for id in ids}) == 8


# Inside the caller's own transaction --------------------------------------------------------------------------------


def test_a_psycopg_transaction_decides_whether_the_job_exists(plain, database_url):
    with psycopg.connect(database_url) as connection:
        kept = plain.enqueue(noop, {"n": 1}, connection=connection)
        with pytest.raises(NotFound):
            plain.get(kept)
        connection.commit()
        assert plain.get(kept).status is JobStatus.QUEUED
        dropped = plain.enqueue(noop, {"n": 2}, connection=connection)
        connection.rollback()
        with pytest.raises(NotFound):
            plain.get(dropped)


async def test_an_async_psycopg_transaction_decides_whether_the_job_exists(batchwright, database_url):
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        kept = await batchwright.enqueue(noop, {"n": 1}, connection=connection)
        with pytest.raises(NotFound):
            await batchwright.get(kept)
        await connection.commit()
        assert (await batchwright.get(kept)).status is JobStatus.QUEUED
        dropped = await batchwright.enqueue(noop, {"n": 2}, connection=connection)
        await connection.rollback()
        with pytest.raises(NotFound):
            await batchwright.get(dropped)


@pytest.mark.parametrize("open_transaction", [lambda engine: engine.connect(), Session], ids=["connection", "session"])
def test_a_sqlalchemy_transaction_decides_whether_the_job_exists(plain, alchemy_url, open_transaction):
    engine = sqlalchemy.create_engine(alchemy_url)
    with open_transaction(engine) as transaction:
        kept = plain.enqueue(noop, {"n": 1}, connection=transaction)
        with pytest.raises(NotFound):
            plain.get(kept)
        transaction.commit()
        assert plain.get(kept).payload["n"] == 1
        dropped = plain.enqueue(noop, {"n": 2}, connection=transaction)
        transaction.rollback()
        with pytest.raises(NotFound):
            plain.get(dropped)
    engine.dispose()


@pytest.mark.parametrize(
    "open_transaction", [lambda engine: engine.connect(), AsyncSession], ids=["connection", "session"]
)
async def test_an_async_sqlalchemy_transaction_decides_whether_the_job_exists(
    batchwright, alchemy_url, open_transaction
):
    engine = create_async_engine(alchemy_url)
    async with open_transaction(engine) as transaction:
        kept = await batchwright.enqueue(noop, {"n": 1}, connection=transaction)
        with pytest.raises(NotFound):
            await batchwright.get(kept)
        await transaction.commit()
        assert (await batchwright.get(kept)).payload["n"] == 1
        dropped = await batchwright.enqueue(noop, {"n": 2}, connection=transaction)
        await transaction.rollback()
        with pytest.raises(NotFound):
            await batchwright.get(dropped)
    await engine.dispose()


def test_rows_of_the_caller_and_the_job_are_one_commit(plain, database_url):
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE invoice (id int PRIMARY KEY)")
        connection.commit()
        connection.execute("INSERT INTO invoice VALUES (1)")
        plain.enqueue(noop, connection=connection)
        connection.rollback()
        assert connection.execute("SELECT count(*) FROM invoice").fetchone() == (0,)
    assert plain.call(listed(plain.client.queue)) == []


def test_the_callers_row_factory_and_cursor_class_do_not_matter(plain, database_url):
    with psycopg.connect(database_url, row_factory=dict_row, cursor_factory=psycopg.RawCursor) as connection:
        first = plain.enqueue(noop, {"n": 1}, connection=connection, idempotency_key="a")
        assert plain.enqueue(noop, {"n": 1}, connection=connection, idempotency_key="a") == first
        other = plain.enqueue(noop, {"n": 1}, connection=connection, exclusive_key="k", on_held="coalesce")
    assert plain.get(other).exclusive_key == '["k"]'


async def test_the_callers_row_factory_does_not_matter_in_async_code(batchwright, database_url):
    async with await psycopg.AsyncConnection.connect(database_url, row_factory=dict_row) as connection:
        first = await batchwright.enqueue(noop, {"n": 1}, connection=connection, idempotency_key="a")
        assert await batchwright.enqueue(noop, {"n": 1}, connection=connection, idempotency_key="a") == first
    assert (await batchwright.get(first)).payload["n"] == 1


async def test_an_operation_that_only_a_worker_knows_is_found_on_the_callers_connection(batchwright, database_url):
    async with working(batchwright.pool, noop), AsyncBatchwright(database_url=database_url) as stranger:
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            id = await stranger.enqueue("noop", {"n": 8}, connection=connection)
        assert (await finished(batchwright.queue, id)).result == 8


async def test_a_conflict_leaves_the_callers_transaction_usable(batchwright, database_url):
    holder = await batchwright.enqueue(noop, exclusive_key="k")
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        with pytest.raises(Conflict) as caught:
            await batchwright.enqueue(noop, exclusive_key="k", on_held="reject", connection=connection)
        assert caught.value.holder == str(holder)
        id = await batchwright.enqueue(noop, connection=connection)
    assert (await batchwright.get(id)).status is JobStatus.QUEUED


async def test_an_object_that_is_not_a_connection_is_refused(batchwright, plain):
    for connection in ("postgresql://…", 17, object()):
        with pytest.raises(ConfigurationError, match="must be a psycopg 3 connection"):
            await batchwright.enqueue(noop, connection=connection)
        with pytest.raises(ConfigurationError, match="must be a psycopg 3 connection"):
            await asyncio.to_thread(plain.enqueue, noop, connection=connection)


async def test_another_driver_is_refused_by_name(batchwright):
    with sqlite3.connect(":memory:") as connection, pytest.raises(ConfigurationError, match=r"not sqlite3\.Connection"):
        await batchwright.enqueue(noop, connection=connection)
    connection.close()


@pytest.mark.parametrize("open_transaction", [lambda engine: engine.connect(), Session], ids=["connection", "session"])
def test_sqlalchemy_on_another_driver_is_refused_by_name(plain, open_transaction):
    engine = sqlalchemy.create_engine("sqlite://")
    with (
        open_transaction(engine) as transaction,
        pytest.raises(ConfigurationError, match=r"postgresql\+psycopg://…\), not sqlite3"),
    ):
        plain.enqueue(noop, connection=transaction)
    engine.dispose()


async def test_the_plain_client_refuses_an_async_connection(plain, database_url, alchemy_url):
    engine = create_async_engine(alchemy_url)
    async with (
        await psycopg.AsyncConnection.connect(database_url) as driver,
        engine.connect() as connection,
        AsyncSession(engine) as session,
    ):
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        for one in (driver, connection, session, scoped):
            with pytest.raises(InvalidInput, match="use AsyncBatchwright"):
                plain.enqueue(noop, connection=one)
    await engine.dispose()
