"""Google's own client submits, polls and fetches, at the developer API and at Vertex."""

import io

import pytest

from tests.simulator.providers.support import KEY, blocking, finish, jsonl, opened, parsed, sdk

pytestmark = pytest.mark.thorough
"""These tests use official clients, which `.ci/run` installs."""

MODEL = "gemini-test"


def gemini(server, key=KEY):
    genai = sdk("google.genai")
    options = genai.types.HttpOptions(base_url=server.urls["gemini"])
    return opened(genai.Client(api_key=key, http_options=options))


def vertex(server):
    genai, credentials = sdk("google.genai"), sdk("google.oauth2.credentials")
    client = genai.Client(
        vertexai=True,
        project="p",
        location="us-central1",
        credentials=credentials.Credentials(KEY),
        http_options=genai.types.HttpOptions(base_url=server.urls["vertex"]),
    )
    return opened(client)


def request(text, **fields):
    return {"contents": [{"role": "user", "parts": [{"text": text}]}], **fields}


LINES = jsonl(
    {"key": "a", "request": request("one")},
    {"key": "b", "request": request("two [[fail:429]]")},
    {"key": "c", "request": request("three")},
)


def submit(client, lines=LINES, name="bw-1"):
    file = client.files.upload(file=io.BytesIO(lines), config={"mime_type": "application/jsonl", "display_name": name})
    assert (file.size_bytes, file.display_name) == (len(lines), name)
    return client.batches.create(model=MODEL, src=file.name, config={"display_name": name})


async def test_a_batch_of_a_file_runs_and_its_responses_are_downloaded(providers):
    client = gemini(providers)
    job = await blocking(submit, client)
    assert (job.state.name, job.display_name, job.name[:8]) == ("JOB_STATE_PENDING", "bw-1", "batches/")
    providers.advance(5)
    assert (await blocking(client.batches.get, name=job.name)).state.name == "JOB_STATE_RUNNING"
    finish(providers)
    done = await blocking(client.batches.get, name=job.name)
    assert done.state.name == "JOB_STATE_SUCCEEDED"
    lines = parsed(await blocking(client.files.download, file=done.dest.file_name))
    assert [one["key"] for one in lines] == ["a", "b", "c"]
    assert lines[0]["response"]["candidates"][0]["content"]["parts"][0]["text"] == "echo: one"
    assert lines[1]["error"]["code"] == 8
    assert len(providers.jobs("bw-1", "gemini")) == 1
    await blocking(client.batches.delete, name=job.name)
    assert providers.jobs("bw-1") == []


async def test_inline_requests_are_answered_in_their_order(providers):
    client = gemini(providers)
    tool = {"function_declarations": [{"name": "look"}]}
    source = [request("one"), {**request("[[tool]]"), "config": {"tools": [tool]}}]
    job = await blocking(client.batches.create, model=MODEL, src=source, config={"display_name": "bw-2"})
    finish(providers)
    done = await blocking(client.batches.get, name=job.name)
    first, second = done.dest.inlined_responses
    assert (first.response.text, first.response.usage_metadata.candidates_token_count) == ("echo: one", 3)
    assert second.response.function_calls[0].name == "look"


async def test_lists_have_pages_and_cancel_ends_without_results(providers):
    client = gemini(providers)
    made = [(await blocking(submit, client, name=f"bw-{n}")).name for n in range(3)]
    found = await blocking(lambda: list(client.batches.list(config={"page_size": 2})))
    assert [one.name for one in found] == made[::-1]
    await blocking(client.batches.cancel, name=made[0])
    finish(providers)
    assert (await blocking(client.batches.get, name=made[0])).state.name == "JOB_STATE_CANCELLED"
    assert (await blocking(client.batches.get, name=made[0])).dest is None


async def test_a_key_that_is_not_valid_is_a_bad_request(providers):
    genai, client = sdk("google.genai"), gemini(providers, "wrong")
    with pytest.raises(genai.errors.ClientError, match="API key not valid") as refused:
        await blocking(client.batches.get, name="batches/1")
    assert refused.value.code == 400


async def test_vertex_reads_and_writes_buckets(providers):
    client = vertex(providers)
    put(providers, "in/a.jsonl", LINES)
    config = {"display_name": "bw-3", "dest": "gs://bucket/out/bw-3"}
    job = await blocking(client.batches.create, model=MODEL, src="gs://bucket/in/a.jsonl", config=config)
    assert job.state.name == "JOB_STATE_PENDING"
    listed = await blocking(lambda: list(client.batches.list(config={"filter": 'display_name="bw-3"'})))
    assert [one.name for one in listed] == [job.name]
    assert await blocking(lambda: list(client.batches.list(config={"filter": 'display_name="bw-4"'}))) == []
    assert objects(providers, "out/") == []
    finish(providers)
    done = await blocking(client.batches.get, name=job.name)
    assert done.state.name == "JOB_STATE_PARTIALLY_SUCCEEDED"
    assert (done.completion_stats.successful_count, done.completion_stats.failed_count) == (2, 1)
    (name,) = objects(providers, "out/")
    assert f"gs://bucket/{name}" == f"{done.output_info.gcs_output_directory}/predictions.jsonl"
    lines = parsed(providers.world.blobs["bucket", name].data)
    assert [bool(one["status"]) for one in lines] == [False, True, False]
    assert lines[0]["request"] == request("one")


async def test_a_job_that_fails_has_the_code_of_the_fault(providers):
    providers.put_faults("failed:status=429:message=no room")
    put(providers, "in/a.jsonl", LINES)
    client = vertex(providers)
    config = {"display_name": "bw-6", "dest": "gs://bucket/out"}
    job = await blocking(client.batches.create, model=MODEL, src="gs://bucket/in/a.jsonl", config=config)
    finish(providers)
    done = await blocking(client.batches.get, name=job.name)
    assert (done.error.code, done.error.message) == (8, "no room")


async def test_a_vertex_job_without_its_input_fails(providers):
    client = vertex(providers)
    config = {"display_name": "bw-5", "dest": "gs://bucket/out"}
    job = await blocking(client.batches.create, model=MODEL, src="gs://bucket/none.jsonl", config=config)
    finish(providers)
    done = await blocking(client.batches.get, name=job.name)
    assert (done.state.name, done.error.code) == ("JOB_STATE_FAILED", 5)


def put(server, name, data):
    server.world.put_blob("bucket", name, data)


def objects(server, prefix):
    return [name for bucket, name in server.world.blobs if bucket == "bucket" and name.startswith(prefix)]
