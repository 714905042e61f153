"""The rows of worker processes: which are alive, what each serves, and which were silent for too long."""

from __future__ import annotations

from typing import Any

from batchwright.db.database import Database, Session
from batchwright.db.statements import statements

SQL = statements(__package__, "parts.sql", "workers.sql")

_SILENT_SECONDS = 30.0
"""A worker sends a heartbeat every ten seconds; one that was silent for this long may be dead."""
_IDLE_MAX = 32


class Workers:
    """The worker processes of this database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def register(self, **columns: Any) -> None:
        """Register a worker; one that is already registered is alive again."""
        on_demand = {"on_demand_types": None, "on_demand_queues": None}
        await self._database.ask(SQL["register"], {**on_demand, **columns})

    async def heartbeat(self, worker: str, *, running: int, stopping: bool, broken: str | None = None) -> int | None:
        """How many live workers are equal to this one; None if the worker has no row and must register again."""
        params = {"id": worker, "running": running, "stopping": stopping, "broken": broken}
        rows = await self._database.ask(SQL["heartbeat"], {**params, "silent_seconds": _SILENT_SECONDS})
        return int(rows[0][0]) if rows else None

    async def leave(self, worker: str) -> None:
        """A worker stops normally: it is no longer alive, but the queues that it served stay known for a while."""
        await self._database.ask(SQL["leave"], {"id": worker})

    async def count_idle(self, queue: str, job_type: str) -> int:
        """Workers that take jobs of this queue on demand and have none, while none is due. At most 32."""
        params = {"queue": queue, "job_type": job_type, "silent_seconds": _SILENT_SECONDS, "limit": _IDLE_MAX}
        ((idle,),) = await self._database.ask(SQL["idle"], params)
        return int(idle)

    async def remove_dead(self, silent_seconds: float, *, session: Session | None = None) -> int:
        """Forget workers that were silent for this long; returns how many."""
        return len(await self._database.ask(SQL["remove_dead"], {"silent_seconds": silent_seconds}, session))
