"""Batches from Python: submit, follow, read results as they arrive, and control; real workers, a simulated server."""

from __future__ import annotations

import asyncio
import io
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest

from batchwright import AsyncBatchwright, BatchFailed, BatchStatus, Batchwright, Conflict, NotFound, WaitTimeout
from batchwright.batches.answers import BatchResult, RequestError, parse_result
from batchwright.batches.journal.envelopes import answered, unanswered
from batchwright.batches.part import BatchesPart
from batchwright.batches.requests import Defaults, _as_line, find_endpoint, gather
from batchwright.errors import ConfigurationError, InvalidInput, TooLarge
from batchwright.inference.answers import Reply, classify
from batchwright.settings import load_settings
from tests.batches.stage import CHAT, Stage, jsonl, request, staged
from tests.examples.test_docs import example

FAULT = "[[fault:400]]"


def bodies(n: int) -> Iterator[dict[str, Any]]:
    return ({"messages": [{"role": "user", "content": f"Say {i}."}], "max_tokens": 4} for i in range(n))


def client_beside(one: Stage, **options: Any) -> AsyncBatchwright:
    """A client that only submits: it has the same database and store, but no gateway."""
    settings = one.batchwright.settings
    tables = {
        "database": {"url": settings.database.url, "folder": settings.database.folder},
        "storage": {"url": settings.storage.url} if settings.storage.url else {},
        **options,
    }
    return AsyncBatchwright(settings=load_settings(tables, environment={}))


# Whole batches ----------------------------------------------------------------------------------------------------


async def test_requests_come_back_as_results_while_the_batch_runs(database_url, tmp_path):
    """Submitted and read by a client that has no gateway and runs no worker; one request fails."""
    async with staged(database_url, tmp_path) as one:
        one.work()
        await one.workers[0][0].started.wait()
        async with client_beside(one) as batchwright:
            requests = [*bodies(30), {"custom_id": "bad", "messages": [{"role": "user", "content": FAULT}]}]
            batch = await batchwright.batch(requests, model="small", metadata={"for": "test"})
            results = {result.custom_id: result async for result in batch.results()}
            assert results.keys() == {*(f"request-{n}" for n in range(1, 31)), "bad"}
            assert all(result.ok and result.text for id, result in results.items() if id != "bad")
            bad = results["bad"]
            assert (bad.ok, bad.status_code, bad.text, bad.error.status_code) == (False, 400, None, 400)
            assert bad.error.code in str(bad.error)

            ended = await batch.wait()
            assert (ended.status, ended.total, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 31, 30, 1)
            assert [one.custom_id async for one in batch.output()] == [f"request-{n}" for n in range(1, 31)]
            assert [one.custom_id async for one in batch.errors()] == ["bad"]

            again = await batch.retry()
            assert [one.custom_id async for one in again.results()] == ["bad"]
            listed = await batchwright.batches.list(limit=2)
            assert [one.id for one in listed] == [again.id, batch.id]


async def test_the_plain_client_does_the_same(database_url, tmp_path):
    async with staged(database_url, tmp_path) as one:
        one.work()

        def go() -> None:
            with Batchwright(settings=one.batchwright.settings) as batchwright:
                batch = batchwright.batch(bodies(12), model="small", idempotency_key="once")
                assert batchwright.batch(bodies(12), model="small", idempotency_key="once").id == batch.id
                with pytest.raises(Conflict, match="used before with another body"):
                    batchwright.batch(bodies(11), model="small", idempotency_key="once")
                seen = list(batch.follow())
                assert seen[-1].status is BatchStatus.COMPLETED
                assert [one.done for one in seen] == sorted(one.done for one in seen)
                assert len({result.custom_id for result in batch.results()}) == 12
                assert batchwright.batches[batch.id].wait(timeout=5).completed == 12
                assert len([*batch.output()]) == 12
                assert [*batch.errors()] == []
                batch.save(tmp_path / "out.jsonl", tmp_path / "errors.jsonl")
                assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 12
                assert (tmp_path / "errors.jsonl").read_bytes() == b""
                with pytest.raises(Conflict, match="no line is known to have failed"):
                    batch.retry()
                assert batchwright.batches.list()[0].id == batch.id

        await asyncio.to_thread(go)


