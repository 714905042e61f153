"""One shape for every error that leaves the server, and the one place where exceptions become answers."""

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
from starlette.responses import Response

from windlass.errors import (
    Conflict,
    DatabaseUnavailable,
    DataRefused,
    InvalidInput,
    NotFound,
    PayloadInvalid,
    TooLarge,
    UnknownOperation,
    WindlassError,
)

log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    421: "invalid_request_error",
}
_CODES = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    421: "wrong_host",
    503: "unavailable",
}
_ANSWERS: tuple[tuple[type[WindlassError], int, str], ...] = (
    (UnknownOperation, 400, "unknown_operation"),
    (PayloadInvalid, 400, "payload_invalid"),
    (TooLarge, 413, "too_large"),
    (InvalidInput, 400, "invalid_request"),
    (DataRefused, 400, "invalid_request"),
    (NotFound, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (DatabaseUnavailable, 503, "unavailable"),
)


class ErrorDetail(BaseModel):
    """What was wrong."""

    code: str = Field(description="For programs: a word that does not change.")
    message: str = Field(description="For people: what was found, and what to do.")
    param: str | None = Field(description="The field or parameter that it is about.")
    type: str = Field(description="The family of the error.")


class ErrorBody(BaseModel):
    """Every error has this shape."""

    error: ErrorDetail


Responses = dict[int | str, dict[str, Any]]


def documented(*statuses: int, others: Responses | None = None) -> Responses:
    """The errors of a route, for the OpenAPI document, with those that every route can give; and its other answers."""
    every = {400, 401, 403, 413, 421, 503, *statuses}
    errors: Responses = {
        status: {"model": ErrorBody, "description": HTTPStatus(status).phrase} for status in sorted(every)
    }
    return {**errors, **(others or {})}


def error_answer(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    detail = {"code": code or _CODES.get(status, "error"), "message": message, "param": param, "type": kind}
    return Response(
        orjson.dumps({"error": detail}), status_code=status, media_type="application/json", headers=dict(headers or {})
    )


def answer_errors(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(WindlassError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(request: Request, error: Exception) -> Response:
    for kind, status, code in _ANSWERS:
        if isinstance(error, kind):
            headers = {"Retry-After": "1"} if status == 503 else None
            message = "the database is away; try again soon" if status == 503 else str(error)
            if status == 503:
                log.warning("%s %s: %s", request.method, request.url.path, error)
            return error_answer(status, message, code=code, param=getattr(error, "param", None), headers=headers)
    return await _unexpected(request, error)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    message = first["msg"] if first["type"] != "json_invalid" else f"the body is not JSON: {first['msg']}"
    param = None if first["type"] == "json_invalid" else ".".join(where) or None
    return error_answer(400, f"{param}: {message}" if param else message, param=param)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in (404, 405) and message == HTTPStatus(error.status_code).phrase:
        message = f"there is no {request.method} {request.url.path} here; /openapi.json lists what there is"
    return error_answer(error.status_code, message, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_answer(500, "something went wrong here; the server's log says what", code="internal_error")
