"""One job at a provider, from the intent until its results can be fetched; paid for once, whatever crashes when.

    planned ─ stage ─▶ staged ─ commit, one request, commit ─▶ submitted ─ poll … poll ─▶ Ready
                          ▲            │
                          │            └─ in doubt: find it ─▶ adopt it
                          └──────────────────────┴─ it does not exist

An errand does what can be done now and says when to come back. It keeps no state: the next one, perhaps in another
process, reads the row and continues. A failed call only delays the next one, because it says nothing about the job.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from batchwright.db.database import Session
from batchwright.engine.owned import Held, absolve, fenced
from batchwright.errors import Fatal, OperationError, RateLimited, SchemaInvalid, Transient
from batchwright.providers.contract import Adapter, InDoubt, Job, Phase, PutOff, Request, Result, Status
from batchwright.providers.jobs import JobEnding, RemoteJob, RemoteJobs

log = logging.getLogger(__name__)

ERROR_ANSWERS_MAX = 3
"""Number of error answers in a row that fails a job."""
CALL_SECONDS_FIRST = 5.0
"""Pause after the first failed call; each further failure doubles it."""
CALL_SECONDS_MAX = 600.0
_DOUBT_SECONDS = 5.0
_SEND_SECONDS_MAX = 20.0
"""Maximum time from the commit of `submitting` to the first byte sent. After a longer pause, look for the job first."""
_ERROR_ANSWERS = "error_answers"


@dataclass(frozen=True, slots=True)
class Waits:
    """There is nothing to do for this number of seconds."""

    seconds: float
    reason: str | None = None
    """The reason, unless the provider is simply at work."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The job has ended at its provider: fetch its results, then end the errand."""

    status: Status


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no job, and there will be none: kind, code and message say why."""

    error: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Over:
    """The errand had already ended."""


Progress = Waits | Ready | Refused | Over


class CredentialRefused(Exception):
    """A provider refuses our credential: its work is held until an operator acts."""

    def __init__(self, provider: str, error: Fatal) -> None:
        super().__init__(f"{provider}: {error}")
        self.provider = provider
        self.error = error


class Owner(Protocol):
    """The owner of the job, and what to write together with it."""

    def describe(self, row: RemoteJob, job: Job | None) -> Mapping[str, Any] | None:
        """The document of a job that was just submitted; None if the owner keeps no documents."""

    def describe_poll(self, row: RemoteJob, status: Status) -> Mapping[str, Any] | None:
        """The document after a poll that found the job unfinished."""

    async def referred(self, row: RemoteJob, session: Session) -> None:
        """The job was submitted; runs in the same commit."""

    async def is_wanted(self) -> bool:
        """Whether the job is still wanted. Called right before the submission, which cannot be undone."""

    def report(self, event: str, message: str, **fields: Any) -> None:
        """Add an event to the history that users read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often a provider is polled, and how."""

    poll_seconds: float
    settle_seconds: float
    poll: Callable[[Adapter, Job], Awaitable[Status]] = field(default=lambda adapter, job: adapter.poll(job))
    offset_seconds: float | None = None
    """All jobs of the provider are polled at the same moments: this long after each whole interval."""

    def until_poll(self, hint: float | None = None) -> float:
        """Seconds until the next poll of a job; never earlier than the provider's own hint."""
        wanted = max(self.poll_seconds, hint or 0.0)
        if self.offset_seconds is None:
            return wanted
        now = time.time() - self.offset_seconds
        earliest = now + max(wanted - self.poll_seconds / 2, hint or 0.0)
        return math.ceil(earliest / self.poll_seconds) * self.poll_seconds - now


