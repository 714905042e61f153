"""OpenAI's dialect: the objects of its Files and Batches API, and what it says about requests that are off."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Path, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field
from starlette.responses import Response

from batchwright.api.errors import Refusal, unknown
from batchwright.api.routes import OrjsonRoute
from batchwright.api.schemas import Answer, Body, Name, Priority, Text
from batchwright.batches.files import File
from batchwright.batches.lines import ENDPOINTS
from batchwright.batches.outlook import DeadlineRisk, Outlook, cost
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batch
from batchwright.batches.submission import (
    IN_FLIGHT_MAX,
    METADATA_KEY_CHARACTERS_MAX,
    METADATA_PAIRS_MAX,
    METADATA_VALUE_CHARACTERS_MAX,
)
from batchwright.batches.uploads import PARTS_MAX, Part, Upload
from batchwright.errors import NotFound
from batchwright.states import BatchStatus, UploadStatus

EXPIRES_SECONDS_MIN = 3_600
EXPIRES_SECONDS_MAX = 2_592_000
PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
FILENAME_CHARACTERS_MAX = 512
_BYTES_MAX = 2**53 - 1

Id = Annotated[Text, Path(min_length=1, max_length=100)]
AfterId = Annotated[Text, Field(min_length=1, max_length=100)]


class OpenAIRoute(OrjsonRoute):
    """A route that refuses requests in the words that OpenAI's clients know."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def in_their_words(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                problem = error.errors()[0]
                if problem["type"] == "json_invalid":
                    raise
                raise _refusal(problem) from error
            except NotFound as error:
                raise _absent(error) from error

        return in_their_words


# What is wrong with a request -------------------------------------------------------------------------------------


def missing(param: str) -> Refusal:
    return Refusal(f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)


def unsupported(param: str, value: str, supported: Sequence[str], reason: str | None = None) -> Refusal:
    known = ", ".join(f"'{one}'" for one in supported)
    text = f"Invalid value: '{value[:100]}'. Supported values are: {known}."
    return Refusal(f"{text} It is refused because {reason}." if reason else text, code="invalid_value", param=param)


def wrong_type(param: str, expected: str, found: str) -> Refusal:
    return Refusal(
        f"Invalid type for '{param}': expected {expected}, but got {found} instead.", code="invalid_type", param=param
    )


def out_of_range(param: str, value: object, *, least: object = None, most: object = None) -> Refusal:
    word, sign = ("below minimum", ">=") if most is None else ("above maximum", "<=")
    bound = least if most is None else most
    message = f"Invalid '{param}': integer {word} value. Expected a value {sign} {bound}, but got {value} instead."
    return Refusal(message, code=f"integer_{word.replace('imum', '').replace(' ', '_')}_value", param=param)


def unknown_cursor(error: NotFound) -> Refusal:
    """A page after an object that is not there: silence would be taken for the end of the list."""
    return Refusal(_absent(error).detail, code="invalid_value", param="after")


_ABSENT = {
    "batch": ("No batch found with id '{}'.", None),
    "file": ("No such File object: {}", "id"),
    "upload": ("No such Upload object: {}", "id"),
}


def _absent(error: NotFound) -> Refusal:
    """OpenAI gives these no code."""
    if error.kind not in _ABSENT:
        return Refusal(str(error), status=404, code="not_found")
    words, param = _ABSENT[error.kind]
    return Refusal(words.format(error.id), status=404, param=param)


