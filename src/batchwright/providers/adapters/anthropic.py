"""Anthropic's message batches. They carry no name and no metadata, so the requests' ids identify a lost batch."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar
from urllib.parse import quote

import orjson

from batchwright.inference.http import MIB
from batchwright.providers import completions
from batchwright.providers.completions import COMPLETE, Line, Malformed, Statuses
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
    Usage,
)
from batchwright.providers.errors import ErrorTable, Kind, describe, reading
from batchwright.providers.lines import split_lines
from batchwright.providers.polls import look_up
from batchwright.providers.service import KeyedAdapter
from batchwright.providers.settings import ServiceSettings
from batchwright.providers.translate import anthropic as translate
from batchwright.providers.translate.chat import Unmapped

NATIVE = "/v1/messages"
"""The endpoint of requests whose bodies are Anthropic's own."""
_BATCHES = "/v1/messages/batches"
_LIST_SPARE_SECONDS = 300.0
_PAGE = 100
_PAGES_MAX = 100
_UPLOAD_SECONDS = 120.0
_OURS = re.compile(r"(.+)-(\d+)")
STATUSES: Statuses = {"in_progress": Phase.RUNNING, "canceling": Phase.CANCELLING, "ended": COMPLETE}
ERRORS = ErrorTable(
    by_text={"credit balance is too low": Kind.CREDENTIAL},
    by_code={
        "api_error": Kind.TRANSIENT,
        "authentication_error": Kind.CREDENTIAL,
        "billing_error": Kind.CREDENTIAL,
        "enforced_spend_limit_reached": Kind.CREDENTIAL,
        "invalid_request_error": Kind.SCHEMA_INVALID,
        "organization_on_hold": Kind.CREDENTIAL,
        "overloaded_error": Kind.TRANSIENT,
        "permission_error": Kind.CREDENTIAL,
        "rate_limit_error": Kind.RATE_LIMITED,
        "request_too_large": Kind.SCHEMA_INVALID,
        "timeout_error": Kind.TRANSIENT,
    },
)
_UNFINISHED = {
    "canceled": {
        "kind": Kind.FATAL.value,
        "code": "batch_cancelled",
        "message": "the batch was cancelled before this request was run",
    },
    "expired": {
        "kind": Kind.TRANSIENT.value,
        "code": "batch_expired",
        "message": "the batch expired before this request was run",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicSettings(ServiceSettings):
    base_url: str = "https://api.anthropic.com"
    api_key_env: str | None = "ANTHROPIC_API_KEY"
    version: str = "2023-06-01"
    """Sent as anthropic-version."""


class AnthropicAdapter(KeyedAdapter):
    """The one call that creates the batch holds all requests; each has our key and its line's number as its id."""

    name = "anthropic"
    title = "Anthropic"
    abilities = Abilities(
        task_types=frozenset({"completion"}),
        can_cancel=True,
        can_find=True,
        can_survey=True,
        has_marker=False,
        inputs_max=1,
        requests_max=100_000,
        request_bytes_max=256 * MIB,
        settle_seconds=600,
        results_kept_hours=29 * 24,
        batch_discount=0.5,
        duplicates=(
            "A batch with the same number of requests, created at that time, is adopted; the ids of its requests, "
            "which can be read once it has ended, prove that it is the right one."
        ),
    )
    Settings = AnthropicSettings
    errors: ClassVar[ErrorTable] = ERRORS

    async def headers(self) -> Mapping[str, str]:
        return {"x-api-key": self.key, "anthropic-version": self.settings.version}

    def validate(self, request: Request) -> Sequence[Problem]:
        return completions.check_request(request, self.abilities, (completions.CHAT, NATIVE))

    async def inspect(self, request: Request) -> Sequence[Problem]:
        def check(line: Line) -> Iterator[Problem]:
            try:
                _params(request, line)
            except Unmapped as error:
                id = completions.input_of(request).id
                yield Problem(message=f"line {line.number}: {error}", input_id=id, param=f"body.{error.field}")

        return await completions.check_lines(self.tools, request, self.abilities, check)

    async def stage(self, request: Request, staged: Staged) -> AsyncIterator[Staged]:
        """Nothing is uploaded in advance. The number of requests is kept to search for a lost batch."""
        if "requests" not in staged:
            ids = await completions.line_ids(self.tools, request)
            yield {**staged, "requests": len(ids)}

    async def submit(self, request: Request, staged: Staged) -> Job:
        def write(line: Line) -> bytes:
            return orjson.dumps({"custom_id": f"{request.key}-{line.number}", "params": _params(request, line)})

        upload = await completions.measured(self.tools, request, write, b'{"requests":[', b",", b"]}")
        return _job(await self.pay(_BATCHES, body=upload, seconds=_UPLOAD_SECONDS))

    async def find(self, request: Request, staged: Staged, since: datetime) -> Sequence[Job]:
        """Batches that are proven to be ours; if there are none, those that may be ours and have not ended yet."""
        proved, possible = [], []
        with reading():
            async for batch in self._batches(since.timestamp() - _LIST_SPARE_SECONDS):
                if sum(_counts(batch).values()) != staged.get("requests"):
                    continue
                if batch.get("processing_status") != "ended":
                    possible.append(batch)
                elif await self._first_key(str(batch["id"])) in (request.key, None):
                    proved.append(batch)
            extra = {} if proved else {"is_unproved": True}
            return [_job(batch, extra) for batch in sorted(proved or possible, key=_created_at)]

    async def poll(self, job: Job) -> Status:
        response = await self.service.ask("GET", _path(job))
        if response.status == 404:
            return completions.lost(404)
        with reading():
            return _status(self.checked(response))

    async def survey(self, jobs: Sequence[Job]) -> Mapping[str, Status]:
        return await look_up(jobs, self._batches(0.0), lambda one: one["id"], lambda _, one: _status(one))

    async def results(self, request: Request, job: Job, status: Status) -> AsyncIterator[Result]:
        if job.extra.get("is_unproved") and await self._first_key(job.external_id) not in (request.key, None):
            raise InDoubt("the adopted batch belongs to another task; searching for the right one", code="foreign_job")
        ids = await completions.line_ids(self.tools, request)
        found = self._lines(request, job, ids)
        async with aclosing(completions.reconcile(found, ids, completions.missing_error(status))) as results:
            async for result in results:
                yield result

    async def cancel(self, job: Job) -> Cancelled:
        if job.extra.get("is_unproved"):
            return Cancelled.UNSUPPORTED  # it may be somebody else's
        response = await self.service.ask("POST", f"{_path(job)}/cancel")
        if response.status in (400, 404, 409) and (await self.poll(job)).phase is Phase.ENDED:
            return Cancelled.ENDED_ALREADY
        self.checked(response)
        return Cancelled.REQUESTED

    async def check(self) -> str:
        await self.ask("GET", "/v1/models", query={"limit": 1})
        return f"Anthropic at {self.settings.base_url} accepts the key"

    async def _batches(self, earliest: float) -> AsyncGenerator[Mapping[str, Any], None]:
        query: dict[str, str | int] = {"limit": _PAGE}
        for _ in range(_PAGES_MAX):
            page = await self.ask("GET", _BATCHES, query=query)
            recent = [batch for batch in page.get("data") or [] if _created_at(batch) >= earliest]
            for batch in recent:
                yield batch
            if not page.get("has_more") or not recent:
                return
            query["after_id"] = page["last_id"]

    async def _first_key(self, id: str) -> str | None:
        """The key in the first result of an ended batch; None if it has no readable result."""
        async with self.fetch(f"{_BATCHES}/{quote(id, safe='')}/results") as incoming:
            async for raw in split_lines(incoming.chunks()):
                try:
                    found = _OURS.fullmatch(orjson.loads(raw or b"")["custom_id"])
                except (ValueError, TypeError, KeyError):
                    continue
                return "" if found is None else found[1]
        return None

    async def _lines(self, request: Request, job: Job, ids: Sequence[str]) -> AsyncIterator[Result]:
        created = int(self.tools.now().timestamp())

        def read(raw: bytes) -> Result:
            line = orjson.loads(raw)
            key = _key(request, str(line["custom_id"]), ids)
            return _result(key, line["result"], completions.endpoint_of(request), created)

        async with self.fetch(f"{_path(job)}/results") as incoming:
            async for result in completions.read_results(incoming.chunks(), read):
                yield result


def _status(batch: Mapping[str, Any]) -> Status:
    said = _counts(batch)
    counts = _counted(said)
    raw = str(batch.get("processing_status"))
    phase, ending = completions.read_status(STATUSES, raw, counts)
    return Status(
        phase=phase,
        ending=None if ending is None else _ending(said, ending),
        raw_status=raw,
        counts=counts if phase is Phase.ENDED else Counts(total=counts.total),
        expires_at=_time(batch.get("expires_at")),
    )


def _params(request: Request, line: Line) -> Mapping[str, Any]:
    if completions.endpoint_of(request) == NATIVE:
        return line.body if request.model is None else {**line.body, "model": request.model}
    return translate.to_messages(line.body, request.model)


def _key(request: Request, sent: str, ids: Sequence[str]) -> str:
    """The custom_id of the line that a result is for. An id that we did not send is returned unchanged."""
    found = _OURS.fullmatch(sent)
    if found is None or found[1] != request.key or not 1 <= int(found[2]) <= len(ids):
        return sent
    return ids[int(found[2]) - 1]


def _result(key: str, said: Mapping[str, Any], endpoint: str, created: int) -> Result:
    match said["type"]:
        case "succeeded":
            message = said["message"]
            body = message if endpoint == NATIVE else translate.to_chat(message, created)
            result = completions.succeeded(key, body, id=str(message.get("id") or ""))
            return replace(result, usage=_usage(message.get("usage") or {}))
        case "errored":
            return Result(key=key, error=describe(ERRORS, said["error"]))
        case "canceled" | "expired" as fate:
            return Result(key=key, error=_UNFINISHED[fate])
        case other:
            raise Malformed(f"its type is {other!r}")


def _usage(said: Mapping[str, Any]) -> Usage:
    """Anthropic counts cached tokens separately from the other tokens of the prompt."""
    asked, read, written, answered = (
        completions.count(said.get(name))
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    )
    return Usage(
        input_tokens=None if asked is None else asked + (read or 0) + (written or 0),
        output_tokens=answered,
        cached_tokens=read,
        cache_written_tokens=written,
    )


def _counts(batch: Mapping[str, Any]) -> dict[str, int]:
    said = batch.get("request_counts") or {}
    names = ("processing", "succeeded", "errored", "canceled", "expired")
    return {name: completions.count(said.get(name)) or 0 for name in names}


def _counted(said: Mapping[str, int]) -> Counts:
    failed = said["errored"] + said["canceled"] + said["expired"]
    return Counts(total=sum(said.values()), succeeded=said["succeeded"], failed=failed)


def _ending(said: Mapping[str, int], ending: Ending) -> Ending:
    """The status only says that a batch ended; the counts say whether it expired or was cancelled."""
    if ending is Ending.FAILED and said["canceled"]:
        return Ending.CANCELLED
    if ending is Ending.FAILED and said["expired"]:
        return Ending.EXPIRED
    return ending


def _job(batch: Any, extra: Mapping[str, Any] | None = None) -> Job:
    if not isinstance(batch, dict) or not isinstance(batch.get("id"), str):
        raise InDoubt("the provider answered without the id of the batch", code="not_a_batch")
    return Job(external_id=batch["id"], extra=extra or {})


def _path(job: Job) -> str:
    return f"{_BATCHES}/{quote(job.external_id, safe='')}"


def _created_at(batch: Mapping[str, Any]) -> float:
    found = _time(batch.get("created_at"))
    return 0.0 if found is None else found.timestamp()


def _time(value: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(value)
    except (ValueError, TypeError):
        return None
