"""The documents in `provider_state`, with the fields of the source, and the outcome of a task from its jobs."""

from __future__ import annotations

import copy
import itertools

import pytest

from batchwright.providers import state
from batchwright.providers.contract import Ending, Input, Job, Phase, Request, Result, Status
from batchwright.providers.state import TaskEnding
from tests.providers.documents import add_job, replace_job

URI = "gs://calls/monday.wav"
TASK = {
    "AZURE": ["task_type", "provider", "dataset_ids", "invalid_urls", "jobs"],
    "SARVAM": ["task_type", "provider", "dataset_ids", "invalid_urls", "gcs_map", "jobs"],
    "AWS": ["task_type", "provider", "dataset_ids", "invalid_urls", "jobs"],
    "GOOGLE": ["task_type", "provider", "dataset_ids", "invalid_urls", "jobs"],
}
JOB = {
    "AZURE": ["external_job_id", "status", "result", "error"],
    "SARVAM": ["external_job_id", "status", "result", "error", "transient_failures"],
    "AWS": ["external_job_id", "gcs_uri", "filename", "status", "result", "error", "transient_failures"],
    "GOOGLE": ["model", "external_job_id", "status", "result", "error", "transient_failures"],
}
COMPLETION_JOB = ["model", "status", "external_job_id", "output_uri", "error", "transient_failures"]
TERMINAL = ("COMPLETED", "PARTIAL_COMPLETE", "FAILED")


def audio(id: str = "in-1", uri: str = URI) -> Input:
    return Input(id=id, uri=uri, filename=uri.rpartition("/")[2])


def request(*inputs: Input, model: str | None = None) -> Request:
    return Request(key="bw-1", task_type="transcription", model=model, inputs=inputs or (audio(),))


def submitted(provider: str, *, model: str | None = None) -> state.Document:
    document = state.describe_transcription(provider.lower(), dataset_ids=["file-1"], invalid_urls=["htp:/x"])
    return add_job(document, request(model=model), Job(external_id="job-1"))


def running(word: str = "Running") -> Status:
    return Status(phase=Phase.RUNNING, raw_status=word)


def error_answer(message: str = "the queue is broken") -> Status:
    error = {"kind": "transient", "code": "internal", "message": message}
    return Status(phase=Phase.RUNNING, raw_status="ERROR", is_error=True, error=error)


def ended(ending: Ending = Ending.SUCCEEDED) -> Status:
    return Status(phase=Phase.ENDED, raw_status="Done", ending=ending)


@pytest.mark.parametrize("provider", JOB)
def test_a_transcription_has_the_fields_of_its_provider_and_no_others(provider: str) -> None:
    document = submitted(provider, model="long")
    assert list(document) == TASK[provider]
    assert list(document["jobs"][0]) == JOB[provider]


def test_a_new_azure_document() -> None:
    assert submitted("AZURE") == {
        "task_type": "transcription",
        "provider": "AZURE",
        "dataset_ids": ["file-1"],
        "invalid_urls": ["htp:/x"],
        "jobs": [{"external_job_id": "job-1", "status": "SUBMITTED", "result": None, "error": None}],
    }


def test_a_new_sarvam_document_maps_its_job_to_its_source() -> None:
    document = submitted("SARVAM")
    assert document["gcs_map"] == {"job-1": URI}
    assert document["jobs"] == [
        {"external_job_id": "job-1", "status": "SUBMITTED", "result": None, "error": None, "transient_failures": 0}
    ]


def test_sarvams_map_distinguishes_the_inputs_of_one_job() -> None:
    document = state.describe_transcription("sarvam", dataset_ids=[])
    document = add_job(document, request(audio("a"), audio("b", "gs://b/2.wav")), Job(external_id="job-1"))
    assert document["gcs_map"] == {"job-1/a": URI, "job-1/b": "gs://b/2.wav"}


def test_a_new_aws_document_names_its_source_and_its_file() -> None:
    assert submitted("AWS")["jobs"] == [
        {
            "external_job_id": "job-1",
            "gcs_uri": URI,
            "filename": "monday.wav",
            "status": "SUBMITTED",
            "result": None,
            "error": None,
            "transient_failures": 0,
        }
    ]


def test_google_has_one_job_per_model() -> None:
    document = state.describe_transcription("google", dataset_ids=[])
    for model in ("long", "telephony"):
        document = add_job(document, request(model=model), Job(external_id=f"operations/{model}"))
    assert [job["model"] for job in document["jobs"]] == ["long", "telephony"]
    assert [list(job) for job in document["jobs"]] == [JOB["GOOGLE"]] * 2


def test_a_completion_has_one_job_per_model_and_the_uri_of_its_output() -> None:
    document = state.describe_completion(input_dataset_ids=["file-1"])
    document = add_job(document, request(model="gemini-2.5-flash"), Job(external_id="batches/1"))
    assert document == {
        "task_type": "completion",
        "input_dataset_ids": ["file-1"],
        "jobs": [
            {
                "model": "gemini-2.5-flash",
                "status": "SUBMITTED",
                "external_job_id": "batches/1",
                "output_uri": None,
                "error": None,
                "transient_failures": 0,
            }
        ],
    }
    job = state.record_end(document["jobs"][0], ended(), TaskEnding.COMPLETED, output_uri="gs://out/1")
    assert list(job) == COMPLETION_JOB
    assert (job["status"], job["output_uri"], job["error"]) == ("COMPLETED", "gs://out/1", None)


