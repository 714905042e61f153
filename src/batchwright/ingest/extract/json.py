"""JSON and JSON lines: every value on its own line, after its path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from batchwright.ingest.extract.document import Document, damaged
from batchwright.ingest.extract.encoding import decode
from batchwright.ingest.text import TextBuilder


def extract(document: Document, builder: TextBuilder) -> None:
    text, warning = decode(document.data)
    if warning is not None:
        builder.warn(warning)
    for value in _read(text):
        for number, line in enumerate(_flatten(value)):
            builder.add(line, separator="\n" if number else "\n\n")


def _read(text: str) -> list[Any]:
    """One value, or one on each line."""
    try:
        return [_parse(text)]
    except RecursionError as error:
        raise damaged("its JSON is nested too deep") from error
    except ValueError as error:
        values = _read_lines(text)
        if values is None:
            raise damaged(f"its JSON is invalid: {error}") from error
        return values


def _read_lines(text: str) -> list[Any] | None:
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return [_parse(line) for line in lines] if len(lines) > 1 else None
    except (RecursionError, ValueError):
        return None


def _parse(text: str) -> Any:
    """Numbers stay as they are written."""
    return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)


def _flatten(value: Any) -> Iterator[str]:
    """Depth first and in order, without recursion. Paths omit the indexes of lists."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend((f"{path}.{key}" if path else key, item) for key, item in reversed(value.items()))
        elif isinstance(value, list):
            waiting.extend((path, item) for item in reversed(value))
        elif value is not None and value != "":
            shown = str(value).lower() if isinstance(value, bool) else value
            yield f"{path}: {shown}" if path else shown
