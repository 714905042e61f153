"""A server on a free port, and a client of event streams on a plain socket."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

import orjson

from batchwright import AsyncBatchwright
from batchwright.settings import load_settings


@contextlib.asynccontextmanager
async def serving(database_url, *operations, **settings):
    """A client and its server; both are closed at the end of the block."""
    flags = {"database": {"url": database_url}, **settings}
    flags["api"] = {"port": 0, **settings.get("api", {})}
    async with AsyncBatchwright(operations=operations, settings=load_settings(flags, environment={})) as batchwright:
        server = await batchwright.server()
        server.start()
        try:
            yield batchwright, server
        finally:
            await server.close()


class Message(dict):
    """The fields of one server-sent message; a comment has the empty name."""

    @property
    def json(self):
        return orjson.loads(self["data"])


class Stream:
    """Reads a stream message by message; `last_id` is what a browser would send when it comes back."""

    def __init__(self, reader, writer, status, headers):
        self.status = status
        self.headers = headers
        self.last_id = None
        self._reader = reader
        self._writer = writer
        self._text = b""

    @classmethod
    async def open(cls, url, id, *, last_id=None, query="", limit=2**16, **headers):
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=limit)
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        lines = [f"GET /v1/jobs/{id}/events/stream{query} HTTP/1.1", f"Host: {address.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        status, *pairs = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        found = dict(pair.lower().split(": ", 1) for pair in pairs)
        return cls(reader, writer, int(status.split()[1]), found)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def next(self):
        """The next message; None when the server has ended the stream."""
        while b"\n\n" not in self._text:
            if not (chunk := await self.chunk()):
                assert not self._text, "the stream ended in the middle of a message"
                return None
            self._text += chunk
        message, _, self._text = self._text.partition(b"\n\n")
        fields = Message()
        for line in message.decode().splitlines():  # like clients that split text, also at U+2028
            name, _, value = line.partition(":")
            assert name not in fields
            fields[name] = value.removeprefix(" ")
        self.last_id = fields.get("id", self.last_id)
        return fields

    async def chunk(self):
        """A piece of the body as the server wrote it; empty at its end, also when the connection was cut."""
        try:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            return (await self._reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def events(self):
        """The events until the stream ends, and the name of its last message."""
        found, last = [], None
        while (message := await self.next()) is not None:
            if "id" in message:
                found.append(message.json)
            last = message.get("event", last)
        return found, last

    async def body(self):
        """Read an answer that is not a stream."""
        return await self._reader.readexactly(int(self.headers.get("content-length", 0)))

    async def close(self):
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
