"""A database that is far away: a TCP proxy on loopback that delays what goes through it, in both directions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from psycopg.conninfo import conninfo_to_dict, make_conninfo


@contextlib.asynccontextmanager
async def far_away(url: str, seconds: float) -> AsyncIterator[str]:
    """The URL of the same database, where each direction takes this long."""
    parts = conninfo_to_dict(url)
    relays: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await _connect(str(parts["host"]), str(parts.get("port") or "5432"))
        for source, target in ((reader, there[1]), (there[0], writer)):
            relay = asyncio.create_task(_relay(source, target, seconds))
            relays.add(relay)
            relay.add_done_callback(relays.discard)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield make_conninfo(url, host="127.0.0.1", port=port)
    finally:
        server.close()
        for relay in list(relays):
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _connect(host: str, port: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if host.startswith("/"):
        return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
    return await asyncio.open_connection(host, int(port))


async def _relay(source: asyncio.StreamReader, target: asyncio.StreamWriter, seconds: float) -> None:
    """Delay each piece by the same time, however many are in transit."""
    sent: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    async def deliver() -> None:
        while True:
            due, piece = await sent.get()
            await asyncio.sleep(due - loop.time())
            if not piece:
                target.close()
                return
            target.write(piece)

    delivering = asyncio.create_task(deliver())
    try:
        piece = b"anything"
        while piece:
            try:
                piece = await source.read(65536)
            except ConnectionError:
                piece = b""
            sent.put_nowait((loop.time() + seconds, piece))
        await delivering
    finally:
        delivering.cancel()
        target.close()
