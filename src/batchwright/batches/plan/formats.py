"""Recognizes files that are not JSON Lines with requests, from their first bytes.

Without this, a spreadsheet of 10,000 rows would be refused with 10,000 problems.
"""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import DecodeError
from msgspec.json import decode

_HEAD_BYTES = 64 * 1024
_LINES_LOOKED_AT = 5
_NAME_CHARACTERS_MAX = 40
_NAMES_SHOWN_MAX = 4
_SEPARATORS = {",": "CSV", ";": "CSV", "\t": "TSV"}
_REQUEST = {"custom_id", "method", "url", "body"}
_EXAMPLE = "`batchwright batch example` prints requests as they must be"
_TO_TEXT = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_SIGNATURES: Sequence[tuple[bytes, str]] = (
    (b"\x1f\x8b", "is compressed with gzip; unpack it first: gunzip -c {file} > requests.jsonl"),
    (b"BZh", "is compressed with bzip2; unpack it first: bunzip2 -c {file} > requests.jsonl"),
    (b"\xfd7zXZ\x00", "is compressed with xz; unpack it first: xz -dc {file} > requests.jsonl"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; unpack it first: zstd -dc {file} > requests.jsonl"),
    (b"\xd0\xcf\x11\xe0", "is an Excel file or another Office file; write one JSON object per row. {example}"),
    (b"PAR1", "is a Parquet file; write one JSON object per row. {example}"),
    (b"%PDF", "is a PDF; write one JSON object per request. {example}"),
    (b"SQLite format 3", "is an SQLite database; write one JSON object per row. {example}"),
)
_OFFICE = re.compile(rb"xl/|\[Content_Types\]\.xml")
_UNFINISHED = re.compile(r"[\[{,:]$|^[\]}],?$")


def explain_format(file: Path) -> str | None:
    """What the file is instead of requests, and what to do about it, in one sentence; None if it may be requests."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    found = _explain_bytes(head) or _explain_text(head)
    return None if found is None else f"{file} {found.format(file=shlex.quote(str(file)), example=_EXAMPLE)}"


def _explain_bytes(head: bytes) -> str | None:
    for signature, words in _SIGNATURES:
        if head.startswith(signature):
            return words
    if head.startswith(b"PK\x03\x04"):
        is_office = _OFFICE.search(head) is not None
        return (
            "is an Excel file or another Office file; write one JSON object per row. {example}"
            if is_office
            else "is a zip archive; unpack it first: unzip {file}"
        )
    for mark, name in _TO_TEXT.items():
        if head.startswith(mark):
            return _explain_encoding(name)
    if b"\x00" not in head:
        return None
    is_wide = head[1::2].count(0) > len(head) // 4 or head[::2].count(0) > len(head) // 4
    return _explain_encoding("UTF-16") if is_wide else "is a binary file; requests are text. {example}"


def _explain_encoding(name: str) -> str:
    return f"is {name}, and requests must be UTF-8; convert it: iconv -f {name} -t UTF-8 {{file}} > requests.jsonl"


def _explain_text(head: bytes) -> str | None:
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")
    whole = text if len(head) < _HEAD_BYTES else text.rpartition("\n")[0]
    lines = [line.strip() for line in whole.splitlines() if line.strip()]
    if not lines:
        return None
    first = lines[:_LINES_LOOKED_AT]
    values = [_parse(line) for line in first]
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        return _explain_objects(objects)
    if first[0].startswith("[") and (len(lines) == 1 or values[0] is None):
        return "is one JSON array; write each of its elements on a line of its own: jq -c '.[]' {file} > requests.jsonl"
    if first[0].startswith("{"):
        return _explain_broken_objects(first)
    return None if values[0] is not None else _explain_words(first)


def _parse(line: str) -> Any:
    """None for a line that is not JSON."""
    try:
        return decode(line)
    except (DecodeError, RecursionError):
        return None


def _explain_objects(objects: Sequence[dict[str, Any]]) -> str | None:
    """Lines that are JSON, but not requests."""
    names = {name for one in objects for name in one}
    if "custom_id" in names and "params" in names and "body" not in names:
        return "has requests in Anthropic's form (params); OpenAI's form has method, url and body. {example}"
    if all("response" in one and "error" in one for one in objects) and "body" not in names:
        return "has the answers of a batch, not requests; name the file that they are the answers to"
    if names & _REQUEST:
        return None
    if "messages" in names or {"role", "content"} <= names:
        return (
            "looks like a file of chats, as for fine-tuning: its lines have no custom_id, method, url and body, as "
            "requests must. {example}"
        )
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN_MAX]).replace("{", "").replace("}", "")
    what = f"have {shown}" if shown else "are empty"
    return f"is JSON Lines, but not of requests: its lines {what}, and no custom_id, method, url and body. {{example}}"


def _explain_broken_objects(lines: Sequence[str]) -> str | None:
    if all(line.startswith("{'") for line in lines):
        return "has Python objects in its lines, not JSON: write them with json.dumps"
    if len(lines) > 1 and _UNFINISHED.search(lines[0]):
        return "has JSON objects that span several lines; write each on one line: jq -c . {file} > requests.jsonl"
    return None


def _explain_words(lines: Sequence[str]) -> str | None:
    """None of the lines is JSON."""
    if lines[0].startswith("<"):
        return "looks like HTML or XML, not like JSON Lines. {example}"
    if any(line.startswith("{") for line in lines):
        return None
    for separator, name in _SEPARATORS.items():
        cells = lines[0].split(separator)
        if len(cells) > 1 and all(0 < len(cell.strip()) <= _NAME_CHARACTERS_MAX for cell in cells):
            return f"looks like {name}, not like JSON Lines; write one JSON object per row. {{example}}"
    return "looks like plain text, not like JSON Lines; write one JSON object per request. {example}"