async def test_a_file_goes_in_by_its_path_and_open(database_url, tmp_path):
    data = jsonl([request("a"), request("b")])
    (tmp_path / "in.jsonl").write_bytes(data)
    async with staged(database_url, tmp_path) as one:
        one.work()
        batches = [
            await one.batchwright.batch(str(tmp_path / "in.jsonl")),
            await one.batchwright.batch(tmp_path / "in.jsonl", endpoint=CHAT),
            await one.batchwright.batch(io.BytesIO(data)),
            await one.batchwright.batch(lines(data)),
        ]
        for batch in batches:
            assert {result.custom_id async for result in batch.results()} == {"a", "b"}


async def lines(data: bytes) -> AsyncIterator[dict[str, Any]]:
    for line in data.splitlines():
        yield orjson.loads(line)


async def test_a_reader_resumes_behind_a_cursor_and_gets_the_rest_once(database_url, tmp_path):
    async with staged(database_url, tmp_path) as one:
        one.work()
        batch = await one.batchwright.batch(bodies(20), model="small")
        await batch.wait(timeout=60)
        first = []
        async for result in batch.results():
            first.append(result)
            if len(first) == 7:
                break
        rest = [result async for result in one.batchwright.batches[batch.id].results(after=first[-1].cursor)]
        assert len(rest) == 13
        assert len({result.custom_id for result in [*first, *rest]}) == 20
        with pytest.raises(InvalidInput, match="is not a cursor of this batch"):
            await anext(batch.results(after="nonsense"))


async def test_lines_that_never_got_an_answer_are_results_too(database_url, tmp_path):
    """They are only in the error file; each one is still returned once."""
    async with staged(database_url, tmp_path) as one:
        batch = await one.batchwright.batch(bodies(8), model="small")
        await batch.pause()
        assert (await batch.progress()).is_paused
        await batch.resume()
        await batch.cancel()
        one.work()
        results = [result async for result in batch.results()]
        ended = await batch.wait(timeout=60)
        assert ended.status is BatchStatus.CANCELLED
        assert len({result.custom_id for result in results}) == len(results) == ended.done
        assert {result.error.code for result in results if not result.ok} <= {"batch_cancelled"}


async def test_when_journals_are_removed_results_come_from_the_files(database_url, tmp_path):
    async with staged(database_url, tmp_path) as one:
        one.work()
        batch = await one.batchwright.batch(
            [*bodies(3), {"custom_id": "bad", "messages": [{"role": "user", "content": FAULT}]}], model="small"
        )
        cursor, *_ = [result.cursor async for result in batch.results()]
        await one.batchwright.queue.database.rows(
            "UPDATE batchwright.batch SET segments_gone_at = now() WHERE id = %(id)s", {"id": batch.id}
        )
        results = [result async for result in batch.results()]
        assert [(result.custom_id, result.ok) for result in results] == [
            ("request-1", True), ("request-2", True), ("request-3", True), ("bad", False)
        ]  # fmt: skip
        assert {result.cursor for result in results} == {None}
        with pytest.raises(NotFound, match="read output\\(\\) and errors\\(\\)"):
            await anext(batch.results(after=cursor))


async def test_another_machine_without_a_shared_work_folder_gets_results_at_the_end(database_url, tmp_path):
    url = (tmp_path / "store").as_uri()
    async with staged(database_url, tmp_path / "here", storage={"url": url}) as one:
        one.work()
        await one.workers[0][0].started.wait()
        tables = {"database": {"url": database_url, "folder": str(tmp_path / "there")}, "storage": {"url": url}}
        async with AsyncBatchwright(settings=load_settings(tables, environment={})) as batchwright:
            batch = await batchwright.batch(bodies(5), model="small")
            results = [result.custom_id async for result in batch.results()]
            assert sorted(results) == [f"request-{n}" for n in range(1, 6)]


async def test_a_result_is_returned_before_the_batch_has_ended(database_url, tmp_path):
    async with staged(database_url, tmp_path, batches={"cancel_grace_seconds": 0.1}) as one:
        one.work()
        slow = {"custom_id": "slow", "messages": [{"role": "user", "content": "[[fault:hang]]"}]}
        batch = await one.batchwright.batch([*bodies(2), slow], model="small")
        results = batch.results()
        early = [await anext(results), await anext(results)]
        assert {result.custom_id for result in early} == {"request-1", "request-2"}
        assert (await batch.progress()).status is BatchStatus.IN_PROGRESS
        await batch.cancel()
        assert [(result.custom_id, result.error.code) async for result in results] == [("slow", "batch_cancelled")]


