"""Queues by name, and which of them are paused."""

from __future__ import annotations

import difflib

from batchwright.db.database import Database
from batchwright.db.statements import statements
from batchwright.errors import NotFound

SQL = statements(__package__, "named_queues.sql")


class NamedQueues:
    """The queues of this database; a queue exists once it has had a job."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> dict[str, bool]:
        """Every queue that was ever used, and whether it is paused."""
        return dict(await self._database.ask(SQL["all"]))

    async def pause(self, name: str) -> None:
        """Workers claim no more jobs of this queue; running jobs continue."""
        await self._mark("pause", name)

    async def resume(self, name: str) -> None:
        await self._mark("resume", name)

    async def _mark(self, verb: str, name: str) -> None:
        if not await self._database.ask(SQL[verb], {"queue": name}):
            known = difflib.get_close_matches(name, await self.all(), n=1)
            hint = f"; did you mean {known[0]!r}?" if known else "; a queue exists from its first job on"
            raise NotFound(f"there is no queue {name!r}{hint}")
