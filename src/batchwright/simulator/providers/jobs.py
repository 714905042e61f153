"""One job model for all providers: the clock decides the state of a job, and its input decides the results.

new ─▶ queued ─▶ running ─▶ succeeded │ failed │ expired
                    └─▶ cancelling ─▶ cancelled
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from batchwright.simulator.providers.faults import Fault

_FAIL = re.compile(r"(?:\[\[|__)fail(?:[:_](\d{3}))?(?:\]\]|__)")
_NEW_STATUS = "SIMULATED_NEW_STATUS"


class Stage(StrEnum):
    """The stage of a job."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_end(self) -> bool:
        return self in (Stage.SUCCEEDED, Stage.FAILED, Stage.CANCELLED, Stage.EXPIRED)


class Clock:
    """The server's time. At speed 0 it moves only on `advance`."""

    def __init__(self, start: float | None = None, speed: float = 0.0) -> None:
        self.speed = speed
        self.set(time.time() if start is None else start)

    def now(self) -> float:
        return self._base + (time.monotonic() - self._since) * self.speed

    def set(self, now: float) -> None:
        self._base = now
        self._since = time.monotonic()

    def advance(self, seconds: float) -> None:
        self._base += seconds


def stamp(moment: float) -> str:
    """A time in the format that most providers use."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class Item:
    """One request, or one audio file, of a job."""

    id: str
    ask: Any
    text: str
    """The text that is searched for a marker such as `[[fail]]` or `__fail_500__`."""
    problem: str | None = None
    """Why the provider cannot work on it."""
    status: int = 400
    """The status with which it then fails."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The outcome of an item: 200 is success, 0 means that it was not finished."""

    item: Item
    status: int
    fault_message: str | None = None
    """The message of the fault that made it fail."""

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def message(self) -> str:
        asked = f"{self.item.id} failed with {self.status}, as its input asks"
        return self.fault_message or self.item.problem or asked


@dataclass(frozen=True, slots=True)
class Counts:
    """Results so far."""

    total: int
    succeeded: int
    failed: int

    @property
    def pending(self) -> int:
        return self.total - self.succeeded - self.failed


@dataclass(slots=True, kw_only=True)
class Job:
    """A remote job. `body` holds what only its protocol knows."""

    id: str
    provider: str
    number: int
    trace: str
    """The request that created it, which is searched for its marker."""
    created_at: float
    items: Sequence[Item]
    queue_seconds: float
    run_seconds: float
    cancel_seconds: float
    window_seconds: float = math.inf
    """How long after its start the provider gives up."""
    begun_at: float | None = None
    cancelled_at: float | None = None
    problems: Sequence[Mapping[str, Any]] = ()
    """Why the job fails in validation."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    publish: Callable[[Job], None] | None = None
    """Writes the results into a bucket once the job has ended."""

    @property
    def runs_at(self) -> float:
        return math.inf if self.begun_at is None else self.begun_at + self.queue_seconds

    @property
    def ends_at(self) -> float:
        if self.begun_at is None:
            return math.inf
        if self.problems or "failed" in self.faults:
            return self.runs_at
        if self.cancelled_at is not None:
            return self.cancelled_at + self.cancel_seconds
        return min(self.runs_at + self.run_seconds, self.begun_at + self.window_seconds)

    @property
    def listed_at(self) -> float:
        return self.created_at + (self.faults["lag"].seconds if "lag" in self.faults else 0.0)

    def stage(self, now: float) -> Stage:
        if self.begun_at is None:
            return Stage.NEW
        if now >= self.ends_at:
            return self._ending()
        if self.cancelled_at is not None:
            return Stage.CANCELLING
        return Stage.QUEUED if now < self.runs_at else Stage.RUNNING

    def word(self, now: float, words: Mapping[Stage, str]) -> str:
        """The provider's name for the stage; a fault makes it an unknown name while the job runs."""
        stage = self.stage(now)
        if stage is Stage.RUNNING and (fault := self.faults.get("unknown_status")) is not None:
            return fault.code or _NEW_STATUS
        return words[stage]

    def cancel(self, now: float) -> None:
        if not self.stage(now).is_end and self.cancelled_at is None:
            self.cancelled_at = now

    def share(self, now: float) -> float:
        """The share of the work that is done."""
        until = min(now, self.ends_at, math.inf if self.cancelled_at is None else self.cancelled_at)
        done = (until - self.runs_at) / self.run_seconds if self.run_seconds else float(until >= self.runs_at)
        most = self.faults["expired"].share if "expired" in self.faults else 1.0
        return max(0.0, min(done, most))

    def outcomes(self, now: float) -> list[ItemResult]:
        """The current outcome of every item, in the order of the input."""
        if self.problems or "failed" in self.faults:
            return [ItemResult(item, 0) for item in self.items]
        finished = math.floor(len(self.items) * self.share(now) + 1e-9)
        return [self._outcome(i, item) if i < finished else ItemResult(item, 0) for i, item in enumerate(self.items)]

    def counts(self, now: float) -> Counts:
        found = [one.status for one in self.outcomes(now) if one.status]
        return Counts(len(self.items), found.count(200), len(found) - found.count(200))

    def delivered(self, now: float, *, with_unfinished: bool = False) -> list[ItemResult]:
        """Outcomes as in the results: faults make some missing, doubled, unknown or reordered."""
        found = [one for one in self.outcomes(now) if one.status or with_unfinished]
        if "missing" in self.faults:
            found = found[1:]
        if "duplicate" in self.faults:
            found = found[:1] + found
        if "stranger" in self.faults and found:
            found.append(ItemResult(dataclasses.replace(found[0].item, id="stranger"), found[0].status))
        if "shuffled" in self.faults:
            found.reverse()
        return [] if "empty" in self.faults else found

    def why(self) -> tuple[str | None, str]:
        """Code and message of a job that failed as a whole."""
        if self.problems:
            return self.problems[0].get("code"), self.problems[0]["message"]
        fault = self.faults.get("failed")
        usual = "The job failed because of a fault rule."
        return (None, usual) if fault is None else (fault.code, fault.message or usual)

    def spoil(self, parts: Sequence[bytes]) -> list[bytes]:
        """The first line or file cut in half, if a fault asks for it."""
        found = list(parts)
        if "malformed" in self.faults and found:
            found[0] = found[0][: len(found[0]) // 2]
        return found

    def lines(self, parts: Sequence[bytes]) -> bytes:
        return b"".join(one + b"\n" for one in self.spoil(parts))

    def _outcome(self, index: int, item: Item) -> ItemResult:
        if item.problem is not None:
            return ItemResult(item, item.status)
        if (found := _FAIL.search(item.text)) is not None:
            return ItemResult(item, int(found[1] or 400))
        partial = self.faults.get("partial")
        if partial is not None and (index + 1) % partial.every == 0:
            return ItemResult(item, partial.status or 400, partial.message)
        return ItemResult(item, 200)

    def _ending(self) -> Stage:
        if self.problems or "failed" in self.faults:
            return Stage.FAILED
        if self.cancelled_at is not None:
            return Stage.CANCELLED
        is_late = self.ends_at < self.runs_at + self.run_seconds
        return Stage.EXPIRED if is_late or "expired" in self.faults else Stage.SUCCEEDED
