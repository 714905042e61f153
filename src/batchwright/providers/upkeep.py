"""Looks after tasks that nobody else moves on, removes what was staged, and what is old."""

from __future__ import annotations

import logging

from batchwright.db.database import Session
from batchwright.engine.jobs import JobId
from batchwright.engine.retention import RetentionSettings
from batchwright.engine.upkeep import Round
from batchwright.errors import Conflict, NotFound, StorageError
from batchwright.providers.process import EVENTS, FOLDER
from batchwright.providers.tasks import Abandoned, Ending, Tasks
from batchwright.storage import Store
from batchwright.webhooks.announcer import Announcer

log = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0
_OLD_EVERY_SECONDS = 600.0
_KEYS_KEPT_SECONDS = 30 * 86_400.0
_DAYS_MAX = 36_500.0
_PAGE = 100


class TaskUpkeep:
    """Upkeep rounds of every worker."""

    def __init__(self, tasks: Tasks, announcer: Announcer, store: Store, retention: RetentionSettings) -> None:
        self._tasks = tasks
        self._announcer = announcer
        self._store = store
        self._retention = retention

    def rounds(self) -> list[Round]:
        return [Round("tasks", _EVERY_SECONDS, self.look), Round("old tasks", _OLD_EVERY_SECONDS, self.remove_old)]

    async def look(self, session: Session) -> bool:
        """End tasks whose job is gone, and those that no worker came to in time."""
        await self._tasks.wake_cancelled(session=session)
        page = await self._tasks.abandoned(_PAGE, session=session)
        for task in page:
            try:
                await self._fail(task)
            except Exception:  # the others need help all the same
                log.exception("task %s could not be looked after", task.id)
        return len(page) == _PAGE

    async def _fail(self, task: Abandoned) -> None:
        message = (
            "The job of this task could not be run to its end; look for its key at the provider before you repeat it."
        )
        if task.job_status == "QUEUED":
            message = "No worker came to this task before its time was over; nothing was submitted."
        error = {"kind": "fatal", "code": "abandoned", "message": message}
        async with self._tasks.queue.database.transaction() as session:
            if task.job_status == "QUEUED":
                await self._tasks.queue.cancel(
                    [JobId(task.job_id)], reason="the task is over", owned=True, session=session
                )
            status = await self._tasks.fail(task.id, Ending(error=error), session=session)
            if status is not None:
                log.error("task %s fails: %s", task.id, message)
                await self._announcer.announce(task.tenant, task.id, EVENTS[status], session)

    async def remove_old(self, session: Session) -> bool:
        """Remove tasks that nobody can ask for any more, and the results of their jobs; the result file stays."""
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
