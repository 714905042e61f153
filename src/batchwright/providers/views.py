"""Tasks and providers in the HTTP API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from batchwright.api.openai import ExpiresAfter, unix
from batchwright.api.schemas import Answer, Body, Name, Payload, Priority, Text
from batchwright.providers.directory import Directory
from batchwright.providers.jobs import Hold, RemoteJob
from batchwright.providers.submission import MODELS_MAX, TIMEOUT_HOURS_MAX, URL_CHARACTERS_MAX, WantedInput
from batchwright.providers.tasks import Task
from batchwright.states import TaskStatus

_URL = Annotated[Text, Field(max_length=10 * URL_CHARACTERS_MAX)]
"""A longer URL is left out of the task like any other invalid one. This limit only bounds the request body."""


class TaskInput(Body):
    """One input: either `url` or `file_id`."""

    url: _URL | None = Field(None, description="`https:`, `gs:`, `s3:` or `az:`; read by a worker, or by the provider.")
    file_id: Name | None = Field(None, description="A file that was uploaded to /v1/files.")
    filename: Annotated[Text, Field(min_length=1, max_length=255)] | None = Field(
        None, description="Its name in the results; by default the file's own name."
    )

    def wanted(self) -> WantedInput:
        return WantedInput(url=self.url, file_id=self.file_id, filename=self.filename)


class TaskToBe(Body):
    """A task for outside providers."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "task_type": "transcription",
                    "provider": "azure",
                    "inputs": ["https://example.com/call.wav"],
                    "options": {"language": "en-US"},
                },
                {
                    "task_type": "completion",
                    "models": ["openai/gpt-5-mini", "gemini/gemini-2.5-flash"],
                    "inputs": ["file-0199f0c2a1b37c5c8f1e2d3c4b5a6978"],
                },
            ]
        }
    )

    task_type: Name = Field(description="`transcription` or `completion`.")
    provider: Name | None = Field(None, description="The provider; for completions, `models` may name it instead.")
    model: Name | None = Field(None, description="The same as `models` with a single entry.")
    models: Annotated[list[Annotated[Text, Field(min_length=1, max_length=200)]], Field(max_length=MODELS_MAX)] = Field(
        default_factory=list, description="Each model runs on all inputs. Without `provider`, write `provider/model`."
    )
    inputs: Annotated[list[_URL | TaskInput], Field(max_length=100_000)] = Field(
        description="URLs or ids of stored files; for a completion, the single file with its requests."
    )
    options: Annotated[dict[Annotated[Text, Field(max_length=100)], Payload], Field(max_length=50)] = Field(
        default_factory=dict,
        description="For a transcription: language, languages, diarization, speakers_max, word_timestamps, "
        "provider_options. For a completion: endpoint, completion_window.",
    )
    metadata: (
        Annotated[
            dict[Annotated[Text, Field(min_length=1, max_length=64)], Annotated[Text, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = Field(None, description="Your own metadata, returned with the task.")
    priority: Priority = Field(5, description="0 is the highest priority.")
    timeout_hours: Annotated[float, Field(ge=0.001, le=TIMEOUT_HOURS_MAX, allow_inf_nan=False)] | None = Field(
        None, description="Hours until the task times out; by default 26, or the provider's window if longer."
    )
    result_expires_after: ExpiresAfter | None = None


class RemoteJobView(Answer):
    """A job at a provider."""

    number: int
    provider: str
    model: str | None
    phase: Literal["planned", "staged", "submitting", "submitted", "ended"] = Field(
        description="State of the submission; a job in `submitting` may already exist at the provider."
    )
    key: str = Field(description="Our marker, by which the job can be found at the provider.")
    external_id: str | None
    raw_status: str | None = Field(description="The provider's own status at the last poll.")
    total: int | None
    succeeded: int | None
    failed: int | None
    cancelled: str | None = Field(description="Outcome of the request to cancel it.")
    error: dict[str, Any] | None
    call_error: str | None = Field(description="Why the last call failed (it is retried); null if it succeeded.")
    cost: float | None = Field(description="Null if unknown.")

    @classmethod
    def of(cls, job: RemoteJob) -> RemoteJobView:
        return cls.model_validate({name: getattr(job, name) for name in cls.model_fields})


class TaskWait(Answer):
    """Why a task does not continue."""

    reason: Literal["credential"]
    message: str


class TaskView(Answer):
    """A task."""

    id: str
    object: Literal["task"] = "task"
    status: TaskStatus
    task_type: str
    provider: str | None
    models: list[str] = Field(description="As `provider/model` if the task has no single `provider`.")
    inputs: int
    invalid_urls: list[str]
    succeeded: int = Field(description="Number of successful results. Each model has one result per input or line.")
    failed: int
    provider_state: dict[str, Any] | None
    error: dict[str, Any] | None
    waiting_on: list[TaskWait] = Field(description="What the task waits for; empty if it is not waiting.")
    cancel_note: str | None = Field(description="Why a cancellation takes long, if it does.")
    result_file_id: str | None = Field(description="The merged result, also at /v1/tasks/{id}/result.")
    usage: dict[str, float | int | None]
    cost: float | None = Field(description="The cost so far; null if a price is unknown.")
    metadata: dict[str, str] | None
    created_at: int | None
    in_progress_at: int | None
    cancel_requested_at: int | None
    deadline_at: int | None
    ended_at: int | None
    jobs: list[RemoteJobView] | None = Field(None, description="Only in the response for a single task.")

    @classmethod
    def of(cls, task: Task, jobs: Sequence[RemoteJob] | None = None) -> TaskView:
        return cls(
            id=task.id,
            status=task.status,
            task_type=task.task_type,
            provider=task.provider,
            models=[
                target.model if task.provider is not None else f"{target.provider}/{target.model}"
                for target in task.targets
                if target.model is not None
            ],
            inputs=len(task.inputs),
            invalid_urls=task.invalid_urls,
            succeeded=task.succeeded,
            failed=task.failed,
            provider_state=task.provider_state,
            error=task.error,
            waiting_on=[TaskWait(reason="credential", message=task.waits_for)] if task.waits_for else [],
            cancel_note=task.cancel_note,
            result_file_id=task.result_file_id,
            usage={
                "input_tokens": task.input_tokens,
                "output_tokens": task.output_tokens,
                "audio_seconds": task.audio_seconds,
            },
            cost=task.cost,
            metadata=task.metadata,
            created_at=unix(task.created_at),
            in_progress_at=unix(task.in_progress_at),
            cancel_requested_at=unix(task.cancel_requested_at),
            deadline_at=unix(task.deadline_at),
            ended_at=unix(task.ended_at),
            jobs=[RemoteJobView.of(job) for job in jobs] if jobs is not None else None,
        )


class TaskList(Answer):
    """Tasks, newest first."""

    object: Literal["list"] = "list"
    data: list[TaskView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ProviderView(Answer):
    """A provider, and what it can do."""

    name: str
    title: str
    task_types: list[str]
    can_cancel: bool
    can_find: bool
    deduplicates: bool
    inputs_max: int | None
    requests_max: int | None
    request_bytes_max: int | None
    timeout_hours: float
    missing: str | None = Field(description="The setting or credential that this process lacks for it; null if none.")
    held: str | None = Field(description="Why its work waits: the provider's message when it refused the credential.")

    @classmethod
    def of(cls, name: str, directory: Directory, hold: Hold | None) -> ProviderView:
        abilities = directory.abilities(name)
        return cls(
            name=name,
            title=directory.kind(name).title,
            task_types=sorted(abilities.task_types),
            can_cancel=abilities.can_cancel,
            can_find=abilities.can_find,
            deduplicates=abilities.deduplicates,
            inputs_max=abilities.inputs_max,
            requests_max=abilities.requests_max,
            request_bytes_max=abilities.request_bytes_max,
            timeout_hours=directory.timeout_hours(name),
            missing=directory.missing(name),
            held=hold and hold.message,
        )


class ProviderList(Answer):
    """All providers, sorted by name."""

    object: Literal["list"] = "list"
    data: list[ProviderView]
