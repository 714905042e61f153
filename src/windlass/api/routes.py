"""How bodies are read: strict JSON, by a parser that knows neither NaN nor half a character."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response


class _OrjsonRequest(Request):
    async def json(self) -> Any:
        return orjson.loads(await self.body())


class OrjsonRoute(APIRoute):
    """A route whose request bodies are read by orjson."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_OrjsonRequest(request.scope, request.receive))

        return strictly
