"""Maps an error to what happens to the job. The error's class decides:

RateLimited    wait as requested, same step again, no attempt used
RetryLater     the same, raised by the operation itself
Transient      exponential backoff with full jitter, up to max_attempts, then FAILED
SchemaInvalid  FAILED at once: same input, same output
Fatal          FAILED at once
"""

from __future__ import annotations

import asyncio
import random
import traceback
from typing import Any

import orjson

from batchwright.engine.jobs import RESULT_BYTES_MAX, Claim
from batchwright.engine.operation import Operation
from batchwright.engine.outcomes import Settle, Snooze
from batchwright.errors import (
    DatabaseUnavailable,
    Fatal,
    InvalidInput,
    OperationError,
    RateLimited,
    RetryLater,
    SchemaInvalid,
    Transient,
)

_RATE_LIMIT_SECONDS = 5.0
_CONNECTION_ERRORS = frozenset(
    {
        "APIConnectionError",  # openai, anthropic
        "ClientConnectionError",  # aiohttp
        "HTTPClientError",  # botocore
        "OperationalError",  # DB-API drivers, SQLAlchemy
        "Timeout",  # requests
        "TransportError",  # httpx
    }
)
_DELAY_SECONDS_MAX = 366 * 86_400.0
_DOUBLINGS_MAX = 60
_MESSAGE_CHARACTERS_MAX = 4000
_TRACEBACK_CHARACTERS_MAX = 16_000


class NotStorable(Fatal):
    """The result cannot be stored as JSON, or is too large."""


def classify(error: BaseException, retry_on: tuple[type[BaseException], ...] = ()) -> OperationError | RetryLater:
    """Map any exception to one of our classes: known foreign exceptions by their kind, unknown ones to Fatal."""
    if isinstance(error, (OperationError, RetryLater)):
        return error
    if retry_on and isinstance(error, retry_on):
        return Transient(_describe(error))
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return Transient(_describe(error), code="timeout")
    if isinstance(error, (ConnectionError, DatabaseUnavailable)) or _is_connection_error(error):
        return Transient(_describe(error), code="connection")
    if _status_code(error) == 429:
        return RateLimited(_describe(error), retry_after=_retry_after(error))
    if isinstance(error, InvalidInput) or type(error).__name__ in {"ValidationError", "JSONDecodeError"}:
        return SchemaInvalid(_describe(error))
    return Fatal(_describe(error), code="unexpected")


def react(claim: Claim, operation: Operation, error: BaseException) -> Settle:
    """What happens to a job whose operation raised."""
    verdict = classify(error, operation.retry_on)
    match verdict:
        case RetryLater():
            return _snooze(claim, verdict.delay_seconds, verdict.reason, "retry_later")
        case RateLimited():
            seconds = verdict.retry_after if verdict.retry_after is not None else _RATE_LIMIT_SECONDS
            seconds = max(0.0, seconds) * random.uniform(1.0, 1.25)
            return _snooze(claim, seconds, str(verdict) or "rate limited", "rate_limited")
        case Transient() if claim.attempts < claim.max_attempts:
            values = {"error": describe(verdict, error), "delay_seconds": backoff(claim.attempts, operation)}
            return Settle("retry", claim, values)
        case _:
            return Settle("fail", claim, {"error": describe(verdict, error)})


def backoff(attempt: int, operation: Operation) -> float:
    """Full jitter: a random delay from zero to the exponential step, so that retries spread out."""
    step = min(operation.backoff_seconds_max, operation.backoff_seconds * 2.0 ** min(attempt - 1, _DOUBLINGS_MAX))
    return random.uniform(0.0, step)


def describe(verdict: OperationError, error: BaseException) -> dict[str, Any]:
    """The `error` object of a job: kind, code, type, message, and a traceback for unexpected errors."""
    described: dict[str, Any] = {
        "kind": verdict.kind,
        "code": verdict.code or verdict.kind,
        "type": type(error).__name__,
        "message": _text(str(error) or str(verdict), _MESSAGE_CHARACTERS_MAX),
    }
    if isinstance(verdict, Fatal):
        described["scope"] = verdict.scope
    if not isinstance(error, OperationError) and error.__traceback__ is not None:
        trace = "".join(traceback.format_exception(error))
        described["traceback"] = _text(trace[-_TRACEBACK_CHARACTERS_MAX:], _TRACEBACK_CHARACTERS_MAX)
    return described


def succeed(claim: Claim, result: Any, progress: tuple[int, int] | None = None) -> Settle:
    """The settle of a success. Missing values are left out: the statement treats them as null."""
    values: dict[str, Any] = {}
    if result is not None:
        values["result"] = orjson.Fragment(storable(result))
    if progress is not None:
        values["progress_current"], values["progress_total"] = progress
    return Settle("succeed", claim, values)


def snooze(claim: Claim, outcome: Snooze) -> Settle:
    settle = _snooze(claim, outcome.seconds, outcome.reason, None)
    current, total = outcome.progress or (None, None)
    return Settle("snooze", claim, {**settle.values, "progress_current": current, "progress_total": total})


def storable(result: Any) -> bytes:
    """Serialise a result; accepts pydantic models and dataclasses."""
    try:
        document = orjson.dumps(result, default=_to_plain)
    except (TypeError, ValueError) as error:
        raise NotStorable(f"the result cannot be stored as JSON: {error}", code="result_not_storable") from error
    if len(document) > RESULT_BYTES_MAX:
        raise NotStorable(
            f"the result has {len(document)} bytes; the limit is {RESULT_BYTES_MAX}", code="result_too_large"
        )
    return document


def _to_plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _snooze(claim: Claim, seconds: float, reason: str | None, error_kind: str | None) -> Settle:
    values = {
        "delay_seconds": _limit_delay(seconds),
        "reason": reason and _text(reason, 1000),
        "error_kind": error_kind,
    }
    return Settle("snooze", claim, values)


def _limit_delay(seconds: float) -> float:
    """Limit a delay to a year, whatever a service requests; NaN means no delay."""
    return min(_DELAY_SECONDS_MAX, seconds) if seconds > 0 else 0.0


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _text(text: str, limit: int) -> str:
    return text[:limit].replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _is_connection_error(error: BaseException) -> bool:
    """Timeouts and lost connections of the usual clients, recognised by name so that we need not import them."""
    return any(kind.__name__ in _CONNECTION_ERRORS for kind in type(error).__mro__)


def _status_code(error: BaseException) -> int | None:
    """The HTTP status of an error, from the attributes that most client libraries use."""
    for owner in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


def _retry_after(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", error), "headers", None)
    try:
        return float(headers["Retry-After"]) if headers is not None else None
    except (KeyError, TypeError, ValueError):
        return None
