"""The composition root: settings and parts in; a client, a worker or an HTTP server out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload
from uuid import UUID

from batchwright.core import CHILD_PARTS, Core, exposition_of
from batchwright.db.database import Pool, wrap_connection
from batchwright.db.doorbell import ring_at_commit
from batchwright.db.embedded import EmbeddedPostgres
from batchwright.db.migrate import Migration, migrate, require_current
from batchwright.db.retry import retry_unavailable
from batchwright.engine.jobs import Job, JobEvent, JobId, NewJob, job_id, new_jobs
from batchwright.engine.queue import Queue
from batchwright.engine.worker.processes import ChildProgram
from batchwright.engine.worker.worker import Program, Worker
from batchwright.errors import BatchwrightError, JobCancelled, JobFailed, WaitTimeout
from batchwright.operations.child import child_program
from batchwright.operations.registry import Registry
from batchwright.plugins import part_kinds
from batchwright.settings import Settings, load_settings, settings_document
from batchwright.states import JobStatus

if TYPE_CHECKING:
    from batchwright.api.server import ApiServer
    from batchwright.batches.client import AsyncBatch, AsyncBatches
    from batchwright.batches.requests import AsyncRequests
    from batchwright.batches.submitting import BatchOptions
    from batchwright.engine.worker.health import HealthServer

VERSION = version("batchwright")
_ENQUEUE_TRIES_MAX = 5
_WAIT_SECONDS_MIN = 0.005
_WAIT_SECONDS_MAX = 0.5
_WHY_SECONDS_MAX = 2.0
_OPENED = ("queue", "catalog", "doorbell", "store")
Operation = str | NewJob | Any


class AsyncBatchwright(Core):
    """Batchwright for async code: enqueue jobs, wait for them, cancel them.

    >>> async with AsyncBatchwright() as batchwright:
    ...     job = await batchwright.enqueue(greet, {"name": "Ada"})
    ...     print(await batchwright.wait(job))

    Without `database_url` (or BATCHWRIGHT_DATABASE_URL) it uses the embedded PostgreSQL, and starts it if necessary.
    """

    def __init__(
        self,
        *,
        database_url: str | None = None,
        operations: Sequence[Any] | Registry = (),
        settings: Settings | None = None,
    ) -> None:
        settings = settings or load_settings({"database": {"url": database_url}})
        registry = operations if isinstance(operations, Registry) else Registry(operations)
        super().__init__(settings, registry, part_kinds())
        self.embedded: EmbeddedPostgres | None = None

    # Opening and closing ----------------------------------------------------------------------------------------

    async def open(self, *, migrated: bool = True) -> Self:
        """Connect; `migrated=False` skips the check of the schema, for the commands that repair it."""
        url = self.settings.database.url
        if url is None:
            url = await asyncio.to_thread(self._start_embedded)
        pool = Pool(self.settings.database, url)
        self.use_pool(pool)
        try:
            await pool.open()
            if migrated and self.embedded is not None:
                await migrate(pool, VERSION)
            elif migrated:
                await require_current(pool, VERSION)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Close the parts in reverse order, then the database, even if a part fails."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close_database)
            for part in self.parts:
                stack.push_async_callback(part.close)

    async def _close_database(self) -> None:
        if "doorbell" in self.__dict__:
            await self.doorbell.close()
        for name in _OPENED:
            self.__dict__.pop(name, None)
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
        """Migrate the schema to this program's version; safe to call from many processes at once."""
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
        """Enqueue one job, or a list of `NewJob` in one statement, all or none; returns their ids.

        `options` are the fields of `NewJob`. With `connection` (psycopg, SQLAlchemy or Django) the jobs become part of
        the caller's own transaction and exist when that commits, which also wakes a worker.
        """
        jobs = new_jobs(operation, payload, options)
        if connection is not None:
            ids = await self._enqueue_in(connection, jobs)
        else:
            ids = await self._enqueue_own(jobs)
        return ids if isinstance(operation, (list, tuple)) else ids[0]

    async def _enqueue_in(self, connection: Any, jobs: Sequence[NewJob]) -> list[JobId]:
        wrapped = await wrap_connection(connection)
        async with wrapped.transaction() as session:
            rows = await self.catalog.prepare(jobs, session=session)
            enqueued = await self.queue.enqueue(rows, session=session)
            if self.settings.engine.ring_at_commit:
                await ring_at_commit(session, {row["queue"] for row in rows if not row["delay_seconds"]})
        return [one.id for one in enqueued]

    async def _enqueue_own(self, jobs: Sequence[NewJob]) -> list[JobId]:
        """Use a transaction of our own. The ids already exist, so a call whose answer was lost can be repeated."""

        began = time.monotonic()

        async def enqueue() -> list[JobId]:
            rows = await self.catalog.prepare(jobs)
            enqueued = await self.queue.enqueue(rows)
            self.doorbell.ring({row["queue"] for row in rows}, age_seconds=time.monotonic() - began)
            return [one.id for one in enqueued]

        return await retry_unavailable(enqueue, tries_max=_ENQUEUE_TRIES_MAX)

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
                reason = await self._why_open(id)
                raise WaitTimeout(f"job {id} is still {status} after {timeout:g} seconds{reason}")
            await asyncio.sleep(pause)
            pause = min(_WAIT_SECONDS_MAX, pause * 1.5)

    async def _why_open(self, id: JobId) -> str:
        """Why a job has not ended, as far as that can be determined quickly."""
        try:
            async with asyncio.timeout(_WHY_SECONDS_MAX):
                job = await self.get(id)
                reasons = [one.message for one in (await self.views.waiting_on([job]))[id]]
        except (BatchwrightError, TimeoutError):
            return ""
        if not reasons and job.status is JobStatus.RUNNING and job.locked_by is not None:
            reasons = [f"the worker {job.locked_by} is running it"]
        return f": {'; '.join(reasons)}" if reasons else ""

    async def get(self, job: JobId | UUID | str) -> Job:
        return await self.queue.get(job_id(job))

    async def events(self, job: JobId | UUID | str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """The job's history; pass the last id as `after` to continue."""
        return await self.queue.events(job_id(job), after=after, limit=limit)

    async def cancel(self, job: JobId | UUID | str, *, reason: str = "cancelled by request") -> int:
        """Cancel a job and its descendants; returns how many jobs were open."""
        return await self.queue.cancel([job_id(job)], reason=reason)

    async def recover(self, job: JobId | UUID | str) -> None:
        """Release a job whose worker is gone, without waiting for the rescue."""
        await self.queue.recover(job_id(job))
        await self._ring_for(job)

    async def rerun(self, job: JobId | UUID | str) -> None:
        """Rerun a FAILED or CANCELLED job."""
        await self.queue.rerun(job_id(job))
        await self._ring_for(job)

    async def _ring_for(self, job: JobId | UUID | str) -> None:
        self.doorbell.ring([(await self.get(job)).queue])

    # Batches ----------------------------------------------------------------------------------------------------

    async def batch(self, requests: AsyncRequests, **options: Unpack[BatchOptions]) -> AsyncBatch:
        """Submit a file or an iterable of requests as one batch.

        >>> requests = ({"custom_id": str(n), "messages": [{"role": "user", "content": text}]} for n, text in texts)
        >>> batch = await batchwright.batch(requests, model="small")
        >>> answers = {result.custom_id: result.text async for result in batch.results() if result.ok}

        A dict is a line of a batch file, with `body`, or the body itself, which may also contain a `custom_id`.
        Requests are written to the store as they come, not held in memory. The options are those of `BatchOptions`.
        """
        return await self.batches.submit(requests, **options)

    @property
    def batches(self) -> AsyncBatches:
        """All batches: `batches[id]`, `batches.list()`."""
        offered: AsyncBatches = cast("Any", self.part_named("batches").client())
        return offered

    # The HTTP server --------------------------------------------------------------------------------------------

    async def server(self) -> ApiServer:
        """The HTTP server for this client's settings; `start()` it, and `close()` it before the client."""
        from batchwright.api.server import open_server  # imported here: clients and workers need no web framework

        return await open_server(self, VERSION)

    # Workers ----------------------------------------------------------------------------------------------------

    def worker(self, queue: Queue | None = None) -> Worker:
        """A worker for this client's operations and parts; `await worker.run()` runs until `worker.stop()`."""
        self.add_operations()
        revive = self.embedded.ensure_running if self.embedded is not None else None
        return Worker(
            self.pool,
            self.operations,
            parts=self.parts,
            program=Program(child=self._child_program(), revive=revive, version=VERSION),
            queue=queue or self.queue,
            settings=self.settings.worker,
        )

    def health(self, worker: Worker) -> HealthServer | None:
        """The health page of one of this client's workers; None unless `worker.health_port` is set."""
        from batchwright.engine.worker.health import HealthServer, own_counts

        settings = self.settings.worker
        if settings.health_port is None:
            return None
        page = exposition_of(self, own_counts(worker))
        return HealthServer(worker, page, version=VERSION, host=settings.health_host, port=settings.health_port)

    def _child_program(self) -> ChildProgram:
        parts = {"factory": CHILD_PARTS, "settings": settings_document(self.settings)}
        return child_program(self.pool, self.operations, self.settings.engine, parts=parts, version=VERSION)