async def test_a_batch_that_fails_as_a_whole_says_why(database_url, tmp_path):
    async with staged(database_url, tmp_path) as one:
        one.work()
        batch = await one.batchwright.batch([{"custom_id": "a", "messages": []}, *bodies(1)])
        with pytest.raises(BatchFailed, match=rf"batch {batch.id} failed: line 1: ") as caught:
            await anext(batch.results())
        assert caught.value.problems[0]["line"] == 1
        for ask in (batch.wait(), anext(batch.output())):
            with pytest.raises(BatchFailed):
                await ask
        assert (await batch.progress()).status is BatchStatus.FAILED


async def test_waiting_ends_after_the_timeout(database_url, tmp_path):
    async with staged(database_url, tmp_path) as one:
        batch = await one.batchwright.batch(bodies(1), model="small")
        assert str(await batch.progress()) == "validating, 0 of 0 requests done"
        with pytest.raises(WaitTimeout, match=f"batch {batch.id} has not ended after 0.05 seconds"):
            await batch.wait(timeout=0.05)


async def test_without_any_worker_for_batches_it_is_refused(database_url, tmp_path):
    settings = load_settings({"database": {"url": database_url, "folder": str(tmp_path)}}, environment={})
    async with AsyncBatchwright(settings=settings) as batchwright:
        requests = bodies(1)
        with pytest.raises(ConfigurationError, match="no worker runs batches"):
            await batchwright.batch(requests, model="small")
        assert len([*requests]) == 1, "the requests were read although no batch can be made"
        assert await batchwright.batches.list() == []
        with pytest.raises(NotFound, match="there is no batch 'batch_nope'"):
            await batchwright.batches["batch_nope"].progress()


def test_a_client_that_is_not_open_says_so_before_it_reads_the_requests():
    requests, client = bodies(1), Batchwright(database_url="postgresql://nowhere")
    with pytest.raises(InvalidInput, match="not open"):
        client.batch(requests)
    assert len([*requests]) == 1, "the requests were read although no batch can be made"


BAD_INPUT = [
    ("nowhere.jsonl", {}, "nowhere.jsonl cannot be read"),
    ({"messages": []}, {}, "requests is a dict; give the path of a file"),
    (b"{}", {}, "requests is a bytes"),
    (17, {}, "requests is a int"),
    (["Hello"], {}, "request 1 is a str, and not a dict"),
    ([{"body": []}], {}, "the body of request 1 is a list"),
    ([{"body": {}, "model": "small"}], {}, "request 1 has the field 'model' beside its body"),
    ([{"n": {1, 2}}], {}, "request 1 is not JSON"),
    (io.StringIO("{}"), {}, "binary mode"),
    (io.BytesIO(b"{}"), {"model": "small"}, "in a file each line names its model"),
    ([{}], {"endpoint": "/v1/nope"}, "endpoint '/v1/nope' is not supported in batches"),
    ([{}], {"window": "1s"}, "from '1m' to '30d'"),
    ([{}], {"priority": 10}, "priority is 10"),
    ([{}], {"tenant": ""}, "tenant has 0 characters; it must have 1 to 100"),
    ([{}], {"idempotency_key": "k" * 256}, "idempotency_key has 256 characters; it must have 1 to 255"),
    ([{}], {"max_in_flight": 0}, "max_in_flight is 0; use 1 to"),
    ([{}], {"colour": "red"}, "a batch has no option 'colour'; there are: endpoint"),
    ([{}], {"headers": {"X-Team": "search"}}, "the header 'x-team' is not in passthrough_headers of any gateway"),
    ([{}], {"metadata": {"": "x"}}, "metadata"),
]


