"""The interface of a provider's adapter. Its caller does everything that is durable.

    validate ─▶ stage ─▶ submit ─▶ poll … poll ─▶ results ─▶ clean_up
                            │
                            └─ InDoubt ─▶ find ─▶ the job that was made, or none

An adapter keeps no state: what it needs between two calls is in `staged` and `Job`, which the caller commits.
`submit` is exactly one request that costs money. Errors are those of operations (`RateLimited`, `Transient`,
`SchemaInvalid`, `Fatal`). From `submit` they mean that the provider has not accepted the job; only `InDoubt` means
that it may have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from batchwright.errors import RateLimited, Transient

if TYPE_CHECKING:
    from batchwright.providers.tools import AdapterTools

TaskType = Literal["transcription", "completion"]
Staged = Mapping[str, Any]
"""What staging created at the provider: ids and names, never secrets, never signed URLs."""


class Phase(StrEnum):
    """The state of a job at its provider."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    ENDED = "ended"


class Ending(StrEnum):
    """How a job ended, by its counted results and not by the provider's word alone."""

    SUCCEEDED = "succeeded"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Cancelled(StrEnum):
    """The outcome of a request to cancel."""

    REQUESTED = "requested"
    UNSUPPORTED = "unsupported"
    ENDED_ALREADY = "ended_already"


class InDoubt(Transient):
    """The request may have reached the provider: look for the job before resending anything."""


