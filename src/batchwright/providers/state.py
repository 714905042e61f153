"""The documents in a task's `provider_state`: pure functions that create them, update them and read their outcome.

    SUBMITTED ─▶ the provider's status … ─▶ COMPLETED | PARTIAL_COMPLETE | FAILED
                      │         ▲
                      └─ error answers are counted; the third in a row is FAILED

Each provider's document has a fixed set of fields. Everything else that the caller must remember has its own columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from batchwright.providers.contract import Ending, Input, Job, Phase, Request, Result, Status

Document = dict[str, Any]

SUBMITTED = "SUBMITTED"
TRANSIENT_FAILURES_MAX = 3
"""Number of error answers in a row that fails a job."""


class TaskEnding(StrEnum):
    """How a job, or a whole task, ended."""

    COMPLETED = "COMPLETED"
    PARTIAL_COMPLETE = "PARTIAL_COMPLETE"
    FAILED = "FAILED"


_FLAT = ("external_job_id", "status", "result", "error", "transient_failures")
_TRANSCRIPTION_FIELDS: Mapping[str, Sequence[str]] = {
    # The counter of an AZURE job is not part of its document until there is something to count.
    "AZURE": ("external_job_id", "status", "result", "error"),
    "SARVAM": _FLAT,
    "AWS": ("external_job_id", "gcs_uri", "filename", "status", "result", "error", "transient_failures"),
    "GOOGLE": ("model", *_FLAT),
}
_COMPLETION_FIELDS = ("model", "status", "external_job_id", "output_uri", "error", "transient_failures")
_MERGED_BY_MODEL = frozenset({"GOOGLE"})
_WITH_MAP = frozenset({"SARVAM"})


def describe_transcription(
    provider: str, *, dataset_ids: Sequence[str], invalid_urls: Sequence[str] = (), jobs: Sequence[Document] = ()
) -> Document:
    """The document of a transcription task; `dataset_ids` are the ids of the stored files."""
    state: Document = {
        "task_type": "transcription",
        "provider": provider.upper(),
        "dataset_ids": list(dataset_ids),
        "invalid_urls": list(invalid_urls),
    }
    if state["provider"] in _WITH_MAP:
        state["gcs_map"] = {}
    return {**state, "jobs": list(jobs)}


def describe_completion(*, input_dataset_ids: Sequence[str], jobs: Sequence[Document] = ()) -> Document:
    """The document of a completion task, which has one job per model."""
    return {"task_type": "completion", "input_dataset_ids": list(input_dataset_ids), "jobs": list(jobs)}


def new_job(task_type: str, provider: str, request: Request, job: Job | None) -> Document:
    """The document of a submitted job; a job that could not be submitted has no external id."""
    is_transcription = task_type == "transcription"
    fields = _TRANSCRIPTION_FIELDS.get(provider.upper(), _FLAT) if is_transcription else _COMPLETION_FIELDS
    first = request.inputs[0] if request.inputs else None
    values = {
        "external_job_id": None if job is None else job.external_id,
        "filename": first and first.filename,
        "gcs_uri": first and first.uri,
        "model": request.model,
        "status": SUBMITTED,
        "transient_failures": 0,
    }
    return {field: values.get(field) for field in fields}


def sources(inputs: Sequence[Input], job: Job) -> dict[str, str]:
    """The sources of a job's inputs; if there are several, their ids tell them apart."""
    if len(inputs) == 1:
        return {job.external_id: inputs[0].uri}
    return {f"{job.external_id}/{input.id}": input.uri for input in inputs}


def record_poll(document: Document, status: Status) -> Document:
    """The document after a poll that found the job unfinished, or that returned an error about it."""
    if status.is_error:
        return _count_failure(document, status)
    if status.phase is Phase.ENDED:
        raise ValueError("a job that has ended is recorded with its results")
    recorded = {**document, "status": status.raw_status}
    if "transient_failures" in document:
        recorded["transient_failures"] = 0
    return recorded


def record_end(
    document: Document,
    status: Status,
    outcome: TaskEnding,
    *,
    entries: Sequence[Document] = (),
    output_uri: str | None = None,
) -> Document:
    """The document of an ended job: the outcome by its counted results, and the results or where they are."""
    ended = {**document, "status": outcome.value}
    if "result" in document and entries:
        ended["result"] = list(entries)
    if "output_uri" in document:
        ended["output_uri"] = output_uri
    if outcome is TaskEnding.FAILED:
        ended["error"] = _reason(status)
    return ended


def fail_job(document: Document, error: str) -> Document:
    return {**document, "status": TaskEnding.FAILED.value, "error": error}


def count_outcome(*, total: int, succeeded: int) -> TaskEnding:
    """The outcome of one job, decided by its results and not by the provider's status."""
    if succeeded == 0:
        return TaskEnding.FAILED
    return TaskEnding.COMPLETED if succeeded >= total else TaskEnding.PARTIAL_COMPLETE


def end_task(state: Document) -> TaskEnding:
    """The outcome of a task whose jobs have all ended, of either type.

    all jobs COMPLETED                             COMPLETED
    at least one COMPLETED or PARTIAL_COMPLETE     PARTIAL_COMPLETE
    no job succeeded                               FAILED
    """
    outcomes = [TaskEnding(job["status"]) for job in state["jobs"]]
    if all(outcome is TaskEnding.FAILED for outcome in outcomes):
        return TaskEnding.FAILED
    is_whole = all(outcome is TaskEnding.COMPLETED for outcome in outcomes)
    return TaskEnding.COMPLETED if is_whole else TaskEnding.PARTIAL_COMPLETE


def make_entry(input: Input, result: Result | None) -> Document:
    """What a transcription's result says about one input; an input without a result gets an error."""
    if result is None:
        missing = {"kind": "transient", "code": "missing_result", "message": "the provider returned no result"}
        return _entry(input, None, missing)
    return _entry(input, result.value, result.error)


def is_merged_by_model(provider: str) -> bool:
    """Whether the result file has one list of transcriptions per model instead of one for all."""
    return provider.upper() in _MERGED_BY_MODEL


def _count_failure(document: Document, status: Status) -> Document:
    failures = document.get("transient_failures", 0) + 1
    counted = {**document, "transient_failures": failures}
    return fail_job(counted, _reason(status)) if failures >= TRANSIENT_FAILURES_MAX else counted


def _entry(input: Input, value: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> Document:
    return {
        "input_id": input.id,
        "filename": input.filename,
        "source": input.uri,
        "transcription": value,
        "error": error,
    }


def _reason(status: Status) -> str:
    """Why a job failed, as one string."""
    if status.error and status.error.get("message"):
        return str(status.error["message"])
    ending = status.ending or Ending.FAILED
    return f"the job ended without a result: {ending.value} (the provider's status is {status.raw_status})"
