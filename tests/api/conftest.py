"""An API on the test's own database, called in-process, and keys for any client that a test needs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from batchwright import AsyncBatchwright, Context, Done, NewJob, Wait, operation
from batchwright.access.gate import Gate
from batchwright.access.keys import Scope
from batchwright.access.settings import ApiSettings
from batchwright.api.access import Needs
from batchwright.api.application import application
from batchwright.api.services import Services
from batchwright.api.streams import StreamPlaces
from batchwright.batches.part import BatchesPart
from batchwright.batches.settings import BatchSettings
from batchwright.errors import Fatal, Transient
from batchwright.files.store import File, NewFile, new_file_id, object_key
from batchwright.inference.settings import GatewaySettings
from batchwright.settings import Settings
from batchwright.storage import StorageSettings
from batchwright.testing import drain
from tests.support import DATABASE, make_settings, raw

HOST = "http://localhost:8765"
GATEWAY = GatewaySettings(url="http://127.0.0.1:9")
"""The URL of a gateway that does not answer: batches are accepted, but nothing is sent."""


@operation("greet")
async def greet(name: str) -> str:
    return f"Hello, {name}!"


@operation("echo")
async def echo(value: Any = None) -> Any:
    return value


@operation("broken", max_attempts=1)
async def broken(code: str = "broken", n: int = 0) -> None:
    raise Fatal("it broke", code=code)


@operation("flaky", max_attempts=1)
async def flaky() -> None:
    raise Transient("not now", code="busy")


@operation("family")
async def family(children: int = 2) -> Wait:
    return Wait([NewJob("echo", {"value": n}) for n in range(children)])


@operation("chain")
async def chain() -> Done:
    return Done("first", then=[NewJob("echo", {"value": "second"}, delay_seconds=3600)])


@operation("odd", max_attempts=1)
async def odd(ctx: Context) -> None:
    ctx.emit("odd.cost", cost=Decimal("NaN"))
    raise Fatal("not there", code=404)


OPERATIONS = [greet, echo, broken, flaky, family, chain, odd]


class Api:
    """A running API and its services."""

    def __init__(self, batchwright: AsyncBatchwright, services: Services) -> None:
        self.batchwright = batchwright
        self.services = services
        self.app = application(services)
        self.queue = batchwright.queue
        self._stack = contextlib.AsyncExitStack()
        self._doors: dict[str, FastAPI] = {}

    async def client(self, app: FastAPI | None = None, url: str = HOST, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=app or self.app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=30)
        return await self._stack.enter_async_context(client)

    async def holder(self, *scopes: Scope | str, tenant: str = "default", **options: Any) -> httpx.AsyncClient:
        """A client with a key of its own."""
        key = await self.batchwright.keys.create("test", tenant=tenant, scopes=scopes or tuple(Scope), **options)
        return await self.client(Authorization=f"Bearer {key.secret}")

    def with_settings(self, **settings: Any) -> FastAPI:
        """The same services behind another HTTP application."""
        name = repr(settings)
        if name not in self._doors:
            self._doors[name] = self._door(settings)
        return self._doors[name]

    def _door(self, settings: dict[str, Any]) -> FastAPI:
        changed = dataclasses.replace(self.services.settings, **settings)
        gate = Gate(self.batchwright.keys, is_loopback=changed.is_loopback)
        places = StreamPlaces(changed)
        return application(dataclasses.replace(self.services, settings=changed, gate=gate, stream_places=places))

    def service(self, kind: type[Any]) -> Any:
        """What a part has brought for its routes."""
        return next(one.services for one in self.services.served if isinstance(one.services, kind))

    async def drain(self) -> int:
        return await drain(self.batchwright)

    async def sql(self, statement: str, **params: Any) -> list[Any]:
        return await raw(self.queue, statement, **params)

    async def jobs(self) -> int:
        ((n,),) = await self.sql("SELECT count(*) FROM batchwright.job")
        return int(n)

    async def close(self) -> None:
        await self._stack.aclose()


def configured(url: str, folder: Path, batches: BatchSettings | None = None, **settings: Any) -> Settings:
    """Settings of a server that keeps its files in this folder."""
    settings.setdefault("api", ApiSettings(port=0))
    return make_settings(
        database=dataclasses.replace(DATABASE, url=url, folder=str(folder)),
        storage=StorageSettings(url=(folder / "files").as_uri()),
        batches=dataclasses.replace(batches or BatchSettings(), work_dir=folder / "work"),
        **settings,
    )


@contextlib.asynccontextmanager
async def serving(url: str, *, parts: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Api]:
    """An API with these API settings, and with these tables of other settings."""
    with tempfile.TemporaryDirectory(prefix="batchwright-api-") as folder:
        given = configured(url, Path(folder), api=ApiSettings(port=0, **settings), **(parts or {}))
        async with AsyncBatchwright(settings=given, operations=OPERATIONS) as batchwright:
            server = await batchwright.server()
            api = Api(batchwright, server._services)
            try:
                yield api
            finally:
                await api.close()
                await server.close()


async def stored_file(
    batchwright: AsyncBatchwright,
    data: bytes = b"{}\n",
    *,
    tenant: str = "default",
    purpose: str = "batch",
    **more: Any,
) -> File:
    """A file as an upload leaves it."""
    id = new_file_id()
    stored = await batchwright.store.put(object_key(id), data)
    new = NewFile(id=id, tenant=tenant, purpose=purpose, filename="some.jsonl", stored=stored, **more)
    file, _ = await batchwright.part(BatchesPart).files.add(new)
    return file


@pytest.fixture
async def api(database_url: str) -> AsyncIterator[Api]:
    async with serving(database_url) as api:
        yield api


@pytest.fixture
async def http(api: Api) -> httpx.AsyncClient:
    """A client without a key, which may do everything until a key is created."""
    return await api.client()


def routes(app: FastAPI) -> list[APIRoute]:
    """Every route of the API, also those of included routers; the OpenAPI document has just as many."""
    found: list[APIRoute] = []
    waiting = list(app.routes)
    while waiting:
        route = waiting.pop()
        if isinstance(route, APIRoute) and route.include_in_schema:  # pages for browsers are not in the document
            found.append(route)
        elif router := getattr(route, "original_router", None):
            waiting += router.routes
    documented = {(path, method.upper()) for path, one in app.openapi()["paths"].items() for method in one}
    assert {(route.path_format, method) for route in found for method in route.methods} == documented
    return found


def needed_scope(route: APIRoute) -> Scope | None:
    scopes = [found.call.scope for found in route.dependant.dependencies if isinstance(found.call, Needs)]
    assert len(scopes) <= 1
    return scopes[0] if scopes else None


def fails(answer: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> str:
    """Check that the answer is this error, in the common format of errors; return its message."""
    assert answer.status_code == status, (answer.status_code, answer.text[:500])
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message", "param", "type"}
    assert body["error"]["message"]
    if code is not None:
        assert body["error"]["code"] == code
    if param is not None:
        assert body["error"]["param"] == param
    return str(body["error"]["message"])


async def gathered(*waiting: Any) -> list[Any]:
    return list(await asyncio.gather(*waiting))
