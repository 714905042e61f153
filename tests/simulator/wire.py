"""A client with plain sockets, which sees every byte."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"


def chat(content: str = "Hello!", model: str = "m", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


def request(body: Any, path: str = CHAT, method: str = "POST", **headers: str) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, body: Any, path: str = CHAT, method: str = "POST", **headers: str):
        self.writer.write(request(body, path, method, **headers))
        return await self.answer(method)

    async def answer(self, method: str = "POST"):
        """Status, headers and the body as its length has it."""
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            line, *rest = head.strip().split("\r\n")
            headers = dict(one.lower().split(": ", 1) for one in rest)
            length = 0 if method == "HEAD" else int(headers.get("content-length", 0))
            return int(line.split()[1]), headers, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """Read everything until the server closes the connection."""
        async with asyncio.timeout(10):
            return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


@asynccontextmanager
async def wire(url: str):
    where = urlsplit(url)
    connection = Wire(*await asyncio.open_connection(where.hostname, where.port))
    try:
        yield connection
    finally:
        await connection.close()


async def ask(url: str, body: Any, path: str = CHAT, method: str = "POST", **headers: str):
    """One request on a connection of its own; the body parsed."""
    async with wire(url) as connection:
        status, found, raw = await connection.ask(body, path, method, **headers)
        return status, found, json.loads(raw)


async def until(condition) -> None:
    """Run the event loop until the condition is met, for a limited number of turns."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
