"""Google Speech-to-Text v2: batchRecognize over REST. One job is one model; it reads from and writes to Cloud Storage.

The folder that a job writes to has our key in its name. We find the job by this marker, and the folder proves
that the job has run even if Google has forgotten the operation.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from batchwright.errors import ConfigurationError, OperationError, SchemaInvalid, Transient
from batchwright.inference.http import Service
from batchwright.providers.buckets import split_uri
from batchwright.providers.contract import (
    Abilities,
    Cancelled,
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
from batchwright.providers.errors import ErrorTable, Kind, describe, error_of
from batchwright.providers.google_auth import GoogleCredentials, GoogleTokens
from batchwright.providers.polls import look_up
from batchwright.providers.settings import check_url
from batchwright.providers.speech import (
    ObjectAdapter,
    SpeechOptions,
    check_inputs,
    check_options,
    each_once,
    ending_of,
    failed,
    fetch_object,
    lost,
    merged,
    read_object,
    refused,
    seconds_of,
    staged_name,
    transcribed,
)
from batchwright.providers.tools import AdapterTools

log = logging.getLogger(__name__)

_PAGE = 100
_PAGES_MAX = 200
_ENDINGS = {1: Ending.CANCELLED, 4: Ending.EXPIRED}
"""Meaning of the error code of an operation: cancelled, or deadline exceeded."""
_ERRORS = ErrorTable(
    by_code={
        # By name, and by the number that operations contain.
        "RESOURCE_EXHAUSTED": Kind.RATE_LIMITED,
        "8": Kind.RATE_LIMITED,
        "ABORTED": Kind.TRANSIENT,
        "10": Kind.TRANSIENT,
        "DEADLINE_EXCEEDED": Kind.TRANSIENT,
        "4": Kind.TRANSIENT,
        "INTERNAL": Kind.TRANSIENT,
        "13": Kind.TRANSIENT,
        "UNAVAILABLE": Kind.TRANSIENT,
        "14": Kind.TRANSIENT,
        "FAILED_PRECONDITION": Kind.SCHEMA_INVALID,
        "9": Kind.SCHEMA_INVALID,
        "INVALID_ARGUMENT": Kind.SCHEMA_INVALID,
        "3": Kind.SCHEMA_INVALID,
        "OUT_OF_RANGE": Kind.SCHEMA_INVALID,
        "11": Kind.SCHEMA_INVALID,
        "PERMISSION_DENIED": Kind.CREDENTIAL,
        "UNAUTHENTICATED": Kind.CREDENTIAL,
        "16": Kind.CREDENTIAL,
        "NOT_FOUND": Kind.FATAL,
        "5": Kind.FATAL,
        # For one file: we may not read its bucket, but may be able to read others.
        "7": Kind.FATAL,
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleSettings:
    """A Google Cloud project with the Speech-to-Text API, and its own bucket."""

    project: str
    """The id of the project."""
    bucket: str
    """`gs://bucket/folder` for copies of inputs and for results; a lifecycle rule of the bucket removes old results."""
    location: str = "us-central1"
    """Where audio is processed; models differ between locations."""
    base_url: str | None = None
    """By default, the service of the location."""
    access_token_env: str | None = None
    """Environment variable with an access token; a token lives for an hour."""
    access_token_file: Path | None = None
    """File with an access token, which another program renews."""
    service_account_file: Path | None = None
    """Service account file; if this and the two settings above are unset, the file that GOOGLE_APPLICATION_CREDENTIALS
    names."""
    language: str = "en-US"
    """Default for tasks that set none."""
    model: str = "long"
    """Default for tasks that set none."""
    processing_strategy: str = "DYNAMIC_BATCHING"
    """The default is cheaper and finishes within a day; PROCESSING_STRATEGY_UNSPECIFIED starts immediately."""

    def __post_init__(self) -> None:
        if not self.bucket.startswith("gs://") or not self.bucket.removeprefix("gs://").strip("/"):
            raise ConfigurationError(f"google.bucket is {self.bucket!r}; write it like gs://bucket/folder")
        if not self.project:
            raise ConfigurationError("google.project is not set; write the id of a project")
        check_url(self.endpoint)
        _ = self.credentials

    @property
    def endpoint(self) -> str:
        host = "speech" if self.location == "global" else f"{self.location}-speech"
        return self.base_url or f"https://{host}.googleapis.com"

    @property
    def credentials(self) -> GoogleCredentials:
        return GoogleCredentials(
            access_token_env=self.access_token_env,
            access_token_file=self.access_token_file,
            service_account_file=self.service_account_file,
        )


class Google(ObjectAdapter):
    """Cancelling is attempted, and may turn out to be unsupported."""

    name = "google"
    title = "Google Speech-to-Text"
    Settings = GoogleSettings
    settings: GoogleSettings
    errors = _ERRORS
    abilities = Abilities(
        task_types=frozenset({"transcription"}),
        can_cancel=True,
        can_find=True,
        can_survey=True,
        keeps_partial_results=False,
        inputs_max=15,
        timeout_hours=30.0,
        settle_seconds=60.0,
        duplicates="The job writes to a folder that has our key in its name, and is looked up by it.",
    )

    def __init__(self, settings: GoogleSettings, tools: AdapterTools) -> None:
        super().__init__(settings, tools)
        self._tokens = GoogleTokens(settings.credentials, tools)
        self.service = Service(tools.http, settings.endpoint, self._tokens.headers)
        self._parent = f"/v2/projects/{settings.project}/locations/{settings.location}"
        self._folder = settings.bucket.rstrip("/")

    def missing_credentials(self) -> str | None:
        return self._tokens.missing

    def validate(self, request: Request) -> Sequence[Problem]:
        problems = check_inputs(request, self.abilities)
        return problems + check_options(request, speakers=range(1, 7), languages_max=3)

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        """Copy inputs that are not in Cloud Storage into our bucket. Unreadable inputs are listed in `refused`."""
        if "copies" not in staged:
            staged = {"copies": {}, "refused": {}}
            yield staged
        for index, input in enumerate(request.inputs):
            if input.uri.startswith("gs:") or input.id in staged["copies"] or input.id in staged["refused"]:
                continue
            target = f"{self._folder}/in/{request.key}/{staged_name(index, input)}"
            try:
                await self._copy(input, target)
                staged = {**staged, "copies": {**staged["copies"], input.id: target}}
            except OperationError as error:
                staged = {**staged, "refused": {**staged["refused"], input.id: refused(error)}}
            yield staged

    async def submit(self, request: Request, staged: Staged) -> Job:
        job = self._job(request, staged, "")
        uris = dict.fromkeys(job.extra["sources"].values())
        if not uris:
            message = next(iter(staged["refused"].values()))["message"]
            raise SchemaInvalid(f"none of the inputs can be read: {message}", code="no_inputs")
        body = self._body(request, list(uris), job.extra["output"])
        made = await self.pay(f"{self._parent}/recognizers/_:batchRecognize", json=body)
        name = made.get("name") if isinstance(made, dict) else None
        if not isinstance(name, str):
            raise InDoubt("Google answered without the name of the operation", code="not_a_job")
        return self._job(request, staged, name)

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        output = self._output(request)
        found = await self._operations_of(output)
        if found:
            return [self._job(request, staged, str(one["name"])) for one in found]
        # The operation is unknown, but something has written to its folder, so it exists or existed.
        return [self._job(request, staged, output)] if await self._objects(output) else []

    async def poll(self, job: Job) -> Status:
        operation = await self._operation(job)
        if operation is None:
            return _unknown(job, await self._look_into_folder(job))
        if error := operation.get("error"):
            return _stopped(error, await self._look_into_folder(job))
        return _status(job, operation)

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        """Leaves out operations that were stopped: their finished results are in their folders."""
        named = [job for job in jobs if job.external_id != job.extra["output"]]
        return await look_up(
            named,
            self._operations(),
            lambda one: one["name"],
            lambda job, one: None if one.get("error") else _status(job, one),
        )

    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        return each_once(request, status, self._results(job, status))

    async def _results(self, job: Job, status: Status) -> AsyncIterator[Result]:
        for id, error in (job.extra.get("refused") or {}).items():
            yield failed(id, error)
        files: Mapping[str, Any] = status.found.get("files") or job.extra.get("files") or {}
        inputs: dict[str, list[str]] = {}
        for id, uri in job.extra["sources"].items():
            inputs.setdefault(uri, []).append(id)
        for uri, file in files.items():
            result = failed("", file["error"]) if file.get("error") else await self._read(job, file)
            if result is not None:
                for id in inputs.get(uri, [uri]):
                    yield dataclasses.replace(result, key=id)

    async def cancel(self, job: Job) -> Cancelled:
        """Google also accepts a cancel request for an operation that has ended, so check that first."""
        operation = await self._operation(job)
        if operation is None or operation.get("done"):
            return Cancelled.ENDED_ALREADY
        response = await self.service.ask("POST", f"/v2/{operation['name']}:cancel", json={})
        if response.is_ok:
            return Cancelled.REQUESTED
        if response.status == 501 or b"UNIMPLEMENTED" in response.body:
            return Cancelled.UNSUPPORTED
        raise error_of(_ERRORS, response, now=time.time())

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:
        """Delete the copies of inputs; results stay in the user's bucket."""
        for copy in (staged.get("copies") or {}).values():
            root, key = split_uri(copy)
            await self.tools.bucket(root).delete(key)

    async def check(self) -> str:
        await self.ask("GET", f"{self._parent}/operations", query={"pageSize": 1})
        return f"the project {self.settings.project} at {self.service.base_url} lists operations"

    async def _copy(self, input: Input, target: str) -> None:
        root, key = split_uri(target)
        await self.tools.bucket(root).write(key, lambda: self.tools.read(input))

    def _output(self, request: Request) -> str:
        return f"{self._folder}/out/{request.key}/"

    def _job(self, request: Request, staged: Staged, name: str) -> Job:
        copies, left_out = staged.get("copies") or {}, staged.get("refused") or {}
        sources = {one.id: copies.get(one.id, one.uri) for one in request.inputs if one.id not in left_out}
        return Job(external_id=name, extra={"output": self._output(request), "sources": sources, "refused": left_out})

    def _body(self, request: Request, uris: Sequence[str], output: str) -> dict[str, Any]:
        options = SpeechOptions.of(request, self.settings.language)
        features: dict[str, Any] = {"enableWordTimeOffsets": options.has_word_timestamps}
        if options.has_diarization:
            most = options.speakers_max
            features["diarizationConfig"] = {} if most is None else {"minSpeakerCount": 1, "maxSpeakerCount": most}
        body = {
            "config": {
                "autoDecodingConfig": {},
                "model": request.model or self.settings.model,
                "languageCodes": options.languages,
                "features": features,
            },
            "processingStrategy": self.settings.processing_strategy,
        }
        ours = {
            "files": [{"uri": uri} for uri in uris],
            "recognitionOutputConfig": {"gcsOutputConfig": {"uri": output}},
        }
        return merged(merged(body, options.provider_options), ours)

    async def _operation(self, job: Job) -> dict[str, Any] | None:
        """The operation of a job; None if Google does not know it. For some jobs only the folder is known."""
        if job.external_id == job.extra["output"]:
            return next(iter(await self._operations_of(job.extra["output"])), None)
        response = await self.service.ask("GET", f"/v2/{job.external_id}")
        return None if response.status == 404 else self.checked(response)

    async def _operations_of(self, output: str) -> list[dict[str, Any]]:
        """Operations that write to a folder, oldest first."""
        found = [one async for one in self._operations() if _output_of(one) == output]
        return sorted(found, key=lambda one: str((one.get("metadata") or {}).get("createTime")))

    async def _operations(self) -> AsyncGenerator[dict[str, Any], None]:
        query: dict[str, str | int] = {"pageSize": _PAGE}
        for _ in range(_PAGES_MAX):
            page = await self.ask("GET", f"{self._parent}/operations", query=query)
            for operation in page.get("operations") or []:
                yield operation
            if not page.get("nextPageToken"):
                return
            query = {"pageSize": _PAGE, "pageToken": str(page["nextPageToken"])}
        raise Transient("google: the list of operations has no end", code="list_too_long")

    async def _objects(self, folder: str) -> list[str]:
        root, prefix = split_uri(folder)
        return [f"{root}/{found.key}" async for found in self.tools.bucket(root).list(prefix)]

    async def _look_into_folder(self, job: Job) -> Status:
        """What a job has written so far. The names of results contain the names of their inputs."""
        uris = list(dict.fromkeys(job.extra["sources"].values()))
        stems = [PurePosixPath(uri).stem for uri in uris]
        outputs = await self._objects(job.extra["output"])
        files: dict[str, Any] = {}
        for uri, stem in zip(uris, stems, strict=True):
            found = [one for one in outputs if PurePosixPath(one).name.startswith(f"{stem}_transcript")]
            if len(found) == 1 and stems.count(stem) == 1:
                files[uri] = {"output": found[0]}
        counts = Counts(total=len(uris), succeeded=len(files))
        return Status(phase=Phase.RUNNING, raw_status="NOT_FOUND", counts=counts, found={"files": files})

    async def _read(self, job: Job, file: Mapping[str, Any]) -> Result | None:
        """The transcript of a file. It must be in the folder that we gave the job: no other folder is read."""
        uri = str(file.get("output"))
        if not uri.startswith(job.extra["output"]):
            log.warning("google: %s names a result outside of its folder: %s", job.external_id, uri)
            return None
        document = read_object(await fetch_object(self.tools, uri))
        if document is None:
            log.warning("google: %s is not there, or not a JSON object", uri)
            return None
        billed = (document.get("metadata") or {}).get("totalBilledDuration")
        seconds = file.get("seconds") if file.get("seconds") is not None else seconds_of(billed)
        return transcribed("", _text(document), document, seconds)


