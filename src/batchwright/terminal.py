"""Lines of people, cut between words where a terminal would cut inside them."""

from __future__ import annotations

import os
import textwrap
from typing import TextIO


def columns_of(stream: TextIO) -> int | None:
    """The width of a terminal; None for a pipe or a file."""
    if not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    try:
        return int(given) if given.isdecimal() and int(given) else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None


def wrap(text: str, columns: int | None, *, indent: int = 0) -> str:
    """Each line on its own, and what it continues on below, `indent` columns further right than it began.

    >>> print(wrap("error: port 8765 is in use", 16, indent=2))
    error: port 8765
      is in use

    Words that are longer than a line, such as ids and paths, stay whole: they can be copied.
    """
    if not columns:
        return text
    return "\n".join(_wrap_line(line, columns, indent) for line in text.split("\n"))


def _wrap_line(line: str, columns: int, indent: int) -> str:
    if len(line) <= columns:
        return line
    before = line[: len(line) - len(line.lstrip())]
    width = max(columns, len(before) + indent + 20)
    return textwrap.fill(
        line,
        width,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        subsequent_indent=before + " " * indent,
    )
