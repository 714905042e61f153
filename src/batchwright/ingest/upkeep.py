"""Periodic upkeep of documents: end abandoned items and runs, and remove what is no longer needed."""

from __future__ import annotations

import logging
import time

from batchwright.db.database import Session
from batchwright.engine.retention import RetentionSettings
from batchwright.errors import StorageError
from batchwright.inference.spending import Spending
from batchwright.ingest.collections import Collections
from batchwright.ingest.context import FOLDER, Tools
from batchwright.ingest.items import ItemFailure, Items
from batchwright.ingest.ledger import doubt_ended
from batchwright.ingest.runs import Runs
from batchwright.ingest.settings import IngestSettings

log = logging.getLogger(__name__)
_PAGE = 200
_VECTORS = 50
_SETTLE_SECONDS = 2.0
_DAY = 86_400.0
_DAYS_MAX = 36_500.0
_RETIRED_SECONDS = 3_600.0
"""How long a replaced version is kept, for readers that still use it."""
_RESUMED_SECONDS = 900.0
"""How long after a resume an item may still go to sleep, because it had seen the run as parked."""


class DocumentUpkeep:
    """Rounds of upkeep; each can safely be repeated, and stopped halfway."""

    def __init__(
        self, tools: Tools, collections: Collections, settings: IngestSettings, retention: RetentionSettings
    ) -> None:
        self._runs = Runs(tools.queue)
        self._items = Items(tools.queue)
        self._library = tools.library
        self._spaces = tools.spaces
        self._collections = collections
        self._answers = tools.answers
        self._spending = Spending(tools.queue.database)
        self._store = tools.store
        self._settings = settings
        self._retention = retention

    async def end_abandoned(self, session: Session) -> bool:
        """End items, runs and requests whose job is gone: it killed its workers, or it was removed."""
        items = await self._items.abandoned(_PAGE, session=session)
        for id, status in items:
            failure = ItemFailure(
                kind="Fatal",
                code="job_lost",
                step="ENQUEUED",
                message=f"its job ended as {status} without ending it; it may have killed its workers",
            )
            await self._items.fail(id, failure, session=session)
        runs = await self._runs.abandoned(_PAGE, session=session)
        for run_id, job_status in runs:
            message = f"its job {f'ended as {job_status}' if job_status else 'is gone'}, and did not end it"
            error = {"kind": "Fatal", "code": "job_lost", "message": message}
            await self._runs.fail(run_id, error, session=session)
        calls = await doubt_ended(self._runs.queue, _PAGE, session=session)
        return _PAGE in (len(items), len(runs), calls)

    async def wake_resumed(self, session: Session) -> bool:
        """Wake items whose worker saw the run as parked, and put them to sleep just after it was resumed."""
        return await self._items.wake_late(_RESUMED_SECONDS, _PAGE, session=session) == _PAGE

    async def remove_versions(self, session: Session) -> bool:
        """Remove retired versions with their rows and texts. Rows go first: a text that is left behind does no harm."""
        unused = await self._library.unused(_RETIRED_SECONDS, _PAGE)
        for version in unused:
            if await self._library.remove(version) and version.text_key is not None:
                await self._delete(version.text_key)
        return len(unused) == _PAGE

    async def settle_vectors(self, session: Session) -> bool:
        """Put new vectors into their index, which takes longer than storing them. Until then, search scans them.

        It works for a short time only, because the transaction of the round stays open meanwhile.
        """
        ends_at = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < ends_at:
            if await self._spaces.settle(_VECTORS) < _VECTORS:
                return False
        return True

    async def remove_collections(self, session: Session) -> bool:
        """Remove deleted collections, page by page, and unused spaces."""
        await self._spaces.drop_empty()
        for id in await self._collections.deleted():
            keys = [found.key async for found in self._store.list(f"{FOLDER}/{id}/")]
            await self._store.delete(*keys)
        return await self._collections.remove_deleted()

    async def evict_answers(self, session: Session) -> bool:
        keep_seconds = self._settings.answers_kept_days * _DAY
        return await self._answers.evict(keep_seconds, 10 * _PAGE, session=session) == 10 * _PAGE

    async def forget_spending(self, session: Session) -> bool:
        return await self._spending.forget(_PAGE, session=session) == _PAGE

    async def remove_runs(self, session: Session) -> bool:
        """Remove runs that ended long ago, with their items. Documents stay, and search still finds them."""
        keep_seconds = min(self._retention.ended_days, _DAYS_MAX) * _DAY
        removed = await self._runs.remove_old(keep_seconds, _PAGE)
        for run in removed:
            for key in run.object_keys:
                await self._delete(key)
        return len(removed) == _PAGE

    async def _delete(self, key: str) -> None:
        try:
            await self._store.delete(key)
        except StorageError as error:
            log.warning("%s was not removed: %s", key, error)
