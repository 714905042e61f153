"""How requests are read: known parameters only, and JSON by a parser that knows neither NaN nor half a character."""

from __future__ import annotations

import difflib
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable
from contextlib import aclosing, suppress
from email.message import Message
from typing import Any

import orjson
from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from batchwright.api.errors import unknown


class _OrjsonRequest(Request):
    async def json(self) -> Any:
        return orjson.loads(await self.body())


class OrjsonRoute(APIRoute):
    """A route whose request bodies are read by orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = _query_names(self.dependant)

        async def strictly(request: Request) -> Response:
            request = _OrjsonRequest(request.scope, request.receive)
            _refuse_unknown(request.query_params, known)
            if self.body_field is not None and not _is_json(request) and await request.body():
                raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
            return await handle(request)

        return strictly


class Unfinished(Exception):
    """A stream cannot go on, and must not be taken for a whole one: its connection is cut."""


class Streamed(StreamingResponse):
    """Lets go of what it reads from as soon as the client has left, also in the midst of sending."""

    body_iterator: AsyncGenerator[bytes, None]

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            with suppress(Unfinished):  # without the message that ends an answer, the server hangs up
                await super().stream_response(send)


def _query_names(dependant: Dependant) -> set[str]:
    """The query parameters of a route and of what it depends on."""
    below = (_query_names(one) for one in dependant.dependencies)
    return {param.alias for param in dependant.query_params}.union(*below)


def _refuse_unknown(given: Iterable[str], known: Collection[str]) -> None:
    """A filter that nobody knows would match everything, and that is worse than an error."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(sorted(known)) or 'none'}"
            raise unknown(name[:100], f"; {hint}")


def _is_json(request: Request) -> bool:
    """As the framework sees it, which takes any other body for a piece of text."""
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
