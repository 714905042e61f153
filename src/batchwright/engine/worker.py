"""The worker: claims what it has room for, runs it, settles it, and gives everything back when it must stop.

claim ──▶ start ──▶ perform ──▶ conclude ──▶ settle ──▶ forget
                      ▲
    interrupt ────────┘   cancelled · lost · timeout · stop
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from batchwright.db.database import Blocking, Pool, complete
from batchwright.db.doorbell import Doorbell, listen
from batchwright.engine.counts import CountsWriter, WorkerCounts
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.lanes import Demand, Lanes, LanesOnDemand
from batchwright.engine.lease import Lease, margin
from batchwright.engine.operation import Operations
from batchwright.engine.processes import ChildProgram, Processes
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.engine.runner import Runner, insist
from batchwright.engine.upkeep import Round, Upkeep
from batchwright.errors import (
    ConfigurationError,
    DatabaseBusy,
    DatabaseError,
    DatabaseUnavailable,
    InvalidInput,
    WorkerBroken,
)
from batchwright.states import JobStatus

log = logging.getLogger(__name__)

T = TypeVar("T")
_WRITE_SECONDS_MAX = 5.0
_GIVE_BACK_SECONDS_MAX = 600.0
_ON_DEMAND_MAX = 64
_REPEATABLE = frozenset({"40001", "40P01"})

Reason = Literal["cancelled", "lost", "timeout", "stop"]


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


class Worker:
    """Runs operations as durable jobs until `stop()`."""

    def __init__(
        self,
        pool: Pool,
        operations: Operations,
        *,
        settings: WorkerSettings | None = None,
        engine: EngineSettings | None = None,
        queue: Queue | None = None,
        child: ChildProgram | None = None,
        revive: Callable[[], object] | None = None,
        rounds: Sequence[Round] = (),
        services: Callable[[type[Any]], Any] | None = None,
        demand: Demand | None = None,
        close_services: Callable[[], Awaitable[None]] | None = None,
        counts: WorkerCounts | None = None,
        version: str = "0",
    ) -> None:
        self.id = worker_id()
        self.settings = settings or WorkerSettings()
        self.queue = queue or Queue(pool, engine)
        self.lease: Lease | None = None
        self.started = asyncio.Event()
        self.counts = counts or WorkerCounts()
        self._pool = pool
        self._operations = operations
        self._revive = revive
        self._version = version
        self._claims_under_way = 0
        self._claim_generation = 0
        self._has_backlog = False
        self._demand = demand
        self._close_services = close_services
        self._lanes = Lanes(self.settings.queues, self.settings.queue_limits, besides=demand)
        self._lanes_on_demand = None if demand is None else LanesOnDemand(demand)
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._processes = Processes(child, self.settings.processes_max or os.cpu_count() or 1)
        self._doorbell = Doorbell(pool)
        self._runner = Runner(
            self.queue,
            self.id,
            operations,
            doorbell=self._doorbell,
            processes=self._processes,
            threads_max=self.settings.concurrency,
            on_slot_free=self._slot_free,
            wake=self._came_back,
            services=services or functools.partial(_offer, pool),
            counts=self.counts,
        )
        self._counts_writer = CountsWriter(self.queue, self.id, self.counts)
        self._upkeep = Upkeep(
            self.queue,
            self._processes,
            operations,
            self.counts,
            rounds,
            queues=self.settings.queues,
            wake=self._came_back,
        )
        if demand is not None:
            demand.listen(self._wake.set)

    # Life -------------------------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Work until `stop()`; answers False when threads of operations would not end.

        A worker that finds itself broken stops by itself, and when it has given its jobs back raises WorkerBroken.
        """
        await self.register()
        self._runner.open()
        lease = self.lease = self._start_lease()
        helpers = [
            asyncio.create_task(listen(self._pool.settings, self._pool.url, self._rung)),
            asyncio.create_task(self._upkeep.run()),
            asyncio.create_task(self._counts_writer.run()),
        ]
        claiming = asyncio.create_task(self._claim_until_stopped())
        self.started.set()
        log.info("worker %s runs %s", self.id, ", ".join(sorted(self._operations.names())) or "no operations")
        try:
            await _first(claiming, *helpers)
        finally:
            self._stopping.set()
            await _cancel(*helpers, claiming)
            clean = await self._wind_down(lease)
        if self.broken is not None:
            raise WorkerBroken(f"this worker is broken and must be started anew: {self.broken}")
        return clean

    async def register(self) -> None:
        """Make this worker and its operations known; an enqueue elsewhere is checked against them."""
        names = self._operations.names()
        operations = [self._operations.get(name) for name in names]
        published = [
            {
                "name": operation.name,
                "payload_schema": operation.payload_schema,
                "defaults": operation.defaults(),
                "description": operation.description,
            }
            for operation in operations
            if operation is not None
        ]
        await self.queue.publish_operations(published, self.id)
        await self.queue.register_worker(**self._columns())

    def _columns(self) -> dict[str, Any]:
        host, pid, _ = self.id.rsplit(":", 2)
        queues = list(self.settings.queues) if self.settings.queues is not None else None
        return {
            "id": self.id,
            "host": host,
            "pid": int(pid),
            "version": self._version,
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

    async def run_once(self, *, limit: int | None = None) -> int:
        """Claim one round, run it to its end and settle it; answers how many jobs that were."""
        self._runner.open()
        self._scan_soon()
        claimed = await self._claim(min(limit or self.settings.concurrency, self._free()))
        claimed += await self._claim_on_demand()
        await self._runner.emptied()
        return claimed

    async def run_job(self, id: JobId, *, suspect: bool = False) -> bool:
        """Claim one given job and run it to its end; False when the claim was refused and nothing ran."""
        self._runner.open()
        claimed = await self._claim_one(id, suspect=suspect)
        await self._runner.emptied()
        return claimed

    async def run_alone(self, id: JobId, on_claim: Callable[[Claim], None]) -> None:
        """Claim one suspect job and run it, with a lease of its own, until it ends or `stop()` is called."""
        self._runner.open()
        lease = self._start_lease()
        try:
            if await self._claim_one(id, suspect=True, on_claim=on_claim):
                ended, stopped = map(asyncio.create_task, (self._runner.emptied(), self._stopping.wait()))
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
                held = await insist(lambda: self.queue.holdings(self.id))
                left = [key for key, status in held.items() if status is JobStatus.RUNNING]
                await insist(lambda: self.queue.release(left, self.id, "the database was away"))

    async def close(self) -> None:
        """End the helpers of a worker that was used by `run_once` and `run_job`."""
        await self._runner.emptied()
        await self._end_helpers()

    async def _wind_down(self, lease: Lease) -> bool:
        """Let jobs end within the grace, interrupt the rest, and release what is left as the last act."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._runner.emptied(), self.settings.stop_grace_seconds)
        self._runner.interrupt_all("stop")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._runner.emptied(), 2.0)
        await asyncio.to_thread(lease.close)
        left = list(self._runner.held)
        with contextlib.suppress(DatabaseError):
            await self.queue.release(left, self.id, "the worker stopped")
            await self.queue.leave(self.id)
        await self._end_helpers()
        return not left

    async def _end_helpers(self) -> None:
        await self._counts_writer.write_last()
        await self._runner.close()
        if self._close_services is not None:
            await self._close_services()

    def _start_lease(self) -> Lease:
        loop = asyncio.get_running_loop()
        database = Blocking(self._pool.settings, self._pool.url)

        def beat(queue: Queue) -> None:
            alive = queue.heartbeat(
                self.id, running=self._slots_used(), stopping=self._stopping.is_set(), broken=self.broken
            )
            if not complete(alive):
                complete(queue.register_worker(**self._columns()))

        lease = Lease(
            Queue(database, self.queue.settings),
            self.id,
            held=self._runner.held.copy,
            claims_under_way=lambda: (self._claims_under_way, self._claim_generation),
            on_news=lambda news: loop.call_soon_threadsafe(self._runner.heard, news),
            beat=beat,
            close_database=database.close,
            revive=self._revive,
        )
        lease.start()
        return lease

    # Claim ------------------------------------------------------------------------------------------------------

    async def _claim_until_stopped(self) -> None:
        pause = self.settings.poll_seconds_min
        while not self._stopping.is_set():
            if self.broken is not None:
                log.error("this worker is broken: it gives its jobs back and leaves: %s", self.broken)
                self.stop()
                return
            self._wake.clear()
            claimed, wanted = 0, self._free()
            try:
                if wanted:
                    claimed = await self._claim(wanted)
                if await self._claim_on_demand():
                    self._has_backlog = True  # there may be more, for which there was no room yet
            except DatabaseUnavailable as error:
                self._outage(error)
            except DatabaseError:
                log.exception("claiming failed")
            if claimed == 0 or claimed < wanted:
                pause = self.settings.poll_seconds_min if claimed else min(self.settings.poll_seconds_max, pause * 2)
                await self._rest(pause)
            elif not self._free():
                await self._rest(self.settings.poll_seconds_max)

    async def _rest(self, seconds: float) -> None:
        """Until something happens that makes a claim worth while, but never longer than the poller allows."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.75, 1.0)):
                await self._wake.wait()

    def _outage(self, error: DatabaseUnavailable) -> None:
        if isinstance(error, DatabaseBusy):
            log.warning("the database is slow: %s", error)
        else:
            log.warning("the database is away: %s", error)
            self._upkeep.reconnected()
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

    def _free(self) -> int:
        return 0 if self.broken is not None else self.settings.concurrency - self._slots_used()

    def _slots_used(self) -> int:
        """Jobs that were claimed on demand take no slot. The lease thread asks too, while jobs start and end."""
        if self._demand is None:
            return len(self._runner.held)
        return sum(n for queue, n in list(self._runner.per_queue.items()) if not self._demand.serves(queue))

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
            known.know(await self.queue.queues())
        lanes = known.open(slots, self._runner.per_queue)
        if not lanes:
            return 0
        freed: set[tuple[str, str]] = set()
        if known is self._lanes:
            freed, self._runner.freed_keys = self._runner.freed_keys, freed
        try:
            with self._claim_under_way():
                asked = time.monotonic()
                claimed = await self.queue.claim(self.id, lanes, self._types(), slots, freed_keys=freed)
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
        self.counts.took(claims)
        return True

    @contextlib.contextmanager
    def _claim_under_way(self) -> Iterator[None]:
        """Until what was claimed is also started, the lease thread must not take it for forgotten."""
        self._claims_under_way += 1
        try:
            yield
        finally:
            self._claims_under_way -= 1
            self._claim_generation += 1

    async def _claim_one(self, id: JobId, *, suspect: bool, on_claim: Callable[[Claim], None] | None = None) -> bool:
        with self._claim_under_way():
            asked = time.monotonic()
            claim = await self.queue.claim_job(self.id, id, self._operations.names(), suspect=suspect)
            if claim is None:
                return False
            if on_claim is not None:
                on_claim(claim)
            return self._start([claim], asked)

    def _types(self) -> list[str]:
        """Operations that could start now: those for processes only while one is free."""
        names = self._operations.names()
        if self._processes.free > 0:
            return names
        return [name for name in names if (known := self._operations.get(name)) and known.kind != "process"]

    def _slot_free(self) -> None:
        """A claim is worth while now if the last one left jobs behind, a key came free, or a parent may be due."""
        if self._has_backlog or self._runner.freed_keys or self._runner.parents_left:
            self._runner.parents_left = False
            self._wake.set()

    def _came_back(self, queues: set[str]) -> None:
        """Rescued jobs of these queues are due. We may have no room for them, so the others hear it too.

        The rescue may have taken so long to commit that the jobs lie before our watermarks by now.
        """
        self._scan_soon()
        self._wake.set()
        if not self._stopping.is_set():
            self._doorbell.ring(queues)

    def _rung(self, queue: str) -> None:
        on_demand = self._lanes_on_demand
        if self._lanes.serves(queue) or (on_demand is not None and on_demand.serves(queue)):
            self._wake.set()


def _offer(pool: Pool, kind: type[Any]) -> Any:
    """What operations may ask of their worker, unless somebody offers more: the pool."""
    if isinstance(pool, kind):
        return pool
    raise InvalidInput(f"this worker has no service {kind.__name__}", param="service")


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Until one of them ends; an error in any of them is ours."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
