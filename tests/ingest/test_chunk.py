"""Chunks are the same in every process, cover the text, keep to their limits and never cut a character."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from itertools import pairwise

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchwright.errors import ConfigurationError
from batchwright.inference.tokens import estimate_tokens
from batchwright.ingest.chunk import ChunkSettings, Tokenizer, chunk_id, chunk_text, fingerprint
from batchwright.ingest.graphemes import is_boundary
from batchwright.ingest.text import CanonicalText, Page, Section, normalise

PIECES = st.sampled_from(
    ["word ", "A sentence ends. ", 'Really?" ', "\n", "\n\n", "漢字。", "e\u0301", " \u0301", "👩‍👩‍👧‍👦", "🇩🇪", "🇫",
     "각", "\u1100\u1161\u11a8", "क्षि", "न\u094dन", "👍🏽", "\u0600a", "x" * 40, "\t", "\u00a0", "ก\u0e33",
     "🏴\U000e0067\U000e007f"]
)  # fmt: skip
TEXTS = st.one_of(st.lists(PIECES, max_size=120).map("".join), st.text(max_size=400)).map(normalise)
SETTINGS = st.builds(
    lambda characters, share, tokens: ChunkSettings(
        characters=characters, overlap=characters * share // 100, tokens=tokens
    ),
    st.integers(16, 200),
    st.integers(0, 50),
    st.none() | st.integers(1, 60),
)


@st.composite
def documents(draw):
    text = draw(TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    spans = list(pairwise(cuts))
    pages = tuple(Page(number, *span) for number, span in enumerate(spans, start=1))
    sections = tuple(Section((f"S{number}",), *span) for number, span in enumerate(spans))
    return CanonicalText(text=text, format="text", pages=pages, sections=sections)


@given(documents(), SETTINGS)
def test_chunks_cover_the_text_in_order_and_repeat_only_their_overlap(document, chosen):
    chunks = chunk_text(document, chosen)
    end = 0
    for chunk in chunks:
        body = chunk.start + chunk.overlap
        assert not document.text[end:body].strip() or body < end
        assert end <= body < chunk.end
        assert chunk.overlap <= chosen.overlap
        assert document.text[chunk.start : chunk.end].strip()
        end = chunk.end
    assert not document.text[end:].strip()


@given(documents(), SETTINGS)
def test_chunks_are_deterministic(document, chosen):
    assert chunk_text(document, chosen) == chunk_text(document, chosen)


@given(documents(), SETTINGS)
def test_chunks_keep_to_their_limits(document, chosen):
    for chunk in chunk_text(document, chosen):
        text = document.text[chunk.start : chunk.end]
        assert len(text) <= chosen.characters
        if chosen.tokens is not None and estimate_tokens(text) > chosen.tokens:
            assert chunk.overlap == 0
            assert not any(is_boundary(text, offset) for offset in range(1, len(text)))


@given(documents(), SETTINGS)
@example(CanonicalText(text="e" + "\u0301" * 100, format="text"), ChunkSettings(characters=16, overlap=0))
@settings(max_examples=300)
def test_no_character_is_cut_unless_it_is_longer_than_a_chunk(document, chosen):
    edges = {0}
    for found in regex.finditer(r"\X", document.text):
        edges.add(found.end())
    chunks = chunk_text(document, chosen)
    for chunk in chunks:
        for edge in (chunk.start, chunk.start + chunk.overlap):
            if edge not in edges:
                inner = document.text[max(edges & set(range(edge))) : min(edges - set(range(edge)))]
                assert len(inner) > chosen.characters // 2


@given(st.lists(PIECES, max_size=20).map("".join) | st.text())
def test_a_boundary_of_ours_is_one_of_the_standard(text):
    edges = {0, len(text)} | {found.end() for found in regex.finditer(r"\X", text)}
    assert {offset for offset in range(len(text) + 1) if is_boundary(text, offset)} <= edges


@given(documents(), SETTINGS)
def test_a_chunk_knows_its_pages_and_its_section(document, chosen):
    for chunk in chunk_text(document, chosen):
        assert chunk.page_first == document.page_at(chunk.start)
        assert chunk.page_last == document.page_at(chunk.end - 1)
        assert chunk.section == document.section_at(chunk.start + chunk.overlap)


def prose(rng, sentences):
    words = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 9))) for _ in range(500)]
    return [" ".join(rng.choices(words, k=rng.randint(5, 20))).capitalize() + "." for _ in range(sentences)]


def digests(text):
    plain = CanonicalText(text=text, format="text")
    return [
        hashlib.sha256(text[chunk.start : chunk.end].encode()).digest() for chunk in chunk_text(plain, ChunkSettings())
    ]


@pytest.mark.parametrize("separator", [" ", "\n", "\n\n"])
def test_an_edit_changes_only_the_chunks_around_it(separator):
    rng = random.Random(7)
    sentences = prose(rng, 4_000)
    before = set(digests(separator.join(sentences)))
    changed = []
    for _ in range(10):
        edited = list(sentences)
        edited.insert(rng.randrange(len(edited)), "A sentence that was not there before.")
        changed.append(sum(digest not in before for digest in digests(separator.join(edited))))
    assert sum(changed) / len(changed) <= 4
    assert len(before) > 200


def test_a_chunk_ends_with_its_section_where_that_is_long_enough():
    first, second = ("First. " * 150).strip(), ("Second. " * 150).strip()
    text = f"{first}\n\n{second}"
    sections = (Section(("One",), 0, len(first) + 2), Section(("Two",), len(first) + 2, len(text)))
    chunks = chunk_text(CanonicalText(text=text, format="text", sections=sections), ChunkSettings())
    assert [(chunk.section, text[chunk.start : chunk.end], chunk.overlap) for chunk in chunks] == [
        (("One",), first, 0),
        (("Two",), second, 0),
    ]


def test_a_chunk_repeats_whole_words_of_the_one_before():
    text = " ".join(f"word{number}" for number in range(200))
    one, two, *_ = chunk_text(CanonicalText(text=text, format="text"), ChunkSettings(characters=200, overlap=40))
    repeated = text[two.start : two.start + two.overlap]
    assert 25 < two.overlap <= 40
    assert text[one.start : one.end].endswith(repeated.strip())
    assert repeated.startswith("word")


def test_ids_are_the_same_in_another_process():
    code = (
        "from batchwright.ingest.chunk import *; from batchwright.ingest.text import CanonicalText\n"
        "t = CanonicalText(text='Some words. ' * 300, format='text'); s = ChunkSettings()\n"
        "print(*[chunk_id(t.digest, fingerprint(s), chunk) for chunk in chunk_text(t, s)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, chosen = CanonicalText(text="Some words. " * 300, format="text"), ChunkSettings()
    assert done.stdout.split() == [
        chunk_id(text.digest, fingerprint(chosen), chunk) for chunk in chunk_text(text, chosen)
    ]


def test_a_chunker_that_changes_must_change_its_fingerprint():
    """If this fails, chunk boundaries have changed: raise the fingerprint's version, then put the new digest here."""
    rng = random.Random(3)
    text = CanonicalText(text="\n\n".join(" ".join(prose(rng, 5)) for _ in range(60)), format="text")
    chosen = ChunkSettings(characters=700, overlap=70, tokens=200)
    moved = hashlib.sha256(repr([(chunk.start, chunk.end) for chunk in chunk_text(text, chosen)]).encode()).hexdigest()
    assert (fingerprint(chosen), moved[:16]) == ("chunk:1:700:70:200:estimate", "560d594db071277a")


def test_a_custom_tokenizer_is_used_and_is_part_of_the_fingerprint():
    words = Tokenizer(name="words", count=lambda text: len(text.split()))
    chosen = ChunkSettings(overlap=0, tokens=10)
    text = CanonicalText(text="one two three four five. " * 30, format="text")
    assert all(words.count(text.text[c.start : c.end]) <= 10 for c in chunk_text(text, chosen, words))
    assert fingerprint(chosen, words) == "chunk:1:1500:0:10:words"
    assert fingerprint(ChunkSettings(), words) == fingerprint(ChunkSettings()) == "chunk:1:1500:150:any"


@pytest.mark.parametrize("wrong", [{"characters": 15}, {"overlap": 751}, {"overlap": -1}, {"tokens": 0}])
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        ChunkSettings(**wrong)
