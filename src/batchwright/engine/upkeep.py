"""Rounds that keep the queue healthy: each runs once per period, in one of all workers.

A row says when a round is due, and is locked while the round runs. There is no leader election: the worker that last
ran the rescue keeps all rounds; the others check now and then, and take over rounds that are late.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from batchwright.db.database import Database, Session
from batchwright.db.statements import statements
from batchwright.engine.metrics import WORKER_METRICS, fold
from batchwright.engine.operation import Operations
from batchwright.engine.queue import Queue, Rescued
from batchwright.engine.samples import EVERY_SECONDS as SAMPLE_SECONDS
from batchwright.engine.samples import Samples
from batchwright.engine.worker.processes import Processes
from batchwright.engine.workers import Workers
from batchwright.errors import DatabaseBusy, DatabaseError, DatabaseUnavailable
from batchwright.telemetry.metrics import Metric

SQL = statements(__package__, "parts.sql", "upkeep.sql")
log = logging.getLogger(__name__)

_DEAD_WORKER_SECONDS = 300.0
_SUSPECTS_MAX = 100
_PAUSE_SECONDS_MIN = 0.3
_PAUSE_SECONDS_MAX = 0.7
_WATCH_SECONDS = 3.0
_PATIENCE_SECONDS = 1.0
"""How late a round must be before a worker that is not its keeper takes it over."""
_ADD_SECONDS = 600.0
_WAKE_SECONDS = 0.1
_RESCUE = "rescue"

OnRescued = Callable[[Sequence[Rescued]], None]
"""Called with the rescued jobs, after the commit."""


@dataclass(frozen=True, slots=True)
class Round:
    """A periodic task that one of all processes runs; parts of Batchwright may add their own.

    A run that returns True has work left and runs again half a second later.
    """

    name: str
    every_seconds: float
    run: Callable[[Session], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one check."""

    rounds: Mapping[str, tuple[str, float]]
    """The rounds that are due soon, and the rescue: who ran each last, and how many seconds late it is."""
    due_queues: Collection[str]
    """Queues that have due jobs and are not paused."""
    has_suspects: bool


def wake_when_due(rescued: Iterable[Rescued], wake: Callable[[set[str]], None]) -> None:
    """Have rescued jobs claimed as soon as they are due, not at the next poll. Call this after the commit.

    They become due spread over some time; those within a tenth of a second share one wake-up.
    """
    moments: defaultdict[int, set[str]] = defaultdict(set)
    for one in rescued:
        if one.due_seconds is not None:
            moments[math.ceil(one.due_seconds / _WAKE_SECONDS)].add(one.queue)
    for moment, queues in moments.items():
        asyncio.get_running_loop().call_later(moment * _WAKE_SECONDS, wake, queues)


@contextlib.asynccontextmanager
async def lock_round(
    database: Database, name: str, every_seconds: float = 0.0, *, if_due: bool = False
) -> AsyncIterator[Session | None]:
    """A transaction for this round, for one process at a time; None for the others."""
    if not if_due:
        await database.ask(SQL["add_rounds"], {"names": [name], "every_seconds": [every_seconds], "keeper": ""})
    params = {"name": name, "every_seconds": every_seconds, "if_due": if_due}
    async with database.transaction() as session:
        yield session if await database.ask(SQL["lock_round"], params, session) else None


async def make_event_partitions(database: Database, *, session: Session | None = None) -> int:
    """Create the partitions of the coming weeks; returns how many were missing."""
    ((made,),) = await database.ask(SQL["make_event_partitions"], {}, session)
    return int(made)


