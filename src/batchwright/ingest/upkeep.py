"""What must be done for documents now and then: end what nobody drives, and remove what nobody needs."""

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
"""So long after it was replaced a version is kept, for those who are just reading it."""
_RESUMED_SECONDS = 900.0
"""So long after a run was resumed, an item may still come to sleep because it had seen that the run was parked."""


class DocumentUpkeep:
    """Rounds of upkeep; each is safe to be repeated, and to be stopped half way."""

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
        """Items, runs and requests whose job ended without them: it killed its workers, or somebody removed it."""
        items = await self._items.abandoned(_PAGE, session=session)
        for id, status in items:
            failure = ItemFailure(
                kind="Fatal",
                code="job_lost",
                step="ENQUEUED",
                message=f"its job ended {status} without ending it; perhaps it has killed its workers",
            )
            await self._items.fail(id, failure, session=session)
        runs = await self._runs.abandoned(_PAGE, session=session)
        for run_id, job_status in runs:
            message = f"its job ended {job_status or 'unseen'} without ending it"
            error = {"kind": "Fatal", "code": "job_lost", "message": message}
            await self._runs.fail(run_id, error, session=session)
        calls = await doubt_ended(self._runs.queue, _PAGE, session=session)
        return _PAGE in (len(items), len(runs), calls)

    async def wake_resumed(self, session: Session) -> bool:
        """Items whose worker saw that the run was parked, and put them to sleep just after it was resumed."""
        return await self._items.wake_late(_RESUMED_SECONDS, _PAGE, session=session) == _PAGE

    async def remove_versions(self, session: Session) -> bool:
        """Retired versions with their rows and texts. The rows go first: a text that stays behind harms nobody."""
        unused = await self._library.unused(_RETIRED_SECONDS, _PAGE)
        for version in unused:
            if await self._library.remove(version) and version.text_key is not None:
                await self._delete(version.text_key)
        return len(unused) == _PAGE

    async def settle_vectors(self, session: Session) -> bool:
        """Put new vectors into their index, which takes longer than to store them; until then they are scanned.

        For a short time only: the transaction of the round waits meanwhile.
        """
        ends_at = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < ends_at:
            if await self._spaces.settle(_VECTORS) < _VECTORS:
                return False
        return True

    async def remove_collections(self, session: Session) -> bool:
        """Collections that were deleted, page by page, and spaces that nothing uses any more."""
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
        """Runs that ended long ago, with their items; documents stay, and so does what search finds."""
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
