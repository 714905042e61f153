"""How tables are laid out on terminals of any width."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.text import Text

from batchwright.cli.show import age
from batchwright.cli.tables import table_lines

ID = "019a9999-1234-7000-8000-123456789abc"
COLUMNS = {
    "id": [Text(ID), Text(ID.replace("9", "8"))],
    "empty": [Text(""), Text("")],
    "status": [Text("SUCCEEDED", "green"), Text("FAILED", "red")],
    "tries": [Text("1/3"), Text("3/3")],
    "age": [Text("12 min"), Text("3 h")],
    "type": [Text("resize_image"), Text("shop.orders.reconcile_with_the_payment_provider")],
    "message": [Text(""), Text("handler_error: " + "the payment provider was not there " * 9)],
}


def draw(width: int | None, **options: bool) -> list[str]:
    return [line.plain for line in table_lines(COLUMNS, width, elastic=("type", "message"), **options)]


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 120, 200])
def test_no_column_vanishes_and_no_line_is_too_long(width: int) -> None:
    lines = draw(width)
    shown = "\n".join(lines)
    assert all(cell_len(line) <= width for line in lines)
    for whole in ("status", "tries", "age", "type", "message", "SUCCEEDED", "FAILED", "1/3", "3/3", "12 min", "3 h"):
        assert whole in shown
    assert ID in "".join(line.strip() for line in lines)
    assert "empty" not in shown
    assert "handler_error:" in shown
    assert "…" in shown, "the message is longer than any of these widths, so it is cut"


def test_a_row_that_does_not_fit_continues_in_an_indented_line() -> None:
    head, below, first, second, message = draw(80)
    assert head.split() == ["id", "status", "tries", "age", "type"]
    assert below == "  message"
    assert first.startswith(f"{ID}  SUCCEEDED  1/3    12 min  resize_image")
    assert second.endswith("…")
    assert message.startswith("  handler_error: the payment")
    assert message.endswith("…")
    assert len(message) == 80


def test_a_pipe_gets_one_complete_line_for_each_row() -> None:
    lines = draw(None)
    assert len(lines) == 3
    assert "…" not in "".join(lines)


def test_the_widest_of_the_elastic_columns_is_cut_first() -> None:
    line = draw(140)[2]
    assert "shop.orders.reconcile_with_the_payment_provider" not in line
    kind, message = line.partition("3 h")[2].split("…")[:2]
    assert abs(len(kind.strip()) - len(message.strip())) <= 2


def test_a_table_may_have_no_header_and_be_indented() -> None:
    lines = draw(120, has_header=False)
    assert len(lines) == 2
    lines = [line.plain for line in table_lines(COLUMNS, 80, elastic=("message",), indent=4)]
    assert all(line.startswith("    ") and cell_len(line) <= 80 for line in lines)


def test_numbers_are_aligned_to_the_right_and_wide_characters_count_double() -> None:
    columns = {"n": [Text("7"), Text("1,234")], "name": [Text("日本語の長い名前です"), Text("a")], "x": [Text("y")] * 2}
    lines = [line.plain for line in table_lines(columns, 30, elastic=("name",))]
    assert lines[1].startswith("    7  日本語")
    assert lines[2].startswith("1,234  a")
    assert cell_len(lines[1]) == cell_len(lines[2])


def test_values_from_strangers_cannot_break_a_table() -> None:
    columns = {"id": [Text("a")], "message": [Text("one\ntwo\x1b[31m\tthree\u2028four")]}
    assert [line.plain for line in table_lines(columns, 80)] == ["id  message", "a   one two [31m three four"]


@pytest.mark.parametrize(
    ("n", "text"), [(-1, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (86_400, "1 d"), (9e7, "1041 d")]
)
def test_ages_have_one_unit(n: float, text: str) -> None:
    assert age(n) == text
