"""AWS Transcribe, by aiobotocore with one attempt per call. One job is one file, and its name is our key.

AWS refuses a second job of the same name, so the job of that name is ours if it has our file.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from batchwright.errors import ConfigurationError, Fatal, OperationError, RateLimited, Transient
from batchwright.inference.answers import retry_after_seconds
from batchwright.providers.buckets import split_uri
from batchwright.providers.contract import (
    Abilities,
    Adapter,
    Counts,
    Ending,
    InDoubt,
    Job,
    Phase,
    Problem,
    Request,
    Result,
    Staged,
    Status,
)
from batchwright.providers.errors import ErrorTable, Kind, Said, describe, exception
from batchwright.providers.polls import look_up
from batchwright.providers.settings import check_url
from batchwright.providers.speech import (
    AUTO,
    SpeechOptions,
    check_inputs,
    check_options,
    each_once,
    fetch_object,
    lost,
    merged,
    read_object,
    staged_name,
    transcribed,
)
from batchwright.providers.tools import AdapterTools

log = logging.getLogger(__name__)

_FORMATS = frozenset({"mp3", "mp4", "wav", "flac", "ogg", "amr", "webm", "m4a"})
_SPEAKERS = 10
"""Maximum number of speakers if the task does not set one."""
_CONFLICT = "ConflictException"
_NOT_FOUND = "NotFoundException"
_OUR_NAMES = "bw-"
_PAGE = 100
_PAGES_MAX = 100
_STATUSES = {
    None: (Phase.QUEUED, None),
    "QUEUED": (Phase.QUEUED, None),
    "IN_PROGRESS": (Phase.RUNNING, None),
    "COMPLETED": (Phase.ENDED, Ending.SUCCEEDED),
    "FAILED": (Phase.ENDED, Ending.FAILED),
}
_ERRORS = ErrorTable(
    by_text={
        # AWS raises LimitExceededException both for too many requests and for a file that is too long.
        "too long": Kind.SCHEMA_INVALID,
        "exceeds the maximum": Kind.SCHEMA_INVALID,
        # Failure reasons of jobs.
        "unsupported media format": Kind.SCHEMA_INVALID,
        "does not match the detected": Kind.SCHEMA_INVALID,
        "invalid sample rate": Kind.SCHEMA_INVALID,
        "invalid file size": Kind.SCHEMA_INVALID,
        "invalid number of channels": Kind.SCHEMA_INVALID,
    },
    by_code={
        "LimitExceededConcurrentJobException": Kind.RATE_LIMITED,
        "LimitExceededException": Kind.RATE_LIMITED,
        "RequestLimitExceeded": Kind.RATE_LIMITED,
        "Throttling": Kind.RATE_LIMITED,
        "ThrottlingException": Kind.RATE_LIMITED,
        "TooManyRequestsException": Kind.RATE_LIMITED,
        "InternalFailureException": Kind.TRANSIENT,
        "ServiceUnavailable": Kind.TRANSIENT,
        "BadRequestException": Kind.SCHEMA_INVALID,
        "ValidationException": Kind.SCHEMA_INVALID,
        "AccessDenied": Kind.CREDENTIAL,
        "AccessDeniedException": Kind.CREDENTIAL,
        "ExpiredToken": Kind.CREDENTIAL,
        "ExpiredTokenException": Kind.CREDENTIAL,
        "InvalidClientTokenId": Kind.CREDENTIAL,
        "InvalidSignatureException": Kind.CREDENTIAL,
        "UnrecognizedClientException": Kind.CREDENTIAL,
        "NoSuchBucket": Kind.FATAL,
    },
)
_FAILED = ErrorTable(by_text=_ERRORS.by_text, by_status={500: Kind.TRANSIENT})
"""A job that failed for a reason other than its file may succeed when it is resent."""


_NO_LIBRARY = "the provider aws needs aiobotocore: pip install 'batchwright[aws]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSettings:
    """An AWS account, with its own bucket in the same region."""

    region: str
    """The region, such as `eu-central-1`."""
    bucket: str
    """`s3://bucket/folder` for copies of inputs and for results; a lifecycle rule of the bucket removes old results."""
    base_url: str | None = None
    """Overrides the endpoint of Transcribe, for tests and private endpoints."""
    access_key_id_env: str | None = None
    """Environment variable with the access key's id; set it together with secret_access_key_env. Without both, botocore
    looks in its usual places: environment, profile, role of the machine."""
    secret_access_key_env: str | None = None
    """Environment variable with the secret access key."""
    profile: str | None = None
    """Profile in the configuration files of the AWS tools."""
    language: str = AUTO
    """Default for tasks that set none."""
    data_access_role_arn: str | None = None
    """Role that lets AWS queue jobs above the limit of concurrent jobs."""

    def __post_init__(self) -> None:
        if not self.bucket.startswith("s3://") or not self.bucket.removeprefix("s3://").strip("/"):
            raise ConfigurationError(f"aws.bucket is {self.bucket!r}; write it like s3://bucket/folder")
        if (self.access_key_id_env is None) != (self.secret_access_key_env is None):
            raise ConfigurationError("set both aws.access_key_id_env and aws.secret_access_key_env, or neither")
        if not self.region:
            raise ConfigurationError("aws.region is not set; write a region such as eu-central-1")
        if self.base_url is not None:
            check_url(self.base_url)


class Aws(Adapter):
    """Jobs cannot be cancelled."""

    name = "aws"
    title = "AWS Transcribe"
    Settings = AwsSettings
    settings: AwsSettings
    abilities = Abilities(
        task_types=frozenset({"transcription"}),
        can_cancel=False,
        can_find=True,
        can_survey=True,
        deduplicates=True,
        inputs_max=1,
        input_bytes_max=2_000_000_000,
        timeout_hours=24.0,
        settle_seconds=0.0,
        results_kept_hours=None,
        duplicates="The job's name is our key, and AWS refuses a second job with the same name.",
    )

    def __init__(self, settings: AwsSettings, tools: AdapterTools) -> None:
        super().__init__(settings, tools)
        self._folder = settings.bucket.rstrip("/")
        self._session: Any = None
        names = {"access_key_id": settings.access_key_id_env, "secret_access_key": settings.secret_access_key_env}
        self._keys = {
            f"aws_{name}": tools.secret(f"the {name} of AWS", variable=variable)
            for name, variable in names.items()
            if variable is not None
        }

    def missing_credentials(self) -> str | None:
        """Looks only where the settings point to; botocore handles all other places."""
        if importlib.util.find_spec("aiobotocore") is None:
            return _NO_LIBRARY
        return next((missing for one in self._keys.values() if (missing := one.missing) is not None), None)

    def validate(self, request: Request) -> Sequence[Problem]:
        problems = check_inputs(request, self.abilities)
        problems += check_options(request, speakers=range(2, 31), languages_max=5)
        for input in request.inputs:
            suffix = PurePosixPath(input.filename).suffix.lower().removeprefix(".")
            if suffix and suffix not in _FORMATS:
                message = f"{input.filename!r} has a format that AWS does not accept: use {', '.join(sorted(_FORMATS))}"
                problems.append(Problem(message=message, input_id=input.id))
        return problems

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        """Copy an input that is not in S3 into our bucket."""
        if "media" in staged:
            return
        input = request.inputs[0]
        if input.uri.startswith("s3:"):
            yield {"media": input.uri, "is_copy": False}
            return
        target = f"{self._folder}/in/{request.key}/{staged_name(0, input)}"
        root, key = split_uri(target)
        await self.tools.bucket(root).write(key, lambda: self.tools.read(input))
        yield {"media": target, "is_copy": True}

    async def submit(self, request: Request, staged: Staged) -> Job:
        async with self._client() as client:
            try:
                await _once(client.start_transcription_job(**self._parameters(request, staged)))
            except _Conflict:
                return await self._adopt_existing(client, request, staged)
        return self._job(request)

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        async with self._client() as client:
            job = await self._adopt(client, request, staged)
        return [] if job is None else [job]

    async def poll(self, job: Job) -> Status:
        async with self._client() as client:
            found = await _get(client, job.external_id)
        return lost(job.external_id) if found is None else _status(job, found)

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        return await look_up(jobs, self._list(), lambda one: one["TranscriptionJobName"], _status)

    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        return each_once(request, status, self._results(request, job))

    async def _results(self, request: Request, job: Job) -> AsyncIterator[Result]:
        document = read_object(await fetch_object(self.tools, job.extra["output"]))
        if document is None:
            log.warning("aws: the result of job %s is not a JSON object, or not there", job.external_id)
            return
        transcripts = (document.get("results") or {}).get("transcripts") or []
        text = "\n".join(str(one.get("transcript") or "") for one in transcripts)
        yield transcribed(request.inputs[0].id, text, document)

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:
        """Delete the copy of the input; the result stays in the user's bucket."""
        if staged.get("is_copy"):
            root, key = split_uri(staged["media"])
            await self.tools.bucket(root).delete(key)

    async def check(self) -> str:
        async with self._client() as client:
            try:
                await _call(client.list_transcription_jobs(MaxResults=1))
            except _Refused as refused:
                raise refused.error() from None
        return f"AWS Transcribe in {self.settings.region} lists jobs"

    async def _list(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """All our jobs, newest first."""
        more: dict[str, str] = {}
        async with self._client() as client:
            for _ in range(_PAGES_MAX):
                try:
                    page = await _call(
                        client.list_transcription_jobs(MaxResults=_PAGE, JobNameContains=_OUR_NAMES, **more)
                    )
                except _Refused as refused:
                    raise refused.error() from None
                if not isinstance(page.get("TranscriptionJobSummaries"), list):
                    raise Transient("the answer of AWS has no list of jobs", code="not_json")
                for summary in page["TranscriptionJobSummaries"]:
                    yield summary
                if not page.get("NextToken"):
                    return
                more = {"NextToken": page["NextToken"]}

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        """A client that sends every request exactly once."""
        config = _library("aiobotocore.config").AioConfig(
            connect_timeout=10, read_timeout=60, proxies={}, retries={"total_max_attempts": 1, "mode": "standard"}
        )
        if self._session is None:
            self._session = _library("aiobotocore.session").AioSession(profile=self.settings.profile)
        keys = {name: secret.text() for name, secret in self._keys.items()}
        region, url = self.settings.region, self.settings.base_url
        making = self._session.create_client("transcribe", region_name=region, endpoint_url=url, config=config, **keys)
        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(making)
            except _library("botocore.exceptions").BotoCoreError as error:
                raise _without_answer(error) from None
            yield client

    def _parameters(self, request: Request, staged: Staged) -> dict[str, Any]:
        options = SpeechOptions.of(request, self.settings.language)
        root, key = split_uri(self._output_uri(request.key))
        parameters: dict[str, Any] = _languages(options.languages)
        if options.has_diarization:
            most = options.speakers_max or _SPEAKERS
            parameters["Settings"] = {"ShowSpeakerLabels": True, "MaxSpeakerLabels": most}
        if self.settings.data_access_role_arn is not None:
            role = self.settings.data_access_role_arn
            parameters["JobExecutionSettings"] = {"AllowDeferredExecution": True, "DataAccessRoleArn": role}
        ours = {
            "TranscriptionJobName": request.key,
            "Media": {"MediaFileUri": staged["media"]},
            "OutputBucketName": root.removeprefix("s3://"),
            "OutputKey": key,
        }
        return merged(merged(parameters, options.provider_options), ours)

    def _output_uri(self, name: str) -> str:
        return f"{self._folder}/out/{name}.json"

    def _job(self, request: Request) -> Job:
        return Job(external_id=request.key, extra={"output": self._output_uri(request.key)})

    async def _adopt_existing(self, client: Any, request: Request, staged: Staged) -> Job:
        """The job with our name; AWS has said that it exists."""
        try:
            job = await self._adopt(client, request, staged)
        except (RateLimited, Transient) as error:
            raise InDoubt(str(error), code=error.code) from None
        if job is None:
            raise InDoubt(f"AWS says that the job {request.key} exists, but does not return it", code=_CONFLICT)
        return job

    async def _adopt(self, client: Any, request: Request, staged: Staged) -> Job | None:
        """The job with our name, if there is one; raises an error if it belongs to somebody else."""
        found = await _get(client, request.key)
        if found is None:
            return None
        media = (found.get("Media") or {}).get("MediaFileUri")
        if media != staged.get("media"):
            raise Fatal(f"AWS has a job {request.key} for another file, {media}", code="name_taken")
        return self._job(request)


class _Conflict(Exception):
    """A job with this name exists already."""


class _Refused(Exception):
    """AWS answered with an error."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        document, metadata = answer.get("Error") or {}, answer.get("ResponseMetadata") or {}
        self.said = Said((str(document.get("Code") or ""),), str(document.get("Message") or ""))
        self.status = int(metadata.get("HTTPStatusCode") or 0)
        self._headers = metadata.get("HTTPHeaders") or {}

    def error(self) -> OperationError:
        kind = _ERRORS.kind(self.status, self.said)
        wait = retry_after_seconds(self._headers.get("retry-after"), now=time.time())
        message = self.said.message or f"AWS answered {self.status}"
        return exception(kind, message, code=self.said.code, retry_after=wait)


async def _call(asking: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The answer to one call. Raises `_Refused` for an error of AWS, and one of our errors if there is no answer."""
    errors = _library("botocore.exceptions")
    try:
        return await asking
    except errors.ClientError as error:
        raise _Refused(error.response) from None
    except errors.BotoCoreError as error:
        raise _without_answer(error) from None


async def _once(asking: Awaitable[dict[str, Any]]) -> None:
    """The one request that costs money. Raises InDoubt if AWS may have accepted the job."""
    try:
        answer = await _call(asking)
    except _Refused as refused:
        if refused.said.code == _CONFLICT:
            raise _Conflict from None
        if refused.status >= 500:
            raise InDoubt(f"AWS answered {refused.status}", code=refused.said.code) from None
        raise refused.error() from None
    # botocore parses an HTML page as an answer without fields.
    if not answer.get("TranscriptionJob"):
        raise InDoubt("AWS answered without the job", code="not_a_job")


async def _get(client: Any, name: str) -> dict[str, Any] | None:
    """The job with this name; None if there is none."""
    try:
        answer = await _call(client.get_transcription_job(TranscriptionJobName=name))
    except _Refused as refused:
        if refused.said.code == _NOT_FOUND or "couldn't be found" in refused.said.message:
            return None
        raise refused.error() from None
    job = answer.get("TranscriptionJob")
    if not isinstance(job, dict):
        raise Transient("the answer of AWS has no job", code="not_json")
    return job


def _without_answer(error: Exception) -> OperationError:
    """For an error of botocore without an answer: no credentials, an invalid parameter, no connection.

    After a free call, InDoubt is just another transient error.
    """
    errors = _library("botocore.exceptions")
    if isinstance(error, (errors.NoCredentialsError, errors.PartialCredentialsError, errors.ProfileNotFound)):
        return Fatal(str(error), scope="credential", code="credentials_missing")
    if isinstance(error, (errors.ParamValidationError, errors.UnknownParameterError)):
        return exception(Kind.SCHEMA_INVALID, str(error), code="invalid_parameter")
    kind = InDoubt if _may_have_been_sent(error) else Transient
    return kind(f"a call to AWS failed: {type(error).__name__}", code="no_answer")


def _may_have_been_sent(error: Any) -> bool:
    """botocore also raises EndpointConnectionError for a lost connection, so its cause decides."""
    if isinstance(error, _library("botocore.exceptions").ConnectTimeoutError):
        return False
    return not isinstance(error.kwargs.get("error"), _library("aiohttp").ClientConnectorError)


def _languages(languages: Sequence[str]) -> dict[str, Any]:
    if len(languages) > 1:
        return {"IdentifyLanguage": True, "LanguageOptions": list(languages)}
    return {"IdentifyLanguage": True} if languages[0] == AUTO else {"LanguageCode": languages[0]}


def _status(job: Job, found: Mapping[str, Any]) -> Status:
    """The status of a job, or of its summary in the list."""
    word = found.get("TranscriptionJobStatus")
    if word not in _STATUSES:
        log.warning("aws: job %s has the unknown status %s, which counts as running", job.external_id, word)
    phase, ending = _STATUSES.get(word, (Phase.RUNNING, None))
    if ending is None:
        return Status(phase=phase, raw_status=word or "QUEUED")
    good = int(ending is Ending.SUCCEEDED)
    return Status(
        phase=phase,
        raw_status=str(word),
        ending=ending,
        counts=Counts(total=1, succeeded=good, failed=1 - good),
        error=None if good else _why_failed(found),
    )


def _why_failed(job: Mapping[str, Any]) -> dict[str, Any]:
    reason = str(job.get("FailureReason") or "AWS does not say why the job failed")
    return describe(_FAILED, {"message": reason}, 500, code="job_failed")


def _library(name: str) -> Any:
    """aiobotocore is large and needed only here, so it is imported on use."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigurationError(_NO_LIBRARY) from None