_EXPECTED = {
    "bool_parsing": "a boolean",
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "an array",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_KINDS = {
    bool: "a boolean",
    dict: "an object",
    float: "a decimal number",
    int: "an integer",
    list: "an array",
    str: "a string",
    type(None): "null",
}


def _refusal(problem: Mapping[str, Any]) -> Refusal:
    """What the framework found, as OpenAI says it."""
    place, *path = problem["loc"]
    param = ".".join(str(part) for part in path if part != "[key]")[:200] or str(place)
    found, context = problem.get("input"), problem.get("ctx", {})
    match problem["type"]:
        case "missing":
            return missing(param)
        case "extra_forbidden":
            return unknown(param)
        case kind if kind in _EXPECTED:
            return wrong_type(param, _EXPECTED[kind], _KINDS.get(type(found), "something else"))
        case "greater_than_equal":
            return out_of_range(param, found, least=context["ge"])
        case "less_than_equal":
            return out_of_range(param, found, most=context["le"])
        case "string_too_long" | "too_long":
            return _too_long(param, found, context)
        case "string_too_short":
            return Refusal(f"Invalid '{param}': empty string.", code="empty_string", param=param)
        case "literal_error" | "enum":
            return unsupported(param, str(found), context["expected"].replace("'", "").split(" or "))
        case "string_pattern_mismatch":
            message = f"Invalid '{param}': a NUL character cannot be stored."
            return Refusal(message, code="invalid_value", param=param)
    return Refusal(f"Invalid '{param}': {problem['msg']}.", code="invalid_value", param=param)


def _too_long(param: str, found: Any, context: Mapping[str, Any]) -> Refusal:
    most = context["max_length"]
    if isinstance(found, dict):
        message = (
            f"Invalid '{param}': too many properties. Expected an object with at most {most} properties, "
            f"but got an object with {len(found)} properties instead."
        )
        return Refusal(message, code="object_above_max_properties", param=param)
    what = "string" if isinstance(found, str) else "array"
    message = (
        f"Invalid '{param}': {what} too long. Expected {'a' if what == 'string' else 'an'} {what} with maximum length "
        f"{most}, but got one with length {len(found)} instead."
    )
    return Refusal(message, code=f"{what}_above_max_length", param=param)


# Files ------------------------------------------------------------------------------------------------------------


class ExpiresAfter(Body):
    """How long a file is kept, from its creation on."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(strict=True, ge=EXPIRES_SECONDS_MIN, le=EXPIRES_SECONDS_MAX)]


class FileView(Answer):
    """A file, as OpenAI shows it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(description="Unix seconds, as all times of this object.")
    filename: str
    purpose: str
    status: Literal["processed"] = Field("processed", description="A file that is shown is complete.")
    expires_at: int | None = Field(description="From then on it is gone; null means never.")
    status_details: None = None

    @classmethod
    def of(cls, file: File) -> FileView:
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=int(file.created_at.timestamp()),
            filename=file.filename,
            purpose=file.purpose,
            expires_at=unix(file.expires_at),
        )


class FileList(Answer):
    """A page of files; the id of the last one is `after` for the next page."""

    object: Literal["list"] = "list"
    data: list[FileView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answer):
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


# Uploads ----------------------------------------------------------------------------------------------------------


class UploadToBe(Body):
    """A large file that will come in parts."""

    filename: Annotated[Text, Field(min_length=1, max_length=FILENAME_CHARACTERS_MAX)]
    purpose: Annotated[Text, Field(max_length=64)] = Field(
        description="What it is for.", json_schema_extra={"enum": [*PURPOSES]}
    )
    bytes: Annotated[int, Field(strict=True, ge=0, le=_BYTES_MAX)] = Field(
        description="How many bytes the file will have; at most `batches.file_bytes_max`."
    )
    mime_type: Annotated[Text, Field(min_length=1, max_length=255)] = Field(description="Any; it is not checked.")
    expires_after: ExpiresAfter | None = None


class UploadToComplete(Body):
    """The parts of the file."""

    part_ids: Annotated[list[Annotated[Text, Field(max_length=100)]], Field(max_length=PARTS_MAX)] = Field(
        description="In the order in which they make up the file."
    )
    md5: Annotated[Text, Field(max_length=100)] | None = Field(
        None, description="The MD5 of the whole file, as 32 hexadecimal digits; if it is another, nothing changes."
    )


class UploadPartView(Answer):
    """A part that is stored."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int = Field(description="Unix seconds.")
    upload_id: str

    @classmethod
    def of(cls, part: Part) -> UploadPartView:
        return cls(id=part.id, created_at=int(part.created_at.timestamp()), upload_id=part.upload_id)


class UploadView(Answer):
    """An upload, as OpenAI shows it; all times are Unix seconds."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int = Field(description="An hour after its creation; what is not completed by then is `expired`.")
    filename: str
    purpose: str
    status: UploadStatus
    file: FileView | None = Field(description="The file, once it is `completed`.")

    @classmethod
    def of(cls, upload: Upload, file: File | None = None) -> UploadView:
        return cls(
            **{name: getattr(upload, name) for name in ("id", "bytes", "filename", "purpose", "status")},
            created_at=int(upload.created_at.timestamp()),
            expires_at=int(upload.expires_at.timestamp()),
            file=None if file is None else FileView.of(file),
        )


# Models -----------------------------------------------------------------------------------------------------------


