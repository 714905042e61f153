"""Tasks over HTTP: valid and refused requests, and the fields of a task."""

import json
from contextlib import asynccontextmanager

import pytest

from batchwright.files.part import FilesPart
from tests.api.conftest import Api, fails
from tests.providers.task_stage import CHAT, chat_lines, task_stage

URL = "https://audio.example.com/one.wav"


@pytest.fixture
async def stage(database_url, tmp_path):
    tables = {"openai2": {"kind": "openai", "base_url": "https://other.example.com/v1", "api_key_env": "NOT_SET"}}
    async with task_stage(database_url, tmp_path, tables=tables) as stage:
        yield stage


@asynccontextmanager
async def serving(stage):
    server = await stage.batchwright.server()
    api = Api(stage.batchwright, server._services)
    try:
        yield api
    finally:
        await api.close()
        await server.close()


@pytest.fixture
async def http(stage):
    async with serving(stage) as api:
        yield await api.client()


def transcription(**changes):
    return {"task_type": "transcription", "provider": "azure", "inputs": [URL], **changes}


async def nothing_was_made(stage):
    for table in ("task", "provider_job", "job"):
        assert await stage.batchwright.pool.rows(f"SELECT count(*) FROM batchwright.{table}") == [(0,)]
    assert stage.server.jobs() == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (transcription(provider="azzure"), "provider", "did you mean 'azure'?"),
        (transcription(provider="nobody-at-all"), "provider", "use one of: anthropic, aws, azure"),
        (transcription(provider="openai"), "provider", "support tasks of the type transcription; use aws, azure"),
        (transcription(provider=None), "provider", "set the provider of this task"),
        (transcription(task_type="translation"), "task_type", "use one of: transcription, completion"),
        (transcription(inputs=[]), "inputs", "there is no input"),
        (transcription(inputs=["htp:/x"]), "inputs", "none of the inputs can be used: htp:/x"),
        (transcription(inputs=["https:///x", "gs://bucket"]), "inputs", "none of the inputs can be used"),
        (transcription(inputs=["https://user:word@example.com/x.wav"]), "inputs", "a user and password"),
        (transcription(inputs=["file:file-0123"]), "inputs", "it must begin with https://"),
        (transcription(inputs=["file-0123"]), "inputs", "there is no file 'file-0123'"),
        (transcription(options={"languag": "en"}), "languag", "the option 'languag' is unknown"),
        (transcription(timeout_hours=1_000_000), "timeout_hours", ""),
        (transcription(inputs=[URL] * 1_001), "inputs", "the limit is 1000"),
        ({"task_type": "completion", "models": ["gpt-5-mini"], "inputs": [URL]}, "models", "has no provider"),
        ({"task_type": "completion", "provider": "openai", "inputs": [URL]}, "models", "at least one model"),
        ({"task_type": "completion", "provider": "openai2", "model": "m", "inputs": [URL]}, "provider", "NOT_SET"),
        ({"task_type": "completion", "models": ["openai/m"], "inputs": [URL, URL]}, "inputs", "has one input"),
        (
            {"task_type": "completion", "models": ["openai/m"], "inputs": [URL], "options": {"endpoint": "/v1/odd"}},
            "endpoint",
            "the endpoint is '/v1/odd'",
        ),
        (
            {"task_type": "completion", "models": ["openai/m"], "inputs": [URL], "options": {"endpoit": CHAT}},
            "endpoit",
            "the option 'endpoit' is unknown; use one of: completion_window, endpoint",
        ),
        (
            {"task_type": "completion", "models": ["openai/m"] * 2, "inputs": [URL]},
            "models",
            "openai/m is listed twice",
        ),
        (transcription(provider="google", models=["long", "long"]), "models", "google/long is listed twice"),
        (transcription(model="a", models=["b"]), "models", "`model` or `models`, not both"),
        (transcription(inputs=[URL, {"filename": "a.wav"}]), "inputs", "input 2 has neither url nor file_id"),
        (transcription(inputs=[{"url": URL, "file_id": "file-0123"}]), "inputs", "input 1 has both url and file_id"),
        ({"task_type": "transcription"}, "inputs", ""),
        (transcription(unknown=1), "unknown", ""),
    ],
)
async def test_an_impossible_request_is_refused_and_nothing_is_created(stage, http, body, param, words):
    message = fails(await http.post("/v1/tasks", json=body), 400, param=param)
    assert words in message
    await nothing_was_made(stage)


