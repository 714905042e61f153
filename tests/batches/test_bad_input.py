"""How batches end with bad files and bad answers, and which unusual files and endpoints work."""

from __future__ import annotations

import pytest

from batchwright.batches.part import BatchesPart
from batchwright.batches.store import window_seconds
from batchwright.errors import InvalidInput
from batchwright.states import BatchStatus
from tests.batches.stage import jsonl, request, staged

GOOD = request("good")


BAD = {
    "empty": (b"", "empty_file", None),
    "blank": (b"\n \r\n\n", "empty_file", None),
    "text": (b"this is not JSON\n", "invalid_json_line", 1),
    "cut": (jsonl([GOOD]) + b'{"custom_id": "half"', "invalid_json_line", 2),
    "twice": (jsonl([GOOD, GOOD]), "duplicate_custom_id", 2),
    "stream": (jsonl([request("s", stream=True)]), "streaming_unsupported", 1),
    "url": (jsonl([{**GOOD, "url": "/v1/embeddings"}]), "invalid_url", 1),
    "long id": (jsonl([{**GOOD, "custom_id": "x" * 513}]), "string_above_max_length", 1),
    "NUL": (jsonl([{**GOOD, "custom_id": "a\0b"}]), "invalid_value", 1),
}


async def test_a_bad_file_fails_its_batch_with_the_lines_that_are_bad(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        ids = {name: await stage.submit(data) for name, (data, _, _) in BAD.items()}
        for name, id in ids.items():
            batch = await stage.ended(id)
            assert batch.status is BatchStatus.FAILED, name
            assert [(one["code"], one["line"]) for one in batch.errors["data"]] == [BAD[name][1:]], name
            assert (batch.total, batch.output_file_id, batch.error_file_id) == (0, None, None)
        assert stage.simulator.stats()["received"] == 0


@pytest.mark.parametrize(
    ("data", "limits", "code", "line"),
    [
        (jsonl([request(f"r{n}") for n in range(4)]), {"requests_max": 3}, "too_many_tasks", None),
        (jsonl([GOOD]), {"file_bytes_max": len(jsonl([GOOD])) - 1}, "file_too_large", None),
        (jsonl([request("a", model="m1"), request("b", model="m2")]), {"models_max": 1}, "too_many_models", 2),
    ],
)
async def test_a_file_beyond_a_limit_fails_its_batch(database_url, tmp_path, data, limits, code, line):
    async with staged(database_url, tmp_path, batches=limits) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit(data))
        assert batch.status is BatchStatus.FAILED
        assert [(one["code"], one["line"]) for one in batch.errors["data"]] == [(code, line)]


async def test_unusual_but_valid_files_are_read(database_url, tmp_path):
    """A byte order mark, CRLF, blank lines, no newline at the end, a line of 4 MB, and content as an array."""
    parts = [{"type": "text", "text": "hello"}]
    array = {**GOOD, "custom_id": "array", "body": {"model": "small", "messages": [{"role": "user", "content": parts}]}}
    long = request("long", prompt="word " * 800_000)
    data = b"\xef\xbb\xbf" + b"\r\n".join([jsonl([GOOD]).strip(), b"", jsonl([array]).strip(), jsonl([long]).strip()])
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        batch = await stage.ended(await stage.submit(data))
        output, errors = await stage.results(batch)
        assert [line["custom_id"] for line in output] == ["good", "array", "long"]
        assert errors == []


@pytest.mark.parametrize("window", ["", "59s", "31d", "0h", "24", "1w", "-1h", "1.5h", "24h ", "9999999999d"])
def test_an_invalid_window_is_refused(window):
    with pytest.raises(InvalidInput, match="Supported values are"):
        window_seconds(window)


@pytest.mark.parametrize(("window", "seconds"), [("1m", 60), ("60s", 60), ("24h", 86_400), ("30d", 2_592_000)])
def test_a_window_may_be_a_minute_to_thirty_days(window, seconds):
    assert window_seconds(window) == seconds


async def test_an_input_whose_stored_bytes_are_lost_fails_the_batch(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        id = await stage.submit([GOOD])
        file = await stage.batchwright.part(BatchesPart).files.get(
            (await stage.get(id)).input_file_id, tenant="default"
        )
        await stage.batchwright.store.delete(file.key)
        stage.work()
        batch = await stage.ended(id)
        assert batch.status is BatchStatus.FAILED
        assert batch.errors["data"][0]["message"].startswith("Cannot find file file-")


FAULTS = {
    "big:bytes=17825792": "response_too_large",
    "not_json": "invalid_response",
    "truncate": "connection_lost",
    "error_body": "error_in_response",
}


async def test_an_unusable_answer_becomes_an_error_line(database_url, tmp_path):
    async with staged(database_url, tmp_path, global_inference_gateway={"max_retries": 1}) as stage:
        stage.work()
        lines = [request(fault, prompt=f"[[fault:{fault}]]") for fault in FAULTS]
        batch = await stage.ended(await stage.submit([*lines, GOOD]))
        output, errors = await stage.results(batch)
        assert batch.status is BatchStatus.COMPLETED
        assert [line["custom_id"] for line in output] == ["good"]
        assert {line["custom_id"]: line["error"]["code"] for line in errors} == FAULTS


async def test_the_other_endpoints_work_too(database_url, tmp_path):
    async with staged(database_url, tmp_path) as stage:
        stage.work()
        for endpoint in ("/v1/completions", "/v1/embeddings", "/v1/responses"):
            body = {"model": "small", "prompt" if endpoint == "/v1/completions" else "input": "hello"}
            lines = [{"custom_id": f"r{n}", "method": "POST", "url": endpoint, "body": body} for n in range(3)]
            batch = await stage.ended(await stage.submit(lines, endpoint=endpoint))
            assert (batch.status, batch.completed, batch.endpoint) == (BatchStatus.COMPLETED, 3, endpoint)
