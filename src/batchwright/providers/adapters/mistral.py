"""Mistral's batch jobs: OpenAI's files and lines, with jobs of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar
from urllib.parse import quote

import orjson

from batchwright.errors import ConfigurationError
from batchwright.inference.http import MIB, multipart
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

_JOBS = "/v1/batch/jobs"
_LIST_SPARE = timedelta(seconds=300)
_PAGE = 100
_PAGES_MAX = 100
_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/fim/completions",
    "/v1/moderations",
    "/v1/chat/moderations",
    "/v1/ocr",
    "/v1/classifications",
)
STATUSES: Statuses = {
    "QUEUED": Phase.QUEUED,
    "RUNNING": Phase.RUNNING,
    "CANCELLATION_REQUESTED": Phase.CANCELLING,
    "SUCCESS": COMPLETE,
    "FAILED": Ending.FAILED,
    "TIMEOUT_EXCEEDED": Ending.EXPIRED,
    "CANCELLED": Ending.CANCELLED,
}
ERRORS = ErrorTable(
    by_code={
        "TIMEOUT_EXCEEDED": Kind.TRANSIENT,
        "batch_expired": Kind.TRANSIENT,
        "insufficient_quota": Kind.CREDENTIAL,
        "timeout_exceeded": Kind.TRANSIENT,
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralSettings(ServiceSettings):
    base_url: str = "https://api.mistral.ai"
    api_key_env: str | None = "MISTRAL_API_KEY"
    timeout_hours: int = 24
    """Hours after which Mistral abandons a job: 1 to 168."""

    def __post_init__(self) -> None:
        super(MistralSettings, self).__post_init__()
        if not 1 <= self.timeout_hours <= 168:
            raise ConfigurationError(f"timeout_hours is {self.timeout_hours}; use 1 to 168")


class MistralAdapter(KeyedAdapter):
    """Upload a file, create a job of it, read the output and the error file."""

    name = "mistral"
    title = "Mistral"
    abilities = Abilities(
        task_types=frozenset({"completion"}),
        can_cancel=True,
        can_find=True,
        can_survey=True,
        inputs_max=1,
        requests_max=100_000,
        request_bytes_max=512 * MIB,
        results_kept_hours=24,
        batch_discount=0.5,
        duplicates="The uploaded file's id and a key in the metadata find the job in the list.",
    )
    Settings = MistralSettings
    errors: ClassVar[ErrorTable] = ERRORS

    def validate(self, request: Request) -> Sequence[Problem]:
        problems = completions.check_request(request, self.abilities, _ENDPOINTS)
        if request.model is None and request.task_type == "completion":
            problems.append(Problem(message="a job of Mistral needs its model", param="model"))
        return problems

    async def inspect(self, request: Request) -> Sequence[Problem]:
        return await completions.check_lines(self.tools, request, self.abilities)

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        if "input_file_id" in staged:
            return
        lines = await completions.measured(self.tools, request, _write)
        form = multipart({"purpose": "batch"}, lines, filename=f"{request.key}.jsonl")
        file = await self.ask("POST", "/v1/files", body=form)
        with reading():
            id = str(file["id"])
        yield {**staged, "input_file_id": id}

    async def submit(self, request: Request, staged: Staged) -> Job:
        body = {
            "input_files": [staged["input_file_id"]],
            "endpoint": completions.endpoint_of(request),
            "model": request.model,
            "metadata": {MARKER: request.key},
            "timeout_hours": self.settings.timeout_hours,
        }
        return _job(await self.pay(_JOBS, json=body))

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        with reading():
            found = [job async for job in self._jobs(since - _LIST_SPARE) if _is_marked(job, request.key, staged)]
            return [_job(job) for job in sorted(found, key=lambda job: job.get("created_at") or 0)]

    async def poll(self, job: Job) -> Status:
        response = await self.service.ask("GET", _path(job))
        if response.status == 404:
            return completions.lost(404)
        with reading():
            return _status(self.checked(response))

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        return await look_up(
            jobs, self._jobs(None), lambda one: one["id"], lambda _, one: completions.if_whole(_status(one))
        )

    def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        return completions.compare(self.tools, request, status, self._files(status.found or job.extra))

    async def cancel(self, job: Job) -> Cancelled:
        response = await self.service.ask("POST", f"{_path(job)}/cancel")
        if not response.is_ok and response.status < 500 and (await self.poll(job)).phase is Phase.ENDED:
            return Cancelled.ENDED_ALREADY
        said = self.checked(response)
        is_late = STATUSES.get(str(said.get("status"))) in (COMPLETE, Ending.FAILED, Ending.EXPIRED)
        return Cancelled.ENDED_ALREADY if is_late else Cancelled.REQUESTED

    async def clean_up(self, request: Request, staged: Staged, job: Job | None) -> None:
        if "input_file_id" in staged:
            response = await self.service.ask("DELETE", f"/v1/files/{quote(staged['input_file_id'], safe='')}")
            if response.status != 404:
                self.checked(response)

    async def check(self) -> str:
        await self.ask("GET", _JOBS, query={"page_size": 1})
        return f"Mistral at {self.settings.base_url} accepts the key"

    async def _jobs(self, earliest: datetime | None) -> AsyncGenerator[Mapping[str, Any], None]:
        for number in range(_PAGES_MAX):
            query: dict[str, str | int] = {"page": number, "page_size": _PAGE, "order_by": "-created"}
            if earliest is not None:
                query["created_after"] = earliest.isoformat()
            page = await self.ask("GET", _JOBS, query=query)
            jobs = page.get("data") or []
            for job in jobs:
                yield job
            if not jobs:
                return

    async def _files(self, found: Mapping[str, Any]) -> AsyncIterator[Result]:
        for name in ("output_file", "error_file"):
            if name in found:
                async with self.fetch(f"/v1/files/{quote(found[name], safe='')}/content") as incoming:
                    async for result in completions.read_results(incoming.chunks(), _read_line):
                        yield result


def _status(said: Mapping[str, Any]) -> Status:
    counts = _counts(said)
    raw = str(said.get("status"))
    phase, ending = completions.read_status(STATUSES, raw, counts)
    return Status(
        phase=phase,
        ending=ending,
        raw_status=raw,
        counts=counts,
        error=_error(said) if ending is Ending.FAILED else None,
        found=completions.texts(said, ("output_file", "error_file")),
    )


def _write(line: Line) -> bytes:
    """Mistral sets the model for the whole job, not for each line."""
    body = {name: value for name, value in line.body.items() if name != "model"}
    return orjson.dumps({"custom_id": line.custom_id, "body": body})


def _read_line(raw: bytes) -> Result:
    return completions.read_openai_line(ERRORS, raw)


def _job(said: Any) -> Job:
    if not isinstance(said, dict) or not isinstance(said.get("id"), str):
        raise InDoubt("the provider answered without the id of the job", code="not_a_job")
    return Job(external_id=said["id"])


def _path(job: Job) -> str:
    return f"{_JOBS}/{quote(job.external_id, safe='')}"


def _is_marked(job: Mapping[str, Any], key: str, staged: Staged) -> bool:
    has_file = staged.get("input_file_id") in (job.get("input_files") or ())
    return has_file or (job.get("metadata") or {}).get(MARKER) == key


def _counts(said: Mapping[str, Any]) -> Counts:
    names = ("total_requests", "succeeded_requests", "failed_requests")
    total, succeeded, failed = (completions.count(said.get(name)) for name in names)
    return Counts(total=total, succeeded=succeeded, failed=failed)


def _error(said: Mapping[str, Any]) -> Mapping[str, Any] | None:
    errors = said.get("errors") or [None]
    return describe(ERRORS, errors[0]) if errors[0] else None
