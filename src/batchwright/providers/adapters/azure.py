"""Azure AI Speech: batch transcription over REST. One job takes up to a thousand URLs, which Azure fetches itself."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from batchwright.errors import ConfigurationError, Fatal, Transient
from batchwright.inference.answers import retry_after_seconds
from batchwright.inference.http import Headers, Service
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
from batchwright.providers.errors import ErrorTable, Kind, describe, error_of
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
    fetch_signed,
    lost,
    merged,
    read_object,
    transcribed,
)
from batchwright.providers.tools import AdapterTools

log = logging.getLogger(__name__)

MARKER = "bw_key"
_TRANSCRIPT, _REPORT = "Transcription", "TranscriptionReport"
_PAGE = 100
_PAGES_MAX = 200
_SIGNED_SECONDS = 72 * 3600.0
"""Azure may fetch an input at any time until the job's time limit."""
_STATUSES = {
    "NotStarted": (Phase.QUEUED, None),
    "Running": (Phase.RUNNING, None),
    "Succeeded": (Phase.ENDED, Ending.SUCCEEDED),
    "Failed": (Phase.ENDED, Ending.FAILED),
}
_ERRORS = ErrorTable(
    by_text={
        "timeout when downloading recordings uri": Kind.TRANSIENT,
        "authentication failed for recordings uri": Kind.FATAL,
    },
    by_code={
        "TooManyRequests": Kind.RATE_LIMITED,
        "InternalCommunicationFailed": Kind.TRANSIENT,
        "InternalServerError": Kind.TRANSIENT,
        "PipelineError": Kind.TRANSIENT,
        "ServiceUnavailable": Kind.TRANSIENT,
        "InvalidArgument": Kind.SCHEMA_INVALID,
        "InvalidPayload": Kind.SCHEMA_INVALID,
        "InvalidTimeToLive": Kind.SCHEMA_INVALID,
        "LimitExceeded": Kind.SCHEMA_INVALID,
        "UnprocessableEntity": Kind.SCHEMA_INVALID,
        "UnsupportedMediaType": Kind.SCHEMA_INVALID,
        "Forbidden": Kind.CREDENTIAL,
        "InvalidSubscription": Kind.CREDENTIAL,
        "QuotaViolation": Kind.CREDENTIAL,
        "Unauthorized": Kind.CREDENTIAL,
        "InaccessibleCustomerStorage": Kind.FATAL,
    },
)
_QUERY = re.compile(r"(?<=\S)\?\S+=\S*")
_LINK_EXPIRED = frozenset({401, 403, 404, 410})


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings:
    """A Speech resource; batch transcription needs the S0 tier."""

    region: str | None = None
    """The region, such as `westeurope`; or set base_url instead."""
    base_url: str | None = None
    """URL of the Speech resource, such as `https://westeurope.api.cognitive.microsoft.com/speechtotext`."""
    api_key_env: str | None = "AZURE_SPEECH_KEY"
    """Environment variable with the key."""
    api_key_file: Path | None = None
    """File with the key."""
    api_version: str = "2024-11-15"
    """Sent with every request."""
    language: str = "en-US"
    """Default for tasks that set none."""
    time_to_live_hours: int = 48
    """How long Azure keeps a finished job and its results, 6 to 744."""

    def __post_init__(self) -> None:
        if (self.region is None) == (self.base_url is None):
            raise ConfigurationError("azure needs either region, such as westeurope, or base_url")
        check_url(self.endpoint)
        if not 6 <= self.time_to_live_hours <= 744:
            raise ConfigurationError(f"azure.time_to_live_hours is {self.time_to_live_hours}; it must be 6 to 744")

    @property
    def endpoint(self) -> str:
        return self.base_url or f"https://{self.region}.api.cognitive.microsoft.com/speechtotext"


