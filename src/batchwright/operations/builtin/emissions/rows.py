"""Turns the text of a row into a value, or into the reasons why that is not possible."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import NamedTuple

from batchwright.operations.builtin.emissions.table import Problem, Record, shown

ENTRY_COLUMNS = ("reference", "organisation_unit", "activity", "date", "amount", "unit")
FACTOR_COLUMNS = ("module", "activity", "unit", "kg_co2e_per_unit")
UNIT_COLUMNS = ("code", "dimension", "to_base", "name")

MODULE = re.compile(r"[a-z][a-z0-9_]{0,49}")
_WORD_CHARACTERS_MAX = 100
_NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,10})?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Entry(NamedTuple):
    """One activity of one organisation unit."""

    line: int
    reference: str
    organisation_unit: str
    activity: str
    date: date
    amount: Decimal
    unit: str


class Factor(NamedTuple):
    """What one unit of an activity emits."""

    module: str
    activity: str
    unit: str
    kg_per_unit: Decimal


class Unit(NamedTuple):
    """A unit of measure; an amount times `to_base` is the amount in its dimension's base unit."""

    code: str
    dimension: str
    to_base: Decimal
    name: str
    is_retired: bool = False


@dataclass(frozen=True, slots=True)
class Unusable:
    """A row that was not kept, and why; never without a reason."""

    problems: list[Problem]


def parse_entry(record: Record, year: int, units: Mapping[str, Unit]) -> Entry | Unusable:
    row = _Row(record)
    entry = Entry(
        line=record.line,
        reference=row.word("reference"),
        organisation_unit=row.word("organisation_unit"),
        activity=row.word("activity"),
        date=row.day("date", year),
        amount=row.number("amount"),
        unit=row.unit("unit", units),
    )
    return row.unusable() or entry


def parse_factor(record: Record, module: str | None, units: Mapping[str, Unit]) -> Factor | Unusable:
    row = _Row(record)
    factor = Factor(
        module=row.module("module", module),
        activity=row.word("activity"),
        unit=row.unit("unit", units),
        kg_per_unit=row.number("kg_co2e_per_unit"),
    )
    return row.unusable() or factor


def parse_unit(record: Record) -> Unit | Unusable:
    row = _Row(record)
    unit = Unit(
        code=row.word("code"),
        dimension=row.word("dimension"),
        to_base=row.number("to_base", zero=False),
        name=row.word("name"),
    )
    return row.unusable() or unit


class _Row:
    """Reads columns and collects problems, so that a report names every bad column of a row at once."""

    def __init__(self, record: Record) -> None:
        self._line = record.line
        self._values = record.values
        self._problems = [] if record.problem is None else [record.problem]
        self._is_malformed = record.problem is not None

    def unusable(self) -> Unusable | None:
        return Unusable(self._problems) if self._problems else None

    def word(self, column: str) -> str:
        value = self._values.get(column, "")
        if not value:
            return self._refuse(column, "is empty")
        if len(value) > _WORD_CHARACTERS_MAX:
            return self._refuse(column, f"has {len(value)} characters; the limit is {_WORD_CHARACTERS_MAX}")
        if _UNPRINTABLE.search(value):
            return self._refuse(column, "has characters that are not UTF-8 text")
        return value

    def module(self, column: str, expected: str | None) -> str:
        value = self.word(column)
        if value and not MODULE.fullmatch(value):
            return self._refuse(column, "is not a module; write lower-case letters, digits and '_'")
        if value and expected is not None and value != expected:
            return self._refuse(column, f"is not {expected!r}, the module of this file")
        return value

    def number(self, column: str, *, zero: bool = True) -> Decimal:
        value = self.word(column)
        if value and not _NUMBER.fullmatch(value):
            value = self._refuse(column, "is not a number; write it as 1234.5, without thousands separators")
        number = Decimal(value or 1)
        if number < 0:
            self._refuse(column, "is negative")
        elif number == 0 and not zero:
            self._refuse(column, "is zero")
        return number

    def day(self, column: str, year: int) -> date:
        value = self.word(column)
        try:
            day = date.fromisoformat(value) if _DATE.fullmatch(value) else None
        except ValueError:
            day = None
        if day is not None and day.year != year:
            self._refuse(column, f"is not in {year}")
        elif value and day is None:
            self._refuse(column, f"is not a date; write it as {year}-12-31")
        return day or date(year, 1, 1)

    def unit(self, column: str, units: Mapping[str, Unit]) -> str:
        value = self.word(column)
        if value and value not in units:
            return self._refuse(column, "is an unknown unit" if units else "is an unknown unit; run unit_sync first")
        if value and units[value].is_retired:
            return self._refuse(column, "is a retired unit")
        return value

    def _refuse(self, column: str, reason: str) -> str:
        if not self._is_malformed and all(problem.column != column for problem in self._problems):
            value = shown(self._values.get(column, ""))
            reason = f"{value!r} {reason}" if value else reason
            self._problems.append(Problem(line=self._line, column=column, value=value, reason=reason))
        return ""