def _output_of(operation: Mapping[str, Any]) -> Any:
    """The folder of an operation, which its metadata repeats from our request."""
    asked = (operation.get("metadata") or {}).get("batchRecognizeRequest") or {}
    config = (asked.get("recognitionOutputConfig") or {}).get("gcsOutputConfig") or {}
    return config.get("uri")


def _unknown(job: Job, folder: Status) -> Status:
    """An operation that Google does not know has ended if all its results exist. Otherwise it may still run."""
    if folder.counts.succeeded == folder.counts.total:
        return dataclasses.replace(folder, phase=Phase.ENDED, ending=Ending.SUCCEEDED)
    is_named = job.external_id != job.extra["output"]
    return dataclasses.replace(folder, is_error=is_named, error=lost(job.external_id).error)


def _stopped(error: Mapping[str, Any], folder: Status) -> Status:
    """An operation that failed or was cancelled, with the results that it had written by then."""
    ending = _ENDINGS.get(error.get("code", 0), Ending.FAILED)
    return dataclasses.replace(
        folder,
        phase=Phase.ENDED,
        raw_status=ending.value.upper(),
        ending=ending_of(folder.counts, ending),
        error=describe(_ERRORS, error),
    )


def _status(job: Job, operation: Mapping[str, Any]) -> Status:
    """The status of an operation without an error."""
    if operation.get("done"):
        return _ended(operation, job)
    percent = (operation.get("metadata") or {}).get("progressPercent") or 0
    return Status(phase=Phase.RUNNING if percent else Phase.QUEUED, raw_status="RUNNING" if percent else "PENDING")


