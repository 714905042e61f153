"""The worker: claims the jobs that it has capacity for, runs and settles them, and releases the rest when it must stop.

claim ──▶ start ──▶ perform ──▶ conclude ──▶ settle ──▶ forget
                      ▲
    interrupt ────────┘   cancelled · lost · timeout · stop
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from batchwright.db.database import Blocking, Database, Pool, complete
from batchwright.db.doorbell import Doorbell, Ring, listen
from batchwright.db.retry import retry_unavailable
from batchwright.db.sessions import Route, describe_routes
from batchwright.engine.catalog import Catalog
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.metrics import CountsWriter, WorkerCounts
from batchwright.engine.named_queues import NamedQueues
from batchwright.engine.operation import Operations
from batchwright.engine.queue import Queue, Rescued
from batchwright.engine.upkeep import Upkeep, wake_when_due
from batchwright.engine.worker.duty import Duties, Site, WorkerPart, label_limits_of, metrics_of
from batchwright.engine.worker.executor import Executor
from batchwright.engine.worker.lanes import Lanes, LanesOnDemand
from batchwright.engine.worker.lease import Holder, Lease, margin
from batchwright.engine.worker.processes import ChildProgram, Processes
from batchwright.engine.worker.runner import Runner
from batchwright.engine.workers import Workers
from batchwright.errors import (
    ConfigurationError,
    DatabaseBusy,
    DatabaseError,
    DatabaseUnavailable,
    WorkerBroken,
)
from batchwright.states import JobStatus

log = logging.getLogger(__name__)

_RELEASE_SECONDS_MAX = 600.0
_ON_DEMAND_MAX = 64
LISTENERS_MAX = 64
"""Among equal workers, about this many listen to the doorbell."""
POLL_SECONDS_LIMIT = 10.0
POLLERS_MAX = 32
"""Up to this many equal workers poll at the full rate; in a larger fleet each polls less often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How much a worker process does at once, and how it polls and stops."""

    concurrency: int = 20
    """Maximum number of jobs that one process runs at the same time."""
    queues: tuple[str, ...] | None = None
    """Queues to serve; unset, all queues."""
    queue_limits: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of jobs of one queue that one process runs at the same time."""
    processes_max: int = 0
    """Processes for `cpu=True` operations; 0 means one per core."""
    poll_seconds_min: float = 0.05
    """Interval of polling while there is work."""
    poll_seconds_max: float = 2.0
    """Interval of polling when idle; jobs are found after this time even if no doorbell rang. In a fleet of more than
    32 equal workers, each polls less often, down to every 10 seconds; together they poll more often."""
    run_background_poller: bool = True
    """Whether `batchwright up` runs workers."""
    stop_grace_seconds: float = 25.0
    """After SIGTERM, running jobs may continue for this time; then they are returned to the queue."""
    health_port: int | None = None
    """Port of a worker process for /healthz, /readyz and /metrics; each further process uses the next port, and 0 picks
    a free one. Unset, a worker listens on no port."""
    health_host: str = "127.0.0.1"
    """Address for that port. Its pages need no key. In a pod, where the kubelet must reach them, use 0.0.0.0."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}; it must be at least 1")
        if not 0 < self.poll_seconds_min <= self.poll_seconds_max <= POLL_SECONDS_LIMIT:
            raise ConfigurationError(
                f"poll_seconds_min is {self.poll_seconds_min:g} and poll_seconds_max is {self.poll_seconds_max:g}; "
                f"use 0 < poll_seconds_min <= poll_seconds_max <= {POLL_SECONDS_LIMIT:g}"
            )
        if self.health_port is not None and not 0 <= self.health_port <= 65535:
            raise ConfigurationError(f"health_port is {self.health_port}; use 0 to 65535, or leave it out")


def host_name() -> str:
    """The pod's name in Kubernetes, otherwise the host's."""
    return os.environ.get("HOSTNAME") or socket.gethostname()


def worker_id() -> str:
    """Pod or host, process, and a boot id, because names and pids are reused."""
    return f"{host_name()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


def listens(worker: str, peers: int) -> bool:
    """Whether this worker listens to the doorbell, given the number of equal workers.

    A ring wakes all listeners, and each of them claims: with a thousand listeners, one job would cost a thousand
    claims. In a large fleet some worker polls every few milliseconds anyway, so no doorbell is needed.
    """
    return crc32(worker.encode()) * peers < LISTENERS_MAX << 32


def fleet_pace(peers: int, poll_seconds_max: float) -> float:
    """How many times longer an idle worker waits between two polls, given the number of equal workers.

    Together they poll as often as POLLERS_MAX workers do, but each at least every ten seconds: jobs that become due
    without a ring wait no longer in a large fleet, and the fleet costs the database less.
    """
    return max(1.0, min(peers / POLLERS_MAX, POLL_SECONDS_LIMIT / poll_seconds_max))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program that a worker belongs to."""

    child: ChildProgram | None = None
    """How to start child processes; without it there are no `cpu=True` operations and no isolation."""
    revive: Callable[[], object] | None = None
    """Restarts the database, if it is our embedded one."""
    version: str = "0"


