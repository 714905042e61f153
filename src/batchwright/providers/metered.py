"""An adapter whose calls come out of a rate budget that all workers share.

    stage, submit, find, poll    ask the budget first; if they must wait, they send nothing and say for how long
    results, cancel, clean_up    do not wait, because they finish work; what they use becomes a debt

Each of these may send several HTTP requests: those beyond the first become a debt, too. A provider that answers 429
stops the calls of all workers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from typing import Any

from batchwright.errors import RateLimited
from batchwright.inference.budgets import RateBudget, Reservation
from batchwright.inference.feedback import NO_FEEDBACK, Feedback
from batchwright.providers.contract import (
    Adapter,
    Cancelled,
    Job,
    Problem,
    PutOff,
    Request,
    Result,
    Staged,
    Status,
)

_LEASE_SECONDS = 900.0
"""Staging and results may take long; the slot of a worker that died is freed after this time."""


class MeteredAdapter(Adapter):
    """Wraps an adapter and limits its calls to the budget."""

    def __init__(self, adapter: Adapter, budget: RateBudget) -> None:
        super().__init__(adapter.settings, adapter.tools)
        self.abilities = adapter.abilities
        self.budget = budget
        self._adapter = adapter
        self._counted = 0
        self._holder = f"{socket.gethostname()}:{os.getpid()}"

    def __getattr__(self, name: str) -> Any:
        """Attributes that only some adapters have, and the adapter's name."""
        return getattr(self._adapter, name)

    def missing_credentials(self) -> str | None:
        return self._adapter.missing_credentials()

    def validate(self, request: Request) -> Sequence[Problem]:
        return self._adapter.validate(request)

    async def inspect(self, request: Request) -> Sequence[Problem]:
        return await self._adapter.inspect(request)

    async def check(self) -> str:
        return await self._adapter.check()

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        async with self._call(), aclosing(_generator(self._adapter.stage(request, staged))) as steps:
            async for step in steps:
                yield step

    async def submit(self, request: Request, staged: Staged) -> Job:
        async with self._call():
            return await self._adapter.submit(request, staged)

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        async with self._call():
            return await self._adapter.find(request, staged, since)

    async def poll(self, job: Job) -> Status:
        async with self._call():
            return await self._adapter.poll(job)

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        async with self._call():
            return await self._adapter.survey(jobs)

    async def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        results = _generator(self._adapter.results(request, job, status))
        async with self._call(may_wait=False), aclosing(results):
            async for result in results:
                yield result

    async def cancel(self, job: Job) -> Cancelled:
        async with self._call(may_wait=False):
            return await self._adapter.cancel(job)

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:
        async with self._call(may_wait=False):
            await self._adapter.clean_up(request, staged, job)

    @asynccontextmanager
    async def _call(self, *, may_wait: bool = True) -> AsyncIterator[None]:
        found = await self.budget.reserve(0, holder=self._holder, lease_seconds=_LEASE_SECONDS)
        if not isinstance(found, Reservation) and may_wait:
            raise PutOff(found.seconds, found.reason)
        began, feedback = time.monotonic(), NO_FEEDBACK
        try:
            yield
        except RateLimited as error:
            seconds = time.monotonic() - began
            feedback = Feedback(is_refused=True, retry_after=error.retry_after, seconds_ago=seconds)
            raise
        finally:
            if isinstance(found, Reservation):
                await self.budget.settle(found, None, requests=self._count(), feedback=feedback)
            else:
                await self.budget.add_debt(self._count(), feedback)

    def _count(self) -> int:
        """Number of requests since the last call, whoever sent them; 1 if the adapter does not count them."""
        if (service := getattr(self._adapter, "service", None)) is None:
            return 1
        new = int(service.calls) - self._counted
        self._counted += new
        return new


def _generator(values: Any) -> Any:
    """Makes any iterator closable."""
    return values if hasattr(values, "aclose") else _closable(values)


async def _closable(values: Any) -> Any:
    async for value in values:
        yield value