class Upkeep:
    """Rescue, expiry, partitions and dead workers; and, in each worker, suspects that must run alone.

    `name` identifies this process among those of the same database.
    """

    def __init__(
        self,
        queue: Queue,
        processes: Processes,
        operations: Operations,
        rounds: Sequence[Round] = (),
        *,
        name: str | None = None,
        queues: Sequence[str] | None = None,
        metrics: Sequence[Metric] = WORKER_METRICS,
        on_rescued: OnRescued = lambda rescued: None,
    ) -> None:
        self._queue = queue
        self._database = queue.database
        self._name = name or uuid.uuid4().hex
        self._processes = processes
        self._operations = operations
        self._queues = queues
        self._on_rescued = on_rescued
        self.pace = 1.0
        """How many times longer we wait between two checks, because other workers check too."""
        self._is_cut_off = False
        self._no_rescue_until = 0.0
        self._rescued: list[Rescued] = []
        """Found by a round that is not committed yet."""
        self._alone: asyncio.Task[None] | None = None
        self._pause = 0.0
        self._add_at = 0.0
        self._news = asyncio.Event()
        self._seen: Seen | None = None
        """What the worker saw when it looked for jobs."""
        workers, samples = Workers(queue.database), Samples(queue.database)
        self._rounds = (
            Round(_RESCUE, 0.5, self._rescue),
            Round("expire", 1.0, lambda session: queue.expire(session=session)),
            Round("partitions", 3600.0, lambda session: make_event_partitions(queue.database, session=session)),
            Round("workers", 60.0, lambda session: workers.remove_dead(_DEAD_WORKER_SECONDS, session=session)),
            Round("counts", 60.0, lambda session: fold(queue.database, session=session)),
            Round("samples", SAMPLE_SECONDS, lambda session: samples.take(metrics, session=session)),
            *rounds,
        )

    def note_outage(self) -> None:
        """Our own connection broke. Assume that all did: after the outage, the other workers have one lease to renew.

        A slow database does not count as an outage: all are still connected, and as long as it stayed slow, no job of a
        dead worker would be rescued.
        """
        self._is_cut_off = True

    def _note_contact(self) -> None:
        """The database answers, so an outage has ended. This also applies to processes that only check."""
        if self._is_cut_off:
            self._is_cut_off = False
            self._no_rescue_until = time.monotonic() + self._queue.settings.lease_seconds

    async def run(self) -> None:
        """Runs until cancelled."""
        unknown_at = time.monotonic() + 5
        try:
            while True:
                seen = await self.run_due()
                if seen is not None and seen.has_suspects:
                    self._start_isolation()
                if time.monotonic() >= unknown_at:
                    unknown_at = time.monotonic() + 60
                    with contextlib.suppress(DatabaseError):
                        await self._report_unknown_types()
                await self._wait_for_news()
        finally:
            if self._alone is not None:
                self._alone.cancel()
                await asyncio.gather(self._alone, return_exceptions=True)

    async def look(self) -> Seen:
        """Look for due jobs, for the caller, and for late rounds, for us."""
        seen = self._seen = await self._look()
        self._news.set()
        return seen

    async def _wait_for_news(self) -> None:
        """Wait until something was seen, or it is time to check again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause):
                await self._news.wait()

    def _start_isolation(self) -> None:
        if self._processes.can_isolate and (self._alone is None or self._alone.done()):
            self._alone = asyncio.create_task(self.isolate_suspects())

    async def run_due(self) -> Seen | None:
        """Run the rounds that are due and ours, or so late that their keeper must be gone."""
        self._news.clear()
        seen, self._seen = self._seen, None
        with self._log_failure("look for rounds"):
            seen = seen or await self._look()
        if seen is None:
            self._pause = _PAUSE_SECONDS_MAX
            return None
        await self._run_chosen(self._choose(seen))
        return seen

    async def _run_chosen(self, chosen: Collection[str]) -> None:
        """Begin with the rescue. If another process runs that, leave all other rounds to it as well.

        If every worker of a large fleet tried every late round, a slow database would become slower.
        """
        for round in self._rounds:
            has_run = False
            if round.name in chosen:
                with self._log_failure(f"round {round.name!r}"):
                    has_run = await self._run_due(round)
                if round.name == _RESCUE and not has_run:
                    return

    async def run_all(self) -> None:
        """Run every round, due or not, unless another process is running it."""
        for round in self._rounds:
            with self._log_failure(f"round {round.name!r}"):
                await self.run_round(round)

    async def run_round(self, round: Round, *, if_due: bool = False) -> bool:
        """Run one round unless another process is running it."""
        database, every_seconds = self._database, round.every_seconds
        async with lock_round(database, round.name, every_seconds, if_due=if_due) as session:
            if session is None:
                return False
            has_more = await round.run(session) is True
            await self._end(round, 0.0 if has_more else every_seconds, session)
        self._announce()
        return True

    async def _run_due(self, round: Round) -> bool:
        try:
            return await self.run_round(round, if_due=True)
        except Exception:
            with contextlib.suppress(DatabaseError):  # it is repeated after its period, not at once by every worker
                await self._end(round, round.every_seconds)
            raise

    @contextlib.contextmanager
    def _log_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except DatabaseBusy as error:
            log.warning("the upkeep must be repeated (%s): %s", what, error)
        except DatabaseUnavailable:
            self.note_outage()
        except Exception:  # a round added by a part must not stop the worker
            log.exception("the upkeep failed (%s)", what)

    def _choose(self, seen: Seen) -> Collection[str]:
        """The rounds to run now; also sets when to check again. A process that is not the keeper runs one at a time."""
        keeper, rescue_late = seen.rounds[_RESCUE]
        late = {name: seconds for name, (_, seconds) in seen.rounds.items() if seconds >= 0}
        if keeper == self._name or rescue_late >= _PATIENCE_SECONDS:
            first = -max(seconds for _, seconds in seen.rounds.values())
            self._pause = max(_PAUSE_SECONDS_MIN, min(first, random.uniform(_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX)))
            return late
        self._pause = random.uniform(0.75, 1.0) * _WATCH_SECONDS * self.pace
        stale = [name for name, seconds in late.items() if seconds >= _PATIENCE_SECONDS]
        return random.sample(stale, k=min(1, len(stale)))

    async def _look(self) -> Seen:
        """First make sure that all rounds have rows: a failover may have lost some, others may lack our parts."""
        if time.monotonic() >= self._add_at:
            await self._add_rounds()
        seen = await self._look_once()
        if _RESCUE not in seen.rounds:
            await self._add_rounds()
            seen = await self._look_once()
        return seen

    async def _add_rounds(self) -> None:
        params = {
            "names": [round.name for round in self._rounds],
            "every_seconds": [round.every_seconds for round in self._rounds],
            "keeper": self._name,
        }
        await self._database.ask(SQL["add_rounds"], params)
        self._add_at = time.monotonic() + _ADD_SECONDS

    async def _look_once(self) -> Seen:
        rounds: dict[str, tuple[str, float]] = {}
        due_queues, has_suspects = set[str](), False
        for kind, name, keeper, late in await self._database.ask(SQL["look"], {"soon_seconds": _WATCH_SECONDS}):
            match kind:
                case "round":
                    rounds[name] = (keeper, late)
                case "queue":
                    due_queues.add(name)
                case _:
                    has_suspects = True
        self._note_contact()
        return Seen(rounds, due_queues, has_suspects)

    async def _end(self, round: Round, seconds: float, session: Session | None = None) -> None:
        params = {"name": round.name, "every_seconds": seconds, "keeper": self._name}
        await self._database.ask(SQL["end_round"], params, session)

    def _announce(self) -> None:
        """Report the rescued jobs, after the commit."""
        rescued, self._rescued = self._rescued, []
        self._on_rescued(rescued)
        for one in rescued:
            if one.was_running:
                extra = {"job_id": str(one.id)}
                log.warning("job %s was rescued from a dead worker: %s", one.id, one.status, extra=extra)

    async def _rescue(self, session: Session) -> None:
        self._rescued = []  # jobs of a round whose commit failed
        self._note_contact()
        if time.monotonic() < self._no_rescue_until:
            return
        self._rescued = await self._queue.rescue(session=session)

    async def isolate_suspects(self) -> None:
        """Run a job whose worker died twice in a separate process, so that no other job dies with it.

        Choose it at random: if all workers took the first, they would start processes for the same job.
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
