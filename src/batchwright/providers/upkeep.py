"""Ends tasks that no job drives any more, and removes staged inputs and old tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from batchwright.db.database import Session
from batchwright.engine.jobs import JobId
from batchwright.engine.retention import RetentionSettings
from batchwright.engine.upkeep import Round
from batchwright.errors import BatchwrightError, Conflict, NotFound, StorageError
from batchwright.providers.contract import Request
from batchwright.providers.directory import Directory
from batchwright.providers.jobs import RemoteJob, RemoteJobs
from batchwright.providers.process import EVENTS, FOLDER, make_request
from batchwright.providers.tasks import Abandoned, Ending, Tasks
from batchwright.storage import Store
from batchwright.webhooks.announcer import Announcer

log = logging.getLogger(__name__)

_CLEAN_EVERY_SECONDS = 15.0
_EVERY_SECONDS = 5.0
_OLD_EVERY_SECONDS = 600.0
_KEYS_KEPT_SECONDS = 30 * 86_400.0
_DAYS_MAX = 36_500.0
_PAGE = 100


class TaskUpkeep:
    """Upkeep rounds of every worker."""

    def __init__(
        self,
        tasks: Tasks,
        jobs: RemoteJobs,
        directory: Directory,
        announcer: Announcer,
        store: Store,
        retention: RetentionSettings,
    ) -> None:
        self._tasks = tasks
        self._jobs = jobs
        self._directory = directory
        self._announcer = announcer
        self._store = store
        self._retention = retention
        self._cleaning: asyncio.Task[None] | None = None

    def rounds(self) -> list[Round]:
        return [
            Round("tasks", _EVERY_SECONDS, self.look),
            Round("staged inputs of tasks", _CLEAN_EVERY_SECONDS, self.clean_up),
            Round("old tasks", _OLD_EVERY_SECONDS, self.remove_old),
        ]

    async def close(self) -> None:
        """Stop without waiting; other workers retry what is not removed yet."""
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)

    async def look(self, session: Session) -> bool:
        """End tasks whose job is gone, and tasks that no worker picked up in time."""
        await self._tasks.wake_cancelled(session=session)
        page = await self._tasks.abandoned(_PAGE, session=session)
        for task in page:
            try:
                await self._fail(task)
            except Exception:  # one failure must not stop the others
                log.exception("the job of task %s is gone, and the task could not be ended", task.id)
        return len(page) == _PAGE

    async def _fail(self, task: Abandoned) -> None:
        message = (
            "The job of this task failed. Look for its key at the provider before you repeat the task: the provider "
            "may be working on it."
        )
        if task.job_status == "QUEUED":
            message = "No worker picked up this task before its timeout; nothing was submitted."
        error = {"kind": "fatal", "code": "abandoned", "message": message}
        async with self._tasks.queue.database.transaction() as session:
            if task.job_status == "QUEUED":
                await self._tasks.queue.cancel(
                    [JobId(task.job_id)], reason="the task has ended", owned=True, session=session
                )
            status = await self._tasks.fail(task.id, Ending(error=error), session=session)
            if status is not None:
                await self._jobs.abandon(task.id, error, session=session)
                log.error("task %s fails: %s", task.id, message)
                await self._announcer.announce(task.tenant, task.id, EVENTS[status], session)

    async def clean_up(self, session: Session) -> bool:
        """Remove the staged inputs of ended jobs whose worker could not do it or has died.

        The calls to providers come after the round: a transaction must not wait for them.
        """
        if self._cleaning is not None and not self._cleaning.done():
            return False
        page = await self._jobs.take_unclean(_PAGE, session=session)
        if page:
            self._cleaning = asyncio.create_task(self._clean(page))
        return False

    async def cleaned(self) -> None:
        """Wait until removal was tried for everything that a round found."""
        if self._cleaning is not None:
            await self._cleaning

    async def _clean(self, page: Sequence[RemoteJob]) -> None:
        for row in page:
            try:
                request = await self._request(row)
                await self._directory.get(row.provider).clean_up(request, row.staged, row.job)
                await self._jobs.clean(row)
            except BatchwrightError as error:
                log.warning("%s: the staged inputs at %s are not removed yet: %s", row.key, row.provider, error)
            except Exception:  # a faulty adapter must not stop the others
                log.exception("%s: the staged inputs at %s are not removed", row.key, row.provider)

    async def _request(self, row: RemoteJob) -> Request:
        """The request to the provider. A job without a task belongs to a batch, and its key is enough."""
        if row.owner.startswith("task_"):
            return make_request(await self._tasks.get(row.owner, tenant=None), row.key, row.model, row.input_ids)
        return Request(key=row.key, task_type="completion", model=row.model, inputs=())

    async def remove_old(self, session: Session) -> bool:
        """Remove tasks past their retention, and the results of their jobs; the result file stays."""
        await self._tasks.clear_keys(_KEYS_KEPT_SECONDS, 500)
        try:
            removed = await self._tasks.remove_old(min(self._retention.ended_days, _DAYS_MAX) * 86_400.0, _PAGE)
        except (Conflict, NotFound):
            return False
        for id in removed:
            try:
                keys = [found.key async for found in self._store.list(f"{FOLDER}/{id}")]
                await self._store.delete(*keys)
            except StorageError as error:
                log.warning("the results of %s are not removed: %s", id, error)
        return len(removed) == _PAGE
