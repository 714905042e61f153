"""OpenAI's Batch API, and every service that speaks it at another base URL."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import quote

import orjson

from batchwright.inference.http import MIB, Upload, multipart
from batchwright.providers import completions
from batchwright.providers.completions import COMPLETE, MARKER, Line, Statuses
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
from batchwright.providers.errors import ErrorTable, Kind, describe, reading
from batchwright.providers.polls import look_up
from batchwright.providers.service import KeyedAdapter
from batchwright.providers.settings import ServiceSettings
from batchwright.providers.tools import AdapterTools

LIST_SPARE_SECONDS = 300.0
"""Clocks differ, so the search for a job starts this long before its request was sent."""
_PAGE = 100
_PAGES_MAX = 200
STATUSES: Statuses = {
    "validating": Phase.QUEUED,
    "in_progress": Phase.RUNNING,
    "finalizing": Phase.RUNNING,
    "cancelling": Phase.CANCELLING,
    "completed": COMPLETE,
    "failed": Ending.FAILED,
    "expired": Ending.EXPIRED,
    "cancelled": Ending.CANCELLED,
}
_FILES = ("output_file_id", "error_file_id")
_ENDINGS: Mapping[tuple[str, ...], Ending] = {
    (): Ending.FAILED,
    ("output_file_id",): Ending.SUCCEEDED,
    ("error_file_id",): Ending.FAILED,
    _FILES: Ending.PARTIAL,
}
"""How a batch ended, judged by its files; for services that do not report counts."""
ERRORS = ErrorTable(
    by_text={"cannot find file": Kind.TRANSIENT},
    by_code={
        "batch_cancelled": Kind.FATAL,
        "batch_expired": Kind.TRANSIENT,
        "billing_hard_limit_reached": Kind.CREDENTIAL,
        "billing_not_active": Kind.CREDENTIAL,
        "insufficient_quota": Kind.CREDENTIAL,
        "invalid_api_key": Kind.CREDENTIAL,
        "model_not_found": Kind.FATAL,
        "rate_limit_exceeded": Kind.RATE_LIMITED,
        "token_limit_exceeded": Kind.RATE_LIMITED,
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAISettings(ServiceSettings):
    """OpenAI, or a service that is compatible with it."""

    base_url: str = "https://api.openai.com/v1"
    api_key_env: str | None = "OPENAI_API_KEY"
    organization: str | None = None
    """Sent as `openai-organization`."""
    project: str | None = None
    """Sent as `openai-project`."""
    has_metadata: bool = True
    """Whether batches carry metadata; without it, a batch is found by its input file alone."""
    completion_window: str = "24h"
    """Default for tasks that set none."""
    requests_max: int | None = None
    """Maximum number of requests in one batch; unset, the documented limit of the provider."""
    request_bytes_max: int | None = None
    """Maximum size of one input file, in bytes; unset, the documented limit of the provider."""


class OpenAIAdapter(KeyedAdapter):
    """The batch API of OpenAI: upload a file, create a batch of it, read the output and the error file."""

    abilities = Abilities(
        task_types=frozenset({"completion"}),
        can_cancel=True,
        can_find=True,
        can_survey=True,
        inputs_max=1,
        requests_max=50_000,
        request_bytes_max=200 * MIB,
        results_kept_hours=30 * 24,
        batch_discount=0.5,
        duplicates="The uploaded file's id and a key in the metadata find the batch in the list.",
    )
    Settings = OpenAISettings
    endpoints: ClassVar[Sequence[str]] = (
        "/v1/responses",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/completions",
        "/v1/moderations",
        "/v1/images/",
        "/v1/videos",
    )
    errors: ClassVar[ErrorTable] = ERRORS
    statuses: ClassVar[Statuses] = STATUSES

    def __init__(self, settings: Any, tools: AdapterTools) -> None:
        super().__init__(settings, tools)
        self.abilities = _narrowed(self.abilities, settings)

    async def headers(self) -> Mapping[str, str]:
        headers = {"authorization": f"Bearer {self.key}"}
        if self.settings.organization is not None:
            headers["openai-organization"] = self.settings.organization
        if self.settings.project is not None:
            headers["openai-project"] = self.settings.project
        return headers

    def validate(self, request: Request) -> Sequence[Problem]:
        return completions.check_request(request, self.abilities, self.endpoints)

    async def inspect(self, request: Request) -> Sequence[Problem]:
        return await completions.check_lines(self.tools, request, self.abilities)

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        if "input_file_id" in staged:
            return
        lines = await completions.measured(self.tools, request, rewrite(request.model, self.batch_endpoint(request)))
        yield {**staged, "input_file_id": await self.upload(f"{request.key}.jsonl", lines)}

    async def upload(self, filename: str, lines: Upload) -> str:
        """Upload a file and return its id."""
        file = await self.ask("POST", "/files", body=multipart({"purpose": "batch"}, lines, filename=filename))
        with reading():
            return str(file["id"])

    async def submit(self, request: Request, staged: Staged) -> Job:
        body = {
            "input_file_id": staged["input_file_id"],
            "endpoint": self.batch_endpoint(request),
            "completion_window": str(request.options.get("completion_window", self.settings.completion_window)),
        }
        if self.settings.has_metadata:
            body["metadata"] = {MARKER: request.key}
        batch = await self.pay("/batches", json=body)
        return _job(batch.get("job", batch) if isinstance(batch, dict) else batch)

    def batch_endpoint(self, request: Request) -> str:
        return completions.endpoint_of(request)

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        earliest, file = since.timestamp() - LIST_SPARE_SECONDS, staged.get("input_file_id")
        with reading():
            found = [batch async for batch in self._batches(earliest) if _is_marked(batch, request.key, file)]
            return [_job(batch) for batch in sorted(found, key=_created_at)]

    async def poll(self, job: Job) -> Status:
        response = await self.service.ask("GET", _path(job))
        if response.status == 404:
            return completions.lost(404)
        with reading():
            return self._status(self.checked(response))

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        return await look_up(
            jobs, self._batches(0.0), lambda one: one["id"], lambda _, one: completions.if_whole(self._status(one))
        )

    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        return completions.compare(self.tools, request, status, self._files(status.found or job.extra))

    async def cancel(self, job: Job) -> Cancelled:
        response = await self.service.ask("POST", f"{_path(job)}/cancel")
        if response.status in (400, 404, 409) and (await self.poll(job)).phase is Phase.ENDED:
            return Cancelled.ENDED_ALREADY
        self.checked(response)
        return Cancelled.REQUESTED

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:
        if "input_file_id" in staged:
            response = await self.service.ask("DELETE", f"/files/{quote(staged['input_file_id'], safe='')}")
            if response.status != 404:
                self.checked(response)

    async def check(self) -> str:
        await self.ask("GET", "/batches", query={"limit": 1})
        return f"{self.title} at {self.settings.base_url} accepts the key"

    async def _batches(self, earliest: float) -> AsyncGenerator[Mapping[str, Any], None]:
        """Batches created since then. The list has the newest first, and some services have only one page."""
        query: dict[str, str | int] = {"limit": _PAGE}
        for _ in range(_PAGES_MAX):
            page = await self.ask("GET", "/batches", query=query)
            batches = page if isinstance(page, list) else page.get("data") or []
            for batch in batches:
                yield batch
            has_more = isinstance(page, dict) and page.get("has_more")
            if not has_more or not batches or all(_created_at(batch) < earliest for batch in batches):
                return
            query["after"] = batches[-1]["id"]

    def _status(self, batch: Mapping[str, Any]) -> Status:
        counts = _counts(batch)
        raw = str(batch.get("status"))
        found = completions.texts(batch, _FILES)
        phase, ending = completions.read_status(self.statuses, raw.lower(), counts)
        if ending is Ending.SUCCEEDED and counts.succeeded is None:
            ending = _ENDINGS[tuple(found)]
        return Status(
            phase=phase,
            ending=ending,
            raw_status=raw,
            counts=counts,
            expires_at=_time(batch.get("expires_at") or batch.get("job_deadline")),
            error=self._error(batch) if ending is Ending.FAILED else None,
            found=found,
        )

    def _error(self, batch: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Why a batch failed as a whole: the first of its errors."""
        errors = (batch.get("errors") or {}).get("data") or [batch.get("error")]
        first = errors[0]
        if not first:
            return None
        described = describe(self.errors, first, 400 if isinstance(first, dict) and first.get("line") else None)
        if isinstance(first, dict) and first.get("line"):
            described["message"] = f"line {first['line']}: {described['message']}"
        return described

    async def _files(self, found: Mapping[str, Any]) -> AsyncIterator[Result]:
        """The results in both files: an answer is in one of them, and either may be missing."""
        for name in _FILES:
            if name in found:
                async with self.fetch(f"/files/{quote(found[name], safe='')}/content") as incoming:
                    async for result in completions.read_results(incoming.chunks(), self._read_line):
                        yield result

    def _read_line(self, raw: bytes) -> Result:
        return completions.read_openai_line(self.errors, raw)


