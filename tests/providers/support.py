"""One adapter with a raw server and scripted answers, for answers that the contract server never gives."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

from batchwright.inference.http import Http
from batchwright.providers.contract import Input, Request
from batchwright.providers.registry import find_adapters, make_adapter
from batchwright.providers.tools import AdapterTools
from tests.inference.server import RawServer, answer


class Told:
    """An adapter, and its scripted server."""

    def __init__(self, adapter: Any, server: RawServer, stored: dict[str, bytes]) -> None:
        self.adapter = adapter
        self.server = server
        self.stored = stored

    def say(self, path: str, document: Any, status: str = "200 OK", *headers: str) -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.server.replies[path] = answer(body, status, *headers)

    def request(self, *lines: Any, key: str = "bw-1", model: str | None = "m", **options: Any) -> Request:
        self.stored["f"] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        input = Input(id="i", uri="file:f", filename="in.jsonl", bytes=len(self.stored["f"]))
        return Request(key=key, task_type="completion", model=model, inputs=[input], options=options)

    def chat(self, *ids: str, **options: Any) -> Request:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        return self.request(*({"custom_id": id, "url": "/v1/chat/completions", "body": body} for id in ids), **options)

    @property
    def sent(self) -> list[tuple[str, Any]]:
        """Method and path of each request, and its JSON."""
        return [
            (line.removesuffix(" HTTP/1.1"), json.loads(body) if body.startswith(b"{") else body)
            for line, body in zip(self.server.lines, self.server.bodies, strict=True)
        ]


@asynccontextmanager
async def telling(name: str, **settings: Any) -> Any:
    stored: dict[str, bytes] = {}

    async def read(id: str) -> Any:
        yield stored[id]

    async with RawServer() as server, Http() as http:
        tools = AdapterTools(http, open_stored=read, environment={"KEY": "sk-1"})
        written = {"base_url": server.url, **({} if name == "vertex" else {"api_key_env": "KEY"}), **settings}
        yield Told(make_adapter(find_adapters(), name, written, tools), server, stored)
