"""The result of a step: one of five categories, which decides what happens next.

""             advance to the next step
RateLimited    wait for the rate budget, then repeat the step; uses no retry
Transient      exponential backoff with jitter, up to max_retries, then the inbox
SchemaInvalid  the inbox, at once: a retry would fail in the same way, and cost tokens
Fatal          the inbox, at once; if a credential is wrong, the whole run is parked instead
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from batchwright.engine.policy import classify
from batchwright.errors import (
    ConfigurationError,
    Conflict,
    Fatal,
    OperationError,
    RateLimited,
    RetryLater,
    SchemaInvalid,
    StorageError,
    Transient,
)

_MESSAGE_CHARACTERS_MAX = 1000
_TRACEBACK_CHARACTERS_MAX = 8000


class Category(StrEnum):
    """In the order of severity: the worst of several results decides."""

    OK = ""
    RATE_LIMITED = "RateLimited"
    TRANSIENT = "Transient"
    SCHEMA_INVALID = "SchemaInvalid"
    FATAL = "Fatal"

    @property
    def weight(self) -> int:
        return list(Category).index(self)


RETRIES = "retries"
"""The scope of a Transient error whose retries are used up: the item has failed, but may succeed if it is retried."""
_TERMINAL = frozenset({Category.FATAL, Category.SCHEMA_INVALID})
_CONFIGURATION_SECONDS = 60.0
_CATEGORIES: Mapping[type[OperationError], Category] = {
    RateLimited: Category.RATE_LIMITED,
    Transient: Category.TRANSIENT,
    SchemaInvalid: Category.SCHEMA_INVALID,
    Fatal: Category.FATAL,
}


class Deferred(RetryLater):
    """Raised by a step that cannot continue yet, although nothing is wrong. It waits without using a retry.

    >>> raise Deferred("a batch of 1,200 embeddings", 60, waits_for="batch")
    """

    def __init__(self, reason: str, delay_seconds: float = 60.0, *, waits_for: str = "resource") -> None:
        super().__init__(reason, delay_seconds)
        self.waits_for = waits_for


class BudgetUsedUp(Exception):
    """The next request would exceed the budget of the run: the run is parked."""


class OutputLost(Exception):
    """The output of an earlier step is gone, so that step must run again."""

    def __init__(self, step: str) -> None:
        super().__init__(f"the output of {step} is gone")
        self.step = step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One attempt at a step; `output` is set if the category is ""."""

    step: str
    category: Category = Category.OK
    output: Mapping[str, Any] | None = None
    code: str = ""
    message: str = ""
    scope: str | None = None
    retry_after: float | None = None
    waits_for: str | None = None
    """What the step waits for, although nothing is wrong."""
    traceback: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.category is Category.OK and self.waits_for is None

    @property
    def is_final(self) -> bool:
        """Whether the item has failed: at once, or because its retries are used up."""
        if self.waits_for is not None:
            return False
        return self.category in _TERMINAL or (self.category is Category.TRANSIENT and self.scope == RETRIES)


def result_from_exception(step: str, error: BaseException) -> StepResult:
    """Map any exception of a step to a category. There is no other such mapping."""
    if isinstance(error, Deferred):
        return StepResult(step=step, message=error.reason, retry_after=error.delay_seconds, waits_for=error.waits_for)
    if isinstance(error, StorageError):
        return StepResult(step=step, message=str(error), retry_after=10.0, waits_for="storage")
    if isinstance(error, ConfigurationError):  # another worker may be configured correctly
        seconds = _CONFIGURATION_SECONDS
        return StepResult(step=step, message=str(error), retry_after=seconds, waits_for="configuration")
    if isinstance(error, Conflict):  # another transaction was first; the retry will see its result
        error = Transient(str(error), code="conflict")
    verdict = classify(error)
    if isinstance(verdict, RetryLater):
        return StepResult(step=step, message=verdict.reason, retry_after=verdict.delay_seconds, waits_for="resource")
    category = next(of for kind, of in _CATEGORIES.items() if isinstance(verdict, kind))
    is_ours = isinstance(error, OperationError)
    return StepResult(
        step=step,
        category=category,
        code=verdict.code or verdict.kind,
        message=str(error)[:_MESSAGE_CHARACTERS_MAX] or type(error).__name__,
        scope=verdict.scope if isinstance(verdict, Fatal) else None,
        retry_after=verdict.retry_after if isinstance(verdict, RateLimited) else None,
        traceback=None if is_ours else "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS_MAX:],
    )


def worst(results: Sequence[StepResult]) -> StepResult:
    """The result that decides: the worst category, then one that ends the item, then one that waits."""
    return max(results, key=lambda one: (one.category.weight, one.is_final, one.waits_for is not None))
