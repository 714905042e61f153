"""A provider on the loopback that records a bill, finds capitalised words, and fails on demand.

In a process of its own it prints its port, and then serves until it is stopped:

    python -m tests.ingest.fake_provider --port 0
    GET  /bill        every paid request: {"entries": [...], "requests": n, "input_tokens": n, "output_tokens": n}
    GET  /bill?id=X   the same, of one request id
    GET  /faults      the current faults
    POST /faults      {"rates": {"error": 0.05}, "next": ["rate_limited"], "seed": 7, ...}; other fields stay the same

Faults, by a rate from 0 to 1 or one by one through `next`: `rate_limited` (429), `error` (500), `drop` (the connection
ends before any work), `lost` (it ends after the work, which is billed), `invalid` (billed, but unusable: output that
is not JSON, or one vector too few), `truncated` (chat: cut off, billed), `unauthorized` (401) and `quota` (429 with
insufficient_quota). An input that holds MARKER is refused with 400. `revoked` refuses every request with 401.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import random
import re
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import orjson

MARKER = "REFUSE-ME"
FAULTS = ("rate_limited", "error", "drop", "lost", "invalid", "truncated", "unauthorized", "quota")
DIMENSIONS = 64
INPUTS_MAX = 2048
TOKENS_MAX = 300_000
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"\b[A-Z]\w+(?: [A-Z]\w+)*")
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests"}


@dataclass
class Faults:
    rates: dict[str, float] = field(default_factory=dict)
    next: list[str] = field(default_factory=list)
    seed: int = 0
    retry_after: int = 0
    delay_seconds: float = 0.0
    revoked: bool = False
    refused_fields: list[str] = field(default_factory=list)
    """Fields that the provider does not know: a request with one of them gets a 400 that names it."""

    def change(self, wanted: Mapping[str, Any]) -> None:
        unknown = set(wanted) - set(asdict(self))
        unknown |= {*wanted.get("rates", ()), *wanted.get("next", ())} - set(FAULTS)
        if unknown:
            raise ValueError(f"no such fault: {', '.join(sorted(unknown))}")
        for name, value in wanted.items():
            setattr(self, name, value)


@dataclass
class Reply:
    status: int
    body: bytes
    headers: tuple[str, ...] = ()
    is_lost: bool = False


class FakeProvider:
    """>>> async with FakeProvider() as provider: Gateway(GatewaySettings(url=provider.url))"""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.faults = Faults()
        self.requests: list[dict[str, Any]] = []
        """The path, id, body and fault of every request, paid or not."""
        self.running = 0
        self.running_max = 0
        self._dice = random.Random(0)
        self._open: dict[asyncio.Task, asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bill(self) -> dict[str, Any]:
        return _sum(self.entries)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task, writer in self._open.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def set(self, **wanted: Any) -> None:
        self.faults.change(wanted)
        if "seed" in wanted:
            self._dice = random.Random(wanted["seed"])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._open[task] = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                method, target, _ = head[0].split()
                reply = await self._answer(method, target, headers, body)
                if reply is None or reply.is_lost:
                    writer.transport.abort()
                    break
                writer.write(_encode(reply))
                await writer.drain()
        writer.close()
        self._open.pop(task, None)

    async def _answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply | None:
        path = urlsplit(target).path
        if path == "/bill":
            wanted = parse_qs(urlsplit(target).query).get("id")
            return Reply(200, orjson.dumps(_sum([one for one in self.entries if not wanted or one["id"] in wanted])))
        if path == "/faults":
            return self._set_faults(body if method == "POST" else b"{}")
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            if self.faults.delay_seconds:
                await asyncio.sleep(self.faults.delay_seconds)
            return self._infer(path, headers.get("x-request-id", ""), orjson.loads(body))
        finally:
            self.running -= 1

    def _set_faults(self, body: bytes) -> Reply:
        try:
            self.set(**orjson.loads(body))
        except (ValueError, TypeError) as error:
            return _error(400, str(error))
        return Reply(200, orjson.dumps(asdict(self.faults)))

    def _infer(self, path: str, id: str, body: dict[str, Any]) -> Reply | None:
        fault = self._draw()
        self.requests.append({"path": path, "id": id, "body": body, "fault": fault})
        if self.faults.revoked or fault == "unauthorized":
            return _error(401, "Incorrect API key provided: sk-leaked", code="invalid_api_key")
        if fault == "quota":
            return _error(429, "You exceeded your current quota", code="insufficient_quota")
        if fault == "rate_limited":
            return _error(
                429, "Slow down", f"retry-after: {self.faults.retry_after}", code="rate_limit_exceeded", type="requests"
            )
        if fault == "error":
            return _error(500, "The server had an error", type="server_error")
        if fault == "drop":
            return None
        for name in self.faults.refused_fields:
            if name in body:
                return _error(400, f"Unsupported parameter: '{name}'", code="unsupported_parameter", param=name)
        match path:
            case "/v1/embeddings":
                return self._embed(id, body, fault)
            case "/v1/chat/completions":
                return self._complete(id, body, fault)
        return _error(404, "Not found")

    def _draw(self) -> str:
        if self.faults.next:
            return self.faults.next.pop(0)
        rates = {name: rate for name, rate in self.faults.rates.items() if rate > 0}
        names = [*rates, ""]
        return self._dice.choices(names, [*rates.values(), max(0.0, 1.0 - sum(rates.values()))])[0]

    def _embed(self, id: str, body: dict[str, Any], fault: str) -> Reply:
        inputs = [body["input"]] if isinstance(body["input"], str) else body["input"]
        tokens = sum(map(count_tokens, inputs))
        if len(inputs) > INPUTS_MAX or tokens > TOKENS_MAX:
            return _error(400, "Too many inputs or tokens", code="max_tokens_per_request", param="input")
        if any(MARKER in text for text in inputs):
            return _error(400, f"This input is not allowed: {inputs[0]}", code="invalid_value", param="input")
        count = len(inputs) - (fault == "invalid")
        is_base64 = body.get("encoding_format") == "base64"
        vectors = [vector_of(text, body.get("dimensions") or DIMENSIONS) for text in inputs[:count]]
        data = [
            {"object": "embedding", "index": i, "embedding": _base64(one) if is_base64 else one.tolist()}
            for i, one in enumerate(vectors)
        ]
        self._charge(id, body["model"], "embedding", inputs, tokens, 0)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": body["model"], "usage": usage}
        return Reply(200, orjson.dumps(answer), is_lost=fault == "lost")

    def _complete(self, id: str, body: dict[str, Any], fault: str) -> Reply:
        prompts = [message["content"] for message in body["messages"]]
        if any(MARKER in prompt for prompt in prompts):
            return _error(400, f"This prompt is not allowed: {prompts[-1]}", code="content_policy", param="messages")
        content = orjson.dumps({"entities": find_names(prompts[-1], types_of(body))}).decode()
        if fault in ("invalid", "truncated"):
            content = content[: len(content) // 2]
        asked, written = sum(map(count_tokens, prompts)), count_tokens(content)
        self._charge(id, body["model"], "entities", prompts[-1:], asked, written)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "finish_reason": "length" if fault == "truncated" else "stop",
        }
        usage = {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}
        answer = {"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage}
        return Reply(200, orjson.dumps(answer), is_lost=fault == "lost")

    def _charge(self, id: str, model: str, kind: str, inputs: list[str], asked: int, written: int) -> None:
        self.entries.append(
            {
                "id": id,
                "model": model,
                "kind": kind,
                "inputs": len(inputs),
                "texts": [f"{zlib.crc32(text.encode()):08x}" for text in inputs],
                "input_tokens": asked,
                "output_tokens": written,
            }
        )


def count_tokens(text: str) -> int:
    return max(1, len(text) // 4)


def vector_of(text: str, dimensions: int = DIMENSIONS) -> array[float]:
    """Texts that share words get similar vectors. As with some servers, these do not have length 1."""
    vector = array("f", [0.01] * dimensions)
    for word in _WORD.findall(text.casefold()):
        place = zlib.crc32(word.encode())
        vector[place % dimensions] += 1.0 if place & 0x8000_0000 else -1.0
    return vector


def find_names(text: str, types: list[str]) -> list[dict[str, str]]:
    """The runs of capitalised words; the words determine the type."""
    found = dict.fromkeys(_NAME.findall(text))
    return [{"type": types[zlib.crc32(name.encode()) % len(types)], "text": name} for name in found]


def types_of(body: Mapping[str, Any]) -> list[str]:
    schema = body["response_format"]["json_schema"]["schema"]
    return schema["properties"]["entities"]["items"]["properties"]["type"]["enum"]


def _sum(entries: list[dict[str, Any]]) -> dict[str, Any]:
    totals = {name: sum(one[name] for one in entries) for name in ("inputs", "input_tokens", "output_tokens")}
    return {"entries": entries, "requests": len(entries), **totals}


def _base64(vector: array[float]) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def _error(status: int, message: str, *headers: str, code: str | None = None, param: str | None = None, type="x"):
    error = {"message": message, "type": "invalid_request_error" if type == "x" else type, "param": param, "code": code}
    return Reply(status, orjson.dumps({"error": error}), headers)


def _encode(reply: Reply) -> bytes:
    reason = _REASONS.get(reply.status, "Error")
    lines = (
        f"HTTP/1.1 {reply.status} {reason}",
        "content-type: application/json",
        f"content-length: {len(reply.body)}",
        *reply.headers,
    )
    return "\r\n".join((*lines, "", "")).encode() + reply.body


async def main(port: int) -> None:
    provider = FakeProvider()
    await provider.start(port)
    print(provider.port, flush=True)  # noqa: T201 - for whoever started it
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(parser.parse_args().port))
