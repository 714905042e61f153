"""Every provider with workers that die at every point of a task: one remote job, every result, and nothing left behind.

The n-th task dies at its n-th point: after each commit, and after each call to the provider or to the store.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace

import pytest

from batchwright.providers.directory import Directory
from batchwright.providers.submission import WantedInput, WantedTask
from batchwright.states import TaskStatus
from tests.conftest import skip
from tests.providers.mortal import ward
from tests.providers.task_stage import chat_lines, task_stage

SPEECH = ["azure", "aws", "google", "sarvam"]
COMPLETIONS = ["openai", "groq", "together", "azure_openai", "gemini", "vertex", "anthropic", "mistral"]
SHOWN = {"openai", "sarvam"}
PROVIDERS = [
    name if name in SHOWN else pytest.param(name, marks=pytest.mark.thorough) for name in (*SPEECH, *COMPLETIONS)
]
POINTS_MAX = 200
pytestmark = [
    pytest.mark.timeout(300),
    # A worker that dies does not close anything.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
async def hospital(database_url, tmp_path, monkeypatch):
    """A ward whose polls are not moved to common moments of the real clock, so that all runs are the same."""
    pace = Directory.pace
    monkeypatch.setattr(Directory, "pace", lambda directory, name: replace(pace(directory, name), offset_seconds=None))
    tables = {name: {"settle_seconds": None} for name in (*SPEECH, *COMPLETIONS)}
    tasks = {"poll_interval_seconds": 120.0}
    async with task_stage(database_url, tmp_path, tables=tables, tasks=tasks) as stage, ward(stage, tmp_path) as one:
        yield one


async def wanted_of(ward, provider, **values):
    """A task with good inputs and one bad input."""
    if provider == "aws" and importlib.util.find_spec("aiobotocore") is None:
        skip("aiobotocore is not installed")
    if provider in COMPLETIONS:
        file = await ward.stage.upload(chat_lines("a", "fail", "b"), "requests.jsonl")
        inputs, values = [file], {"models": [f"{provider}/gemini-2.5-flash"], **values}
        return WantedTask(
            tenant="default", task_type="completion", inputs=[WantedInput.of(one) for one in inputs], **values
        )
    names = ["one.wav", "bad__fail_400__.wav"]
    if provider == "azure":  # Azure fetches its inputs itself
        inputs = [f"https://audio.example.com/{name}" for name in names]
    else:
        inputs = [await ward.stage.upload(name.encode(), name) for name in names]
    return WantedTask(
        tenant="default",
        task_type="transcription",
        provider=provider,
        inputs=[WantedInput.of(one) for one in inputs],
        **values,
    )


async def check(ward, task):
    """Check that each row has one remote job, each input one result, and the task the right ending."""
    rows = await ward.rows(task)
    assert len(ward.started()) == len(rows), ward.reporter.events
    assert task.status is TaskStatus.PARTIAL_COMPLETE, (task.error, rows)
    assert (task.succeeded, task.failed) == (2 if task.task_type == "completion" else 1, 1)
    result = await ward.stage.result(task)
    if task.task_type == "completion":
        assert sorted(line["custom_id"] for line in result) == ["line-0", "line-1", "line-2"]
        assert sorted(line["custom_id"] for line in result if line["error"] is None) == ["line-0", "line-2"]
    else:
        entries = (result["long"] if task.provider == "google" else result)["transcriptions"]
        assert sorted(entry["filename"] for entry in entries if entry["transcription"]) == ["one.wav"]
        assert len(entries) == 2
    ids = [job["external_job_id"] for job in task.provider_state["jobs"]]
    assert ids == [row.external_id for row in rows]
    assert None not in ids


def left_behind(ward):
    """What is still at the provider; after cleaning up, only its own results may be."""
    files = Counter(one.purpose for one in ward.server.world.files.values())
    return files + Counter(blobs=len(ward.server.world.blobs))


def may_stay(points):
    """Whether an uploaded file may stay at the provider, because its id was lost with the worker that uploaded it.

    In buckets we choose the names, so there the file is written again and deleted.
    """
    since = points[max((n for n, point in enumerate(points[:-1]) if point == "commit"), default=0) :]
    return any("file" in point and point.startswith(("POST", "PUT")) for point in since)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_if_a_worker_dies_at_any_point_nothing_is_lost_or_paid_twice(hospital, provider):
    wanted = await wanted_of(hospital, provider)
    task = await hospital.live(await hospital.submit(wanted))
    await check(hospital, task)
    points = list(hospital.mortal.passed)
    assert len(points) > 8
    await hospital.tidy()
    clean = left_behind(hospital)
    for n in range(1, POINTS_MAX):
        hospital.server.reset()
        hospital.deaths = 0
        hospital.mortal.revive()
        hospital.mortal.dies_at = n
        task = await hospital.live(await hospital.submit(wanted))
        await check(hospital, task)
        await hospital.tidy()
        assert all(row.cleaned_at is not None for row in await hospital.rows(task)), points[n - 1 : n]
        if not hospital.deaths:
            break
        stray = left_behind(hospital) - clean
        assert stray.total() <= may_stay(points[:n]), (points[n - 1 : n], stray)
    assert n >= len(points)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_task_whose_workers_die_in_every_run_each_a_little_later_still_ends(hospital, provider):
    task = await hospital.submit(await wanted_of(hospital, provider))
    for n in range(1, POINTS_MAX):
        if (await hospital.tasks.get(task.id, tenant=None)).has_ended:
            break
        hospital.mortal.revive()
        hospital.mortal.dies_at = n
        await hospital.round(task)
    hospital.mortal.dies_at = None
    await check(hospital, await hospital.live(task))
    assert hospital.deaths > 3


@pytest.mark.parametrize("provider", ["openai", "anthropic", "sarvam"])
async def test_a_commit_whose_answer_is_lost_is_found_later(hospital, provider):
    wanted = await wanted_of(hospital, provider)
    task = await hospital.live(await hospital.submit(wanted))
    for n in range(1, hospital.mortal.commits + 1):
        hospital.server.reset()
        hospital.mortal.commits, hospital.mortal.loses_at = 0, n
        task = await hospital.live(await hospital.submit(wanted))
        await check(hospital, task)


FAULTS = {
    "the answer to the create call is lost": ["drop:route={name}.create:times=1"],
    "the create call is answered 503 although it was taken": ["503:accepted=1:route={name}.create:times=1"],
    "the answer is lost and the list lags": ["drop:route={name}.create:times=1", "lag:seconds=45"],
    "too many requests everywhere": [
        "429:retry_after=40:route={name}.create:times=1",
        "429:retry_after=40:route={name}.get:times=2",
        "429:retry_after=40:route={name}.content:times=1",
        "429:retry_after=40:route=signed.get:times=1",
        "429:retry_after=40:route={name}.results:times=1",
    ],
    "errors everywhere": ["500:route={name}:times=3", "hang_up:route={name}:times=2"],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_with_faults_of_the_provider_nothing_is_lost_or_paid_twice(hospital, provider, fault):
    wanted = await wanted_of(hospital, provider)
    create = "start" if provider == "sarvam" else "create"
    rules = [rule.format(name=provider).replace(".create", f".{create}") for rule in FAULTS[fault]]
    hospital.server.put_faults(*rules)
    task = await hospital.live(await hospital.submit(wanted))
    assert hospital.server.faults.fired[0]
    await check(hospital, task)
    await hospital.tidy()
    assert all(row.cleaned_at is not None for row in await hospital.rows(task))
