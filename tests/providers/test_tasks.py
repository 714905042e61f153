"""Whole tasks, from the request to the merged result; the contract server plays every provider."""

import importlib.util

import pytest

from batchwright.states import TaskStatus
from tests.conftest import skip
from tests.providers.task_stage import task_stage

SPEECH = ["azure", "aws", "google", "sarvam"]
COMPLETIONS = ["openai", "groq", "together", "azure_openai", "gemini", "vertex", "anthropic", "mistral"]


@pytest.fixture
async def stage(database_url, tmp_path):
    async with task_stage(database_url, tmp_path) as stage:
        yield stage


def inputs_for(provider):
    """Azure fetches its inputs itself."""
    return provider != "azure"


async def transcribe(stage, provider, *names, **values):
    if provider == "aws" and importlib.util.find_spec("aiobotocore") is None:
        skip("aiobotocore is not installed")
    if inputs_for(provider):
        return await stage.transcribe(provider, *names, **values)
    return await stage.submit(
        "transcription", [f"https://audio.example.com/{name}" for name in names], provider=provider, **values
    )


@pytest.mark.parametrize("provider", SPEECH)
async def test_a_transcription_completes_with_its_result(stage, provider):
    stage.work()
    task = await stage.ended(await transcribe(stage, provider, "one.wav", "two.wav"))
    assert task.status is TaskStatus.COMPLETED, task.error
    assert (task.succeeded, task.failed) == (2, 0)
    result = await stage.result(task)
    if provider == "google":
        assert set(result) == {"long"}
        result = result["long"]
    assert [entry["filename"] for entry in result["transcriptions"]] == ["one.wav", "two.wav"]
    assert all(entry["transcription"]["text"] and entry["error"] is None for entry in result["transcriptions"])
    assert task.provider_state["provider"] == provider.upper()


@pytest.mark.parametrize("provider", SPEECH)
async def test_with_a_bad_input_the_task_is_partially_completed(stage, provider):
    stage.work()
    task = await stage.ended(await transcribe(stage, provider, "one.wav", "bad__fail_400__.wav", "two.wav"))
    assert task.status is TaskStatus.PARTIAL_COMPLETE
    assert (task.succeeded, task.failed) == (2, 1)
    result = await stage.result(task)
    entries = (result["long"] if provider == "google" else result)["transcriptions"]
    assert sorted(entry["filename"] for entry in entries if entry["transcription"]) == ["one.wav", "two.wav"]


@pytest.mark.parametrize("provider", COMPLETIONS)
async def test_a_completion_completes_with_its_result(stage, provider):
    stage.work()
    task = await stage.ended(await stage.complete([f"{provider}/gemini-2.5-flash"], "a", "b", "c"))
    assert task.status is TaskStatus.COMPLETED, task.error
    lines = await stage.result(task)
    assert sorted(line["custom_id"] for line in lines) == ["line-0", "line-1", "line-2"]
    assert {line["model"] for line in lines} == {"gemini-2.5-flash"}
    assert all(line["response"]["body"]["choices"] for line in lines)
    (job,) = task.provider_state["jobs"]
    assert job["status"] == "COMPLETED"
    assert job["external_job_id"]


async def test_several_models_of_several_providers(stage):
    stage.work()
    models = ["openai/gpt-5-mini", "anthropic/claude", "mistral/small"]
    task = await stage.ended(await stage.complete(models, "a", "fail", "b"))
    assert task.status is TaskStatus.PARTIAL_COMPLETE
    assert (task.succeeded, task.failed) == (6, 3)
    assert [job["model"] for job in task.provider_state["jobs"]] == ["gpt-5-mini", "claude", "small"]
    assert len(await stage.result(task)) == 9
