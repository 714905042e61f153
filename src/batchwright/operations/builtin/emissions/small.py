"""Small files, of factors or units: read as a whole, and written in the one commit in which their job succeeds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from batchwright.errors import SchemaInvalid
from batchwright.operations.builtin.emissions.files import DataFile
from batchwright.operations.builtin.emissions.rows import Unusable
from batchwright.operations.builtin.emissions.table import Problem, Record, Table

FILE_BYTES_MAX = 8 * 1024 * 1024
ROWS_MAX = 20_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """The usable rows of a file, what is wrong with the others, and the file that they came from."""

    file: DataFile
    rows: list[T]
    problems: list[Problem]

    @property
    def bad(self) -> int:
        return len({problem.line for problem in self.problems})


def load(
    path: str,
    tenant: str,
    columns: Sequence[str],
    parse: Callable[[Record], T | Unusable],
    key: Callable[[T], tuple[str, Hashable]],
) -> Loaded[T]:
    """Read a file; `key` names a column and the value that no two rows may share."""
    with DataFile(path, tenant, bytes_max=FILE_BYTES_MAX) as file:
        page = Table(file.reader, path, columns).page(ROWS_MAX + 1)
        file.refuse_change()
    records = page.records if page is not None else []
    if len(records) > ROWS_MAX:
        raise SchemaInvalid(f"{path!r} has more than {ROWS_MAX:,} rows", code="too_many_rows")
    rows: list[T] = []
    problems: list[Problem] = []
    first: dict[Hashable, int] = {}
    for record in records:
        parsed = parse(record)
        if isinstance(parsed, Unusable):
            problems += parsed.problems
            continue
        column, value = key(parsed)
        if first.setdefault(value, record.line) == record.line:
            rows.append(parsed)
        else:
            problems.append(_double(record, column, first[value]))
    return Loaded(file, rows, problems)


def _double(record: Record, column: str, first: int) -> Problem:
    value = record.values[column]
    reason = f"{value!r} was already used in line {first}"
    return Problem(line=record.line, column=column, value=value, reason=reason)
