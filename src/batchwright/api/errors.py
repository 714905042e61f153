"""One shape for every error that the server returns, and the one place where exceptions become answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from batchwright.errors import (
    BatchwrightError,
    Conflict,
    DatabaseUnavailable,
    DataRefused,
    Deadlock,
    Forbidden,
    InvalidInput,
    NotFound,
    PayloadInvalid,
    StorageFull,
    StorageUnavailable,
    TooLarge,
    Unauthorized,
    UnknownOperation,
)

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error"}
_CODES = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    409: "conflict",
    410: "gone",
    413: "too_large",
    415: "wrong_content_type",
    416: "range_not_satisfiable",
    421: "wrong_host",
    429: "too_many_requests",
    431: "headers_too_large",
    503: "unavailable",
}
_ANSWERS: tuple[tuple[type[BatchwrightError], int, str], ...] = (
    (UnknownOperation, 400, "unknown_operation"),
    (PayloadInvalid, 400, "payload_invalid"),
    (TooLarge, 413, "too_large"),
    (InvalidInput, 400, "invalid_request"),
    (DataRefused, 400, "invalid_request"),
    (Unauthorized, 401, "unauthorized"),
    (Forbidden, 403, "forbidden"),
    (NotFound, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (Deadlock, 503, "unavailable"),
    (DatabaseUnavailable, 503, "unavailable"),
    (StorageFull, 503, "storage_full"),
    (StorageUnavailable, 503, "storage_unavailable"),
)
_MESSAGES_503 = {
    "unavailable": "the database is unavailable; try again soon",
    "storage_full": "the disk or store for files is full; see the server's log",
    "storage_unavailable": "the file store is unavailable; try again soon",
}
_BY_STATUS = "by status"
REQUEST_ID = "batchwright.request_id"
"""The key in a request's scope of the id that the answer carries as x-request-id."""
# OpenAI's client retries a 409 by itself, which would only be refused again.
_REACTIONS = {401: {"WWW-Authenticate": "Bearer"}, 409: {"x-should-retry": "false"}, 503: {"Retry-After": "1"}}
_METHODS = ("DELETE", "GET", "POST", "PUT")
_UNION_PARTS = {"one", "many", "constrained-str", "constrained-int", "bool"}
_MESSAGE_CHARACTERS_MAX = 1_000


class Refusal(HTTPException):
    """An error in OpenAI's words, with the code and the parameter that its clients know."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.param = param


def unknown(param: str, hint: str = ".") -> Refusal:
    """An unknown field or query parameter; the error has the same code everywhere."""
    return Refusal(f"Unknown parameter: '{param}'{hint}", code="unknown_parameter", param=param)


def file_too_large(limit: int) -> str:
    """OpenAI's message, with the limit."""
    return f"File is too large. The limit of this server is {limit} bytes (batches.file_bytes_max)."


class ErrorDetail(BaseModel):
    """What is wrong."""

    code: str | None = Field(description="For programs: a stable word; null where OpenAI has none.")
    message: str = Field(description="For people: what was found, and what to do.")
    param: str | None = Field(description="The field or parameter that caused the error.")
    type: str = Field(description="The family of the error.")


class ErrorBody(BaseModel):
    """Every error has this shape."""

    error: ErrorDetail


Responses = dict[int | str, dict[str, Any]]


def documented(*statuses: int, others: Responses | None = None) -> Responses:
    """The errors of a route for the OpenAPI document, with those that every route can return; and its other answers."""
    every = {400, 401, 403, 413, 421, 503, *statuses}
    errors: Responses = {
        status: {"model": ErrorBody, "description": HTTPStatus(status).phrase} for status in sorted(every)
    }
    return {**errors, **(others or {})}


def error_answer(
    status: int,
    message: str,
    *,
    code: str | None = _BY_STATUS,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = _CODES.get(status, "error") if code == _BY_STATUS else code
    detail = {"code": code, "message": _brief(message), "param": param, "type": kind}
    return Response(
        orjson.dumps({"error": detail}),
        status_code=status,
        media_type="application/json",
        headers={**_REACTIONS.get(status, {}), **(headers or {})},
    )


def _brief(text: str) -> str:
    """Cut long messages: they quote the request, which may be a megabyte."""
    return text if len(text) <= _MESSAGE_CHARACTERS_MAX else text[:_MESSAGE_CHARACTERS_MAX] + "…"


def answer_errors(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(BatchwrightError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _hung_up)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(request: Request, error: Exception) -> Response:
    for kind, status, code in _ANSWERS:
        if isinstance(error, kind):
            message = _MESSAGES_503[code] if status == 503 else str(error)
            if status == 503:
                log.warning("%s %s: %s", request.method, request.url.path, error)
            return error_answer(status, message, code=code, param=getattr(error, "param", None))
    return await _unexpected(request, error)


def status_of(error: BatchwrightError) -> tuple[int, str] | None:
    """The status and the message of a known error, for pages; None for an internal error."""
    for kind, status, code in _ANSWERS:
        if isinstance(error, kind):
            return status, _MESSAGES_503[code] if status == 503 else str(error)
    return None


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        return error_answer(400, f"the body is not JSON: {found[0]['ctx']['error']}", param="body")
    param = _param(found[0])
    # For a value that may have several types, there is one message for each type.
    messages = [_message_of(one) for one in found if _param(one) == param]
    return error_answer(400, f"{param}: {'; or '.join(dict.fromkeys(messages))}", param=param)


def _message_of(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "string_pattern_mismatch":
        return "a NUL character cannot be stored"
    return str(problem["msg"]).removeprefix("Value error, ")


def _param(problem: Mapping[str, Any]) -> str:
    """The field's path in the request, or the part of the request that is missing."""
    place, *path = problem["loc"]
    return _brief(".".join(str(part) for part in path if part not in _UNION_PARTS) or str(place))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, Refusal):
        return error_answer(error.status_code, error.detail, code=error.code, param=error.param, headers=error.headers)
    message = str(error.detail)
    headers = dict(error.headers or {})
    if error.status_code in (404, 405) and message == HTTPStatus(error.status_code).phrase:
        message = f"there is no {request.method} {request.url.path} here; /openapi.json lists all routes"
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed(request))
    param = "body" if error.status_code in (413, 415) else None
    return error_answer(error.status_code, message, param=param, headers=headers)


def _allowed(request: Request) -> list[str]:
    """The methods of all routes with this path; the framework names only those of the first route."""

    def is_known(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in _METHODS if is_known(method)]


async def _hung_up(request: Request, _: Exception) -> Response:
    """The client has disconnected and cannot read the answer; the log records what happened to the request."""
    id = request.scope.get(REQUEST_ID, "")
    log.info("%s %s: the client disconnected before its body was complete (%s)", request.method, request.url.path, id)
    return error_answer(400, "the body was cut short", code="incomplete", param="body")


async def _unexpected(request: Request, error: Exception) -> Response:
    id = request.scope.get(REQUEST_ID, "")
    log.error("%s %s failed (%s)", request.method, request.url.path, id, exc_info=error)
    return error_answer(500, "an internal error occurred; see the server's log", code="internal_error")
