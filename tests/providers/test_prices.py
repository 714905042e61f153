"""The cost of provider work: the user's table, the list that comes with Batchwright, and unknown prices."""

import importlib.resources
import json
import runpy
from pathlib import Path

import pytest

from batchwright.errors import ConfigurationError
from batchwright.providers import completions
from batchwright.providers.adapters.anthropic import _usage
from batchwright.providers.contract import Result, Usage
from batchwright.providers.prices import WRITTEN, Bill, LongPrompt, Price, ProviderPrice, cost, find_price, list_source
from batchwright.providers.registry import find_adapters
from batchwright.settings import load_settings
from tests.providers.task_stage import task_stage

TOOL = Path(__file__).parents[2] / "tools" / "prices.py"
MILLION = 1_000_000


def tokens(asked, answered, **more):
    return Usage(input_tokens=asked, output_tokens=answered, **more)


def price(**figures):
    return Price(source="test", **figures)


def succeeded(usage):
    return Result(key="a", value={}, usage=usage)


@pytest.mark.parametrize(
    ("kind", "model", "same"),
    [
        ("openai", "gpt-5-mini-2025-08-07", "gpt-5-mini"),
        ("openai", "GPT-5-Mini", "gpt-5-mini"),
        ("openai", "ft:gpt-4o-mini-2024-07-18:acme::abc", "ft:gpt-4o-mini-2024-07-18"),
        ("azure_openai", "gpt-5-mini", "gpt-5-mini-2025-08-07"),
        ("anthropic", "claude-haiku-4-5-20251001", "claude-haiku-4-5"),
        ("gemini", "models/gemini-2.5-flash", "gemini-2.5-flash"),
        ("vertex", "publishers/google/models/gemini-2.5-flash", "gemini-2.5-flash"),
        ("vertex", "projects/p/locations/l/publishers/google/models/gemini-2.5-flash@default", "gemini-2.5-flash"),
        ("groq", "openai/gpt-oss-120b", "openai/gpt-oss-120b"),
        ("mistral", "mistral-small-latest", "mistral-small-2603"),
    ],
)
def test_a_model_is_found_with_its_path_and_its_version(kind, model, same):
    found = find_price({}, kind, model)
    assert found is not None
    assert found == find_price({}, kind, same)
    assert found.input > 0
    assert found.output > 0
    assert found.source.startswith(list_source())


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("openai", "gpt-99"),
        ("openai", None),
        ("anthropic", "gpt-5-mini"),
        ("gemini", "tunedModels/gemini-2.5-flash"),
        ("nobody", "gpt-5-mini"),
        ("together", "meta-llama/Llama-3.3-70B-Instruct-Turbo"),
        ("azure", None),
        ("google", "long"),
        ("sarvam", "saaras:v3"),
    ],
)
def test_an_unknown_model_has_no_price(kind, model):
    assert find_price({}, kind, model) is None
    assert cost(find_price({}, kind, model), tokens(10, 10)) is None


def test_the_list_has_batch_prices_and_says_which_are_derived():
    mini = find_price({}, "openai", "gpt-5-mini")
    assert (mini.input, mini.output, mini.cached, mini.source) == (0.125, 1.0, 0.0125, list_source())
    small = find_price({}, "mistral", "mistral-small-latest")
    assert (small.input, small.output) == (0.075, 0.3)
    assert small.source == f"{list_source()}: the usual price less the provider's batch discount"
    assert find_price({}, "aws", None).audio_hour == pytest.approx(0.36)


def test_the_users_table_overrides_the_list():
    written = {"GPT-5-mini": ProviderPrice(input=1.0), "*": ProviderPrice(input=9.0, output=9.0)}
    assert find_price(written, "openai", "gpt-5-mini-2025-08-07") == Price(input=1.0, source=WRITTEN)
    assert find_price(written, "openai", "gpt-5").input == 9.0
    assert find_price(written, "openai", None).output == 9.0
    assert find_price({"gpt-5": ProviderPrice(input=9.0)}, "openai", "gpt-5-mini").input == 0.125


def test_the_users_table_is_read_from_the_configuration():
    table = {"openai": {"prices": {"gpt-x": {"input": 1, "output": 2.5, "cached": 0.5}}}}
    settings = load_settings({"providers": table}, environment={})
    written = settings.table("providers", dict)["openai"].prices
    assert find_price(written, "openai", "gpt-x") == Price(input=1.0, output=2.5, cached=0.5, source=WRITTEN)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_an_invalid_price_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="output of a provider's price"):
        ProviderPrice(output=wrong)


