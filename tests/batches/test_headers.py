"""Headers of a batch's creator reach every request of the batch, and are stored only encrypted."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchwright.app import AsyncBatchwright
from batchwright.batches.part import BatchesPart
from batchwright.batches.seal import Seal
from batchwright.batches.send import shard as execution
from batchwright.errors import ConfigurationError
from batchwright.settings import load_settings
from batchwright.states import BatchStatus
from tests.batches.stage import CHAT, Stage, jsonl, request, stage_settings
from tests.inference.server import RawServer, answer

SECRET = "tenant-Zebra-4711"
BEHIND = "router-key-Okapi-0815"
OK, REFUSED, BROKEN = answer(b"{}"), answer(b"{}", "400 Bad Request"), answer(b"{}", "500 Oops")


class Model(RawServer):
    """A model that answers with the next status of the script, and with OK after its end."""

    def __init__(self, *script: bytes | None) -> None:
        super().__init__()
        self.script = list(script)
        self.replies = _Next(self.script)


class _Next(dict[str, Any]):
    def __init__(self, script: list[bytes | None]) -> None:
        super().__init__()
        self._script = script

    def get(self, *_: Any) -> bytes | None:
        return self._script.pop(0) if self._script else OK


class Play(Stage):
    """A stage with the HTTP API in front of it and a raw server behind it."""

    http: httpx.AsyncClient
    model: Model

    async def ask(self, *lines: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        body = {"input_file_id": await self.upload(jsonl(lines)), "endpoint": CHAT, "completion_window": "24h"}
        return await self.http.post("/v1/batches", json=body, headers=headers or {"X-Tenant-Id": SECRET})

    async def sent(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.model.heads) < count:
                await asyncio.sleep(0.01)

    async def dump(self) -> str:
        """Every row of every table."""
        names = await self.batchwright.pool.rows(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = 'batchwright' AND c.relkind IN ('r', 'p')",
            {},
        )
        assert ("batch",) in [tuple(row) for row in names]
        tables = [
            await self.batchwright.pool.rows(f"SELECT t::text FROM batchwright.{name} AS t", {}) for (name,) in names
        ]
        return "\n".join(str(row[0]) for rows in tables for row in rows)


@asynccontextmanager
async def play(database_url: str, folder: Path, *script: bytes | None, **batches: Any) -> AsyncIterator[Play]:
    (folder / "router").write_text(BEHIND + "\n")
    async with Model(*script) as model:
        settings = stage_settings(
            database_url,
            folder / "data",
            model.url,
            global_inference_gateway={
                "passthrough_headers": ["X-Tenant-Id"],
                "headers": {"X-Router-Key": f"file:{folder / 'router'}", "x-team": "search"},
            },
            worker={"stop_grace_seconds": 0.2},
            batches=batches,
            api={"port": 0},
        )
        async with AsyncBatchwright(settings=settings) as batchwright:
            server = await batchwright.server()
            server.start()
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
                stage = Play(batchwright=batchwright, simulator=None)
                stage.http, stage.model = http, model
                try:
                    yield stage
                finally:
                    await stage.close()
                    await server.close()


def new_key(folder: Path) -> Path:
    file = folder / "header.key"
    file.write_bytes(base64.b64encode(secrets.token_bytes(32)))
    return file


async def test_headers_reach_the_model_on_every_attempt_after_a_takeover_and_a_retry_and_are_stored_only_encrypted(
    database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = new_key(tmp_path)
    async with play(database_url, tmp_path, BROKEN, None, REFUSED, header_key_file=str(key)) as stage:
        made = await stage.ask(request("a"), headers={"X-Tenant-Id": SECRET, "X-Other": "unlisted", "X-Team": "mine"})
        assert made.status_code == 200, made.text
        first = stage.work()
        await stage.sent(2)  # the second request is not answered; it ends with its worker
        first.stop()
        await stage.workers.pop(0)[1]
        stage.work()
        ended = await stage.ended(made.json()["id"])
        assert (ended.status, ended.failed) == (BatchStatus.COMPLETED, 1)
        again = await stage.http.post(f"/v1/batches/{ended.id}/retry")
        repeated = await stage.ended(again.json()["id"])
        assert (repeated.status, repeated.completed) == (BatchStatus.COMPLETED, 1)

        heads = stage.model.heads
        assert [head.get("x-tenant-id") for head in heads] == [SECRET] * 4
        assert [head["x-router-key"] for head in heads] == [BEHIND] * 4
        assert [head["x-team"] for head in heads] == ["search"] * 4, "a creator's header must not replace a fixed one"
        assert not any("x-other" in head for head in heads)

        shown = [made.text, again.text, caplog.text, await stage.dump()]
        for path in (f"/v1/batches/{ended.id}", f"/v1/batches/{ended.id}/manifest", f"/v1/batches/{ended.id}/events"):
            shown.append((await stage.http.get(path)).text)
        shown += [path.read_bytes().decode("latin-1") for path in (tmp_path / "data").rglob("*") if path.is_file()]
        for secret in (SECRET, BEHIND, key.read_text()):
            for form in (secret, secret.encode().hex(), base64.b64encode(secret.encode()).decode()):
                assert not any(form in text for text in shown)


async def test_without_a_key_only_batches_with_such_headers_are_refused(database_url: str, tmp_path: Path) -> None:
    async with play(database_url, tmp_path) as stage:
        refused = await stage.ask(request("a"))
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("headers_not_configured", "x-tenant-id")
        assert "batches.header_key_file" in error["message"]
        assert SECRET not in refused.text
        assert await stage.batchwright.part(BatchesPart).batches.list(None) == []
        taken = await stage.ask(request("a"), headers={"x-unknown": "1"})
        assert taken.status_code == 200
        stage.work()
        assert (await stage.ended(taken.json()["id"])).completed == 1


def test_the_embedded_database_has_a_key_of_its_own_and_a_remote_one_needs_one(tmp_path: Path) -> None:
    def seal_of(**database: str) -> Seal:
        flags = {"database": {"folder": str(tmp_path), **database}}
        return AsyncBatchwright(settings=load_settings(flags, environment={})).part(BatchesPart).seal

    sealed = seal_of().close({"x-tenant-id": SECRET}, "batch_1")
    assert (tmp_path / "headers.key").exists()
    assert seal_of().open(sealed, "batch_1") == {"x-tenant-id": SECRET}
    with pytest.raises(ConfigurationError, match="there is no key for that"):
        seal_of(url="postgresql://db/batchwright").close({"x-tenant-id": SECRET}, "batch_1")


async def test_a_worker_with_another_key_sends_nothing_and_the_batch_says_why_it_waits(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "NO_ROOM_SECONDS", 0.05)
    key = new_key(tmp_path)
    async with play(database_url, tmp_path, header_key_file=str(key)) as stage:
        right = key.read_bytes()
        id = (await stage.ask(request("a"))).json()["id"]
        new_key(tmp_path)
        stage.work()
        waiting = await stage.until(id, lambda batch: batch.waits_for is not None)
        assert waiting.waits_for is not None
        assert waiting.waits_for.startswith("no key for the headers of its creator: ")
        (reason,) = (await stage.http.get(f"/v1/batches/{id}")).json()["waiting_on"]
        assert reason["reason"] == "key"
        assert stage.model.heads == []
        key.write_bytes(key.read_bytes() + b"\n" + right)
        assert (await stage.ended(id)).completed == 1
        assert [head["x-tenant-id"] for head in stage.model.heads] == [SECRET]


async def test_an_idempotency_key_covers_the_headers_too_and_header_values_must_be_valid(
    database_url: str, tmp_path: Path
) -> None:
    async with play(database_url, tmp_path, header_key_file=str(new_key(tmp_path))) as stage:
        file = await stage.upload(jsonl([request("a")]))
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}

        async def post(**headers: str) -> httpx.Response:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await stage.http.post("/v1/batches", json=body, headers={"Idempotency-Key": "k", **named})

        first, same = await post(x_tenant_id="one"), await post(x_tenant_id="one")
        assert first.json()["id"] == same.json()["id"]
        assert (await post(x_tenant_id="two")).status_code == 409
        assert (await post()).status_code == 409
        long = await post(x_tenant_id="x" * 1025)
        assert (long.status_code, long.json()["error"]["param"]) == (400, "x-tenant-id")
        assert "xxx" not in long.text
