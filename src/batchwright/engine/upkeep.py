"""Rounds that keep the queue healthy. There is no leader: any worker's round runs if it gets the round's lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from batchwright.db.database import Session
from batchwright.engine.counts import fold
from batchwright.engine.operation import Operations
from batchwright.engine.processes import Processes
from batchwright.engine.queue import Queue, Rescued
from batchwright.errors import DatabaseError, DatabaseUnavailable
from batchwright.states import JobStatus

log = logging.getLogger(__name__)

_DEAD_WORKER_SECONDS = 300.0
_SUSPECTS_MAX = 100


class RescueCounts(Protocol):
    def note(self, rescued: Rescued) -> None: ...


@dataclass(frozen=True, slots=True)
class Round:
    """Something to do every so often, by one process at a time; parts of Batchwright may add their own.

    A run that answers True has left work behind and gets the next turn, half a second later.
    """

    name: str
    every_seconds: float
    run: Callable[[Session], Awaitable[object]]


class Upkeep:
    """Rescue, expiry, partitions and dead workers; and, in each worker, suspects that must run alone."""

    def __init__(
        self,
        queue: Queue,
        processes: Processes,
        operations: Operations,
        counts: RescueCounts,
        rounds: Sequence[Round] = (),
        *,
        queues: Sequence[str] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._queues = queues
        self._wake = wake
        self._queue = queue
        self._processes = processes
        self._operations = operations
        self._counts = counts
        self._is_cut_off = False
        self._no_rescue_until = 0.0
        self._alone: asyncio.Task[None] | None = None
        self._due: dict[str, float] = {}
        self._rounds = (
            Round("rescue", 1.0, self._rescue),
            Round("expire", 1.0, lambda session: queue.expire(session=session)),
            Round("partitions", 3600.0, lambda session: queue.make_event_partitions(session=session)),
            Round("workers", 60.0, lambda session: queue.remove_dead_workers(_DEAD_WORKER_SECONDS, session=session)),
            Round("counts", 60.0, lambda session: fold(queue, session=session)),
            *rounds,
        )

    def reconnected(self) -> None:
        """A break in our own connection: the others had it too, and have one lease from its end to renew theirs."""
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
                await asyncio.sleep(random.uniform(0.3, 0.7))
        finally:
            if self._alone is not None:
                self._alone.cancel()
                await asyncio.gather(self._alone, return_exceptions=True)

    async def run_due(self) -> None:
        for round in self._rounds:
            if time.monotonic() >= self._due.get(round.name, 0.0):
                self._due[round.name] = time.monotonic() + round.every_seconds
                try:
                    await self.run_round(round)
                except DatabaseUnavailable:
                    self.reconnected()
                except Exception:  # a round that a part has added must not stop the worker
                    log.exception("the upkeep round %r failed", round.name)

    async def run_round(self, round: Round) -> bool:
        """Run one round unless another process is at it."""
        async with self._queue.upkeep(round.name) as session:
            if session is None:
                return False
            if await round.run(session) is True:
                self._due[round.name] = 0.0
            return True

    async def _rescue(self, session: Session) -> None:
        if self._is_cut_off:
            self._is_cut_off = False
            self._no_rescue_until = time.monotonic() + self._queue.settings.lease_seconds
        if time.monotonic() < self._no_rescue_until:
            return
        for rescued in await self._queue.rescue(session=session):
            self._counts.note(rescued)
            if rescued.status is JobStatus.QUEUED:
                # They come back spread over this time, and whoever rescued them is idle as likely as not.
                asyncio.get_running_loop().call_later(self._queue.settings.rescue_jitter_seconds, self._wake)
            if rescued.was_running:
                extra = {"job_id": str(rescued.id)}
                log.warning("job %s was rescued from a dead worker: %s", rescued.id, rescued.status, extra=extra)

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
                    for rescued in await self._queue.rescue(dead=[(id, claim)], limit=1):
                        self._counts.note(rescued)
        except DatabaseError as error:
            log.debug("suspects wait: %s", error)

    async def _report_unknown_types(self) -> None:
        for job_type, n in (await self._queue.unknown_types(self._operations.names())).items():
            log.warning("%d due jobs of type %r wait for a worker that knows it; this one does not", n, job_type)
