"""A stage for whole tasks: a database, a store in a folder, the contract server, and workers in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from obstore.store import GCSStore, S3Store

from batchwright.app import AsyncBatchwright
from batchwright.engine.worker.worker import Worker
from batchwright.files.part import FilesPart
from batchwright.files.store import NewFile, new_file_id, object_key
from batchwright.inference.http import MIB, Http
from batchwright.providers.buckets import Bucket
from batchwright.providers.directory import Directory
from batchwright.providers.jobs import RemoteJob
from batchwright.providers.part import ProvidersPart
from batchwright.providers.submission import WantedInput, WantedTask
from batchwright.providers.tasks import Task
from batchwright.providers.tools import AdapterTools
from batchwright.settings import load_settings
from batchwright.simulator.providers import Server, running
from batchwright.storage.remote import Remote

SECRET = "bw-test-secret-0123456789"
VARIABLE = "PROVIDER_KEY"
KEYS = ("azure", "sarvam", "openai", "groq", "together", "azure_openai", "gemini", "anthropic", "mistral")
CHAT = "/v1/chat/completions"


def provider_tables(server: Server, **more: Any) -> dict[str, dict[str, Any]]:
    """Settings of every provider for the contract server, as a user would write them."""
    tables: dict[str, dict[str, Any]] = {
        name: {"base_url": server.urls[name], "api_key_env": VARIABLE} for name in KEYS
    }
    tables["google"] = {
        "base_url": server.urls["google"],
        "project": "project",
        "bucket": "gs://results/speech",
        "access_token_env": VARIABLE,
    }
    tables["vertex"] = {
        "base_url": server.urls["vertex"],
        "project": "project",
        "bucket": "gs://results/vertex",
        "access_token_env": VARIABLE,
    }
    tables["aws"] = {
        "base_url": server.urls["aws"],
        "region": "us-east-1",
        "bucket": "s3://results/speech",
        "language": "en-US",
        "access_key_id_env": "KEY_ID",
        "secret_access_key_env": VARIABLE,
    }
    for table in tables.values():
        table["settle_seconds"] = 0.5
    for name, values in more.items():
        tables[name] = {**tables.get(name, {}), **values}
    return tables


def chat_lines(*words: str) -> bytes:
    """A file of requests; `fail` is one that fails at the provider."""
    lines = []
    for n, word in enumerate(words):
        content = "[[fail:400]]" if word == "fail" else f"Say {word}."
        body = {"model": "any", "messages": [{"role": "user", "content": content}], "max_tokens": 16}
        lines.append({"custom_id": f"line-{n}", "method": "POST", "url": CHAT, "body": body})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@dataclass(slots=True, kw_only=True)
class TaskStage:
    batchwright: AsyncBatchwright
    server: Server
    environment: dict[str, str]
    http: Http | None = None
    """Tools for adapters of the test; without them, the client's tools are used."""
    workers: list[tuple[Worker, asyncio.Task[bool]]] = field(default_factory=list)

    @property
    def part(self) -> ProvidersPart:
        return self.batchwright.part(ProvidersPart)

    async def upload(self, data: bytes, filename: str = "call.wav", *, tenant: str = "default") -> str:
        id = new_file_id()
        stored = await self.batchwright.store.put(object_key(id), data)
        new = NewFile(id=id, tenant=tenant, purpose="user_data", filename=filename, stored=stored)
        file, _ = await self.batchwright.part(FilesPart).files.add(new)
        return file.id

    async def submit(self, task_type: str, inputs: Sequence[str], **values: Any) -> str:
        wanted = WantedTask(
            tenant="default", task_type=task_type, inputs=[WantedInput.of(one) for one in inputs], **values
        )
        task, is_new = await self.part.submission.create(wanted)
        assert is_new
        self.batchwright.doorbell.ring([task.queue])
        return task.id

    async def transcribe(self, provider: str, *names: str, **values: Any) -> str:
        """Submit audio files with these names, which are stored here; one with `__fail_400__` fails at the provider."""
        return await self.submit(
            "transcription", [await self.upload(name.encode(), name) for name in names], provider=provider, **values
        )

    async def complete(self, models: Sequence[str], *words: str, **values: Any) -> str:
        file = await self.upload(chat_lines(*words), "requests.jsonl")
        return await self.submit("completion", [file], models=models, **values)

    async def get(self, id: str) -> Task:
        return await self.part.tasks.get(id, tenant=None)

    async def jobs(self, id: str) -> list[RemoteJob]:
        return await self.part.jobs.of(id)

    def work(self) -> Worker:
        worker = self.batchwright.worker()
        self.workers.append((worker, asyncio.create_task(worker.run())))
        return worker

    async def until(self, id: str, condition: Any, seconds: float = 30.0) -> Task:
        async with asyncio.timeout(seconds):
            while not condition(task := await self.get(id)):
                for _, running in self.workers:
                    if running.done():
                        running.result()
                await asyncio.sleep(0.02)
        return task

    async def submitted(self, id: str) -> list[RemoteJob]:
        """Wait until all its jobs are at their providers or have failed before."""
        async with asyncio.timeout(30):
            while not (jobs := await self.jobs(id)) or any(job.phase not in ("submitted", "ended") for job in jobs):
                await asyncio.sleep(0.02)
        return jobs

    async def ended(self, id: str, seconds: float = 30.0) -> Task:
        """Let the time of the provider's job pass, and wait for the end of the task."""
        await self.submitted(id)
        self.server.advance(self.server.settings.queue_seconds + self.server.settings.run_seconds + 1)
        return await self.until(id, lambda task: task.has_ended, seconds)

    async def result(self, task: Task) -> Any:
        """The result file: the document of a transcription, the lines of a completion."""
        if task.result_file_id is None:
            return None
        files = self.batchwright.part(FilesPart).files
        file = await files.get(task.result_file_id, tenant=None)
        data = b"".join([part async for part in files.content(file)])
        if task.task_type == "completion":
            return [json.loads(line) for line in data.splitlines()]
        return json.loads(data)

    async def close(self) -> None:
        for worker, _ in self.workers:
            worker.stop()
        for _, task in self.workers:
            with suppress(asyncio.CancelledError):
                await task


