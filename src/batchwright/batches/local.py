"""A batch that one process runs by itself, and resumes if it is started again.

    key = hash of file, server, endpoint and output ─▶ the batch of this key, or a new one in a queue of its own
    a worker in this process, for this queue only ─▶ the end

The batch is in the database like any other, so nothing is lost however this process ends; but no other worker runs it.
A lock in the work folder shows whether the process that ran it before is really gone. If so, its jobs are released at
once, without waiting for their leases to expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import orjson

from batchwright.batches.journal.envelopes import batch_id_of
from batchwright.batches.plan.lines import ENDPOINTS, NO_JSON
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batch, NewBatch
from batchwright.batches.submission import check_retry, create, retry_of, store_input
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.engine.worker.lanes import PRIVATE
from batchwright.engine.worker.worker import Worker, host_name, worker_id
from batchwright.errors import ConfigurationError, Conflict, InvalidInput, NotFound
from batchwright.inference.headers import header_pairs
from batchwright.inference.settings import NO_GATEWAY, GatewaySettings, InferenceSettings
from batchwright.private import make_folders
from batchwright.settings import Settings, use_model_server
from batchwright.states import JobStatus
from batchwright.telemetry import tracing

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart
    from batchwright.batches.runtime import Runtime
    from batchwright.batches.send.health import Complaint
    from batchwright.engine.views import WorkerView

GRACE_SECONDS_MAX = 10.0
"""After Ctrl-C, requests in flight may take this long: they are paid for, but the user waits at the terminal."""
_QUEUE = f"{PRIVATE}run-"
_KEY_DIGITS = 12
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
    """Whether the failed lines of a batch that has ended are resent."""
    errors: str = ""
    """The name of the file that gets the lines that failed."""
    url: str | None = None
    """The server of the command line; None if it is that of the settings."""
    api_key_env: str | None = None
    headers: tuple[str, ...] = ()
    """The names of the headers of the command line; their values are not kept."""
    resumed: str | None = None
    """The id of the batch to resume, if that was named instead of a file."""

    @classmethod
    def of(cls, batch: Batch, *, retry_failed: bool = False) -> Self:
        """The run that created a batch."""
        origin = batch.origin
        if origin is None:
            raise InvalidInput(
                f"{batch.id} was not made by batchwright batch run; workers run it: batchwright batch watch {batch.id}"
                if not batch.is_private
                else f"{batch.id} was made by an older version; resume it with the command that made it"
            )
        return cls(
            file=Path(origin["file"]),
            sha256=origin["sha256"],
            endpoint=batch.endpoint,
            server=origin["server"],
            output=origin["output"],
            window=batch.completion_window,
            retry_failed=retry_failed,
            errors=origin["errors"],
            url=origin["url"],
            api_key_env=origin["api_key_env"],
            headers=tuple(origin["headers"]),
            resumed=batch.id,
        )

    @property
    def path(self) -> str:
        """The absolute path of the file; one that is not UTF-8 is only shown."""
        return os.fsencode(self.file.absolute()).decode("utf-8", "replace")

    @property
    def origin(self) -> dict[str, Any]:
        """What is stored with the batch, so that it can be resumed by its id."""
        return {
            "file": self.path,
            "sha256": self.sha256,
            "server": self.server,
            "output": self.output,
            "errors": self.errors,
            "url": self.url,
            "api_key_env": self.api_key_env,
            "headers": list(self.headers),
        }

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
            "origin": self.origin,
        }

    def is_done(self, batch: Batch) -> bool:
        """Whether only the files are left to write. A batch that never began has cost nothing: it starts again."""
        if not batch.has_ended or batch.in_progress_at is None or self.again:
            return False
        return not self.retry_failed or batch.done == batch.completed


def refuse_too_large(file: Path, settings: Settings) -> None:
    if (size := file.stat().st_size) > (most := settings.table("batches", BatchSettings).file_bytes_max):
        raise InvalidInput(
            f"{file} has {size} bytes, more than batches.file_bytes_max, {most}; split it, or raise that"
        )


# Settings ---------------------------------------------------------------------------------------------------------


def use_server(
    settings: Settings, url: str | None, api_key_env: str | None, timeout_seconds: float | None = None
) -> Settings:
    """The server of the command line instead of those of the settings; a key goes to no server but its own."""
    if url is None and not settings.has_gateways:
        raise ConfigurationError(
            f"there is no model server to send to; write --url http://127.0.0.1:8000, or configure one: {NO_GATEWAY}"
        )
    if url is None and not settings.global_inference_gateway.is_set:
        if api_key_env is not None:
            raise ConfigurationError("--api-key-env is for one server; add its --url")
        return _use_timeout(settings, timeout_seconds)
    gateway = settings.global_inference_gateway if url is None else _choose_gateway(settings, url)
    if api_key_env is not None:
        gateway = replace(gateway, api_key_env=api_key_env, api_key_file=None, api_key_name=None)
    return _use_timeout(replace(settings, global_inference_gateway=gateway, model_gateways={}), timeout_seconds)


def _choose_gateway(settings: Settings, url: str) -> GatewaySettings:
    _refuse_wrong_path(url)
    return use_model_server(settings, url).global_inference_gateway


def _refuse_wrong_path(url: str) -> None:
    """Each line has its own url, which begins with /v1: with a path in --url it would be there twice."""
    for ending in sorted((*ENDPOINTS, *NO_JSON, "/v1/models", "/v1/v1"), key=len, reverse=True):
        if url.rstrip("/").endswith(ending):
            raise InvalidInput(f"--url ends with {ending}, which each request adds itself; leave that out of --url")


def _use_timeout(settings: Settings, seconds: float | None) -> Settings:
    if seconds is None:
        return settings

    def limited(gateway: GatewaySettings) -> GatewaySettings:
        return replace(gateway, request_timeout=seconds) if gateway.url else gateway

    return replace(
        settings,
        global_inference_gateway=limited(settings.global_inference_gateway),
        model_gateways={model: limited(one) for model, one in settings.model_gateways.items()},
    )


def add_headers(settings: Settings, headers: Mapping[str, str]) -> Settings:
    """These headers for all gateways, before those of the configuration. No other process runs the batch, so they are
    not stored: to resume it, the user gives them again."""

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
    """Settings of a worker that runs only the batch of this queue."""
    grace = min(settings.worker.stop_grace_seconds, GRACE_SECONDS_MAX)
    return replace(
        settings,
        operations=(),
        worker=replace(settings.worker, queues=(queue,), queue_limits={}, stop_grace_seconds=grace),
        inference=settings.inference if max_in_flight is None else _limit(settings.inference, max_in_flight),
    )


def _limit(inference: InferenceSettings, most: int) -> InferenceSettings:
    """This limit over all models: this process has nothing else to send."""
    return replace(
        inference,
        concurrency=most,
        model_concurrency_max=None,
        model_concurrency_start=min(inference.model_concurrency_start, most),
        model_concurrency_min=min(inference.model_concurrency_min, most),
    )


# The batch --------------------------------------------------------------------------------------------------------


async def find_batch(part: BatchesPart, run: LocalRun) -> Batch | None:
    """The batch that an earlier start of this run created: the last one with its key, which is kept for a month."""
    if (batch := await part.batches.find_repeated(run.new_batch(""))) is not None or run.resumed is None:
        return batch
    return await part.batches.get(run.resumed, tenant=None)


async def begin_batch(part: BatchesPart, run: LocalRun, known: Batch | None) -> Batch:
    """The earlier batch if it is open, else a new one. Only for the process that holds the queue's lock."""
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
    """Whether a batch of this run wrote the file that begins like this: all batches of a run have the same queue."""
    id = batch_id_of(head)
    try:
        return id is not None and (await part.batches.get(id, tenant=None)).queue == run.queue
    except NotFound:
        return False


