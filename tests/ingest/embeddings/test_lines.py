"""JSONL files are cut at line ends, whatever the chunks in which they come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.ingest.embeddings import lines
from batchwright.ingest.embeddings.lines import Splitter
from batchwright.ingest.embeddings.rows import BadRow, GoodRow, make_row


def split(data, batch_size, chunk):
    splitter = Splitter(batch_size)
    found = [piece for start in range(0, len(data), chunk) for piece in splitter.feed(data[start : start + chunk])]
    return found + splitter.finish()


@given(
    st.lists(st.integers(0, 30), max_size=40),
    st.booleans(),
    st.integers(1, 7),
    st.integers(1, 50),
)
def test_pieces_cover_the_file_and_end_at_line_ends(lengths, ends, batch_size, chunk):
    data = b"".join(b"x" * length + b"\n" for length in lengths)
    if lengths and not ends:
        data = data[:-1]
    pieces = split(data, batch_size, chunk)
    assert pieces == split(data, batch_size, len(data) + 1)
    assert b"".join(data[piece.start : piece.end] for piece in pieces) == data
    for piece in pieces:
        held = data[piece.start : piece.end]
        assert len(held.splitlines()) <= batch_size
        assert piece.end == len(data) or held.endswith(b"\n")
        assert piece.first == 1 + data[: piece.start].count(b"\n")


def test_long_lines_make_short_pieces(monkeypatch):
    monkeypatch.setattr(lines, "RANGE_BYTES_MAX", 100)
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 60)
    data = (b"x" * 49 + b"\n") * 4 + b"y" * 80 + b"\n" + b"z\n" + b"w" * 61
    pieces = split(data, 1000, 7)
    assert [(piece.end - piece.start, piece.first, piece.is_too_long) for piece in pieces] == [
        (100, 1, False),
        (100, 3, False),
        (81, 5, True),
        (2, 6, False),
        (61, 7, True),
    ]


@pytest.mark.parametrize(
    ("id", "text", "expected"),
    [
        ("a", "b", GoodRow("a", "b", 7)),
        (3, "b", GoodRow(3, "b", 7)),
        (None, "b", GoodRow(7, "b", 7)),
        (True, "b", GoodRow("True", "b", 7)),
        (1.5, "b", GoodRow("1.5", "b", 7)),
        ({"x": 1}, "b", GoodRow("{'x': 1}", "b", 7)),
    ],
)
def test_an_id_is_text_or_a_number(id, text, expected):
    assert make_row(id, text, 7) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "no_text"),
        ("", "no_text"),
        (" \n\t", "no_text"),
        (["a"], "not_text"),
        ("a\ud800b", "invalid_text"),
        ("x" * 1_000_001, "too_long"),
    ],
)
def test_a_value_that_is_not_text_is_a_bad_row(text, code):
    found = make_row("a", text, 1)
    assert isinstance(found, BadRow)
    assert found.code == code


async def test_a_line_that_is_too_long_is_not_read(monkeypatch, database_url, tmp_path):
    from tests.ingest.embeddings.stage import embedding_stage, jsonl

    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 1000)
    async with embedding_stage(database_url, tmp_path) as stage:
        stage.work()
        given = [{"id": "a", "text": "short"}, {"id": "b", "text": "x" * 2000}, {"id": "c", "text": "short again"}]
        result = await stage.run(jsonl(*given))
        assert [line["id"] for line in await stage.lines(result["file_id"])] == ["a", "c"]
        (bad,) = await stage.lines(result["errors_file_id"])
        assert (bad["row"], bad["code"]) == (2, "too_long")
        assert bad["message"].startswith("the line has 2,02")
