"""A worker in this process for the one batch of a private queue, and what is known of a process that had it before."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchwright.app import AsyncBatchwright
from batchwright.batches.store import Batch
from batchwright.cli.batch_show import Seen
from batchwright.cli.batch_watch import Load, OnLook, View, begin_view, follow
from batchwright.cli.loop import spare_the_collector
from batchwright.engine.worker import Worker, worker_id
from batchwright.errors import Conflict
from batchwright.inference.settings import GatewaySettings, InferenceSettings
from batchwright.settings import Settings
from batchwright.states import JobStatus

if TYPE_CHECKING:
    from batchwright.batches.runtime import Runtime

GRACE_SECONDS_MAX = 10.0
"""After Ctrl-C, requests in flight may go on so long: they are paid for, but somebody waits before a terminal."""
_NOWHERE = GatewaySettings(url="http://127.0.0.1:9")


class Here:
    """What this process has in flight, and why it may be waiting."""

    def __init__(self, runtime: Runtime) -> None:
        self._dispatcher = runtime.dispatcher

    def load(self) -> Load:
        total = self._dispatcher.limits.total
        limits = [lane.room.adaptive.limit for lane in self._dispatcher.lanes.values()]
        return Load(total.in_use, min(total.capacity, sum(limits)) if limits else None)

    def trouble(self) -> str | None:
        if self._dispatcher.disk.trouble is not None:
            return self._dispatcher.disk.trouble
        for lane in self._dispatcher.lanes.values():
            if lane.room.breaker.is_open:
                return f"{lane.gateway.endpoint} cannot be reached; it is tried again until the window is over"
            if lane.room.adaptive.wait_seconds(time.monotonic()) > 1.0:
                return f"{lane.gateway.endpoint} asks for patience with {lane.model}"
        return None


def private_settings(settings: Settings, queue: str, max_in_flight: int | None = None) -> Settings:
    """For a worker that does nothing but the batch of this queue."""
    grace = min(settings.worker.stop_grace_seconds, GRACE_SECONDS_MAX)
    return replace(
        settings,
        operations=(),
        worker=replace(settings.worker, queues=(queue,), queue_limits={}, stop_grace_seconds=grace),
        inference=settings.inference if max_in_flight is None else _bounded(settings.inference, max_in_flight),
    )


def _bounded(inference: InferenceSettings, most: int) -> InferenceSettings:
    """So many over all models: this process has nothing else to send."""
    return replace(
        inference,
        concurrency=most,
        model_concurrency_max=None,
        model_concurrency_start=min(inference.model_concurrency_start, most),
        model_concurrency_min=min(inference.model_concurrency_min, most),
    )


async def work(
    batchwright: AsyncBatchwright,
    worker: Worker,
    view: View,
    on_look: OnLook,
    when_asked: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> Batch:
    """Until the batch has ended or the worker was asked to stop; answers how the batch stands then.

    `when_asked` is told what to call to make it stop.
    """
    running = asyncio.create_task(worker.run())
    following = asyncio.create_task(follow(batchwright, view, on_look))

    def stop() -> None:
        view.notice = "stopping: requests in flight may end; once more leaves at once"
        worker.stop()

    when_asked(stop)
    started = asyncio.create_task(_spare_once_started(worker))
    try:
        await asyncio.wait([running, following], return_when=asyncio.FIRST_COMPLETED)
    finally:
        worker.stop()
        await asyncio.wait([running])
        for task in (following, started):
            task.cancel()
        await asyncio.gather(following, started, return_exceptions=True)
    running.result()
    if not following.cancelled():
        return following.result()
    view.seen = Seen(batch=await batchwright.batches.get(view.batch.id, tenant=None))
    view.notice = None
    on_look(view)
    return view.batch


async def _spare_once_started(worker: Worker) -> None:
    await worker.started.wait()
    spare_the_collector()


async def free_the_dead(batchwright: AsyncBatchwright, queue: str) -> int:
    """Give back what earlier processes of this machine held of the queue; answers how many jobs that were.

    Only for whoever has the queue's lock: then they are gone, and nobody has to wait for their leases.
    """
    here = worker_id().rsplit(":", 2)[0]
    freed = 0
    for worker in await batchwright.views.workers():
        if worker.queues == [queue] and worker.host == here:
            held = await batchwright.queue.holdings(worker.id)
            running = [claim for claim, status in held.items() if status is JobStatus.RUNNING]
            freed += await batchwright.queue.release(running, worker.id, "the process that ran it is gone")
            await batchwright.queue.leave(worker.id)
    return freed


async def finish_abandoned(batchwright: AsyncBatchwright, batch: Batch) -> Batch:
    """End a cancelled batch whose process is gone. Nothing is sent; if the process lives, it does that itself."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(only_one(batchwright.workspace.root, batch.queue))
        except Conflict:
            return batch
        await free_the_dead(batchwright, batch.queue)
        if any(one.is_alive for one in await batchwright.views.workers() if one.queues == [batch.queue]):
            return batch
        settings = private_settings(batchwright.settings, batch.queue)
        settings = replace(settings, global_inference_gateway=_NOWHERE, model_gateways={})
        async with AsyncBatchwright(settings=settings) as own:
            ended = await work(own, own.worker(), await begin_view(own, batch.id), lambda _: None)
            await own.batches.forget_queue(ended)
        lock.remove()
        return ended


class Lock(NamedTuple):
    """The file of a lock that is held."""

    path: Path

    def remove(self) -> None:
        """For whoever is done with the batch."""
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def only_one(folder: Path, queue: str) -> Iterator[Lock]:
    """One process of this machine at a time; the kernel frees the lock of a process that dies."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{queue}.lock"
    descriptor = _locked(path)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield Lock(path)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """A lock on the file that is there now: one that we opened may have been removed by whoever was done with it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 20, 0).decode(errors="replace")
            os.close(descriptor)
            raise Conflict(
                f"the process {pid} runs this batch already; see how far it is: batchwright batch list"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
