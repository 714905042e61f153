"""Operator verbs on many jobs at once: by filter, by inbox group, or a whole pipeline. Bounded and repeatable."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple
from uuid import UUID

from batchwright.engine.jobs import JobId
from batchwright.engine.queue import Queue
from batchwright.engine.views import Cursor, JobFilter, Views
from batchwright.errors import Conflict, NotFound
from batchwright.states import JobStatus

BULK_MAX = 1_000
"""Maximum number of jobs that one call changes; call again for more."""
COUNT_MAX = 100_000
"""Maximum number of jobs that a dry run counts."""
_COUNTED_PER_STEP = 10_000
_PER_STEP = 200
_STEPS_MAX = 50
_PIPELINE_ROUNDS_MAX = 1_000

Verb = Literal["cancel", "rerun", "dismiss"]
_ALLOWED_STATUSES = {
    "cancel": (JobStatus.QUEUED, JobStatus.RUNNING),
    "rerun": (JobStatus.FAILED, JobStatus.CANCELLED),
    "dismiss": (JobStatus.FAILED,),
}


class Changed(NamedTuple):
    """What a verb did: jobs matched, jobs changed, and where another call continues if some are left."""

    matched: int
    changed: int
    next: Cursor | None


class Bulk:
    """Verbs by filter. They skip jobs that belong to an object such as a batch, which has its own verbs."""

    def __init__(self, queue: Queue, views: Views) -> None:
        self._queue = queue
        self._views = views

    async def count(self, verb: Verb, wanted: JobFilter) -> int:
        """How many jobs the verb would apply to; at most `COUNT_MAX`."""
        narrowed = _narrow(verb, wanted)
        n, after = 0, None
        while narrowed is not None and n < COUNT_MAX:
            ids, after = await self._views.ids(narrowed, limit=_COUNTED_PER_STEP, after=after)
            n += len(ids)
            if after is None:
                break
        return min(n, COUNT_MAX)

    async def cancel(
        self, wanted: JobFilter, *, after: Cursor | None = None, reason: str = "cancelled by request"
    ) -> Changed:
        """Cancel open jobs with their descendants, which may be more jobs than matched.

        A matching parent is cancelled together with its children: if they were cancelled first, it would end as FAILED.
        """

        async def act(ids: Sequence[JobId], narrowed: JobFilter) -> int:
            return await self._cancel(await self._views.with_ancestors(ids, narrowed), reason)

        return await self._do("cancel", wanted, after, act)

    async def rerun(self, wanted: JobFilter, *, after: Cursor | None = None) -> Changed:
        """Rerun FAILED and CANCELLED jobs, except children of a parent that has ended: rerun the parent instead."""
        return await self._do("rerun", wanted, after, lambda ids, _: self._rerun(ids))

    async def dismiss(self, wanted: JobFilter, *, after: Cursor | None = None) -> Changed:
        """Remove FAILED jobs from the inbox; they stay FAILED."""
        return await self._do("dismiss", wanted, after, lambda ids, _: self._queue.dismiss(ids))

    async def cancel_pipeline(
        self, id: UUID, *, tenant: str | None = None, reason: str = "cancelled by request"
    ) -> int:
        """Cancel open jobs of a pipeline until none is left: a job that was just ending may have chained another."""
        await self._views.pipeline(id, tenant=tenant)
        total = 0
        for _ in range(_PIPELINE_ROUNDS_MAX):
            ids = await self._views.open_members(id, tenant=tenant, limit=_PER_STEP)
            if not ids:
                break
            total += await self._cancel(ids, reason)
        return total

    async def _do(
        self,
        verb: Verb,
        wanted: JobFilter,
        after: Cursor | None,
        act: Callable[[Sequence[JobId], JobFilter], Awaitable[int]],
    ) -> Changed:
        narrowed = _narrow(verb, wanted)
        matched = changed = 0
        if narrowed is None:
            return Changed(0, 0, None)
        for _ in range(_STEPS_MAX):
            ids, after = await self._views.ids(narrowed, limit=min(_PER_STEP, BULK_MAX - matched), after=after)
            matched += len(ids)
            changed += await act(ids, narrowed) if ids else 0
            if after is None or matched >= BULK_MAX:
                break
        return Changed(matched, changed, after)

    async def _cancel(self, ids: Sequence[JobId], reason: str) -> int:
        """Cancel all together; if one of them can no longer be cancelled, cancel the others one by one."""
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


def _narrow(verb: Verb, wanted: JobFilter) -> JobFilter | None:
    """The filter limited to jobs that allow the verb; None when there can be none."""
    statuses = tuple(status for status in _ALLOWED_STATUSES[verb] if not wanted.statuses or status in wanted.statuses)
    if not statuses or wanted.owned or (verb == "dismiss" and wanted.dismissed):
        return None
    dismissed = False if verb == "dismiss" else wanted.dismissed
    return replace(wanted, statuses=statuses, owned=False, dismissed=dismissed)
