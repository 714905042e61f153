"""`compute_embeddings` from a file to a file: in order, each row once, with progress, and with a list of bad rows."""

import asyncio
import json

import pytest

from batchwright.errors import JobCancelled, JobFailed, PayloadInvalid
from batchwright.files.part import FilesPart
from batchwright.states import JobStatus
from tests.ingest.embeddings.stage import embedding_stage, jsonl, near, rows


@pytest.fixture
async def stage(database_url, tmp_path):
    async with embedding_stage(database_url, tmp_path) as stage:
        yield stage


async def test_ten_thousand_rows_become_one_file_in_the_order_of_the_input(stage):
    for _ in range(3):
        stage.work()
    given = rows(10_000)
    id = await stage.submit(jsonl(*given), batch_size=300)
    seen = []

    async def has_ended():
        job = await stage.batchwright.get(id)
        if job.progress_total:
            seen.append((job.progress_current, job.progress_total))
        return job.status not in (JobStatus.QUEUED, JobStatus.RUNNING)

    await stage.until(has_ended, 120)
    result = await stage.batchwright.wait(id)
    assert (result["rows"], result["failed"], result["dimensions"]) == (10_000, 0, 256)
    assert (result["model"], result["cost"], result["errors_file_id"]) == (None, 0.0, None)
    found = await stage.lines(result["file_id"])
    assert [line["id"] for line in found] == [row["id"] for row in given]
    assert all(near(found[n]["embedding"], given[n]["text"]) for n in range(0, 10_000, 997))
    assert seen == sorted(seen)
    assert seen[-1] == (34, 34)
    assert await stage.files() == [("embeddings", result["file_id"])]

    async def is_clean():
        return await stage.parts() == []

    await stage.until(is_clean)


async def test_the_local_model_is_the_default(stage):
    stage.work()
    result = await stage.run(jsonl({"id": 1, "text": "a cat"}, {"id": 2, "text": "a kitten"}), model=None)
    assert (result["rows"], result["dimensions"], result["model"]) == (2, 256, None)
    first, second = [line["embedding"] for line in await stage.lines(result["file_id"])]
    assert sum(a * b for a, b in zip(first, second, strict=True)) > 0.3


async def test_bad_rows_are_listed_and_the_others_are_embedded(stage):
    stage.work()
    data = b"".join(
        [
            b'\xef\xbb\xbf{"key": "a", "body": "good"}\n',
            b"\n",
            b"not json\r\n",
            b"[1]\n",
            b'{"key": "b"}\n',
            b'{"key": "c", "body": "  "}\n',
            b'{"key": "d", "body": 7}\n',
            b'{"body": "without an id"}\n',
            json.dumps({"key": "e", "body": "x" * 1_000_001}).encode() + b"\n",
            b'{"key": 12, "body": "no line end"}',
        ]
    )
    result = await stage.run(data, text_field="body", id_field="key", batch_size=2)
    assert [line["id"] for line in await stage.lines(result["file_id"])] == ["a", 8, 12]
    assert (result["rows"], result["failed"]) == (3, 6)
    assert result["errors"] == {"invalid_json": 1, "no_text": 2, "not_an_object": 1, "not_text": 1, "too_long": 1}
    listed = await stage.lines(result["errors_file_id"])
    assert [(one["row"], one["id"], one["code"]) for one in listed] == [
        (3, 3, "invalid_json"),
        (4, 4, "not_an_object"),
        (5, "b", "no_text"),
        (6, "c", "no_text"),
        (7, "d", "not_text"),
        (9, "e", "too_long"),
    ]
    assert listed[5]["message"] == "the text has 1,000,001 characters; the limit is 1,000,000"


async def test_a_file_of_bad_rows_fails_and_says_why(stage):
    stage.work()
    id = await stage.submit(jsonl(*({"id": n, "body": "here"} for n in range(5))), batch_size=2)
    with pytest.raises(JobFailed, match=r"none of the 5 rows could be embedded: 5 no_text\. The first: row 1: "):
        await stage.batchwright.wait(id, timeout=30)
    job = await stage.batchwright.get(id)
    assert job.error["code"] == "no_usable_rows"
    ((purpose, file),) = await stage.files()
    assert purpose == "embeddings_errors"
    assert file in job.error["message"]
    assert len(await stage.lines(file)) == 5


@pytest.mark.parametrize(
    ("data", "code"), [(b"", "empty_source"), (b"\n\n \n", "empty_source"), (b"PAR1 but not really", "damaged_file")]
)
async def test_a_file_that_holds_nothing_fails(stage, data, code):
    stage.work()
    id = await stage.submit(data)
    with pytest.raises(JobFailed, match=code):
        await stage.batchwright.wait(id, timeout=30)
    assert await stage.files() == []


async def test_a_file_of_another_tenant_is_not_found(stage):
    stage.work()
    file = await stage.upload(jsonl({"id": 1, "text": "secret"}), tenant="other")
    id = await stage.submit(file)
    with pytest.raises(JobFailed, match="input_not_found"):
        await stage.batchwright.wait(id, timeout=30)


async def test_a_file_that_is_deleted_while_the_job_runs_is_read_to_its_end(stage):
    file = await stage.upload(jsonl(*rows(10)))
    id = await stage.submit(file, batch_size=2)
    worker = stage.batchwright.worker()
    await worker.register()
    await worker.run_once()
    await stage.batchwright.part(FilesPart).files.delete(file, tenant="default")
    await worker.close()
    stage.work()
    assert (await stage.batchwright.wait(id, timeout=30))["rows"] == 10


@pytest.mark.parametrize(
    "payload",
    [
        {"source": "articles.jsonl"},
        {"source": {"table": "public.a", "id": "id"}},
        {"source": "file-" + "0" * 32, "batch_size": 0},
        {"source": "file-" + "0" * 32, "output": "csv"},
        {"source": "file-" + "0" * 32, "colour": "red"},
    ],
)
async def test_an_invalid_payload_is_refused_at_once(stage, payload):
    stage.batchwright.add_operations()
    with pytest.raises(PayloadInvalid):
        await stage.batchwright.enqueue("compute_embeddings", payload)


async def test_too_many_batches_are_refused_with_a_remedy(stage, monkeypatch):
    monkeypatch.setattr("batchwright.ingest.embeddings.process.BATCHES_MAX", 3)
    stage.work()
    id = await stage.submit(jsonl(*rows(10)), batch_size=2)
    with pytest.raises(JobFailed, match="more than 3 batches of 2 rows; raise batch_size"):
        await stage.batchwright.wait(id, timeout=30)


async def test_a_cancelled_job_stops_its_batches_and_leaves_no_result(stage):
    id = await stage.submit(jsonl(*rows(100)), batch_size=1)
    worker = stage.batchwright.worker()
    await worker.register()
    await worker.run_once()
    assert len(await stage.children(id)) == 100
    assert await stage.batchwright.cancel(id) == 101
    assert await worker.run_once() == 0
    await worker.close()
    with pytest.raises(JobCancelled):
        await stage.batchwright.wait(id)
    assert {child.status for child in await stage.children(id)} == {JobStatus.CANCELLED}
    assert await stage.files() == []


async def test_two_jobs_over_the_same_file_have_results_of_their_own(stage):
    stage.work()
    file = await stage.upload(jsonl(*rows(5)))
    first, second = await asyncio.gather(stage.run(file), stage.run(file))
    assert first["file_id"] != second["file_id"]
    assert await stage.content(first["file_id"]) == await stage.content(second["file_id"])