# The worker -------------------------------------------------------------------------------------------------------


async def work_until_ended(
    worker: Worker, following: Coroutine[Any, Any, Batch], on_start: Callable[[], object] = lambda: None
) -> Batch | None:
    """How the batch ended, as `following` saw it; None if the worker was stopped before that."""
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
    """Requests in flight, how many there may be, and how many wait for a retry."""

    in_flight: int
    limit: int | None
    retrying: int = 0
    retry_seconds: float | None = None
    """Until the first of them is sent."""


class Silence(NamedTuple):
    """No answer has come for a while."""

    seconds: float
    complaints: Sequence[Complaint] = ()
    """How requests failed meanwhile."""


class SendingState:
    """What this process has in flight, and why it may be waiting."""

    def __init__(self, runtime: Runtime) -> None:
        self._dispatcher = runtime.dispatcher

    def load(self) -> SenderLoad:
        total, senders = self._dispatcher.limits.total, self._dispatcher.senders.values()
        limits = [sender.limit.adaptive.limit for sender in senders]
        due = min((at for sender in senders if (at := sender.schedule.next_retry) is not None), default=None)
        return SenderLoad(
            in_flight=total.in_use,
            limit=min(total.capacity, sum(limits)) if limits else None,
            retrying=sum(sender.schedule.retrying for sender in senders),
            retry_seconds=None if due is None else max(0.0, due - self._dispatcher.clock()),
        )

    def silence(self) -> Silence:
        health = self._dispatcher.health
        return Silence(health.silent_seconds(self._dispatcher.clock()), health.complaints())

    def refusals(self) -> Sequence[Complaint]:
        """Every way in which requests failed, as long as none has succeeded."""
        return self._dispatcher.health.refusals()

    def trouble(self) -> str | None:
        if self._dispatcher.disk.trouble is not None:
            return self._dispatcher.disk.trouble
        for sender in self._dispatcher.senders.values():
            if sender.limit.breaker.is_open:
                return f"{sender.gateway.endpoint} cannot be reached; retrying until the window ends"
            if sender.limit.adaptive.wait_seconds(self._dispatcher.clock()) > 1.0:
                return f"{sender.gateway.endpoint} is overloaded and refuses requests for {sender.model}; retrying"
        return None


