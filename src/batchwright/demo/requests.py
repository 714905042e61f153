"""The input of `batchwright demo`: groups of requests that share a long system prompt, in random order.

Most real batches look like this: one instruction, then a thousand rows of a table or letters of an inbox, with several
such jobs in one file. If they are sent in the order of the file, and there are more instructions than the server's
prefix cache holds, the model server must process the same instruction again and again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from batchwright.private import open_private
from batchwright.simulator.bodies import CHAT, read
from batchwright.simulator.prefix_cache import BLOCK_TOKENS, PrefixCache, chain, tokens

REQUESTS_PER_PROMPT = 30
CACHE_BLOCKS = 1_000
_SEED = 7
_RULES = 24
_TRADES = ("bicycles", "books", "coffee", "cameras", "garden tools", "lamps", "pianos", "shoes", "tea", "tents")
_PLACES = ("Bergen", "Cork", "Ghent", "Kyoto", "Lima", "Lyon", "Porto", "Quito", "Riga", "Turin")
_SUBJECTS = ("A parcel", "A refund", "An exchange", "A repair", "A gift card", "A subscription", "A spare part")
_VERBS = ("takes", "may take", "never takes more than", "is announced within", "is settled within")
_ENDINGS = (
    "and the customer is told of it at once",
    "unless the customer has asked for something else",
    "which is counted from the day of the order",
    "and longer only if the customs office asks for papers",
)
_QUESTIONS = (
    "where my order is",
    "whether I can send it back",
    "why I was charged twice",
    "if it can be sent as a gift",
    "how to change the address",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A simulated model: how fast it is, and its share of the requests."""

    name: str
    profile: str
    percent: int


MODELS = (
    Model(name="small", profile="8b-on-h100", percent=65),
    Model(name="medium", profile="7b", percent=25),
    Model(name="large", profile="70b-on-h100", percent=10),
)


def write_requests(path: Path, requests: int) -> int:
    """Write an input file with this many requests, always the same. Returns how many system prompts they share."""
    dice = random.Random(_SEED)
    pairs = list(_pairs(dice, requests))
    dice.shuffle(pairs)
    with open_private(path, "wb") as file:
        for number, (model, prompt) in enumerate(pairs):
            file.write(orjson.dumps(_request(dice, number, model, prompt)) + b"\n")
    return len(set(pairs))


def input_order_share(path: Path) -> float:
    """The share of prompt tokens that the same caches would have saved in the order of the file.

    This favours the order of the file: it assumes that each prompt is in the cache before the next one arrives.
    """
    caches = {model.name: PrefixCache(CACHE_BLOCKS) for model in MODELS}
    total = cached = 0
    with path.open("rb") as file:
        for line in file:
            ask = read(CHAT, orjson.dumps(orjson.loads(line)["body"]))
            links = chain(ask.prompts[0])
            total += tokens(ask.prompts[0])
            cached += BLOCK_TOKENS * caches[ask.model].find(links)
            caches[ask.model].store(links)
    return cached / total


def _pairs(dice: random.Random, requests: int) -> Iterator[tuple[str, str]]:
    """Model and system prompt of each request; the last model gets what is left."""
    left = requests
    for model in MODELS:
        count = left if model is MODELS[-1] else requests * model.percent // 100
        left -= count
        prompts = [_system_prompt(dice) for _ in range(-(-count // REQUESTS_PER_PROMPT))]
        yield from ((model.name, prompts[place % len(prompts)]) for place in range(count))


def _system_prompt(dice: random.Random) -> str:
    """About 700 tokens."""
    shop = f"shop {dice.randrange(10_000)} in {dice.choice(_PLACES)}, which sells {dice.choice(_TRADES)}"
    rules = [f"{number}. {_rule(dice)}." for number in range(1, _RULES + 1)]
    return "\n".join([f"You answer letters to {shop}. Be brief, be kind, and keep to these rules.", *rules])


def _rule(dice: random.Random) -> str:
    what = f"{dice.choice(_SUBJECTS)} to {dice.choice(_PLACES)} with {dice.choice(_TRADES)}"
    return f"{what} {dice.choice(_VERBS)} {dice.randint(2, 30)} days, {dice.choice(_ENDINGS)}"


def _request(dice: random.Random, number: int, model: str, prompt: str) -> dict[str, Any]:
    letter = f"Order {dice.randrange(10**9):09}: please tell me {dice.choice(_QUESTIONS)}; it goes to"
    messages = [
        {"role": "system", "content": prompt},
        {"role": "user", "content": f"Letter {number}. {letter} {dice.choice(_PLACES)}."},
    ]
    return {
        "custom_id": f"letter-{number:05}",
        "method": "POST",
        "url": CHAT,
        "body": {"model": model, "messages": messages},
    }
