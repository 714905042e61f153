"""How lines ended, and sums over them: what journals count, what the database adds up, and what batches show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any, Self

CODES_MAX = 50
OTHER = "other"
TOKENS_UNKNOWN = 2**32 - 1
Tokens = tuple[int, int, int, int]
"""Input, cached, output and reasoning tokens as written in a record: the largest number means unknown."""


class LineStatus(IntEnum):
    """How a line ended: with success, with an error of its request, by the deadline or by a cancellation."""

    OK = 0
    FAILED = 1
    EXPIRED = 2
    CANCELLED = 3

    @classmethod
    def of(cls, code: str) -> LineStatus:
        """The status of a line that ends with this error code."""
        return _STATUSES_OF_CODES.get(code, cls.FAILED)


_OK = LineStatus.OK
"""Used for every line; access through the enum takes five times as long."""
_STATUSES_OF_CODES = {"batch_cancelled": LineStatus.CANCELLED, "batch_expired": LineStatus.EXPIRED}


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over finished lines; `errors` is by code, each with its count and the custom_id of one such line."""

    lines: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Reads what `as_json` wrote; absent sums are 0."""
        known = {each.name for each in fields(cls)}
        errors = {code: (int(count), str(sample)) for code, (count, sample) in found.get("errors", {}).items()}
        return cls(**{**{name: value for name, value in found.items() if name in known}, "errors": errors})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def usage(self) -> dict[str, int]:
        """Sums of the tokens that servers reported; a server that reports none adds nothing."""
        return {
            "input": self.input_tokens,
            "cached": self.cached_tokens,
            "output": self.output_tokens,
            "reasoning": self.reasoning_tokens,
        }

    def add(self, status: LineStatus, tokens: Tokens) -> None:
        """Count one more line; for a failed line, call `add_error` as well."""
        self.add_all([(status, tokens)])

    def add_all(self, lines: Sequence[tuple[LineStatus, Tokens]]) -> None:
        """Count more lines; for failed lines, call `add_error` as well."""
        completed = 0
        for status, (input, cached, output, reasoning) in lines:
            if input != TOKENS_UNKNOWN:
                self.input_tokens += input
            if cached != TOKENS_UNKNOWN:
                self.cached_tokens += cached
            if output != TOKENS_UNKNOWN:
                self.output_tokens += output
            if reasoning != TOKENS_UNKNOWN:
                self.reasoning_tokens += reasoning
            if status is _OK:
                completed += 1
            elif status is LineStatus.FAILED:
                self.failed += 1
            elif status is LineStatus.EXPIRED:
                self.expired += 1
            else:
                self.cancelled += 1
        self.completed += completed
        self.lines += len(lines)

    def add_error(self, code: str, sample: str, count: int = 1) -> None:
        """Count an error. The first codes are counted by name, all others together as `other`."""
        if code not in self.errors and len(self.errors) - (OTHER in self.errors) >= CODES_MAX:
            code = OTHER
        before, first = self.errors.get(code, (0, sample))
        self.errors[code] = (before + count, first)

    def add_errors(self, other: Tally) -> None:
        """Add only the errors of another tally."""
        for code, (count, sample) in other.errors.items():
            self.add_error(code, sample, count)

    def __iadd__(self, other: Tally) -> Self:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.add_errors(other)
        return self

    def __add__(self, other: Tally) -> Tally:
        total = Tally()
        total += self
        total += other
        return total


_SUMS = tuple(each.name for each in fields(Tally) if each.name != "errors")
