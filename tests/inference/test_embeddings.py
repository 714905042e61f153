"""Vectors from a server that fails in every way."""

import asyncio
import base64
import itertools
import math
from array import array

import orjson
import pytest

from batchwright.errors import ConfigurationError, DatabaseUnavailable, Fatal, RateLimited, SchemaInvalid, Transient
from batchwright.inference.calls import InputRefused, Refused
from batchwright.inference.embeddings import PackLimits, RemoteEmbedder
from batchwright.inference.gateway import Gateway
from batchwright.inference.sending import run_all
from batchwright.inference.settings import GatewaySettings
from batchwright.inference.vectors import dimensions_of, embedding_body, parse_embeddings, read_vectors
from batchwright.simulator.run import running
from tests.inference.ledger import MemoryLedger
from tests.inference.server import answer
from tests.ingest.fake_provider import DIMENSIONS, MARKER, FakeProvider, vector_of


@pytest.fixture
async def provider():
    async with FakeProvider() as provider:
        yield provider


@pytest.fixture
def ledger():
    return MemoryLedger()


@pytest.fixture
async def embedder(provider):
    async with embedder_of(provider, limits=PackLimits(inputs=4)) as embedder:
        yield embedder


class embedder_of:
    def __init__(self, server, **options):
        self._gateway = Gateway(GatewaySettings(url=server.url), environment={})
        self._embedder = RemoteEmbedder(self._gateway, "small", **options)

    async def __aenter__(self):
        return self._embedder

    async def __aexit__(self, *error):
        await self._gateway.close()


def texts(count, **others):
    return {f"{n:04}".encode(): f"text number {n}" for n in range(count)} | {
        key.encode(): text for key, text in others.items()
    }


def floats(vector):
    return array("f", vector)


def unit(text):
    vector = vector_of(text)
    length = math.hypot(*vector)
    return pytest.approx([number / length for number in vector], abs=1e-6)


async def test_many_texts_are_sent_in_few_requests_and_vectors_get_length_one(provider, embedder, ledger):
    wanted = texts(10)
    await embedder.embed(wanted, ledger)
    assert [one["inputs"] for one in provider.entries] == [4, 4, 2]
    assert ledger.values.keys() == wanted.keys()
    for key, text in wanted.items():
        assert floats(ledger.values[key]).tolist() == unit(text)
    assert embedder.dimensions == DIMENSIONS
    assert {one["body"]["encoding_format"] for one in provider.requests} == {"base64"}


async def test_the_ledger_holds_the_bill_and_each_call_its_id(provider, embedder, ledger):
    await embedder.embed(texts(10), ledger)
    assert ledger.tokens == (provider.bill["input_tokens"], 0)
    assert {one["id"] for one in provider.entries} == ledger.usage.keys() == ledger.begun.keys()


async def test_a_pack_has_at_most_the_allowed_tokens_and_a_longer_text_is_sent_alone(provider, ledger):
    async with embedder_of(provider, limits=PackLimits(tokens=100)) as embedder:
        wanted = {b"a": "x" * 150, b"b": "x" * 120, b"c": "x" * 600, b"d": "x" * 150, b"e": "x" * 150}
        await embedder.embed(wanted, ledger)
    assert [len(one["body"]["input"]) for one in provider.requests] == [2, 1, 2]


async def test_packs_grow_when_the_length_of_vectors_is_known(provider, ledger):
    async with embedder_of(provider, limits=PackLimits(answer_bytes=4096 * 24 * 3), concurrency=1) as embedder:
        await embedder.embed(texts(100), ledger)
    sizes = [len(one["body"]["input"]) for one in provider.requests]
    assert sizes[0] == 3
    assert sizes[-1] > 50


@pytest.mark.parametrize("place", range(9))
async def test_a_text_that_is_refused_fails_alone(provider, embedder, ledger, place):
    wanted = texts(9)
    bad = sorted(wanted)[place]
    wanted[bad] = f"please {MARKER}"
    with pytest.raises(InputRefused) as caught:
        await embedder.embed(wanted, ledger)
    assert caught.value.codes == {bad: "invalid_value"}
    assert bad.hex() in str(caught.value)
    assert "please" not in str(caught.value)
    assert ledger.values.keys() == wanted.keys() - {bad}
    assert not ledger.open
    assert ledger.tokens[0] == provider.bill["input_tokens"]


