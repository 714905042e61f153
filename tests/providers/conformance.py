"""What the conformance suite needs for each provider, and one adapter with the contract server."""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from obstore.store import GCSStore

from batchwright.inference.http import MIB, Http
from batchwright.providers.buckets import Bucket, open_bucket
from batchwright.providers.contract import Adapter, Input, Job, Phase, Request, Result, Staged, Status
from batchwright.providers.registry import find_adapters, make_adapter
from batchwright.providers.tools import AdapterTools
from batchwright.simulator.providers import Server
from batchwright.storage.remote import Remote

SECRET = "bw-test-secret-0123456789"
VARIABLE = "BATCHWRIGHT_TEST_PROVIDER_KEY"
KEY = "bw-01k2h5q8tn3v7w9xyz-a1"
FAIL = "fail"
"""An item with this text fails at the server."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The setup of one provider, and what it cannot do."""

    name: str
    """The name of the adapter, and of the protocol on the contract server."""
    settings: Callable[[World], Mapping[str, Any]]
    """The settings as a user would write them; the key is in the environment variable `VARIABLE`."""
    make_request: Callable[[World, str, Sequence[str]], Request]
    """A request with this key; each item is `ok` or `FAIL`."""
    id: str = ""
    """Shown in the names of tests, instead of the name."""
    items_max: int = 100
    """The number of items in one job."""
    result_key: Callable[[int], str] = str
    """Returns the key of the result of the n-th item."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Tests that do not apply, by their names, and why."""
    routes: Mapping[str, str] = field(default_factory=dict)
    """Names of the server's routes where they are not `create`, `get`, `list`, `cancel`."""

    def route(self, name: str) -> str:
        return f"{self.name}.{self.routes.get(name, name)}"

    def __str__(self) -> str:
        return self.id or self.name


ALIKE = {"groq", "together", "azure_openai", "vertex", "mistral", "google"}
"""Providers with nearly the protocol of another one; only `make test-thorough` tests them."""


def all_cases() -> list[Case]:
    from tests.providers import cases

    found: list[Case] = []
    for module in pkgutil.iter_modules(cases.__path__):
        found += importlib.import_module(f"{cases.__name__}.{module.name}").CASES
    return found


_adapters = functools.cache(find_adapters)


class World:
    """The contract server, and adapter tools that use the server's clock."""

    def __init__(self, case: Case, server: Server, http: Http, folder: Any) -> None:
        self.case = case
        self.server = server
        self.stored: dict[str, bytes] = {}
        self.environment = {VARIABLE: SECRET}
        self.folder = folder
        self.tools = AdapterTools(
            http,
            open_stored=self._open,
            bucket=self._bucket,
            environment=self.environment,
            may_fetch_private=True,
            now=lambda: datetime.fromtimestamp(server.clock.now(), UTC),
        )
        self.adapter = self.make()

    def make(self, **settings: Any) -> Adapter:
        return make_adapter(_adapters(), self.case.name, {**self.case.settings(self), **settings}, self.tools)

    def request(self, *items: str, key: str = KEY) -> Request:
        wanted = (items or ("ok", "ok", "ok"))[: self.case.items_max]
        return self.case.make_request(self, key, wanted)

    def store(self, id: str, data: bytes, filename: str) -> Input:
        """A stored file as an input."""
        self.stored[id] = data
        return Input(id=id, uri=f"file:{id}", filename=filename, bytes=len(data))

    def _bucket(self, root: str) -> Bucket:
        """Google's buckets are the server's; others are folders."""
        if not root.startswith("gs://"):
            return open_bucket(f"file://{self.folder}/{root.replace('://', '/')}")
        account = {"gcs_base_url": self.server.urls["gcs"], "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        store = GCSStore(
            root.removeprefix("gs://"), service_account_key=json.dumps(account), client_options={"allow_http": True}
        )
        return Bucket(Remote(store, part_bytes=8 * MIB, name=root))

    async def _open(self, id: str) -> Any:
        yield self.stored[id]

    async def stage(self, request: Request, staged: Staged | None = None) -> Staged:
        last = staged or {}
        async for committed in self.adapter.stage(request, last):
            json.dumps(committed)
            last = committed
        return last

    async def submit(self, request: Request) -> tuple[Job, Staged]:
        staged = await self.stage(request)
        return await self.adapter.submit(request, staged), staged

    async def finish(self, job: Job) -> Status:
        """Let the job's time pass, and poll."""
        self.server.advance(self.server.settings.queue_seconds + self.server.settings.run_seconds)
        return await self.adapter.poll(job)

    async def results(self, request: Request, job: Job, status: Status) -> list[Result]:
        return [result async for result in self.adapter.results(request, job, status)]

    async def run(self, *items: str) -> tuple[Request, Job, Status, list[Result]]:
        request = self.request(*items)
        job, _ = await self.submit(request)
        status = await self.finish(job)
        assert status.phase is Phase.ENDED
        return request, job, status, await self.results(request, job, status)

    @property
    def creations(self) -> int:
        """Requests that cost money."""
        return len(self.server.requests(self.case.route("create")))

    def keys(self, count: int) -> list[str]:
        return [self.case.result_key(n) for n in range(min(count, self.case.items_max))]


def chat_request(world: World, key: str, items: Sequence[str], **options: Any) -> Request:
    """A completion request of lines in OpenAI's format."""
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "test-model",
                "messages": [{"role": "user", "content": "[[fail:400]]" if item == FAIL else f"say {n}"}],
                "max_tokens": 16,
            },
        }
        for n, item in enumerate(items)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return Request(
        key=key,
        task_type="completion",
        model="test-model",
        inputs=[world.store(f"file-{key}", data, "in.jsonl")],
        options=options,
    )