def server_bucket(server: Server, folder: Path) -> Any:
    """Buckets of Google and Amazon at the contract server."""

    def open_one(root: str) -> Bucket:
        name = root.partition("://")[2]
        if root.startswith("gs://"):
            account = {"gcs_base_url": server.urls["gcs"], "disable_oauth": True}
            account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
            key = json.dumps(account)
            store: Any = GCSStore(name, service_account_key=key, client_options={"allow_http": True})
        else:
            store = S3Store(
                name,
                endpoint=server.urls["s3"],
                region="us-east-1",
                access_key_id="AKIATEST",
                secret_access_key=SECRET,
                client_options={"allow_http": True},
            )
        return Bucket(Remote(store, part_bytes=8 * MIB, name=root))

    return open_one


@asynccontextmanager
async def task_stage(
    database_url: str, folder: Path, *, tables: dict[str, Any] | None = None, simulator: Any = None, **parts: Any
) -> AsyncIterator[TaskStage]:
    async with running(**(simulator or {})) as server, Http() as http:
        flags: dict[str, Any] = {
            "database": {"url": database_url, "folder": str(folder)},
            "providers": provider_tables(server, **(tables or {})),
            "tasks": {"poll_interval_seconds": 0.1, "fetch_private": True},
            "worker": {"stop_grace_seconds": 5.0},
            "api": {"port": 0},
        }
        for name, values in parts.items():
            flags[name] = {**flags.get(name, {}), **values}
        environment = {VARIABLE: SECRET, "KEY_ID": "AKIATEST"}
        async with AsyncBatchwright(settings=load_settings(flags, environment={})) as batchwright:
            stage = TaskStage(batchwright=batchwright, server=server, http=http, environment=environment)
            use_tools(stage, folder)
            try:
                yield stage
            finally:
                await stage.close()


def use_tools(stage: TaskStage, folder: Path) -> None:
    """Let adapters use the stage's credentials and the server's buckets."""
    part = stage.part
    assert stage.http is not None
    tools = AdapterTools(
        stage.http,
        open_stored=part._read_stored,
        bucket=server_bucket(stage.server, folder),
        environment=stage.environment,
        may_fetch_private=True,
    )
    part._directory = Directory(part.providers, part.settings, tools, open_budget=part.open_budget)
