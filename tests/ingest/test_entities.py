"""Entities by a model, whose answers may be anything."""

import jsonschema
import orjson
import pytest

from batchwright.errors import ConfigurationError, Fatal, RateLimited, SchemaInvalid, Transient
from batchwright.inference.calls import InputRefused
from batchwright.inference.gateway import Gateway
from batchwright.inference.settings import GatewaySettings
from batchwright.ingest.entities.bodies import entity_body, find_entities, parse_entities
from batchwright.ingest.entities.mention import Mention, load_mentions
from batchwright.ingest.entities.model import ModelExtractor
from batchwright.simulator.run import running
from tests.inference.ledger import MemoryLedger
from tests.ingest.fake_provider import MARKER, FakeProvider

TYPES = ("person", "place")
WINDOW = "Ada Lovelace met Charles Babbage in London. London was foggy."


@pytest.fixture
async def provider():
    async with FakeProvider() as provider:
        yield provider


@pytest.fixture
def ledger():
    return MemoryLedger()


@pytest.fixture
async def extractor(provider):
    gateway = Gateway(GatewaySettings(url=provider.url), environment={})
    yield ModelExtractor(gateway, "clever", types=TYPES, concurrency=2)
    await gateway.close()


def completion(content, finish_reason="stop", **message):
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    return orjson.dumps({"choices": [choice]})


def named(*names):
    return completion(orjson.dumps({"entities": [{"type": type, "text": text} for type, text in names]}).decode())


async def test_mentions_of_each_window_are_settled_with_their_places(provider, extractor, ledger):
    windows = {b"one": WINDOW, b"two": "nothing here"}
    await extractor.extract(windows, ledger)
    mentions = load_mentions(ledger.values[b"one"])
    assert [one.text for one in mentions] == ["Ada Lovelace", "Charles Babbage", "London", "London"]
    for one in mentions:
        assert WINDOW[one.start : one.end] == one.text
        assert one.type in TYPES
    assert ledger.values[b"two"] == b"[]"
    assert ledger.tokens == (provider.bill["input_tokens"], provider.bill["output_tokens"])
    assert {one["id"] for one in provider.entries} == ledger.usage.keys()


