"""Gemini on Vertex AI, by batch prediction: requests and results are objects in the user's bucket.

Results carry no id and come in any order. Each request has the number of its line as a label, which its result repeats;
if a label is missing, the text of the request identifies its line.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import orjson

from batchwright.errors import ConfigurationError, Fatal
from batchwright.inference.http import Service
from batchwright.providers import completions
from batchwright.providers.buckets import split_uri
from batchwright.providers.completions import Line, Malformed
from batchwright.providers.contract import (
    Abilities,
    Cancelled,
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
from batchwright.providers.dialects import gemini
from batchwright.providers.errors import ErrorTable, describe, reading
from batchwright.providers.google_auth import GoogleCredentials, GoogleTokens
from batchwright.providers.polls import look_up
from batchwright.providers.service import HttpAdapter
from batchwright.providers.settings import check_url
from batchwright.providers.tools import AdapterTools

LABEL = "bw_line"
_PAGE = 100
_PAGES_MAX = 100
_NAME = re.compile(r"[a-z0-9][a-z0-9:.-]*")
_STATUS = re.compile(r"\b([45]\d\d)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class VertexSettings:
    """A project, a region and a bucket; access to the bucket uses the credentials in Google's environment variables."""

    project: str = ""
    """The id of the project."""
    location: str = "us-central1"
    """Where requests are run, or `global`."""
    bucket: str = ""
    """`gs://bucket` or `gs://bucket/folder`: where requests are put and results are written."""
    base_url: str = ""
    """By default, Google's address for the location."""
    access_token_env: str | None = None
    """Environment variable with an access token; a token lives for an hour."""
    access_token_file: Path | None = None
    """File with an access token, which another program renews."""
    service_account_file: Path | None = None
    """Service account file; set at most one of these three. Without one, the file that GOOGLE_APPLICATION_CREDENTIALS
    names."""

    def __post_init__(self) -> None:
        _ = self.credentials
        for name in ("project", "location"):
            if _NAME.fullmatch(getattr(self, name)) is None:
                raise ConfigurationError(f"vertex.{name} is {getattr(self, name)!r}; write the name of the {name}")
        if not self.bucket.startswith("gs://") or not self.bucket.removeprefix("gs://").strip("/"):
            raise ConfigurationError(f"vertex.bucket is {self.bucket!r}; write it like gs://bucket/folder")
        if self.base_url:
            check_url(self.base_url)

    @property
    def credentials(self) -> GoogleCredentials:
        return GoogleCredentials(
            access_token_env=self.access_token_env,
            access_token_file=self.access_token_file,
            service_account_file=self.service_account_file,
        )

    @property
    def url(self) -> str:
        region = "" if self.location == "global" else f"{self.location}-"
        return self.base_url or f"https://{region}aiplatform.googleapis.com"


class VertexAdapter(HttpAdapter):
    """Write the requests into the bucket, create a job, read the results from the bucket."""

    name = "vertex"
    title = "Vertex AI"
    abilities = Abilities(
        task_types=frozenset({"completion"}),
        can_cancel=True,
        can_find=True,
        can_survey=True,
        inputs_max=1,
        requests_max=200_000,
        request_bytes_max=1000**3,
        settle_seconds=60,
        timeout_hours=96,
        batch_discount=0.5,
        duplicates="The display name of a job is our key, by which the list is filtered.",
    )
    Settings = VertexSettings
    errors: ClassVar[ErrorTable] = gemini.ERRORS

    def __init__(self, settings: VertexSettings, tools: AdapterTools) -> None:
        super().__init__(settings, tools)
        self._tokens = GoogleTokens(settings.credentials, tools)
        self.service = Service(tools.http, settings.url, self._tokens.headers)
        self._jobs = f"/v1/projects/{settings.project}/locations/{settings.location}/batchPredictionJobs"

    def missing_credentials(self) -> str | None:
        return self._tokens.missing

    def validate(self, request: Request) -> Sequence[Problem]:
        return gemini.check_request(request, self.abilities)

    async def inspect(self, request: Request) -> Sequence[Problem]:
        return await completions.check_lines(
            self.tools, request, self.abilities, lambda line: gemini.check(request, line, has_uris=True)
        )

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        if "input_uri" in staged:
            return

        def write(line: Line) -> bytes:
            return orjson.dumps({"request": _labelled(gemini.native(request, line, has_uris=True), line.number)})

        uri = f"{self._folder(request)}/input.jsonl"
        root, key = split_uri(uri)
        upload = await completions.measured(self.tools, request, write)
        await self.tools.bucket(root).write(key, upload.open)
        yield {**staged, "input_uri": uri}

    async def submit(self, request: Request, staged: Staged) -> Job:
        body = {
            "displayName": request.key,
            "model": _model(request),
            "inputConfig": {"instancesFormat": "jsonl", "gcsSource": {"uris": [staged["input_uri"]]}},
            "outputConfig": {
                "predictionsFormat": "jsonl",
                "gcsDestination": {"outputUriPrefix": f"{self._folder(request)}/output"},
            },
            "labels": {completions.MARKER: request.key},
        }
        return self._job(request, await self.pay(self._jobs, json=body))

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        with reading():
            named = self._list({"filter": f'display_name="{request.key}"'})
            found = [job async for job in named if job.get("displayName") == request.key]
            return [self._job(request, job) for job in sorted(found, key=gemini.created_at)]

    async def poll(self, job: Job) -> Status:
        response = await self.service.ask("GET", _path(job))
        if response.status == 404:
            return completions.lost(404)
        with reading():
            return _status(self.checked(response))

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        return await look_up(
            jobs, self._list({}), lambda one: one["name"], lambda _, one: completions.if_whole(_status(one))
        )

    async def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        known = await _Known.of(self.tools, request)
        found = self._lines(request, {**job.extra, **status.found}["output_uri"], known)
        async with aclosing(completions.reconcile(found, known.ids, completions.missing_error(status))) as results:
            async for result in results:
                yield result

    async def cancel(self, job: Job) -> Cancelled:
        """Google also accepts a cancel request for a job that has ended, so check that first."""
        if (await self.poll(job)).phase is Phase.ENDED:
            return Cancelled.ENDED_ALREADY
        await self.ask("POST", f"{_path(job)}:cancel")
        return Cancelled.REQUESTED

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:
        """Results stay in the bucket, where the user may look for them."""
        if "input_uri" in staged:
            root, key = split_uri(staged["input_uri"])
            await self.tools.bucket(root).delete(key)

    async def check(self) -> str:
        await self.ask("GET", self._jobs, query={"pageSize": 1})
        return f"Vertex AI at {self.settings.url} accepts the credentials for {self.settings.project}"

    def _folder(self, request: Request) -> str:
        return f"{self.settings.bucket.rstrip('/')}/{request.key}"

    def _job(self, request: Request, said: Any) -> Job:
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            raise InDoubt("the provider answered without the name of the job", code="not_a_job")
        return Job(external_id=said["name"], extra={"output_uri": f"{self._folder(request)}/output"})

    async def _list(self, filter: Mapping[str, str]) -> AsyncGenerator[Mapping[str, Any], None]:
        query: dict[str, str | int] = {**filter, "pageSize": _PAGE}
        for _ in range(_PAGES_MAX):
            page = await self.ask("GET", self._jobs, query=query)
            for job in page.get("batchPredictionJobs") or []:
                yield job
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    async def _lines(self, request: Request, directory: str, known: _Known) -> AsyncIterator[Result]:
        """The results in all files of the job's folder, which must be one of ours."""
        if not directory.startswith(f"{self._folder(request)}/output"):
            raise Fatal("the provider names an output that is not in our folder", code="foreign_output")
        created = int(self.tools.now().timestamp())
        root, folder = split_uri(directory)
        bucket = self.tools.bucket(root)
        files = [found.key async for found in bucket.list(folder) if found.key.endswith(".jsonl")]
        for file in files:
            async for result in completions.read_results(
                bucket.read(file), lambda raw: _read(request, raw, known, created)
            ):
                yield result