class Azure(ObjectAdapter):
    """Jobs cannot be cancelled, and the address of the audio matches results to inputs."""

    name = "azure"
    title = "Azure AI Speech"
    Settings = AzureSettings
    settings: AzureSettings
    errors = _ERRORS
    abilities = Abilities(
        task_types=frozenset({"transcription"}),
        can_cancel=False,
        can_find=True,
        can_survey=True,
        inputs_max=1000,
        input_bytes_max=1_000_000_000,
        timeout_hours=48.0,
        settle_seconds=60.0,
        results_kept_hours=48.0,
        duplicates="The job's displayName is our key, and the job is looked up by it before anything is resent.",
    )

    def __init__(self, settings: AzureSettings, tools: AdapterTools) -> None:
        super().__init__(settings, tools)
        self.abilities = dataclasses.replace(self.abilities, results_kept_hours=settings.time_to_live_hours)
        self._secret = tools.secret("the key of Azure", file=settings.api_key_file, variable=settings.api_key_env)
        self.service = Service(tools.http, settings.endpoint, self._headers, {"api-version": settings.api_version})

    def missing_credentials(self) -> str | None:
        return self._secret.missing

    def validate(self, request: Request) -> Sequence[Problem]:
        problems = check_inputs(request, self.abilities)
        problems += check_options(request, speakers=range(2, 36), languages_max=10, can_detect=False)
        problems += [
            Problem(
                message=f"{input.filename!r} is stored where Azure cannot fetch it; pass an https URL, "
                "or store files in a bucket (storage.url)",
                input_id=input.id,
            )
            for input in request.inputs
            if input.uri.startswith("file:") and self.tools.place(input) is None
        ]
        return problems

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        """Copies nothing: Azure fetches the inputs by URLs, which are signed when the job is submitted."""
        return
        yield staged

    async def submit(self, request: Request, staged: Staged) -> Job:
        urls = {input.id: await self._url(input) for input in request.inputs}
        return _job(await self.pay("/transcriptions:submit", json=self._body(request, list(urls.values()))), urls)

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        filter = {"filter": f"displayName eq '{request.key}'"}
        found = [one async for one in self._list("/transcriptions", filter) if _marker(one) == request.key]
        if not found:
            return []
        # A newly signed URL differs from the one that was sent only in its query.
        urls = {input.id: await self._url(input) for input in request.inputs}
        return [_job(one, urls) for one in sorted(found, key=lambda one: str(one.get("createdDateTime")))]

    async def poll(self, job: Job) -> Status:
        response = await self.service.ask("GET", f"/transcriptions/{_id(job)}")
        if response.status == 404:
            return lost(job.external_id)
        body = self.checked(response)
        word, phase, ending = _read_state(job, body)
        if ending is None:
            wait = retry_after_seconds(response.headers.get("retry-after"), now=time.time())
            return Status(phase=phase, raw_status=word, next_poll_seconds=wait)
        counts = await self._count(job)
        has_failed = ending is Ending.FAILED
        error = _explain((body.get("properties") or {}).get("error")) if has_failed else None
        return Status(phase=phase, raw_status=word, ending=ending_of(counts, ending), counts=counts, error=error)

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        """Leaves out jobs that have ended: only their reports say how they ended."""

        def read(job: Job, said: Mapping[str, Any]) -> Status | None:
            word, phase, ending = _read_state(job, said)
            return Status(phase=phase, raw_status=word) if ending is None else None

        return await look_up(jobs, self._list("/transcriptions"), lambda one: without_query(str(one["self"])), read)

    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        return each_once(request, status, self._results(request, job))

    async def _results(self, request: Request, job: Job) -> AsyncIterator[Result]:
        inputs = _Inputs(request, job)
        async for file in self._list(f"/transcriptions/{_id(job)}/files"):
            if file.get("kind") not in (_TRANSCRIPT, _REPORT):
                continue
            document = read_object(await self._fetch(job, file))
            if document is None:
                log.warning("azure: %s of job %s is not a JSON object", file.get("name"), _id(job))
                continue
            found = _failures(document) if file["kind"] == _REPORT else [_transcript(document)]
            for source, result in found:
                for id in inputs.of(source):
                    yield dataclasses.replace(result, key=id)

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:
        """Delete the job with its results, which Azure would keep for some days."""
        if job is None:
            return
        response = await self.service.ask("DELETE", f"/transcriptions/{_id(job)}")
        is_unfinished = b"DeleteNotAllowed" in response.body
        if not response.is_ok and response.status != 404 and not is_unfinished:
            raise error_of(_ERRORS, response, now=time.time())

    async def check(self) -> str:
        await self.ask("GET", "/transcriptions", query={"top": 1})
        return f"the Speech resource at {self.service.base_url} lists transcriptions"

    async def _headers(self) -> Headers:
        return {"ocp-apim-subscription-key": self._secret.text()}

    async def _url(self, input: Input) -> str:
        """Where Azure fetches an input: a URL as it was given, or a signed one of an object in a bucket."""
        place = self.tools.place(input)
        if place is not None:
            return await self.tools.sign(place, _SIGNED_SECONDS)
        if not input.uri.startswith("https:"):
            raise Fatal(f"{input.filename!r} is stored where Azure cannot fetch it", scope="item", code="cannot_sign")
        return input.uri

    def _body(self, request: Request, urls: Sequence[str]) -> dict[str, Any]:
        options = SpeechOptions.of(request, self.settings.language)
        properties: dict[str, Any] = {
            "timeToLiveHours": self.settings.time_to_live_hours,
            "wordLevelTimestampsEnabled": options.has_word_timestamps,
        }
        if options.has_diarization:
            properties["diarization"] = {"enabled": True, **_some(maxSpeakers=options.speakers_max)}
        if len(options.languages) > 1:
            properties["languageIdentification"] = {"candidateLocales": options.languages, "mode": "Continuous"}
        body: dict[str, Any] = {"locale": options.languages[0], "properties": properties}
        if request.model is not None:
            body["model"] = {
                "self": self.service.url(request.model if "://" in request.model else f"/models/base/{request.model}")
            }
        ours = {
            "displayName": request.key,
            "contentUrls": list(dict.fromkeys(urls)),
            "customProperties": {MARKER: request.key},
        }
        return merged(merged(body, options.provider_options), ours)

    async def _count(self, job: Job) -> Counts:
        """The counts of the job's report, if it has one."""
        async for file in self._list(f"/transcriptions/{_id(job)}/files"):
            if file.get("kind") == _REPORT:
                report = read_object(await self._fetch(job, file)) or {}
                good, bad = report.get("successfulTranscriptionsCount"), report.get("failedTranscriptionsCount")
                if isinstance(good, int) and isinstance(bad, int):
                    return Counts(total=good + bad, succeeded=good, failed=bad)
        return Counts()

    async def _fetch(self, job: Job, file: Mapping[str, Any]) -> bytes:
        """The content of a result file. If its URL has expired, it is looked up once more."""
        response = await fetch_signed(self.service, _content_url(file))
        if response.status in _LINK_EXPIRED:
            async for fresh in self._list(f"/transcriptions/{_id(job)}/files"):
                if fresh.get("name") == file.get("name"):
                    response = await fetch_signed(self.service, _content_url(fresh))
                    break
        if not response.is_ok:
            raise Transient(
                f"a result of Azure could not be fetched: status {response.status}", code="result_unavailable"
            )
        return response.body

    async def _list(self, path: str, query: Mapping[str, str] | None = None) -> AsyncGenerator[dict[str, Any], None]:
        """All values of a list. We compute where the next page begins, and follow no links in answers."""
        skip = 0
        for _ in range(_PAGES_MAX):
            body = await self.ask("GET", path, query={**(query or {}), "skip": skip, "top": _PAGE})
            values = body.get("values") or []
            for value in values:
                yield value
            skip += len(values)
            if not values or not body.get("@nextLink"):
                return
        raise Transient(f"azure: the list {path} has no end", code="list_too_long")