async def test_several_refused_texts_are_all_named(provider, embedder, ledger):
    wanted = texts(9, bad=MARKER, worse=MARKER * 2)
    with pytest.raises(InputRefused) as caught:
        await embedder.embed(wanted, ledger)
    assert caught.value.codes.keys() == {b"bad", b"worse"}
    assert len(ledger.values) == 9


async def test_if_a_server_refuses_all_texts_they_are_not_sent_one_by_one(provider, ledger):
    async with embedder_of(provider) as embedder:
        with pytest.raises(SchemaInvalid):
            await embedder.embed({f"{n:04}".encode(): MARKER for n in range(500)}, ledger)
    assert len(provider.requests) < 100
    assert provider.entries == []


async def test_a_field_that_the_server_does_not_know_fails_no_text(provider, ledger):
    provider.set(refused_fields=["dimensions"])
    async with embedder_of(provider, dimensions=8) as embedder:
        with pytest.raises(Refused) as caught:
            await embedder.embed(texts(64), ledger)
    assert caught.value.param == "dimensions"
    assert len(provider.requests) == 1


async def test_a_server_that_knows_no_base64_is_asked_for_numbers(provider, embedder, ledger):
    provider.set(refused_fields=["encoding_format"])
    await embedder.embed(texts(40), ledger)
    assert len(ledger.values) == 40
    assert floats(ledger.values[b"0000"]).tolist() == unit("text number 0")
    before = len(provider.requests)
    assert floats(await embedder.embed_query("text number 0")).tolist() == unit("text number 0")
    assert len(provider.requests) == before + 1


async def test_dimensions_are_asked_for_and_checked(provider, ledger):
    async with embedder_of(provider, dimensions=16) as embedder:
        await embedder.embed(texts(1), ledger)
        assert dimensions_of(ledger.values[b"0000"]) == 16
        assert embedder.fingerprint == "remote:1:small:16"
        provider.faults.refused_fields = []
    async with embedder_of(provider) as embedder:
        await embedder.embed_query("a")
        embedder.dimensions = 32
        with pytest.raises(SchemaInvalid, match="returned 64 dimensions instead of 32") as caught:
            await embedder.embed(texts(1, other="text"), ledger)
        assert caught.value.code == "wrong_dimensions"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("rate_limited", RateLimited),
        ("error", Transient),
        ("drop", Transient),
        ("lost", Transient),
        ("invalid", SchemaInvalid),
        ("unauthorized", Fatal),
        ("quota", Fatal),
    ],
)
async def test_each_fault_has_its_category_and_the_next_attempt_pays_for_the_rest_only(
    provider, embedder, ledger, fault, kind
):
    wanted = texts(12)
    provider.set(next=[fault], retry_after=3)
    with pytest.raises(kind) as caught:
        await embedder.embed(wanted, ledger)
    assert not ledger.open
    assert len(ledger.failed) == 1
    if kind is RateLimited:
        assert caught.value.retry_after == 3
    if kind is Fatal:
        assert caught.value.scope == "credential"
    await embedder.embed({key: text for key, text in wanted.items() if key not in ledger.values}, ledger)
    assert ledger.values.keys() == wanted.keys()
    lost = [one for one in provider.entries if one["id"] in ledger.failed and fault == "lost"]
    assert ledger.tokens[0] == provider.bill["input_tokens"] - sum(one["input_tokens"] for one in lost)


async def test_packs_beside_a_failed_one_are_settled(provider, embedder, ledger):
    provider.set(next=["error"])
    with pytest.raises(Transient):
        await embedder.embed(texts(12), ledger)
    assert len(ledger.values) == 8


