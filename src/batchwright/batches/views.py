"""Batches and models as OpenAI shows them, with additional fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from batchwright.api.openai import ExpiresAfter, unix
from batchwright.api.schemas import Answer, Body, Name, Priority, Text
from batchwright.batches.plan.lines import ENDPOINTS
from batchwright.batches.progress import DeadlineRisk, Forecast
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batch
from batchwright.batches.submission import IN_FLIGHT_MAX
from batchwright.engine.metadata import METADATA_KEY_CHARACTERS_MAX, METADATA_PAIRS_MAX, METADATA_VALUE_CHARACTERS_MAX
from batchwright.inference.prices import cost
from batchwright.states import BatchStatus


class ModelView(Answer):
    """A model, as OpenAI shows it."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds, as its server reports; 0 if unknown.")
    owned_by: str


class ModelList(Answer):
    """All models, by name."""

    object: Literal["list"] = "list"
    data: list[ModelView]


class BatchLimits(Body):
    """What a batch may use of the workers; not in OpenAI's API."""

    max_in_flight: Annotated[int, Field(strict=True, ge=1, le=IN_FLIGHT_MAX)] | None = Field(
        None, description="Requests in flight at the same time in each worker process; null means no limit of its own."
    )

    def as_row(self) -> dict[str, int]:
        return {} if self.max_in_flight is None else {"max_in_flight": self.max_in_flight}


Metadata = Annotated[
    dict[
        Annotated[Text, Field(min_length=1, max_length=METADATA_KEY_CHARACTERS_MAX)],
        Annotated[Text, Field(max_length=METADATA_VALUE_CHARACTERS_MAX)],
    ],
    Field(max_length=METADATA_PAIRS_MAX),
]


class BatchToBe(Body):
    """A batch to create."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "input_file_id": "file-0199f0c2a1b37c5c8f1e2d3c4b5a6978",
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                }
            ]
        }
    )

    input_file_id: Annotated[Text, Field(max_length=100)] = Field(description="A file with the purpose `batch`.")
    endpoint: Annotated[Text, Field(max_length=100)] = Field(
        description="The endpoint of every line.", json_schema_extra={"enum": [*ENDPOINTS]}
    )
    completion_window: Annotated[Text, Field(max_length=40)] = Field(
        description="Any time from `1m` to `30d`; what is not answered by then is `batch_expired`.", examples=["24h"]
    )
    metadata: Metadata | None = Field(None, description="Your own metadata, returned with the batch.")
    output_expires_after: ExpiresAfter | None = None
    priority: Priority = Field(5, description="0 is first. Not in OpenAI's API.")
    limits: BatchLimits = Field(default_factory=BatchLimits)


class NewPriority(Body):
    """The position of the batch among others."""

    priority: Priority


class WhichToRetry(Body):
    """Which failed lines to retry."""

    codes: Annotated[list[Name], Field(min_length=1, max_length=50)] | None = Field(
        None, description="Only lines that failed with one of these, as `error_summary` names them; null means all."
    )


class BatchProblem(Answer):
    """A problem with the input, or an error."""

    model_config = ConfigDict(extra="allow")

    code: str | None = None
    line: int | None = Field(None, description="The line of the input, counted from 1.")
    message: str | None = None
    param: str | None = None


class BatchProblems(Answer):
    """The first thousand problems with the input."""

    model_config = ConfigDict(extra="allow")

    object: Literal["list"] = "list"
    data: list[BatchProblem]
    total: int | None = Field(None, description="Total number of problems.")


class RequestCounts(Answer):
    """Progress of the batch; at the end `completed` and `failed` add up to `total`."""

    total: int
    completed: int
    failed: int


class CountsByOutcome(Answer):
    """The same by outcome: `failed` of `request_counts` is the sum of the last three here."""

    completed: int
    failed: int
    expired: int
    cancelled: int


class CachedTokens(Answer):
    """Tokens of the prompts that the server read from its cache."""

    cached_tokens: int


class ReasoningTokens(Answer):
    """Tokens of the answers that the model used for reasoning."""

    reasoning_tokens: int


class BatchUsage(Answer):
    """Tokens, as the model servers reported them."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int

    @classmethod
    def of(cls, batch: Batch) -> BatchUsage | None:
        if batch.input_tokens + batch.output_tokens == 0:
            return None
        return cls(
            input_tokens=batch.input_tokens,
            input_tokens_details=CachedTokens(cached_tokens=batch.cached_tokens),
            output_tokens=batch.output_tokens,
            output_tokens_details=ReasoningTokens(reasoning_tokens=batch.reasoning_tokens),
            total_tokens=batch.input_tokens + batch.output_tokens,
        )


