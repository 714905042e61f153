"""Make the lists of prices that come with Batchwright, from the one that litellm publishes under the MIT licence.

`python tools/prices.py` fetches litellm from the package index, without its dependencies, and writes two lists;
`--wheel FILE` takes a wheel that is already there.

`src/batchwright/providers/prices.json` has the prices of each provider's batch API, by kind of provider. Where the
source has only the usual price and the provider grants the same discount on all models, the list has the usual price
less that discount, and says `derived`.

`src/batchwright/inference/prices.json` has the usual prices of chat and embedding models, by the provider's name in the
source, with the batch prices beside them where they are known.

All other prices are left out: an unknown price is better than a wrong one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchwright.inference.prices import names_of
from batchwright.providers.registry import find_adapters

_PACKAGE = Path(__file__).parents[1] / "src" / "batchwright"
LIST = _PACKAGE / "providers" / "prices.json"
MODEL_LIST = _PACKAGE / "inference" / "prices.json"
LICENCE = "MIT, Copyright (c) 2023 Berri AI"
INSIDE = "litellm/model_prices_and_context_window_backup.json"
PROVIDERS = {
    "anthropic": ("anthropic", ""),
    "azure_openai": ("azure", "azure/"),
    "gemini": ("gemini", "gemini/"),
    "groq": ("groq", "groq/"),
    "mistral": ("mistral", "mistral/"),
    "openai": ("openai", ""),
    "vertex": ("vertex_ai", "vertex_ai/"),
}
"""The source's name for each of our providers, and the prefix of its models' names."""
MAKERS = {
    "anthropic": "anthropic",
    "cohere": None,
    "gemini": "gemini",
    "mistral": "mistral",
    "openai": "openai",
    "perplexity": None,
    "voyage": None,
    "xai": None,
}
"""Providers that sell their own models, so that the model's name is enough, and our adapter that knows the discount."""
HOSTS = {"azure": "azure_openai", "deepseek": None, "fireworks_ai": None, "groq": "groq", "together_ai": None}
"""Providers whose models others sell under the same name: only `provider/model` finds them."""
SPEECH = {"aws": "transcribe/StartTranscriptionJob"}
"""Only prices of the calls that we make: for Azure and Google, the source has only real-time prices."""
MODES = frozenset({"chat", "completion", "embedding", "responses"})
FIGURES = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cached": "cache_read_input_token_cost",
    "cache_write": "cache_creation_input_token_cost",
}
_LONG = re.compile(r"input_cost_per_token_above_(\d+)k_tokens")


def make_list(source: Mapping[str, Mapping[str, Any]], version: str) -> dict[str, Any]:
    """Our list of batch prices, made from the source."""
    kinds = find_adapters()
    prices: dict[str, dict[str, Any]] = {}
    for kind, (word, prefix) in PROVIDERS.items():
        found: dict[str, Any] = {}
        for model, said in source.items():
            name = model.removeprefix(prefix).casefold()
            if _is_ours(word, kind, name, said):
                price = read_price(said, kinds[kind].abilities.batch_discount)
                if price is not None:
                    found.setdefault(name, price)
        prices[kind] = _without_repetitions(found)
    for kind, model in SPEECH.items():
        if (second := source.get(model, {}).get("input_cost_per_second")) is not None:
            prices[kind] = {"*": {"audio_hour": _rounded(second * 3600)}}
    return {
        "source": f"litellm {version}",
        "licence": LICENCE,
        "unit": "US dollars for a million tokens or an hour of audio, in batches",
        "prices": {kind: dict(sorted(prices[kind].items())) for kind in sorted(prices)},
    }


def make_model_list(source: Mapping[str, Mapping[str, Any]], version: str, date: str) -> dict[str, Any]:
    """Our list of usual prices, made from the source."""
    kinds = find_adapters()
    prices: dict[str, dict[str, Any]] = {}
    for provider, kind in sorted((MAKERS | HOSTS).items()):
        discount = kinds[kind].abilities.batch_discount if kind in kinds else None
        found: dict[str, Any] = {}
        for model, said in source.items():
            name = model.casefold().removeprefix(f"{provider}/")
            if _is_theirs(provider, name, said) and (price := read_model_price(said, discount)) is not None:
                found.setdefault(name, price)
        prices[provider] = dict(sorted(_without_repetitions(found).items()))
    return {
        "source": f"litellm {version}",
        "date": date,
        "licence": LICENCE,
        "unit": "US dollars for a million tokens",
        "makers": sorted(MAKERS),
        "prices": prices,
    }


