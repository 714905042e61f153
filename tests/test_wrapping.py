"""Sentences are cut between words on a terminal, and not at all elsewhere."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest

from batchwright.telemetry.logs import configure_logs
from batchwright.terminal import columns_of, wrap

SENTENCE = (
    "error: yours runs already, pid 19783, at http://127.0.0.1:8765; use that one, or start another with --port 0"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
COMMAND = "batchwright batch run --resume batch_01a1f02a7bbc79b4983b47c93af26967"


@contextmanager
def screen(columns: int) -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        yield ours, theirs
    finally:
        for end in (ours, theirs):
            with suppress(OSError):
                os.close(end)


def shown_on(end: int) -> list[str]:
    found = b""
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(end, 65536):
            found += chunk
    return _COLOUR.sub("", found.decode()).replace("\r\n", "\n").rstrip("\n").split("\n")


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_a_sentence_is_cut_between_its_words(columns):
    lines = wrap(SENTENCE, columns, indent=2).split("\n")
    assert max(map(len, lines)) <= columns
    assert " ".join(line.strip() for line in lines) == SENTENCE
    assert all(line.startswith("  ") for line in lines[1:])


def test_what_fits_and_what_goes_into_a_pipe_stays_as_it_is():
    assert wrap(SENTENCE, None) == SENTENCE
    assert wrap(f"  resume:  {COMMAND}", 80) == f"  resume:  {COMMAND}"
    assert wrap("a  b\n  c", 80) == "a  b\n  c"


def test_a_path_that_is_longer_than_a_line_stays_whole():
    path = "/home/ada/" + "x" * 90
    assert path in wrap(f"note: {path} cannot be read, and nothing else is wrong", 40).split("\n")


def test_a_width_is_that_of_the_terminal_or_of_the_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    with screen(72) as (_, theirs), os.fdopen(os.dup(theirs), "w") as stream:
        assert columns_of(stream) == 72
        monkeypatch.setenv("COLUMNS", "50")
        assert columns_of(stream) == 50
    with (tmp_path / "file").open("w") as file:
        assert columns_of(file) is None


def on_screen(columns: int, *arguments: str, folder: Path, **more: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATCHWRIGHT_", "COLUMNS"))}
    with screen(columns) as (ours, theirs):
        subprocess.run(
            [sys.executable, "-m", "batchwright", *arguments],
            cwd=folder, env={**kept, **more}, stdin=theirs, stdout=theirs, stderr=theirs, timeout=60,
        )  # fmt: skip
        os.close(theirs)
        return shown_on(ours)


def test_errors_and_checks_of_a_command_have_whole_words_at_80_columns(tmp_path):
    lines = on_screen(80, "job", "list", folder=tmp_path, BATCHWRIGHT_API_PROT="1", BATCHWRIGHT_LOG_FORM="pretty plain")
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).startswith("error: the environment variable BATCHWRIGHT_API_PROT is not a setting; did you")
    name = "requests-of-the-second-warehouse.jsonl"
    (tmp_path / name).write_text('{"custom_id": "a"}\n')
    lines = on_screen(80, "batch", "check", name, folder=tmp_path)
    assert max(map(len, lines)) <= 80
    assert f"✗ {name}: 3 problems in 1 request; the batch would be refused" in " ".join(lines)


def test_log_lines_continue_below_their_message(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    logger, root = logging.getLogger("batchwright.test"), logging.getLogger()
    before, level = root.handlers[:], root.level
    with screen(80) as (ours, theirs):
        stream: TextIO = os.fdopen(theirs, "w")
        monkeypatch.setattr(sys, "stderr", stream)
        try:
            configure_logs("INFO")
            logger.warning("6 due jobs of type 'reconcile' wait for a worker that knows it; this one does not")
        finally:
            root.handlers[:] = before
            root.setLevel(level)
        stream.close()
        first, second = shown_on(ours)
    assert first.endswith("warning 6 due jobs of type 'reconcile' wait for a worker that knows it;")
    assert second == " " * 17 + "this one does not"
