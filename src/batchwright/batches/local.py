"""A batch that one process runs by itself, and resumes if it is started again.

    key = hash of file, server, endpoint and output ─▶ the batch of this key, or a new one in a queue of its own
    a worker in this process, for this queue only ─▶ the end

The batch is in the database like any other, so that nothing is lost however this process ends; but no other worker
takes it. A lock in the work folder tells whether the process that ran it before is really gone. If it is, then what it
held is free at once, instead of after its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchwright.batches.journal.envelopes import batch_id_of
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batch, NewBatch
from batchwright.batches.submission import check_retry, create, retry_of, store_input
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.engine.worker.lanes import PRIVATE
from batchwright.engine.worker.worker import Worker, worker_id
from batchwright.errors import ConfigurationError, Conflict, InvalidInput, NotFound
from batchwright.inference.headers import header_pairs
from batchwright.inference.settings import NO_GATEWAY, GatewaySettings, InferenceSettings
from batchwright.settings import Settings
from batchwright.states import JobStatus
from batchwright.telemetry import tracing

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart
    from batchwright.batches.runtime import Runtime

GRACE_SECONDS_MAX = 10.0
"""After Ctrl-C, requests in flight may go on so long: they are paid for, but somebody waits before a terminal."""
_QUEUE = f"{PRIVATE}run-"
_KEY_DIGITS = 12
_TO_ANY_SERVER = ("request_timeout", "max_retries", "initial_backoff", "max_backoff")
"""What may be kept of a gateway's settings for another server: no key, and nothing about trust."""
_NOWHERE = GatewaySettings(url="http://127.0.0.1:9")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """What to run. The same file, server, endpoint and output are the same batch."""

    file: Path
    sha256: str
    endpoint: str
    server: str
    output: str
    """The name of the file that gets the answers."""
    window: str
    again: bool = False
    """Whether a batch that has ended is run again from the beginning."""
    retry_failed: bool = False
    """Whether the failed lines of a batch that has ended are sent again."""

    @property
    def key(self) -> str:
        parts = [self.sha256, self.server, self.endpoint, self.output]
        return hashlib.sha256(orjson.dumps(parts)).hexdigest()

    @property
    def queue(self) -> str:
        return f"{_QUEUE}{self.key[:_KEY_DIGITS]}"

    def new_batch(self, input_file_id: str) -> NewBatch:
        return NewBatch(
            tenant=DEFAULT_TENANT,
            endpoint=self.endpoint,
            input_file_id=input_file_id,
            completion_window=self.window,
            **self.own_fields(),
        )

    def own_fields(self) -> dict[str, Any]:
        """What makes a batch the batch of this run."""
        return {
            "queue": self.queue,
            "idempotency_key": f"run:{self.key}",
            "idempotency_digest": bytes.fromhex(self.key),
        }

    def is_done(self, batch: Batch) -> bool:
        """Whether only the files are to be written. A batch that never began has cost nothing: it is begun anew."""
        if not batch.has_ended or batch.in_progress_at is None or self.again:
            return False
        return not self.retry_failed or batch.done == batch.completed


def refuse_too_large(file: Path, settings: Settings) -> None:
    if (size := file.stat().st_size) > (most := settings.table("batches", BatchSettings).file_bytes_max):
        raise InvalidInput(f"{file} has {size} bytes, and batches.file_bytes_max is {most}; split it, or raise that")


# Settings ---------------------------------------------------------------------------------------------------------


def use_server(settings: Settings, url: str | None, api_key_env: str | None) -> Settings:
    """The server of the command line instead of those of the settings; a key goes to no server but its own."""
    before = settings.global_inference_gateway
    if url is None and not settings.has_gateways:
        raise ConfigurationError(
            f"there is no model server to send to; write --url http://127.0.0.1:8000, or configure one: {NO_GATEWAY}"
        )
    if url is None and (api_key_env is None or not before.is_set):
        if api_key_env is not None:
            raise ConfigurationError("--api-key-env is for one server; write its --url, too")
        return settings
    gateway = GatewaySettings(url=url) if url is not None else before
    if before.is_set and gateway.endpoint == before.endpoint:
        gateway = replace(before, url=gateway.url)
    elif before.is_set:
        gateway = replace(gateway, **{name: getattr(before, name) for name in _TO_ANY_SERVER})
    if api_key_env is not None:
        gateway = replace(gateway, api_key_env=api_key_env, api_key_file=None, api_key_name=None)
    return replace(settings, global_inference_gateway=gateway, model_gateways={})


