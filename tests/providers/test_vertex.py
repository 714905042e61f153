"""What only Vertex does: objects in buckets instead of files, and results without ids."""

import json

import pytest

from batchwright.errors import Fatal
from batchwright.inference.http import Http
from batchwright.providers.buckets import open_bucket
from batchwright.providers.contract import Counts, Ending, Input, Job, Phase, Request, Status
from batchwright.providers.registry import find_adapters, make_adapter
from batchwright.providers.tools import AdapterTools
from tests.inference.server import RawServer, answer

FOLDER = "gs://bucket/batches/bw-1"
JOB = Job(external_id="projects/p/locations/l/batchPredictionJobs/7", extra={"output_uri": f"{FOLDER}/output"})
ENDED = Status(phase=Phase.ENDED, raw_status="x", found={"output_uri": f"{FOLDER}/output/prediction-1"})


@pytest.fixture
async def vertex(tmp_path):
    async def read(id):
        yield b"".join(json.dumps(line).encode() + b"\n" for line in LINES)

    async with RawServer() as server, Http() as http:
        tools = AdapterTools(
            http,
            open_stored=read,
            bucket=lambda root: open_bucket(f"file://{tmp_path}/{root.partition('://')[2]}"),
            environment={"TOKEN": "t-1"},
        )
        settings = {"base_url": server.url, "project": "p", "location": "l", "bucket": "gs://bucket/batches/"}
        made = make_adapter(find_adapters(), "vertex", {**settings, "access_token_env": "TOKEN"}, tools)
        made.test_server, made.test_folder = server, tmp_path / "bucket/batches/bw-1"
        yield made


def line(id, text, **fields):
    return {"custom_id": id, "body": {"model": "m", "messages": [{"role": "user", "content": text}], **fields}}


LINES = [line("a", "same"), line("b", "same"), line("c", "other")]
REQUEST = Request(
    key="bw-1", task_type="completion", model="m", inputs=[Input(id="i", uri="file:f", filename="in.jsonl")]
)


def asked(text, number=None):
    labels = {} if number is None else {"labels": {"bw_line": str(number)}}
    return {"contents": [{"role": "user", "parts": [{"text": text}]}], **labels}


def said(text, answered, number=None, status=""):
    response = {} if status else {"candidates": [{"content": {"parts": [{"text": answered}]}}]}
    return {"status": status, "request": asked(text, number), "response": response}


async def results(adapter, *lines, status=ENDED, name="predictions.jsonl"):
    folder = adapter.test_folder / "output/prediction-1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = [one async for one in adapter.results(REQUEST, JOB, status)]
    return {
        one.key: one.error["code"] if one.error else one.value["response"]["body"]["choices"][0]["message"]["content"]
        for one in found
    }


async def test_requests_are_written_with_the_number_of_their_line(vertex):
    (staged,) = [one async for one in vertex.stage(REQUEST, {})]
    assert staged == {"input_uri": f"{FOLDER}/input.jsonl"}
    written = [json.loads(one) for one in (vertex.test_folder / "input.jsonl").read_text().splitlines()]
    assert written == [{"request": asked("same", 1)}, {"request": asked("same", 2)}, {"request": asked("other", 3)}]
    await vertex.clean_up(REQUEST, staged, None)
    assert not (vertex.test_folder / "input.jsonl").exists()


async def test_a_job_names_its_model_and_where_its_results_go(vertex):
    path = "/v1/projects/p/locations/l/batchPredictionJobs"
    vertex.test_server.replies[path] = answer(b'{"name": "projects/p/locations/l/batchPredictionJobs/7"}')
    assert await vertex.submit(REQUEST, {"input_uri": f"{FOLDER}/input.jsonl"}) == JOB
    body = json.loads(vertex.test_server.bodies[0])
    assert (body["displayName"], body["model"]) == ("bw-1", "publishers/google/models/m")
    assert body["inputConfig"]["gcsSource"]["uris"] == [f"{FOLDER}/input.jsonl"]
    assert body["outputConfig"]["gcsDestination"]["outputUriPrefix"] == f"{FOLDER}/output"
    assert vertex.test_server.heads[0]["authorization"] == "Bearer t-1"


async def test_results_are_matched_to_lines_by_their_label(vertex):
    found = await results(vertex, said("other", "3", 3), said("same", "2", 2), said("same", "1", 1))
    assert found == {"a": "1", "b": "2", "c": "3"}


async def test_without_labels_results_are_matched_to_lines_by_the_request(vertex):
    found = await results(vertex, said("other", "3"), said("same", "x"), said("same", "y"))
    assert found == {"a": "x", "b": "y", "c": "3"}


async def test_failed_unknown_and_missing_results(vertex):
    lines = [said("same", "", 1, status="Bad Request: 400 no"), said("never asked", "?"), {"status": "", "request": {}}]
    found = await results(vertex, *lines)
    (stranger,) = [code for key, code in found.items() if key.startswith("unknown-")]
    assert stranger == "unknown_key"
    assert {key: found[key] for key in "abc"} == {"a": "failed", "b": "missing_result", "c": "missing_result"}


async def test_an_output_outside_our_folder_is_not_read(vertex):
    status = Status(phase=Phase.ENDED, raw_status="x", found={"output_uri": "gs://other/secret"})
    with pytest.raises(Fatal, match="not in our folder"):
        await results(vertex, status=status)


async def test_without_a_named_folder_all_of_the_output_is_read(vertex):
    status = Status(phase=Phase.ENDED, raw_status="x", ending=Ending.CANCELLED)
    assert await results(vertex, said("other", "3", 3), status=status) == {
        "c": "3",
        "a": "batch_cancelled",
        "b": "batch_cancelled",
    }


@pytest.mark.parametrize(
    ("state", "phase", "ending"),
    [
        ("JOB_STATE_QUEUED", Phase.QUEUED, None),
        ("JOB_STATE_PENDING", Phase.QUEUED, None),
        ("JOB_STATE_RUNNING", Phase.RUNNING, None),
        ("JOB_STATE_UPDATING", Phase.RUNNING, None),
        ("JOB_STATE_PAUSED", Phase.RUNNING, None),
        ("JOB_STATE_CANCELLING", Phase.CANCELLING, None),
        ("JOB_STATE_SUCCEEDED", Phase.ENDED, Ending.PARTIAL),
        ("JOB_STATE_PARTIALLY_SUCCEEDED", Phase.ENDED, Ending.PARTIAL),
        ("JOB_STATE_FAILED", Phase.ENDED, Ending.FAILED),
        ("JOB_STATE_CANCELLED", Phase.ENDED, Ending.CANCELLED),
        ("JOB_STATE_EXPIRED", Phase.ENDED, Ending.EXPIRED),
        ("JOB_STATE_MEDITATING", Phase.RUNNING, None),
    ],
)
async def test_every_state_is_mapped(vertex, state, phase, ending):
    document = {"state": state, "completionStats": {"successfulCount": "1", "failedCount": "2", "incompleteCount": "1"}}
    vertex.test_server.replies[f"/v1/{JOB.external_id}"] = answer(json.dumps(document).encode())
    status = await vertex.poll(JOB)
    assert (status.phase, status.ending, status.raw_status) == (phase, ending, state)
    assert status.counts == Counts(total=4, succeeded=1, failed=3)
