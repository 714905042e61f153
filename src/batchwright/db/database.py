"""The door to PostgreSQL: a pool for the event loop, one blocking connection for a thread, or the caller's own.

Every verb of the engine is an `async def` over a `Session`. On a blocking connection such a coroutine never
suspends, so `complete()` can run it in plain code: one implementation serves both worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, Self, TypeVar

import orjson
import psycopg
import psycopg_pool
from psycopg import errors as pg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types.json import set_json_loads

import batchwright.db.raw  # noqa: F401  # a connection knows only what was registered before it was made
from batchwright.db.sessions import LENT, Mode, Route, explore
from batchwright.errors import (
    ConfigurationError,
    DatabaseBusy,
    DatabaseError,
    DatabaseUnavailable,
    DataRefused,
    Deadlock,
    UniqueViolation,
)

T = TypeVar("T")
Params = Mapping[str, Any]
Row = tuple[Any, ...]
_NONE: Params = {}
_RECONNECT_SECONDS_MAX = 1.0
_IDLE_SECONDS = 60.0
"""After that a connection that nobody needed is closed, but for one."""
PER_WORKER = 2
"""Connections that a worker keeps beside its pool: for its leases and for the doorbell."""
_SHORT_OF_RESOURCES = "53"
"""The class of these errors: memory, disk, connections."""
_PLANNER = {
    "plan_cache_mode": "force_generic_plan",  # our statements have one good plan each; planning costs more than running
    "enable_seqscan": "off",  # statistics taken while nothing runs make a settle look cheaper by scan than by key
    "jit": "off",
    "timezone": "UTC",
}
LEASE_URL = "database.lease_url"
_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")
_USE_UTC = "SET timezone TO 'UTC'"
_SERVER = "SELECT pg_postmaster_start_time(), current_database()"
"""Of no two servers the same, and it needs no schema and no special right."""
_ELSEWHERE = (
    f"{LEASE_URL} leads to another database than database.url, where leases would be renewed in vain: let both name "
    "the same database on the same server"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSettings:
    """How Batchwright reaches PostgreSQL."""

    url: str | None = None
    """A PostgreSQL 15 or newer; unset, Batchwright runs a PostgreSQL of its own."""
    folder: str | None = None
    """Where the embedded PostgreSQL keeps its data; unset, a folder of the user's."""
    lease_url: str | None = None
    """Another way to the same database for leases and, if it keeps sessions, the doorbell: for where `url` is a pooler
    in transaction mode. Unset, they go by `url`."""
    pool_size: int = 8
    """Connections per process at most, beside the two that a worker keeps for leases and the doorbell."""
    statement_timeout_seconds: float = 10.0
    """No statement, lock or idle transaction of ours lasts longer."""
    connect_timeout_seconds: int = 5
    """How long one attempt to connect may take."""


class Session(Protocol):
    """Something that runs statements: a transaction, or a connection that commits each one."""

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]: ...


class Source(Protocol):
    """Whence a database has its connections: a pool, one of a thread's own, or the caller's."""

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]: ...

    def transaction(self) -> contextlib.AbstractAsyncContextManager[Session]: ...


class Database:
    """What every verb is written against: connections, and the time that `:now` means in a statement.

    Without a clock of its own, or when that answers None, the time is the server's.
    """

    def __init__(self, source: Source, *, clock: Callable[[], datetime | None] = lambda: None) -> None:
        self.clock = clock
        self._source = source

    def ask(self, sql: str, params: Params = _NONE, session: Session | None = None) -> Awaitable[list[Row]]:
        """Run one statement: in the session's transaction, or alone."""
        return (session or self._source).rows(sql, {**params, "now": self.clock()})

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        """A statement that does not ask for the time."""
        return await self._source.rows(sql, params)

    def transaction(self) -> contextlib.AbstractAsyncContextManager[Session]:
        return self._source.transaction()

    @contextlib.asynccontextmanager
    async def within(self, session: Session | None) -> AsyncIterator[Session]:
        """The transaction that is open already, or one of its own."""
        if session is not None:
            yield session
        else:
            async with self._source.transaction() as session:
                yield session


