"""The simulator as seen by a client of a model server: formats, usage, capacity, aborts and counts."""

import asyncio
import base64
import json

import pytest
import xxhash

from batchwright.errors import ConfigurationError
from batchwright.simulator import Profile, running, running_process
from tests.simulator.cost import measure
from tests.simulator.wire import CHAT, ask, chat, until, wire

pytestmark = pytest.mark.timeout(60)

SLOW = Profile(prefill_rate=1000, decode_rate=1, max_running=2)


async def test_a_chat_completion_has_the_shape_of_openai():
    async with running() as simulator:
        status, headers, body = await ask(simulator.url, chat("Hello!"), x_request_id="abc")
        assert (status, headers["x-request-id"], headers["content-type"]) == (200, "abc", "application/json")
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["role"] == "assistant"
        assert -(-len(choice["message"]["content"]) // 4) == 8 == body["usage"]["completion_tokens"]
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (body["object"], body["model"]) == ("chat.completion", "m")
        assert body["id"].startswith("chatcmpl-")


async def test_completions_responses_embeddings_and_moderations_have_theirs():
    async with running() as simulator:
        url = simulator.url
        _, _, text = await ask(url, {"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 3}, "/v1/completions")
        assert [one["index"] for one in text["choices"]] == [0, 1, 2, 3]
        assert text["usage"]["completion_tokens"] == 12
        request = {"model": "m", "input": "x" * 400, "instructions": "Be brief."}
        _, _, answer = await ask(url, request, "/v1/responses")
        assert (answer["object"], answer["status"], answer["incomplete_details"]) == ("response", "completed", None)
        assert answer["output"][0]["content"][0]["text"]
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 0
        _, _, again = await ask(url, {**request, "max_output_tokens": 5}, "/v1/responses")
        assert (again["status"], again["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == 96
        _, _, found = await ask(url, {"model": "m", "input": ["a", "bcdef"], "dimensions": 5}, "/v1/embeddings")
        assert [len(one["embedding"]) for one in found["data"]] == [5, 5]
        assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        coded = {"model": "m", "input": [1, 2, 3], "encoding_format": "base64"}
        _, _, found = await ask(url, coded, "/v1/embeddings")
        assert len(base64.b64decode(found["data"][0]["embedding"])) == 4 * 256
        assert found["usage"]["prompt_tokens"] == 3
        assert (await ask(url, {"input": "fine"}, "/v1/moderations"))[2]["results"][0]["flagged"] is False


async def test_scores_and_rankings_have_the_shapes_of_vllm():
    async with running() as simulator:
        url, pair = simulator.url, {"model": "m", "text_1": "q" * 8, "text_2": ["a" * 7, "b" * 7]}
        _, _, scores = await ask(url, pair, "/v1/score")
        assert (scores["object"], [one["object"] for one in scores["data"]]) == ("list", ["score", "score"])
        assert [one["index"] for one in scores["data"]] == [0, 1]
        assert all(0 <= one["score"] < 1 for one in scores["data"])
        assert scores["usage"]["prompt_tokens"] == scores["usage"]["total_tokens"] == 8
        _, _, again = await ask(url, {"model": "m", "queries": "q" * 8, "documents": ["a" * 7, "b" * 7]}, "/score")
        assert again["data"] == scores["data"]
        wanted = {"model": "m", "query": "q" * 8, "documents": ["a" * 7, "b" * 7]}
        _, _, ranked = await ask(url, wanted, "/v2/rerank")
        found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
        assert list(found.values()) == sorted((one["score"] for one in scores["data"]), reverse=True)
        assert [one["document"]["text"] for one in ranked["results"]] == [wanted["documents"][n] for n in found]
        _, _, best = await ask(url, {**wanted, "top_n": 1}, "/v1/rerank")
        assert best["results"] == ranked["results"][:1]
        status, _, error = await ask(url, {**wanted, "documents": []}, "/v1/rerank")
        assert (status, error["error"]["param"]) == (400, "query")
        status, _, _ = await ask(url, {**pair, "text_1": ["q", "r", "s"]}, "/v1/score")
        assert status == 400
        assert simulator.stats()["models"]["m"]["completion_tokens"] == 0


async def test_equal_seeds_write_equal_texts_and_lengths():
    body = {"model": "m", "messages": [{"role": "user", "content": "How long?"}]}

    async def written(seed):
        async with running(seed=seed) as simulator:
            choice = (await ask(simulator.url, body))[2]["choices"][0]
            assert choice["finish_reason"] == "stop"
            return choice["message"]["content"]

    assert await written(1) == await written(1) != await written(2)


async def test_lengths_without_a_maximum_have_the_median_of_the_profile():
    async with running(any_model=Profile(output_tokens=40, output_sigma=0.5)) as simulator, wire(simulator.url) as one:
        lengths = []
        for n in range(300):
            _, _, raw = await one.ask({"model": "m", "prompt": f"prompt {n}"}, "/v1/completions")
            lengths.append(json.loads(raw)["usage"]["completion_tokens"])
        assert 34 <= sorted(lengths)[150] <= 46
        assert 55 <= sorted(lengths)[252] <= 80  # e^0.5 is 1.65


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, b"{", None, "is not valid for /v1/chat/completions"),
        (CHAT, b"[]", None, "is not valid"),
        (CHAT, {"messages": [{}]}, "model", "you must provide a model"),
        (CHAT, {"model": "m"}, "messages", "at least one message"),
        (CHAT, chat(stream=True), "stream", "does not stream"),
        (CHAT, chat(max_tokens=0), "max_tokens", "max_tokens is 0"),
        (CHAT, chat(n=1000), "n", "n is 1000"),
        ("/v1/completions", {"model": "m"}, "prompt", "must be a string"),
        ("/v1/embeddings", {"model": "m", "input": [{}]}, None, "must be a string or a list of token numbers"),
        ("/v1/responses", {"model": "m"}, "input", "must provide an input"),
    ],
)
async def test_a_wrong_body_is_refused_with_its_reason(path, body, param, message):
    async with running() as simulator:
        status, _, found = await ask(simulator.url, body, path)
        assert (status, found["error"]["param"]) == (400, param)
        assert message in found["error"]["message"]
        assert simulator.stats()["in_flight"] == 0


async def test_unknown_models_are_not_found_and_any_model_has_a_limit():
    async with running(models={"m": Profile()}) as simulator:
        status, _, body = await ask(simulator.url, chat(model="other"))
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        _, _, models = await ask(simulator.url, b"", "/v1/models", "GET")
        assert [one["id"] for one in models["data"]] == ["m"]
    async with running(any_model=Profile(), any_model_max=2) as simulator:
        assert [(await ask(simulator.url, chat(model=name)))[0] for name in "abca"] == [200, 200, 404, 200]


async def test_a_key_is_required_everywhere_but_for_health():
    async with running(api_key="s3") as simulator:
        assert (await ask(simulator.url, chat()))[2]["error"]["code"] == "invalid_api_key"
        assert (await ask(simulator.url, b"", "/simulator/stats", "GET"))[0] == 401
        assert (await ask(simulator.url, b"", "/health", "GET"))[0] == 200
        assert (await ask(simulator.url, chat(), authorization="Bearer s3"))[0] == 200
        assert simulator.stats()["answered"] == {"200": 1, "401": 1}


async def test_a_prompt_longer_than_the_context_is_refused():
    async with running(any_model=Profile(context_tokens=100)) as simulator:
        status, _, body = await ask(simulator.url, chat("x" * 400))
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_cached_tokens_are_those_that_an_earlier_prompt_shares():
    system = {"role": "system", "content": "s" * 1000}
    async with running() as simulator:
        usage = []
        for n in range(3):
            body = chat()
            body["messages"] = [system, {"role": "user", "content": f"{n} differs " + "y" * 300}]
            usage.append((await ask(simulator.url, body))[2]["usage"])
        shared = len("<|system|>" + "s" * 1000 + "\n<|user|>") // 64 * 16
        assert [one["prompt_tokens_details"]["cached_tokens"] for one in usage] == [0, shared, shared]
        blocks = simulator.stats()["models"]["m"]["block_tokens"]
        assert blocks["cached"] == 2 * shared == blocks["total"] - blocks["distinct"]
        assert (blocks["cached_share"], blocks["is_exact"]) == (1.0, True)
        await ask(simulator.url, b"", "/simulator/reset")
        assert simulator.stats()["models"]["m"]["block_tokens"]["held"] == 0


async def test_requests_over_the_capacity_wait_or_are_refused():
    profile = Profile(decode_rate=1, max_running=1, max_waiting=1, refuse_status=503, retry_after=4)
    async with running(models={"m": profile}) as simulator, wire(simulator.url) as one, wire(simulator.url) as two:
        asking = [asyncio.create_task(connection.ask(chat(max_tokens=1000))) for connection in (one, two)]
        await until(lambda: simulator.stats()["in_flight"] == 2)
        status, headers, body = await ask(simulator.url, chat())
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "4", "overloaded")
        model = simulator.stats()["models"]["m"]
        assert (model["running"], model["waiting"], model["refused"]) == (1, 1, 1)
        simulator.change("m", {"decode_rate": 0})
        assert [(await task)[0] for task in asking] == [200, 200]


async def test_a_client_that_leaves_frees_its_slot_at_once_and_is_counted():
    async with running(models={"m": SLOW}) as simulator, wire(simulator.url) as stays:
        asking = asyncio.create_task(stays.ask(chat("stays", max_tokens=1000)))
        async with wire(simulator.url) as runs, wire(simulator.url) as queues:
            tasks = [asyncio.create_task(one.ask(chat(max_tokens=1000))) for one in (runs, queues)]
            await until(lambda: simulator.stats()["in_flight"] == 3)
            [task.cancel() for task in tasks]
        await until(lambda: simulator.stats()["aborted"]["total"] == 2)
        found = simulator.stats()
        assert (found["models"]["m"]["running"], found["models"]["m"]["waiting"]) == (1, 0)
        assert found["aborted"]["running"] >= 1
        assert found["aborted_after_seconds"]["max"] < 10
        assert found["last_aborted_at"] >= found["last_received_at"]
        asking.cancel()


async def test_a_client_that_leaves_when_its_answer_is_just_done_is_counted_once(monkeypatch):
    async with running(models={"m": SLOW}) as simulator:
        asking = asyncio.create_task(ask(simulator.url, chat("Hello!")))
        await until(lambda: simulator.stats()["in_flight"] == 1)
        late = simulator._now() + 1000
        monkeypatch.setattr(simulator, "_now", lambda: late)
        asking.cancel()
        await until(lambda: simulator.stats()["in_flight"] < 1)
        found = simulator.stats()
        assert found["in_flight"] == 0
        assert sum(found["answered"].values()) + found["aborted"]["total"] == 1, "answered or aborted, and not both"


async def test_time_can_run_faster_than_real_time():
    profile = Profile(prefill_rate=1000, decode_rate=10)
    async with running(models={"m": profile}, time_scale=1000) as simulator:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await ask(simulator.url, chat(max_tokens=100)))[0] == 200
        assert 0.009 < loop.time() - began < 2
        assert simulator.stats()["models"]["m"]["total_seconds"]["mean"] >= 10


