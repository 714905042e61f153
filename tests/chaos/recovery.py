"""How long a job waited after its worker was killed: from the SIGKILL to the next start of that job."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.chaos.history import Event, History
from tests.chaos.operations import BULK

Kind = Literal["plain", "alone", "in line", "restart", "stall"]
Times = Sequence[tuple[float, float]]
KINDS: dict[Kind, str] = {
    "plain": "started again",
    "alone": "started again alone, as a suspect",
    "in line": "started again behind thousands of their own kind",
    "restart": "started again, PostgreSQL restarted meanwhile",
    "stall": "started again, a stopped worker held row locks",
}


@dataclass(slots=True)
class Recoveries:
    """Seconds from the kill to the rescue, and to the next start, by what delayed them."""

    rescued: list[float] = field(default_factory=list)
    started: dict[Kind, list[float]] = field(default_factory=lambda: defaultdict(list))


def recoveries(
    history: History, killed: Mapping[str, float], *, outages: Times, stalls: Times, lease_seconds: float
) -> Recoveries:
    """`killed` has the moment of death of every worker that was killed.

    Two cases are counted separately. No job is rescued in the first lease after the database is available again. And a
    worker that is stopped in a transaction keeps its row locks, until it continues or PostgreSQL ends it after 10 s.
    """
    found = Recoveries()
    restarts = [(stopped_at, answered_at + lease_seconds) for stopped_at, answered_at in outages]
    for events in history.of_job.values():
        for place, event in enumerate(events):
            if event.event != "job.rescued" or event.worker not in killed:
                continue
            death = max(killed[event.worker], _claimed_at(events[:place], event))
            again = next((later for later in events[place:] if later.event == "job.started"), None)
            end = again.ts if again is not None else event.ts
            hindrance = _hindrance(death, end, restarts, stalls)
            if hindrance is None:
                found.rescued.append(event.ts - death)
            if again is not None:
                kind = _kind(history, again)
                found.started[hindrance or kind if kind == "plain" else kind].append(again.ts - death)
    return found


def _claimed_at(earlier: Sequence[Event], rescued: Event) -> float:
    """A claim that a worker had sent when it was killed may be committed a moment later."""
    starts = (event.ts for event in earlier if event.event == "job.started" and event.claim == rescued.claim)
    return next(starts, 0.0)


def _hindrance(begin: float, end: float, restarts: Times, stalls: Times) -> Kind | None:
    if any(since < end and begin < until for since, until in restarts):
        return "restart"
    if any(since < end and begin < until for since, until in stalls):
        return "stall"
    return None


def _kind(history: History, again: Event) -> Kind:
    earlier = [event for event in history.of_job[again.job_id] if event.id < again.id and event.status is not None]
    if [event.event for event in earlier[-4:]] == ["job.started", "job.rescued"] * 2:
        return "alone"
    return "in line" if history.jobs[again.job_id].priority == BULK else "plain"


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest rank: a value that was measured."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]