class Pool:
    """The event loop's database."""

    def __init__(self, settings: DatabaseSettings, url: str) -> None:
        self.settings = settings
        self.url = url
        self.route = Route(url=url, mode=Mode.DIRECT, prepares=True, answer_seconds=0.0)
        """The way to the database; explored when the pool is opened."""
        self._leases: Route | None = None
        self._refused_at = -math.inf
        self._errands: set[asyncio.Task[None]] = set()
        self._pool = psycopg_pool.AsyncConnectionPool(
            url,
            connection_class=psycopg.AsyncConnection[Row],
            kwargs={"autocommit": True, **connect_arguments(settings)},
            min_size=1,
            max_size=settings.pool_size,
            max_idle=_IDLE_SECONDS,
            timeout=settings.statement_timeout_seconds,
            reconnect_timeout=_RECONNECT_SECONDS_MAX,
            reconnect_failed=self._try_again,
            configure=self._configure,
            open=False,
            name="batchwright",
        )

    async def open(self) -> None:
        """Connect once, so that a wrong address or pooler is an error now and not at the first job."""
        with translate_errors():
            self.route = await self._explore(self.url, self.settings.pool_size + PER_WORKER)
            await self._pool.open(wait=True)

    async def explore_leases(self) -> Route:
        """The way for the leases of a worker and, if it keeps sessions, for its doorbell; explored once."""
        url = self.settings.lease_url
        if url is None:
            return self.route
        if self._leases is None:
            self._leases = await self._explore_apart(url)
        return self._leases

    async def _explore_apart(self, url: str) -> Route:
        try:
            with translate_errors():
                route = await self._explore(url, PER_WORKER)
                async with self._connect(url) as connection:
                    there = await _fetch(connection, _SERVER, None)
        except ConfigurationError as error:
            raise ConfigurationError(f"{LEASE_URL}: {error}") from error
        except DatabaseUnavailable as error:
            raise type(error)(f"{LEASE_URL}: {error}") from error
        if there != await self.rows(_SERVER):
            raise ConfigurationError(_ELSEWHERE)
        return route

    def _explore(self, url: str, connections: int) -> Coroutine[Any, Any, Route]:
        return explore(lambda: self._connect(url), url, f"a worker process needs {connections} connections")

    async def close(self) -> None:
        await self._pool.close(timeout=5)

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        with keep_cancellation(), translate_errors(), self._judge_timeouts():
            async with self._borrow() as connection:
                return await _fetch(connection, sql, params)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        with keep_cancellation(), translate_errors(), self._judge_timeouts():
            async with self._borrow() as connection, connection.transaction():
                yield Transaction(connection)
                _refuse_aborted(connection)

    @contextlib.asynccontextmanager
    async def _borrow(self) -> AsyncIterator[psycopg.AsyncConnection[Row]]:
        """A connection of the pool. The task that uses it may be cancelled, but never inside the pool.

        One that is cancelled twice while it waits there, as cancel scopes do, may leave a lock behind that stops
        everybody (`asyncio.wait_for` around a condition). One that is cancelled while it returns one may lose it.
        """
        asking = asyncio.ensure_future(self._pool.getconn())
        try:
            connection = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._finish(self._return_late(asking))
            raise
        try:
            async with connection:
                yield connection
        finally:
            await asyncio.shield(self._finish(self._pool.putconn(connection)))

    async def _return_late(self, asking: asyncio.Future[psycopg.AsyncConnection[Row]]) -> None:
        """What a cancelled task has asked for goes back when it comes."""
        with contextlib.suppress(psycopg_pool.PoolTimeout, psycopg_pool.PoolClosed):
            await self._pool.putconn(await asking)

    def _finish(self, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    @contextlib.asynccontextmanager
    async def _connect(self, url: str) -> AsyncIterator[psycopg.AsyncConnection[Row]]:
        """A connection of its own, beside the pool."""
        limit = self.settings.connect_timeout_seconds
        try:
            connection = await psycopg.AsyncConnection.connect(url, autocommit=True, **connect_arguments(self.settings))
        except pg.ConnectionTimeout as error:
            raise DatabaseUnavailable(
                f"no connection to PostgreSQL within {limit:g} s ({error}): raise database.connect_timeout_seconds "
                "if it is far away, or look at the network and at the server's load"
            ) from error
        try:
            yield connection
        finally:
            await connection.close()

    @contextlib.contextmanager
    def _judge_timeouts(self) -> Iterator[None]:
        """Where no connection came free in time: unless the server refused new ones meanwhile, all are just in use."""
        asked = time.monotonic()
        try:
            yield
        except psycopg_pool.PoolTimeout as error:
            if self._refused_at < asked:
                raise DatabaseBusy(f"no connection to PostgreSQL came free: {error}") from error
            raise

    async def _configure(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Read JSON with orjson on our own connections; the driver's setting for the whole process is the user's."""
        set_json_loads(orjson.loads, connection)
        if not _tells_utc(connection):
            await connection.execute(_USE_UTC)
        connection.prepare_threshold = _prepare_threshold(self.route.prepares)

    async def _try_again(self, pool: psycopg_pool.AsyncConnectionPool[Any]) -> None:
        """The pool waits twice as long after each failure, without end; giving up early and starting over ends that."""
        self._refused_at = time.monotonic()
        await pool.check()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Transaction:
    """Statements that happen together; `driver` is the connection that a `write` function receives."""

    def __init__(self, driver: psycopg.AsyncConnection[Row]) -> None:
        self.driver = driver

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        return await _fetch(self.driver, sql, params)


class Blocking:
    """A thread's database: one connection, made when first needed and again after it was lost."""

    def __init__(self, settings: DatabaseSettings, url: str, *, prepares: bool = True) -> None:
        threshold = _prepare_threshold(prepares)
        self._arguments = {"autocommit": True, "prepare_threshold": threshold, **connect_arguments(settings)}
        self._url = url
        self._connection: psycopg.Connection[Row] | None = None

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        with translate_errors():
            return _fetch_blocking(self._connect(), sql, params)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        with translate_errors(), (connection := self._connect()).transaction():
            yield ConnectionSession(connection)
            _refuse_aborted(connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> psycopg.Connection[Row]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.Connection.connect(self._url, **self._arguments)
            set_json_loads(orjson.loads, self._connection)
            if not _tells_utc(self._connection):
                self._connection.execute(_USE_UTC)
        return self._connection


class ConnectionSession:
    """The caller's own connection and transaction: nothing is begun, committed or rolled back here."""

    def __init__(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        # The caller may have given its connection a row factory or a cursor class of its own.
        with translate_errors():
            if isinstance(self._connection, psycopg.AsyncConnection):
                async with psycopg.AsyncCursor(self._connection, row_factory=tuple_row) as cursor:
                    await cursor.execute(sql, params, prepare=None if params else False)
                    return await cursor.fetchall() if cursor.description is not None else []
            with psycopg.Cursor(self._connection, row_factory=tuple_row) as blocking:
                blocking.execute(sql, params, prepare=None if params else False)
                return blocking.fetchall() if blocking.description is not None else []

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        yield self


async def wrap_connection(connection: object) -> ConnectionSession:
    """Wrap a psycopg or SQLAlchemy connection (or session) of the caller's.

    SQLAlchemy commits only what it knows to have begun, so its transaction is begun here as its own statements would.
    """
    found: Any = connection
    if hasattr(found, "get_raw_connection"):  # SQLAlchemy AsyncConnection
        if not found.in_transaction():
            await found.begin()
        found = (await found.get_raw_connection()).driver_connection
    elif hasattr(found, "get_bind") and hasattr(found, "connection"):  # SQLAlchemy Session, AsyncSession
        opened = found.connection()
        return await wrap_connection(await opened if isinstance(opened, Coroutine) else opened)
    elif hasattr(found, "exec_driver_sql"):  # SQLAlchemy Connection
        if not found.in_transaction():
            found.begin()
        found = found.connection.driver_connection
    if isinstance(found, (psycopg.Connection, psycopg.AsyncConnection)):
        return ConnectionSession(found)
    raise ConfigurationError(
        f"connection= takes a psycopg 3 connection, or a SQLAlchemy one on psycopg 3 "
        f"(postgresql+psycopg://…), not {type(found).__module__}.{type(found).__qualname__}"
    )


def is_blocking(connection: object) -> bool:
    """Whether a caller's connection belongs to plain code, not to an event loop."""
    return not (
        isinstance(connection, psycopg.AsyncConnection) or type(connection).__name__.lower().startswith("async")
    )


def complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a blocking database, which never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    coroutine.close()
    raise AssertionError("a coroutine over a blocking database suspended")


def connect_arguments(settings: DatabaseSettings) -> dict[str, Any]:
    """Timeouts on everything, and keepalives, so that a dead peer is noticed in seconds."""
    return {
        "application_name": "batchwright",
        "connect_timeout": settings.connect_timeout_seconds,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": _milliseconds(settings),
        "options": " ".join(f"-c {name}={value}" for name, value in session_settings(settings).items()),
    }


def session_settings(settings: DatabaseSettings) -> dict[str, str]:
    """What the server is told about each of our sessions. A pooler may keep it from the server: but for the time zone,
    which is set again then, only how long a mishap lasts and how good a plan is depend on it.
    """
    limits = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    return {**dict.fromkeys(limits, str(_milliseconds(settings))), **_PLANNER}


def _milliseconds(settings: DatabaseSettings) -> int:
    return int(settings.statement_timeout_seconds * 1000)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the driver's errors into ours, so that nobody else needs to know the driver."""
    try:
        yield
    except pg.UniqueViolation as error:
        raise UniqueViolation(str(error)) from error
    except (pg.DeadlockDetected, pg.SerializationFailure) as error:
        raise Deadlock(str(error)) from error
    except (pg.UntranslatableCharacter, pg.CharacterNotInRepertoire, pg.InvalidTextRepresentation) as error:
        raise DataRefused(str(error)) from error
    except (pg.DuplicatePreparedStatement, pg.InvalidSqlStatementName) as error:
        raise DatabaseError(f"{error}: {LENT}") from error
    except (pg.IntegrityError, pg.ProgrammingError, pg.RaiseException) as error:
        raise DatabaseError(str(error)) from error
    except pg.DataError as error:
        raise DataRefused(str(error)) from error
    except (pg.QueryCanceled, pg.LockNotAvailable, pg.IdleInTransactionSessionTimeout) as error:
        raise DatabaseBusy(str(error).strip()) from error
    except (psycopg_pool.PoolTimeout, psycopg_pool.PoolClosed) as error:
        raise DatabaseUnavailable(f"no connection to PostgreSQL: {error}") from error
    except (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        pg.ReadOnlySqlTransaction,  # the driver calls it an internal error; the next try may well succeed
    ) as error:
        is_short = (error.sqlstate or "").startswith(_SHORT_OF_RESOURCES)
        kind = DatabaseBusy if is_short else DatabaseUnavailable
        raise kind(str(error).strip() or type(error).__name__) from error
    except psycopg.Error as error:
        # Of a server that died a pooler hands on the last words, and adds its own: two answers to a BEGIN or a COMMIT
        # are too many for the driver. An internal error that has no code is the driver's own, not the server's.
        is_garbled = isinstance(error, psycopg.InternalError) and error.sqlstate is None
        raise (DatabaseUnavailable if is_garbled else DatabaseError)(str(error)) from error


@contextlib.contextmanager
def keep_cancellation() -> Iterator[None]:
    """Where the connection is lost while a task is cancelled, the driver says only that, and who waits for the task
    would wait for ever: it was cancelled all the same.
    """
    task = asyncio.current_task()
    assert task is not None, "only tasks wait for the database"
    before = task.cancelling()
    try:
        yield
    except Exception as error:
        if task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > before:
        raise asyncio.CancelledError


def _tells_utc(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Times must come in UTC, for ticks are compared as text. A pooler that ignores our options keeps the zone of each
    of its clients all the same, also where it lends sessions.
    """
    return connection.info.parameter_status("TimeZone") == "UTC"


def _prepare_threshold(prepares: bool) -> int | None:
    """A statement is prepared with its first use, or never."""
    return 0 if prepares else None


def _refuse_aborted(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """A COMMIT after an error that somebody swallowed rolls back without a word: say it."""
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise pg.InFailedSqlTransaction("a statement failed earlier in this transaction, so nothing can be committed")


async def _fetch(connection: psycopg.AsyncConnection[Any], sql: str, params: Params | None) -> list[Row]:
    """Answers come in binary: ids and times are smaller so, and neither side has to write or read them as text."""
    cursor = psycopg.AsyncRawCursor(connection)
    await cursor.execute(*_numbered(sql, params), prepare=None if params else False, binary=bool(params))
    return await cursor.fetchall() if cursor.description is not None else []


def _fetch_blocking(connection: psycopg.Connection[Any], sql: str, params: Params | None) -> list[Row]:
    cursor = psycopg.RawCursor(connection)
    cursor.execute(*_numbered(sql, params), prepare=None if params else False, binary=bool(params))
    return cursor.fetchall() if cursor.description is not None else []


def _numbered(sql: str, params: Params | None) -> tuple[str, Sequence[Any] | None]:
    """A statement and its parameters as the server wants them, by number.

    The driver would do it, but reads a statement of more than 4 kB anew each time: for a claim that took a millisecond.
    """
    if params is None:
        return sql, None
    text, names = _number_names(sql)
    return text, [params[name] for name in names]


@functools.lru_cache(maxsize=2048)
def _number_names(sql: str) -> tuple[str, tuple[str, ...]]:
    numbers: dict[str, int] = {}

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        return "%" if name is None else f"${numbers.setdefault(name, len(numbers) + 1)}"

    return _PLACEHOLDER.sub(replace, sql), tuple(numbers)
