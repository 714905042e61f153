"""What the tests of the contract server share."""

import asyncio
import importlib
import json
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from batchwright.simulator.providers import Server
from tests.conftest import skip

KEY = "bw-test-key"
OPENED: list[Callable[[], object]] = []
"""Closes the SDKs of this test."""


def sdk(name: str) -> Any:
    """An official SDK, with which the server is tested; the test is skipped if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            skip(f"the SDK {name} is not installed: {error}")


def opened(client: Any, close: str = "close") -> Any:
    """This client, which is closed when its server ends."""
    OPENED.append(attrgetter(close)(client))
    return client


def chat_line(id: str, content: str = "Hello", **fields: Any) -> dict[str, Any]:
    body = {"model": "gpt-test", "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def parsed(data: bytes | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


async def blocking(work: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a blocking SDK without blocking the server's event loop."""
    return await asyncio.to_thread(work, *args, **kwargs)


def finish(server: Server) -> None:
    server.advance(server.settings.queue_seconds + server.settings.run_seconds)