async def test_the_worst_error_is_raised(provider, ledger):
    async with embedder_of(provider, limits=PackLimits(inputs=1), concurrency=3) as embedder:
        provider.set(next=["rate_limited", "unauthorized", "error"], delay_seconds=0.05)
        with pytest.raises(Fatal):
            await embedder.embed(texts(3), ledger)
        provider.set(next=["rate_limited", "error", "rate_limited"])
        with pytest.raises(Transient):
            await embedder.embed(texts(3), ledger)
        provider.set(next=["rate_limited", "error", "invalid"])
        with pytest.raises(SchemaInvalid):
            await embedder.embed(texts(3), ledger)


@pytest.mark.parametrize("fault", ["unauthorized", "rate_limited"])
async def test_an_error_that_concerns_all_packs_stops_the_others(provider, ledger, fault):
    provider.set(rates={fault: 1.0})
    async with embedder_of(provider, limits=PackLimits(inputs=1), concurrency=2) as embedder:
        with pytest.raises((Fatal, RateLimited)):
            await embedder.embed(texts(50), ledger)
    assert len(provider.requests) <= 2


async def test_an_unavailable_server_is_tried_a_few_times(provider, ledger):
    provider.set(rates={"drop": 1.0})
    async with embedder_of(provider, limits=PackLimits(inputs=1), concurrency=1) as embedder:
        with pytest.raises(Transient):
            await embedder.embed(texts(50), ledger)
    assert len(provider.requests) == 3


async def test_a_call_that_may_not_begin_is_not_sent(provider, embedder, ledger):
    ledger.refusals = [RateLimited("the budget is used up", retry_after=9)]
    with pytest.raises(RateLimited) as caught:
        await embedder.embed(texts(40), ledger)
    assert caught.value.retry_after == 9
    assert provider.bill["requests"] == len(ledger.begun) < 10


async def test_an_error_of_the_ledger_is_passed_on_as_it_is(provider, embedder, ledger):
    ledger.refusals = [DatabaseUnavailable("gone")]
    with pytest.raises(DatabaseUnavailable):
        await embedder.embed(texts(4), ledger)
    assert provider.requests == []


async def test_the_number_of_requests_in_flight_is_limited_over_all_callers(provider, ledger):
    provider.set(delay_seconds=0.02)
    async with embedder_of(provider, limits=PackLimits(inputs=1), concurrency=3) as embedder:
        parts = [{key: text} for key, text in texts(12).items()]
        await asyncio.gather(*(embedder.embed(part, ledger) for part in parts))
    assert provider.running_max == 3