async def test_it_counts_how_often_each_request_was_received():
    async with running(faults=["500:match=twice:times=1"]) as simulator:
        once, twice = chat("once"), chat("twice")
        for body in (once, twice, twice):
            await ask(simulator.url, body, x_request_id="same")
        _, _, found = await ask(simulator.url, b"", "/simulator/asked?over=1", "GET")
        key = f"{xxhash.xxh3_64_intdigest(json.dumps(twice).encode()):016x}"
        assert found["requests"] == {key: 2}
        assert (found["total"], found["distinct"], found["repeated"], found["max"]) == (3, 2, 1, 2)
        assert simulator.asked(by="served", over=1)["count"] == 0
        assert simulator.asked(by="request_id")["requests"] == {"same": 3}
        assert (await ask(simulator.url, b"", "/simulator/asked?by=x", "GET"))[0] == 400
        assert (await ask(simulator.url, b"", "/simulator/asked?over=x", "GET"))[0] == 400
        await ask(simulator.url, b"", "/simulator/reset")
        assert simulator.asked()["total"] == 0


async def test_the_number_of_remembered_requests_has_a_limit_that_is_reported():
    async with running(asked_max=2) as simulator:
        for n in range(4):
            await ask(simulator.url, chat(str(n)))
        found = simulator.asked()
        assert (found["total"], found["distinct"], found["overflow"], found["repeated"]) == (4, 2, 2, 0)


