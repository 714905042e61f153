"""A link to PostgreSQL that can fall silent: sockets stay open, no data arrives, and neither side gets an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Link:
    """A proxy between clients and the server; while it is silent, it forwards nothing."""

    def __init__(self, url: str) -> None:
        self.url = ""
        self._server_url = url
        self._speaks = asyncio.Event()
        self._speaks.set()
        self._calls: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Forward nothing until the block ends; new connections are accepted, but not answered."""
        self._speaks.clear()
        try:
            yield
        finally:
            self._speaks.set()

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.url = make_conninfo(self._server_url, host=host, port=port)
        return server

    async def close(self) -> None:
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.get_running_loop().create_task(self._connect_through(reader, writer))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _connect_through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            await self._speaks.wait()
            there, server = await self._connect()
            with contextlib.closing(server):
                ways = [
                    asyncio.ensure_future(self._pass_on(reader, server)),
                    asyncio.ensure_future(self._pass_on(there, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        to = conninfo_to_dict(self._server_url)
        host, port = str(to.get("host") or "127.0.0.1"), int(to.get("port") or 5432)
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            await self._speaks.wait()
            writer.write(piece)
            await writer.drain()


@contextlib.asynccontextmanager
async def silenceable(url: str) -> AsyncIterator[Link]:
    """A link to this server; clients connect to its `url`."""
    link = Link(url)
    server = await link.serve()
    try:
        yield link
    finally:
        server.close()
        await link.close()