@pytest.mark.parametrize(
    ("figures", "usage", "expected"),
    [
        ({"input": 2.0, "output": 4.0}, tokens(MILLION, MILLION), 6.0),
        ({"input": 2.0, "output": 4.0}, tokens(MILLION, None), 2.0),
        ({"input": 2.0}, tokens(MILLION, 0), 2.0),
        ({"input": 2.0}, tokens(MILLION, 1), None),
        ({"input": 0.0, "output": 0.0}, tokens(5, 5), 0.0),
        ({"input": 2.0, "output": 4.0}, Usage(), None),
        ({"input": 2.0, "output": 4.0}, Usage(audio_seconds=60), None),
        ({"audio_hour": 0.36}, Usage(audio_seconds=1800), 0.18),
        ({"input": 2.0, "cached": 0.5}, tokens(MILLION, 0, cached_tokens=MILLION // 2), 1.25),
        ({"input": 2.0}, tokens(MILLION, 0, cached_tokens=MILLION // 2), 2.0),
        ({"input": 2.0, "cache_write": 2.5}, tokens(MILLION, 0, cache_written_tokens=MILLION), 2.5),
        ({"input": 2.0, "cached": 0.0}, tokens(10, 0, cached_tokens=MILLION), 0.0),
    ],
)
def test_the_cost_of_a_request(figures, usage, expected):
    assert cost(price(**figures), usage) == (None if expected is None else pytest.approx(expected))


def test_a_long_prompt_has_its_own_price_and_many_short_ones_do_not():
    long = LongPrompt(tokens=1000, price=ProviderPrice(input=4.0, output=6.0))
    bill = Bill(price(input=2.0, output=3.0, long_prompt=long))
    for _ in range(5):
        bill.add(succeeded(tokens(1000, 0)))
    assert bill.cost == pytest.approx(0.01)
    bill.add(succeeded(tokens(1001, 1000)))
    assert bill.cost == pytest.approx(0.01 + 0.004004 + 0.006)


def test_a_cost_is_unknown_if_a_part_of_it_is_unknown():
    bill = Bill(price(input=2.0, output=3.0))
    assert bill.cost is None
    bill.add(Result(key="a", error={"code": "expired"}))
    assert bill.cost is None
    bill.add(succeeded(tokens(MILLION, 0)))
    assert bill.cost == 2.0
    bill.add(Result(key="a", error={"code": "expired"}))
    assert bill.cost == 2.0
    bill.add(succeeded(Usage()))
    bill.add(succeeded(tokens(MILLION, 0)))
    assert bill.cost is None
    assert Bill(None).source is None


def test_cached_tokens_are_read_in_the_format_of_every_provider():
    chat = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    assert completions.usage_of({"usage": chat}) == tokens(10, 2, cached_tokens=8)
    responses = {"input_tokens": 10, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}
    assert completions.usage_of({"usage": responses}) == tokens(10, 2, cached_tokens=8)
    assert completions.usage_of({"usage": {**chat, "prompt_tokens_details": None}}) == tokens(10, 2)
    apart = {"input_tokens": 10, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 5, "output_tokens": 2}
    assert _usage(apart) == tokens(23, 2, cached_tokens=8, cache_written_tokens=5)
    assert _usage({}) == Usage()


# The list -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(TOOL))


def test_a_batch_price_of_the_source_is_used_unchanged(tool):
    said = {
        "input_cost_per_token": 2e-06,
        "input_cost_per_token_batches": 1.5e-06,
        "output_cost_per_token": 8e-06,
        "output_cost_per_token_batches": 6e-06,
        "cache_read_input_token_cost": 2e-07,
        "cache_read_input_token_cost_batches": 1e-07,
    }
    assert tool["read_price"](said, 0.5) == {"input": 1.5, "output": 6.0, "cached": 0.1}


def test_without_a_batch_price_the_usual_price_is_used_less_the_discount(tool):
    said = {"input_cost_per_token": 2e-06, "output_cost_per_token": 8e-06, "cache_read_input_token_cost": 2e-07}
    assert tool["read_price"](said, 0.5) == {"input": 1.0, "output": 4.0, "derived": True}
    assert tool["read_price"](said, None) is None
    assert tool["read_price"]({"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}, 0.5) is None
    assert tool["read_price"]({}, 0.5) is None


def test_a_long_prompt_without_a_price_makes_the_model_unknown(tool):
    said = {"input_cost_per_token": 2e-06, "output_cost_per_token": 8e-06}
    long = {"input_cost_per_token_above_200k_tokens": 4e-06, "output_cost_per_token_above_200k_tokens": 1e-05}
    found = tool["read_price"]({**said, **long}, 0.5)
    assert found["long_prompt"] == {"tokens": 200_000, "input": 2.0, "output": 5.0}
    assert found["derived"] is True
    del long["output_cost_per_token_above_200k_tokens"]
    assert tool["read_price"]({**said, **long}, 0.5) is None


def test_the_list_is_made_of_our_providers_and_their_batch_modes(tool):
    usual = {"input_cost_per_token": 2e-06, "output_cost_per_token": 8e-06, "mode": "chat"}
    made = tool["make_list"](
        {
            "gpt-x": {**usual, "litellm_provider": "openai"},
            "gpt-x-2026-01-01": {**usual, "litellm_provider": "openai"},
            "gpt-x-2026-02-02": {**usual, "input_cost_per_token": 4e-06, "litellm_provider": "openai"},
            "gpt-live": {**usual, "mode": "realtime", "litellm_provider": "openai"},
            "azure/eu/gpt-x": {**usual, "litellm_provider": "azure"},
            "azure/gpt-x": {**usual, "litellm_provider": "azure"},
            "together_ai/x": {**usual, "litellm_provider": "together_ai"},
            "gemini-x": {**usual, "litellm_provider": "vertex_ai-language-models"},
            "vertex_ai/claude-x": {**usual, "litellm_provider": "vertex_ai-anthropic_models"},
            "transcribe/StartTranscriptionJob": {"input_cost_per_second": 0.0001},
        },
        "1.2.3",
    )
    assert made["source"] == "litellm 1.2.3"
    assert {kind: list(models) for kind, models in made["prices"].items() if models} == {
        "aws": ["*"],
        "azure_openai": ["gpt-x"],
        "openai": ["gpt-x", "gpt-x-2026-02-02"],
        "vertex": ["gemini-x"],
    }
    assert json.loads(tool["write_list"](made)) == made


def test_the_shipped_list_is_complete(tool):
    text = importlib.resources.files("batchwright.providers").joinpath("prices.json").read_text()
    document = json.loads(text)
    assert tool["write_list"](document) == text
    assert set(document["prices"]) <= set(find_adapters())
    for kind, models in document["prices"].items():
        for model in models:
            found = find_price({}, kind, model)
            assert found.audio_hour or (found.input and found.output is not None), (kind, model)
            assert found.cached is None or found.cached <= found.input, (kind, model)


# Whole tasks --------------------------------------------------------------------------------------------------------


async def events_of(stage, task, name):
    return [one for one in await stage.part.core.queue.events(task.job_id) if one.event == name]


async def test_a_task_says_what_it_cost_and_by_which_price(database_url, tmp_path):
    written = {"mistral": {"prices": {"own": {"input": 1000.0, "output": 2000.0}}}}
    async with task_stage(database_url, tmp_path, tables=written) as stage:
        stage.work()
        task = await stage.ended(await stage.complete(["openai/gpt-5-mini", "mistral/own"], "a", "b"))
        first, second = await stage.jobs(task.id)
        expected = cost(find_price({}, "openai", "gpt-5-mini"), tokens(first.input_tokens, first.output_tokens))
        assert first.cost == pytest.approx(expected)
        assert second.cost == pytest.approx(second.input_tokens / 1000 + second.output_tokens / 500)
        assert task.cost == pytest.approx(first.cost + second.cost)
        ended = {one.model: one for one in await events_of(stage, task, "provider.ended")}
        assert ended["gpt-5-mini"].fields["price"] == list_source()
        assert ended["own"].fields["price"] == WRITTEN
        assert float(ended["own"].cost) == pytest.approx(second.cost)
        assert (ended["own"].prompt_tokens, ended["own"].completion_tokens) == (
            second.input_tokens,
            second.output_tokens,
        )
        assert await events_of(stage, task, "task.cost_unknown") == []


async def test_an_unknown_price_is_no_cost_and_one_warning(database_url, tmp_path):
    async with task_stage(database_url, tmp_path) as stage:
        stage.work()
        models = ["openai/gpt-5-mini", "openai/unheard-of", "mistral/nobody"]
        task = await stage.ended(await stage.complete(models, "a"))
        assert task.cost is None
        assert [job.cost is None for job in await stage.jobs(task.id)] == [False, True, True]
        (warning,) = await events_of(stage, task, "task.cost_unknown")
        assert warning.level == "warning"
        assert warning.message == (
            "the cost of openai/unheard-of, mistral/nobody is unknown; "
            'write it as [providers.openai.prices."unheard-of"]'
        )


async def test_seconds_of_audio_are_what_a_transcription_costs(database_url, tmp_path):
    async with task_stage(
        database_url, tmp_path, tables={"google": {"prices": {"*": {"audio_hour": 3600.0}}}}
    ) as stage:
        stage.work()
        task = await stage.ended(await stage.transcribe("google", "one.wav", "two.wav"))
        assert task.audio_seconds > 0
        assert task.cost == pytest.approx(task.audio_seconds)
        (ended,) = await events_of(stage, task, "provider.ended")
        assert ended.fields["audio_seconds"] == task.audio_seconds