async def test_windows_share_the_beginning_of_their_requests(provider, extractor, ledger):
    await extractor.extract({b"one": "First window", b"two": "Second window"}, ledger)
    first, second = (orjson.dumps(one["body"]) for one in provider.requests)
    same = next(n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert len(first) - same < 40
    assert provider.requests[0]["body"]["temperature"] == 0


def test_the_request_asks_for_a_strict_schema_that_the_fake_providers_answer_fits():
    body = entity_body("m", TYPES, WINDOW)
    wanted = body["response_format"]["json_schema"]
    assert wanted["strict"] is True
    assert body["messages"][-1] == {"role": "user", "content": WINDOW}
    jsonschema.Draft202012Validator.check_schema(wanted["schema"])
    jsonschema.validate({"entities": [{"type": "person", "text": "Ada"}]}, wanted["schema"])
    for wrong in ({}, {"entities": [{"type": "animal", "text": "Ada"}]}, {"entities": [], "more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, wanted["schema"])


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        ("rate_limited", RateLimited, "rate_limit_exceeded"),
        ("error", Transient, "server_error"),
        ("drop", Transient, "connection_lost"),
        ("invalid", SchemaInvalid, "invalid_output"),
        ("truncated", SchemaInvalid, "truncated_output"),
        ("unauthorized", Fatal, "invalid_api_key"),
    ],
)
async def test_each_fault_has_its_category_and_other_windows_are_kept(provider, extractor, ledger, fault, kind, code):
    provider.set(next=[fault])
    windows = {b"one": WINDOW, b"two": WINDOW + " Again."}
    with pytest.raises(kind) as caught:
        await extractor.extract(windows, ledger)
    assert caught.value.code == code
    assert "Ada" not in str(caught.value)
    assert len(ledger.values) == len(ledger.failed) == 1
    assert ledger.tokens == (provider.bill["input_tokens"], provider.bill["output_tokens"])


async def test_failed_windows_are_named_and_all_others_are_settled(provider, extractor, ledger):
    windows = {bytes([n]): f"Window of Number {n}" for n in range(10)} | {b"bad": MARKER}
    with pytest.raises(InputRefused) as caught:
        await extractor.extract(windows, ledger)
    assert caught.value.codes == {b"bad": "content_policy"}
    assert len(ledger.values) == 10
    assert provider.running_max <= 2


@pytest.mark.parametrize("field", ["temperature", "max_completion_tokens"])
async def test_a_field_that_the_model_does_not_accept_is_left_out_from_then_on(provider, extractor, ledger, field):
    provider.set(refused_fields=[field])
    await extractor.extract({b"one": WINDOW}, ledger)
    await extractor.extract({b"two": WINDOW}, ledger)
    assert [field in one["body"] for one in provider.requests] == [True, False, False]
    assert ledger.values.keys() == {b"one", b"two"}


async def test_a_field_that_is_needed_and_refused_fails_the_window(provider, extractor, ledger):
    provider.set(refused_fields=["response_format"])
    with pytest.raises(InputRefused):
        await extractor.extract({b"one": WINDOW}, ledger)
    assert len(provider.requests) == 1


async def test_the_simulators_answers_fit_the_schema_but_their_words_are_not_in_the_text(ledger):
    async with running() as simulator:
        gateway = Gateway(GatewaySettings(url=simulator.url), environment={})
        extractor = ModelExtractor(gateway, "clever", types=TYPES)
        await extractor.extract({bytes([n]): f"{n}" for n in range(20)}, ledger)
        await gateway.close()
    assert set(ledger.values.values()) == {b"[]"}
    assert extractor.dropped > 0
    assert ledger.tokens[1] > 0


def test_every_place_is_found_and_words_inside_others_are_not():
    window = "Al and Also Al, AlAl"
    assert parse_entities(named(("person", "Al")), window) == [
        Mention("person", "Al", 0, 2),
        Mention("person", "Al", 12, 14),
    ]


def test_names_are_found_in_text_without_spaces():
    assert [one.start for one in parse_entities(named(("place", "東京")), "私は東京に住む。東京は")] == [2, 8]


def test_a_line_break_inside_a_name_does_not_hide_it():
    assert parse_entities(named(("person", "Ada Lovelace")), "by Ada\n  Lovelace.") == [
        Mention("person", "Ada\n  Lovelace", 3, 17)
    ]


def test_invented_mentions_are_dropped_and_counted():
    found = find_entities(named(("person", "Ada Lovelace"), ("person", "Bob"), ("place", ""), ("place", "a.b")), WINDOW)
    assert [one.text for one in found.mentions] == ["Ada Lovelace"]
    assert found.dropped == 3


def test_a_name_that_is_given_twice_counts_once_and_in_two_types_twice():
    found = parse_entities(named(("person", "Ada"), ("person", "Ada"), ("place", "Ada")), WINDOW)
    assert found == [Mention("person", "Ada", 0, 3), Mention("place", "Ada", 0, 3)]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", "invalid_output"),
        (b'{"choices":[]}', "invalid_output"),
        (completion(None), "invalid_output"),
        (completion("I found Ada."), "invalid_output"),
        (completion('```json\n{"entities":[]}\n```'), "invalid_output"),
        (completion('{"entities":{}}'), "invalid_output"),
        (completion('{"entities":[{"type":"person"}]}'), "invalid_output"),
        (completion('{"entities":[{"type":"person","text":7}]}'), "invalid_output"),
        (completion('{"entities":[],"tool":"rm"}'), "invalid_output"),
        (named(("animal", "Ada")), "invalid_output"),
        (named(*[("person", str(n)) for n in range(3000)]), "invalid_output"),
        (completion('{"entities":[]}', "length"), "truncated_output"),
        (completion(None, "content_filter"), "refused_output"),
        (completion(None, refusal="I cannot"), "refused_output"),
    ],
)
def test_an_answer_of_the_wrong_shape_is_refused(body, code):
    with pytest.raises(SchemaInvalid) as caught:
        parse_entities(body, WINDOW, types=TYPES)
    assert caught.value.code == code
    assert "Ada" not in str(caught.value)


def test_too_many_mentions_are_refused():
    with pytest.raises(SchemaInvalid):
        parse_entities(named(("person", "a")), "a " * 20_000)


async def test_the_fingerprint_depends_on_the_model_and_the_types(extractor, provider):
    gateway = Gateway(GatewaySettings(url=provider.url), environment={})
    others = [ModelExtractor(gateway, "other", types=TYPES), ModelExtractor(gateway, "clever", types=("person",))]
    same = ModelExtractor(gateway, "clever", types=TYPES)
    assert len({extractor.fingerprint, *(one.fingerprint for one in others)}) == 3
    assert same.fingerprint == extractor.fingerprint
    for types in ((), ("a", "a"), ("",)):
        with pytest.raises(ConfigurationError):
            ModelExtractor(gateway, "clever", types=types)
    await gateway.close()
