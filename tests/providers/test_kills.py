"""Worker processes that are killed repeatedly while they run a task."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from batchwright.states import TaskStatus
from tests.chaos.batch_fleet import Fleet, Post
from tests.providers.task_stage import task_stage
from tests.providers.task_workers import environment_of, write_config

KILLS = 20
SEED = 2026
LEASE_SECONDS = 1.0


@pytest.mark.thorough
@pytest.mark.timeout(180)
async def test_a_worker_that_is_killed_twenty_times_changes_nothing(database_url, tmp_path):
    chance = Random(SEED)
    engine = {"lease_seconds": LEASE_SECONDS, "rescue_jitter_seconds": 0.0}
    async with task_stage(database_url, tmp_path, engine=engine) as stage:
        config = write_config(
            tmp_path / "batchwright.toml",
            stage.server,
            settle_seconds=1.0,
            database={"url": database_url, "folder": str(tmp_path)},
            engine=engine,
            tasks={"poll_interval_seconds": 0.2},
        )
        command = ("batchwright", "worker", "--config", str(config))
        fleet = Fleet(
            [Post(kind="worker", command=command, environment=environment_of(stage.server))], tmp_path, tmp_path
        )
        speech = await stage.transcribe("sarvam", "one.wav", "bad__fail_400__.wav", "two.wav")
        chat = await stage.complete(["openai/gpt-5-mini"], "a", "fail", "b")
        fleet.start()
        try:
            for _ in range(KILLS):
                while not fleet.awake("worker"):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(chance.uniform(0.0, 1.0))
                fleet.kill(fleet.awake("worker")[0])
                stage.server.advance(1.0)
            tasks = [await stage.ended(id, 60) for id in (speech, chat)]
        finally:
            await fleet.close()
        assert sum(one.killed_at is not None for one in fleet.everybody) == KILLS
        for task in tasks:
            assert task.status is TaskStatus.PARTIAL_COMPLETE, task
            assert (task.succeeded, task.failed) == (2, 1)
        assert len(stage.server.jobs(provider="sarvam")) == 1
        assert len(stage.server.jobs(provider="openai")) == 1
        entries = (await stage.result(tasks[0]))["transcriptions"]
        assert sorted(one["filename"] for one in entries if one["transcription"]) == ["one.wav", "two.wav"]
        lines = await stage.result(tasks[1])
        assert sorted(line["custom_id"] for line in lines if line["error"] is None) == ["line-0", "line-2"]
