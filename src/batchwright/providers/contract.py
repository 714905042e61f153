"""What an adapter of a provider does. Everything that is durable is done by its caller.

    validate ─▶ stage ─▶ submit ─▶ poll … poll ─▶ results ─▶ clean_up
                            │
                            └─ InDoubt ─▶ find ─▶ the job that was made, or none

An adapter keeps nothing: what it must remember between two calls is in `staged` and `Job`, which the caller commits.
`submit` is exactly one request that costs money. Errors are those of operations (`RateLimited`, `Transient`,
`SchemaInvalid`, `Fatal`); from `submit` they mean that the provider has not taken the job, and only `InDoubt` leaves
that open.
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
"""What staging has left behind at the provider: ids and names, never secrets, never signed URLs."""


class Phase(StrEnum):
    """Where a job stands at its provider."""

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
    """What became of the wish to cancel."""

    REQUESTED = "requested"
    UNSUPPORTED = "unsupported"
    ENDED_ALREADY = "ended_already"


class InDoubt(Transient):
    """The request may have reached the provider: find the job before anything is sent again."""


class PutOff(RateLimited):
    """Our own budget for the provider is used up: nothing was sent, and that is no failure of anybody."""

    def __init__(self, seconds: float, lack: str) -> None:
        super().__init__(f"our rate budget for it is used up ({lack})", retry_after=seconds, code="rate_budget")
        self.seconds = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One thing to be worked on: an audio file, or the file of a completion's requests."""

    id: str
    """Ours: a result is matched to its input by it."""
    uri: str
    """`https:`, `gs:`, `s3:` or `az:`, as the user gave it; or `file:` for one that we have stored."""
    filename: str
    bytes: int | None = None
    content_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a provider is to do: one remote job."""

    key: str
    """Our marker of this attempt, `bw-` and lower-case letters and digits: unique, and short enough for everybody."""
    task_type: str
    """A `TaskType`; an adapter refuses those that it does not do."""
    model: str | None
    inputs: Sequence[Input]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task type: language, diarization, the endpoint of completions, the window …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why an input, or the whole request, cannot be sent."""

    message: str
    input_id: str | None = None
    param: str | None = None
    line: int | None = None
    """Of a completion's file, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A remote job, as it is committed."""

    external_id: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Region, output prefix, file ids: never secrets, never signed URLs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Results of a job; None where the provider does not say."""

    total: int | None = None
    succeeded: int | None = None
    failed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What one poll has found."""

    phase: Phase
    raw_status: str
    """The provider's own word; one that we do not know counts as running, and is logged."""
    ending: Ending | None = None
    counts: Counts = Counts()
    next_poll_seconds: float | None = None
    """The provider's own hint."""
    expires_at: datetime | None = None
    error: Mapping[str, Any] | None = None
    """Of a job that failed: kind, code and message."""
    is_error: bool = False
    """The provider answered with an error about this job, which may pass; the third in a row fails it."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """Where its results are: ids of files, an output prefix; goes into `Job.extra`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a result has cost, as far as the provider says."""

    input_tokens: int | None = None
    """All of the prompt, also those that a cache was used for."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, read from the provider's cache."""
    cache_written_tokens: int | None = None
    """Of the prompt, put into the provider's cache."""
    audio_seconds: float | None = None

    def __add__(self, other: Usage) -> Usage:
        """Of both together; what neither says is not known."""
        return Usage(**{name: _sum(getattr(self, name), getattr(other, name)) for name in Usage.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one input, or of one line of a completion's file."""

    key: str
    """The input's id; of completions the line's custom_id."""
    value: Mapping[str, Any] | None = None
    """Of completions OpenAI's output line; of transcriptions what the provider said."""
    error: Mapping[str, Any] | None = None
    """Kind, code and message, and of completions the `response` if there was one; None where there is a value."""
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a provider can do, and its limits: shown to people, and obeyed by the caller."""

    task_types: frozenset[TaskType]
    can_cancel: bool
    can_find: bool
    """Whether a job can be found by its marker after a crash."""
    has_marker: bool = True
    """Whether a job carries our marker, so that what is found is surely ours."""
    can_survey: bool = False
    """Whether a list of the provider says of many jobs what polls would say."""
    deduplicates: bool = False
    """Whether the provider refuses a second job with the same marker."""
    keeps_partial_results: bool = True
    """Whether a job that expired or was cancelled has the results that were finished."""
    inputs_max: int | None = None
    """Inputs of one job."""
    input_bytes_max: int | None = None
    requests_max: int | None = None
    """Requests in the file of one completion job."""
    request_bytes_max: int | None = None
    """Bytes of that file."""
    timeout_hours: float = 26.0
    """When the caller gives up, cancels and harvests."""
    settle_seconds: float = 120.0
    """How long a new job may be missing from the provider's lists."""
    results_kept_hours: float | None = None
    batch_discount: float | None = None
    """The share of the usual price that is saved; None if unknown."""
    duplicates: str = ""
    """How a second job is prevented, in one sentence for the docs."""


class Adapter(ABC):
    """A provider. A subclass in `adapters/` with a name is all that a new provider needs."""

    name: ClassVar[str]
    """As users write it: `azure`, `openai` …"""
    title: ClassVar[str]
    """As people read it: `Azure AI Speech`."""
    abilities: Abilities
    """Of the class; settings may narrow those of an object."""
    Settings: ClassVar[type[Any]]
    """A frozen dataclass: base URL, credentials by reference, region, bucket …; checked when it is made."""

    def __init__(self, settings: Any, tools: AdapterTools) -> None:
        self.settings = settings
        self.tools = tools

    def missing_credentials(self) -> str | None:
        """Which credential is not there, in words such as `the environment variable X`; None if it is."""
        return None

    def validate(self, request: Request) -> Sequence[Problem]:
        """What is wrong with the request, found without asking anybody: nothing has been paid yet."""
        return ()

    async def inspect(self, request: Request) -> Sequence[Problem]:
        """What is wrong with the contents of the inputs, which are read for it; the provider is not asked."""
        return ()

    @abstractmethod
    def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        """Bring the inputs to the provider. Each value that is yielded is committed before the next step is taken.

        Called again after a crash with what was committed last; every step may be repeated.
        """

    @abstractmethod
    async def submit(self, request: Request, staged: Staged) -> Job:
        """Start the job with exactly one request that costs money; no retries inside."""

    @abstractmethod
    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        """Jobs with the marker of this request, the oldest first.

        Where a provider has no marker, they are jobs that may be the one; the caller leaves out those that it knows as
        another's, and `results` raises InDoubt if one turns out to be.
        """

    @abstractmethod
    async def poll(self, job: Job) -> Status:
        """Look once; no waiting, no side effects. An error that it raises says nothing about the job."""

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        """What the provider's lists say of these jobs, by external id, the same as `poll` would say.

        Those that the lists do not have, or not all that is to be known of, are left out and polled by themselves.
        Only asked for where the abilities say `can_survey`.
        """
        return {}

    @abstractmethod
    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        """Every result that can be had, in any order, as a stream; safe to be repeated."""

    async def cancel(self, job: Job) -> Cancelled:
        return Cancelled.UNSUPPORTED

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:  # noqa: B027 (some have nothing)
        """Delete what staging left at the provider; safe to be repeated."""

    @abstractmethod
    async def check(self) -> str:
        """Try the credentials with a call that costs nothing; what was reached, in words, or one of the errors."""


def _sum(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other
