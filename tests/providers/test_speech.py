"""The speech adapters one by one: the document of a task, and how results are matched to inputs."""

import pytest

from batchwright.providers import state
from batchwright.providers.contract import Counts, Ending, Input, Phase, Request, Result, Status
from batchwright.providers.speech import each_once, ending_of, merged, staged_name
from batchwright.providers.state import TaskEnding
from tests.providers.conformance import FAIL, KEY
from tests.providers.documents import add_job, replace_job
from tests.providers.speech_world import speech_world

PROVIDERS = ["aws", "azure", "google", "sarvam"]


async def run_task(world, *items):
    """Run a task of one job: submit, poll, collect; returns its document after each step."""
    request = world.request(*items)
    job, _ = await world.submit(request)
    document = state.describe_transcription(world.case.name, dataset_ids=["file-1"])
    document = add_job(document, request, job)
    yield document
    world.server.advance(world.server.settings.queue_seconds + 1)
    polled = state.record_poll(document["jobs"][0], await world.adapter.poll(job))
    document = replace_job(document, 0, polled)
    yield document
    status = await world.finish(job)
    results = {result.key: result for result in await world.results(request, job, status)}
    entries = [state.make_entry(input, results.get(input.id)) for input in request.inputs]
    good = sum(1 for entry in entries if entry["error"] is None)
    outcome = state.count_outcome(total=len(entries), succeeded=good)
    ended = state.record_end(document["jobs"][0], status, outcome, entries=entries)
    yield replace_job(document, 0, ended)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_task_keeps_the_document_of_its_provider(provider, tmp_path):
    async with speech_world(provider, tmp_path) as world:
        started, running, ended = [document async for document in run_task(world)]
        external_id = started["jobs"][0]["external_job_id"]
        expected = {
            "aws": KEY,
            "azure": f"{world.server.urls['azure']}/transcriptions/",
            "google": "projects/123456789/locations/us-central1/operations/",
            "sarvam": world.server.jobs(provider=provider)[0].id,
        }
        assert external_id.startswith(expected[provider])
        assert started["provider"] == provider.upper()
        assert [started["jobs"][0]["status"], ended["jobs"][0]["status"]] == ["SUBMITTED", "COMPLETED"]
        words = {"aws": "IN_PROGRESS", "azure": "Running", "google": "RUNNING", "sarvam": "Running"}
        assert running["jobs"][0]["status"] == words[provider]
        assert [list(one["jobs"][0]) for one in (running, ended)] == [list(started["jobs"][0])] * 2
        assert state.end_task(ended) is TaskEnding.COMPLETED
        texts = [one["transcription"]["text"] for one in ended["jobs"][0]["result"]]
        assert len(texts) == len(world.keys(3))
        assert all("ranscript of" in text for text in texts)


@pytest.mark.parametrize("provider", ["azure", "google", "sarvam"])
async def test_two_good_inputs_and_a_bad_one_are_a_partial_success_with_both_results(provider, tmp_path):
    async with speech_world(provider, tmp_path) as world:
        *_, ended = [document async for document in run_task(world, "ok", FAIL, "ok")]
    assert state.end_task(ended) is TaskEnding.PARTIAL_COMPLETE
    entries = ended["jobs"][0]["result"]
    assert [entry["error"] is None for entry in entries] == [True, False, True]
    assert entries[1]["filename"] == "call-1__fail_400__.wav"


async def test_a_task_of_which_nothing_succeeded_has_failed(tmp_path):
    async with speech_world("aws", tmp_path) as world:
        *_, ended = [document async for document in run_task(world, FAIL)]
    assert state.end_task(ended) is TaskEnding.FAILED
    assert ended["jobs"][0]["error"] == "Unsupported media format."


def request(*ids):
    inputs = [Input(id=id, uri=f"https://example.com/{id}", filename=id) for id in ids]
    return Request(key="bw-1", task_type="transcription", model=None, inputs=inputs)


async def test_each_input_has_one_result(caplog):
    async def found():
        for key, text in (("b", "first"), ("b", "second"), ("x", "unknown")):
            yield Result(key=key, value={"text": text})

    status = Status(phase=Phase.ENDED, raw_status="Done", ending=Ending.PARTIAL)
    results = [result async for result in each_once(request("a", "b"), status, found())]
    assert [(result.key, result.value) for result in results] == [("b", {"text": "first"}), ("a", None)]
    assert results[1].error["code"] == "missing_result"
    assert "second or an unknown result for 'x'" in caplog.text


@pytest.mark.parametrize(
    ("total", "succeeded", "said", "ending"),
    [
        (3, 3, Ending.SUCCEEDED, Ending.SUCCEEDED),
        (3, 2, Ending.SUCCEEDED, Ending.PARTIAL),
        (3, 0, Ending.SUCCEEDED, Ending.FAILED),
        (3, 0, Ending.CANCELLED, Ending.CANCELLED),
        (3, 1, Ending.CANCELLED, Ending.PARTIAL),
        (3, 0, Ending.EXPIRED, Ending.EXPIRED),
        (3, 3, Ending.FAILED, Ending.PARTIAL),
        (None, None, Ending.SUCCEEDED, Ending.SUCCEEDED),
        (None, None, Ending.FAILED, Ending.FAILED),
    ],
)
def test_the_ending_of_a_job_has_counts_if_the_provider_gives_them(total, succeeded, said, ending):
    assert ending_of(Counts(total=total, succeeded=succeeded), said) is ending


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("monday.wav", "0007-monday.wav"),
        ("Montag früh (2).mp3", "0007-Montag_fr_h_2_.mp3"),
        ("../../etc/passwd", "0007-passwd"),
        ("电话.wav", "0007-_.wav"),
        ("__fail__.wav", "0007-__fail__.wav"),
        (".hidden.wav", "0007-hidden.wav"),
        ("..", "0007-audio"),
        ("", "0007-audio"),
        ("x" * 300 + ".wav", "0007-" + "x" * 76 + ".wav"),
    ],
)
def test_a_copy_has_a_safe_name(filename, name):
    assert staged_name(7, Input(id="1", uri="https://example.com", filename=filename)) == name


def test_objects_are_merged_deeply():
    ours, theirs = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}, "f": 6}
    assert merged(ours, theirs) == {"a": {"b": 1, "c": 4}, "d": {"e": 5}, "f": 6}
    assert ours == {"a": {"b": 1, "c": 2}, "d": 3}
