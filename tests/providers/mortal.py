"""A worker that dies at the n-th point of a task: after a commit, or after a call that leaves the process.

To die before a call is the same as to die after the point before it. The worker runs in this process. After its death,
nothing that it does has any effect, and its run is discarded; another claim continues with the rows. The clock of the
contract server is used for the database as well, so tests do not sleep.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchwright.db.database import Database, Params, Pool, Row, Session
from batchwright.engine import policy
from batchwright.engine.catalog import Catalog
from batchwright.engine.context import Context
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.outcomes import Done, Settle, Snooze
from batchwright.engine.queue import Queue
from batchwright.errors import DatabaseUnavailable, Fenced
from batchwright.files.part import FilesPart
from batchwright.inference.http import Http
from batchwright.operations.registry import Registry
from batchwright.providers.directory import Directory
from batchwright.providers.jobs import RemoteJob, RemoteJobs
from batchwright.providers.operations import run_task
from batchwright.providers.process import TaskRunner, TaskTools
from batchwright.providers.submission import Submission, WantedTask
from batchwright.providers.tasks import PROCESS, Task, Tasks
from batchwright.providers.tools import AdapterTools
from batchwright.providers.upkeep import TaskUpkeep
from batchwright.webhooks.part import WebhooksPart
from tests.providers.task_stage import TaskStage, server_bucket
from tests.support import raw

ROUNDS_MAX = 400
ABANDON = """
UPDATE batchwright.job SET status = 'QUEUED', locked_by = NULL, lease_until = NULL, attempts = attempts - 1,
    run_after = %(now)s
WHERE id = %(id)s AND status = 'RUNNING'
"""
"""Sets a job to the state in which a rescue leaves it after its worker died, but does not count the death."""


class Mortal:
    """Counts the points that a worker passes, and stops it at one of them."""

    def __init__(self) -> None:
        self.on_point: Callable[[str], object] = lambda name: None
        """Called at every point; its exceptions are raised there."""
        self.passed: list[str] = []
        self.dies_at: int | None = None
        """The number of the point, from 1."""
        self.loses_at: int | None = None
        """The number of the commit whose answer is lost."""
        self.commits = 0
        self.died = asyncio.Event()

    def revive(self) -> None:
        self.passed.clear()
        self.died = asyncio.Event()

    async def pass_point(self, name: str) -> None:
        await self.require_life()
        self.passed.append(name)
        self.on_point(name)
        if len(self.passed) == self.dies_at:
            self.die()
        await self.require_life()

    def die(self) -> None:
        self.died.set()

    async def require_life(self) -> None:
        """Raise if the worker is dead."""
        if self.died.is_set():
            await asyncio.Event().wait()

    async def commit(self) -> None:
        self.commits += 1
        if self.commits == self.loses_at:
            raise DatabaseUnavailable("the answer to the commit was lost")
        await self.pass_point("commit")

    def around(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def dangerous(*args: Any, **options: Any) -> Any:
            await self.require_life()
            answer = await call(*args, **options)
            await self.pass_point(name)
            return answer

        return dangerous

    def guard(self, thing: Any, label: str) -> Any:
        return _Guarded(self, thing, label)


class _Guarded:
    """Wraps an object of which every method is a call that leaves the process."""

    def __init__(self, mortal: Mortal, thing: Any, label: str) -> None:
        self._mortal, self._thing, self._label = mortal, thing, label

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        return self._mortal.around(f"{self._label}.{name}", found) if inspect.iscoroutinefunction(found) else found


class MortalSource:
    """Connections of a worker that may die. Only commits are points, because reading changes nothing."""

    def __init__(self, pool: Pool, mortal: Mortal) -> None:
        self._pool = pool
        self._mortal = mortal

    async def rows(self, sql: str, params: Params | None = None) -> list[Row]:
        await self._mortal.require_life()
        found = await self._pool.rows(sql, params)
        if not sql.lstrip().upper().startswith("SELECT"):
            await self._mortal.commit()
        return found

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        await self._mortal.require_life()
        async with self._pool.transaction() as session:
            yield session
            await self._mortal.require_life()
        await self._mortal.commit()


class MortalHttp(Http):
    def __init__(self, mortal: Mortal) -> None:
        super().__init__()
        self._mortal = mortal

    async def ask(self, method: str, url: str, **options: Any) -> Any:
        return await self._mortal.around(f"{method} {url}", super().ask)(method, url, **options)

    @asynccontextmanager
    async def open(self, method: str, url: str, **options: Any) -> AsyncIterator[Any]:
        await self._mortal.require_life()
        async with super().open(method, url, **options) as incoming:
            await self._mortal.pass_point(f"{method} {url}")
            yield incoming


class MortalDirectory(Directory):
    """AWS has a client of its own."""

    mortal: Mortal

    def get(self, name: str) -> Any:
        adapter: Any = super().get(name)
        if hasattr(adapter, "_client") and not hasattr(adapter, "was_guarded"):
            adapter.was_guarded = True
            make = adapter._client

            @asynccontextmanager
            async def guarded() -> AsyncIterator[Any]:
                async with make() as client:
                    yield self.mortal.guard(client, name)

            adapter._client = guarded
        return adapter


class Quiet:
    """Drops events and progress."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def emit(self, claim: Claim, event: Any) -> None:
        self.events.append(event["event"])

    def progress(self, claim: Claim, current: int | None, total: int | None) -> None:
        pass


