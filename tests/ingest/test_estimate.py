"""What a run will need: extrapolated from a sample, with valid bounds, costs by lane, and time at the rate limits."""

import json
import math
import random
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.inference.prices import ListedPrice, find_model_price
from batchwright.ingest.chunk import ChunkSettings, chunk_text
from batchwright.ingest.estimate import (
    Embedding,
    Entities,
    Figure,
    Listed,
    Recipe,
    Sampled,
    chunks_of,
    estimate,
)
from batchwright.ingest.text import TextBuilder

CHUNKS = ChunkSettings(characters=1500, overlap=150)
PLAIN = Recipe(chunks=CHUNKS)


def price(input, output=0.0):
    return ListedPrice(input=Decimal(str(input)), output=Decimal(str(output)), source="test")


def page(format="pdf", *, bytes=10_000, tokens=500, **more):
    return Sampled(format=format, bytes=bytes, characters=tokens * 3, tokens=tokens, **more)


def embedding(**more):
    return Embedding(model="m", prices={"realtime": price(0.02), "batch": price(0.01)}, **more)


def test_a_sample_of_all_documents_is_no_guess():
    sample = [page(bytes=100, tokens=300, pages=2), page(bytes=900, tokens=100, pages=5)]
    found = estimate({"pdf": Listed(documents=2, bytes=1000)}, sample, PLAIN)
    assert found.tokens == Figure.exactly(400)
    assert found.pages == Figure.exactly(7)
    assert (found.documents, found.bytes, found.sampled) == (2, 1000, 2)


def test_equal_documents_give_an_exact_estimate():
    found = estimate({"pdf": Listed(documents=100, bytes=1_000_000)}, [page(pages=3)] * 5, PLAIN)
    assert found.tokens.value == pytest.approx(50_000)
    assert found.tokens.high - found.tokens.low == pytest.approx(0, abs=1e-6)
    assert found.pages.value == pytest.approx(300)


def test_one_document_or_another_format_gives_wide_bounds():
    found = estimate({"pdf": Listed(documents=10, bytes=100_000)}, [page()], PLAIN)
    assert (found.tokens.low, found.tokens.value, found.tokens.high) == (2_500, 5_000, 10_000)
    other = estimate({"html": Listed(documents=10, bytes=100_000)}, [page(), page()], PLAIN)
    assert other.tokens == found.tokens


def test_each_format_is_estimated_from_its_own_documents():
    listing = {"pdf": Listed(documents=50, bytes=500_000), "txt": Listed(documents=50, bytes=5_000)}
    sample = [page(tokens=500)] * 3 + [page("txt", bytes=100, tokens=33)] * 3
    assert estimate(listing, sample, PLAIN).tokens.value == pytest.approx(50 * 500 + 50 * 33)


def test_documents_without_a_size_are_taken_to_be_as_large_as_the_others():
    half = estimate({"pdf": Listed(documents=10, bytes=50_000, without_size=5)}, [page()] * 2, PLAIN)
    none = estimate({"pdf": Listed(documents=10, bytes=0, without_size=10)}, [page()] * 2, PLAIN)
    assert half.tokens.value == none.tokens.value == pytest.approx(5_000)


def test_documents_that_cannot_be_extracted_are_counted_and_cost_nothing():
    sample = [page(), page(), Sampled(format="pdf", bytes=10_000, is_failed=True), page()]
    found = estimate({"pdf": Listed(documents=100, bytes=1_000_000)}, sample, PLAIN)
    assert found.failing.value == pytest.approx(25)
    assert found.tokens.value == pytest.approx(37_500)
    assert found.failing.low >= 1
    assert found.failing.high > 25


