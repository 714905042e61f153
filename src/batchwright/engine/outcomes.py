"""What an operation may return, and the settle with which a worker ends its claim of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchwright.engine.jobs import CHILDREN_MAX, Claim, NewJob
from batchwright.errors import Fatal

Write = Callable[[Any], Awaitable[None]]
"""Receives the connection of the settling transaction: its rows and the job's success are one commit."""


@dataclass(frozen=True, slots=True)
class Done:
    """The job is done. `then` jobs start afterwards, `write` happens in the same commit as the success.

    >>> Done({"rows": 12}, then=[NewJob("recalculate", {"year": 2026})])
    """

    result: Any = None
    _: dataclasses.KW_ONLY
    progress: tuple[int, int] | None = None
    then: Sequence[NewJob] = ()
    write: Write | None = None


@dataclass(frozen=True, slots=True)
class Snooze:
    """Run again later; no attempt is used. To poll something, write an operation that snoozes.

    >>> Snooze(120, "the provider is still working")
    """

    seconds: float
    reason: str | None = None
    _: dataclasses.KW_ONLY
    progress: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for children. When the last one has ended, the job closes with `result`, or is resumed.

    More than `allow_failures` unsuccessful children (True: any number) fail the job.

    >>> Wait([NewJob("embed", {"page": n}) for n in range(200)], on_join="resume", allow_failures=5)
    """

    children: Sequence[NewJob]
    _: dataclasses.KW_ONLY
    result: Any = None
    on_join: Literal["close", "resume"] = "close"
    allow_failures: int | bool = 0


Outcome = Done | Snooze | Wait


Verb = Literal["succeed", "fail", "retry", "snooze", "release", "wait"]


@dataclass(slots=True)
class Settle:
    """One fenced move out of RUNNING: the verb and its columns, as the statement of that name expects them.

    Treat it as immutable. It is not frozen, because every job needs one and a frozen one takes four times as long to
    create.
    """

    verb: Verb
    claim: Claim
    values: Mapping[str, Any]


def check_outcome(outcome: Outcome) -> None:
    """Refuse an invalid outcome: raises Fatal with the reason."""
    match outcome:
        case Done():
            problem = _problem_with_done(outcome)
        case Snooze():
            problem = _problem_with_snooze(outcome)
        case Wait():
            problem = _problem_with_wait(outcome)
    if problem is not None:
        raise Fatal(f"the operation returned an invalid outcome: {problem}", code="invalid_outcome")


def _problem_with_done(done: Done) -> str | None:
    if not _are_jobs(done.then):
        return "Done.then must be a list of NewJob"
    if done.write is not None and not callable(done.write):
        return "Done.write must be an async function that takes the connection"
    return _problem_with_progress(done.progress)


def _problem_with_snooze(snooze: Snooze) -> str | None:
    seconds = snooze.seconds
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        return f"Snooze.seconds must be a number from 0 to less than 1e9, not {seconds!r}"
    return _problem_with_progress(snooze.progress)


def _problem_with_wait(wait: Wait) -> str | None:
    if not _are_jobs(wait.children):
        return "Wait.children must be a list of NewJob"
    if len(wait.children) > CHILDREN_MAX:
        return f"Wait has {len(wait.children)} children; the limit is {CHILDREN_MAX}; use two levels of children"
    if wait.on_join not in ("close", "resume"):
        return f"Wait.on_join must be 'close' or 'resume', not {wait.on_join!r}"
    if not isinstance(wait.allow_failures, int) or wait.allow_failures < 0:
        return f"Wait.allow_failures must be a count or True, not {wait.allow_failures!r}"
    return None


def _problem_with_progress(progress: Any) -> str | None:
    if progress is None:
        return None
    fits = isinstance(progress, tuple) and len(progress) == 2 and all(isinstance(part, int) for part in progress)
    return None if fits else "progress must be (current, total)"


def _are_jobs(jobs: Any) -> bool:
    return isinstance(jobs, Sequence) and all(isinstance(job, NewJob) for job in jobs)
