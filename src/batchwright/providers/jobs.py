"""The rows of jobs at providers, and of refused credentials.

    planned ─ inputs are there ─▶ staged ─▶ submitting ─ one request ─▶ submitted ─ results are stored ─▶ ended
                                    ▲           │  ▲                        │
                                    └─ refused ─┘  └─── not our job ────────┘

A row in phase `submitting` may or may not have a job at the provider: we look for it before resending anything.
Every write is fenced by the claim of our own job that runs the remote job.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, cast

import orjson

from batchwright.db.database import Row, Session
from batchwright.db.statements import statements
from batchwright.engine.jobs import new_id
from batchwright.engine.owned import Held, absolve, fenced
from batchwright.engine.queue import Queue
from batchwright.errors import Fenced
from batchwright.providers.contract import Cancelled, Counts, Job, Staged, Status, Usage

SQL = statements(__package__, "jobs.sql")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_CALL_ERROR = "call_error"
_CALL_ERROR_CHARACTERS_MAX = 1_000
_CLEAN_SECONDS = 60.0
_CLEAN_SECONDS_MAX = 6 * 3600.0
_TRY_SECONDS = 30.0
_TRY_SECONDS_MAX = 900.0

_STEPS = frozenset({"end_staging", "end"})
"""Statements that move a job to its next state."""

Step = Literal["planned", "staged", "submitting", "submitted", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job at a provider, as its row was when it was read."""

    key: str
    owner: str
    number: int
    provider: str
    model: str | None
    input_ids: list[str]
    phase: Step
    staged: Staged
    external_id: str | None
    extra: dict[str, Any]
    strangers: list[str]
    document: dict[str, Any] | None
    raw_status: str | None
    total: int | None
    succeeded: int | None
    failed: int | None
    failures: int
    """Failed calls in a row: they only delay the next one."""
    cancelled: str | None
    error: dict[str, Any] | None
    results_key: str | None
    input_tokens: int | None
    output_tokens: int | None
    audio_seconds: float | None
    cost: float | None
    created_at: datetime
    submitting_at: datetime | None
    submitted_at: datetime | None
    ended_at: datetime | None
    cleaned_at: datetime | None
    due_seconds: float
    """Seconds until the job needs work."""
    doubtful_seconds: float | None
    """Seconds since the last moment at which a worker may have been sending it; None while one may still be."""
    stopping_seconds: float | None
    """Seconds since the order to stop it."""

    @property
    def call_error(self) -> str | None:
        """Why the last call failed; None if it succeeded."""
        return self.extra.get(_CALL_ERROR) if self.failures and not self.has_ended else None

    @property
    def has_ended(self) -> bool:
        return self.phase == "ended"

    @property
    def job(self) -> Job | None:
        return None if self.external_id is None else Job(external_id=self.external_id, extra=self.extra)


class NewRemoteJob(NamedTuple):
    """A job to create at a provider."""

    number: int
    provider: str
    model: str | None
    input_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnding:
    """What is known of a remote job when it ends."""

    document: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    raw_status: str | None = None
    counts: Counts = field(default_factory=Counts)
    results_key: str | None = None
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None


class AtWork(NamedTuple):
    """Progress of the jobs at their providers, as last reported."""

    done: int
    rate: float
    """Results per second since they were submitted."""


class Hold(NamedTuple):
    """A provider that refused its credential: its work waits until the credential works again."""

    provider: str
    code: str | None
    message: str
    since: datetime
    tries: int
    try_seconds: float
    """Seconds until the credential is tried again."""


def new_key() -> str:
    """A marker: `bw-` and 26 letters and digits, which sort by time. Every provider accepts it."""
    number = (new_id().int >> 48 << 50) | secrets.randbits(50)
    return "bw-" + "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


