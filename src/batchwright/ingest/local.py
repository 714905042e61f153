"""Documents without a separate worker: the process that starts a run works on it itself until the run has ended.

A lock file shows that a process of this machine works for this database, and names its worker. A process that gets the
lock knows that the previous worker is gone, and releases its jobs at once, without waiting for their leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from batchwright.ingest.config import required_models
from batchwright.ingest.items import ITEM_JOB
from batchwright.ingest.runs import QUEUE, Run, Runs
from batchwright.ingest.submission import WantedRun
from batchwright.private import make_folders
from batchwright.states import JobStatus, RunStatus

if TYPE_CHECKING:
    from batchwright.core import Core
    from batchwright.engine.worker.worker import Worker
    from batchwright.ingest.part import IngestPart
    from batchwright.settings import Settings

GRACE_SECONDS_MAX = 10.0
"""How long steps in progress may continue after Ctrl-C: they may be paid for, but a user waits at the terminal."""
_OPEN = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.PARKED)
_RUNS_LOOKED_AT = 200
_CONCURRENCY_MIN = 4
_NAME_BYTES_MAX = 500

T = TypeVar("T")


# The run -------------------------------------------------------------------------------------------------------------


async def find_open(runs: Runs, wanted: WantedRun) -> Run | None:
    """The newest open run of the same sources into the same collection."""
    found = await runs.list(wanted.tenant, statuses=_OPEN, collection=wanted.collection, limit=_RUNS_LOOKED_AT)
    return next((run for run in found if sorted(run.sources) == sorted(wanted.sources)), None)


def local_settings(settings: Settings, run: Run) -> Settings:
    """Settings of a worker for documents only. Requests that are sent as batches need the other queues, too.

    Without model servers, documents never wait, so it makes no sense to run more of them than there are cores.
    """
    asks_servers = bool(required_models(run.config))
    worker = replace(
        settings.worker,
        concurrency=settings.worker.concurrency if asks_servers else max(_CONCURRENCY_MIN, os.cpu_count() or 1),
        queues=None if asks_servers and run.lane != "realtime" else (QUEUE,),
        queue_limits={},
        stop_grace_seconds=min(settings.worker.stop_grace_seconds, GRACE_SECONDS_MAX),
    )
    return replace(settings, operations=(), worker=worker)


# The worker ----------------------------------------------------------------------------------------------------------


async def has_worker(core: Core) -> bool:
    """Whether a live worker runs documents on this database."""
    return any(
        worker.is_alive
        and worker.stopping_at is None
        and ITEM_JOB in worker.operations
        and (worker.queues is None or QUEUE in worker.queues)
        for worker in await core.views.workers()
    )


async def work_until(worker: Worker, following: Coroutine[Any, Any, T]) -> T | None:
    """Run a worker until `following` ends. Returns its result; None if the worker stopped first."""
    running = asyncio.create_task(worker.run())
    followed = asyncio.create_task(following)
    try:
        await asyncio.wait([running, followed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        worker.stop()
        await asyncio.wait([running])
        followed.cancel()
        await asyncio.gather(followed, return_exceptions=True)
    running.result()
    return None if followed.cancelled() else followed.result()


# The lock ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lock:
    """Held by the process of this machine that works for a database."""

    descriptor: int
    before: str
    """Name of the worker that held it before."""

    def sign(self, worker: str) -> None:
        """Write the name of the worker, before that worker claims any job."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, worker.encode(), 0)


@contextlib.contextmanager
def try_lock(part: IngestPart) -> Iterator[Lock | None]:
    """The lock; None while another process holds it. The kernel frees the lock of a process that dies."""
    path = _lock_path(part.core)
    make_folders(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield Lock(descriptor, os.pread(descriptor, _NAME_BYTES_MAX, 0).decode(errors="replace"))
    finally:
        os.close(descriptor)


async def release_dead(core: Core, lock: Lock) -> int:
    """Release the jobs that the previous worker still held. Returns how many."""
    if not lock.before:
        return 0
    held = await core.queue.holdings(lock.before)
    running = [claim for claim, status in held.items() if status is JobStatus.RUNNING]
    released = await core.queue.release(running, lock.before, "the process that ran it is gone")
    await core.workers.leave(lock.before)
    lock.sign("")
    return released


async def is_alone(part: IngestPart) -> bool:
    """Whether nothing works on documents: no process of this machine and no other worker."""
    with try_lock(part) as lock:
        if lock is None:
            return False
        await release_dead(part.core, lock)
        return not await has_worker(part.core)


def _lock_path(core: Core) -> Path:
    """There is one lock for each database: a machine may work for several."""
    name = hashlib.sha256((core.settings.database.url or "embedded").encode()).hexdigest()[:12]
    return core.folder / "work" / "ingest" / f"{name}.lock"