def test_another_provider_gets_the_plain_fields() -> None:
    assert list(submitted("WHISPERS")["jobs"][0]) == JOB["SARVAM"]


def test_a_job_that_was_refused_is_failed_and_has_no_external_id() -> None:
    document = state.describe_transcription("sarvam", dataset_ids=[])
    document = add_job(document, request(), None, error="the key is refused")
    assert document["gcs_map"] == {}
    job = document["jobs"][0]
    assert (job["external_job_id"], job["status"], job["error"]) == (None, "FAILED", "the key is refused")


@pytest.mark.parametrize("provider", JOB)
def test_a_poll_stores_the_providers_own_status(provider: str) -> None:
    job = state.record_poll(submitted(provider)["jobs"][0], running("IN_PROGRESS"))
    assert job["status"] == "IN_PROGRESS"
    assert list(job) == JOB[provider]


def test_the_third_error_answer_in_a_row_fails_the_job() -> None:
    job = submitted("AWS")["jobs"][0]
    for count in (1, 2):
        job = state.record_poll(job, error_answer())
        assert (job["status"], job["transient_failures"], job["error"]) == ("SUBMITTED", count, None)
    job = state.record_poll(job, error_answer())
    assert (job["status"], job["transient_failures"], job["error"]) == ("FAILED", 3, "the queue is broken")


def test_a_good_answer_resets_the_count_of_errors() -> None:
    job = submitted("GOOGLE")["jobs"][0]
    for answer in (error_answer(), error_answer(), running(), error_answer(), error_answer()):
        job = state.record_poll(job, answer)
    assert (job["status"], job["transient_failures"]) == ("Running", 2)


def test_azures_counter_appears_with_its_first_error() -> None:
    job = submitted("AZURE")["jobs"][0]
    for count in (1, 2, 3):
        job = state.record_poll(job, error_answer())
        assert job["transient_failures"] == count
    assert job["status"] == "FAILED"


def test_an_end_is_not_recorded_as_a_poll() -> None:
    with pytest.raises(ValueError, match="with its results"):
        state.record_poll(submitted("AWS")["jobs"][0], ended())


@pytest.mark.parametrize("provider", JOB)
def test_an_end_writes_outcome_and_results(provider: str) -> None:
    entry = state.make_entry(audio(), Result(key="in-1", value={"text": "hello"}))
    job = state.record_end(submitted(provider)["jobs"][0], ended(), TaskEnding.COMPLETED, entries=[entry])
    assert list(job) == JOB[provider]
    assert (job["status"], job["result"], job["error"]) == ("COMPLETED", [entry], None)


def test_a_failed_end_says_why() -> None:
    job = submitted("AZURE")["jobs"][0]
    failed = Status(
        phase=Phase.ENDED,
        raw_status="Failed",
        ending=Ending.FAILED,
        error={"kind": "fatal", "code": "x", "message": "the audio cannot be read"},
    )
    assert state.record_end(job, failed, TaskEnding.FAILED)["error"] == "the audio cannot be read"
    expired = state.record_end(job, ended(Ending.EXPIRED), TaskEnding.FAILED)["error"]
    assert expired == "the job ended without a result: expired (the provider's status is Done)"


def test_recording_does_not_change_the_old_document() -> None:
    document = submitted("SARVAM")
    before = copy.deepcopy(document)
    job = state.record_poll(document["jobs"][0], error_answer())
    changed = replace_job(document, 0, job)
    add_job(changed, request(), Job(external_id="job-2"))
    assert document == before
    assert changed["jobs"] == [job]


@pytest.mark.parametrize(
    ("total", "succeeded", "outcome"),
    [(3, 3, "COMPLETED"), (3, 1, "PARTIAL_COMPLETE"), (3, 0, "FAILED"), (0, 0, "FAILED")],
)
def test_a_jobs_outcome_is_counted(total: int, succeeded: int, outcome: str) -> None:
    assert state.count_outcome(total=total, succeeded=succeeded) == outcome


@pytest.mark.parametrize(
    "statuses", [s for n in (1, 2, 3) for s in itertools.product(("COMPLETED", "FAILED"), repeat=n)]
)
def test_the_status_of_a_transcription_follows_from_its_jobs(statuses: tuple[str, ...]) -> None:
    if set(statuses) == {"FAILED"}:
        expected = "FAILED"
    else:
        expected = "COMPLETED" if set(statuses) == {"COMPLETED"} else "PARTIAL_COMPLETE"
    assert state.end_task({"jobs": [{"status": status} for status in statuses]}) == expected


@pytest.mark.parametrize("statuses", [s for n in (1, 2, 3) for s in itertools.product(TERMINAL, repeat=n)])
def test_the_status_of_a_completion_follows_from_its_models(statuses: tuple[str, ...]) -> None:
    if set(statuses) == {"COMPLETED"}:
        expected = "COMPLETED"
    else:
        expected = "PARTIAL_COMPLETE" if {"COMPLETED", "PARTIAL_COMPLETE"} & set(statuses) else "FAILED"
    assert state.end_task({"jobs": [{"status": status} for status in statuses]}) == expected


def test_a_task_without_jobs_has_failed() -> None:
    assert state.end_task({"jobs": []}) == "FAILED"