def test_the_bounds_hold_in_most_samples_and_are_narrower_with_more():
    draw = random.Random(7)
    documents = [page(bytes=size, tokens=round(size * draw.uniform(0.02, 0.3))) for size in range(2_000, 42_000, 100)]
    listing = {"pdf": Listed(documents=len(documents), bytes=sum(one.bytes for one in documents))}
    truth = sum(one.tokens for one in documents)
    widths = {}
    for size in (10, 80):
        found = [estimate(listing, draw.sample(documents, size), PLAIN).tokens for _ in range(200)]
        assert sum(one.low <= truth <= one.high for one in found) >= 175
        widths[size] = sum(one.high - one.low for one in found)
    assert widths[80] < widths[10] / 2


@given(
    st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 10**6), st.booleans()), max_size=12),
    st.integers(0, 10**6),
    st.integers(0, 10**12),
)
def test_bounds_are_always_in_order(rows, documents, size):
    sample = [page(bytes=bytes, tokens=tokens, is_failed=failed) for bytes, tokens, failed in rows]
    recipe = Recipe(chunks=CHUNKS, embedding=embedding(), entities=Entities(model="e", prices={}))
    found = estimate({"pdf": Listed(documents=max(documents, len(rows)), bytes=size)}, sample, recipe)
    for name in ("failing", "pages", "tokens", "chunks", "embedding_requests", "entity_windows"):
        figure = getattr(found, name)
        assert 0 <= figure.low <= figure.value <= figure.high
        assert math.isfinite(figure.high)
    json.dumps(found.document(), allow_nan=False)


def test_the_estimated_number_of_chunks_is_near_that_of_the_chunker():
    draw = random.Random(1)
    builder = TextBuilder(output_bytes=10**7, pages=10)
    for _ in range(200):
        builder.add(" ".join("word" * draw.randint(1, 3) for _ in range(draw.randint(20, 120))) + ".")
    text = builder.build("text")
    made = len(chunk_text(text, CHUNKS))
    assert chunks_of(len(text.text), CHUNKS) == pytest.approx(made, rel=0.25)
    assert chunks_of(0, CHUNKS) == 0
    assert chunks_of(1, CHUNKS) == 1


def test_vectors_cost_their_chunks_including_the_overlap():
    sample = [page(tokens=3_000, chunks=9)] * 4
    recipe = Recipe(chunks=CHUNKS, embedding=embedding())
    found = estimate({"pdf": Listed(documents=1_000, bytes=10_000_000)}, sample, recipe)
    tokens = 1_000 * 3_000 * (1 + 8 * 150 / 9_000)
    assert found.chunks.value == pytest.approx(9_000)
    assert found.embedding_tokens.value == pytest.approx(tokens)
    assert found.cost["realtime"].value == pytest.approx(tokens * 0.02 / 1e6, rel=1e-6)
    assert found.cost["batch"].value == pytest.approx(tokens * 0.01 / 1e6, rel=1e-6)
    assert found.entity_windows == Figure.exactly(0)
    assert found.price_sources == ["test"]


def test_a_request_holds_the_chunks_of_one_document():
    recipe = Recipe(chunks=CHUNKS, embedding=embedding(inputs_per_request=4, tokens_per_request=1_000_000))
    found = estimate({"pdf": Listed(documents=10, bytes=100_000)}, [page(chunks=9), page(chunks=1)], recipe)
    assert found.embedding_requests.value == pytest.approx(20)
    short = Recipe(chunks=CHUNKS, embedding=embedding(tokens_per_request=100))
    assert estimate({"pdf": Listed(documents=1, bytes=1)}, [page(chunks=1)], short).embedding_requests.value == 5


def test_entities_cost_windows_instructions_and_answers():
    entities = Entities(
        model="e", prices={"realtime": price(1, 2)}, chunks_per_window=2, prompt_tokens=100, answer_tokens=50
    )
    found = estimate(
        {"pdf": Listed(documents=10, bytes=100_000)}, [page(chunks=5)] * 2, Recipe(chunks=CHUNKS, entities=entities)
    )
    assert found.entity_windows.value == pytest.approx(30)
    assert found.entity_prompt_tokens.value == pytest.approx(10 * 500 + 30 * 100)
    assert (found.entity_answer_tokens.low, found.entity_answer_tokens.high) == pytest.approx((750, 3_000))
    assert found.cost["realtime"].value == pytest.approx((8_000 + 2 * 1_500) / 1e6)
    assert found.cost["batch"] is None


