"""Removes what batches left in the store for coordinators that have ended."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from uuid import UUID

from batchwright.db.database import Database, Session
from batchwright.errors import StorageError
from batchwright.ingest.embeddings.ledger import SQL
from batchwright.ingest.embeddings.parts import FOLDER
from batchwright.storage import Store
from batchwright.storage.backend import Found

log = logging.getLogger(__name__)
_KEEP = timedelta(days=7)
"""How long the parts of a failed or cancelled job are kept: it can be rerun, and then needs them."""
_KEEP_UNKNOWN = timedelta(days=30)
"""The same for a job that is not in this database: it belongs to another one, or was removed long ago."""
_PAGE = 1000
_PATIENCE_SECONDS = 5.0


class EmbeddingUpkeep:
    """Upkeep rounds of every worker. The position of a round is kept in memory."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store
        self._after: str | None = None

    async def clean(self, session: Session) -> bool:
        """Remove one page of old parts. Returns whether there are more."""
        await self._database.ask(SQL["end_forgotten"], {"age_seconds": _KEEP.total_seconds()}, session)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                page = await self._page()
                await self._remove(page, session)
        except (StorageError, TimeoutError) as error:
            log.warning("parts of embeddings were not removed: %s", error)
            page = []
        self._after = page[-1].key if len(page) == _PAGE else None
        return self._after is not None

    async def _page(self) -> list[Found]:
        found: list[Found] = []
        async for one in self._store.list(FOLDER, self._after):
            found.append(one)
            if len(found) == _PAGE:
                break
        return found

    async def _remove(self, page: list[Found], session: Session) -> None:
        """Parts that are old, and whose job has ended."""
        ((now,),) = await self._database.ask(SQL["clock"], {}, session)
        old = [(one, id) for one in page if now - one.modified_at > _KEEP and (id := _owner(one.key)) is not None]
        ids = list({id for _, id in old})
        is_open: dict[UUID, bool] = dict(await self._database.ask(SQL["known_jobs"], {"ids": ids}, session))
        gone = [one for one, id in old if not is_open.get(id, now - one.modified_at <= _KEEP_UNKNOWN)]
        await self._store.delete(*(one.key for one in gone))


def _owner(key: str) -> UUID | None:
    try:
        return UUID(key.split("/")[1])
    except (IndexError, ValueError):
        return None
