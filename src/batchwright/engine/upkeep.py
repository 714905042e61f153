"""Rounds that keep the queue healthy. There is no leader: any worker's round runs if it gets the round's lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from batchwright.db.database import Database, Session
from batchwright.db.statements import statements
from batchwright.engine.metrics import fold
from batchwright.engine.operation import Operations
from batchwright.engine.queue import Queue, Rescued
from batchwright.engine.worker.processes import Processes
from batchwright.engine.workers import Workers
from batchwright.errors import DatabaseBusy, DatabaseError, DatabaseUnavailable

SQL = statements(__package__, "upkeep.sql")
log = logging.getLogger(__name__)

_DEAD_WORKER_SECONDS = 300.0
_SUSPECTS_MAX = 100
_PAUSE_SECONDS_MIN = 0.3
_PAUSE_SECONDS_MAX = 0.7
_WAKE_SECONDS = 0.1

OnRescued = Callable[[Sequence[Rescued]], None]
"""Called with what was rescued, after the commit."""


@dataclass(frozen=True, slots=True)
class Round:
    """Something to do every so often, by one process at a time; parts of Batchwright may add their own.

    A run that answers True has left work behind and gets the next turn, half a second later.
    """

    name: str
    every_seconds: float
    run: Callable[[Session], Awaitable[object]]


def wake_when_due(rescued: Iterable[Rescued], wake: Callable[[set[str]], None]) -> None:
    """Have jobs claimed when they come back, and not at the next poll. Call this after the commit.

    They come back spread over a time; those of one tenth of a second are waited for together.
    """
    moments: defaultdict[int, set[str]] = defaultdict(set)
    for one in rescued:
        if one.due_seconds is not None:
            moments[math.ceil(one.due_seconds / _WAKE_SECONDS)].add(one.queue)
    for moment, queues in moments.items():
        asyncio.get_running_loop().call_later(moment * _WAKE_SECONDS, wake, queues)


@contextlib.asynccontextmanager
async def lock_round(database: Database, name: str) -> AsyncIterator[Session | None]:
    """A transaction that only one process at a time gets for this round; None for the others."""
    async with database.transaction() as session:
        ((is_mine,),) = await database.ask(SQL["lock_round"], {"round": name}, session)
        yield session if is_mine else None


async def make_event_partitions(database: Database, *, session: Session | None = None) -> int:
    """Make the partitions of the coming weeks; answers how many were missing."""
    ((made,),) = await database.ask(SQL["make_event_partitions"], {}, session)
    return int(made)


class Upkeep:
    """Rescue, expiry, partitions and dead workers; and, in each worker, suspects that must run alone."""

    def __init__(
        self,
        queue: Queue,
        processes: Processes,
        operations: Operations,
        rounds: Sequence[Round] = (),
        *,
        queues: Sequence[str] | None = None,
        on_rescued: OnRescued = lambda rescued: None,
    ) -> None:
        self._queue = queue
        self._processes = processes
        self._operations = operations
        self._queues = queues
        self._on_rescued = on_rescued
        self._is_cut_off = False
        self._no_rescue_until = 0.0
        self._rescued: list[Rescued] = []
        """By a round that is not committed yet."""
        self._alone: asyncio.Task[None] | None = None
        self._due: dict[str, float] = {}
        workers = Workers(queue.database)
        self._rounds = (
            Round("rescue", 0.5, self._rescue),
            Round("expire", 1.0, lambda session: queue.expire(session=session)),
            Round("partitions", 3600.0, lambda session: make_event_partitions(queue.database, session=session)),
            Round("workers", 60.0, lambda session: workers.remove_dead(_DEAD_WORKER_SECONDS, session=session)),
            Round("counts", 60.0, lambda session: fold(queue.database, session=session)),
            *rounds,
        )

    def note_outage(self) -> None:
        """A break in our own connection: the others had it too, and have one lease from its end to renew theirs.

        A slow database is no such break: everybody is still connected, and if it stays slow, the dead wait for rescue.
        """
        self._is_cut_off = True

    async def run(self) -> None:
        """Until cancelled."""
        unknown_at = time.monotonic() + 5
        try:
            while True:
                await self.run_due()
                if self._processes.can_isolate and (self._alone is None or self._alone.done()):
                    self._alone = asyncio.create_task(self.isolate_suspects())
                if time.monotonic() >= unknown_at:
                    unknown_at = time.monotonic() + 60
                    with contextlib.suppress(DatabaseError):
                        await self._report_unknown_types()
                await asyncio.sleep(self._pause_seconds())
        finally:
            if self._alone is not None:
                self._alone.cancel()
                await asyncio.gather(self._alone, return_exceptions=True)

    def _pause_seconds(self) -> float:
        """Until the next round is due, but with room between rounds, and not in step with other workers."""
        first = min(self._due.get(round.name, 0.0) for round in self._rounds) - time.monotonic()
        return max(_PAUSE_SECONDS_MIN, min(first, random.uniform(_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX)))

    async def run_due(self) -> None:
        for round in self._rounds:
            if time.monotonic() >= self._due.get(round.name, 0.0):
                self._due[round.name] = time.monotonic() + round.every_seconds
                try:
                    await self.run_round(round)
                except DatabaseBusy as error:
                    log.warning("the upkeep round %r must be repeated: %s", round.name, error)
                except DatabaseUnavailable:
                    self.note_outage()
                except Exception:  # a round that a part has added must not stop the worker
                    log.exception("the upkeep round %r failed", round.name)

    async def run_round(self, round: Round) -> bool:
        """Run one round unless another process is at it."""
        async with lock_round(self._queue.database, round.name) as session:
            if session is None:
                return False
            if await round.run(session) is True:
                self._due[round.name] = 0.0
        self._announce()
        return True

    def _announce(self) -> None:
        """What was rescued, once that is committed."""
        rescued, self._rescued = self._rescued, []
        self._on_rescued(rescued)
        for one in rescued:
            if one.was_running:
                extra = {"job_id": str(one.id)}
                log.warning("job %s was rescued from a dead worker: %s", one.id, one.status, extra=extra)

    async def _rescue(self, session: Session) -> None:
        self._rescued = []  # those of a round whose commit failed
        if self._is_cut_off:
            self._is_cut_off = False
            self._no_rescue_until = time.monotonic() + self._queue.settings.lease_seconds
        if time.monotonic() < self._no_rescue_until:
            return
        self._rescued = await self._queue.rescue(session=session)

    async def isolate_suspects(self) -> None:
        """Run a job whose worker died twice alone in a process of its own: no neighbour dies with it.

        Which one is left to chance: workers that all took the first would start processes for the same job.
        """
        try:
            known = self._operations.names()
            if suspects := await self._queue.suspects(known, limit=_SUSPECTS_MAX, private=self._queues):
                id = random.choice(suspects)
                claim = await self._processes.isolate(id)
                if claim is not None:
                    log.error("job %s killed the process that ran it alone", id, extra={"job_id": str(id)})
                    self._on_rescued(await self._queue.rescue(dead=[(id, claim)], limit=1))
        except DatabaseError as error:
            log.debug("suspects wait: %s", error)

    async def _report_unknown_types(self) -> None:
        for job_type, n in (await self._queue.unknown_types(self._operations.names())).items():
            log.warning("%d due jobs of type %r wait for a worker that knows it; this one does not", n, job_type)