def test_a_model_without_a_price_makes_the_cost_unknown_and_a_local_one_costs_nothing():
    listing = {"pdf": Listed(documents=10, bytes=100_000)}
    unknown = Embedding(model="mine", prices={"realtime": find_model_price("mine", lane="realtime", overrides={})})
    found = estimate(listing, [page()] * 2, Recipe(chunks=CHUNKS, embedding=unknown))
    assert found.cost == {"realtime": None, "batch": None}
    assert found.document()["cost"] == {"realtime": None, "batch": None}
    local = estimate(listing, [page()] * 2, Recipe(chunks=CHUNKS, embedding=Embedding()))
    assert local.cost == {"realtime": Figure.exactly(0), "batch": Figure.exactly(0)}
    assert local.chunks.value > 0


def test_prices_of_long_prompts_do_not_apply_to_sums_of_short_ones():
    long = find_model_price("gemini-2.5-pro", lane="realtime", overrides={})
    assert long.long_prompt is not None
    use = Entities(model="gemini-2.5-pro", prices={"realtime": long}, prompt_tokens=0, answer_tokens=0)
    found = estimate(
        {"pdf": Listed(documents=1_000, bytes=10_000_000)}, [page(chunks=1)] * 2, Recipe(chunks=CHUNKS, entities=use)
    )
    assert found.cost["realtime"].value == pytest.approx(500_000 * 1.25 / 1e6)


def test_the_slowest_limit_decides_the_time():
    listing = {"pdf": Listed(documents=100, bytes=1_000_000)}
    sample = [page(chunks=2)] * 2

    def seconds(**limits):
        return estimate(listing, sample, Recipe(chunks=CHUNKS, embedding=embedding(**limits))).seconds

    assert seconds() is None
    assert seconds(requests_per_minute=50).value == pytest.approx(120)
    assert seconds(requests_per_minute=50, tokens_per_minute=100).value > 30_000


def test_uses_of_one_budget_share_it_and_other_budgets_run_in_parallel():
    listing, sample = {"pdf": Listed(documents=60, bytes=600_000)}, [page(chunks=1)] * 2

    def seconds(budget):
        entities = Entities(model="e", budget=budget, requests_per_minute=60)
        recipe = Recipe(chunks=CHUNKS, embedding=embedding(budget="a", requests_per_minute=60), entities=entities)
        return estimate(listing, sample, recipe).seconds.value

    assert seconds("a") == pytest.approx(120)
    assert seconds("b") == pytest.approx(60)


def test_without_a_sample_only_what_is_listed_is_known():
    recipe = Recipe(chunks=CHUNKS, embedding=embedding(requests_per_minute=1))
    found = estimate({"pdf": Listed(documents=10, bytes=1_000)}, [], recipe).document()
    assert (found["documents"], found["bytes"], found["sampled"]) == (10, 1_000, 0)
    assert found["tokens"] is None
    assert found["seconds"] is None
    assert found["cost"] == {"realtime": None, "batch": None}


def test_the_document_is_json_with_bounds_rounded_outwards():
    sample = [page(tokens=501), page(tokens=400), page(tokens=433)]
    recipe = Recipe(chunks=CHUNKS, embedding=embedding(requests_per_minute=10))
    found = json.loads(json.dumps(estimate({"pdf": Listed(documents=7, bytes=70_000)}, sample, recipe).document()))
    assert found["tokens"]["low"] < found["tokens"]["value"] < found["tokens"]["high"]
    assert all(type(figure) is int for figure in found["tokens"].values())
    assert found["cost"]["batch"]["value"] > 0
    assert found["seconds"]["value"] == pytest.approx(42)
