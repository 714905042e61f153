"""Reads a CSV file page by page, records the byte at which each page ends, and can resume from there.

Of a malformed record only the first line is lost: reading continues after it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from batchwright.errors import SchemaInvalid

LINE_BYTES_MAX = 64 * 1024
RECORD_LINES_MAX = 20
COLUMNS_MAX = 100
VALUE_CHARACTERS_KEPT = 100
_SEPARATORS = (",", ";", "\t")
_BOM = b"\xef\xbb\xbf"


class Position(NamedTuple):
    """Where the next record starts: its byte, and its line number, counted from 1."""

    offset: int
    line: int


START = Position(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a row was not kept."""

    line: int
    column: str
    value: str | None
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.column}: {self.reason}"


class Record(NamedTuple):
    """A row by column, or what is wrong with it as a whole."""

    line: int
    values: dict[str, str]
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Some consecutive records, and where they start and end."""

    start: Position
    end: Position
    records: list[Record]


class Table:
    """A CSV file with a header; `page` reads from `position`."""

    def __init__(self, file: BinaryIO, name: str, required: Sequence[str]) -> None:
        self._lines = _Lines(file)
        self._name = name
        self.separator, self.columns = self._header(required)
        self._reader = csv.reader(self._lines, delimiter=self.separator, strict=True)

    @property
    def position(self) -> Position:
        return self._lines.position

    def seek(self, position: Position) -> None:
        self._lines.seek(position)

    def page(self, rows_max: int) -> Page | None:
        """The next records, fewer at the end of the file; None after the end."""
        start = self.position
        records: list[Record] = []
        for record in self._records():
            records.append(record)
            if len(records) == rows_max:
                break
        return Page(start, self.position, records) if self.position != start else None

    def _records(self) -> Iterator[Record]:
        while True:
            self._lines.begin_record()
            line = self.position.line
            try:
                fields = next(self._reader)
            except StopIteration:
                return
            except (csv.Error, _Malformed) as error:
                self._lines.leave_first_line()
                yield Record(line, {}, Problem(line=line, column="", value=None, reason=str(error)))
                continue
            if any(field.strip() for field in fields):
                yield self._record(line, fields)

    def _record(self, line: int, fields: list[str]) -> Record:
        if len(fields) != len(self.columns):
            reason = f"the row has {len(fields)} fields, the header has {len(self.columns)}"
            return Record(line, {}, Problem(line=line, column="", value=None, reason=reason))
        return Record(line, {name: field.strip() for name, field in zip(self.columns, fields, strict=True)})

    def _header(self, required: Sequence[str]) -> tuple[str, list[str]]:
        """Choose the separator with which the header has the required columns."""
        try:
            text = next(self._lines, "")
        except _Malformed as error:
            raise SchemaInvalid(f"{self._name!r} has no header that can be read: {error}", code="no_header") from error
        found = [(separator, _names(text, separator)) for separator in _SEPARATORS]
        separator, columns = max(found, key=lambda one: (len(set(required) & set(one[1])), len(one[1])))
        missing = [name for name in required if name not in columns]
        if missing:
            raise SchemaInvalid(
                f"{self._name!r} lacks the column{'s'[: len(missing) > 1]} {', '.join(missing)}; "
                f"its first line has: {shown(', '.join(columns)) or 'nothing'}",
                code="missing_column",
            )
        doubled = sorted({name for name in columns if columns.count(name) > 1})
        if doubled or len(columns) > COLUMNS_MAX:
            what = f"the column {doubled[0]} twice" if doubled else f"more than {COLUMNS_MAX} columns"
            raise SchemaInvalid(f"{self._name!r} has {what}", code="bad_header")
        return separator, columns


class _Malformed(Exception):
    """The file cannot be read as CSV at this place."""


class _Lines:
    """The lines of a file as text, with the byte position after the last line returned.

    Bytes that are not UTF-8 become lone surrogates, so that only a row that contains them is refused.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._count = 0
        self._behind_first = START
        self.position = START
        self.seek(START)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._count == RECORD_LINES_MAX:
            raise _Malformed(f"a quoted field spans more than {RECORD_LINES_MAX} lines; is a quote not closed?")
        raw = self._file.readline(LINE_BYTES_MAX + 1)
        if not raw:
            raise StopIteration
        is_too_long = len(raw) > LINE_BYTES_MAX
        end = self.position.offset + len(raw) + (self._skip_line(raw) if is_too_long else 0)
        self.position = Position(end, self.position.line + 1)
        self._count += 1
        if self._count == 1:
            self._behind_first = self.position
        if is_too_long:
            raise _Malformed(f"the line is longer than {LINE_BYTES_MAX:,} bytes")
        return raw.removeprefix(_BOM if self.position.line == 2 else b"").decode("utf-8", "surrogateescape")

    def seek(self, position: Position) -> None:
        self._file.seek(position.offset)
        self.position = position

    def begin_record(self) -> None:
        self._count = 0
        self._behind_first = self.position

    def leave_first_line(self) -> None:
        """Drop only the first line of a malformed record; the other lines are read again as rows."""
        self.seek(self._behind_first)

    def _skip_line(self, raw: bytes) -> int:
        skipped = 0
        while raw and not raw.endswith(b"\n"):
            raw = self._file.readline(LINE_BYTES_MAX)
            skipped += len(raw)
        return skipped


def shown(value: str) -> str:
    """A value fit for messages and for the database: short, and without characters that cannot be stored."""
    clean = value.encode("utf-8", "replace").decode().replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return clean if len(clean) <= VALUE_CHARACTERS_KEPT else clean[: VALUE_CHARACTERS_KEPT - 1] + "…"


def _names(text: str, separator: str) -> list[str]:
    try:
        fields = next(csv.reader([text], delimiter=separator, strict=True), [])
    except csv.Error:
        return []
    return [field.strip().lower() for field in fields]
