"""Access to PostgreSQL: a pool for the event loop, one blocking connection for a thread, or the caller's own.

Every verb of the engine is an `async def` over a `Session`. On a blocking connection such a coroutine never
suspends, so `complete()` can run it in sync code: one implementation serves both.
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
from psycopg.adapt import AdaptersMap
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
"""Idle connections are closed after this time, except one."""
PER_WORKER = 2
"""Connections that a worker keeps besides its pool: for its leases and for the doorbell."""
_SHORT_OF_RESOURCES = "53"
"""The SQLSTATE class for lack of memory, disk or connections."""
_PLANNER = {
    "plan_cache_mode": "force_generic_plan",  # our statements have one good plan each, and planning costs more
    "enable_seqscan": "off",  # statistics taken while nothing runs make a settle look cheaper by scan than by key
    "jit": "off",
    "timezone": "UTC",
}
LEASE_URL = "database.lease_url"
_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")
_USE_UTC = "SET timezone TO 'UTC'"
_SERVER = "SELECT pg_postmaster_start_time(), current_database()"
"""Different on every server, and readable without a schema or special rights."""
_ELSEWHERE = (
    f"{LEASE_URL} refers to another database than database.url, where leases cannot be renewed: both must name the "
    "same database on the same server"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSettings:
    """How Batchwright reaches PostgreSQL."""

    url: str | None = None
    """URL of a PostgreSQL 15 or newer; unset, Batchwright runs its own PostgreSQL."""
    folder: str | None = None
    """Folder of the embedded PostgreSQL, the files and the work folder; unset, a folder of the user."""
    lease_url: str | None = None
    """Another URL of the same database, for leases and, if it keeps sessions, the doorbell. Use it where `url` is a
    pooler in transaction mode. Unset, they use `url`."""
    pool_size: int = 8
    """Maximum number of connections per process, in addition to the two that a worker keeps for leases and the
    doorbell."""
    statement_timeout_seconds: float = 10.0
    """Time limit of Batchwright's own statements, locks and idle transactions."""
    connect_timeout_seconds: int = 5
    """Time limit of one attempt to connect."""


class Session(Protocol):
    """Something that runs statements: a transaction, or a connection that commits each one."""

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]: ...


class Source(Protocol):
    """Where a database gets its connections: a pool, a thread's own connection, or the caller's."""

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]: ...

    def transaction(self) -> contextlib.AbstractAsyncContextManager[Session]: ...


