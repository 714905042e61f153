"""The composition root: settings in, a client or a worker out."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload
from uuid import UUID

import orjson

from batchwright.api.keys import Keys
from batchwright.batches.files import Files
from batchwright.batches.metrics import BATCH_METRICS, STORAGE_METRIC, BatchCounts, StorageCounts, rooms
from batchwright.batches.seal import KEY_FILE, KeySource, Seal
from batchwright.batches.store import Batches
from batchwright.batches.workspace import Workspace
from batchwright.db.database import Pool, adopt, complete, is_blocking
from batchwright.db.doorbell import Doorbell
from batchwright.db.embedded import EmbeddedPostgres, default_root
from batchwright.db.migrate import Migration, migrate, require_current
from batchwright.engine.bulk import Bulk
from batchwright.engine.catalog import Catalog
from batchwright.engine.counts import CountsWriter, WorkerCounts
from batchwright.engine.jobs import Job, JobEvent, JobId, NewJob
from batchwright.engine.processes import CHILD_BRIEF, ChildProgram
from batchwright.engine.queue import Queue
from batchwright.engine.retention import Retention
from batchwright.engine.schedules import Schedules
from batchwright.engine.upkeep import Round
from batchwright.engine.views import Views
from batchwright.engine.worker import Worker, worker_id
from batchwright.errors import DatabaseUnavailable, InvalidInput, JobCancelled, JobFailed, WaitTimeout
from batchwright.operations.registry import Registry
from batchwright.settings import Settings, load_settings, settings_document, settings_of
from batchwright.states import JobStatus
from batchwright.storage import Store, open_store
from batchwright.telemetry.logs import configured_logs
from batchwright.telemetry.metrics import Counts

if TYPE_CHECKING:
    from batchwright.api.server import ApiServer
    from batchwright.batches.runtime import Runtime
    from batchwright.engine.health import HealthServer

T = TypeVar("T")
VERSION = version("batchwright")
_ENQUEUE_TRIES = 5
_HTTP_PATIENCE_SECONDS = 10.0
"""How long a request of a user waits for a store that is unavailable, before it is told so."""
_WAIT_SECONDS_MIN = 0.005
_WAIT_SECONDS_MAX = 0.5
Operation = str | NewJob | Any


class AsyncBatchwright:
    """Batchwright for async code: enqueue jobs, wait for them, cancel them.

    >>> async with AsyncBatchwright() as batchwright:
    ...     job = await batchwright.enqueue(greet, {"name": "Ada"})
    ...     print(await batchwright.wait(job))

    Without `database_url` (or BATCHWRIGHT_DATABASE_URL) it uses the embedded PostgreSQL, and starts it if need be.
    """

    def __init__(
        self,
        *,
        database_url: str | None = None,
        operations: Sequence[Any] | Registry = (),
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or load_settings({"database": {"url": database_url}})
        self.operations = operations if isinstance(operations, Registry) else Registry(operations)
        self.embedded: EmbeddedPostgres | None = None
        self._pool: Pool | None = None
        self._queue: Queue | None = None
        self._catalog: Catalog | None = None
        self._doorbell: Doorbell | None = None
        self._store: Store | None = None
        self.runtime: Runtime | None = None
        """The batch side of the worker that was made last, where a gateway is configured."""

    @property
    def pool(self) -> Pool:
        return _opened(self._pool)

    @property
    def queue(self) -> Queue:
        return _opened(self._queue)

    @property
    def catalog(self) -> Catalog:
        return _opened(self._catalog)

    @property
    def views(self) -> Views:
        return Views(self.queue)

    @property
    def bulk(self) -> Bulk:
        return Bulk(self.queue, self.views)

    @property
    def schedules(self) -> Schedules:
        return Schedules(self.queue, self.catalog)

    @property
    def keys(self) -> Keys:
        return Keys(self.queue)

    @property
    def doorbell(self) -> Doorbell:
        return _opened(self._doorbell)

    # Files and batches ------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where this machine keeps what is not in the database: files without a store, and the work folder."""
        return Path(self.settings.database.folder or default_root())

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = open_store(self.settings.storage, beside=self.folder)
        return self._store

    def open_store(self, component: str, counts: Counts, *, patience_seconds: float = inf) -> Store:
        """The same store for a part that counts what it asks of it; some have less patience than the settings say."""
        settings = self.settings.storage
        settings = dataclasses.replace(settings, retry_seconds_max=min(settings.retry_seconds_max, patience_seconds))
        return open_store(settings, beside=self.folder, counts=StorageCounts(counts), component=component)

    @property
    def files(self) -> Files:
        return Files(self.queue, self.store)

    @property
    def batches(self) -> Batches:
        return Batches(self.queue)

    @property
    def workspace(self) -> Workspace:
        settings = self.settings.batches
        return Workspace(settings.work_dir or self.folder / "work", settings.work_dir_limit)

    @property
    def seal(self) -> Seal:
        """Encrypts headers of creators; a key is made by itself only where nobody else needs it."""
        settings = self.settings.batches
        is_named = settings.header_key_file is not None or settings.header_key_env is not None
        made = None if is_named or self.settings.database.url is not None else self.folder / KEY_FILE
        return Seal(KeySource(settings.header_key_file, settings.header_key_env, made))

    # Life -------------------------------------------------------------------------------------------------------

    async def open(self, *, migrated: bool = True) -> Self:
        """Connect; `migrated=False` leaves the schema unlooked at, for the commands that mend it."""
        url = self.settings.database.url
        if url is None:
            url = await asyncio.to_thread(self._start_embedded)
        self._pool = Pool(self.settings.database, url)
        try:
            await self._pool.open()
            if migrated and self.embedded is not None:
                await migrate(self._pool, VERSION)
            elif migrated:
                await require_current(self._pool, VERSION)
        except BaseException:
            await self.close()
            raise
        self.adopt(self._pool)
        return self

    def adopt(self, pool: Pool) -> None:
        """Use a pool that somebody else opened, and closes."""
        self._pool = pool
        self._queue = Queue(pool, self.settings.engine)
        self._catalog = Catalog(self._queue, self.operations)
        self._doorbell = Doorbell(pool)

    async def close(self) -> None:
        if self._doorbell is not None:
            await self._doorbell.close()
        self._queue = self._catalog = self._doorbell = None
        if self._pool is not None:
            await self._pool.close()
            self._pool = None
        if self.embedded is not None:
            await asyncio.to_thread(self.embedded.stop)
            self.embedded = None

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def migrate(self) -> list[Migration]:
        """Bring the schema up to this program; safe to call from many processes at once."""
        return await migrate(self.pool, VERSION)

    def _start_embedded(self) -> str:
        folder = self.settings.database.folder
        self.embedded = EmbeddedPostgres(Path(folder) if folder else None)
        return self.embedded.start()

    # Jobs -------------------------------------------------------------------------------------------------------

    @overload
    async def enqueue(
        self, operation: Operation, payload: Any = None, *, connection: Any = None, **options: Any
    ) -> JobId: ...

    @overload
    async def enqueue(self, operation: Sequence[NewJob], *, connection: Any = None) -> list[JobId]: ...

    async def enqueue(
        self, operation: Any, payload: Any = None, *, connection: Any = None, **options: Any
    ) -> JobId | list[JobId]:
        """Enqueue one job, or a list of `NewJob` in one statement, all or none; answers their ids.

        `options` are the fields of `NewJob`. With `connection` (psycopg or SQLAlchemy) the jobs become part of the
        caller's own transaction and exist when that commits.
        """
        jobs = new_jobs(operation, payload, options)
        if connection is not None:
            ids = await self._enqueue_in(connection, jobs)
        else:
            ids = await self._enqueue_own(jobs)
        return ids if isinstance(operation, (list, tuple)) else ids[0]

    async def _enqueue_in(self, connection: Any, jobs: Sequence[NewJob]) -> list[JobId]:
        session = await adopt(connection)
        rows = await self.catalog.prepare(jobs, session=session)
        return [enqueued.id for enqueued in await self.queue.enqueue(rows, session=session)]

    async def _enqueue_own(self, jobs: Sequence[NewJob]) -> list[JobId]:
        """The ids are made here, so a call whose answer was lost is simply made again."""
        for tries in range(_ENQUEUE_TRIES):
            try:
                rows = await self.catalog.prepare(jobs)
                enqueued = await self.queue.enqueue(rows)
            except DatabaseUnavailable:
                if tries == _ENQUEUE_TRIES - 1:
                    raise
                await asyncio.sleep(random.uniform(0.05, 0.1 * 2**tries))
            else:
                self.doorbell.ring({row["queue"] for row in rows})
                return [one.id for one in enqueued]
        raise AssertionError("unreachable")

    async def wait(self, job: JobId | UUID | str, *, timeout: float | None = None) -> Any:
        """The job's result; raises JobFailed, JobCancelled, or WaitTimeout after `timeout` seconds."""
        id = job_id(job)
        pause = _WAIT_SECONDS_MIN
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            status, result, error = await self.queue.outcome(id)
            match status:
                case JobStatus.SUCCEEDED:
                    return result
                case JobStatus.FAILED:
                    raise JobFailed(str(id), error or {})
                case JobStatus.CANCELLED:
                    raise JobCancelled(str(id))
            if deadline is not None and asyncio.get_running_loop().time() + pause > deadline:
                raise WaitTimeout(f"job {id} is still {status} after {timeout:g} seconds")
            await asyncio.sleep(pause)
            pause = min(_WAIT_SECONDS_MAX, pause * 1.5)

    async def get(self, job: JobId | UUID | str) -> Job:
        return await self.queue.get(job_id(job))

    async def events(self, job: JobId | UUID | str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """The job's history; pass the last id as `after` to go on."""
        return await self.queue.events(job_id(job), after=after, limit=limit)

    async def cancel(self, job: JobId | UUID | str, *, reason: str = "cancelled by request") -> int:
        """Cancel a job with everything below it; answers how many jobs were open."""
        return await self.queue.cancel([job_id(job)], reason=reason)

    async def recover(self, job: JobId | UUID | str) -> None:
        """Free a job whose worker is gone without waiting for the rescue."""
        await self.queue.recover(job_id(job))
        await self._ring_for(job)

    async def rerun(self, job: JobId | UUID | str) -> None:
        """Give a FAILED or CANCELLED job another life."""
        await self.queue.rerun(job_id(job))
        await self._ring_for(job)

    async def _ring_for(self, job: JobId | UUID | str) -> None:
        self.doorbell.ring([(await self.get(job)).queue])

    # The HTTP server --------------------------------------------------------------------------------------------

    async def server(self) -> ApiServer:
        """The HTTP server of this client's settings; `start()` it, and `close()` it before the client."""
        from batchwright.api.access import Gate, require_key  # here, because clients and workers need no web framework
        from batchwright.api.jobs import render_event
        from batchwright.api.server import ApiServer
        from batchwright.api.services import Services
        from batchwright.batches.models import Models
        from batchwright.batches.results import Results
        from batchwright.batches.uploads import Uploads
        from batchwright.engine.exposition import Exposition, process_counts
        from batchwright.engine.feeds import Feeds

        settings = self.settings.api
        await require_key(settings, self.keys)
        counts = process_counts()
        stored = Counts([STORAGE_METRIC])
        store = self.open_store("apiserver", stored, patience_seconds=_HTTP_PATIENCE_SECONDS)
        files = Files(self.queue, store)
        return ApiServer(
            CountsWriter(self.queue, f"api:{worker_id()}", stored),
            Services(
                settings=settings,
                batch_settings=self.settings.batches,
                has_gateways=self.settings.has_gateways,
                passthrough_headers=self.settings.passthrough_headers,
                seal=self.seal,
                version=VERSION,
                queue=self.queue,
                catalog=self.catalog,
                doorbell=self.doorbell,
                views=self.views,
                bulk=self.bulk,
                schedules=self.schedules,
                feeds=Feeds(self.queue, render_event),
                gate=Gate(settings, self.keys),
                counts=counts,
                exposition=Exposition(self.queue, counts, more=BATCH_METRICS, rooms=rooms(self._models())),
                files=files,
                uploads=Uploads(self.queue, files),
                batches=self.batches,
                results=Results(self.batches, self.workspace, store),
                models=Models(
                    self.batches,
                    self.settings.global_inference_gateway,
                    self.settings.model_gateways,
                    self.settings.inference,
                ),
            ),
        )

    # Workers ----------------------------------------------------------------------------------------------------

    def worker(self, queue: Queue | None = None) -> Worker:
        """A worker for this client's operations; `await worker.run()` until `worker.stop()`.

        Where a gateway is configured it also runs batches.
        """
        counts = WorkerCounts(BATCH_METRICS, rooms(self._models()))
        self.runtime = runtime = self.batch_runtime(queue, counts) if self.settings.has_gateways else None
        return Worker(
            self.pool,
            self.operations,
            queue=queue,
            services=None if runtime is None else functools.partial(_offer, self.pool, runtime),
            demand=runtime,
            close_services=None if runtime is None else runtime.close,
            settings=self.settings.worker,
            engine=self.settings.engine,
            child=self._child_program(),
            revive=self.embedded.ensure_running if self.embedded is not None else None,
            rounds=self._rounds(counts),
            counts=counts,
            version=VERSION,
        )

    def health(self, worker: Worker) -> HealthServer | None:
        """The health page of a worker of this client, if the settings want one."""
        from batchwright.engine.exposition import Exposition
        from batchwright.engine.health import HealthServer, own_counts

        settings = self.settings.worker
        if settings.health_port is None:
            return None
        page = Exposition(self.queue, own_counts(worker), more=BATCH_METRICS, rooms=rooms(self._models()))
        return HealthServer(worker, page, version=VERSION, host=settings.health_host, port=settings.health_port)

    def _models(self) -> set[str]:
        """The models that the configuration names."""
        return {*self.settings.model_gateways, *self.settings.batches.prices} - {"*"}

    def _rounds(self, counts: WorkerCounts) -> list[Round]:
        """What upkeep does beside the engine's own rounds."""
        from batchwright.batches.care import Care  # here, because clients need neither
        from batchwright.batches.collector import Collector

        settings = self.settings
        grace = settings.batches.cancel_grace_seconds
        care = Care(self.batches, self.catalog, BatchCounts(counts), grace, settings.webhooks)
        store = self.open_store("garbage-collector", counts)
        garbage = Collector(self.queue, store, self.workspace, settings.batches, settings.retention)
        return [
            *self.schedules.rounds(),
            *Retention(settings.retention).rounds(),
            *care.rounds(),
            *garbage.rounds(),
        ]

    def batch_runtime(self, queue: Queue | None = None, counts: WorkerCounts | None = None) -> Runtime:
        """What a worker process needs for batches."""
        from batchwright.batches.runtime import OPERATIONS, Runtime  # here: most processes need no HTTP client
        from batchwright.batches.webhooks import Webhooks
        from batchwright.inference.gateway import Gateways

        for function in OPERATIONS:
            self.operations.add(function)
        settings = self.settings
        counts = counts or WorkerCounts(BATCH_METRICS)
        self.workspace.require()
        return Runtime(
            batches=Batches(queue or self.queue),
            files=Files(queue or self.queue, self.open_store("processor", counts)),
            workspace=self.workspace,
            catalog=self.catalog,
            gateways=Gateways(settings.global_inference_gateway, settings.model_gateways, settings.inference),
            webhooks=Webhooks(settings.webhooks),
            counts=BatchCounts(counts),
            inference=settings.inference,
            settings=settings.batches,
            seal=self.seal,
            is_shared=settings.storage.url is not None,
            queues=settings.worker.queues,
        )

    def _child_program(self) -> ChildProgram:
        brief = {
            "url": self.pool.url,
            "database": dataclasses.asdict(self.settings.database),
            "engine": dataclasses.asdict(self.settings.engine),
            "sources": sorted({*self.operations.sources.values()}),
            "entry_points": False,
            "logs": configured_logs(),
            "path": sys.path,
            "version": VERSION,
            "services": self._child_services() if self.settings.has_gateways else None,
        }
        command = (sys.executable, "-m", "batchwright.operations.child")
        return ChildProgram(command, {CHILD_BRIEF: orjson.dumps(brief).decode()})

    def _child_services(self) -> dict[str, Any]:
        return {"factory": f"{__name__}:child_services", "settings": settings_document(self.settings)}


def child_services(document: dict[str, Any], pool: Pool, operations: Registry) -> tuple[Any, Any]:
    """The services of batches in a child process that runs one job alone."""
    batchwright = AsyncBatchwright(settings=settings_of(document), operations=operations)
    batchwright.adopt(pool)
    runtime = batchwright.batch_runtime()
    return functools.partial(_offer, pool, runtime), runtime.close


class Batchwright:
    """Batchwright for plain code: the same verbs as `AsyncBatchwright`, each waiting for its answer.

    >>> with Batchwright() as batchwright:
    ...     print(batchwright.wait(batchwright.enqueue(greet, {"name": "Ada"})))
    """

    def __init__(self, **options: Any) -> None:
        self.client = AsyncBatchwright(**options)
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> Self:
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="batchwright-client", daemon=True)
        self._thread.start()
        try:
            self.call(self.client.open())
        except BaseException:
            self._end_loop()
            raise
        return self

    def close(self) -> None:
        if self._loop is not None:
            self.call(self.client.close())
            self._end_loop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def enqueue(
        self, operation: Operation, payload: Any = None, *, connection: Any = None, **options: Any
    ) -> JobId: ...

    @overload
    def enqueue(self, operation: Sequence[NewJob], *, connection: Any = None) -> list[JobId]: ...

    def enqueue(self, operation: Any, payload: Any = None, *, connection: Any = None, **options: Any) -> Any:
        """As `AsyncBatchwright.enqueue`; a `connection` is used in this thread, inside its open transaction."""
        asked = self.client.enqueue(operation, payload, connection=connection, **options)
        if connection is None:
            return self.call(asked)
        if not is_blocking(connection):
            asked.close()
            raise InvalidInput("Batchwright takes a blocking connection; for an async one use AsyncBatchwright")
        return complete(asked)

    def wait(self, job: JobId | UUID | str, *, timeout: float | None = None) -> Any:
        return self.call(self.client.wait(job, timeout=timeout))

    def get(self, job: JobId | UUID | str) -> Job:
        return self.call(self.client.get(job))

    def events(self, job: JobId | UUID | str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        return self.call(self.client.events(job, after=after, limit=limit))

    def cancel(self, job: JobId | UUID | str, *, reason: str = "cancelled by request") -> int:
        return self.call(self.client.cancel(job, reason=reason))

    def recover(self, job: JobId | UUID | str) -> None:
        self.call(self.client.recover(job))

    def rerun(self, job: JobId | UUID | str) -> None:
        self.call(self.client.rerun(job))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something of the async client's on its loop and wait for it."""
        if self._loop is None:
            coroutine.close()
            raise InvalidInput("this client is not open; use it in a `with` block, or call open()")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(timeout=5)
            loop.close()


def _offer(pool: Pool, runtime: Runtime, kind: type[T]) -> T:
    """What operations may ask of their worker."""
    found = pool if isinstance(pool, kind) else runtime.service(kind)
    if found is None:
        raise InvalidInput(f"this worker has no service {kind.__name__}", param="service")
    return found


def new_jobs(operation: Any, payload: Any, options: Mapping[str, Any]) -> list[NewJob]:
    """One NewJob or a list of them from whatever enqueue was given."""
    if isinstance(operation, (list, tuple)):
        if payload is not None or options:
            raise InvalidInput("a list of jobs takes its payloads and options in each NewJob", param="payload")
        return list(operation)
    if isinstance(operation, NewJob) and payload is not None:
        raise InvalidInput("a NewJob brings its own payload; do not give another one", param="payload")
    try:
        if isinstance(operation, NewJob):
            return [dataclasses.replace(operation, **options)]
        return [NewJob(operation, payload, **options)]
    except TypeError as error:
        raise InvalidInput(f"enqueue: {error}") from error


def _opened(part: T | None) -> T:
    if part is None:
        raise InvalidInput("this client is not open; use it in a `with` block, or call open()")
    return part


def job_id(job: JobId | UUID | str) -> JobId:
    try:
        return JobId(job if isinstance(job, UUID) else UUID(str(job)))
    except ValueError as error:
        raise InvalidInput(f"{job!r} is no job id", param="job") from error


def moment(text: str) -> datetime:
    """A time with its zone, as flags and requests write it."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is no time; write 2026-12-24T18:00:00+00:00") from error
    if found.tzinfo is None:
        raise InvalidInput(f"{text!r} has no time zone; write 2026-12-24T18:00:00+00:00")
    return found
