"""Sarvam: batch speech-to-text over REST.

    create (free) ─▶ upload each file ─▶ start (paid) ─▶ status … status ─▶ download

Everything up to the start is staging, so the job has its id before it costs anything, and starts at most once.
"""

from __future__ import annotations

import logging
import mimetypes
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from batchwright.errors import Fatal, OperationError, RateLimited, SchemaInvalid, Transient
from batchwright.inference.http import Headers, Upload
from batchwright.providers.contract import (
    Abilities,
    Counts,
    Ending,
    InDoubt,
    Input,
    Job,
    Phase,
    Problem,
    Request,
    Result,
    Staged,
    Status,
)
from batchwright.providers.errors import ErrorTable, Kind, describe
from batchwright.providers.service import KeyedAdapter
from batchwright.providers.settings import ServiceSettings
from batchwright.providers.speech import (
    AUTO,
    ObjectAdapter,
    SpeechOptions,
    check_inputs,
    check_options,
    each_once,
    ending_of,
    failed,
    fetch_signed,
    lost,
    merged,
    read_object,
    refused,
    staged_name,
    transcribed,
)

log = logging.getLogger(__name__)

_JOBS = "/speech-to-text/job/v1"
_NO_JOB = "00000000-0000-0000-0000-000000000000"
_NOT_STARTED = "Accepted"
_SUCCESS = "Success"
_STATUSES = {
    "Accepted": (Phase.QUEUED, None),
    "Pending": (Phase.QUEUED, None),
    "Running": (Phase.RUNNING, None),
    "Completed": (Phase.ENDED, Ending.SUCCEEDED),
    "Failed": (Phase.ENDED, Ending.FAILED),
}
_ERRORS = ErrorTable(
    by_code={
        "rate_limit_exceeded_error": Kind.RATE_LIMITED,
        "billing_service_unavailable_error": Kind.TRANSIENT,
        "gateway_timeout_error": Kind.TRANSIENT,
        "internal_server_error": Kind.TRANSIENT,
        "model_call_error": Kind.TRANSIENT,
        "invalid_request_error": Kind.SCHEMA_INVALID,
        "unprocessable_entity_error": Kind.SCHEMA_INVALID,
        "authentication_error": Kind.CREDENTIAL,
        "insufficient_quota_error": Kind.CREDENTIAL,
        "invalid_api_key_error": Kind.CREDENTIAL,
        # The states of a file.
        "API Error": Kind.SCHEMA_INVALID,
        "Internal Server Error": Kind.TRANSIENT,
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SarvamSettings(ServiceSettings):
    """A Sarvam account."""

    base_url: str = "https://api.sarvam.ai"
    api_key_env: str | None = "SARVAM_API_KEY"
    api_key_file: Path | None = None
    language: str = AUTO
    """Default for tasks that set none."""
    model: str = "saaras:v3"
    """Default for tasks that set none."""
    mode: str = "transcribe"
    """`transcribe`, or `translate` for an English translation."""


class Sarvam(ObjectAdapter, KeyedAdapter):
    """Jobs cannot be listed or cancelled, but their id is known before they start."""

    name = "sarvam"
    title = "Sarvam AI"
    Settings = SarvamSettings
    settings: SarvamSettings
    errors = _ERRORS
    abilities = Abilities(
        task_types=frozenset({"transcription"}),
        can_cancel=False,
        can_find=True,
        deduplicates=True,
        inputs_max=20,
        timeout_hours=24.0,
        settle_seconds=0.0,
        duplicates="The job is created free of charge, and its id is stored before it is started; it starts only once.",
    )

    async def headers(self) -> Headers:
        return {"api-subscription-key": self.key}

    def validate(self, request: Request) -> Sequence[Problem]:
        problems = check_inputs(request, self.abilities)
        return problems + check_options(request, speakers=range(1, 11), languages_max=1)

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        """Create the job and upload its files. Unreadable inputs are left out and listed in `refused`."""
        if "job_id" not in staged:
            made = await self.ask("POST", _JOBS, json=self._parameters(request))
            staged = {"job_id": str(made["job_id"]), "uploaded": [], "refused": {}}
            yield staged
        for name, input in _names(request).items():
            if input.id in staged["uploaded"] or input.id in staged["refused"]:
                continue
            try:
                await self._upload(staged["job_id"], name, input)
                staged = {**staged, "uploaded": [*staged["uploaded"], input.id]}
            except OperationError as error:
                staged = {**staged, "refused": {**staged["refused"], input.id: refused(error)}}
            yield staged

    async def submit(self, request: Request, staged: Staged) -> Job:
        if not staged["uploaded"]:
            raise SchemaInvalid(f"none of the inputs can be read: {_first(staged['refused'])}", code="no_inputs")
        job = Job(external_id=staged["job_id"], extra={"refused": staged["refused"]})
        try:
            await self.pay(f"{_JOBS}/{job.external_id}/start", json={})
        except (SchemaInvalid, Fatal):
            # If an earlier request did start the job, Sarvam refuses to start it again.
            if not await self._has_surely_started(job):
                raise
        return job

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        if "job_id" not in staged:
            return []
        job = Job(external_id=staged["job_id"], extra={"refused": staged["refused"]})
        return [job] if await self._has_started(job) else []

    async def poll(self, job: Job) -> Status:
        response = await self.service.ask("GET", f"{_JOBS}/{job.external_id}/status")
        if response.status == 404:
            return lost(job.external_id)
        body = self.checked(response)
        word = str(body.get("job_state"))
        if word not in _STATUSES:
            log.warning("sarvam: job %s has the unknown status %s, which counts as running", job.external_id, word)
        phase, ending = _STATUSES.get(word, (Phase.RUNNING, None))
        counts = _counts(body)
        if ending is None:
            return Status(phase=phase, raw_status=word, counts=counts)
        has_failed = ending is Ending.FAILED
        return Status(
            phase=phase,
            raw_status=word,
            ending=ending_of(counts, ending),
            counts=counts,
            error=describe(_ERRORS, {"message": body.get("error_message")}) if has_failed else None,
        )

    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        return each_once(request, status, self._results(request, job))

    async def _results(self, request: Request, job: Job) -> AsyncIterator[Result]:
        for id, error in (job.extra.get("refused") or {}).items():
            yield failed(id, error)
        inputs = {name: input.id for name, input in _names(request).items()}
        for detail in (await self._status(job)).get("job_details") or []:
            name = _file_name(detail, "inputs")
            id = inputs.get(name, name)
            if detail.get("state") != _SUCCESS:
                yield failed(id, describe(_ERRORS, _said(detail)))
                continue
            document = read_object(await self._download(job, _file_name(detail, "outputs")))
            if document is None:
                log.warning("sarvam: the result for %s of job %s is not a JSON object", name, job.external_id)
                continue
            yield transcribed(id, str(document.get("transcript") or ""), document, _seconds(document))

    async def check(self) -> str:
        """Sarvam has no list, so this asks for a job that does not exist: only a refused key is an error."""
        response = await self.service.ask("GET", f"{_JOBS}/{_NO_JOB}/status")
        if response.status in (401, 402, 403, 429) or response.status >= 500:
            self.checked(response)
        return f"Sarvam at {self.service.base_url} accepts the key"

    def _parameters(self, request: Request) -> dict[str, Any]:
        options = SpeechOptions.of(request, self.settings.language)
        parameters: dict[str, Any] = {
            "model": request.model or self.settings.model,
            "mode": self.settings.mode,
            "language_code": "unknown" if options.languages[0] == AUTO else options.languages[0],
            "with_timestamps": options.has_word_timestamps,
            "with_diarization": options.has_diarization,
        }
        if options.speakers_max is not None:
            parameters["num_speakers"] = options.speakers_max
        return {"job_parameters": merged(parameters, options.provider_options)}

    async def _upload(self, job_id: str, name: str, input: Input) -> None:
        """Upload an input to the URL that Sarvam returned. A second upload replaces the first."""
        body = Upload(
            length=await self.tools.size(input),
            open=lambda: self.tools.read(input),
            content_type=input.content_type or mimetypes.guess_type(name)[0] or "application/octet-stream",
        )
        answer = await self.ask("POST", f"{_JOBS}/upload-files", json={"job_id": job_id, "files": [name]})
        url = _file_url(answer, "upload_urls", name)
        response = await self.tools.http.ask("PUT", url, headers={"x-ms-blob-type": "BlockBlob"}, body=body)
        if not response.is_ok:
            raise Transient(
                f"the upload of {input.filename!r} failed with status {response.status}", code="upload_failed"
            )

    async def _download(self, job: Job, name: str) -> bytes:
        """The content of a result file. If its URL has expired, it is requested once more."""
        for _ in range(2):
            asked = {"job_id": job.external_id, "files": [name]}
            answer = await self.ask("POST", f"{_JOBS}/download-files", json=asked)
            response = await fetch_signed(self.service, _file_url(answer, "download_urls", name))
            if response.is_ok:
                return response.body
        raise Transient(f"a result of Sarvam could not be fetched: status {response.status}", code="result_unavailable")

    async def _has_surely_started(self, job: Job) -> bool:
        """Raises InDoubt if Sarvam does not answer, so that it is unknown."""
        try:
            return await self._has_started(job)
        except (RateLimited, Transient) as error:
            raise InDoubt(str(error), code=error.code) from None

    async def _has_started(self, job: Job) -> bool:
        return bool((await self._status(job)).get("job_state") != _NOT_STARTED)

    async def _status(self, job: Job) -> Any:
        return await self.ask("GET", f"{_JOBS}/{job.external_id}/status")


def _names(request: Request) -> dict[str, Input]:
    """The inputs by the names under which they are uploaded, the same each time."""
    return {staged_name(index, input): input for index, input in enumerate(request.inputs)}


def _counts(body: Mapping[str, Any]) -> Counts:
    return Counts(
        total=body.get("total_files"),
        succeeded=body.get("successful_files_count"),
        failed=body.get("failed_files_count"),
    )


def _file_name(detail: Mapping[str, Any], side: str) -> str:
    files = detail.get(side) or [{}]
    return str(files[0].get("file_name"))


def _file_url(answer: Mapping[str, Any], side: str, name: str) -> str:
    found = ((answer.get(side) or {}).get(name) or {}).get("file_url")
    if not isinstance(found, str):
        raise Transient(f"Sarvam named no URL for the file {name}", code="no_url")
    return found


def _said(detail: Mapping[str, Any]) -> dict[str, Any]:
    return {"code": detail.get("state"), "message": detail.get("error_message") or detail.get("exception_name")}


def _seconds(document: Mapping[str, Any]) -> float | None:
    """The end time of the transcript, if it has times: Sarvam does not report the length of the audio."""
    ends = (document.get("timestamps") or {}).get("end_time_seconds") or []
    return max(ends) if ends and all(isinstance(end, (int, float)) for end in ends) else None


def _first(errors: Mapping[str, Mapping[str, Any]]) -> str:
    return next((str(error["message"]) for error in errors.values()), "there are none")