class Worker:
    """Runs operations as durable jobs until `stop()`."""

    def __init__(
        self,
        pool: Pool,
        operations: Operations,
        *,
        parts: Sequence[WorkerPart] = (),
        program: Program | None = None,
        queue: Queue | None = None,
        settings: WorkerSettings | None = None,
    ) -> None:
        self.id = worker_id()
        self.settings = settings or WorkerSettings()
        self.queue = queue or Queue(Database(pool))
        self.lease: Lease | None = None
        self.started = asyncio.Event()
        self.counts = WorkerCounts(metrics_of(parts), label_limits_of(parts))
        self._pool = pool
        self._workers = Workers(self.queue.database)
        self._named_queues = NamedQueues(self.queue.database)
        self._operations = operations
        self._program = program = program or Program()
        self._doorbell = Doorbell(pool)
        site = Site(
            counts=self.counts,
            queue=self.queue,
            queues=self.settings.queues,
            ring=self._doorbell.ring,
            worker=self.id,
        )
        self._duties = Duties(parts, site, [pool])
        demand = self._duties.demand
        self._claims_under_way = 0
        self._claims_in_doubt = 0
        self._claim_generation = 0
        self._has_backlog = False
        self._demand = demand
        self._lanes = Lanes(self.settings.queues, self.settings.queue_limits, besides=demand)
        self._lanes_on_demand = None if demand is None else LanesOnDemand(demand)
        self._peers = 1
        self._peers_changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._out_of_time = asyncio.Event()
        self._processes = Processes(program.child, self.settings.processes_max or os.cpu_count() or 1)
        self._executor = Executor(self._processes, self.settings.concurrency)
        self._runner = Runner(
            site,
            operations,
            self._executor,
            doorbell=self._doorbell,
            services=self._duties.service,
            on_slot_free=self._note_free_slot,
            on_rescued=self._note_rescued,
        )
        self._counts_writer = CountsWriter(self.queue.database, self.id, self.counts)
        self._upkeep = Upkeep(
            self.queue,
            self._processes,
            operations,
            self._duties.rounds,
            name=self.id,
            queues=self.settings.queues,
            metrics=self.counts.metrics,
            on_rescued=self._note_rescued,
        )
        if demand is not None:
            demand.listen(self._wake.set)

    # Starting and stopping --------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Work until `stop()`; returns False if threads of operations did not end.

        A worker that finds itself broken stops by itself, releases its jobs, and then raises WorkerBroken.
        """
        route = await self._pool.explore_leases()
        await self.register()
        self._runner.open()
        lease = self.lease = self._start_lease(route)
        helpers = [asyncio.create_task(self._upkeep.run()), asyncio.create_task(self._counts_writer.run())]
        if route.keeps_sessions:
            helpers.append(asyncio.create_task(self._listen_in_turn(route)))
        claiming = asyncio.create_task(self._claim_until_stopped())
        self.started.set()
        log.info("worker %s runs %s", self.id, ", ".join(sorted(self._operations.names())) or "no operations")
        if not self._pool.route.keeps_sessions:
            log.info("%s", describe_routes(self._pool.route, route, self.settings.poll_seconds_max))
        try:
            await _wait_for_first(claiming, *helpers)
        finally:
            self._stopping.set()
            await _cancel(*helpers, claiming)
            clean = await self._wind_down(lease)
        if self.broken is not None:
            raise WorkerBroken(f"this worker is broken and must be restarted: {self.broken}")
        return clean

    async def register(self) -> None:
        """Register this worker and publish its operations; other processes check their enqueues against them."""
        await Catalog(self.queue.database, self._operations).publish(self.id)
        await self._workers.register(**self._columns())

    def _columns(self) -> dict[str, Any]:
        host, pid, _ = self.id.rsplit(":", 2)
        queues = list(self.settings.queues) if self.settings.queues is not None else None
        return {
            "id": self.id,
            "host": host,
            "pid": int(pid),
            "version": self._program.version,
            "queues": queues,
            "operations": self._operations.names(),
            "concurrency": self.settings.concurrency,
            "on_demand_types": None if self._demand is None else list(self._demand.operations),
            "on_demand_queues": None if self._demand is None else self._demand.queues(),
        }

    def stop(self) -> None:
        """Claim no more jobs; running ones may continue for the grace period, then they are released."""
        self._stopping.set()
        self._wake.set()
        self._runner.say_stopping()

    def hurry(self, grace_seconds: float) -> None:
        """Stop, and release running jobs after this grace period, even if a longer one has begun."""
        self.stop()
        asyncio.get_running_loop().call_later(grace_seconds, self._out_of_time.set)

    async def run_once(self, *, limit: int | None = None) -> int:
        """Claim one round of jobs, run them to their end and settle them; returns how many there were."""
        if self._executor.broken is not None:
            raise WorkerBroken(self._executor.broken)
        self._runner.open()
        self._scan_soon()
        claimed = await self._claim(min(limit or self.settings.concurrency, self._slots_free()))
        claimed += await self._claim_on_demand()
        await self._runner.wait_until_empty()
        return claimed

    async def run_alone(self, id: JobId, on_claim: Callable[[Claim], None]) -> None:
        """Claim one suspect job and run it, with its own lease, until it ends or `stop()` is called."""
        self._runner.open()
        lease = self._start_lease(await self._pool.explore_leases())
        try:
            if await self._claim_suspect(id, on_claim):
                ended, stopped = map(asyncio.create_task, (self._runner.wait_until_empty(), self._stopping.wait()))
                await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
        finally:
            await self._wind_down(lease)
            await self._release_unknown()

    async def _release_unknown(self) -> None:
        """Release jobs that we hold according to the database, although we stopped them or never received them.

        A rescue would count as a death, and a job that runs alone is parked for that.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS_MAX):
                held = await retry_unavailable(lambda: self.queue.holdings(self.id))
                left = [key for key, status in held.items() if status is JobStatus.RUNNING]
                await retry_unavailable(lambda: self.queue.release(left, self.id, "the database was unavailable"))

    async def close(self) -> None:
        """End the helpers of a worker that was used with `run_once`."""
        await self._runner.wait_until_empty()
        await self._end_helpers()

    async def _wind_down(self, lease: Lease) -> bool:
        """Let jobs end within the grace period, interrupt the rest, and finally release what is left."""
        waits = [asyncio.create_task(wait()) for wait in (self._runner.wait_until_empty, self._out_of_time.wait)]
        await asyncio.wait(waits, timeout=self.settings.stop_grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(*waits)
        self._runner.interrupt_all("stop")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._runner.wait_until_empty(), 2.0)
        await asyncio.to_thread(lease.close)
        left = list(self._runner.held)
        with contextlib.suppress(DatabaseError):
            await self.queue.release(left, self.id, "the worker stopped")
            await self._workers.leave(self.id)
        await self._end_helpers()
        return not left and not self.has_abandoned_threads

    async def _end_helpers(self) -> None:
        await self._counts_writer.write_last()
        await self._runner.close()
        await self._duties.close()

    def _start_lease(self, route: Route) -> Lease:
        loop = asyncio.get_running_loop()
        database = Blocking(self._pool.settings, route.url, prepares=route.prepares)

        def beat(queue: Queue) -> None:
            workers = Workers(queue.database)
            beating = workers.heartbeat(
                self.id, running=self._slots_used(), stopping=self._stopping.is_set(), broken=self.broken
            )
            if (peers := complete(beating)) is None:
                complete(workers.register(**self._columns()))
            else:
                loop.call_soon_threadsafe(self._note_peers, peers)

        holder = Holder(
            held=self._runner.held.copy,
            claims_under_way=lambda: (self._claims_under_way, self._claim_generation),
            claims_in_doubt=None if self._program.revive is not None else lambda: self._claims_in_doubt,
            on_news=lambda news: loop.call_soon_threadsafe(self._runner.hear, news),
            beat=beat,
        )
        queue = Queue(Database(database), self.queue.settings)
        lease = Lease(queue, self.id, holder, close_database=database.close, revive=self._program.revive)
        lease.start()
        return lease

    # Claim ------------------------------------------------------------------------------------------------------

    async def _claim_until_stopped(self) -> None:
        pause, is_called = self.settings.poll_seconds_min, True
        while not self._stopping.is_set():
            if self.broken is not None:
                log.error("this worker is broken; it releases its jobs and stops: %s", self.broken)
                self.stop()
                return
            self._wake.clear()
            claimed, wanted = 0, self._slots_free()
            try:
                if is_called or await self._has_due():
                    if wanted:
                        claimed = await self._claim(wanted)
                    if await self._claim_on_demand():
                        self._has_backlog = True  # there may be more, for which there was no capacity yet
            except DatabaseUnavailable as error:
                self._report_outage(error)
            except DatabaseError:
                log.exception("claiming failed")
            if claimed == 0 or claimed < wanted:
                pause = self.settings.poll_seconds_min if claimed else min(self._poll_seconds, pause * 2)
                is_called = await self._wait_for_wake(pause)
            elif not self._slots_free():
                is_called = await self._wait_for_wake(self._poll_seconds)

    @property
    def _poll_seconds(self) -> float:
        return self.settings.poll_seconds_max * self._upkeep.pace

    async def _wait_for_wake(self, seconds: float) -> bool:
        """Wait until there may be something to claim (True), but no longer than the interval of polling (False)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.75, 1.0)):
                return await self._wake.wait()
        return False

    async def _has_due(self) -> bool:
        """Whether there is something to claim, although no doorbell rang. This is the only query of an idle worker."""
        seen = await self._upkeep.look()
        return bool(self._runner.freed_keys) or any(map(self._serves, seen.due_queues))

    def _report_outage(self, error: DatabaseUnavailable) -> None:
        if isinstance(error, DatabaseBusy):
            log.warning("the database is slow: %s", error)
        else:
            log.warning("the database is unavailable: %s", error)
            self._upkeep.note_outage()
        self._scan_soon()

    def _scan_soon(self) -> None:
        self._lanes.scan_soon()
        if self._lanes_on_demand is not None:
            self._lanes_on_demand.scan_soon()

    @property
    def jobs(self) -> int:
        """Number of jobs that it holds."""
        return len(self._runner.held)

    @property
    def idle_because(self) -> str | None:
        """Why it claims nothing now."""
        if self._stopping.is_set():
            return "this worker is stopping"
        return None if self.started.is_set() else "this worker is starting"

    @property
    def broken(self) -> str | None:
        """Why this worker claims no more jobs; it then releases those that it has, and stops."""
        return self._executor.broken or (None if self._demand is None else self._demand.broken)

    @property
    def has_abandoned_threads(self) -> bool:
        """Whether threads of operations still run past their time limits; end the process without waiting for them."""
        return self._executor.has_abandoned

    def _slots_free(self) -> int:
        """A job leaves its slot when its operation ends, but no more settles than slots may be in progress."""
        if self.broken is not None:
            return 0
        over = self._count_own(self._runner.over_per_queue)
        return self.settings.concurrency - self._slots_used() - max(0, over - self.settings.concurrency)

    def _slots_used(self) -> int:
        """Running jobs. The lease thread calls this too, while jobs start and end."""
        return self._count_own(self._runner.per_queue) - self._count_own(self._runner.over_per_queue)

    def _count_own(self, per_queue: Mapping[str, int]) -> int:
        """Jobs that were claimed on demand use no slot."""
        return sum(n for queue, n in list(per_queue.items()) if self._demand is None or not self._demand.serves(queue))

    async def _claim(self, slots: int) -> int:
        """One round of claims for the worker's own slots."""
        claimed = await self._claim_from(self._lanes, slots)
        self._has_backlog = claimed == slots
        return claimed

    async def _claim_on_demand(self) -> int:
        """One round of claims for the part that takes jobs by its own capacity."""
        lanes = self._lanes_on_demand
        return 0 if lanes is None else await self._claim_from(lanes, _ON_DEMAND_MAX)

    async def _claim_from(self, known: Lanes, slots: int) -> int:
        """A full scan also reads which queues exist and which are paused."""
        began = time.monotonic()
        if known.scan_is_due:
            known.begin_scan()
            known.know(await self._named_queues.all())
        lanes = known.open(slots, self._runner.per_queue)
        if not lanes:
            return 0
        freed: set[tuple[str, str]] = set()
        if known is self._lanes:
            freed, self._runner.freed_keys = self._runner.freed_keys, freed
        try:
            with self._claim_under_way():
                asked, committing = time.monotonic(), self._runner.committing_seconds
                claimed = await self.queue.claim(self.id, lanes, self._startable_types(), slots, freed_keys=freed)
                self._start(claimed.jobs, asked)
        except BaseException:
            self._runner.freed_keys |= freed
            raise
        if claimed.without_keys:
            self._runner.freed_keys |= freed
        known.move_on(lanes, claimed, slots, time.monotonic() - began, committing_seconds=committing)
        return len(claimed.jobs)

    def _start(self, claims: Sequence[Claim], asked: float) -> bool:
        """Start jobs whose lease counts from `asked`. If it is about to expire, the lease thread releases them."""
        lease_seconds = self.queue.settings.lease_seconds
        if claims and time.monotonic() - asked >= lease_seconds - margin(lease_seconds):
            log.warning("the answer to the claim of %d jobs arrived after their leases had expired", len(claims))
            return False
        for claim in claims:
            self._runner.start(claim, asked + lease_seconds)
        self.counts.note_claimed(claims)
        return True

    @contextlib.contextmanager
    def _claim_under_way(self) -> Iterator[None]:
        """Between a claim and the start of its jobs, the lease thread must not treat these jobs as forgotten."""
        self._claims_under_way += 1
        try:
            yield
        except BaseException:
            self._claims_in_doubt += 1
            raise
        finally:
            self._claims_under_way -= 1
            self._claim_generation += 1

    async def _claim_suspect(self, id: JobId, on_claim: Callable[[Claim], None]) -> bool:
        with self._claim_under_way():
            asked = time.monotonic()
            claim = await self.queue.claim_job(self.id, id, self._operations.names(), suspect=True)
            if claim is None:
                return False
            on_claim(claim)
            return self._start([claim], asked)

    def _startable_types(self) -> list[str]:
        """Operations that could start now: `cpu=True` operations only while a process is free."""
        names = self._operations.names()
        if self._processes.free > 0:
            return names
        return [name for name in names if (known := self._operations.get(name)) and known.kind != "process"]

    def _note_free_slot(self) -> None:
        """Claim now if the last claim left jobs behind, a key became free, or a parent may be due."""
        if self._has_backlog or self._runner.freed_keys or self._runner.parents_left:
            self._runner.parents_left = False
            self._wake.set()

    def _note_rescued(self, rescued: Sequence[Rescued]) -> None:
        self.counts.note_rescued(rescued)
        wake_when_due(rescued, self._claim_returned)

    def _claim_returned(self, queues: set[str]) -> None:
        """Rescued jobs of these queues are due. We may have no capacity for them, so tell the other workers too.

        The rescue may have taken so long to commit that the jobs are before our watermarks by now.
        """
        self._scan_soon()
        self._wake.set()
        if not self._stopping.is_set():
            self._doorbell.ring(queues)

    async def _listen_in_turn(self, route: Route) -> None:
        """Listen while we are among the listeners. In a large fleet that changes with its size."""
        while True:
            is_listener = listens(self.id, self._peers)
            async with asyncio.TaskGroup() as group:
                listening = (
                    group.create_task(listen(self._pool.settings, route.url, self._hear_ring)) if is_listener else None
                )
                while listens(self.id, self._peers) == is_listener:
                    self._peers_changed.clear()
                    await self._peers_changed.wait()
                if listening is not None:
                    listening.cancel()

    def _note_peers(self, peers: int) -> None:
        self._peers = peers
        self._upkeep.pace = fleet_pace(peers, self.settings.poll_seconds_max)
        self._peers_changed.set()

    def _hear_ring(self, ring: Ring) -> None:
        for lanes in (self._lanes, self._lanes_on_demand):
            if lanes is not None and lanes.serves(ring.queue):
                if ring.since is not None:
                    lanes.look_back(ring.queue, ring.since)
                self._wake.set()

    def _serves(self, queue: str) -> bool:
        on_demand = self._lanes_on_demand
        return self._lanes.serves(queue) or (on_demand is not None and on_demand.serves(queue))


async def _wait_for_first(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one of them ends; an error in any of them is raised here."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
