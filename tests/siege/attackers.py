"""The attackers, in a separate process: `python -m tests.siege.attackers`, with its orders as JSON on standard input.

Each attack is repeated until the time is over, also after it was refused or cut off. At the end, the process prints
what it did and the answers that it got. It ends by itself, and also when its parent has exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass

import orjson

_NICE = 5
"""Real attackers have their own machines, so here they must leave the processors to the server."""
_PAUSE_SECONDS = 0.05
_RETRY_SECONDS = 5.0
_PIECE = 64 * 1024
_PILE = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the attackers do, and their number."""

    port: int
    seconds: float
    key: str
    """A key that may read and submit."""
    job: str
    """A job whose events are followed."""
    bodies: int
    body_bytes: int
    headers: int
    header_bytes: int
    halves: int
    streams: int
    slow: int
    hostile: int
    piles: int


class Attack:
    """All attackers, and the answers that they got."""

    def __init__(self, orders: Orders) -> None:
        self.seen: Counter[str] = Counter()
        self._orders = orders
        self._until = time.monotonic() + orders.seconds
        self._bodies = b"[]," * (_PIECE // 3)
        self._headers = b"a: b\r\n" * (_PIECE // 6)

    async def run(self) -> None:
        orders = self._orders
        parts: list[tuple[int, Callable[[], Awaitable[None]], float]] = [
            (orders.bodies, self.send_body, _PAUSE_SECONDS),
            (orders.headers, self.send_headers, _PAUSE_SECONDS),
            (orders.headers, self.send_long_header, _PAUSE_SECONDS),
            (orders.hostile, self.send_content_type, _PAUSE_SECONDS),
            (orders.slow, self.upload_slowly, 1.0),
            (orders.streams, self.follow, _RETRY_SECONDS),
            (orders.halves, self.send_half, 1.0),
            (orders.piles, self.send_pile, _PAUSE_SECONDS),
            (orders.piles, self.send_unread, 1.0),
        ]
        tasks = [asyncio.create_task(self._repeat(step, pause)) for n, step, pause in parts for _ in range(n)]
        await asyncio.sleep(orders.seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, step: Callable[[], Awaitable[None]], pause: float) -> None:
        while time.monotonic() < self._until:
            try:
                await step()
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                self.seen[f"{step.__name__}: {type(error).__name__}"] += 1
            await asyncio.sleep(pause)

    async def send_body(self) -> None:
        """Send 30 MB of lists, without a key."""
        async with self._connection(f"POST /v1/jobs\nContent-Length: {self._orders.body_bytes}") as (reader, writer):
            await self._pour(writer, self._bodies, self._orders.body_bytes)
            await self._note("send_body", reader)

    async def send_headers(self) -> None:
        """Send 60 MB of tiny headers."""
        async with self._connection("GET /healthz", has_end=False) as (reader, writer):
            await self._pour(writer, self._headers, self._orders.header_bytes)
            await self._note("send_headers", reader)

    async def send_long_header(self) -> None:
        async with self._connection("GET /healthz", has_end=False) as (reader, writer):
            writer.write(b"X-Long: ")
            await self._pour(writer, b"x" * _PIECE, self._orders.header_bytes)
            await self._note("send_long_header", reader)

    async def send_content_type(self) -> None:
        """Send content types for which the standard library needs time that grows with the square of their length."""
        for size in (900, 50_000, 320_000):
            kind = f'Content-Type: multipart/form-data; boundary=b; x="{";" * size}'
            async with self._connection(f"POST /v1/files\n{self._authorization}\n{kind}\nContent-Length: 3") as wires:
                wires[1].write(b"--b")
                await self._note("send_content_type", wires[0])

    async def upload_slowly(self) -> None:
        """Upload ten bytes a second, with a key."""
        kind = "Content-Type: multipart/form-data; boundary=b"
        line = f"POST /v1/files\n{self._authorization}\n{kind}\nContent-Length: 1000000"
        async with self._connection(line) as (reader, writer):
            writer.write(b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n')
            answered = asyncio.create_task(self._note("upload_slowly", reader))
            try:
                while not answered.done():
                    writer.write(b"x" * 10)
                    await writer.drain()
                    await asyncio.wait([answered], timeout=1.0)
                await answered
            finally:
                answered.cancel()

    async def follow(self) -> None:
        """Open an event stream and keep it open as long as the server allows."""
        line = f"GET /v1/jobs/{self._orders.job}/events/stream\n{self._authorization}"
        async with self._connection(line) as (reader, _):
            await self._note("follow", reader)
            while await reader.read(_PIECE):
                pass

    async def send_half(self) -> None:
        """Send a request that never ends."""
        async with self._connection("GET /v1/jobs", has_end=False) as (reader, _):
            await self._note("send_half", reader)

    async def send_pile(self) -> None:
        """Send thousands of requests at once on one connection, without a key."""
        async with self._connection("GET /v1/jobs") as (reader, writer):
            writer.write(b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n" * _PILE)
            await self._note("send_pile", reader)
            while await reader.read(_PIECE):
                pass

    async def send_unread(self) -> None:
        """Ask for long answers again and again, without a key, and read none of them."""
        async with self._connection("GET /openapi.json") as (_, writer):
            writer.transport.pause_reading()
            while not writer.transport.is_closing():
                writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(_PAUSE_SECONDS)

    # ------------------------------------------------------------------------------------------------------------

    @property
    def _authorization(self) -> str:
        return f"Authorization: Bearer {self._orders.key}"

    @contextlib.asynccontextmanager
    async def _connection(
        self, head: str, *, has_end: bool = True
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._orders.port)
        self.seen["connections"] += 1
        line, *headers = head.split("\n")
        lines = [f"{line} HTTP/1.1", "Host: localhost", *headers, *([""] if has_end else []), ""]
        writer.write("\r\n".join(lines).encode())
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _pour(self, writer: asyncio.StreamWriter, piece: bytes, total: int) -> None:
        """Send until everything is sent or the server closes the connection."""
        with contextlib.suppress(OSError):
            for _ in range(0, total, len(piece)):
                writer.write(piece)
                self.seen["bytes sent"] += len(piece)
                await writer.drain()

    async def _note(self, name: str, reader: asyncio.StreamReader) -> None:
        line = await reader.readline()
        self.seen[f"{name}: {line.split(b' ')[1].decode() if line else 'hung up on'}"] += 1


def _leave_with_parent() -> None:
    """Wait for the end of standard input, which comes when the parent process exits."""
    sys.stdin.buffer.read()
    os._exit(3)


def main() -> None:
    orders = Orders(**orjson.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.nice(_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack = Attack(orders)
    asyncio.run(attack.run())
    sys.stdout.buffer.write(orjson.dumps(dict(sorted(attack.seen.items()))))
    sys.stdout.flush()
    os._exit(0)


def as_line(orders: Orders) -> bytes:
    return orjson.dumps(asdict(orders)) + b"\n"


if __name__ == "__main__":
    main()
