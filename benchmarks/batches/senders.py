"""Contestants that send a file without Batchwright, each in a process of its own.

    python -m benchmarks.batches.senders NAME --url URL --file FILE --output FILE [--connections N] [--warm-up FILE]

`bare` is the minimum that works, with the HTTP client of Batchwright: 100 coroutines that take a line, split it, send
it, parse the answer, and write the envelope around it. `aiohttp` and `openai` are written as people write them: a task
per line, a semaphore, JSON in and out. Clients are created, and the warm-up is sent, before the clock starts.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import uvloop

from benchmarks.batches.stage import ENDPOINT

Send = Callable[[Path, BinaryIO], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.batches.senders")
    parser.add_argument("name", choices=sorted(SENDERS))
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--warm-up", type=Path)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(arguments))))


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    send = SENDERS[arguments.name](arguments.url, arguments.connections)
    if arguments.warm_up is not None:
        with arguments.output.open("wb") as output:
            await send(arguments.warm_up, output)
    clock, processor = time.perf_counter(), time.process_time()
    with arguments.output.open("wb") as output:
        await send(arguments.file, output)
    figures = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - processor}
    with arguments.output.open("rb") as output:
        return {**figures, "lines": sum(1 for _ in output)}


def bare(url: str, connections: int) -> Send:
    from orjson import dumps, loads
    from wreq import Client

    from batchwright.batches.plan.lines import split
    from batchwright.inference.gateway import _options, network_thread
    from batchwright.inference.settings import GatewaySettings, InferenceSettings

    settings = GatewaySettings(url=url)
    client = Client(runtime=network_thread(), **_options(settings, InferenceSettings(concurrency=connections)))
    headers = {"content-type": "application/json"}

    async def take(lines: Iterator[bytes], output: BinaryIO) -> None:
        for line in lines:
            custom_id, _, body = split(line)
            response = await client.post(url + ENDPOINT, body=body, headers=headers)
            answer = bytes(await response.bytes())
            loads(answer)
            request_id = bytes(response.headers["x-request-id"]).decode()
            output.write(
                b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n'
                % (b"batch_req", dumps(custom_id), response.status.as_int(), dumps(request_id), answer)
            )

    async def send(file: Path, output: BinaryIO) -> None:
        with file.open("rb") as lines:
            await asyncio.gather(*(take(lines, output) for _ in range(connections)))

    return send


def with_aiohttp(url: str, connections: int) -> Send:
    import aiohttp

    async def send(file: Path, output: BinaryIO) -> None:
        gate = asyncio.Semaphore(connections)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:

            async def one(line: bytes) -> None:
                async with gate:
                    request = json.loads(line)
                    async with session.post(url + request["url"], json=request["body"]) as response:
                        write(output, request, response.status, await response.json())

            with file.open("rb") as lines:
                await asyncio.gather(*map(one, lines))

    return send


def with_openai(url: str, connections: int) -> Send:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(api_key="none", base_url=f"{url}/v1")

    async def send(file: Path, output: BinaryIO) -> None:
        gate = asyncio.Semaphore(connections)

        async def one(line: bytes) -> None:
            async with gate:
                request = json.loads(line)
                answer = await client.chat.completions.create(**request["body"])
                write(output, request, 200, answer.model_dump())

        with file.open("rb") as lines:
            await asyncio.gather(*map(one, lines))

    return send


def write(output: BinaryIO, request: dict[str, Any], status: int, body: Any) -> None:
    line = {"custom_id": request["custom_id"], "response": {"status_code": status, "body": body}, "error": None}
    output.write(json.dumps(line).encode() + b"\n")


SENDERS: dict[str, Callable[[str, int], Send]] = {"aiohttp": with_aiohttp, "bare": bare, "openai": with_openai}


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("aiohttp", "openai", "uvloop", "batchwright", "wreq")}


if __name__ == "__main__":
    main()