def rewrite(model: str | None, url: str) -> Callable[[Line], bytes]:
    """Writes lines unchanged, except for a model or url that has another name at the provider."""

    def write(line: Line) -> bytes:
        if line.url == url and model in (None, line.body.get("model")):
            return line.raw
        body = line.body if model is None else {**line.body, "model": model}
        return orjson.dumps({"custom_id": line.custom_id, "method": "POST", "url": url, "body": body})

    return write


def _narrowed(abilities: Abilities, settings: OpenAISettings) -> Abilities:
    return replace(
        abilities,
        requests_max=settings.requests_max or abilities.requests_max,
        request_bytes_max=settings.request_bytes_max or abilities.request_bytes_max,
    )


def _job(batch: Any) -> Job:
    if not isinstance(batch, dict) or not isinstance(batch.get("id"), str):
        raise InDoubt("the provider answered without the id of the batch", code="not_a_batch")
    return Job(external_id=batch["id"], extra={"input_file_id": batch.get("input_file_id")})


def _path(job: Job) -> str:
    return f"/batches/{quote(job.external_id, safe='')}"


def _is_marked(batch: Mapping[str, Any], key: str, file: str | None) -> bool:
    is_of_file = file is not None and batch.get("input_file_id") == file
    return is_of_file or (batch.get("metadata") or {}).get(MARKER) == key


def _created_at(batch: Mapping[str, Any]) -> float:
    found = _time(batch.get("created_at"))
    return 0.0 if found is None else found.timestamp()


def _time(value: Any) -> datetime | None:
    """Seconds since 1970, or a time in ISO format."""
    try:
        if isinstance(value, str):
            return datetime.fromisoformat(value)
        return None if value is None else datetime.fromtimestamp(float(value), UTC)
    except (ValueError, TypeError, OverflowError):
        return None


def _counts(batch: Mapping[str, Any]) -> Counts:
    said = batch.get("request_counts")
    if not isinstance(said, Mapping):
        return Counts()
    total, done, failed = (completions.count(said.get(name)) for name in ("total", "completed", "failed"))
    return Counts(total=total, succeeded=done, failed=failed)
