"""Vectors of this process: those of wordllama without its code, and those without weights."""

import asyncio
import importlib.util
import math
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import ConfigurationError
from batchwright.inference.local import HashEmbedder, LocalEmbedder
from tests.inference.ledger import MemoryLedger

WORDS = st.sampled_from(
    ["a", "the", "Zoë", "naïve", "x1", "\u2581", "<s>", "</s>", "<unk>", "日本語", "\r", "👩‍👩‍👧", "§12;", "  "]
)
TEXTS = st.lists(WORDS | st.text(max_size=8), max_size=30).map(" ".join) | st.text(max_size=200)


@pytest.fixture(scope="module")
def local():
    return LocalEmbedder()


@pytest.fixture(scope="module")
def wordllama():
    """The original library, without network access."""
    package = Path(importlib.util.find_spec("wordllama").submodule_search_locations[0])
    from wordllama import WordLlama

    return WordLlama.load(cache_dir=package, disable_download=True)


def closeness(one, other):
    return sum(a * b for a, b in zip(array("f", one), array("f", other), strict=True))


@settings(max_examples=200, deadline=None)
@given(text=TEXTS.filter(bool))
def test_vectors_equal_those_of_wordllama(local, wordllama, text):
    (mine,) = local.vectors([text])
    assert array("f", mine).tolist() == pytest.approx(wordllama.embed(text, norm=True)[0].tolist(), abs=1e-5)


def test_vectors_of_real_documents_equal_those_of_wordllama(local, wordllama):
    text = Path(__file__).read_text() + (Path(__file__).parents[2] / "docs/parts.md").read_text()
    chunks = [text[start : start + 1500] for start in range(0, len(text), 1500)]
    for mine, theirs in zip(local.vectors(chunks), wordllama.embed(chunks, norm=True), strict=True):
        assert array("f", mine).tolist() == pytest.approx(theirs.tolist(), abs=1e-5)


def test_neither_the_code_of_wordllama_nor_an_http_client_is_loaded_and_no_socket_is_made():
    code = (
        "import socket, sys\n"
        "from batchwright.inference.local import LocalEmbedder\n"
        "before = set(sys.modules)\n"
        "socket.socket.connect = None\n"
        "assert len(LocalEmbedder().vectors(['some words'])[0]) == 1024\n"
        "print(sorted({'wordllama', 'requests', 'huggingface_hub', 'httpx'} & (set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["wordllama", "tokenizers"])
def test_a_missing_extra_is_named_with_its_remedy(monkeypatch, name):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find(wanted))
    with pytest.raises(ConfigurationError, match=rf"need {name}: pip install 'batchwright\[documents\]'"):
        LocalEmbedder()


@pytest.mark.parametrize("embedder", [HashEmbedder(), LocalEmbedder()], ids=["hash", "local"])
class TestBoth:
    async def test_every_text_is_embedded_at_no_cost(self, embedder):
        ledger = MemoryLedger()
        wanted = {f"{n}".encode(): f"text number {n}" for n in range(600)}
        await embedder.embed(wanted, ledger)
        assert ledger.values.keys() == wanted.keys()
        assert ledger.tokens == (0, 0)
        assert len(ledger.begun) == 3
        assert {call.model for call in ledger.begun.values()} == {None}
        assert await embedder.embed_query("text number 7") == ledger.values[b"7"]

    def test_vectors_have_256_dimensions_and_length_one(self, embedder):
        for vector in embedder.vectors(["words", "", " ", "!!!", "\n", "1", "<s>", "a" * 100_000]):
            assert embedder.dimensions == 256 == len(array("f", vector))
            assert math.hypot(*array("f", vector)) == pytest.approx(1, abs=1e-5)

    def test_texts_that_share_words_have_more_similar_vectors(self, embedder):
        asked, near, far = embedder.vectors(
            ["how long may a lease last", "a lease may last thirty seconds", "bananas are yellow fruit"]
        )
        assert closeness(asked, near) > closeness(asked, far) + 0.2

    async def test_embedding_does_not_block_the_event_loop(self, embedder):
        task = asyncio.create_task(embedder.embed({b"%d" % n: "some words " * 300 for n in range(200)}, MemoryLedger()))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 5

    def test_vectors_are_the_same_in_every_process(self, embedder):
        code = (
            f"from batchwright.inference.local import {type(embedder).__name__} as E\n"
            "print(E().fingerprint, E().vectors(['Ada Lovelace met Babbage'])[0].hex())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        (vector,) = embedder.vectors(["Ada Lovelace met Babbage"])
        assert done.stdout.split() == [embedder.fingerprint, vector.hex()]


def test_similar_words_are_near_without_being_the_same(local):
    car, auto, soup = local.vectors(["car", "automobile", "soup"])
    assert closeness(car, auto) > closeness(car, soup) + 0.2
