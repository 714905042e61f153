"""Tables on terminals of any width, and numbers as people read them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from batchwright.cli.show import make_table, money, print_findings, size
from batchwright.db.check import Finding, Level

COLUMNS = {
    "id": [Text("0123456789"), Text("9876543210")],
    "empty": [Text(""), Text("")],
    "status": [Text("RUNNING"), Text("FAILED")],
    "models": [Text("a-rather-long-name, another-name"), Text("short")],
    "message": [Text("a message that is longer than anything else in here"), Text("")],
}


def draw(width: int, **options: bool) -> tuple[list[str], int]:
    table, needed = make_table(COLUMNS, width, elastic=("models", "message"), **options)
    out = Console(file=io.StringIO(), width=max(width, needed))
    out.print(table)
    assert isinstance(out.file, io.StringIO)
    return [line.rstrip() for line in out.file.getvalue().splitlines()], needed


@pytest.mark.parametrize("width", [45, 60, 80, 120, 200])
def test_no_column_vanishes_and_only_elastic_ones_are_cut(width: int) -> None:
    (head, first, second), needed = draw(width)
    assert head.split() == ["id", "status", "models", "message"]
    assert first.startswith("0123456789  RUNNING")
    assert second.startswith("9876543210  FAILED")
    assert needed <= width
    assert ("…" in first) == (width < 110)


def test_the_widest_of_the_elastic_columns_are_cut_first() -> None:
    (_, first, _), _ = draw(80)
    _, models, message = first.partition("RUNNING")[2].partition("a-rather")
    assert abs(len(models + message.split("…")[0]) - len(message.split("…")[1])) <= 4


def test_what_must_not_be_cut_makes_a_table_wider_than_asked() -> None:
    (_, first, _), needed = draw(20)
    assert needed > 20
    assert first.startswith("0123456789  RUNNING  ")


def test_a_table_may_have_no_header() -> None:
    lines, _ = draw(120, has_header=False)
    assert len(lines) == 2


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


def test_findings_stand_in_columns_whatever_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings(
        [Finding("clock", Level.OK, "right"), Finding("provider azure_openai", Level.ERROR, "refused", "replace it")]
    )
    assert capsys.readouterr().out.splitlines() == [
        "✓ clock                 right",
        "✗ provider azure_openai refused",
        "                        → replace it",
    ]
