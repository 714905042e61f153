"""Entities by patterns and lists, and how long hostile texts take."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import ConfigurationError
from batchwright.ingest.entities.mention import load_mentions
from batchwright.ingest.entities.patterns import PatternExtractor
from tests.inference.ledger import MemoryLedger
from tests.support import sparsely

LISTS = {"product": ["Grand Piano", "C++"], "organization": ["Acme", "Acme Corp"]}


def found(text, lists=None):
    mentions = PatternExtractor(lists).find(text)
    for one in mentions:
        assert text[one.start : one.end] == one.text
    return [(one.type, one.text) for one in mentions]


@pytest.mark.parametrize(
    ("text", "type", "wanted"),
    [
        ("Write to ada.l+x@mail.example.co.uk, please", "email", "ada.l+x@mail.example.co.uk"),
        ("(see https://example.com/a(b)?q=1).", "url", "https://example.com/a(b)?q=1"),
        ("at www.example.com.", "url", "www.example.com"),
        ("<http://example.com/x>", "url", "http://example.com/x"),
        ("[here](https://example.com/docs)", "url", "https://example.com/docs"),
        ("on 2026-01-31.", "date", "2026-01-31"),
        ("at 2026-01-31T12:00:00Z,", "date", "2026-01-31T12:00:00Z"),
        ("am 3.4.2024 war", "date", "3.4.2024"),
        ("am 03.04.24.", "date", "03.04.24"),
        ("am 3. März 2024", "date", "3. März 2024"),
        ("am 12. Dez. 2024", "date", "12. Dez. 2024"),
        ("on March 5th, 2024", "date", "March 5th, 2024"),
        ("the 5th of March 2024", "date", "5th of March 2024"),
        ("since May 2021", "date", "May 2021"),
        ("by 12/31/2023;", "date", "12/31/2023"),
        ("paid $1,234.50.", "money", "$1,234.50"),
        ("für 5.000 € im", "money", "5.000 €"),
        ("EUR 3 Mio. mehr", "money", "EUR 3 Mio."),
        ("USD 1.2 billion", "money", "USD 1.2 billion"),
        ("20 dollars", "money", "20 dollars"),
        ("up 3.5 %", "percentage", "3.5 %"),
        ("12 Prozent", "percentage", "12 Prozent"),
        ("only -0,5%!", "percentage", "-0,5%"),
        ("call +49 30 1234567.", "phone", "+49 30 1234567"),
        ("Tel. (030) 123-4567", "phone", "(030) 123-4567"),
        ("Tel. 030/1234567", "phone", "030/1234567"),
        ("call 555-123-4567", "phone", "555-123-4567"),
    ],
)
def test_a_pattern_finds_only_its_words(text, type, wanted):
    assert found(text) == [(type, wanted)]


@pytest.mark.parametrize(
    "text",
    [
        "version 1.2.3.4",
        "10.10.10.10",
        "0.123456789",
        "32.13.2024",
        "2026-13-01",
        "0123456789",
        "a@b",
        "user@localhost",
        "http://",
        "www.",
        "12 pieces",
        "a 50 b",
        "May be",
        "no 123-45",
    ],
)
def test_texts_that_only_look_like_an_entity_are_not_found(text):
    assert found(text) == []


def test_words_of_lists_are_found_whatever_their_case_and_the_longest_wins():
    text = "ACME CORP sells a grand\npiano, and Acme wrote it in C++."
    assert found(text, LISTS) == [
        ("organization", "ACME CORP"),
        ("product", "grand\npiano"),
        ("organization", "Acme"),
        ("product", "C++"),
    ]
    assert found("Acmes grandpiano", LISTS) == []


def test_words_of_a_list_may_be_inside_an_address():
    assert found("info@acme.com", LISTS) == [("email", "info@acme.com"), ("organization", "acme")]


@pytest.mark.parametrize("phrase", ["", " ", "a " * 17])
def test_a_phrase_without_words_or_with_too_many_is_refused(phrase):
    with pytest.raises(ConfigurationError, match="product"):
        PatternExtractor({"product": [phrase]})


def test_the_fingerprint_depends_on_the_lists_but_not_on_their_order():
    plain = PatternExtractor().fingerprint
    one = PatternExtractor({"a": ["x", "y"]}).fingerprint
    assert len({plain, one, PatternExtractor({"b": ["x", "y"]}).fingerprint}) == 3
    assert one == PatternExtractor({"a": ["y", "X"]}).fingerprint


async def test_mentions_are_stored_as_json_at_no_cost():
    ledger = MemoryLedger()
    windows = {b"a": "on 2026-01-31", b"b": "nothing"}
    await PatternExtractor().extract(windows, ledger)
    assert ledger.values == {b"a": b'[{"type":"date","text":"2026-01-31","start":3,"end":13}]', b"b": b"[]"}
    assert load_mentions(ledger.values[b"a"])[0].type == "date"
    assert ledger.tokens == (0, 0)


HOSTILE = [
    *("1", "a", "a@", "a.", "@", "+1", "01 ", "1,111", ",111", "(", "www.", "http://", "$", "Jan ", "1. ", "1/", "1-"),
    *(" ", "0(", "acme ", "acme corp ", "grand ", "+", ")", "US$1", "1\u00a0", "1 M", "a@a.", "%", "\u20ac1.1", "-1%"),
]


@pytest.mark.timed("limits the time of a call")
@pytest.mark.parametrize("piece", sparsely(HOSTILE, 4))
def test_the_time_for_a_text_grows_in_proportion_to_its_length(piece):
    text = "x@" + piece * (300_000 // len(piece))
    started = time.thread_time()
    PatternExtractor(LISTS).find(text)
    assert time.thread_time() - started < 5


@pytest.mark.timed("limits the time of a call")
def test_a_megabyte_of_everything_hostile_is_read_in_seconds():
    text = "".join(piece * (1_000_000 // len(HOSTILE) // len(piece)) for piece in HOSTILE)
    assert len(text) > 900_000
    started = time.thread_time()
    PatternExtractor(LISTS).find(text)
    assert time.thread_time() - started < 10


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aA1 .,-+/()@:%$€0ä\n", max_size=300))
def test_mentions_have_the_right_offsets_and_those_of_patterns_do_not_overlap(text):
    mentions = PatternExtractor().find(text)
    end = 0
    for one in mentions:
        assert text[one.start : one.end] == one.text
        assert one.start >= end
        end = one.end
