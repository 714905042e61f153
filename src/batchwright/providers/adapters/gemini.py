"""Batches of the Gemini developer API. Creating one is not idempotent; each has our key as its display name."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar
from urllib.parse import quote

import orjson

from batchwright.errors import Transient
from batchwright.inference.http import Upload
from batchwright.providers import completions
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
from batchwright.providers.errors import ErrorTable, describe, error_of, reading
from batchwright.providers.polls import look_up
from batchwright.providers.service import KeyedAdapter
from batchwright.providers.settings import ServiceSettings

_LIST_SPARE_SECONDS = 300.0
_PAGE = 100
_PAGES_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiSettings(ServiceSettings):
    base_url: str = "https://generativelanguage.googleapis.com"
    api_key_env: str | None = "GEMINI_API_KEY"
    version: str = "v1beta"
    """The version of the API, in its paths."""


class GeminiAdapter(KeyedAdapter):
    """Upload a file of requests with keys, create a batch of it, download the file of responses."""

    name = "gemini"
    title = "Gemini"
    abilities = Abilities(
        task_types=frozenset({"completion"}),
        can_cancel=True,
        can_find=True,
        can_survey=True,
        keeps_partial_results=False,
        inputs_max=1,
        request_bytes_max=2 * 1000**3,
        timeout_hours=50,
        results_kept_hours=48,
        batch_discount=0.5,
        duplicates="The display name of a batch is our key, by which it is found in the list.",
    )
    Settings = GeminiSettings
    errors: ClassVar[ErrorTable] = gemini.ERRORS

    async def headers(self) -> Mapping[str, str]:
        return {"x-goog-api-key": self.key}

    def validate(self, request: Request) -> Sequence[Problem]:
        return gemini.check_request(request, self.abilities)

    async def inspect(self, request: Request) -> Sequence[Problem]:
        return await completions.check_lines(
            self.tools, request, self.abilities, lambda line: gemini.check(request, line)
        )

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        if "input_file" in staged:
            return

        def write(line: Line) -> bytes:
            return orjson.dumps({"key": line.custom_id, "request": gemini.native(request, line)})

        file = await self._upload(request.key, await completions.measured(self.tools, request, write))
        with reading():
            name = str(file["file"]["name"])
        yield {**staged, "input_file": name}

    async def submit(self, request: Request, staged: Staged) -> Job:
        path = f"/{self.settings.version}/models/{_model(request)}:batchGenerateContent"
        body = {"batch": {"displayName": request.key, "inputConfig": {"fileName": staged["input_file"]}}}
        return _job(await self.pay(path, json=body))

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        earliest = since.timestamp() - _LIST_SPARE_SECONDS
        with reading():
            found = [
                one async for one in self._operations(earliest) if _metadata(one).get("displayName") == request.key
            ]
            return [_job(one) for one in sorted(found, key=lambda one: gemini.created_at(_metadata(one)))]

    async def poll(self, job: Job) -> Status:
        response = await self.service.ask("GET", self._path(job.external_id))
        if response.status == 404:
            return completions.lost(404)
        with reading():
            return _status(self.checked(response))

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        return await look_up(
            jobs, self._operations(0.0), lambda one: one["name"], lambda _, one: completions.if_whole(_status(one))
        )

    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        found = self._lines(request, status.found or job.extra)
        return completions.compare(self.tools, request, status, found)

    async def cancel(self, job: Job) -> Cancelled:
        response = await self.service.ask("POST", f"{self._path(job.external_id)}:cancel")
        if not response.is_ok and response.status < 500 and (await self.poll(job)).phase is Phase.ENDED:
            return Cancelled.ENDED_ALREADY
        self.checked(response)
        return Cancelled.REQUESTED

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:
        """Gemini answers 403 for a file that does not exist."""
        if "input_file" in staged:
            response = await self.service.ask("DELETE", self._path(staged["input_file"]))
            if response.status not in (403, 404):
                self.checked(response)

    async def check(self) -> str:
        await self.ask("GET", f"/{self.settings.version}/models", query={"pageSize": 1})
        return f"Gemini at {self.settings.base_url} accepts the key"

    def _path(self, name: str) -> str:
        """The path of `batches/1` or `files/1`."""
        return f"/{self.settings.version}/{quote(name, safe='/')}"

    async def _upload(self, name: str, lines: Upload) -> Any:
        """Google's protocol: ask for an address, then upload there. The address is used once and not stored."""
        begin = {
            "x-goog-upload-protocol": "resumable",
            "x-goog-upload-command": "start",
            "x-goog-upload-header-content-length": str(lines.length),
            "x-goog-upload-header-content-type": lines.content_type,
        }
        path = f"/upload/{self.settings.version}/files"
        begun = await self.service.ask("POST", path, headers=begin, json={"file": {"displayName": name}})
        if not begun.is_ok:
            raise error_of(gemini.ERRORS, begun, now=time.time())
        if not (url := begun.headers.get("x-goog-upload-url")):
            raise Transient("the provider returned no upload address", code="no_upload_url")
        rest = {"x-goog-upload-command": "upload, finalize", "x-goog-upload-offset": "0"}
        return await self.ask("POST", url, headers=rest, body=lines)

    async def _operations(self, earliest: float) -> AsyncGenerator[Mapping[str, Any], None]:
        query: dict[str, str | int] = {"pageSize": _PAGE}
        for _ in range(_PAGES_MAX):
            page = await self.ask("GET", f"/{self.settings.version}/batches", query=query)
            operations = page.get("operations") or []
            for operation in operations:
                yield operation
            is_over = operations and all(gemini.created_at(_metadata(one)) < earliest for one in operations)
            if is_over or not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    async def _lines(self, request: Request, found: Mapping[str, Any]) -> AsyncIterator[Result]:
        if "responses_file" not in found:
            return
        created = int(self.tools.now().timestamp())
        path = f"{self._path(found['responses_file'])}:download"
        async with self.fetch(path, {"alt": "media"}) as incoming:
            async for result in completions.read_results(incoming.chunks(), lambda raw: _read(request, raw, created)):
                yield result


