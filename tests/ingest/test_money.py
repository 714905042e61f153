"""Formatting amounts of money."""

from decimal import Decimal

import pytest

from batchwright.ingest.money import show_amount


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (None, "0"),
        ("0", "0"),
        ("0.000000625", "0.000000625"),
        ("0.0000340", "0.000034"),
        ("0.0123456", "0.0123"),
        ("0.5", "0.5"),
        ("0.9999", "1"),
        ("1", "1.00"),
        ("12345.678", "12,345.68"),
    ],
)
def test_small_amounts_keep_their_digits_and_large_ones_have_cents(amount: str | None, shown: str) -> None:
    assert show_amount(None if amount is None else Decimal(amount)) == shown
