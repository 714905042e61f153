"""Mistral's own client submits, polls and fetches."""

from datetime import UTC, datetime

import pytest

from tests.simulator.providers.support import KEY, blocking, finish, jsonl, opened, parsed, sdk

pytestmark = pytest.mark.thorough
"""These tests use official clients, which `.ci/run` installs."""

ENDPOINT = "/v1/chat/completions"


def mistral(server):
    client = sdk("mistralai.client").Mistral(api_key=KEY, server_url=server.urls["mistral"])
    return opened(client, "sdk_configuration.client.close")


def line(id, content):
    return {"custom_id": id, "body": {"messages": [{"role": "user", "content": content}], "max_tokens": 9}}


LINES = jsonl(line("a", "one"), line("b", "two [[fail:500]]"), line("c", "three"), line("d", "four"))


def submit(client, key="bw-1", lines=LINES):
    file = client.files.upload(file={"file_name": f"{key}.jsonl", "content": lines}, purpose="batch")
    metadata = {"bw_key": key}
    return client.batch.jobs.create(
        input_files=[file.id], model="mistral-test", endpoint=ENDPOINT, metadata=metadata, timeout_hours=24
    )


async def test_a_job_runs_and_its_two_files_are_read(providers):
    client = mistral(providers)
    job = await blocking(submit, client)
    assert (job.status, job.total_requests, job.metadata) == ("QUEUED", 4, {"bw_key": "bw-1"})
    providers.advance(35)
    running = await blocking(client.batch.jobs.get, job_id=job.id)
    assert (running.status, running.completed_requests, running.output_file) == ("RUNNING", 2, None)
    providers.advance(30)
    done = await blocking(client.batch.jobs.get, job_id=job.id)
    assert (done.status, done.succeeded_requests, done.failed_requests) == ("SUCCESS", 3, 1)
    lines = parsed((await blocking(lambda: client.files.download(file_id=done.output_file).read())).decode())
    assert [one["custom_id"] for one in lines] == ["a", "c", "d"]
    assert lines[0]["response"]["body"]["model"] == "mistral-test"
    (bad,) = parsed((await blocking(lambda: client.files.download(file_id=done.error_file).read())).decode())
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("b", 500)
    assert (await blocking(client.files.delete, file_id=job.input_files[0])).deleted


async def test_jobs_are_found_by_metadata_and_time(providers):
    client = mistral(providers)
    first = await blocking(submit, client, "bw-1")
    providers.advance(100)
    second = await blocking(submit, client, "bw-2")
    found = await blocking(client.batch.jobs.list, metadata={"bw_key": "bw-1"})
    assert [one.id for one in found.data] == [first.id]
    since = datetime.fromtimestamp(providers.clock.now() - 50, UTC)
    found = await blocking(client.batch.jobs.list, created_after=since)
    assert [one.id for one in found.data] == [second.id]
    page = await blocking(client.batch.jobs.list, page=1, page_size=1)
    assert ([one.id for one in page.data], page.total) == ([first.id], 2)


@pytest.mark.parametrize(("fault", "status"), [("expired", "TIMEOUT_EXCEEDED"), ("failed", "FAILED")])
async def test_a_job_that_fails_or_expires_says_so(providers, fault, status):
    providers.put_faults(fault)
    client = mistral(providers)
    job = await blocking(submit, client)
    finish(providers)
    done = await blocking(client.batch.jobs.get, job_id=job.id)
    assert (done.status, done.succeeded_requests) == (status, 1 if fault == "expired" else 0)
    assert bool(done.errors) == (fault == "failed")


async def test_a_job_is_cancelled_and_inline_requests_are_accepted(providers):
    client = mistral(providers)
    requests = [line("a", "one")]
    job = await blocking(client.batch.jobs.create, requests=requests, model="mistral-test", endpoint=ENDPOINT)
    assert (await blocking(client.batch.jobs.cancel, job_id=job.id)).status == "CANCELLATION_REQUESTED"
    finish(providers)
    assert (await blocking(client.batch.jobs.get, job_id=job.id)).status == "CANCELLED"
