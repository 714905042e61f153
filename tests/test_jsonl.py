from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cli.show import print_json
from batchwright.jsonl import one_line

ODD = "a\u2028b\u2029c\x85d"


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text('\u2028\u2029\x85\\"é\u2027a'))
def test_any_json_is_written_as_one_line_and_reads_back_equal(text: str) -> None:
    document = json.dumps({text: [text]}, ensure_ascii=False)
    line = one_line(document.encode()).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {text: [text]}
    assert line == document or any(character in text for character in "\u2028\u2029\x85")


def test_bytes_that_are_not_text_are_left_unchanged() -> None:
    assert one_line(b"\xff\xe2\x80\xa8\xe2\x80") == b"\xff\\u2028\xe2\x80"


def test_what_a_command_prints_as_json_has_no_other_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"message": ODD}, indent=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"message": ODD}
