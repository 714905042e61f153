"""Human verbs on many jobs at once: by filter, by inbox group, or a whole pipeline; bounded, and repeatable."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple
from uuid import UUID

from windlass.engine.jobs import JobId
from windlass.engine.queue import Queue
from windlass.engine.views import Cursor, JobFilter, Views
from windlass.errors import Conflict, NotFound
from windlass.states import JobStatus

BULK_MAX = 1_000
"""Jobs that one call changes at most; whoever wants more calls again."""
COUNT_MAX = 100_000
"""A dry run counts no further."""
_PER_STEP = 200
_PIPELINE_ROUNDS_MAX = 1_000

Verb = Literal["cancel", "rerun", "dismiss"]
_MEANT = {
    "cancel": (JobStatus.QUEUED, JobStatus.RUNNING),
    "rerun": (JobStatus.FAILED, JobStatus.CANCELLED),
    "dismiss": (JobStatus.FAILED,),
}


class Changed(NamedTuple):
    """What a verb did: jobs that matched, that were changed, and where another call goes on if some are left."""

    matched: int
    changed: int
    next: Cursor | None


class Bulk:
    """Verbs by filter. Jobs that belong to an object such as a batch are left to its own verbs."""

    def __init__(self, queue: Queue, views: Views) -> None:
        self._queue = queue
        self._views = views

    async def count(self, verb: Verb, wanted: JobFilter) -> int:
        """How many jobs the verb would be for; at most `COUNT_MAX`."""
        n = 0
        async for ids, _ in self._steps(verb, wanted, per_step=10_000):
            n += len(ids)
            if n >= COUNT_MAX:
                return COUNT_MAX
        return n

    async def cancel(
        self, wanted: JobFilter, *, after: Cursor | None = None, reason: str = "cancelled by request"
    ) -> Changed:
        """Cancel open jobs with everything below them."""
        return await self._do("cancel", wanted, after, lambda ids: self._cancel(ids, reason))

    async def rerun(self, wanted: JobFilter, *, after: Cursor | None = None) -> Changed:
        """Give FAILED and CANCELLED jobs another life; children of a parent that has ended are left to it."""
        return await self._do("rerun", wanted, after, self._rerun)

    async def dismiss(self, wanted: JobFilter, *, after: Cursor | None = None) -> Changed:
        """Take FAILED jobs out of the inbox; they stay FAILED."""
        return await self._do("dismiss", wanted, after, self._queue.dismiss)

    async def cancel_pipeline(
        self, id: UUID, *, tenant: str | None = None, reason: str = "cancelled by request"
    ) -> int:
        """Cancel whatever is open in a pipeline, until nothing is: a job that was just ending may have chained one."""
        await self._views.pipeline(id, tenant=tenant)
        total = 0
        for _ in range(_PIPELINE_ROUNDS_MAX):
            ids = await self._views.open_members(id, tenant=tenant, limit=_PER_STEP)
            if not ids:
                break
            total += await self._queue.cancel(ids, reason=reason)
        return total

    async def _do(
        self,
        verb: Verb,
        wanted: JobFilter,
        after: Cursor | None,
        act: Callable[[Sequence[JobId]], Awaitable[int]],
    ) -> Changed:
        matched = changed = 0
        async for ids, next in self._steps(verb, wanted, after=after, per_step=_PER_STEP):
            matched += len(ids)
            changed += await act(ids)
            if matched >= BULK_MAX:
                return Changed(matched, changed, next)
        return Changed(matched, changed, None)

    async def _cancel(self, ids: Sequence[JobId], reason: str) -> int:
        """Together; if one of them cannot be cancelled any more, one by one without it."""
        try:
            return await self._queue.cancel(ids, reason=reason)
        except (Conflict, NotFound):
            if len(ids) == 1:
                return 0
        return sum([await self._cancel([id], reason) for id in ids])

    async def _rerun(self, ids: Sequence[JobId]) -> int:
        n = 0
        for id in ids:
            with contextlib.suppress(Conflict, NotFound):
                await self._queue.rerun(id)
                n += 1
        return n

    async def _steps(
        self, verb: Verb, wanted: JobFilter, *, per_step: int, after: Cursor | None = None
    ) -> AsyncIterator[tuple[list[JobId], Cursor | None]]:
        """Page by page, with the place behind each page."""
        statuses = tuple(status for status in _MEANT[verb] if not wanted.statuses or status in wanted.statuses)
        if not statuses:
            return
        meant = replace(wanted, statuses=statuses, owned=False)
        if verb == "dismiss":
            meant = replace(meant, dismissed=False)
        while True:
            ids, after = await self._views.ids(meant, limit=per_step, after=after)
            if ids:
                yield ids, after
            if after is None:
                return