class Remembered(dict[str, Any]):
    """Remote jobs, including those that were deleted after their results were fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def __setitem__(self, id: str, job: Any) -> None:
        super().__setitem__(id, job)
        self.all.append(job)

    def clear(self) -> None:
        super().clear()
        self.all.clear()


class Ward:
    """Tasks on a stage, and workers that die while they run them."""

    def __init__(self, stage: TaskStage, http: MortalHttp, mortal: Mortal, folder: Path) -> None:
        self.mortal = mortal
        self.server = stage.server
        self.stage = stage
        self.reporter = Quiet()
        self.deaths = 0
        self.made = stage.server.world.jobs = Remembered()
        part, pool = stage.part, stage.batchwright.pool
        tools = AdapterTools(
            http,
            open_stored=part._read_stored,
            bucket=lambda root: mortal.guard(server_bucket(stage.server, folder)(root), "bucket"),
            environment=stage.environment,
            may_fetch_private=True,
            now=self.now,
        )
        self.directory = MortalDirectory(part.providers, part.settings, tools)
        self.directory.mortal = mortal
        settings = stage.batchwright.queue.settings
        self.queue = Queue(Database(pool, clock=self.now), settings)
        """The queue of users, which never fails."""
        self._queue = Queue(Database(MortalSource(pool, mortal), clock=self.now), settings)
        store = mortal.guard(stage.batchwright.store, "store")
        announcer = stage.batchwright.part(WebhooksPart).announcer
        files = stage.batchwright.part(FilesPart).files_in(store)
        self.tasks = Tasks(self.queue)
        self.jobs = RemoteJobs(self.queue)
        self.tools = TaskTools(
            announcer=announcer,
            catalog=Catalog(self._queue.database, Registry([run_task])),
            directory=self.directory,
            files=files,
            jobs=RemoteJobs(self._queue),
            store=store,
            tasks=Tasks(self._queue),
        )
        self.submission = Submission(
            self.tasks, Catalog(self.queue.database, Registry([run_task])), files, self.directory, part.settings
        )

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.server.clock.now(), UTC)

    async def submit(self, wanted: WantedTask) -> Task:
        task, _ = await self.submission.create(wanted)
        return task

    async def live(self, task: Task) -> Task:
        """Run the task to its end, whichever worker dies; waits only advance the clock."""
        for _ in range(ROUNDS_MAX):
            if not await self.round(task):
                return await self.tasks.get(task.id, tenant=None)
        raise AssertionError(f"{task.id} did not end: {await self.jobs.of(task.id)}")

    async def round(self, task: Task) -> bool:
        """Advance to the next run of the task and do it; False if the task has ended."""
        job = await self.queue.get(JobId(task.job_id))
        if job.finished_at is not None:
            return False
        if (seconds := (job.run_after - self.now()).total_seconds()) > 0:
            self.server.advance(seconds + 0.001)
        claim = await self.claim(task)
        assert claim is not None, job
        await self.run(claim, task)
        return True

    async def claim(self, task: Task, worker: str = "mortal") -> Claim | None:
        return await self.queue.claim_job(worker, JobId(task.job_id), [PROCESS])

    async def run(self, claim: Claim, task: Task) -> None:
        """Run the task's job once and settle it, or as much of that as happens before the worker dies."""
        running = asyncio.create_task(self.run_and_settle(claim, task))
        death = asyncio.create_task(self.mortal.died.wait())
        await asyncio.wait([running, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not self.mortal.died.is_set():
            await running
            return
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        self.deaths += 1
        self.mortal.dies_at = None
        self.mortal.on_point = lambda name: None
        self.mortal.revive()
        await raw(self.queue, ABANDON, id=task.job_id, now=self.now())

    async def run_and_settle(self, claim: Claim, task: Task, worker: str = "mortal") -> None:
        ctx = Context(claim, self.reporter, worker=worker)
        try:
            outcome = await TaskRunner(self.tools).run(ctx, task.id)
            if isinstance(outcome, Done):
                done = policy.succeed(claim, outcome.result, outcome.progress)
                await self._queue.succeed_with(done, worker, write=outcome.write, then=())
                return
            assert isinstance(outcome, Snooze)
            settle = policy.snooze(claim, outcome)
        except DatabaseUnavailable:  # in the settle; the engine would repeat it and find that it was committed
            await raw(self.queue, ABANDON, id=task.job_id, now=self.now())
            return
        except Fenced:
            return
        except Exception as error:
            settle = policy.react(claim, run_task_operation(), error)
            assert settle.verb != "fail", settle
        with suppress(DatabaseUnavailable):
            await self._settle(settle, worker)
            return
        await raw(self.queue, ABANDON, id=task.job_id, now=self.now())

    async def _settle(self, settle: Settle, worker: str) -> None:
        await self._queue.settle([settle], worker)

    async def tidy(self) -> None:
        """Run the upkeep of tasks, one hour later."""
        self.mortal.dies_at = None
        upkeep = TaskUpkeep(
            self.tools.tasks,
            self.tools.jobs,
            self.directory,
            self.tools.announcer,
            self.tools.store,
            self.stage.batchwright.settings.retention,
        )
        self.server.advance(3600)
        for round in upkeep.rounds():
            async with self._queue.database.transaction() as session:
                await round.run(session)
        await upkeep.cleaned()

    def started(self) -> list[Any]:
        """Remote jobs that cost money, since the last reset of the server."""
        return [job for job in self.made.all if job.begun_at is not None]

    async def rows(self, task: Task) -> list[RemoteJob]:
        return await self.jobs.of(task.id)


def run_task_operation() -> Any:
    return Registry([run_task]).get(PROCESS)


@asynccontextmanager
async def ward(stage: TaskStage, folder: Path) -> AsyncIterator[Ward]:
    mortal = Mortal()
    async with MortalHttp(mortal) as http:
        yield Ward(stage, http, mortal, folder)