def add_headers(settings: Settings, headers: Mapping[str, str]) -> Settings:
    """These headers for all gateways, before those of the configuration. No other process runs the batch, so they are
    not stored: whoever resumes it gives them again."""

    def with_headers(gateway: GatewaySettings) -> GatewaySettings:
        pairs = header_pairs({**dict(gateway.headers), **headers})
        return replace(gateway, headers=pairs, passthrough_headers=()) if gateway.url else gateway

    return replace(
        settings,
        global_inference_gateway=with_headers(settings.global_inference_gateway),
        model_gateways={model: with_headers(one) for model, one in settings.model_gateways.items()},
    )


def name_server(settings: Settings) -> str:
    if settings.global_inference_gateway.is_set:
        return settings.global_inference_gateway.endpoint
    servers = settings.model_gateways.items()
    return " ".join(f"{model}={one.provider or one.endpoint}" for model, one in sorted(servers))


def private_settings(settings: Settings, queue: str, max_in_flight: int | None = None) -> Settings:
    """For a worker that does nothing but the batch of this queue."""
    grace = min(settings.worker.stop_grace_seconds, GRACE_SECONDS_MAX)
    return replace(
        settings,
        operations=(),
        worker=replace(settings.worker, queues=(queue,), queue_limits={}, stop_grace_seconds=grace),
        inference=settings.inference if max_in_flight is None else _limit(settings.inference, max_in_flight),
    )


def _limit(inference: InferenceSettings, most: int) -> InferenceSettings:
    """So many over all models: this process has nothing else to send."""
    return replace(
        inference,
        concurrency=most,
        model_concurrency_max=None,
        model_concurrency_start=min(inference.model_concurrency_start, most),
        model_concurrency_min=min(inference.model_concurrency_min, most),
    )


# The batch --------------------------------------------------------------------------------------------------------


async def find_batch(part: BatchesPart, run: LocalRun) -> Batch | None:
    """The batch that this run has made before."""
    return await part.batches.find_repeated(run.new_batch(""))


async def begin_batch(part: BatchesPart, run: LocalRun, known: Batch | None) -> Batch:
    """The batch of before if it is open, else a new one. Only for whoever has the queue's lock."""
    if known is not None and not known.has_ended:
        await release_dead_workers(part, run.queue)
        return known
    is_retry = known is not None and known.in_progress_at is not None and run.retry_failed
    with tracing.span("create-batch") as creating:
        new = await _make_retry(part, run, known) if known is not None and is_retry else await _make_new(part, run)
        batch, _ = await create(
            part.batches,
            part.core.catalog,
            replace(new, traceparent=creating.traceparent),
            must_be_served=False,
            instead_of=known.id if known is not None else None,
        )
    return batch


async def _make_new(part: BatchesPart, run: LocalRun) -> NewBatch:
    limit = part.settings.file_bytes_max
    file = await store_input(part.files, run.file, tenant=DEFAULT_TENANT, bytes_max=limit, sha256=run.sha256)
    return run.new_batch(file.id)


async def _make_retry(part: BatchesPart, run: LocalRun, known: Batch) -> NewBatch:
    await check_retry(part.files, known, None)
    return replace(retry_of(known, None, **run.own_fields()), completion_window=run.window)


async def has_written(part: BatchesPart, run: LocalRun, head: bytes) -> bool:
    """Whether the file that begins like this comes from a batch of this very run: all of them have one queue."""
    id = batch_id_of(head)
    try:
        return id is not None and (await part.batches.get(id, tenant=None)).queue == run.queue
    except NotFound:
        return False


