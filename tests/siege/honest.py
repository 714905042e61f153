"""The honest client: it submits jobs and batches, checks the server's health, and measures each call."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import httpx
import orjson

from tests.api.wire import Wire
from tests.chaos.verdict import Breach

CHAT = "/v1/chat/completions"
MODEL = "small"
_PAUSE_SECONDS = 0.1
_ENDED = {"completed", "failed", "expired", "cancelled"}


class Honest:
    """A well-behaved user."""

    def __init__(self, url: str, key: str, *, lines: int) -> None:
        self.seconds: list[float] = []
        """The duration of each call."""
        self.health_seconds: list[float] = []
        self.done: Counter[str] = Counter()
        self.breaches: list[Breach] = []
        self._url = url
        self._lines = lines
        self.is_warm = asyncio.Event()
        """Set when its first batch has ended."""
        self._is_over = asyncio.Event()
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False)

    async def run(self) -> None:
        """Work until `leave`; jobs and batches in progress are completed."""
        await asyncio.gather(self._submit_jobs(), self._submit_batches(), self._ask_for_health())
        await self._http.aclose()

    def leave(self) -> None:
        self._is_over.set()

    def begin_counting(self) -> None:
        self.seconds.clear()
        self.health_seconds.clear()

    async def _submit_jobs(self) -> None:
        number = 0
        while not self._is_over.is_set():
            number += 1
            job = await self._call("POST", "/v1/jobs", json={"job_type": "siege.echo", "payload": {"value": number}})
            while job and job["status"] not in ("SUCCEEDED", "FAILED", "CANCELLED"):
                await asyncio.sleep(_PAUSE_SECONDS)
                job = await self._call("GET", f"/v1/jobs/{job['id']}")
            if job and (job["status"], job["result"], job["attempts"]) != ("SUCCEEDED", number, 1):
                self.breaches.append((job["id"], f"the job ended {job['status']} after {job['attempts']} attempts"))
            await self._call("GET", "/v1/jobs?limit=20")
            self.done["jobs"] += 1
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _submit_batches(self) -> None:
        while not self._is_over.is_set():
            names = [f"line-{n}" for n in range(self._lines)]
            data = b"".join(_line(name) for name in names)
            form = {"purpose": (None, b"batch"), "file": ("requests.jsonl", data)}
            file = await self._call("POST", "/v1/files", files=form)
            order = {"input_file_id": file.get("id"), "endpoint": CHAT, "completion_window": "24h"}
            batch = await self._call("POST", "/v1/batches", json=order)
            while batch and batch["status"] not in _ENDED:
                await asyncio.sleep(_PAUSE_SECONDS)
                batch = await self._call("GET", f"/v1/batches/{batch['id']}")
            if batch:
                await self._check(batch, names)
            self.done["batches"] += 1
            self.is_warm.set()

    async def _check(self, batch: dict[str, Any], names: list[str]) -> None:
        content = b""
        if batch.get("output_file_id"):
            began = time.perf_counter()
            answer = await self._http.get(f"/v1/files/{batch['output_file_id']}/content")
            self.seconds.append(time.perf_counter() - began)
            content = answer.content
        found = [orjson.loads(line)["custom_id"] for line in content.splitlines()]
        if batch["status"] != "completed" or found != names:
            self.breaches.append((batch["id"], f"the batch is {batch['status']} with {len(found)} of {len(names)}"))

    async def _ask_for_health(self) -> None:
        """Check the health each time on a new connection, like a load balancer."""
        while not self._is_over.is_set():
            began = time.perf_counter()
            try:
                async with await Wire.open(self._url) as wire:
                    answer = await wire.ask("GET /healthz")
                if answer.status != 200:
                    self.breaches.append(("/healthz", f"status {answer.status}"))
            except (OSError, asyncio.IncompleteReadError) as error:
                self.breaches.append(("/healthz", repr(error)))
            self.health_seconds.append(time.perf_counter() - began)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            answer = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            self.breaches.append((f"{method} {path}", repr(error)))
            return {}
        finally:
            self.seconds.append(time.perf_counter() - began)
        if answer.is_success:
            found: dict[str, Any] = answer.json()
            return found
        self.breaches.append((f"{method} {path}", f"status {answer.status_code}: {answer.text[:200]}"))
        return {}


def _line(name: str) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {name}."}], "max_tokens": 8}
    return orjson.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}) + b"\n"