async def test_an_answer_that_has_arrived_is_settled_although_the_work_is_cancelled(provider, embedder):
    class Slow(MemoryLedger):
        settling = asyncio.Event()
        go_on = asyncio.Event()

        async def settle(self, *arguments):
            self.settling.set()
            await self.go_on.wait()
            await super().settle(*arguments)

    ledger = Slow()
    task = asyncio.create_task(embedder.embed(texts(3), ledger))
    await ledger.settling.wait()
    task.cancel()
    asyncio.get_running_loop().call_later(0.01, ledger.go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(ledger.values) == 3


async def test_vectors_of_the_simulator_are_read_too(ledger):
    async with running() as simulator, embedder_of(simulator, dimensions=32) as embedder:
        await embedder.embed(texts(20), ledger)
    assert {dimensions_of(vector) for vector in ledger.values.values()} == {32}
    assert all(math.hypot(*floats(vector)) == pytest.approx(1, abs=1e-5) for vector in ledger.values.values())
    assert ledger.tokens[0] > 20


async def test_half_a_character_is_refused_before_anything_is_sent(provider, embedder, ledger):
    with pytest.raises(SchemaInvalid, match="half a character"):
        await embedder.embed({b"a": "\ud83d"}, ledger)
    assert provider.requests == []
    assert ledger.begun == {}


async def test_a_zero_vector_fails_alone(model_server, ledger):
    good, bad = array("f", [3.0, 4.0]), array("f", [math.nan, 1.0])
    data = [{"index": n, "embedding": base64.b64encode(one).decode()} for n, one in enumerate((good, bad))]
    usage = {"prompt_tokens": 5, "total_tokens": 5}
    model_server.replies["/v1/embeddings"] = answer(orjson.dumps({"data": data, "usage": usage}))
    async with embedder_of(model_server) as embedder:
        with pytest.raises(InputRefused) as caught:
            await embedder.embed({b"good": "a", b"bad": "b"}, ledger)
    assert caught.value.codes == {b"bad": "invalid_vector"}
    assert floats(ledger.values[b"good"]).tolist() == pytest.approx([0.6, 0.8])
    assert ledger.tokens == (5, 0)


async def test_without_texts_no_request_is_sent(provider, embedder, ledger):
    await embedder.embed({}, ledger)
    assert provider.requests == []


def body_of(*embeddings, **more):
    return orjson.dumps({"data": [{"index": n, "embedding": one, **more} for n, one in enumerate(embeddings)]})


def test_vectors_come_as_numbers_or_base64_and_in_the_order_of_the_inputs():
    encoded = base64.b64encode(array("f", [0.0, 2.0])).decode()
    assert [floats(one).tolist() for one in parse_embeddings(body_of([3, 4], encoded), 2)] == [
        pytest.approx([0.6, 0.8]),
        [0.0, 1.0],
    ]
    turned = orjson.dumps({"data": [{"index": 1, "embedding": [0, 1]}, {"index": 0, "embedding": [1, 0]}]})
    assert [floats(one).tolist() for one in parse_embeddings(turned, 2)] == [[1, 0], [0, 1]]
    unnumbered = orjson.dumps({"data": [{"embedding": [0, 1]}, {"embedding": [1, 0]}]})
    assert [floats(one).tolist() for one in parse_embeddings(unnumbered, 2)] == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", "invalid_output"),
        (b"<html>", "invalid_output"),
        (body_of([1.0]), "wrong_count"),
        (body_of([1.0], [1.0], [1.0]), "wrong_count"),
        (body_of([1.0], [1.0], index=0), "wrong_count"),
        (body_of([1.0], [1.0, 2.0]), "wrong_dimensions"),
        (body_of([1.0], []), "invalid_output"),
        (body_of([1.0], "%%%"), "invalid_output"),
        (body_of([1.0], "AAA="), "invalid_output"),
        (body_of([1.0], [0.0]), "invalid_vector"),
        (body_of([1.0], [1e300]), "invalid_vector"),
    ],
)
def test_an_answer_of_the_wrong_shape_is_refused(body, code):
    with pytest.raises(SchemaInvalid) as caught:
        parse_embeddings(body, 2)
    assert caught.value.code == code


def test_a_body_has_the_wanted_fields():
    assert embedding_body("m", ["a"]) == {"model": "m", "input": ["a"], "encoding_format": "base64"}
    assert embedding_body("m", ["a"], 8, is_base64=False) == {"model": "m", "input": ["a"], "dimensions": 8}


def test_a_vector_of_length_one_is_kept_bit_for_bit():
    vector = array("f", [0.6000003, 0.8]).tobytes()
    assert read_vectors(body_of(base64.b64encode(vector).decode()), 1) == [vector]


async def test_the_worst_of_all_errors_is_raised_after_all_have_ended():
    done, numbers = [], itertools.count()

    async def job():
        number = next(numbers)
        await asyncio.sleep(0)
        done.append(number)
        if number == 1:
            raise Transient("first")
        if number == 2:
            raise SchemaInvalid("second")

    with pytest.raises(SchemaInvalid):
        await run_all([job] * 6, concurrency=2)
    assert sorted(done) == list(range(6))


async def test_of_several_waits_the_longest_counts():
    waits = iter([3.0, 9.0, None])

    async def job():
        await asyncio.sleep(0)
        raise RateLimited("wait", retry_after=next(waits))

    with pytest.raises(RateLimited) as caught:
        await run_all([job] * 3, concurrency=3)
    assert caught.value.retry_after == 9


def test_limits_below_one_are_refused():
    with pytest.raises(ConfigurationError):
        PackLimits(inputs=0)
