"""Bytes to text: by byte order mark, by what the document declares, as UTF-8, or else as Windows-1252."""

from __future__ import annotations

import codecs

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE_BYTES = 4_096


def decode(data: bytes, declared: str | None = None) -> tuple[str, str | None]:
    """The text, and a warning if its encoding had to be guessed."""
    encoding = find_encoding(data) or _usable(declared)
    if encoding is not None:
        text = data.decode(encoding, "replace")
        return text, f"some characters are not valid {encoding}" if "\ufffd" in text else None
    try:
        return data.decode(), None
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace"), "the text is not UTF-8; it was read as Windows-1252"


def find_encoding(data: bytes) -> str | None:
    """The encoding that the bytes show: by their byte order mark, or by the zero bytes of Latin text in UTF-16."""
    marked = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), None)
    if marked is not None:
        return marked
    sample = data[: _SAMPLE_BYTES & ~1]
    zeros = sample[0::2].count(0), sample[1::2].count(0)
    half = len(sample) // 2
    if half and max(zeros) > 0.4 * half and min(zeros) == 0:
        return "utf-16-le" if zeros[1] else "utf-16-be"
    return None


def _usable(declared: str | None) -> str | None:
    """Only text encodings: Python's codecs include others, such as base64."""
    try:
        found = codecs.lookup(declared) if declared else None
    except (LookupError, ValueError):
        return None
    if found is None or not found._is_text_encoding or found.name in {"utf-16", "utf-32", "idna", "punycode"}:  # noqa: SLF001 - no public way
        return None
    return found.name