class Database:
    """The interface that every verb uses: connections, and the time for `:now` in a statement.

    Without a clock of its own, or if that returns None, the time is the server's.
    """

    def __init__(self, source: Source, *, clock: Callable[[], datetime | None] = lambda: None) -> None:
        self.clock = clock
        self._source = source

    def ask(self, sql: str, params: Params = _NONE, session: Session | None = None) -> Awaitable[list[Row]]:
        """Run one statement: in the session's transaction, or alone."""
        return (session or self._source).rows(sql, {**params, "now": self.clock()})

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        """A statement that does not use the time."""
        return await self._source.rows(sql, params)

    def transaction(self) -> contextlib.AbstractAsyncContextManager[Session]:
        return self._source.transaction()

    @contextlib.asynccontextmanager
    async def within(self, session: Session | None) -> AsyncIterator[Session]:
        """The open transaction, or a new one."""
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
        """The route to the database; explored when the pool is opened."""
        self._leases: Route | None = None
        self._refused_at = -math.inf
        self._returning: set[asyncio.Task[None]] = set()
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
        """Connect once, so that a wrong address or pooler fails now and not at the first job."""
        with translate_errors():
            self.route = await self._explore(self.url, self.settings.pool_size + PER_WORKER)
            await self._pool.open(wait=True)

    async def explore_leases(self) -> Route:
        """The route for a worker's leases and, if it keeps sessions, for its doorbell; explored once."""
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

        A task that is cancelled twice while it waits there, as by cancel scopes, may leave a lock behind that stops
        everybody (`asyncio.wait_for` around a condition). A task cancelled while it returns a connection may lose it.
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
        """Return the connection that a cancelled task requested, when it arrives."""
        with contextlib.suppress(psycopg_pool.PoolTimeout, psycopg_pool.PoolClosed):
            await self._pool.putconn(await asking)

    def _finish(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)
        return task

    @contextlib.asynccontextmanager
    async def _connect(self, url: str) -> AsyncIterator[psycopg.AsyncConnection[Row]]:
        """A separate connection, outside the pool."""
        limit = self.settings.connect_timeout_seconds
        try:
            connection = await psycopg.AsyncConnection.connect(url, autocommit=True, **connect_arguments(self.settings))
        except pg.ConnectionTimeout as error:
            raise DatabaseUnavailable(
                f"no connection to PostgreSQL within {limit:g} s ({error}): raise database.connect_timeout_seconds "
                "if it is far away, or check the network and the server's load"
            ) from error
        try:
            yield connection
        finally:
            await connection.close()

    @contextlib.contextmanager
    def _judge_timeouts(self) -> Iterator[None]:
        """If no connection became free in time, all are in use, unless the server has refused new ones meanwhile."""
        asked = time.monotonic()
        try:
            yield
        except psycopg_pool.PoolTimeout as error:
            if self._refused_at < asked:
                raise DatabaseBusy(f"no connection to PostgreSQL became free: {error}") from error
            raise

    async def _configure(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Read JSON with orjson on our own connections only; the driver's process-wide setting belongs to the user."""
        set_json_loads(orjson.loads, connection)
        if not _reports_utc(connection):
            await connection.execute(_USE_UTC)
        connection.prepare_threshold = _prepare_threshold(self.route.prepares)

    async def _try_again(self, pool: psycopg_pool.AsyncConnectionPool[Any]) -> None:
        """The pool doubles its wait after each failure, without limit; starting over early limits it."""
        self._refused_at = time.monotonic()
        await pool.check()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Transaction:
    """Statements in one transaction; `driver` is the connection that a `write` function receives."""

    def __init__(self, driver: psycopg.AsyncConnection[Row]) -> None:
        self.driver = driver

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        return await _fetch(self.driver, sql, params)


class Blocking:
    """A thread's database: one connection, opened when first needed and again after it was lost."""

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
            if not _reports_utc(self._connection):
                self._connection.execute(_USE_UTC)
        return self._connection


_ADAPTERS = AdaptersMap(psycopg.adapters)
set_json_loads(orjson.loads, _ADAPTERS)
"""Type adapters for our statements on a caller's connection. The caller may have changed them for its own
statements: Django, for one, reads jsonb as text."""


class _Cursor(psycopg.Cursor[Row]):
    @property
    def adapters(self) -> AdaptersMap:
        return _ADAPTERS


class _AsyncCursor(psycopg.AsyncCursor[Row]):
    @property
    def adapters(self) -> AdaptersMap:
        return _ADAPTERS


class ConnectionSession:
    """The caller's own connection and transaction, which only the caller commits or rolls back."""

    def __init__(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        # The caller may have set a row factory or a cursor class on its connection.
        with translate_errors():
            if isinstance(self._connection, psycopg.AsyncConnection):
                async with _AsyncCursor(self._connection, row_factory=tuple_row) as cursor:
                    await cursor.execute(sql, params, prepare=None if params else False)
                    return await cursor.fetchall() if cursor.description is not None else []
            with _Cursor(self._connection, row_factory=tuple_row) as blocking:
                blocking.execute(sql, params, prepare=None if params else False)
                return blocking.fetchall() if blocking.description is not None else []

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        """The open transaction; on an autocommit connection, a new one for these statements."""
        is_idle = self._connection.info.transaction_status is TransactionStatus.IDLE
        if not (is_idle and self._connection.autocommit):
            yield self
        elif isinstance(self._connection, psycopg.AsyncConnection):
            with translate_errors():
                async with self._connection.transaction():
                    yield self
        else:
            with translate_errors(), self._connection.transaction():
                yield self


async def wrap_connection(connection: object) -> ConnectionSession:
    """Wrap a caller's connection: psycopg's, SQLAlchemy's (or a session), or Django's.

    SQLAlchemy commits only transactions that it knows of, so we begin one here, as its own statements would.
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
    elif hasattr(found, "ensure_connection") and hasattr(found, "in_atomic_block"):  # Django
        found.validate_no_broken_transaction()
        found.ensure_connection()
        found = found.connection
    if isinstance(found, (psycopg.Connection, psycopg.AsyncConnection)):
        return ConnectionSession(found)
    raise ConfigurationError(
        f"connection= must be a psycopg 3 connection, or one of Django or SQLAlchemy on psycopg 3 "
        f"(postgresql+psycopg://…), not {type(found).__module__}.{type(found).__qualname__}"
    )


def is_blocking(connection: object) -> bool:
    """Whether a caller's connection belongs to sync code, not to an event loop."""
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
    """Session settings that we send to the server. A pooler may not pass them on. Then we set the time zone again; the
    others only affect how soon a fault is noticed and how good a plan is.
    """
    limits = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    return {**dict.fromkeys(limits, str(_milliseconds(settings))), **_PLANNER}


def _milliseconds(settings: DatabaseSettings) -> int:
    return int(settings.statement_timeout_seconds * 1000)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the driver's errors into ours, so that no other module needs to know the driver."""
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
        pg.ReadOnlySqlTransaction,  # the driver calls it an internal error, but the next try may succeed
    ) as error:
        is_short = (error.sqlstate or "").startswith(_SHORT_OF_RESOURCES)
        kind = DatabaseBusy if is_short else DatabaseUnavailable
        raise kind(str(error).strip() or type(error).__name__) from error
    except psycopg.Error as error:
        # When a server dies, a pooler passes on its last message and adds its own: the driver cannot handle two answers
        # to a BEGIN or a COMMIT. An internal error without a code is the driver's own, not the server's.
        is_garbled = isinstance(error, psycopg.InternalError) and error.sqlstate is None
        raise (DatabaseUnavailable if is_garbled else DatabaseError)(str(error)) from error


@contextlib.contextmanager
def keep_cancellation() -> Iterator[None]:
    """If the connection is lost while a task is cancelled, the driver reports only the loss, and code that waits for
    the task would wait forever: so raise the cancellation.
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


def _reports_utc(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether times are in UTC, as they must be, because ticks are compared as text. A pooler that ignores our options
    still keeps the time zone of each client, even in transaction mode.
    """
    return connection.info.parameter_status("TimeZone") == "UTC"


def _prepare_threshold(prepares: bool) -> int | None:
    """A statement is prepared with its first use, or never."""
    return 0 if prepares else None


def _refuse_aborted(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """A COMMIT after a suppressed error rolls back silently: raise an error instead."""
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise pg.InFailedSqlTransaction("a statement failed earlier in this transaction, so nothing can be committed")


async def _fetch(connection: psycopg.AsyncConnection[Any], sql: str, params: Params | None) -> list[Row]:
    """Results are binary: ids and times are smaller, and neither side has to convert them from or to text."""
    cursor = psycopg.AsyncRawCursor(connection)
    await cursor.execute(*_numbered(sql, params), prepare=None if params else False, binary=bool(params))
    return await cursor.fetchall() if cursor.description is not None else []


def _fetch_blocking(connection: psycopg.Connection[Any], sql: str, params: Params | None) -> list[Row]:
    cursor = psycopg.RawCursor(connection)
    cursor.execute(*_numbered(sql, params), prepare=None if params else False, binary=bool(params))
    return cursor.fetchall() if cursor.description is not None else []


def _numbered(sql: str, params: Params | None) -> tuple[str, Sequence[Any] | None]:
    """A statement and its parameters in the server's form, by number.

    The driver could do it, but it parses a statement of more than 4 kB each time: for a claim that took a millisecond.
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