class ModelView(Answer):
    """A model, as OpenAI shows it."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds, as its server says; 0 if nobody says.")
    owned_by: str


class ModelList(Answer):
    """All models, by name."""

    object: Literal["list"] = "list"
    data: list[ModelView]


# Batches ----------------------------------------------------------------------------------------------------------


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
    """A batch to be run."""

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
        description="Where every line goes.", json_schema_extra={"enum": [*ENDPOINTS]}
    )
    completion_window: Annotated[Text, Field(max_length=40)] = Field(
        description="Any time from `1m` to `30d`; what is not answered by then is `batch_expired`.", examples=["24h"]
    )
    metadata: Metadata | None = Field(None, description="Words of your own, shown again with the batch.")
    output_expires_after: ExpiresAfter | None = None
    priority: Priority = Field(5, description="0 is first. Not in OpenAI's API.")
    limits: BatchLimits = Field(default_factory=BatchLimits)


class NewPriority(Body):
    """Where the batch stands among others."""

    priority: Priority


class WhichToRetry(Body):
    """Which failed lines are to be asked again."""

    codes: Annotated[list[Name], Field(min_length=1, max_length=50)] | None = Field(
        None, description="Only lines that failed with one of these, as `error_summary` names them; null means all."
    )


class BatchProblem(Answer):
    """Something that is wrong with the input, or that broke."""

    model_config = ConfigDict(extra="allow")

    code: str | None = None
    line: int | None = Field(None, description="The line of the input, counted from 1.")
    message: str | None = None
    param: str | None = None


class BatchProblems(Answer):
    """The first thousand things that are wrong with the input."""

    model_config = ConfigDict(extra="allow")

    object: Literal["list"] = "list"
    data: list[BatchProblem]
    total: int | None = Field(None, description="How many there are altogether.")


class RequestCounts(Answer):
    """How far the batch is; at the end `completed` and `failed` make up `total`."""

    total: int
    completed: int
    failed: int


class CountsByOutcome(Answer):
    """The same, told apart: `failed` of `request_counts` is the sum of the last three here."""

    completed: int
    failed: int
    expired: int
    cancelled: int


class CachedTokens(Answer):
    """Tokens of the prompts that the server had in its cache."""

    cached_tokens: int


class ReasoningTokens(Answer):
    """Tokens of the answers that were thought, and not said."""

    reasoning_tokens: int


class BatchUsage(Answer):
    """Tokens, as the model servers told them."""

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
    """Something that a batch cannot go on without."""

    reason: Literal["disk", "key", "store"]
    message: str


class BatchView(Answer):
    """A batch, as OpenAI shows it, and what we know besides; all times are Unix seconds."""

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
    expires_at: int = Field(description="When its window is over.")
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None = Field(description="Null until a model server has told of tokens.")
    metadata: dict[str, str] | None

    counts_by_outcome: CountsByOutcome
    eta: int | None = Field(description="When every line will be answered at the pace of the last minute.")
    deadline_risk: DeadlineRisk | None = Field(
        description="`high`: too slow for its window; `low`: done in the last quarter of the time left; `none`: "
        "sooner. Null where there is no pace to judge by."
    )
    error_summary: list[ErrorGroup] = Field(description="Why lines failed, the most frequent reason first.")
    cost: float | None = Field(description="By the setting `batches.prices`; null if a model has no price.")
    prefix_saved_tokens: int = Field(description="Tokens of prompts that the server's prefix cache saved.")
    waiting_on: list[BatchWait] = Field(
        description="What it cannot go on without now: the object store, room on a worker's disk, or the key for the "
        "headers of its creator. It waits until its window is over, and for an hour at least if only its files are to "
        "be written."
    )
    paused_at: int | None
    retry_of: str | None = Field(description="The batch whose failed lines this one asks again.")
    priority: int
    limits: BatchLimits

    @classmethod
    def of(cls, batch: Batch, outlook: Outlook, settings: BatchSettings) -> BatchView:
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
            eta=unix(outlook.eta),
            deadline_risk=outlook.risk,
            error_summary=_error_groups(batch.error_summary),
            cost=cost(batch.usage_by_model, settings.prices),
            prefix_saved_tokens=batch.cached_tokens,
            waiting_on=_waits(batch),
            limits=BatchLimits(max_in_flight=batch.limits.get("max_in_flight")),
        )


class BatchList(Answer):
    """A page of batches, the newest first; the id of the last one is `after` for the next page."""

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


def unix(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def _waits(batch: Batch) -> list[BatchWait]:
    if batch.waits_for is None:
        return []
    return [BatchWait.model_validate({"reason": batch.waiting_reason, "message": batch.waits_for})]


def _problems(batch: Batch) -> BatchProblems | None:
    """What the plan found wrong with the input; else what made the batch fail later on."""
    if batch.errors is not None:
        return BatchProblems.model_validate({"object": "list", **batch.errors})
    if batch.status is BatchStatus.FAILED and batch.stop_error is not None:
        return BatchProblems(data=[BatchProblem.model_validate(batch.stop_error)])
    return None


def _error_groups(summary: Mapping[str, Sequence[Any]]) -> list[ErrorGroup]:
    """By code, each with its count and a sample, as the journals keep them."""
    groups = [ErrorGroup(code=code, count=count, sample_custom_id=sample) for code, (count, sample) in summary.items()]
    return sorted(groups, key=lambda group: (-group.count, group.code))
