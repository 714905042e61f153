"""How numbers, times and ids are written on pages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from batchwright.web.formats import as_json, clip, compact, duration, money, number, percent, relative, short, size

NOW = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (number, 1_234_567, "1,234,567"),
        (number, None, "\u2013"),
        (compact, 1_234_567, "1.23M"),
        (compact, 0.016, "0.016"),
        (percent, 0.125, "12.5 %"),
        (percent, 1.0, "100 %"),
        (size, 999, "999 B"),
        (size, 12_345_678, "12.3 MB"),
        (duration, 0.004, "4 ms"),
        (duration, 7.26, "7.3 s"),
        (duration, 125, "2 min 5 s"),
        (duration, 7_200, "2 h"),
        (duration, 90_061, "1 d 1 h"),
        (money, 1234.5, "US$ 1,234.50"),
        (money, 0.00123, "US$ 0.0012"),
        (short, "01a1ee73-de7d-7418-895e-ba49b7559124", "…b7559124"),
        (short, "batch_01a1ee73de7d7418895eba49b7559124", "batch_…b7559124"),
        (short, "gpu", "gpu"),
        (clip, "a\n b  c", "a b c"),
    ],
)
def test_values_are_written_as_people_read_them(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "now"), (5, "5 s ago"), (59, "59 s ago"), (60, "1 min ago"), (3_700, "1 h ago"), (-7_300, "in 2 h")],
)
def test_times_are_shown_relative_to_now(seconds, words):
    assert relative(NOW - timedelta(seconds=seconds), NOW) == words


def test_json_that_is_too_long_is_cut_and_says_so():
    text = as_json({"words": "x" * 500}, 100)
    assert len(text) < 150
    assert text.endswith("more characters")