async def test_a_capacity_is_changed_over_http_and_a_wrong_one_refused():
    async with running(models={"m": Profile()}) as simulator:
        change = {"model": "m", "max_running": 7}
        assert (await ask(simulator.url, change, "/simulator/models"))[2]["m"]["profile"]["max_running"] == 7
        for wrong in ({"model": "m", "max_running": 0}, {"model": "x"}, {"max_running": 1}, [1], b"{"):
            assert (await ask(simulator.url, wrong, "/simulator/models"))[0] == 400


async def test_a_port_in_use_is_an_error_that_names_it():
    async with running() as simulator:
        port = int(simulator.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with running(port=port):
                pass


def test_the_command_serves_counts_and_leaves_its_counts_behind():
    with running_process("--model", "qwen:7b", "--fault", "503:1", "--max-running", "3", api_key="k") as simulator:
        assert simulator.stats()["models"]["qwen"]["profile"]["max_running"] == 3
        simulator.put_faults([])
        simulator.change("qwen", decode_rate=0)
        simulator.reset()
        assert simulator.asked()["total"] == 0
        simulator.process.terminate()
        out, _ = simulator.process.communicate(timeout=10)
        assert json.loads(out)["received"] == 0
        assert simulator.process.returncode == 0


def test_a_request_costs_the_simulator_little():
    cost, _ = measure(3000, 100)
    assert cost < 400, f"{cost:.0f} µs; 60 to 85 on two busy shared cores"
