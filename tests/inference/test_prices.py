"""The price of a model's tokens: the user's table, the list that comes with Batchwright, and unknown prices."""

import importlib.resources
import json
import runpy
from decimal import Decimal
from pathlib import Path

import pytest

from batchwright.inference.prices import WRITTEN, ListedPrice, Price, Rates, cost_of, find_model_price, list_source

TOOL = Path(__file__).parents[2] / "tools" / "prices.py"
MILLION = 1_000_000
LONG = Rates(input=Decimal(4), output=Decimal(8))


def listed(model, lane="realtime"):
    return find_model_price(model, lane=lane, overrides={})


def price(**figures):
    exact = {name: Decimal(str(figure)) for name, figure in figures.items() if name in ("input", "output", "cached")}
    return ListedPrice(source="test", **{"input": Decimal(0), "output": Decimal(0), **figures, **exact})


@pytest.mark.parametrize(
    ("model", "same"),
    [
        ("gpt-5-mini-2025-08-07", "gpt-5-mini"),
        ("openai/gpt-5-mini", "gpt-5-mini"),
        ("GPT-5-Mini", "gpt-5-mini"),
        ("models/gemini-2.5-flash", "gemini-2.5-flash"),
        ("gemini/gemini-2.5-flash", "gemini-2.5-flash"),
        ("mistral/mistral-embed", "mistral-embed"),
        ("voyage/voyage-3", "voyage-3"),
        ("cohere/embed-v4.0", "embed-v4.0"),
    ],
)
def test_a_model_is_found_with_its_provider_its_path_and_its_version(model, same):
    for lane in ("realtime", "batch"):
        assert listed(model, lane) == listed(same, lane)
    assert listed(model).input > 0
    assert listed(model).source == list_source()


@pytest.mark.parametrize(
    "model",
    [
        "my-model",
        "meta-llama/Llama-3.3-70B-Instruct",
        "openai/gpt-oss-120b",
        "nobody/gpt-5-mini",
        "text-embedding-3-small-of-mine",
        "",
    ],
)
def test_an_unknown_model_has_no_price_and_no_cost(model):
    for lane in ("realtime", "batch"):
        assert listed(model, lane) is None
        assert cost_of(listed(model, lane), prompt_tokens=10, completion_tokens=10) is None


def test_a_model_of_several_providers_is_found_only_with_the_provider():
    assert listed("groq/openai/gpt-oss-120b").input == Decimal("0.15")
    assert listed("together_ai/openai/gpt-oss-120b") != listed("groq/openai/gpt-oss-120b")
    assert listed("azure/text-embedding-3-small").input != listed("text-embedding-3-small").input


def test_each_lane_has_its_price():
    usual, batch = listed("gpt-5-mini"), listed("gpt-5-mini", "batch")
    assert (usual.input, usual.output, usual.cached) == (Decimal("0.25"), Decimal("2.0"), Decimal("0.025"))
    assert (batch.input, batch.output, batch.cached) == (Decimal("0.125"), Decimal("1.0"), Decimal("0.0125"))
    assert (listed("text-embedding-3-small").input, listed("text-embedding-3-small").output) == (Decimal("0.02"), 0)
    assert listed("text-embedding-3-small", "batch").input == Decimal("0.01")
    assert listed("mistral-embed", "batch").source.endswith("less the provider's batch discount")


def test_a_lane_without_a_price_is_unknown():
    assert listed("voyage-3") is not None
    assert listed("voyage-3", "batch") is None


def test_the_users_table_overrides_the_list_in_both_lanes():
    overrides = {"GPT-5-mini": Price(input=1.0, output=3.0), "*": Price(input=9.0, cached=0.5)}
    for lane in ("realtime", "batch"):
        found = find_model_price("gpt-5-mini-2025-08-07", lane=lane, overrides=overrides)
        assert found == ListedPrice(input=Decimal("1.0"), output=Decimal("3.0"), source=WRITTEN)
        assert find_model_price("my-model", lane=lane, overrides=overrides).cached == Decimal("0.5")
    assert find_model_price("gpt-5-mini", lane="batch", overrides={"gpt-5": Price(input=9.0)}).input == Decimal("0.125")


