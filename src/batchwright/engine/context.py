"""What a running operation can see of the engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, TypeVar
from uuid import UUID

from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.outcomes import Verb
from batchwright.errors import InvalidInput
from batchwright.states import JobStatus
from batchwright.telemetry.logs import about

Level = Literal["info", "warning", "error"]
S = TypeVar("S")
_NOTED = ("model", "prompt_tokens", "completion_tokens", "cost", "error_kind")
_EVENT_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class Child:
    """A child that has ended, as its resumed parent sees it."""

    id: JobId
    job_type: str
    status: JobStatus
    payload: Any
    result: Any
    error: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Joined:
    """The children of the last `Wait`: how they ended, and an iterator over them in the order of the list.

    >>> async for child in ctx.joined:
    ...     total += child.result["rows"]
    """

    round: int
    total: int
    succeeded: int
    failed: int
    cancelled: int
    fetch: Callable[[UUID], Any] = field(repr=False)
    """Children after this id: a list in sync code, an awaitable list in async code."""

    async def __aiter__(self) -> AsyncIterator[Child]:
        after = UUID(int=0)
        while page := await self.fetch(after):
            for child in page:
                yield child
            after = page[-1].id

    def __iter__(self) -> Iterator[Child]:
        after = UUID(int=0)
        while page := self.fetch(after):
            yield from page
            after = page[-1].id


class Reporter(Protocol):
    """Receives events and progress."""

    def emit(self, claim: Claim, event: Mapping[str, Any]) -> None: ...

    def progress(self, claim: Claim, current: int | None, total: int | None) -> None: ...


class Context:
    """A running job's connection to the engine: events, progress, and whether it should stop.

    An async operation is interrupted when it is cancelled; plain functions should check `cancelled` now and then.
    """

    def __init__(
        self,
        claim: Claim,
        reporter: Reporter,
        *,
        worker: str = "",
        joined: Joined | None = None,
        services: Callable[[type[Any]], Any] | None = None,
    ) -> None:
        self._claim = claim
        self._reporter = reporter
        self._services = services
        self._callbacks: list[Callable[[Verb | None], object]] = []
        self.worker = worker
        """The id of the worker that holds the job."""
        self._logger: logging.LoggerAdapter[logging.Logger] | None = None
        self.joined = joined
        self.cancelled = False
        """The job was cancelled, expired, timed out or given to another worker: its result is discarded."""
        self.stopping = False
        """The worker is stopping: finish soon, or return Snooze(0) to continue on another worker."""

    @property
    def job_id(self) -> JobId:
        return self._claim.id

    @property
    def job_type(self) -> str:
        return self._claim.job_type

    @property
    def attempt(self) -> int:
        """1 for the first try."""
        return self._claim.attempts

    @property
    def claim(self) -> int:
        """How many times workers have claimed the job, including this time. It only grows, and fences every write."""
        return self._claim.claim

    @property
    def after_death(self) -> bool:
        """Whether the previous worker of this job died."""
        return self._claim.after_death

    @property
    def max_attempts(self) -> int:
        return self._claim.max_attempts

    @property
    def tenant(self) -> str:
        return self._claim.tenant

    @property
    def pipeline_id(self) -> UUID:
        return self._claim.pipeline_id

    @property
    def traceparent(self) -> str | None:
        return self._claim.traceparent

    @property
    def deadline(self) -> datetime | None:
        return self._claim.deadline

    @property
    def deadline_passed(self) -> bool:
        """The deadline passed while the job waited for its children: end soon and start nothing new."""
        return self._claim.deadline_passed

    @property
    def progress_current(self) -> int | None:
        """The last progress that an earlier run of this job reported: resume from there."""
        return self._claim.progress_current

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that adds the job's id and type to every line."""
        if self._logger is None:
            name = f"batchwright.job.{self._claim.job_type}"
            self._logger = _JobLogger(logging.getLogger(name), about(self._claim))
        return self._logger

    def emit(self, event: str, message: str | None = None, *, level: Level = "info", **fields: Any) -> None:
        """Add a line to the job's history; `model`, tokens, `cost` and `error_kind` have their own columns."""
        if not event or len(event) > _EVENT_CHARACTERS_MAX:
            raise InvalidInput(
                f"an event name must have 1 to {_EVENT_CHARACTERS_MAX} characters, not {len(event)}", param="event"
            )
        if level not in ("info", "warning", "error"):
            raise InvalidInput(f"level is {level!r}; use info, warning or error", param="level")
        noted = {name: fields.pop(name) for name in _NOTED if name in fields}
        current, total = fields.pop("_progress_current", None), fields.pop("_progress_total", None)
        if current is not None or total is not None:
            self.progress(current, total)
        record = {"event": event, "message": message, "level": level, "fields": fields or None, **noted}
        self._reporter.emit(self._claim, record)

    def progress(self, current: int | None, total: int | None = None) -> None:
        """Report the job's progress; it is shown live, and proves that the job is alive."""
        self._reporter.progress(self._claim, current, total)

    def when_settled(self, call: Callable[[Verb | None], object]) -> None:
        """Register a callback for the end of the job in this worker; it gets the committed verb, or None."""
        self._callbacks.append(call)

    def settled(self, verb: Verb | None) -> None:
        """The worker is done with the job. A callback that raises does not affect the others."""
        callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            try:
                call(verb)
            except Exception:
                self.logger.exception("a callback after the settle failed")

    def service(self, kind: type[S]) -> S:
        """The object of this type that the worker process keeps for its operations."""
        if self._services is None:
            raise InvalidInput(f"this worker has no service {kind.__name__}", param="service")
        found: S = self._services(kind)
        return found


class Silence:
    """Drops the reports of an operation that no longer owns its job."""

    def emit(self, claim: Claim, event: Mapping[str, Any]) -> None:
        """Dropped."""

    def progress(self, claim: Claim, current: int | None, total: int | None) -> None:
        """Dropped."""


class _JobLogger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs
