"""The cost of a request in the simulator: `python -m tests.simulator.cost`; a separate process and a cheap client."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

from batchwright.simulator import running_process
from tests.simulator.wire import chat, request


class Client(asyncio.Protocol):
    """A client that sends the next request after each answer, until all are sent."""

    def __init__(self, left: list[int], closed: asyncio.Semaphore) -> None:
        self.left, self.closed = left, closed
        self.buffer = b""

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        if self.left[0] <= 0:
            self.transport.close()
            return
        self.left[0] -= 1
        body = chat(f"{self.left[0]:08d} " + "x" * 800, max_tokens=150)
        body["messages"].insert(0, {"role": "system", "content": "s" * 1000})
        self.transport.write(request(body))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            self.buffer = b""
            self.ask()

    def connection_lost(self, error) -> None:
        self.closed.release()


async def drive(url: str, n: int, connections: int) -> None:
    where = urlsplit(url)
    left, closed = [n], asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Client(left, closed), where.hostname, where.port)
    for _ in range(connections):
        await closed.acquire()


def measure(n: int = 20_000, connections: int = 100, *arguments: str) -> tuple[float, float]:
    """CPU µs of the simulator per request, and requests per second."""
    with running_process("--model", "m:instant", *arguments) as simulator:
        asyncio.run(drive(simulator.url, n // 10, connections))
        before, began = simulator.stats(), time.perf_counter()
        asyncio.run(drive(simulator.url, n, connections))
        took = time.perf_counter() - began
        after = simulator.stats()
    assert after["received"] - before["received"] == n == after["answered"]["200"] - before["answered"]["200"]
    return 1e6 * (after["cpu_seconds"] - before["cpu_seconds"]) / n, n / took


if __name__ == "__main__":
    for options in ((), ("--cache-blocks", "100000")):
        figures = [measure(20_000, 100, *options) for _ in range(5)]
        costs = sorted(cost for cost, _ in figures)
        rates = sorted(rate for _, rate in figures)
        said = {"options": options, "cpu_us_min": costs[0], "cpu_us_median": costs[2], "requests_s_median": rates[2]}
        sys.stdout.write(json.dumps(said) + "\n")
