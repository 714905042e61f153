"""What is between us and PostgreSQL: nothing, a pooler that keeps sessions, or one that lends them to transactions.

Each process finds this out once, when it starts. Behind a pooler that lends sessions, we must leave nothing in a
session: statements stay prepared only if the pooler itself tracks them, and there is no LISTEN.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psycopg
from psycopg import errors as pg

from batchwright.errors import ConfigurationError, DatabaseUnavailable

LENT = (
    "prepared statements were lost between two transactions. Either a pooler changed its pool_mode while this process "
    "ran: restart it; or this is a connection of your own through a pooler in transaction mode: set its "
    "prepare_threshold to None"
)
_STATEMENT_MODE = (
    "this connection goes through a pooler that allows no transactions (PgBouncer with pool_mode = statement): set "
    "pool_mode = transaction or session for this database, or connect to PostgreSQL directly"
)
_OPTIONS = (
    "a pooler (PgBouncer) refuses the startup parameter `options`, by which Batchwright sets its timeouts: set "
    "ignore_startup_parameters = options there, or connect to PostgreSQL directly"
)
_CROWDED = (
    "a pooler gave the second of two connections no answer within {limit:g} s, while answers on the first took up to "
    "{slowest:.2f} s; {needed}: raise default_pool_size (PgBouncer) or max_connections (PostgreSQL)"
)
_SLOW = (
    "the database gave no answer within {limit:g} s; connecting took {connecting:.2f} s, and {answers} answers before "
    "it up to {slowest:.2f} s each: check the network and the server's load"
)
_BACKEND = "SELECT pg_backend_pid()"
_PROBE = "SELECT %(n)s::integer -- does it stay prepared?"
_PREPARED = "SELECT name FROM pg_prepared_statements WHERE statement LIKE '%-- does it stay prepared?'"
_NAMED_BY_DRIVER = "_pg3_"
_ROUNDS = 3
_ROUNDS_HOLDING = 2
_ANSWER_SECONDS_MAX = 5.0
"""The limit for each round trip: a distant database takes long for all of them, but not for one."""

Connect = Callable[[], contextlib.AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]]


class Mode(StrEnum):
    """How a connection reaches the server, and so what it shares with other clients."""

    DIRECT = "directly"
    SESSION = "through a pooler in session mode"
    TRANSACTION = "through a pooler in transaction mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route to the database, at the time it was explored."""

    url: str
    mode: Mode
    prepares: bool
    """Whether a statement may stay prepared after its transaction."""
    answer_seconds: float
    """The slowest round trip."""

    @property
    def keeps_sessions(self) -> bool:
        return self.mode is not Mode.TRANSACTION


def describe_routes(statements: Route, leases: Route, poll_seconds: float) -> str:
    """A description of how a worker uses its routes; `poll_seconds` is its poll interval when idle."""
    parts = [f"statements go {statements.mode}"]
    if not statements.keeps_sessions:
        parts[0] += ", which keeps them prepared" if statements.prepares else ", unprepared"
    if statements.url == leases.url:
        parts.append(
            "leases too" if statements.mode is not Mode.TRANSACTION else "leases too, which wait when the pool is full"
        )
    else:
        parts.append(f"leases by database.lease_url, {leases.mode}")
    if leases.keeps_sessions:
        parts.append("the doorbell as well")
    else:
        parts.append(f"no doorbell: new jobs are found within {poll_seconds:g} s")
    return "; ".join(parts)


async def explore(connect: Connect, url: str, needed: str) -> Route:
    """Find out whether there is a pooler; `needed` says how many connections a process needs, for the error message.

    A server tells each client which backend it has. If that backend answers, there is no pooler.
    """
    began = time.monotonic()
    with _explain_refusals():
        async with connect() as connection:
            one = _Client(connection, time.monotonic() - began)
            try:
                if await one.backend() == connection.info.backend_pid:
                    mode, prepares = Mode.DIRECT, True
                elif not await _lends_sessions(connect, one, needed):
                    mode, prepares = Mode.SESSION, True
                else:
                    mode, prepares = Mode.TRANSACTION, await one.keeps_prepared()
            except TimeoutError as error:
                raise DatabaseUnavailable(one.describe_delay()) from error
            return Route(url=url, mode=mode, prepares=prepares, answer_seconds=one.slowest)


