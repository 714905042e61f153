"""A client on a bare socket, for requests that no library would send."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import orjson


@dataclass(frozen=True)
class Answer:
    """What came back on the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found = orjson.loads(self.body)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"code", "message", "param", "type"}
        error: dict[str, Any] = found["error"]
        return error


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self.reader = reader
        self.writer = writer
        self.host = host

    @classmethod
    async def open(cls, url: str, *, limit: int = 2**16) -> Wire:
        address = urlsplit(url)
        assert address.hostname is not None
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=limit)
        return cls(reader, writer, address.netloc)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def begin(self, line: str, *headers: str) -> None:
        """The request line and these headers, with an end."""
        self.send("\r\n".join([f"{line} HTTP/1.1", f"Host: {self.host}", *headers, "", ""]).encode())

    async def ask(self, line: str, *headers: str) -> Answer:
        self.begin(line, *headers)
        return await self.answer()

    async def answer(self) -> Answer:
        head, *pairs = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = dict(pair.lower().split(": ", 1) for pair in pairs)
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(head.split()[1]), headers, body)

    async def is_ended(self) -> bool:
        """Waits for the end; what comes before it does not count."""
        try:
            while await self.reader.read(2**16):
                pass
        except OSError:
            pass
        return True