class Errand:
    """One job at a provider, while this process holds the claim for it."""

    def __init__(
        self, jobs: RemoteJobs, adapter: Adapter, row: RemoteJob, request: Request, owner: Owner, held: Held, pace: Pace
    ) -> None:
        self.adapter = adapter
        self.request = request
        self.row = row
        self._held = held
        self._jobs = jobs
        self._owner = owner
        self._pace = pace
        self.is_at_work = False
        """The provider has just reported that it is working on the job."""

    async def advance(self, *, stop: bool = False, may_submit: bool = True) -> Progress:
        """Do the next steps as far as possible now; `stop` cancels what can be cancelled."""
        try:
            if stop and self.row.stopping_seconds is None and not self.row.has_ended:
                self.row = await self._jobs.begin_stop(self.row, self._held)
            while True:
                if (progress := await self._do_next(stop, may_submit)) is not None:
                    return progress
        except OperationError as error:
            return await self._put_off(error)

    async def results(self, status: Status) -> AsyncGenerator[Result, None]:
        """Every available result; safe to repeat."""
        job = self._require_job()
        async for result in self.adapter.results(self.request, job, status):
            yield result

    async def put_off_results(self, error: OperationError) -> Progress:
        """The results could not be fetched this time."""
        if isinstance(error, InDoubt):
            self.row = await self._jobs.disown(self.row, self._held)
            return Waits(0.0)
        return await self._put_off(error)

    async def end(self, ending: JobEnding) -> None:
        """The results were fetched, or there will be none."""
        self.row = await self._jobs.end(self.row, ending, self._held)

    async def clean_up(self) -> bool:
        """Delete what staging left at the provider; returns whether that is done."""
        if self.row.cleaned_at is not None:
            return True
        try:
            await self.adapter.clean_up(self.request, self.row.staged, self.row.job)
        except OperationError as error:
            log.warning("%s: the staged inputs at %s are not removed yet: %s", self.row.key, self.row.provider, error)
            return False
        await self._jobs.clean(self.row)
        return True

    # Steps ------------------------------------------------------------------------------------------------------

    async def _do_next(self, stop: bool, may_submit: bool) -> Progress | None:
        row = self.row
        if row.has_ended:
            return Over()
        if stop and row.phase in ("planned", "staged"):
            return Refused(_STOPPED)
        if stop and row.phase == "submitted" and row.cancelled is None:
            await self._cancel()
            return None
        if row.due_seconds > 0:
            return Waits(row.due_seconds)
        match row.phase:
            case "planned" | "staged" if not may_submit:
                return Waits(self._pace.poll_seconds)
            case "planned":
                await self._stage()
            case "staged":
                return await self._submit()
            case "submitting":
                return await self._resolve_doubt(stop=stop, may_submit=may_submit)
            case _:
                return await self._poll()
        return None

    async def _stage(self) -> None:
        async for staged in self.adapter.stage(self.request, self.row.staged):
            self.row = await self._jobs.save_staged(self.row, staged, self._held)
        self.row = await self._jobs.end_staging(self.row, self._held)

    async def _submit(self) -> Progress | None:
        if not await self._owner.is_wanted():
            return Waits(0.0)
        began = time.monotonic()
        is_alone = not self.adapter.abilities.has_marker
        row = await self._jobs.begin_submit(self.row, self._held, is_alone=is_alone)
        if row is None:
            return await self._come_back(_DOUBT_SECONDS)
        self.row = row
        if time.monotonic() - began > _SEND_SECONDS_MAX:
            return await self._come_back(self._pace.settle_seconds)
        try:
            job = await self.adapter.submit(self.request, row.staged)
        except InDoubt as error:
            self._owner.report("provider.in_doubt", f"{row.provider} may have accepted the job: {error}", key=row.key)
            self.row = await self._jobs.begin_doubt(row, self._held)
            return await self._come_back(min(_DOUBT_SECONDS, self._pace.settle_seconds))
        except OperationError:
            self.row = await self._jobs.withdraw(row, self._held)
            raise
        await self._refer(job)
        return None

    async def _resolve_doubt(self, *, stop: bool, may_submit: bool) -> Progress | None:
        """The row says that the job may exist. It is resent only if it certainly does not exist and is still wanted."""
        if self.row.doubtful_seconds is None:
            self.row = await self._jobs.begin_doubt(self.row, self._held)
        row, abilities = self.row, self.adapter.abilities
        assert row.doubtful_seconds is not None
        found = await self._find(row)
        if found:
            self._owner.report("provider.adopted", f"the job was found at {row.provider}", key=row.key)
            await self._cancel_doubles(found)
            await self._refer(found[0])
            return None
        if not abilities.can_find:
            message = f"it is unknown whether {row.provider} has accepted the job; look there for {row.key}"
            return Refused(_error("fatal", "in_doubt", message))
        left = self._pace.settle_seconds - row.doubtful_seconds
        if left > 0 and (stop or not abilities.deduplicates):
            return await self._come_back(min(left, max(_DOUBT_SECONDS, self._pace.settle_seconds / 4)))
        if stop:
            return Refused(_STOPPED)
        if not may_submit:
            self.row = await self._jobs.withdraw(row, self._held)
            return None
        return await self._submit()

    async def _find(self, row: RemoteJob) -> Sequence[Job]:
        assert row.submitting_at is not None
        found = await self.adapter.find(self.request, row.staged, row.submitting_at)
        if not found:
            return ()
        foreign = {*row.strangers, *await self._jobs.known_elsewhere(row, found)}
        return [job for job in found if job.external_id not in foreign]

    async def _cancel_doubles(self, found: Sequence[Job]) -> None:
        """Keep the oldest of several jobs with our marker and cancel the others: they would only cost money."""
        if not self.adapter.abilities.has_marker:
            return
        for job in found[1:]:
            self._owner.report(
                "provider.duplicate",
                f"{self.row.provider} has the job twice; {job.external_id} is cancelled",
                level="warning",
                external_id=job.external_id,
            )
            with suppress(OperationError):
                await self.adapter.cancel(job)

    async def _refer(self, job: Job) -> None:
        """Commit the reference to the job, together with its owner's changes."""
        document = self._owner.describe(self.row, job)
        async with fenced(self._jobs.queue, self._held) as session:
            row = await self._jobs.refer(self.row, job, document, self._pace.until_poll(), session=session)
            await self._owner.referred(row, session)
            await absolve(self._jobs.queue, self._held, session=session)
        self.row = row
        text = f"{row.provider} has accepted the job"
        self._owner.report("provider.submitted", text, external_id=job.external_id, key=row.key, model=row.model)

    async def _poll(self) -> Progress | None:
        job = self._require_job()
        status = await self._pace.poll(self.adapter, job)
        if status.phase is Phase.ENDED:
            self.row = await self._jobs.note(self.row, self._held, seconds=0.0, status=status)
            return Ready(status)
        answers = int(self.row.extra.get(_ERROR_ANSWERS, 0)) + 1 if status.is_error else 0
        noted = _with(status, {_ERROR_ANSWERS: answers} if answers or _ERROR_ANSWERS in self.row.extra else {})
        seconds = self._pace.until_poll(status.next_poll_seconds)
        document = self._owner.describe_poll(self.row, status)
        self.row = await self._jobs.note(self.row, self._held, seconds=seconds, status=noted, document=document)
        self.is_at_work = not status.is_error
        if answers >= ERROR_ANSWERS_MAX:
            return Refused(
                status.error or _error("fatal", "job_failed", f"the provider reports the status {status.raw_status}")
            )
        return Waits(seconds)

    async def _cancel(self) -> None:
        cancelled = await self.adapter.cancel(self._require_job())
        self.row = await self._jobs.note_cancel(self.row, cancelled, self._held)

    # Failed calls -----------------------------------------------------------------------------------------------

    async def _put_off(self, error: OperationError) -> Progress:
        row = self.row
        if isinstance(error, PutOff):
            await self._come_back(error.seconds)
            return Waits(error.seconds, f"{row.provider}: {error}")
        if isinstance(error, Fatal) and error.scope == "credential":
            raise CredentialRefused(row.provider, error) from error
        if row.phase in ("planned", "staged") and isinstance(error, (Fatal, SchemaInvalid)):
            return Refused(describe_error(error))
        failures = row.failures + 1
        seconds = min(CALL_SECONDS_MAX, CALL_SECONDS_FIRST * 2 ** min(failures - 1, 20))
        if isinstance(error, RateLimited):
            seconds = max(seconds, error.retry_after or 0.0)
        elif not isinstance(error, Transient):
            log.warning("%s: %s refused a call that says nothing about the job: %s", row.key, row.provider, error)
        self._owner.report(
            "provider.call_failed", f"{row.provider}: {error}", level="warning", error_kind=error.kind, code=error.code
        )
        self.row = await self._jobs.note(row, self._held, seconds=seconds, failures=failures, call_error=str(error))
        return Waits(seconds)

    async def _come_back(self, seconds: float) -> Waits:
        self.row = await self._jobs.note(self.row, self._held, seconds=seconds, failures=self.row.failures)
        return Waits(seconds)

    def _require_job(self) -> Job:
        job = self.row.job
        assert job is not None, f"{self.row.key} has no reference"
        return job


def describe_error(error: OperationError) -> dict[str, Any]:
    """An error as it is stored."""
    return _error(error.kind, error.code or error.kind, str(error))


def _error(kind: str, code: str, message: str) -> dict[str, Any]:
    return {"kind": kind, "code": code, "message": message}


_STOPPED = _error("fatal", "cancelled", "it was cancelled before it was submitted")


def _with(status: Status, found: Mapping[str, Any]) -> Status:
    return replace(status, found={**status.found, **found}) if found else status
