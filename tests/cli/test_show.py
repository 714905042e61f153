"""Formatting numbers and findings for people."""

from __future__ import annotations

import pytest

from batchwright.cli.show import money, print_findings, size
from batchwright.db.check import Finding, Level


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1_500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e15, "3,000.0 TB")]
)
def test_sizes_are_short(n: float, text: str) -> None:
    assert size(n) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0.0000"), (0.00001, "<0.0001"), (0.00012, "0.0001"), (0.5, "0.5000"), (1.005, "1.00"), (12_345, "12,345.00")],
)
def test_money_has_four_digits_below_one(amount: float, text: str) -> None:
    assert money(amount) == text


def test_findings_are_aligned_in_columns_whatever_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings(
        [Finding("clock", Level.OK, "right"), Finding("provider azure_openai", Level.ERROR, "refused", "replace it")]
    )
    assert capsys.readouterr().out.splitlines() == [
        "✓ clock                 right",
        "✗ provider azure_openai refused",
        "                        → replace it",
    ]