async def test_bad_input_is_refused_before_anything_is_stored(database_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with staged(database_url, tmp_path) as one:
        for requests, options, text in BAD_INPUT:
            with pytest.raises(InvalidInput, match=text):
                await one.batchwright.batch(requests, **options)
        with pytest.raises(InvalidInput, match="limit is 0"):
            await one.batchwright.batches.list(limit=0)
        assert await one.batchwright.batches.list() == []
        assert await one.batchwright.part(BatchesPart).files.list("default") == []


async def test_the_program_of_the_docs_runs_as_printed(database_url, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_URL", database_url)
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_FOLDER", str(tmp_path))
    program = compile(example("batch_client.py"), "batch_client.py", "exec")
    async with staged(database_url, tmp_path) as one:
        one.work()
        await one.workers[0][0].started.wait()
        await asyncio.to_thread(exec, program, {})
    id, *answers, last = capsys.readouterr().out.splitlines()
    assert id.startswith("batch_")
    assert {line.split()[0] for line in answers} == {"saw", "plane", "chisel"}
    assert last == "3 answers"


# Requests ---------------------------------------------------------------------------------------------------------


def test_a_request_is_a_line_or_a_body():
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}
    assert orjson.loads(_as_line(whole, 1, Defaults(CHAT, "other"))) == whole
    assert orjson.loads(_as_line({"input": "x"}, 3, Defaults("/v1/embeddings", "m"))) == {
        **whole, "custom_id": "request-3"
    }  # fmt: skip
    assert orjson.loads(_as_line({"body": {}}, 1, Defaults()))["url"] == CHAT


def test_the_endpoint_is_read_from_the_lines(tmp_path):
    file = tmp_path / "in.jsonl"
    for urls, endpoint in (
        ([], CHAT), (["/v1/embeddings"] * 2, "/v1/embeddings"), (["/v1/embeddings", CHAT], "mixed"), (["/nope"], CHAT)
    ):  # fmt: skip
        file.write_bytes(b"".join(b'{"url":"%b"}\n' % url.encode() for url in urls) + b"no JSON\n")
        assert find_endpoint(file) == endpoint


def test_a_large_iterable_is_not_held_in_memory_and_has_a_limit():
    made = ({"messages": [{"role": "user", "content": "x" * 1000}]} for _ in range(5_000))
    tracemalloc.start()
    try:
        with gather(made, Defaults(), 100_000_000) as file:
            assert file.stat().st_size > 5_000_000
            assert file.parent.stat().st_mode & 0o077 == 0
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert not file.parent.exists()
    with (
        pytest.raises(TooLarge, match=r"more than 1000 bytes, the limit batches\.file_bytes_max"),
        gather(iter([{"x": "y" * 2000}]), Defaults(), 1000),
    ):
        pass


# Results ----------------------------------------------------------------------------------------------------------


def test_a_result_is_either_an_answer_or_an_error():
    def answer(status: int, body: bytes) -> BatchResult:
        answer = classify(Reply(status=status, body=body), now=0.0)
        return parse_result(answered("batch_req_0", "a", answer))

    chat = answer(200, b'{"choices":[{"message":{"content":"Hi"}}]}')
    assert (chat.ok, chat.text, chat.error, chat.status_code) == (True, "Hi", None, 200)
    assert answer(200, b'{"choices":[{"text":"Hi"}]}').text == "Hi"
    assert answer(200, b'{"output":[{"type":"reasoning"},{"content":[{"text":"H"},{"text":"i"}]}]}').text == "Hi"
    assert answer(200, b'{"data":[{"embedding":[1]}]}').text is None
    refused = answer(429, b'{"error":{"code":"too_many","message":"slow down"}}')
    assert (refused.ok, str(refused.error), refused.error.status_code) == (False, "too_many: slow down", 429)
    body = b'{"error":{"code":"too_many","message":"slow down"}}'
    line = answered("batch_req_0", "a", classify(Reply(status=429, body=body), now=0.0))
    resumable = parse_result(line.removesuffix(b"}\n") + b',"cursor":"7:42"}\n')
    assert (resumable.cursor, resumable.error) == ("7:42", refused.error), "the same as without a cursor"
    assert answer(400, b'{"detail":"oh"}').error == RequestError(code="http_400", message="oh", status_code=400)
    assert answer(400, b'{"why":"oh"}').error.message == '{"why":"oh"}'
    late = parse_result(unanswered("batch_req_0", "a", "batch_expired"))
    assert (late.ok, late.body, late.error.code, late.error.status_code) == (False, None, "batch_expired", None)
