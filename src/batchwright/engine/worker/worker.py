"""The worker: claims what it has room for, runs it, settles it, and gives everything back when it must stop.

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

from batchwright.db.database import Blocking, Database, Pool, complete
from batchwright.db.doorbell import Doorbell, listen
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

_GIVE_BACK_SECONDS_MAX = 600.0
_ON_DEMAND_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How much a worker process does at once, and how patient it is."""

    concurrency: int = 20
    """Jobs that one process runs at the same time."""
    queues: tuple[str, ...] | None = None
    """Queues to serve; unset, all of them."""
    queue_limits: Mapping[str, int] = field(default_factory=dict)
    """Jobs of one queue that one process runs at the same time."""
    processes_max: int = 0
    """Processes for `cpu=True` operations; 0 means one per core."""
    poll_seconds_min: float = 0.05
    """The safety poller's pace while work is flowing."""
    poll_seconds_max: float = 2.0
    """The safety poller's pace when idle; jobs are found after this time even if no doorbell rang."""
    run_background_poller: bool = True
    """Whether `batchwright up` runs a worker at all."""
    stop_grace_seconds: float = 25.0
    """After SIGTERM, running jobs may go on so long; then they are given back."""
    health_port: int | None = None
    """The port of a worker process's /healthz, /readyz and /metrics; each further process has the next one, and 0 takes
    a free one. Unset, a worker listens nowhere."""
    health_host: str = "127.0.0.1"
    """The address of that port. Its pages need no key: in a pod, where the kubelet must reach them, write 0.0.0.0."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}; it must be at least 1")
        if not 0 < self.poll_seconds_min <= self.poll_seconds_max <= 10:
            raise ConfigurationError("poll_seconds_min and poll_seconds_max must rise from above 0 to at most 10")
        if self.health_port is not None and not 0 <= self.health_port <= 65535:
            raise ConfigurationError(f"health_port is {self.health_port}; it goes from 0 to 65535, or is left out")


def host_name() -> str:
    """The pod's name in Kubernetes, else the machine's."""
    return os.environ.get("HOSTNAME") or socket.gethostname()


def worker_id() -> str:
    """Pod or host, process, and a boot id, because names and pids are reused."""
    return f"{host_name()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program that a worker is a part of."""

    child: ChildProgram | None = None
    """How to start child processes; without it there are no `cpu=True` operations and no isolation."""
    revive: Callable[[], object] | None = None
    """Starts the database again, if that is ours."""
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
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._out_of_time = asyncio.Event()
        self._processes = Processes(program.child, self.settings.processes_max or os.cpu_count() or 1)
        self._runner = Runner(
            site,
            operations,
            Executor(self._processes, self.settings.concurrency),
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
            on_rescued=self._note_rescued,
        )
        if demand is not None:
            demand.listen(self._wake.set)

    # Life -------------------------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Work until `stop()`; answers False when threads of operations would not end.

        A worker that finds itself broken stops by itself, and when it has given its jobs back raises WorkerBroken.
        """
        route = await self._pool.explore_leases()
        await self.register()
        self._runner.open()
        lease = self.lease = self._start_lease(route)
        helpers = [asyncio.create_task(self._upkeep.run()), asyncio.create_task(self._counts_writer.run())]
        if route.keeps_sessions:
            helpers.append(asyncio.create_task(listen(self._pool.settings, route.url, self._hear_ring)))
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
            raise WorkerBroken(f"this worker is broken and must be started anew: {self.broken}")
        return clean

    async def register(self) -> None:
        """Make this worker and its operations known; an enqueue elsewhere is checked against them."""
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
        """Claim nothing more; running jobs get the grace, then they are given back."""
        self._stopping.set()
        self._wake.set()
        self._runner.say_stopping()

    def hurry(self, grace_seconds: float) -> None:
        """Stop, and give back after this grace what is running then, also if a longer one has begun."""
        self.stop()
        asyncio.get_running_loop().call_later(grace_seconds, self._out_of_time.set)

    async def run_once(self, *, limit: int | None = None) -> int:
        """Claim one round, run it to its end and settle it; answers how many jobs that were."""
        self._runner.open()
        self._scan_soon()
        claimed = await self._claim(min(limit or self.settings.concurrency, self._slots_free()))
        claimed += await self._claim_on_demand()
        await self._runner.wait_until_empty()
        return claimed

    async def run_alone(self, id: JobId, on_claim: Callable[[Claim], None]) -> None:
        """Claim one suspect job and run it, with a lease of its own, until it ends or `stop()` is called."""
        self._runner.open()
        lease = self._start_lease(await self._pool.explore_leases())
        try:
            if await self._claim_suspect(id, on_claim):
                ended, stopped = map(asyncio.create_task, (self._runner.wait_until_empty(), self._stopping.wait()))
                await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
        finally:
            await self._wind_down(lease)
            await self._give_back()

    async def _give_back(self) -> None:
        """Release what the database says that we hold, although we stopped it or never heard of it.

        Left to the rescue it would count as a death, and a job that runs alone is parked for that.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_SECONDS_MAX):
                held = await retry_unavailable(lambda: self.queue.holdings(self.id))
                left = [key for key, status in held.items() if status is JobStatus.RUNNING]
                await retry_unavailable(lambda: self.queue.release(left, self.id, "the database was away"))

    async def close(self) -> None:
        """End the helpers of a worker that was used by `run_once`."""
        await self._runner.wait_until_empty()
        await self._end_helpers()

    async def _wind_down(self, lease: Lease) -> bool:
        """Let jobs end within the grace, interrupt the rest, and release what is left as the last act."""
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
        return not left

    async def _end_helpers(self) -> None:
        await self._counts_writer.write_last()
        await self._runner.close()
        await self._duties.close()

    def _start_lease(self, route: Route) -> Lease:
        loop = asyncio.get_running_loop()
        database = Blocking(self._pool.settings, route.url, prepares=route.prepares)

        def beat(queue: Queue) -> None:
            workers = Workers(queue.database)
            is_known = workers.heartbeat(
                self.id, running=self._slots_used(), stopping=self._stopping.is_set(), broken=self.broken
            )
            if not complete(is_known):
                complete(workers.register(**self._columns()))

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
                log.error("this worker is broken: it gives its jobs back and leaves: %s", self.broken)
                self.stop()
                return
            self._wake.clear()
            claimed, wanted = 0, self._slots_free()
            try:
                if is_called or await self._has_due():
                    if wanted:
                        claimed = await self._claim(wanted)
                    if await self._claim_on_demand():
                        self._has_backlog = True  # there may be more, for which there was no room yet
            except DatabaseUnavailable as error:
                self._report_outage(error)
            except DatabaseError:
                log.exception("claiming failed")
            if claimed == 0 or claimed < wanted:
                pause = self.settings.poll_seconds_min if claimed else min(self.settings.poll_seconds_max, pause * 2)
                is_called = await self._rest(pause)
            elif not self._slots_free():
                is_called = await self._rest(self.settings.poll_seconds_max)

    async def _rest(self, seconds: float) -> bool:
        """Until something happens that makes a claim worth while (True), but never longer than the poller allows."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.75, 1.0)):
                return await self._wake.wait()
        return False

    async def _has_due(self) -> bool:
        """Whether a claim is worth while although nobody has called for it. An idle worker asks nothing else."""
        seen = await self._upkeep.look()
        return bool(self._runner.freed_keys) or any(map(self._serves, seen.due_queues))

    def _report_outage(self, error: DatabaseUnavailable) -> None:
        if isinstance(error, DatabaseBusy):
            log.warning("the database is slow: %s", error)
        else:
            log.warning("the database is away: %s", error)
            self._upkeep.note_outage()
        self._scan_soon()

    def _scan_soon(self) -> None:
        self._lanes.scan_soon()
        if self._lanes_on_demand is not None:
            self._lanes_on_demand.scan_soon()

    @property
    def jobs(self) -> int:
        """Jobs in hand."""
        return len(self._runner.held)

    @property
    def idle_because(self) -> str | None:
        """Why it claims nothing just now."""
        if self._stopping.is_set():
            return "this worker is stopping"
        return None if self.started.is_set() else "this worker is starting"

    @property
    def broken(self) -> str | None:
        """Why this worker takes no more jobs: it gives back those that it has, and leaves."""
        return None if self._demand is None else self._demand.broken

    def _slots_free(self) -> int:
        """A job leaves its slot when its operation is over, but no more settles than slots may be on the way."""
        if self.broken is not None:
            return 0
        over = self._count_own(self._runner.over_per_queue)
        return self.settings.concurrency - self._slots_used() - max(0, over - self.settings.concurrency)

    def _slots_used(self) -> int:
        """Jobs that run. The lease thread asks too, while jobs start and end."""
        return self._count_own(self._runner.per_queue) - self._count_own(self._runner.over_per_queue)

    def _count_own(self, per_queue: Mapping[str, int]) -> int:
        """Jobs that were claimed on demand take no slot."""
        return sum(n for queue, n in list(per_queue.items()) if self._demand is None or not self._demand.serves(queue))

    async def _claim(self, slots: int) -> int:
        """One round of the worker's own slots."""
        claimed = await self._claim_from(self._lanes, slots)
        self._has_backlog = claimed == slots
        return claimed

    async def _claim_on_demand(self) -> int:
        """One round for the part that takes jobs by what it can do with them."""
        lanes = self._lanes_on_demand
        return 0 if lanes is None else await self._claim_from(lanes, _ON_DEMAND_MAX)

    async def _claim_from(self, known: Lanes, slots: int) -> int:
        """With the full scan also look which queues exist and which are paused."""
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
                asked = time.monotonic()
                claimed = await self.queue.claim(self.id, lanes, self._startable_types(), slots, freed_keys=freed)
                self._start(claimed.jobs, asked)
        except BaseException:
            self._runner.freed_keys |= freed
            raise
        if claimed.without_keys:
            self._runner.freed_keys |= freed
        known.move_on(lanes, claimed, slots, time.monotonic() - began)
        return len(claimed.jobs)

    def _start(self, claims: Sequence[Claim], asked: float) -> bool:
        """Start jobs whose lease counts from `asked`. Where that is all but over, the lease thread gives them back."""
        lease_seconds = self.queue.settings.lease_seconds
        if claims and time.monotonic() - asked >= lease_seconds - margin(lease_seconds):
            log.warning("the claim of %d jobs was answered when their leases were over", len(claims))
            return False
        for claim in claims:
            self._runner.start(claim, asked + lease_seconds)
        self.counts.note_claimed(claims)
        return True

    @contextlib.contextmanager
    def _claim_under_way(self) -> Iterator[None]:
        """Until what was claimed is also started, the lease thread must not take it for forgotten."""
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
        """Operations that could start now: those for processes only while one is free."""
        names = self._operations.names()
        if self._processes.free > 0:
            return names
        return [name for name in names if (known := self._operations.get(name)) and known.kind != "process"]

    def _note_free_slot(self) -> None:
        """A claim is worth while now if the last one left jobs behind, a key came free, or a parent may be due."""
        if self._has_backlog or self._runner.freed_keys or self._runner.parents_left:
            self._runner.parents_left = False
            self._wake.set()

    def _note_rescued(self, rescued: Sequence[Rescued]) -> None:
        self.counts.note_rescued(rescued)
        wake_when_due(rescued, self._claim_returned)

    def _claim_returned(self, queues: set[str]) -> None:
        """Rescued jobs of these queues are due. We may have no room for them, so the others hear it too.

        The rescue may have taken so long to commit that the jobs lie before our watermarks by now.
        """
        self._scan_soon()
        self._wake.set()
        if not self._stopping.is_set():
            self._doorbell.ring(queues)

    def _hear_ring(self, queue: str) -> None:
        if self._serves(queue):
            self._wake.set()

    def _serves(self, queue: str) -> bool:
        on_demand = self._lanes_on_demand
        return self._lanes.serves(queue) or (on_demand is not None and on_demand.serves(queue))


async def _wait_for_first(*tasks: asyncio.Task[Any]) -> None:
    """Until one of them ends; an error in any of them is ours."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
