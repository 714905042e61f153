"""What the Gemini developer API and Vertex have in common: states, errors, and the shape of a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from batchwright.providers import completions
from batchwright.providers.completions import COMPLETE, Line, Statuses
from batchwright.providers.contract import Abilities, Ending, Phase, Problem, Request, Result, Usage
from batchwright.providers.errors import ErrorTable, Kind
from batchwright.providers.translate import gemini as translate
from batchwright.providers.translate.chat import Unmapped

NATIVE = ":generateContent"
"""The end of the endpoint of requests whose bodies are Gemini's own."""
STATUSES: Statuses = {
    "PENDING": Phase.QUEUED,
    "QUEUED": Phase.QUEUED,
    "RUNNING": Phase.RUNNING,
    "UPDATING": Phase.RUNNING,
    "PAUSED": Phase.RUNNING,
    "CANCELLING": Phase.CANCELLING,
    "SUCCEEDED": COMPLETE,
    "PARTIALLY_SUCCEEDED": COMPLETE,
    "FAILED": Ending.FAILED,
    "CANCELLED": Ending.CANCELLED,
    "EXPIRED": Ending.EXPIRED,
}
"""Without `BATCH_STATE_` or `JOB_STATE_`; Vertex uses the same names."""
ERRORS = ErrorTable(
    by_text={"api key not valid": Kind.CREDENTIAL, "api key expired": Kind.CREDENTIAL},
    by_code={
        "API_KEY_INVALID": Kind.CREDENTIAL,
        "BILLING_DISABLED": Kind.CREDENTIAL,
        "PERMISSION_DENIED": Kind.CREDENTIAL,
        "UNAUTHENTICATED": Kind.CREDENTIAL,
        "RESOURCE_EXHAUSTED": Kind.RATE_LIMITED,
        "ABORTED": Kind.TRANSIENT,
        "DEADLINE_EXCEEDED": Kind.TRANSIENT,
        "INTERNAL": Kind.TRANSIENT,
        "UNAVAILABLE": Kind.TRANSIENT,
        "FAILED_PRECONDITION": Kind.SCHEMA_INVALID,
        "INVALID_ARGUMENT": Kind.SCHEMA_INVALID,
        "OUT_OF_RANGE": Kind.SCHEMA_INVALID,
        "NOT_FOUND": Kind.FATAL,
        "UNIMPLEMENTED": Kind.FATAL,
        "3": Kind.SCHEMA_INVALID,
        "4": Kind.TRANSIENT,
        "5": Kind.FATAL,
        "7": Kind.CREDENTIAL,
        "8": Kind.RATE_LIMITED,
        "9": Kind.SCHEMA_INVALID,
        "10": Kind.TRANSIENT,
        "11": Kind.SCHEMA_INVALID,
        "13": Kind.TRANSIENT,
        "14": Kind.TRANSIENT,
        "16": Kind.CREDENTIAL,
    },
)
"""By the names of gRPC's codes and by their numbers; Vertex uses the same."""


def check_request(request: Request, abilities: Abilities) -> list[Problem]:
    endpoints = (completions.endpoint_of(request),) if is_native(request) else (completions.CHAT,)
    problems = completions.check_request(request, abilities, endpoints)
    if request.model is None and request.task_type == "completion":
        problems.append(Problem(message="a batch of Gemini needs its model", param="model"))
    return problems


def check(request: Request, line: Line, *, has_uris: bool = False) -> Iterator[Problem]:
    try:
        native(request, line, has_uris=has_uris)
    except Unmapped as error:
        id = completions.input_of(request).id
        yield Problem(message=f"line {line.number}: {error}", input_id=id, param=f"body.{error.field}")


def is_native(request: Request) -> bool:
    return completions.endpoint_of(request).endswith(NATIVE)


def native(request: Request, line: Line, *, has_uris: bool = False) -> Mapping[str, Any]:
    """A line's body in Gemini's format."""
    return line.body if is_native(request) else translate.to_contents(line.body, has_uris=has_uris)


def answered(request: Request, key: str, response: Mapping[str, Any], created: int) -> Result:
    """A Gemini response as a result."""
    if not is_native(request):
        body = translate.to_chat(response, created, request.model or "")
        return completions.succeeded(key, body, id=body["id"])
    usage = response.get("usageMetadata") or {}
    answered, thought = (completions.count(usage.get(name)) for name in ("candidatesTokenCount", "thoughtsTokenCount"))
    tokens = Usage(
        input_tokens=completions.count(usage.get("promptTokenCount")),
        output_tokens=None if answered is None else answered + (thought or 0),
        cached_tokens=completions.count(usage.get("cachedContentTokenCount")),
    )
    line = completions.succeeded(key, response, id=str(response.get("responseId") or ""))
    return Result(key=key, value=line.value, usage=tokens)


def short(state: str) -> str:
    """A state without Google's prefix."""
    return state.removeprefix("BATCH_STATE_").removeprefix("JOB_STATE_")


def created_at(said: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(said.get("createTime"))).timestamp()
    except ValueError:
        return 0.0
