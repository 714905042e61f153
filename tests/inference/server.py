"""A raw HTTP server on the loopback that answers by path, and records requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Self


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class RawServer:
    """`reply` decides: bytes are sent unchanged, None sends nothing, and empty bytes close the connection."""

    def __init__(self) -> None:
        self.heads: list[dict[str, str]] = []
        self.lines: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self._open: dict[asyncio.Task, asyncio.StreamWriter] = {}
        self.replies: dict[str, bytes | None] = {}
        self.then_close: set[str] = set()
        self.arrived = asyncio.Event()
        self.gone: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self, ssl=None) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error) -> None:
        """Ends every connection before the loop does."""
        self._server.close()
        for task, writer in self._open.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open[asyncio.current_task()] = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                path = await self._request(reader)
                self.arrived.set()
                reply = self.replies.get(path, answer(b"{}"))
                if reply is not None and not reply:
                    writer.transport.abort()
                    return
                if reply is not None:
                    writer.write(reply)
                    await writer.drain()
                if path in self.then_close:
                    break
                if reply is None or path == "/half":
                    await reader.read(1)
                    break
        if not self.gone.done():
            self.gone.set_result(time.monotonic())
        writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> str:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:])
        self.lines.append(head[0])
        self.heads.append({name.lower(): value for name, value in headers.items()})
        self.bodies.append(await reader.readexactly(int(headers.get("content-length", "0"))))
        return head[0].split()[1]