class ErrorGroup(Answer):
    """Lines that failed for the same reason."""

    code: str
    count: int
    sample_custom_id: str


class BatchWait(Answer):
    """Something that a batch waits for."""

    reason: Literal["credential", "disk", "key", "store"]
    message: str


class BatchView(Answer):
    """A batch, as OpenAI shows it, with additional fields; all times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = Field(description="The model, if all lines have the same one.")
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int = Field(description="When its window ends.")
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None = Field(description="Null until a model server has reported tokens.")
    metadata: dict[str, str] | None

    counts_by_outcome: CountsByOutcome
    eta: int | None = Field(
        description="When every line will be answered at the pace of the last minute; null while no answers come."
    )
    deadline_risk: DeadlineRisk | None = Field(
        description="`high`: too slow for its window; `low`: done in the last quarter of the time left; `none`: "
        "sooner. Null where there is no pace to judge by."
    )
    error_summary: list[ErrorGroup] = Field(description="Why lines failed, the most frequent reason first.")
    cost: float | None = Field(description="By the setting `batches.prices`; null if a model has no price.")
    prefix_saved_tokens: int = Field(description="Tokens of prompts that the server's prefix cache saved.")
    waiting_on: list[BatchWait] = Field(
        description="What the batch waits for now: the object store, room on a worker's disk, the key for the "
        "headers of its creator, or a credential that an outside provider refuses. It waits until its window is over, "
        "and for an hour at least if only its files are to be written."
    )
    paused_at: int | None
    retry_of: str | None = Field(description="The batch whose failed lines this one retries.")
    priority: int
    limits: BatchLimits

    @classmethod
    def of(cls, batch: Batch, forecast: Forecast, settings: BatchSettings) -> BatchView:
        return cls(
            **{name: getattr(batch, name) for name in _AS_THEY_ARE},
            **{name: unix(getattr(batch, name)) for name in _TIMES},
            expires_at=int(batch.expires_at.timestamp()),
            model=batch.models[0] if batch.models and len(batch.models) == 1 else None,
            errors=_problems(batch),
            request_counts=RequestCounts(
                total=batch.total,
                completed=batch.completed,
                failed=batch.failed + batch.expired + batch.cancelled,
            ),
            usage=BatchUsage.of(batch),
            counts_by_outcome=CountsByOutcome.model_validate(batch),
            eta=unix(forecast.eta),
            deadline_risk=forecast.risk,
            error_summary=_error_groups(batch.error_summary),
            cost=cost(batch.usage_by_model, settings.prices),
            prefix_saved_tokens=batch.cached_tokens,
            waiting_on=_waits(batch),
            limits=BatchLimits(max_in_flight=batch.limits.get("max_in_flight")),
        )


class BatchList(Answer):
    """A page of batches, newest first; the id of the last one is `after` for the next page."""

    object: Literal["list"] = "list"
    data: list[BatchView]
    first_id: str | None
    last_id: str | None
    has_more: bool


_AS_THEY_ARE = (
    "id",
    "endpoint",
    "input_file_id",
    "completion_window",
    "status",
    "output_file_id",
    "error_file_id",
    "metadata",
    "retry_of",
    "priority",
)
_TIMES = (
    "created_at",
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "paused_at",
)


def _waits(batch: Batch) -> list[BatchWait]:
    if batch.waits_for is None:
        return []
    return [BatchWait.model_validate({"reason": batch.waiting_reason, "message": batch.waits_for})]


def _problems(batch: Batch) -> BatchProblems | None:
    """The problems that the plan found in the input, or else what made the batch fail later."""
    if batch.errors is not None:
        return BatchProblems.model_validate({"object": "list", **batch.errors})
    if batch.status is BatchStatus.FAILED and batch.stop_error is not None:
        return BatchProblems(data=[BatchProblem.model_validate(batch.stop_error)])
    return None


def _error_groups(summary: Mapping[str, Sequence[Any]]) -> list[ErrorGroup]:
    """By code, each with its count and a sample, as the journals keep them."""
    groups = [ErrorGroup(code=code, count=count, sample_custom_id=sample) for code, (count, sample) in summary.items()]
    return sorted(groups, key=lambda group: (-group.count, group.code))
