"""Reads requests: only known parameters, and JSON by a parser that accepts neither NaN nor lone surrogates."""

from __future__ import annotations

import difflib
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable
from contextlib import aclosing, suppress
from email.message import Message
from typing import Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from batchwright.api.access import Needs
from batchwright.api.bodies import parse
from batchwright.api.errors import unknown

_CONTENT_TYPE_CHARACTERS_MAX = 1_000


class _OrjsonRequest(Request):
    async def json(self) -> Any:
        return await parse(await self.body())


class OrjsonRoute(APIRoute):
    """A route that reads request bodies with orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = _query_names(self.dependant)
        needs = [one.call for one in self.dependant.dependencies if isinstance(one.call, Needs)]

        async def strictly(request: Request) -> Response:
            request = _OrjsonRequest(request.scope, request.receive)
            for one in needs:
                await one.check(request)
            _refuse_unknown(request.query_params, known)
            # The framework would also read the body, and report a client that hangs up as one that sends invalid JSON.
            if self.body_field is not None and await request.body() and not _is_json(request):
                raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
            return await handle(request)

        return strictly


class Unfinished(Exception):
    """A stream cannot continue; its connection is cut, so that the client does not take it for complete."""


class Streamed(StreamingResponse):
    """Releases its source as soon as the client disconnects, even in the middle of sending."""

    body_iterator: AsyncGenerator[bytes, None]

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            with suppress(Unfinished):  # without the final message of an answer, the server hangs up
                await super().stream_response(send)


def _query_names(dependant: Dependant) -> set[str]:
    """The query parameters of a route and of its dependencies."""
    below = (_query_names(one) for one in dependant.dependencies)
    return {param.alias for param in dependant.query_params}.union(*below)


def _refuse_unknown(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse unknown filters: ignoring one would match everything, which is worse than an error."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name[:100], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(sorted(known)) or 'none'}"
            raise unknown(name[:100], f"; {hint}")


def _is_json(request: Request) -> bool:
    """Whether the framework reads the body as JSON; it treats any other body as text."""
    given = request.headers.get("content-type", "")
    header = Message()
    header["content-type"] = given if len(given) <= _CONTENT_TYPE_CHARACTERS_MAX else ""
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