def read_model_price(said: Mapping[str, Any], discount: float | None) -> dict[str, Any] | None:
    """The usual price of one model, with its batch price if that is known."""
    if said["mode"] == "embedding":
        said = {**said, "output_cost_per_token": said.get("output_cost_per_token") or 0}
    usual = {name: value for name, value in said.items() if not name.endswith("_batches")}
    # The usual prices are read in the same way, under the names of the batch prices.
    price = read_price({**usual, **{f"{name}_batches": value for name, value in usual.items()}}, None)
    if price is None:
        return None
    batch = read_price(said, discount)
    return _without_writes({**price, "batch": batch} if batch is not None else price)


def _without_writes(price: dict[str, Any]) -> dict[str, Any]:
    """Remove the price of cache writes: servers do not report how much of a prompt they wrote into their cache."""
    return {
        name: _without_writes(value) if isinstance(value, dict) else value
        for name, value in price.items()
        if name != "cache_write"
    }


def _is_theirs(provider: str, name: str, said: Mapping[str, Any]) -> bool:
    """Whether it is a text model of this provider; models of a single region are left out."""
    word = str(said.get("litellm_provider")).removesuffix("_chat").removesuffix("-embedding-models")
    is_named = provider in ("fireworks_ai", "groq", "together_ai") or "/" not in name
    return said.get("mode") in MODES and word == provider and is_named


def read_price(said: Mapping[str, Any], discount: float | None) -> dict[str, Any] | None:
    """The batch price of one model; None if it is unknown."""
    price = _figures(said, "", discount)
    if price is None:
        return None
    tokens = min((int(found[1]) for name in said if (found := _LONG.fullmatch(name))), default=None)
    if tokens is not None:
        long = _figures(said, f"_above_{tokens}k_tokens", discount)
        if long is None:
            return None
        is_derived = long.pop("derived", False)
        price |= {"long_prompt": {"tokens": tokens * 1000, **long}} | ({"derived": True} if is_derived else {})
    return price


def _figures(said: Mapping[str, Any], suffix: str, discount: float | None) -> dict[str, Any] | None:
    batch = {name: said.get(f"{figure}{suffix}_batches") for name, figure in FIGURES.items()}
    usual = {name: said.get(f"{figure}{suffix}") for name, figure in FIGURES.items()}
    is_derived = False
    for name in ("input", "output"):
        if batch[name] is None and usual[name] == 0 and name == "output":
            batch[name] = 0
        elif batch[name] is None and usual[name] is not None and discount is not None:
            batch[name], is_derived = usual[name] * (1 - discount), True
    if not batch["input"] or batch["output"] is None:
        return None
    found = {name: _rounded(value * 1_000_000) for name, value in batch.items() if value is not None}
    return {**found, "derived": True} if is_derived else found


def _is_ours(word: str, kind: str, name: str, said: Mapping[str, Any]) -> bool:
    theirs = str(said.get("litellm_provider"))
    if said.get("mode") not in MODES:
        return False
    if kind == "vertex":
        return theirs.startswith(word) and name.startswith("gemini-")
    return theirs == word and (kind == "groq" or "/" not in name)


def _without_repetitions(found: Mapping[str, Any]) -> dict[str, Any]:
    """Remove versions that cost the same as their model: the model's name finds their price."""
    return {
        name: price
        for name, price in found.items()
        if not any(other != name and found.get(other) == price for other in names_of(name))
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def write_list(document: Mapping[str, Any]) -> str:
    """JSON with a line for each model, so that people can read a diff."""
    head = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in document.items() if name != "prices"]
    kinds = []
    for kind, models in document["prices"].items():
        lines = [f"      {json.dumps(model)}: {json.dumps(price)}" for model, price in models.items()]
        kinds.append(f"    {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n    }")
    return "\n".join(["{", *head, '  "prices": {', ",\n".join(kinds), "  }", "}", ""])


def _fetch(folder: str) -> Path:
    subprocess.run(  # noqa: S603 (the arguments are our own)
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "litellm"], check=True
    )
    return next(Path(folder).glob("litellm-*.whl"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the lists of prices.")
    parser.add_argument("--wheel", type=Path, help="a wheel of litellm; without it, the newest one is fetched")
    wheel = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as folder:
        path = wheel or _fetch(folder)
        with zipfile.ZipFile(path) as archive:
            source = json.loads(archive.read(INSIDE))
    version = path.name.split("-")[1]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for place, document in (
        (LIST, make_list(source, version)),
        (MODEL_LIST, make_model_list(source, version, today)),
    ):
        place.write_text(write_list(document), encoding="utf-8")
        counted = ", ".join(f"{kind} {len(models)}" for kind, models in document["prices"].items())
        sys.stdout.write(f"{place.parent.name}: {document['source']}: {counted}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