def _ended(operation: Mapping[str, Any], job: Job) -> Status:
    results = (operation.get("response") or {}).get("results") or {}
    files = {uri: _file(result) for uri, result in results.items()}
    total = len(set(job.extra["sources"].values()))
    good = sum(1 for file in files.values() if not file.get("error"))
    counts = Counts(total=total, succeeded=good, failed=total - good)
    return Status(
        phase=Phase.ENDED,
        raw_status="SUCCEEDED",
        ending=ending_of(counts, Ending.SUCCEEDED),
        counts=counts,
        found={"files": files},
    )


def _file(result: Mapping[str, Any]) -> dict[str, Any]:
    """Where the transcript of one file is, or why there is none."""
    error = result.get("error")
    if error and error.get("code"):
        return {"error": describe(_ERRORS, error)}
    seconds = seconds_of((result.get("metadata") or {}).get("totalBilledDuration"))
    return {"output": (result.get("cloudStorageResult") or {}).get("uri") or result.get("uri"), "seconds": seconds}


def _text(document: Mapping[str, Any]) -> str:
    """The best alternative of every segment; segments without one are silence."""
    best = [(part.get("alternatives") or [{}])[0] for part in document.get("results") or []]
    return " ".join(text.strip() for one in best if (text := str(one.get("transcript") or "")))