class RemoteJobs:
    """The jobs at all providers."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._database = queue.database

    async def of(self, owner: str) -> list[RemoteJob]:
        return [_job(row) for row in await self._database.ask(SQL["of_owner"], {"owner": owner})]

    async def plan(self, owner: str, jobs: Sequence[NewRemoteJob], held: Held) -> list[RemoteJob]:
        """Commit the intents; those that were committed before stay unchanged."""
        rows = [{**job._asdict(), "input_ids": list(job.input_ids), "key": new_key()} for job in jobs]
        async with fenced(self.queue, held) as session:
            await self._database.ask(SQL["add"], {"owner": owner, "jobs": _json(rows)}, session)
        return await self.of(owner)

    async def save_staged(self, job: RemoteJob, staged: Staged, held: Held) -> RemoteJob:
        return await self._write("save_staged", job, held, staged=_json(staged))

    async def end_staging(self, job: RemoteJob, held: Held) -> RemoteJob:
        return await self._write("end_staging", job, held)

    async def begin_submit(self, job: RemoteJob, held: Held, *, is_alone: bool) -> RemoteJob | None:
        """From now on the job may exist at the provider. None if another job is in doubt and only one may be."""
        async with fenced(self.queue, held) as session:
            if is_alone:
                await self._database.ask(SQL["lock_provider"], {"provider": job.provider}, session)
            rows = await self._database.ask(SQL["begin_submit"], {"key": job.key, "is_alone": is_alone}, session)
            return _job(rows[0]) if rows else None

    async def begin_doubt(self, job: RemoteJob, held: Held) -> RemoteJob:
        """No worker is sending it now. If it exists, the provider's lists will soon show it."""
        return await self._write("begin_doubt", job, held)

    async def begin_stop(self, job: RemoteJob, held: Held) -> RemoteJob:
        """Order the job to stop; its time limit for stopping begins."""
        return await self._write("begin_stop", job, held)

    async def withdraw(self, job: RemoteJob, held: Held) -> RemoteJob:
        """The provider has certainly not accepted the job."""
        return await self._write("withdraw", job, held)

    async def refer(
        self, job: RemoteJob, found: Job, document: Mapping[str, Any] | None, seconds: float, *, session: Session
    ) -> RemoteJob:
        """The job is at the provider, under this name; poll it after these seconds. The caller has locked its claim."""
        params = {"external_id": found.external_id, "extra": _json(found.extra), "document": _json(document)}
        return _only(await self._ask("refer", job, session, **params, seconds=seconds))

    async def disown(self, job: RemoteJob, held: Held) -> RemoteJob:
        """The adopted job belongs to another task."""
        return await self._write("disown", job, held)

    async def known_elsewhere(self, job: RemoteJob, found: Sequence[Job]) -> set[str]:
        """Which of these jobs belong to other rows of ours: their ids."""
        params = {"provider": job.provider, "key": job.key, "external_ids": [one.external_id for one in found]}
        return {id for (id,) in await self._database.ask(SQL["others"], params)}

    async def note(
        self,
        job: RemoteJob,
        held: Held,
        *,
        seconds: float,
        failures: int = 0,
        call_error: str | None = None,
        status: Status | None = None,
        document: Mapping[str, Any] | None = None,
    ) -> RemoteJob:
        """Record the outcome of a poll, and when to poll again."""
        counts = status.counts if status is not None else Counts()
        found = dict(status.found) if status is not None else {}
        if call_error is not None:
            found[_CALL_ERROR] = call_error[:_CALL_ERROR_CHARACTERS_MAX]
        return await self._write(
            "note",
            job,
            held,
            seconds=seconds,
            failures=failures,
            document=_json(document),
            raw_status=status.raw_status if status is not None else None,
            extra=_json(found) if found else None,
            total=counts.total,
            succeeded=counts.succeeded,
            failed=counts.failed,
        )

    async def note_cancel(self, job: RemoteJob, cancelled: Cancelled, held: Held) -> RemoteJob:
        return await self._write("note_cancel", job, held, cancelled=cancelled.value)

    async def end(self, job: RemoteJob, ending: JobEnding, held: Held) -> RemoteJob:
        return await self._write(
            "end",
            job,
            held,
            document=_json(ending.document),
            error=_json(ending.error),
            raw_status=ending.raw_status,
            total=ending.counts.total,
            succeeded=ending.counts.succeeded,
            failed=ending.counts.failed,
            results_key=ending.results_key,
            input_tokens=ending.usage.input_tokens,
            output_tokens=ending.usage.output_tokens,
            audio_seconds=ending.usage.audio_seconds,
            cost=ending.cost,
            seconds=_CLEAN_SECONDS,
        )

    async def at_work(self, prefixes: Sequence[str]) -> dict[str, AtWork]:
        """Progress of these owners' jobs whose results are not fetched yet; by the owner's first part."""
        params = {"prefixes": list(prefixes)}
        return {row[0]: AtWork(*row[1:]) for row in await self._database.ask(SQL["at_work"], params)}

    async def forget(self, prefix: str, *, session: Session) -> None:
        """Remove the rows of removed owners, by their first part."""
        await self._database.ask(SQL["forget"], {"prefix": prefix}, session)

    async def clean(self, job: RemoteJob) -> None:
        """The staged inputs of the job are deleted."""
        await self._ask("clean", job, None)

    async def take_unclean(self, limit: int, *, session: Session) -> list[RemoteJob]:
        """Ended jobs that left something at their providers; no other process gets them for a while."""
        params = {"limit": limit, "seconds": _CLEAN_SECONDS, "seconds_max": _CLEAN_SECONDS_MAX}
        return [_job(row) for row in await self._database.ask(SQL["take_unclean"], params, session)]

    async def abandon(self, owner: str, error: Mapping[str, Any], *, session: Session) -> int:
        """End the open jobs of a task that ended before them; returns how many there were."""
        return len(await self._database.ask(SQL["abandon"], {"owner": owner, "error": _json(error)}, session))

    # Credentials ------------------------------------------------------------------------------------------------

    async def hold(self, provider: str, code: str | None, message: str) -> None:
        """Hold all work for a provider, because it refused its credential."""
        params = {
            "provider": provider,
            "code": code,
            "message": message,
            "seconds": _TRY_SECONDS,
            "seconds_max": _TRY_SECONDS_MAX,
        }
        await self._database.ask(SQL["hold"], params)

    async def holds(self) -> dict[str, Hold]:
        return {row[0]: Hold(*row) for row in await self._database.ask(SQL["holds"])}

    async def may_try(self, provider: str) -> bool:
        """Whether it is time to try a credential again, and this process may do it."""
        params = {"provider": provider, "seconds": _TRY_SECONDS, "seconds_max": _TRY_SECONDS_MAX}
        return bool(await self._database.ask(SQL["try_hold"], params))

    async def release(self, provider: str) -> bool:
        """The credential works; returns whether the provider was held."""
        return bool(await self._database.ask(SQL["release_hold"], {"provider": provider}))

    async def _write(self, statement: str, job: RemoteJob, held: Held, **params: Any) -> RemoteJob:
        async with fenced(self.queue, held) as session:
            if statement in _STEPS:
                await absolve(self.queue, held, session=session)
            return _only(await self._ask(statement, job, session, **params))

    async def _ask(self, statement: str, job: RemoteJob, session: Session | None, **params: Any) -> list[Row]:
        return await self._database.ask(SQL[statement], {"key": job.key, **params}, session)


def _only(rows: Sequence[Row]) -> RemoteJob:
    if not rows:
        raise Fenced("another worker has changed the row of a job at a provider")
    return _job(rows[0])


def _job(row: Row) -> RemoteJob:
    return RemoteJob(**cast("dict[str, Any]", dict(zip(RemoteJob.__dataclass_fields__, row, strict=True))))


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()