async def test_an_unconfigured_provider_says_which_setting_it_lacks(database_url, tmp_path):
    async with task_stage(database_url, tmp_path) as stage:
        stage.part._directory._written.pop("google")
        async with serving(stage) as api:
            answer = await (await api.client()).post("/v1/tasks", json=transcription(provider="google"))
            assert "project" in fails(answer, 400, param="provider")


async def test_a_task_from_its_creation_to_its_result(stage, http):
    body = transcription(inputs=[URL, "htp:/x", {"url": "https://audio.example.com/2.wav", "filename": "two.wav"}])
    answer = await http.post("/v1/tasks", json=body | {"metadata": {"for": "me"}})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["status"], made["invalid_urls"], made["inputs"]) == ("PENDING", ["htp:/x"], 2)
    assert made["provider_state"] is None
    assert fails(await http.get(f"/v1/tasks/{made['id']}/result"), 409).endswith("it has no result yet")
    stage.work()
    task = await stage.ended(made["id"])
    shown = (await http.get(f"/v1/tasks/{task.id}")).json()
    assert (shown["status"], shown["succeeded"], shown["failed"]) == ("PARTIAL_COMPLETE", 2, 1)
    assert shown["provider_state"]["invalid_urls"] == ["htp:/x"]
    assert [job["phase"] for job in shown["jobs"]] == ["ended"]
    assert shown["metadata"] == {"for": "me"}
    result = await http.get(f"/v1/tasks/{task.id}/result")
    assert result.headers["content-type"] == "application/json"
    assert [one["filename"] for one in result.json()["transcriptions"]] == ["one.wav", "two.wav"]
    content = await http.get(f"/v1/files/{shown['result_file_id']}/content")
    assert content.content == result.content
    events = [one["event"] for one in (await http.get(f"/v1/tasks/{task.id}/events")).json()["data"]]
    assert {"task.planned", "provider.submitted", "provider.ended"} <= set(events)
    listed = (await http.get("/v1/tasks", params={"status": "PARTIAL_COMPLETE"})).json()
    assert [one["id"] for one in listed["data"]] == [task.id]


async def test_a_completion_of_a_stored_file(stage, http):
    file = await stage.upload(chat_lines("a", "b"), "requests.jsonl")
    body = {"task_type": "completion", "models": ["openai/gpt-5-mini"], "inputs": [{"file_id": file}]}
    made = (await http.post("/v1/tasks", json=body)).json()
    stage.work()
    task = await stage.ended(made["id"])
    assert task.provider_state["input_dataset_ids"] == [file]
    result = await http.get(f"/v1/tasks/{task.id}/result")
    assert result.headers["content-type"] == "application/jsonl"
    assert [json.loads(line)["custom_id"] for line in result.content.splitlines()] == ["line-0", "line-1"]


async def test_lines_that_cannot_be_sent_fail_the_task_by_number_and_nothing_is_paid(stage, http):
    bad = {"custom_id": "b", "method": "POST", "url": CHAT, "body": {"model": "any", "messages": 7}}
    file = await stage.upload(chat_lines("a") + json.dumps(bad).encode() + b"\n{", "requests.jsonl")
    body = {"task_type": "completion", "models": ["anthropic/claude"], "inputs": [file]}
    made = (await http.post("/v1/tasks", json=body)).json()
    stage.work()
    task = await stage.until(made["id"], lambda task: task.has_ended)
    assert task.status.value == "FAILED"
    assert task.error["code"] == "invalid_inputs"
    assert [problem["message"][:7] for problem in task.error["problems"]] == ["line 2:", "line 3:"]
    assert stage.server.jobs() == []


async def test_every_unusable_input_is_named_completely_and_the_others_are_processed(stage, http):
    silent = await stage.upload(b"", "silence.wav")
    bad = ["", "not a url: at all", "https://example.com/" + "x" * 3_000, silent]
    made = await http.post("/v1/tasks", json=transcription(provider="sarvam", inputs=[*bad, URL]))
    assert made.status_code == 200, made.text
    assert made.json()["invalid_urls"] == [*bad[:2], bad[2][:2_000], silent]
    assert made.json()["inputs"] == 1
    message = fails(await http.post("/v1/tasks", json=transcription(provider="sarvam", inputs=[silent])), 400)
    assert message == f"none of the inputs can be used: {silent}: 'silence.wav' is empty"