# Locks, and runs whose process is gone ----------------------------------------------------------------------------


async def release_dead_workers(part: BatchesPart, queue: str) -> int:
    """Release the jobs of the queue that earlier processes of this machine held; returns how many.

    Only for the process that holds the queue's lock: the others are gone, so their leases need not run out.
    """
    core, here = part.core, worker_id().rsplit(":", 2)[0]
    released = 0
    for worker in await core.views.workers():
        if worker.queues == [queue] and worker.host == here:
            held = await core.queue.holdings(worker.id)
            running = [claim for claim, status in held.items() if status is JobStatus.RUNNING]
            released += await core.queue.release(running, worker.id, "its process is gone")
            await core.workers.leave(worker.id)
    return released


async def find_abandoned(part: BatchesPart, batches: Iterable[Batch]) -> set[str]:
    """The ids of batches whose process is gone. No other process runs them: they wait until a user resumes them."""
    private = [one for one in batches if one.is_private and not one.has_ended]
    if not private:
        return set()
    workers = await part.core.views.workers()
    served = {queue for worker in workers if _is_running(worker) for queue in worker.queues or ()}
    return {one.id for one in private if one.queue not in served}


def _is_running(worker: WorkerView) -> bool:
    """On this machine, a process that is gone is noticed at once, not only when its heartbeat is late."""
    if not worker.is_alive or worker.host != host_name():
        return worker.is_alive
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def finish_abandoned(part: BatchesPart, batch: Batch, finish: Callable[[Settings], Awaitable[Batch]]) -> Batch:
    """End a cancelled batch whose process is gone, without sending anything. A live process ends its batch itself.

    `finish` runs a worker with these settings, and returns how the batch ended.
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
        """Call this when the batch has ended."""
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock_queue(folder: Path, queue: str) -> Iterator[Lock]:
    """Let one process of this machine run the queue at a time; the kernel frees the lock of a process that dies."""
    make_folders(folder)
    path = folder / f"{queue}.lock"
    descriptor = _take_lock(path)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield Lock(path)
    finally:
        os.close(descriptor)


def _take_lock(path: Path) -> int:
    """A lock on the file that exists now: the process that had it may have removed the one that we opened."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 20, 0).decode(errors="replace")
            os.close(descriptor)
            raise Conflict(
                f"the process {pid} runs this batch already; see its progress: batchwright batch list"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
