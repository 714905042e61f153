"""A user of the batch chaos: uploads a file, creates a batch and reads its results, from a server that keeps dying.

Calls without an answer are repeated; those that create something have the same Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import orjson

from tests.chaos.batch_fleet import Scene
from tests.chaos.verdict import Breach

CHAT = "/v1/chat/completions"
MODELS = ("large", "medium", "small")
_AGAIN = {502, 503, 504}
"""Statuses after which a call is repeated. Any other status that is not a success is a breach."""
_ANSWER_SECONDS_MAX = 120.0
_BREACHES_MAX = 20
_BOUNDARY = "chaos-5b1f0e"
_CHUNKS = 40
_PAUSE_SECONDS = 0.1
_POLL_SECONDS = 0.25


class Request(NamedTuple):
    """One line of the input, and its expected result."""

    custom_id: str
    offset: int
    model: str
    fails: bool


class Workload(NamedTuple):
    """An input file, and what is known about its lines."""

    data: bytes
    requests: list[Request]


def workload(count: int, seed: int, models: Sequence[str] = MODELS) -> Workload:
    """Several models; most lines share the beginning of their prompt with others; some fail permanently, some once."""
    draw = random.Random(f"batch workload {seed}")
    prefixes = [" ".join(f"Rule {n}.{rule} of the house." for rule in range(60)) for n in range(24)]
    data = bytearray()
    requests = []
    for n in range(count):
        model = draw.choice(models)
        fails = draw.random() < 0.01
        fault = " [[fault:400]]" if fails else " [[fault:500:times=1]]" if draw.random() < 0.02 else ""
        system = draw.choice(prefixes) if draw.random() < 0.6 else f"You are the clerk number {n}."
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Line {n}, please.{fault}"}]
        body = {"model": model, "messages": messages, "max_tokens": draw.randint(8, 32)}
        requests.append(Request(f"line-{n:05d}", len(data), model, fails))
        data += orjson.dumps({"custom_id": f"line-{n:05d}", "method": "POST", "url": CHAT, "body": body}) + b"\n"
    return Workload(bytes(data), requests)


@dataclass(slots=True)
class Found:
    """What the user has in the end."""

    batch: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    batches: int = 0
    files: int = 0
    output: bytes = b""
    errors: bytes = b""
    shown: list[bytes] = field(default_factory=list)
    """The lines that were read with the cursor, in order."""
    breaches: list[Breach] = field(default_factory=list)
    """Answers that a client must never get."""
    repeated: int = 0
    """Number of repeated calls."""
    statuses: Counter[int] = field(default_factory=Counter)


class Client:
    """One user with one file."""

    def __init__(self, url: str, work: Workload, scene: Scene, *, upload_seconds: float) -> None:
        self.found = Found()
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(20.0, connect=2.0), trust_env=False)
        self._scene = scene
        self._upload_seconds = upload_seconds
        self._work = work
        self._cursor: str | None = None
        self._done = 0
        self._has_read_all = False

    async def run(self) -> Found:
        """The whole life of the batch."""
        found = self.found
        async with self._http:
            file = await self._made("/v1/files", self._upload)
            await self._scene.enter("creating")
            id = str((await self._made("/v1/batches", lambda: self._create(file["id"])))["id"])
            await self._follow(id)
            found.manifest = (await self._asked(f"/v1/batches/{id}/manifest")).json()
            found.output = await self._content(found.batch["output_file_id"])
            found.errors = await self._content(found.batch["error_file_id"])
            again = await self._made("/v1/batches", lambda: self._create(file["id"]))
            if again["id"] != id:
                found.breaches.append((id, f"the same Idempotency-Key has made the batch {again['id']} as well"))
            found.batches = len((await self._asked("/v1/batches")).json()["data"])
            found.files = len((await self._asked("/v1/files?purpose=batch")).json()["data"])
        return found

    async def _follow(self, id: str) -> None:
        """Poll the batch, and continue reading, until it has ended and everything is read."""
        has_ended = False
        while not has_ended:
            await asyncio.sleep(_POLL_SECONDS)
            batch = self.found.batch = (await self._asked(f"/v1/batches/{id}")).json()
            self._check_progress(batch)
            has_ended = batch["status"] in ("completed", "failed", "expired", "cancelled")
            while not self._has_read_all and await self._read_page(id):
                pass

    def _check_progress(self, batch: Mapping[str, Any]) -> None:
        counts = batch["request_counts"]
        done = counts["completed"] + counts["failed"]
        if done < self._done or done > len(self._work.requests):
            self.found.breaches.append((batch["id"], f"{done} lines were done after {self._done} had been"))
        self._done = done

    async def _read_page(self, id: str) -> bool:
        """Whether there were lines, so that there may be more. A page without a cursor is the last."""
        page = await self._asked(f"/v1/batches/{id}/results", {"after": self._cursor} if self._cursor else {})
        self.found.shown += page.content.splitlines(keepends=True)
        self._cursor = page.headers.get("x-next-cursor")
        self._has_read_all = self._cursor is None
        return bool(page.content)

    async def _content(self, file_id: str | None) -> bytes:
        return (await self._asked(f"/v1/files/{file_id}/content")).content if file_id else b""

    # Calls ------------------------------------------------------------------------------------------------------

    async def _asked(self, path: str, query: Mapping[str, str] | None = None) -> httpx.Response:
        return await self._answered(lambda: self._http.get(path, params=query))

    async def _made(self, path: str, send: Any) -> dict[str, Any]:
        made: dict[str, Any] = (await self._answered(send)).json()
        return made

    async def _upload(self) -> httpx.Response:
        headers = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}", "idempotency-key": "chaos-file"}
        return await self._http.post("/v1/files", content=self._form(), headers=headers)

    async def _create(self, file_id: str) -> httpx.Response:
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        return await self._http.post("/v1/batches", json=body, headers={"idempotency-key": "chaos-batch"})

    async def _form(self) -> AsyncIterator[bytes]:
        """Download slowly, so that the connection can break in the middle."""
        head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="'
        yield f'{head}purpose"\r\n\r\nbatch\r\n{head}file"; filename="in.jsonl"\r\n\r\n'.encode()
        step = -(-len(self._work.data) // _CHUNKS)
        for start in range(0, len(self._work.data), step):
            yield self._work.data[start : start + step]
            await asyncio.sleep(self._upload_seconds / _CHUNKS)
        yield f"\r\n--{_BOUNDARY}--\r\n".encode()

    async def _answered(self, send: Any) -> httpx.Response:
        """Repeat a call until it is answered: broken connections and a starting server are expected."""
        async with asyncio.timeout(_ANSWER_SECONDS_MAX):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    answer: httpx.Response = await send()
                    self.found.statuses[answer.status_code] += 1
                    if answer.is_success:
                        return answer
                    if answer.status_code not in _AGAIN:
                        what = f"{answer.request.method} {answer.request.url.path}"
                        self.found.breaches.append((what, f"{answer.status_code}: {answer.text[:300]}"))
                        if len(self.found.breaches) > _BREACHES_MAX:
                            answer.raise_for_status()
                self.found.repeated += 1
                await asyncio.sleep(_PAUSE_SECONDS)
