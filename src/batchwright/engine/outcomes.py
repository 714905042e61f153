"""What an operation may return, checked before the engine acts on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchwright.engine.jobs import CHILDREN_MAX, Done, NewJob, Outcome, Snooze, Wait
from batchwright.errors import Fatal


def checked(returned: Any) -> Outcome:
    """An outcome that makes sense; a plain value is `Done(value)`; nonsense is Fatal and says what is wrong."""
    match returned:
        case Done():
            problem = _problem_with_done(returned)
        case Snooze():
            problem = _problem_with_snooze(returned)
        case Wait():
            problem = _problem_with_wait(returned)
        case _:
            return Done(returned)
    if problem is not None:
        raise Fatal(f"the operation returned nonsense: {problem}", code="invalid_outcome")
    outcome: Outcome = returned
    return outcome


def _problem_with_done(done: Done) -> str | None:
    if not _are_jobs(done.then):
        return "Done.then must be a list of NewJob"
    if done.write is not None and not callable(done.write):
        return "Done.write must be an async function that takes the connection"
    return _problem_with_progress(done.progress)


def _problem_with_snooze(snooze: Snooze) -> str | None:
    seconds = snooze.seconds
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        return f"Snooze.seconds must be a number from 0 up, not {seconds!r}"
    return _problem_with_progress(snooze.progress)


def _problem_with_wait(wait: Wait) -> str | None:
    if not _are_jobs(wait.children):
        return "Wait.children must be a list of NewJob"
    if len(wait.children) > CHILDREN_MAX:
        return f"Wait has {len(wait.children)} children; the limit is {CHILDREN_MAX}, use two levels"
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