# The worker -------------------------------------------------------------------------------------------------------


async def work_until_ended(
    worker: Worker, following: Coroutine[Any, Any, Batch], on_start: Callable[[], object] = lambda: None
) -> Batch | None:
    """How the batch ended, by whoever follows it; None if the worker was stopped before that."""
    running = asyncio.create_task(worker.run())
    followed = asyncio.create_task(following)
    started = asyncio.create_task(_call_once_started(worker, on_start))
    try:
        await asyncio.wait([running, followed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        worker.stop()
        await asyncio.wait([running])
        for task in (followed, started):
            task.cancel()
        await asyncio.gather(followed, started, return_exceptions=True)
    running.result()
    return None if followed.cancelled() else followed.result()


async def _call_once_started(worker: Worker, on_start: Callable[[], object]) -> None:
    await worker.started.wait()
    on_start()


class SenderLoad(NamedTuple):
    """Requests in flight, and how many there may be."""

    in_flight: int
    limit: int | None


class SendingState:
    """What this process has in flight, and why it may be waiting."""

    def __init__(self, runtime: Runtime) -> None:
        self._dispatcher = runtime.dispatcher

    def load(self) -> SenderLoad:
        total = self._dispatcher.limits.total
        limits = [sender.limit.adaptive.limit for sender in self._dispatcher.senders.values()]
        return SenderLoad(total.in_use, min(total.capacity, sum(limits)) if limits else None)

    def trouble(self) -> str | None:
        if self._dispatcher.disk.trouble is not None:
            return self._dispatcher.disk.trouble
        for sender in self._dispatcher.senders.values():
            if sender.limit.breaker.is_open:
                return f"{sender.gateway.endpoint} cannot be reached; it is tried again until the window is over"
            if sender.limit.adaptive.wait_seconds(time.monotonic()) > 1.0:
                return f"{sender.gateway.endpoint} asks for patience with {sender.model}"
        return None


# One at a time ----------------------------------------------------------------------------------------------------


async def release_dead_workers(part: BatchesPart, queue: str) -> int:
    """Give back what earlier processes of this machine held of the queue; answers how many jobs that were.

    Only for whoever has the queue's lock: then they are gone, and nobody has to wait for their leases.
    """
    core, here = part.core, worker_id().rsplit(":", 2)[0]
    released = 0
    for worker in await core.views.workers():
        if worker.queues == [queue] and worker.host == here:
            held = await core.queue.holdings(worker.id)
            running = [claim for claim, status in held.items() if status is JobStatus.RUNNING]
            released += await core.queue.release(running, worker.id, "the process that ran it is gone")
            await core.workers.leave(worker.id)
    return released


async def finish_abandoned(part: BatchesPart, batch: Batch, finish: Callable[[Settings], Awaitable[Batch]]) -> Batch:
    """End a cancelled batch whose process is gone. Nothing is sent; a process that lives does that itself.

    `finish` runs a worker with these settings, and answers how the batch ended.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(lock_queue(part.workspace.root, batch.queue))
        except Conflict:
            return batch
        await release_dead_workers(part, batch.queue)
        if any(one.is_alive for one in await part.core.views.workers() if one.queues == [batch.queue]):
            return batch
        settings = private_settings(part.core.settings, batch.queue)
        ended = await finish(replace(settings, global_inference_gateway=_NOWHERE, model_gateways={}))
        await part.batches.forget_queue(ended)
        lock.remove()
        return ended


class Lock(NamedTuple):
    """The file of a lock that is held."""

    path: Path

    def remove(self) -> None:
        """For whoever is done with the batch."""
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock_queue(folder: Path, queue: str) -> Iterator[Lock]:
    """One process of this machine at a time; the kernel frees the lock of a process that dies."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{queue}.lock"
    descriptor = _take_lock(path)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield Lock(path)
    finally:
        os.close(descriptor)


def _take_lock(path: Path) -> int:
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
