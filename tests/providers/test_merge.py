"""The result file of a task, merged from the results of its jobs."""

from types import SimpleNamespace

import orjson
import pytest

from batchwright.providers.results import Merge
from batchwright.storage import open_store
from batchwright.storage.settings import StorageSettings


@pytest.fixture
def store(tmp_path):
    return open_store(StorageSettings(), beside=tmp_path)


async def merge(store, task_type, provider, *jobs):
    """The merged file of jobs, each given as a model and its results; None is a job without results."""
    rows = []
    for number, (model, results) in enumerate(jobs):
        key = f"tasks/t/{number}.jsonl"
        if results is not None:
            await store.put(key, b"".join(orjson.dumps(one) + b"\n" for one in results))
        rows.append(SimpleNamespace(model=model, results_key=None if results is None else key))
    task = SimpleNamespace(task_type=task_type)
    return b"".join([chunk async for chunk in Merge(store, task, rows, provider).chunks()])


@pytest.mark.parametrize("provider", ["AZURE", "SARVAM", "AWS", "WHISPERS"])
async def test_results_are_one_flat_list(store, provider):
    jobs = [(None, [{"n": 1}, {"n": 2}]), (None, None), (None, [{"n": 3}])]
    whole = await merge(store, "transcription", provider, *jobs)
    assert orjson.loads(whole) == {"transcriptions": [{"n": 1}, {"n": 2}, {"n": 3}]}


async def test_googles_results_are_by_model(store):
    jobs = [("long", [{"n": 1}]), ("short", [{"n": 2}]), ("long", [{"n": 3}]), ("chirp", None)]
    assert orjson.loads(await merge(store, "transcription", "GOOGLE", *jobs)) == {
        "long": {"transcriptions": [{"n": 1}, {"n": 3}]},
        "short": {"transcriptions": [{"n": 2}]},
    }


@pytest.mark.parametrize(("provider", "expected"), [("GOOGLE", {}), ("AZURE", {"transcriptions": []})])
async def test_without_results_the_file_is_still_a_complete_document(store, provider, expected):
    assert orjson.loads(await merge(store, "transcription", provider, ("long", None))) == expected


async def test_lines_of_completions_follow_one_another(store):
    whole = await merge(store, "completion", "", ("a", [{"n": 1}, {"n": 2}]), ("b", [{"n": 3}]))
    assert [orjson.loads(line)["n"] for line in whole.splitlines()] == [1, 2, 3]
