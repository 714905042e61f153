"""A database that loses answers on purpose: the caller gets an error, whether or not the statement was committed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from batchwright.db.database import Database, Params, Row, Session
from batchwright.engine.queue import SQL
from batchwright.errors import DatabaseUnavailable, Deadlock, UniqueViolation

When = Literal["before", "after"]
NAMES = {sql: name for name, sql in SQL.items()}
ERRORS = {"lost": DatabaseUnavailable, "deadlock": Deadlock, "unique": UniqueViolation}


@dataclass(slots=True)
class Fault:
    """An error at the n-th run of a statement, which is named as in jobs.sql.

    For a single statement, `after` means that it was committed and its answer was lost. In a transaction, `after`
    means that the answer to COMMIT was lost, and `before` is an error before the statement, which rolls back the
    transaction.
    """

    statement: str
    when: When = "after"
    kind: Literal["lost", "deadlock", "unique"] = "lost"
    nth: int = 1
    times: int = 1
    struck: int = 0


@dataclass(slots=True)
class _Gate:
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def pass_through(self) -> None:
        self.arrived.set()
        await self.go.wait()


@dataclass(slots=True)
class Faulty:
    """Wraps a database: counts statements and commits, delays some, and lets others fail as planned."""

    inner: Database
    faults: list[Fault] = field(default_factory=list)
    ran: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    gates: dict[str, _Gate] = field(default_factory=dict)
    answer_gates: dict[str, _Gate] = field(default_factory=dict)

    def plan(self, *faults: Fault) -> None:
        self.faults = list(faults)
        self.ran.clear()

    def hold(self, statement: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Hold this statement before it runs. Returns the events `arrived`, set once it is held, and `go`."""
        self.gates[statement] = _Gate()
        return self.gates[statement].arrived, self.gates[statement].go

    def hold_answer(self, statement: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Run this statement, but hold its answer until `go` is set."""
        self.answer_gates[statement] = _Gate()
        return self.answer_gates[statement].arrived, self.answer_gates[statement].go

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        name = await self._approach(sql)
        fault = self._strike(name)
        if fault is not None and fault.when == "before":
            raise _error(fault)
        rows = await self.inner.rows(sql, params)
        self.commits += 1
        if fault is not None:
            raise _error(fault)
        if name in self.answer_gates:
            await self.answer_gates[name].pass_through()
        return rows

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        late: list[Fault] = []
        async with self.inner.transaction() as session:
            yield _FaultySession(self, session, late)
        self.commits += 1
        for fault in late:
            raise _error(fault)

    async def _approach(self, sql: str) -> str:
        name = NAMES.get(sql, sql)
        self.ran[name] += 1
        if name in self.gates:
            await self.gates[name].pass_through()
        return name

    def _strike(self, name: str) -> Fault | None:
        for fault in self.faults:
            due = fault.nth <= self.ran[name] < fault.nth + fault.times
            if fault.statement == name and due and fault.struck < fault.times:
                fault.struck += 1
                return fault
        return None


@dataclass(slots=True)
class _FaultySession:
    database: Faulty
    session: Session
    late: list[Fault]

    @property
    def driver(self) -> Any:
        return getattr(self.session, "driver", self.session)

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        name = await self.database._approach(sql)
        fault = self.database._strike(name)
        if fault is not None and fault.when == "after":
            self.late.append(fault)
        elif fault is not None:
            raise _error(fault)
        return await self.session.rows(sql, params)


def _error(fault: Fault) -> Exception:
    return ERRORS[fault.kind](f"by plan: {fault.kind} {fault.when} {fault.statement}")