class PutOff(RateLimited):
    """Our own budget for the provider is used up: nothing was sent, and this does not count as a failure."""

    def __init__(self, seconds: float, lack: str) -> None:
        super().__init__(f"our rate budget for it is used up ({lack})", retry_after=seconds, code="rate_budget")
        self.seconds = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input: an audio file, or the file with the requests of a completion."""

    id: str
    """Our own id, which matches a result to its input."""
    uri: str
    """`https:`, `gs:`, `s3:` or `az:`, as the user gave it; or `file:` for a stored file."""
    filename: str
    bytes: int | None = None
    content_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The work for one remote job at a provider."""

    key: str
    """Our marker of this attempt, `bw-` and lower-case letters and digits: unique, and short enough everywhere."""
    task_type: str
    """A `TaskType`; an adapter refuses those that it does not support."""
    model: str | None
    inputs: Sequence[Input]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the task type: language, diarization, the endpoint of completions, the window …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why an input, or the whole request, cannot be sent."""

    message: str
    input_id: str | None = None
    param: str | None = None
    line: int | None = None
    """Line in the file of a completion, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A remote job, as the caller commits it."""

    external_id: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Region, output prefix, file ids: never secrets, never signed URLs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Result counts of a job; None if the provider does not report them."""

    total: int | None = None
    succeeded: int | None = None
    failed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The outcome of one poll."""

    phase: Phase
    raw_status: str
    """The provider's own status. An unknown status counts as running, and is logged."""
    ending: Ending | None = None
    counts: Counts = Counts()
    next_poll_seconds: float | None = None
    """When to poll next, if the provider says so."""
    expires_at: datetime | None = None
    error: Mapping[str, Any] | None = None
    """For a failed job: kind, code and message."""
    is_error: bool = False
    """The provider returned an error about this job that may be temporary; the third in a row fails the job."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """Where its results are: ids of files or an output prefix. Stored in `Job.extra`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The usage of a result, as far as the provider reports it."""

    input_tokens: int | None = None
    """All tokens of the prompt, including cached ones."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that were read from the provider's cache."""
    cache_written_tokens: int | None = None
    """Tokens of the prompt that were written to the provider's cache."""
    audio_seconds: float | None = None

    def __add__(self, other: Usage) -> Usage:
        """The sum of both. A value that neither reports stays unknown."""
        return Usage(**{name: _sum(getattr(self, name), getattr(other, name)) for name in Usage.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one input, or of one line of a completion's file."""

    key: str
    """The input's id; for completions the line's custom_id."""
    value: Mapping[str, Any] | None = None
    """For completions OpenAI's output line; for transcriptions the provider's answer."""
    error: Mapping[str, Any] | None = None
    """Kind, code and message, and for completions the `response` if there was one; None if there is a value."""
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a provider can do, and its limits. Users see them, and the caller obeys them."""

    task_types: frozenset[TaskType]
    can_cancel: bool
    can_find: bool
    """Whether a job can be found by its marker after a crash."""
    has_marker: bool = True
    """Whether a job carries our marker, which proves that a job found later is ours."""
    can_survey: bool = False
    """Whether the provider can list many jobs with everything that polls would report."""
    deduplicates: bool = False
    """Whether the provider refuses a second job with the same marker."""
    keeps_partial_results: bool = True
    """Whether a job that expired or was cancelled still returns its finished results."""
    inputs_max: int | None = None
    """Maximum number of inputs in one job."""
    input_bytes_max: int | None = None
    requests_max: int | None = None
    """Maximum number of requests in the file of one completion job."""
    request_bytes_max: int | None = None
    """Maximum size of that file in bytes."""
    timeout_hours: float = 26.0
    """Time after which the caller gives up, cancels the job and fetches the finished results."""
    settle_seconds: float = 120.0
    """How long a new job may be missing from the provider's lists."""
    results_kept_hours: float | None = None
    batch_discount: float | None = None
    """The discount as a share of the usual price; None if unknown."""
    duplicates: str = ""
    """How a second job is prevented, in one sentence for the docs."""


class Adapter(ABC):
    """A provider. A subclass in `adapters/` with a name is all that a new provider needs."""

    name: ClassVar[str]
    """As users write it: `azure`, `openai` …"""
    title: ClassVar[str]
    """As people read it: `Azure AI Speech`."""
    abilities: Abilities
    """The abilities of the class; settings may narrow those of an instance."""
    Settings: ClassVar[type[Any]]
    """A frozen dataclass: base URL, credentials by reference, region, bucket …; checked on creation."""

    def __init__(self, settings: Any, tools: AdapterTools) -> None:
        self.settings = settings
        self.tools = tools

    def missing_credentials(self) -> str | None:
        """The missing credential, such as `the environment variable X`; None if none is missing."""
        return None

    def validate(self, request: Request) -> Sequence[Problem]:
        """What is wrong with the request. This makes no call, so it costs nothing."""
        return ()

    async def inspect(self, request: Request) -> Sequence[Problem]:
        """What is wrong with the contents of the inputs. This reads the inputs, but does not call the provider."""
        return ()

    @abstractmethod
    def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        """Bring the inputs to the provider. The caller commits each yielded value before the next step.

        After a crash the caller calls it again with the last committed value, so every step must be repeatable.
        """

    @abstractmethod
    async def submit(self, request: Request, staged: Staged) -> Job:
        """Start the job with exactly one request that costs money; no retries inside."""

    @abstractmethod
    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        """Jobs with the marker of this request, oldest first.

        If the provider has no marker, these are candidates. The caller drops those that belong to other tasks, and
        `results` raises InDoubt if a candidate turns out to be another's.
        """

    @abstractmethod
    async def poll(self, job: Job) -> Status:
        """Poll once, without waiting or side effects. An error that it raises says nothing about the job."""

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        """The state of these jobs from the provider's lists, by external id, the same as `poll` would return.

        Jobs that the lists miss, or describe only in part, are left out; the caller polls those one by one.
        Only called if the abilities say `can_survey`.
        """
        return {}

    @abstractmethod
    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        """Stream every available result, in any order; safe to repeat."""

    async def cancel(self, job: Job) -> Cancelled:
        return Cancelled.UNSUPPORTED

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:  # noqa: B027 (some have nothing)
        """Delete what staging left at the provider; safe to repeat."""

    @abstractmethod
    async def check(self) -> str:
        """Try the credentials with a free call. Returns a text about what it reached, or raises one of the errors."""


def _sum(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other