@pytest.mark.parametrize(
    ("figures", "tokens", "expected"),
    [
        ({"input": 0.02}, (300, 0), "0.000006"),
        ({"input": 0.1, "output": 0.2}, (1, 1), "0.0000003"),
        ({"input": 2, "output": 4}, (MILLION, MILLION), "6"),
        ({"input": 2, "output": 4}, (None, 5), None),
        ({"input": 2, "output": 4}, (5, None), None),
        ({"input": 2}, (MILLION, None), "2"),
        ({"input": 2, "cached": 0.5}, (MILLION, 0, MILLION // 2), "1.25"),
        ({"input": 2}, (MILLION, 0, MILLION // 2), "2"),
        ({"input": 2, "cached": 0}, (10, 0, MILLION), "0"),
        ({"input": 2, "long_prompt_tokens": 1000, "long_prompt": LONG}, (1000, 0), "0.002"),
        ({"input": 2, "long_prompt_tokens": 1000, "long_prompt": LONG}, (1001, 1), "0.004012"),
    ],
)
def test_the_cost_of_a_request_is_exact(figures, tokens, expected):
    prompt, completion, cached = (*tokens, 0)[:3]
    found = cost_of(price(**figures), prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    assert found == (None if expected is None else Decimal(expected))


def test_many_small_costs_add_up_without_a_remainder():
    one = cost_of(listed("text-embedding-3-small"), prompt_tokens=7, completion_tokens=0)
    assert sum([one] * MILLION, Decimal(0)) == Decimal("0.14")


# The list -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(TOOL))


USUAL = {"input_cost_per_token": 2e-06, "output_cost_per_token": 8e-06, "cache_read_input_token_cost": 2e-07}


def test_usual_and_batch_prices_are_both_listed(tool):
    read = tool["read_model_price"]
    said = {**USUAL, "mode": "chat", "cache_creation_input_token_cost": 5e-06}
    assert read(said, None) == {"input": 2.0, "output": 8.0, "cached": 0.2}
    assert read(said, 0.5)["batch"] == {"input": 1.0, "output": 4.0, "derived": True}
    own = {"input_cost_per_token_batches": 1.5e-06, "output_cost_per_token_batches": 6e-06}
    assert read({**said, **own}, 0.5)["batch"] == {"input": 1.5, "output": 6.0}
    long = {"input_cost_per_token_above_200k_tokens": 4e-06, "output_cost_per_token_above_200k_tokens": 1e-05}
    assert read({**said, **long}, None)["long_prompt"] == {"tokens": 200_000, "input": 4.0, "output": 10.0}


def test_an_embedding_has_no_answer_to_pay_for_and_a_chat_model_without_a_price_is_left_out(tool):
    read = tool["read_model_price"]
    assert read({"input_cost_per_token": 1e-07, "mode": "embedding"}, None) == {"input": 0.1, "output": 0.0}
    assert read({"input_cost_per_token": 1e-07, "mode": "chat"}, None) is None
    assert read({"input_cost_per_token": 0, "output_cost_per_token": 0, "mode": "chat"}, None) is None


def test_the_list_is_made_of_text_models_of_the_usual_providers(tool):
    said = {**USUAL, "mode": "chat"}
    made = tool["make_model_list"](
        {
            "gpt-x": {**said, "litellm_provider": "openai"},
            "gpt-x-2026-01-01": {**said, "litellm_provider": "openai"},
            "gpt-live": {**said, "mode": "realtime", "litellm_provider": "openai"},
            "cohere/command-x": {**said, "litellm_provider": "cohere_chat"},
            "azure/eu/gpt-x": {**said, "litellm_provider": "azure"},
            "groq/meta/llama-x": {**said, "litellm_provider": "groq"},
            "smaller/x": {**said, "litellm_provider": "smaller"},
        },
        "1.2.3",
        "2026-01-02",
    )
    assert (made["source"], made["date"]) == ("litellm 1.2.3", "2026-01-02")
    assert {provider: list(models) for provider, models in made["prices"].items() if models} == {
        "cohere": ["command-x"],
        "groq": ["meta/llama-x"],
        "openai": ["gpt-x"],
    }
    assert json.loads(tool["write_list"](made)) == made


def test_the_shipped_list_is_complete_and_small(tool):
    text = importlib.resources.files("batchwright.inference").joinpath("prices.json").read_text()
    document = json.loads(text)
    assert tool["write_list"](document) == text
    assert len(text) <= 150_000
    assert set(document["makers"]) <= set(document["prices"])
    for provider, models in document["prices"].items():
        assert models, provider
        for model in models:
            usual, batch = listed(f"{provider}/{model}"), listed(f"{provider}/{model}", "batch")
            assert usual.input > 0, (provider, model)
            assert usual.cached is None or usual.cached <= usual.input, (provider, model)
            assert batch is None or 0 < batch.input <= usual.input, (provider, model)


def test_names_of_makers_are_found_alone(tool):
    document = json.loads(importlib.resources.files("batchwright.inference").joinpath("prices.json").read_text())
    lost = [
        (maker, model)
        for maker in document["makers"]
        for model in document["prices"][maker]
        if listed(model) != listed(f"{maker}/{model}")
    ]
    assert lost == []
