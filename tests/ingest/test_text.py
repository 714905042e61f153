"""Offsets of canonical text are exact, whatever goes in."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import Fatal
from batchwright.ingest.text import CanonicalText, Page, Section, TextBuilder, normalise

WILD = st.text(st.one_of(st.characters(), st.sampled_from("\r\n\t \u0301\x00\u2028\ufffe\u00e9\u1100\u1161")))
STEPS = st.lists(st.tuples(st.sampled_from(["block", "line", "page", "section"]), WILD, st.integers(1, 3)))


@given(STEPS)
def test_every_block_is_in_the_page_and_the_section_to_which_it_was_added(steps):
    builder = TextBuilder(output_bytes=1_000_000, pages=1_000)
    expected: list[tuple[str, int | None]] = []
    page = None
    for kind, text, level in steps:
        if kind == "page":
            builder.begin_page()
            page = (page or 0) + 1
            continue
        if kind == "section":
            builder.begin_section(text, level=level)
            text = " ".join(normalise(text).split())
        else:
            builder.add(text, separator="\n" if kind == "line" else "\n\n")
        if normalise(text):
            expected.append((normalise(text), page))
    built = builder.build("text")
    offset = 0
    for block, page in expected:
        offset = built.text.index(block, offset)
        assert built.page_at(offset) == page
        offset += len(block)
    assert len(built.pages) == sum(kind == "page" for kind, *_ in steps)
    for section in built.sections:
        assert built.text[section.start : section.end].startswith(section.path[-1])
        assert built.section_at(section.start) == section.path


@given(WILD, WILD)
def test_canonical_text_is_normal_and_has_no_characters_that_postgresql_or_utf_8_refuses(one, two):
    builder = TextBuilder(output_bytes=1_000_000, pages=1)
    builder.add(one)
    builder.add(two, separator="\n")
    text = builder.build("text").text
    assert unicodedata.is_normalized("NFC", text)
    assert not set(text) & set("\x00\r\u2028\ufffe")
    assert text.encode().decode() == text
    assert normalise(text) == text


def test_equal_texts_have_equal_digests_and_other_pages_another():
    one = CanonicalText(text="ab", format="text")
    assert one.digest == CanonicalText(text="ab", format="pdf").digest
    assert one.digest != CanonicalText(text="ab", format="text", pages=(Page(1, 0, 2),)).digest


def test_segments_that_overlap_or_leave_the_text_are_refused():
    for pages in [(Page(1, 0, 2), Page(2, 1, 3)), (Page(1, 0, 4),), (Page(1, -1, 2),), (Page(1, 2, 1),)]:
        with pytest.raises(ValueError, match="segments"):
            CanonicalText(text="abc", format="text", pages=pages)
    with pytest.raises(ValueError, match="segments"):
        CanonicalText(text="abc", format="text", sections=(Section(("a",), 2, 9),))


def test_a_page_too_many_is_refused():
    builder = TextBuilder(output_bytes=10, pages=1)
    builder.begin_page()
    with pytest.raises(Fatal, match="has over 1 pages"):
        builder.begin_page()