class _Inputs:
    """Finds the inputs that a result belongs to, by the address in the result."""

    def __init__(self, request: Request, job: Job) -> None:
        sources: Mapping[str, str] = job.extra.get("sources") or {}
        self._by_uri: dict[str, list[str]] = {}
        self._by_source: dict[str, list[str]] = {}
        uris: dict[str, set[str]] = {}
        for input in request.inputs:
            source = sources.get(input.id) or without_query(input.uri)
            self._by_uri.setdefault(input.uri, []).append(input.id)
            self._by_source.setdefault(source, []).append(input.id)
            uris.setdefault(source, set()).add(input.uri)
        # URLs that differ only in their queries match only as a whole.
        for source, several in uris.items():
            if len(several) > 1:
                del self._by_source[source]

    def of(self, source: str) -> list[str]:
        found = self._by_uri.get(source) or self._by_source.get(without_query(source))
        if found is None:
            log.warning("azure: there is a result for %s, which was not requested", without_query(source))
        return found or []


def without_query(url: str) -> str:
    """A URL without its signature, to store and compare."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def _job(made: Any, urls: Mapping[str, str]) -> Job:
    address = made.get("self") if isinstance(made, dict) else None
    if not isinstance(address, str):
        raise InDoubt("azure answered without the address of the job", code="not_a_job")
    return Job(
        external_id=without_query(address), extra={"sources": {id: without_query(url) for id, url in urls.items()}}
    )


def _id(job: Job) -> str:
    """Only the last part of the job's address is used, because requests go to the base URL in the settings."""
    return job.external_id.rstrip("/").rpartition("/")[2]


def _read_state(job: Job, said: Mapping[str, Any]) -> tuple[str, Phase, Ending | None]:
    """Azure's status of a job, and what it means."""
    word = str(said.get("status"))
    if word not in _STATUSES:
        log.warning("azure: job %s has the unknown status %s, which counts as running", _id(job), word)
    phase, ending = _STATUSES.get(word, (Phase.RUNNING, None))
    return word, phase, ending


def _marker(transcription: Mapping[str, Any]) -> Any:
    properties = transcription.get("customProperties") or {}
    return properties.get(MARKER) or transcription.get("displayName")


def _content_url(file: Mapping[str, Any]) -> str:
    return str((file.get("links") or {}).get("contentUrl"))


def _transcript(document: dict[str, Any]) -> tuple[str, Result]:
    source = str(document.get("source"))
    phrases = document.get("combinedRecognizedPhrases") or []
    text = "\n".join(str(phrase.get("display") or "") for phrase in phrases)
    milliseconds = document.get("durationMilliseconds")
    seconds = milliseconds / 1000 if isinstance(milliseconds, (int, float)) else None
    return source, transcribed("", text, document | {"source": without_query(source)}, seconds)


def _failures(report: Mapping[str, Any]) -> list[tuple[str, Result]]:
    found = []
    for detail in report.get("details") or []:
        if detail.get("status") == "Failed":
            said = {"code": detail.get("errorKind"), "message": detail.get("errorMessage")}
            found.append((str(detail.get("source")), failed("", _explain(said))))
    return found


def _explain(said: Any) -> dict[str, Any]:
    """An error as it is stored. A URL in its message loses its query, which may be a signature."""
    error = describe(_ERRORS, said)
    return {**error, "message": _QUERY.sub("", error["message"])}


def _some(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
