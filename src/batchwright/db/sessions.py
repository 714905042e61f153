"""Does a connection keep its session? A pooler that lends one session of the server to many clients is refused."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from batchwright.errors import ConfigurationError, DatabaseUnavailable

POOLED = (
    "this connection goes through a pooler that gives every transaction another session (PgBouncer with "
    "pool_mode = transaction or statement); Batchwright needs sessions for LISTEN, prepared statements and timeouts: "
    "set pool_mode = session for this database, or connect to PostgreSQL directly"
)
_OPTIONS = (
    "a pooler (PgBouncer) refuses the startup parameter `options`, by which Batchwright sets its timeouts: connect to "
    "PostgreSQL directly, or use a pool with pool_mode = session and ignore_startup_parameters = options"
)
_CROWDED = (
    "a pooler gave the second of two connections no answer within {limit:g} s, while answers on the first took up to "
    "{slowest:.2f} s; a worker process needs {needed} connections: raise default_pool_size (PgBouncer) or "
    "max_connections (PostgreSQL)"
)
_SLOW = (
    "the database gave no answer within {limit:g} s; connecting took {connecting:.2f} s, and {answers} answers before "
    "it up to {slowest:.2f} s each: look at the network and at the server's load"
)
_ROUNDS = 4
_ANSWER_SECONDS_MAX = 5.0
"""For each round trip: a database that is far away needs long for all of them, but not for one."""

Connect = Callable[[], contextlib.AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]]


async def require_sessions(connect: Connect, needed: int) -> float:
    """Refuse a pooler that does not keep sessions; answers how many seconds the slowest round trip took.

    A server tells each client which backend it has. If that backend answers, nothing stands between. Otherwise a
    pooler does. While two clients are connected to one that keeps sessions, neither meets the other's backend nor
    changes its own. One in transaction mode shows itself: it either lends the backend that has just become free to
    the second client, or takes it from the first while the second is in a transaction.
    """
    began = time.monotonic()
    with _explain_refusals():
        async with connect() as connection:
            one = _Client(connection, time.monotonic() - began)
            try:
                if await one.backend() != connection.info.backend_pid:
                    async with connect() as other:
                        await _refuse_sharing(one, _Client(other, one.connecting), needed)
            except TimeoutError as error:
                raise DatabaseUnavailable(one.describe_delay()) from error
            return one.slowest


@contextlib.contextmanager
def _explain_refusals() -> Iterator[None]:
    """What a pooler refuses by itself, with the remedy."""
    try:
        yield
    except psycopg.Error as error:
        if "startup parameter" in str(error):
            raise ConfigurationError(_OPTIONS) from error
        if "statement pooling" in str(error):
            raise ConfigurationError(POOLED) from error
        raise


async def _refuse_sharing(one: _Client, two: _Client, needed: int) -> None:
    for _ in range(_ROUNDS):
        try:
            await two.backend("BEGIN; SELECT pg_backend_pid()")
        except TimeoutError as error:
            text = _CROWDED.format(limit=_ANSWER_SECONDS_MAX, slowest=one.slowest, needed=needed)
            raise DatabaseUnavailable(text) from error
        if len(two.backends) > 1 or one.backends & two.backends:
            raise ConfigurationError(POOLED)  # now, since the first might wait for its backend until the second ends
        await one.backend()
        if len(one.backends) > 1:
            raise ConfigurationError(POOLED)
        await two.ask("ROLLBACK")


class _Client:
    """A connection, the backends that it met, and how long they took to answer.

    Its statements have no parameters, so none is prepared: that would fail in the very case that is looked for.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any], connecting: float) -> None:
        self.connecting = connecting
        self.backends: set[int] = set()
        self.answers = 0
        self.slowest = 0.0
        self._connection = connection

    async def backend(self, sql: str = "SELECT pg_backend_pid()") -> int:
        cursor = await self.ask(sql)
        while cursor.nextset():  # to the answer of the last statement
            pass
        ((backend,),) = await cursor.fetchall()
        self.backends.add(backend)
        return int(backend)

    async def ask(self, sql: str) -> psycopg.AsyncCursor[Any]:
        began = time.monotonic()
        async with asyncio.timeout(_ANSWER_SECONDS_MAX):
            cursor = await self._connection.execute(sql, prepare=False)
        self.answers += 1
        self.slowest = max(self.slowest, time.monotonic() - began)
        return cursor

    def describe_delay(self) -> str:
        return _SLOW.format(
            limit=_ANSWER_SECONDS_MAX, connecting=self.connecting, answers=self.answers, slowest=self.slowest
        )
