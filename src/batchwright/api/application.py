"""The ASGI application: routes, errors and guards around the services."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.api.access import Guard
from batchwright.api.errors import REQUEST_ID, answer_errors
from batchwright.api.services import Services
from batchwright.plugins import load
from batchwright.telemetry.metrics import Counts

_DESCRIPTION = """\
Durable jobs on PostgreSQL. Every list is paged, every error has the same shape, and objects of other tenants are 404.
Send an API key as `Authorization: Bearer bw_…`; on a loopback address no key is needed until the first one is created.
"""
_DOCUMENT = "/openapi.json"
_STREAM = "/v1/jobs/{id}/events/stream"
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
"""The content type of event streams. A dashboard page has one route both for its HTML and for its stream of updates."""


class _Api(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The framework's document, with our own answer to an invalid request."""
        document = super().openapi()
        for operation in (one for path in document["paths"].values() for one in path.values()):
            answers = operation["responses"]
            answers.pop("422", None)
            if "requestBody" in operation:
                answers["415"] = {**answers.get("400", {}), "description": "Unsupported Media Type"}
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
        return document


def application(services: Services) -> FastAPI:
    app = _Api(
        title="Batchwright",
        version=services.version,
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    for part in services.core.parts:
        for place in part.routers:
            _add_routes(app, load(place))
        for place in part.pages:
            _add_routes(app, load(place), is_documented=False)
    app.add_route(_DOCUMENT, _answer_document(app), include_in_schema=False)
    app.router.routes += [route for served in services.served for route in served.fallbacks]
    answer_errors(app)
    if services.settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.settings.allowed_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "Range"],
            expose_headers=["Idempotent-Replayed", "Retry-After", "X-Next-Cursor", "X-Request-Id"],
        )
    limits = [limit for served in services.served for limit in served.body_limits]
    app.add_middleware(Guard, settings=services.settings, body_limits=limits)
    streams = {_STREAM, *(path for served in services.served for path in served.streams)}
    app.add_middleware(Measured, counts=services.counts, streams=streams)
    return app


def _add_routes(app: FastAPI, router: APIRouter, *, is_documented: bool = True) -> None:
    """The router's own routes: `include_router` would rebuild each of them, which takes a second in all."""
    for route in router.routes:
        if isinstance(route, Route) and not is_documented:
            route.include_in_schema = False
        app.router.routes.append(route)


def _answer_document(app: FastAPI) -> Callable[[Request], Coroutine[None, None, Response]]:
    """The document as bytes, created once: requests for it need no key, and creating it takes long."""
    written: list[bytes] = []

    async def answer(_: Request) -> Response:
        if not written:
            written.append(orjson.dumps(app.openapi()))
        return Response(written[0], media_type="application/json")

    return answer


class Measured:
    """Counts requests and measures their duration, by route and status; adds the headers that every answer has."""

    def __init__(self, app: ASGIApp, counts: Counts, streams: Collection[str]) -> None:
        self._app = app
        self._counts = counts
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        id = scope[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
        status = 500
        is_stream = False

        async def note(message: Message) -> None:
            nonlocal is_stream, status
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = _EVENTS in message.get("headers", ())
                more = ((b"x-content-type-options", b"nosniff"), (b"x-request-id", id.encode()))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._counts.add("http_requests_total", 1, (route, scope["method"], str(status)))
            if route not in self._streams and not is_stream:
                self._counts.observe("http_request_seconds", time.monotonic() - began, (route,))
