"""A whole Batchwright on a loopback address, with a simulated model server, used by the official clients.

It runs in a separate thread, because the blocking client must not block the server's thread.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from batchwright.access.keys import DEFAULT_SCOPES
from batchwright.simulator import Profile, SimulatorSettings
from tests.batches.stage import Stage, staged
from tests.conftest import database

T = TypeVar("T")
SLOW = "slow"
"""A model that writes a token in ten seconds; all others answer at once."""
SIMULATOR = SimulatorSettings(
    models={SLOW: Profile(decode_rate=0.1, max_running=1000)}, any_model=Profile(max_running=100_000)
)
FILE_BYTES_MAX = 12 * 1024 * 1024


class Running:
    """A server with a worker."""

    def __init__(self, database_url: str, folder: Path) -> None:
        self.url = ""
        self.stage: Stage
        self._database_url = database_url
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="conformance-server", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60), "the server did not start in time"
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's event loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def secret(self, tenant: str, *scopes: str) -> str:
        made = self.call(self.stage.batchwright.keys.create("test", tenant=tenant, scopes=scopes or DEFAULT_SCOPES))
        return made.secret

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        batches = {"cancel_grace_seconds": 0.5, "checkpoint_seconds": 0.1, "file_bytes_max": FILE_BYTES_MAX}
        parts = {"api": {"port": 0}, "batches": batches}
        async with staged(self._database_url, self._folder, simulator=SIMULATOR, **parts) as self.stage:
            server = await self.stage.batchwright.server()
            server.start()
            await self.stage.work().started.wait()
            self.url = f"{server.url}/v1"
            self._ready.set()
            await self._over.wait()
            await server.close()


@pytest.fixture(scope="module")
def running(server: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests; each test is a separate tenant."""
    with database(server, f"batchwright_conformance_{uuid.uuid4().hex[:12]}", template) as url:
        running = Running(url, tmp_path_factory.mktemp("batchwright"))
        running.start()
        yield running
        running.stop()


@pytest.fixture
def tenant() -> str:
    return uuid.uuid4().hex


class Client:
    """One of the two official clients, called in the same way; where they differ there are two tests."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.files = raw.files
        self.batches = raw.batches
        self.is_async = isinstance(raw, openai.AsyncOpenAI)

    async def __call__(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.is_async:
            return await method(*args, **options)
        return await asyncio.to_thread(method, *args, **options)

    async def all(self, method: Callable[..., Any], **options: Any) -> list[Any]:
        """All items of a list, over the pages that the client requests by itself."""
        if self.is_async:
            return [one async for one in method(**options)]
        return await asyncio.to_thread(lambda: list(method(**options)))

    async def upload(self, data: bytes, **options: Any) -> Any:
        return await self(self.files.create, file=("in.jsonl", data), **{"purpose": "batch", **options})

    async def create(self, data: bytes, **options: Any) -> Any:
        """A batch of chat completions from these lines."""
        wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
        return await self(self.batches.create, input_file_id=(await self.upload(data)).id, **wanted)

    async def ended(self, id: str) -> Any:
        """The batch when it has ended; bounded by the test's timeout."""
        while (batch := await self(self.batches.retrieve, id)).status not in ENDED:
            await asyncio.sleep(0.05)
        return batch

    async def text(self, file_id: str) -> str:
        content = await self(self.files.content, file_id)
        return str(content.text)


ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, running: Running, tenant: str) -> AsyncIterator[Client]:
    async with official(request.param, running, await asyncio.to_thread(running.secret, tenant)) as raw:
        yield Client(raw)


class official:
    """One of the two clients, closed at the end."""

    def __init__(self, kind: str, running: Running, secret: str, **options: Any) -> None:
        make = openai.AsyncOpenAI if kind == "async" else openai.OpenAI
        self._raw: Any = make(base_url=running.url, api_key=secret, timeout=60, **options)

    async def __aenter__(self) -> Any:
        return self._raw

    async def __aexit__(self, *_: object) -> None:
        if isinstance(self._raw, openai.AsyncOpenAI):
            await self._raw.close()
        else:
            await asyncio.to_thread(self._raw.close)
