"""What batches wait for: noted in their rows for their users, and once in the log for operators."""

from __future__ import annotations

import logging
from collections import OrderedDict

from batchwright.batches.store import Batches
from batchwright.errors import DatabaseError, StorageFull, StorageUnavailable
from batchwright.storage.backend import FULL

log = logging.getLogger(__name__)

CREDENTIAL = "credential"
DISK = "disk"
KEY = "key"
STORE = "store"
_LOGGED_MAX = 1000


def reason_to_wait(error: BaseException) -> str | None:
    """What to wait for after this error: room on a disk, or the store; None if waiting does not help."""
    if isinstance(error, StorageFull) or (isinstance(error, OSError) and error.errno in FULL):
        return DISK
    return STORE if isinstance(error, StorageUnavailable) else None


class Waits:
    """The waits of one worker process."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._logged: OrderedDict[str, str] = OrderedDict()

    async def note(self, batch_id: str, reason: str, message: str) -> bool:
        """The batch cannot continue now; returns whether it may keep waiting."""
        if self._logged.get(batch_id) != reason:
            self._logged[batch_id] = reason
            log.warning("batch %s waits: %s", batch_id, message)
            if len(self._logged) > _LOGGED_MAX:
                self._logged.popitem(last=False)
        try:
            return await self._batches.note_wait(batch_id, reason, message)
        except DatabaseError:
            return True

    def end(self, batch_id: str) -> None:
        """What the batch waited for is available."""
        if self._logged.pop(batch_id, None) is not None:
            log.info("batch %s resumes", batch_id)