async def test_models_are_shown_as_they_were_named(stage, http):
    file = await stage.upload(chat_lines("a"), "requests.jsonl")
    models = ["openai/gpt-5-mini", "azure_openai/gpt-5-mini"]
    made = (await http.post("/v1/tasks", json={"task_type": "completion", "models": models, "inputs": [file]})).json()
    assert made["models"] == models
    stage.work()
    task = await stage.ended(made["id"])
    assert [(line["provider"], line["model"]) for line in await stage.result(task)] == [
        ("openai", "gpt-5-mini"),
        ("azure_openai", "gpt-5-mini"),
    ]
    body = {"task_type": "completion", "provider": "openai", "model": "gpt-5-mini", "inputs": [file]}
    assert (await http.post("/v1/tasks", json=body)).json()["models"] == ["gpt-5-mini"]


async def test_the_same_key_is_the_same_task(stage, http):
    headers = {"idempotency-key": "one"}
    first = await http.post("/v1/tasks", json=transcription(), headers=headers)
    again = await http.post("/v1/tasks", json=transcription(), headers=headers)
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["idempotent-replayed"] == "true"
    fails(await http.post("/v1/tasks", json=transcription(priority=1), headers=headers), 409)


async def test_a_repeated_request_is_answered_although_its_file_is_gone(stage, http):
    file = await stage.upload(b"audio", "one.wav")
    body, headers = transcription(provider="sarvam", inputs=[file]), {"idempotency-key": "two"}
    first = await http.post("/v1/tasks", json=body, headers=headers)
    await stage.batchwright.part(FilesPart).files.delete(file, tenant="default")
    assert (await http.post("/v1/tasks", json=body, headers=headers)).json()["id"] == first.json()["id"]


async def test_tasks_of_other_tenants_are_not_found(stage):
    async with serving(stage) as api:
        mine, other = await api.holder(), await api.holder(tenant="other")
        made = (await mine.post("/v1/tasks", json=transcription())).json()
        for path in ("", "/result", "/events"):
            fails(await other.get(f"/v1/tasks/{made['id']}{path}"), 404)
        fails(await other.post(f"/v1/tasks/{made['id']}/cancel"), 404)
        assert (await other.get("/v1/tasks")).json()["data"] == []
        file = await stage.upload(b"x", tenant="other")
        fails(await mine.post("/v1/tasks", json=transcription(inputs=[file])), 400, param="inputs")


async def test_a_task_that_no_worker_has_begun_is_cancelled(stage, http):
    made = (await http.post("/v1/tasks", json=transcription())).json()
    assert (await http.post(f"/v1/tasks/{made['id']}/cancel")).json()["cancel_requested_at"] is not None
    stage.work()
    task = await stage.until(made["id"], lambda task: task.has_ended)
    assert task.status.value == "CANCELLED"
    assert stage.server.jobs() == []
    assert (await http.post(f"/v1/tasks/{made['id']}/cancel")).json()["status"] == "CANCELLED"
    fails(await http.get(f"/v1/tasks/{made['id']}/result"), 404)


async def test_providers_are_listed_with_what_they_lack(http):
    listed = {one["name"]: one for one in (await http.get("/v1/providers")).json()["data"]}
    assert set(listed) >= {"azure", "aws", "google", "sarvam", "openai", "anthropic", "gemini", "vertex", "mistral"}
    assert listed["openai"]["missing"] is None
    assert "NOT_SET" in listed["openai2"]["missing"]
    assert listed["azure"]["timeout_hours"] == 48


async def test_verbs_on_the_job_of_a_task_are_refused(stage, http):
    made = (await http.post("/v1/tasks", json=transcription())).json()
    task = await stage.get(made["id"])
    fails(await http.post(f"/v1/jobs/{task.job_id}/cancel"), 409)
    body = {"job_type": "provider.task", "payload": {"task_id": task.id}}
    answer = await http.post("/v1/jobs", json=body)
    assert "belongs to tasks" in answer.text


async def test_a_deleted_input_stays_as_long_as_a_task_reads_it(stage, http):
    file = await stage.upload(b"audio", "one.wav")
    made = (await http.post("/v1/tasks", json=transcription(provider="sarvam", inputs=[file]))).json()
    await stage.batchwright.part(FilesPart).files.delete(file, tenant="default")
    used = "SELECT owner FROM batchwright.file_use WHERE file_id = %(id)s"
    assert await stage.batchwright.pool.rows(used, {"id": file}) == [(made["id"],)]
    stage.work()
    assert (await stage.ended(made["id"])).status.value == "COMPLETED"
    assert await stage.batchwright.pool.rows(used, {"id": file}) == []
