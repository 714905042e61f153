"""Whole batches on real model servers: every kind of request, one that is too long, and a server that is killed."""

from __future__ import annotations

import contextlib
import json

import pytest

from batchwright.batches.journal.envelopes import request_id
from batchwright.states import BatchStatus
from tests.batches.stage import jsonl, request, staged
from tests.conftest import skip
from tests.models.servers import MODEL, Server, missing

pytestmark = pytest.mark.timeout(600)

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
SECONDS_MAX = 300.0


@pytest.fixture(params=["llama-cpp-python", "llama-server"])
def kind(request):
    if (reason := missing(request.param)) is not None:
        skip(reason)
    return request.param


def line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def gateways(**of_model):
    usual = {"initial_backoff": 0.1, "max_backoff": 1.0, "request_timeout": SECONDS_MAX}
    return {model: {"url": server.url, **usual} for model, server in of_model.items()}


async def test_a_real_server_answers_every_kind_of_request(database_url, tmp_path, kind):
    chat = [
        request("plain", model=MODEL, prompt="Say hi."),
        request("logprobs", model=MODEL, logprobs=True, top_logprobs=2),
        request("two", model=MODEL, n=2),
        request("json", model=MODEL, max_tokens=24, response_format={"type": "json_object"}),
        request("overflow", model=MODEL, prompt="word " * 2000),
    ]
    texts = [line("text", COMPLETIONS, prompt="Once upon a", max_tokens=4, logprobs=2)]
    vectors = [line("vectors", EMBEDDINGS, model="vectors", input=["hello", "world"])]
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(Server(kind, tmp_path))
        reader = stack.enter_context(Server(kind, tmp_path, is_for_embeddings=True))
        served = gateways(**{MODEL: writer, "vectors": reader})
        async with staged(database_url, tmp_path, model_gateways=served) as stage:
            ids = [await stage.submit(chat)]
            ids += [await stage.submit(texts, endpoint=COMPLETIONS), await stage.submit(vectors, endpoint=EMBEDDINGS)]
            stage.work()
            batches = [await stage.ended(id, SECONDS_MAX) for id in ids]
            results = [await stage.results(batch) for batch in batches]
    assert [batch.status for batch in batches] == [BatchStatus.COMPLETED] * 3
    output, errors = results[0]
    bodies = {one["custom_id"]: one["response"]["body"] for one in output}
    assert bodies.keys() == {"plain", "logprobs", "two", "json"}, errors
    assert {one["id"] for one in [*output, *errors]} == {request_id(ids[0], n) for n in offsets(chat)}
    plain = bodies["plain"]
    assert plain["choices"][0]["message"]["content"]
    assert plain["usage"]["total_tokens"] == plain["usage"]["prompt_tokens"] + plain["usage"]["completion_tokens"]
    assert len(bodies["logprobs"]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) >= 2
    # llama-cpp-python's server takes `n` and answers one choice.
    assert len(bodies["two"]["choices"]) == (2 if kind == "llama-server" else 1)
    (choice,) = bodies["json"]["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")
    (overflow,) = errors
    assert (overflow["custom_id"], overflow["response"]["status_code"]) == ("overflow", 400)
    assert "context" in json.dumps(overflow["response"]["body"])
    (text,) = results[1][0]
    assert text["response"]["body"]["choices"][0]["text"]
    assert text["response"]["body"]["choices"][0]["logprobs"]
    assert not results[2][1], results[2][1]
    (vector,) = results[2][0]
    assert len({len(one["embedding"]) for one in vector["response"]["body"]["data"]}) == 1
    assert len(vector["response"]["body"]["data"]) == 2


async def test_killing_the_server_in_the_middle_only_delays_the_batch(database_url, tmp_path, kind):
    lines = [request(f"r{n}", model=MODEL, max_tokens=6) for n in range(8)]
    with Server(kind, tmp_path) as server:
        async with staged(database_url, tmp_path, model_gateways=gateways(**{MODEL: server})) as stage:
            id = await stage.submit(lines)
            stage.work()
            begun = await stage.until(id, lambda batch: batch.completed >= 1, SECONDS_MAX)
            server.kill()
            assert begun.completed < len(lines)
            server.start()
            batch = await stage.ended(id, SECONDS_MAX)
            output, errors = await stage.results(batch)
    assert (batch.status, errors) == (BatchStatus.COMPLETED, [])
    assert [one["custom_id"] for one in output] == [one["custom_id"] for one in lines]


def offsets(lines):
    return [len(jsonl(lines[:n])) for n in range(len(lines))]
