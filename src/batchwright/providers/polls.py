"""Polls of one provider in one process: if several jobs are due at about the same time, one list call serves them.

    poll ─ few at this time, or the provider has no list ─▶ a call for this job alone
      │
      └─ wait for the current list call ─▶ one list call for all who wait ─▶ the job is listed: its status
                                                                           └─▶ it is not: a call for this job alone

A list call serves only callers that came before it began, so no status is older than the call that gets it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from batchwright.errors import OperationError, RateLimited
from batchwright.providers.contract import Adapter, Job, Status
from batchwright.providers.errors import reading

log = logging.getLogger(__name__)

SINGLE_MAX = 3
"""Number of polls within a tenth of the poll interval that are sent one by one; further ones share list calls."""
_GATHER_SECONDS_MAX = 0.2
"""How long a list call waits for others to join."""
_PAUSE_POLLS = 5
"""Number of poll intervals without list calls after a failed one."""
_LISTED_PER_CALL = 100


@dataclass(frozen=True, slots=True)
class _Question:
    job: Job
    answer: asyncio.Future[Status | RateLimited | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Polls:
    """The polls of one provider."""

    def __init__(self, poll_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._poll_seconds = poll_seconds
        self._recent: deque[float] = deque(maxlen=SINGLE_MAX + 1)
        self._lists_again_at = 0.0
        self._list_call = asyncio.Lock()
        self._waiting: list[_Question] = []

    async def poll(self, adapter: Adapter, job: Job) -> Status:
        """The status of the job from `adapter.poll`, or from a list that was requested after this call."""
        if not self._is_shared(adapter):
            return await adapter.poll(job)
        question = _Question(job)
        self._waiting.append(question)
        try:
            async with self._list_call:
                if not question.answer.done():
                    await self._ask_list(adapter)
        finally:
            question.answer.cancel()
        found = question.answer.result()
        if isinstance(found, RateLimited):
            raise found
        return await adapter.poll(job) if found is None else found

    def _is_shared(self, adapter: Adapter) -> bool:
        now = self._now()
        self._recent.append(now)
        is_busy = len(self._recent) > SINGLE_MAX and now - self._recent[0] <= self._poll_seconds / 10
        return adapter.abilities.can_survey and now >= self._lists_again_at and (is_busy or bool(self._waiting))

    async def _ask_list(self, adapter: Adapter) -> None:
        """Answer all current waiters. The next list call serves those that come later."""
        await asyncio.sleep(min(_GATHER_SECONDS_MAX, self._poll_seconds / 10))
        asked = [one for one in self._waiting if not one.answer.done()]
        self._waiting = []
        try:
            found = await self._survey(adapter, [one.job for one in asked])
            for one in asked:
                if not one.answer.done():
                    one.answer.set_result(found if isinstance(found, RateLimited) else found.get(one.job.external_id))
        finally:
            self._waiting = [one for one in asked if not one.answer.done()] + self._waiting

    async def _survey(self, adapter: Adapter, jobs: Sequence[Job]) -> Mapping[str, Status] | RateLimited:
        """A rate limit applies to all waiters. After any other error, each job is polled by itself for a while."""
        try:
            return await adapter.survey(jobs)
        except RateLimited as error:
            return error
        except OperationError as error:
            log.warning("polling the jobs of %s one by one, because its list failed: %s", adapter.name, error)
            self._lists_again_at = self._now() + _PAUSE_POLLS * self._poll_seconds
            return {}


async def look_up(
    jobs: Sequence[Job],
    listed: AsyncGenerator[Mapping[str, Any], None],
    id_of: Callable[[Mapping[str, Any]], Any],
    read: Callable[[Job, Mapping[str, Any]], Status | None],
) -> dict[str, Status]:
    """The statuses of these jobs from a provider's list; adapters use it as the body of `survey`.

    Reading the list takes at most half of the calls that it saves. Jobs for which `read` has no status are left out.
    """
    wanted = {job.external_id: job for job in jobs}
    left = max(1, len(wanted) // 2) * _LISTED_PER_CALL
    found: dict[str, Status] = {}
    with reading():
        async with aclosing(listed):
            async for entry in listed:
                job = wanted.pop(id_of(entry), None)
                if job is not None and (status := read(job, entry)) is not None:
                    found[job.external_id] = status
                left -= 1
                if not wanted or left <= 0:
                    break
    return found