def _status(operation: Mapping[str, Any]) -> Status:
    metadata = _metadata(operation)
    counts = _counts(metadata.get("batchStats") or {})
    raw = str(metadata.get("state"))
    phase, ending = completions.read_status(gemini.STATUSES, gemini.short(raw), counts)
    output = {**(metadata.get("output") or {}), **(operation.get("response") or {})}
    file = completions.texts(output, ["responsesFile"]).get("responsesFile")
    return Status(
        phase=phase,
        ending=ending,
        raw_status=raw,
        counts=counts,
        error=describe(gemini.ERRORS, operation["error"])
        if ending is Ending.FAILED and operation.get("error")
        else None,
        found={} if file is None else {"responses_file": file},
    )


def _read(request: Request, raw: bytes, created: int) -> Result:
    line = orjson.loads(raw)
    key = line["key"]
    if not isinstance(key, str):
        raise Malformed("its key is not a string")
    if line.get("error"):
        return Result(key=key, error=describe(gemini.ERRORS, line["error"]))
    if not isinstance(line.get("response"), dict):
        raise Malformed("it has neither a response nor an error")
    return gemini.answered(request, key, line["response"], created)


def _model(request: Request) -> str:
    return quote(str(request.model).removeprefix("models/"), safe="")


def _job(operation: Any) -> Job:
    if not isinstance(operation, dict) or not isinstance(operation.get("name"), str):
        raise InDoubt("the provider answered without the name of the batch", code="not_a_batch")
    return Job(external_id=operation["name"])


def _metadata(operation: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = operation.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _counts(said: Mapping[str, Any]) -> Counts:
    """Google leaves out counts that are 0."""
    total = completions.count(said.get("requestCount"))
    if total is None:
        return Counts()
    succeeded, failed = (
        completions.count(said.get(name, 0)) for name in ("successfulRequestCount", "failedRequestCount")
    )
    return Counts(total=total, succeeded=succeeded, failed=failed)