@contextlib.contextmanager
def _explain_refusals() -> Iterator[None]:
    """An error of the pooler itself, with the remedy."""
    try:
        yield
    except psycopg.Error as error:
        if "startup parameter" in str(error):
            raise ConfigurationError(_OPTIONS) from error
        if "statement pooling" in str(error):
            raise ConfigurationError(_STATEMENT_MODE) from error
        raise


async def _lends_sessions(connect: Connect, one: _Client, needed: str) -> bool:
    """While two clients are connected to a pooler that keeps sessions, neither meets the other's backend nor changes
    its own.

    A pooler that lends sessions can be detected. Usually at once: it lends the backend that just became free to the
    other client, or takes turns, or is so busy that each client gets any free backend. Otherwise it uses the backend
    of the first while the second is in a transaction. That test comes last: if many processes start at once behind a
    small pool, each would hold one backend and wait for another.
    """
    async with connect() as connection:
        two = _Client(connection, one.connecting)
        for n in range(_ROUNDS + _ROUNDS_HOLDING):
            holds = n >= _ROUNDS
            try:
                await two.backend(f"BEGIN; {_BACKEND}" if holds else _BACKEND)
                await two.backend()
            except TimeoutError as error:
                text = _CROWDED.format(limit=_ANSWER_SECONDS_MAX, slowest=one.slowest, needed=needed)
                raise DatabaseUnavailable(text) from error
            if not _met(one, two):  # otherwise the first might wait for its backend until the second releases it
                await one.backend()
            if holds:
                await two.ask("ROLLBACK")
            if _met(one, two):
                return True
    return False


def _met(one: _Client, two: _Client) -> bool:
    return len(one.backends) > 1 or len(two.backends) > 1 or bool(one.backends & two.backends)


class _Client:
    """A connection, the backends that served it, and how long they took to answer.

    Statements without parameters are not prepared: that would fail in exactly the case that we test for.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any], connecting: float) -> None:
        self.connecting = connecting
        self.backends: set[int] = set()
        self.answers = 0
        self.slowest = 0.0
        self._connection = connection

    async def backend(self, sql: str = _BACKEND) -> int:
        cursor = await self.ask(sql)
        while cursor.nextset():  # to the answer of the last statement
            pass
        ((backend,),) = await cursor.fetchall()
        self.backends.add(backend)
        return int(backend)

    async def keeps_prepared(self) -> bool:
        """Whether the pooler tracks what each client has prepared (PgBouncer 1.22 with max_prepared_statements).

        Such a pooler gives statements its own names, and notices when a client drops all of them, as the driver does
        after a rollback. In any other pooler our name could collide with that of the next client: so it is removed
        before another client can get this backend.
        """
        try:
            async with self._connection.transaction():
                if not psycopg.capabilities.has_send_close_prepared():
                    return False
                await self.ask(_PROBE, prepare=True)
                names = [name for (name,) in await (await self.ask(_PREPARED)).fetchall()]
                if ours := [name for name in names if name.startswith(_NAMED_BY_DRIVER)]:
                    await self.ask("; ".join(f"DEALLOCATE {name}" for name in ours))
                    return False
                if not names:
                    return False
                await self.ask("DEALLOCATE ALL")
                await self.ask(_PROBE, prepare=True)
                return True
        except (pg.DuplicatePreparedStatement, pg.InvalidSqlStatementName):
            return False

    async def ask(self, sql: str, *, prepare: bool = False) -> psycopg.AsyncCursor[Any]:
        began = time.monotonic()
        async with asyncio.timeout(_ANSWER_SECONDS_MAX):
            cursor = await self._connection.execute(sql, {"n": 1} if prepare else None, prepare=prepare)
        self.answers += 1
        self.slowest = max(self.slowest, time.monotonic() - began)
        return cursor

    def describe_delay(self) -> str:
        return _SLOW.format(
            limit=_ANSWER_SECONDS_MAX, connecting=self.connecting, answers=self.answers, slowest=self.slowest
        )
