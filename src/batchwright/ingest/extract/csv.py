"""CSV: each row on its own line, its values with the names of their columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from batchwright.ingest.extract.document import Document, damaged
from batchwright.ingest.extract.encoding import decode
from batchwright.ingest.text import TextBuilder

_DELIMITERS = ",;\t|"
_SAMPLE_LINES = 20


def extract(document: Document, builder: TextBuilder) -> None:
    text, warning = decode(document.data)
    if warning is not None:
        builder.warn(warning)
    csv.field_size_limit(document.limits.output_bytes)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=_find_delimiter(text))
    try:
        first = next(rows, [])
        columns = first if _is_header(first) else []
        if not columns:
            builder.add(render_row([], first))
        for row in rows:
            builder.add(render_row(columns, row), separator="\n")
    except csv.Error as error:
        raise damaged(f"line {rows.line_num}: {error}") from error
    if builder.is_empty:
        builder.add(render_row([], columns))


def render_row(columns: Sequence[str], row: Sequence[str]) -> str:
    """The row as a line. Every value has its column's name, so that each passage of a table makes sense alone."""
    named = [*columns, *[""] * (len(row) - len(columns))]
    values = ((name.strip(), " ".join(value.split())) for name, value in zip(named, row, strict=False))
    return " | ".join(f"{name}: {value}" if name else value for name, value in values if value)


def _find_delimiter(text: str) -> str:
    """The delimiter that splits the first lines into the most columns, with the same number on each line."""
    lines = [line for line in text[:65_536].splitlines()[:_SAMPLE_LINES] if line.strip()]

    def columns(delimiter: str) -> int:
        counts = {len(row) for row in csv.reader(lines, delimiter=delimiter)}
        return counts.pop() if len(counts) == 1 else 0

    best = max(_DELIMITERS, key=columns)
    return (
        best if columns(best) > 1 else max(_DELIMITERS, key=lambda delimiter: lines[0].count(delimiter) if lines else 0)
    )


def _is_header(row: Sequence[str]) -> bool:
    names = [name.strip() for name in row]
    return len(names) > 1 and all(names) and len(set(names)) == len(names) and not any(map(_is_number, names))


def _is_number(value: str) -> bool:
    return value.replace(".", "").replace(",", "").replace("-", "").replace("%", "").isdigit()
