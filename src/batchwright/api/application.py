"""The ASGI application: routes, errors and guards around the services."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.api import batches, files, jobs, models, schedules, system, uploads
from batchwright.api.access import Guard
from batchwright.api.errors import REQUEST_ID, answer_errors
from batchwright.api.services import Services
from batchwright.telemetry.metrics import Counts

_DESCRIPTION = """\
Durable jobs on PostgreSQL. Every list is paged, every error has the same shape, and objects of other tenants are 404.
Send an API key as `Authorization: Bearer bw_…`; on a loopback address none is needed until the first one is made.
"""
_STREAMS = {"/v1/jobs/{id}/events/stream", "/v1/batches/{id}/results"}
ROUTERS = (files.router, uploads.router, batches.router, models.router, jobs.router, schedules.router, system.router)


class _Api(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The framework's document, but with our own answer to an invalid request."""
        document = super().openapi()
        for operation in (one for path in document["paths"].values() for one in path.values()):
            answers = operation["responses"]
            answers.pop("422", None)
            if "requestBody" in operation:
                answers["415"] = {**answers["400"], "description": "Unsupported Media Type"}
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
        return document


def application(services: Services) -> FastAPI:
    app = _Api(
        title="Batchwright",
        version=services.version,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    for part in ROUTERS:
        app.include_router(part)
    answer_errors(app)
    if services.settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.settings.allowed_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "Range"],
            expose_headers=["Idempotent-Replayed", "Retry-After", "X-Next-Cursor", "X-Request-Id"],
        )
    app.add_middleware(Guard, settings=services.settings, file_bytes_max=services.batch_settings.file_bytes_max)
    app.add_middleware(Measured, counts=services.counts)
    return app


class Measured:
    """Counts requests and their times, by route and status; adds the headers that every answer has."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        id = scope[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
        status = 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = ((b"x-content-type-options", b"nosniff"), (b"x-request-id", id.encode()))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._counts.add("http_requests_total", 1, (route, scope["method"], str(status)))
            if route not in _STREAMS:
                self._counts.observe("http_request_seconds", time.monotonic() - began, (route,))
