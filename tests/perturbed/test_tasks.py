"""Tasks of several providers and tenants at once, with users who cancel; each is paid once."""

from __future__ import annotations

import asyncio

import pytest

from batchwright.errors import Conflict
from batchwright.providers.submission import WantedInput, WantedTask
from batchwright.states import TaskStatus
from tests.perturbed.conftest import SCALE
from tests.providers.task_stage import chat_lines, task_stage

pytestmark = pytest.mark.timeout(240)
TASKS = 20 * SCALE
TENANTS = ("ada", "bob", "cyd")
COMPLETIONS = ("anthropic", "azure_openai", "gemini", "groq", "mistral", "openai", "together", "vertex")
SPEECH = ("azure", "google", "sarvam")
SERVER = {"speed": 1.0, "queue_seconds": 0.2, "run_seconds": 0.5, "cancel_seconds": 0.2}


class Crowd:
    """Users who submit tasks, some of whom cancel."""

    def __init__(self, stage, chance):
        self.stage = stage
        self.chance = chance
        self.provider_jobs = {}

    async def live(self, place):
        await asyncio.sleep(self.chance.uniform(0.0, 1.0))
        tenant, provider = self.chance.choice(TENANTS), self.chance.choice((*COMPLETIONS, *SPEECH))
        wanted = await self.want(place, provider, tenant)
        task, _ = await self.stage.part.submission.create(wanted)
        is_cancelled = place % 5 == 4 and await self.cancel(task)
        while not (task := await self.stage.part.tasks.get(task.id, tenant=tenant)).has_ended:
            await asyncio.sleep(0.05)
        await self.check(task, provider, is_cancelled=is_cancelled)

    async def want(self, place, provider, tenant):
        upload = self.stage.upload
        if provider in COMPLETIONS:
            file = await upload(chat_lines(f"a {place}", "fail", "b"), "in.jsonl", tenant=tenant)
            values = {"task_type": "completion", "models": [f"{provider}/gemini-2.5-flash"]}
            return WantedTask(tenant=tenant, inputs=[WantedInput(file_id=file)], **values)
        names = [f"a-{place}.wav", "bad__fail_400__.wav", "b.wav"]
        inputs = [WantedInput(url=f"https://audio.example.com/{name}") for name in names]
        if provider != "azure":  # Azure fetches its inputs itself
            inputs = [WantedInput(file_id=await upload(name.encode(), name, tenant=tenant)) for name in names]
        return WantedTask(tenant=tenant, task_type="transcription", provider=provider, inputs=inputs)

    async def cancel(self, task):
        await asyncio.sleep(self.chance.uniform(0.0, 1.5))
        try:
            await self.stage.part.tasks.cancel(task.id, tenant=task.tenant)
        except Conflict:
            return False
        return True

    async def check(self, task, provider, *, is_cancelled):
        rows = await self.stage.jobs(task.id)
        self.provider_jobs.setdefault(provider, []).extend(row.key for row in rows if row.external_id is not None)
        result = await self.stage.result(task)
        if is_cancelled:
            endings = {TaskStatus.CANCELLED, TaskStatus.PARTIAL_COMPLETE}
            assert task.status in endings, task
            assert task.succeeded <= 2
            return
        assert task.status is TaskStatus.PARTIAL_COMPLETE, task
        assert (task.succeeded, task.failed) == (2, 1)
        lines = result if task.task_type == "completion" else _entries(result)
        assert len(lines) == 3


def _entries(result):
    found = [result] if "transcriptions" in result else result.values()
    return [entry for one in found for entry in one["transcriptions"]]


async def test_tasks_of_many_providers_and_tenants_end_as_their_stories_require(database_url, tmp_path, chance):
    parts = {"database": {"pool_size": 20}, "tasks": {"poll_interval_seconds": 0.2}}
    async with task_stage(database_url, tmp_path, simulator=SERVER, **parts) as stage:
        for _ in range(2):
            await stage.work().started.wait()
        crowd = Crowd(stage, chance)
        async with asyncio.TaskGroup() as group:
            for place in range(TASKS):
                group.create_task(crowd.live(place))
        for provider, keys in crowd.provider_jobs.items():
            if provider not in ("azure", "sarvam"):  # Azure deletes ended jobs, and Sarvam has no marker
                assert [len(stage.server.jobs(key, provider)) for key in keys] == [1] * len(keys), provider