def _status(said: Mapping[str, Any]) -> Status:
    counts = _counts(said.get("completionStats") or {})
    raw = str(said.get("state"))
    phase, ending = completions.read_status(gemini.STATUSES, gemini.short(raw), counts)
    output = completions.texts(said.get("outputInfo") or {}, ["gcsOutputDirectory"]).get("gcsOutputDirectory")
    return Status(
        phase=phase,
        ending=ending,
        raw_status=raw,
        counts=counts,
        error=describe(gemini.ERRORS, said["error"]) if ending is Ending.FAILED and said.get("error") else None,
        found={} if output is None else {"output_uri": output},
    )


class _Known:
    """The lines of a request: their ids, and their numbers by request text."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._numbers: dict[bytes, list[int]] = defaultdict(list)

    @classmethod
    async def of(cls, tools: AdapterTools, request: Request) -> _Known:
        known = cls()
        async for line in completions.read_lines(tools, request):
            known.ids.append(line.custom_id)
            known._numbers[_digest(gemini.native(request, line, has_uris=True))].append(line.number)
        return known

    def key(self, asked: Any) -> str:
        """The id of the line that a result repeats. Results of equal requests are interchangeable: one per line."""
        if not isinstance(asked, dict):
            raise Malformed("it does not repeat its request")
        number = completions.count((asked.get("labels") or {}).get(LABEL))
        if number is None and (numbers := self._numbers.get(_digest(asked))):
            number = numbers.pop(0)
        if number is None or not 1 <= number <= len(self.ids):
            return f"unknown-{_digest(asked).hex()}"
        return self.ids[number - 1]


def _labelled(asked: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    return {**asked, "labels": {**(asked.get("labels") or {}), LABEL: str(number)}}


def _digest(asked: Mapping[str, Any]) -> bytes:
    labels = {name: value for name, value in (asked.get("labels") or {}).items() if name != LABEL}
    rest = {name: value for name, value in asked.items() if name != "labels"} | ({"labels": labels} if labels else {})
    return hashlib.blake2b(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def _read(request: Request, raw: bytes, known: _Known, created: int) -> Result:
    line = orjson.loads(raw)
    key = known.key(line["request"])
    if failure := line.get("status"):
        status = _STATUS.search(str(failure))
        return Result(key=key, error=describe(gemini.ERRORS, str(failure), int(status[1]) if status else None))
    if not isinstance(line.get("response"), dict) or not line["response"]:
        raise Malformed("it has neither a response nor an error")
    return gemini.answered(request, key, line["response"], created)


def _model(request: Request) -> str:
    model = str(request.model)
    return model if "/" in model else f"publishers/google/models/{model}"


def _path(job: Job) -> str:
    return f"/v1/{quote(job.external_id, safe='/')}"


def _counts(said: Mapping[str, Any]) -> Counts:
    """Google leaves out counts that are 0, and counts only at the end."""
    if not said:
        return Counts()
    names = ("successfulCount", "failedCount", "incompleteCount")
    succeeded, failed, left = (completions.count(said.get(name, 0)) or 0 for name in names)
    return Counts(total=succeeded + failed + left, succeeded=succeeded, failed=failed + left)
