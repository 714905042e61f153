"""Reading lines of the input for requests."""

import os

import pytest

from batchwright.batches.send.work import Lines


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of 200 lines of different lengths, and their positions."""
    texts = [b"%d " % number + b"x" * (number * 37 % 2_000) for number in range(200)]
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"\n".join(texts) + b"\n")
    places, position = [], 0
    for text in texts:
        places.append((position, text))
        position += len(text) + 1
    descriptor = os.open(path, os.O_RDONLY)
    calls = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: calls.append(args) or pread(*args))
    yield descriptor, places, calls
    os.close(descriptor)


def read(lines, places):
    return [lines.read(offset, len(text)) for offset, text in places]


def test_lines_that_follow_each_other_are_read_by_few_calls(file):
    descriptor, places, calls = file
    assert read(Lines(descriptor), places) == [text for _, text in places]
    assert len(calls) < len(places) / 20


@pytest.mark.parametrize("step", [3, 7, 199])
def test_lines_in_any_order_are_the_same_lines(file, step):
    descriptor, places, _ = file
    shuffled = sorted(places, key=lambda place: place[0] * step % 1_009)
    assert read(Lines(descriptor), shuffled) == [text for _, text in shuffled]


def test_lines_that_are_far_apart_are_read_without_the_bytes_between(file):
    descriptor, places, calls = file
    apart = places[199::-9]
    assert read(Lines(descriptor), apart) == [text for _, text in apart]
    assert sum(size for _, size, _ in calls) == sum(len(text) for _, text in apart)


def test_a_line_longer_than_the_read_ahead_is_read_whole(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"short\n" + b"y" * 300_000 + b"\nend\n")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        lines = Lines(descriptor)
        assert lines.read(0, 5) == b"short"
        assert lines.read(6, 300_000) == b"y" * 300_000
        assert lines.read(300_007, 3) == b"end"
    finally:
        os.close(descriptor)
