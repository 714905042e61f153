"""The judge: checks every promise of the engine against the rows, events and effects of a run.

A check yields one `(job, what is wrong)` for each breach; a good run has none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from batchwright.states import JOB, JobStatus
from tests.chaos.history import TERMINAL, Event, History
from tests.chaos.operations import has_effect
from tests.chaos.workload import Ledger

Breach = tuple[UUID | str, str]

VERBS = {
    "job.started": "claim",
    "job.succeeded": "succeed",
    "job.failed": "fail",
    "job.retried": "retry",
    "job.retry_later": "snooze",
    "job.released": "release",
    "job.waited": "wait",
    "job.joined": "join",
    "job.cancelled": "cancel",
    "job.expired": "expire",
    "job.rescued": "rescue",
    "job.rerun": "rerun",
}
SETTLES = {"succeed", "fail", "retry", "snooze", "release", "wait", "rescue"}
_GIVES_BACK = {"snooze", "release", "wait"}
_MOVES = {(move.verb, move.source, move.target) for move in JOB.moves}


def judge(history: History, ledger: Ledger) -> dict[str, list[Breach]]:
    """All breaches by the name of the promise."""
    replays = [replay(history.of_job[job.id], job) for job in history.jobs.values()]
    return {
        "jobs lost": list(lost(history, ledger)),
        "jobs not terminal": list(unfinished(history)),
        "write= effects doubled, missing or of nobody": list(wrong_effects(history)),
        "zombie writes accepted": [breach for one in replays for breach in one.zombies],
        "histories that are no legal path to their row": [breach for one in replays for breach in one.illegal],
        "innocent jobs parked": list(innocents(history)),
        "poison jobs not parked": list(unpunished(history, ledger)),
        "two jobs of one key at a time": list(overlaps(history)),
        "parents whose counters or ending are wrong": list(wrong_parents(history)),
        "children missing or doubled": list(wrong_children(history)),
        "chained jobs missing or doubled": list(wrong_chains(history)),
        "idempotency keys with another number of jobs than one": list(wrong_keys(history, ledger)),
        "jobs cancelled by nobody": list(cancelled_by_nobody(history, ledger)),
        "snoozes and retries miscounted": list(miscounted(history)),
    }


# Replay -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Replay:
    """A job as its events describe it; `is_held` is true between a claim and its end."""

    id: UUID
    illegal: list[Breach]
    zombies: list[Breach]
    status: str | None = None
    claim: int = 0
    attempt: int = 0
    is_held: bool = False

    def apply(self, event: Event) -> None:
        verb = VERBS.get(event.event)
        is_fresh = self.is_held and event.claim == self.claim
        if event.status is None:
            if not is_fresh:
                self.zombies.append((self.id, f"{event.event} of claim {event.claim} was kept, {self}"))
        elif event.event == "job.enqueued":
            self._expect(event, self.status is None, 0, 0)
        elif verb in SETTLES and not is_fresh:
            self.zombies.append((self.id, f"{event.event} of claim {event.claim} was accepted, {self}"))
        else:
            self._move(event, verb)
        if event.status is not None:
            self.status, self.claim, self.attempt = event.status, event.claim, event.attempt
            self.is_held = verb == "claim"

    def _move(self, event: Event, verb: str | None) -> None:
        is_legal = (verb, self.status, event.status) in _MOVES and not (verb == "join" and self.is_held)
        attempt = self.attempt + (verb == "claim")
        if verb in _GIVES_BACK or (verb == "rescue" and event.status == JobStatus.QUEUED):
            attempt -= 1
        if verb == "rerun":
            attempt = 0
        self._expect(event, is_legal, self.claim + (verb == "claim"), attempt)

    def _expect(self, event: Event, is_legal: bool, claim: int, attempt: int) -> None:
        if not is_legal or (event.claim, event.attempt) != (claim, attempt):
            found = f"{event.event} to {event.status}, claim {event.claim}, attempt {event.attempt}"
            self.illegal.append((self.id, f"{found}; {self}"))

    def __str__(self) -> str:
        held = "held" if self.is_held else "not held"
        return f"but it was {self.status}, {held}, claim {self.claim}, attempt {self.attempt}"


def replay(events: Iterable[Event], job: Any) -> Replay:
    told = Replay(job.id, [], [])
    for event in events:
        told.apply(event)
    if (told.status, told.claim, told.attempt) != (job.status, job.claims, job.attempts):
        row = f"{job.status}, claim {job.claims}, attempt {job.attempts}"
        told.illegal.append((job.id, f"the row says {row}, {told}"))
    return told


# Promises ---------------------------------------------------------------------------------------------------------


def lost(history: History, ledger: Ledger) -> Iterator[Breach]:
    for id in ledger.enqueued - history.jobs.keys():
        yield id, "was enqueued and is not there"


def unfinished(history: History) -> Iterator[Breach]:
    for job in history.jobs.values():
        if job.status not in TERMINAL or job.locked_by is not None:
            yield job.id, f"{job.job_type} is {job.status}, locked by {job.locked_by}, {job.children_open} open"


def wrong_effects(history: History) -> Iterator[Breach]:
    for job in history.jobs.values():
        expected = int(job.status == "SUCCEEDED" and _writes(job))
        if history.effects[job.id] != expected:
            yield job.id, f"{job.job_type} is {job.status} and has {history.effects[job.id]} effects, not {expected}"
    for id in history.effects.keys() - history.jobs.keys():
        yield id, "has an effect and is no job"


def _writes(job: Any) -> bool:
    match job.job_type:
        case "chaos.write":
            return True
        case "chaos.chain":
            return has_effect(job.payload["step"])
        case "chaos.leaf":
            return bool(job.payload["writes"])
    return False


def innocents(history: History) -> Iterator[Breach]:
    """Only jobs that were made to fail, whose deadline passed, or that may start only once may be FAILED."""
    for job in history.jobs.values():
        if job.status == "FAILED" and job.code not in _excuses(job):
            yield job.id, f"{job.job_type} failed: {job.code}: {job.reason}"


def _excuses(job: Any) -> set[str]:
    excuses = {"deadline_exceeded"} if job.deadline is not None else set()
    match job.job_type:
        case "chaos.poison":
            excuses.add("poison")
        case "chaos.once":
            excuses.add("abandoned")
        case "chaos.flaky" if job.payload["failures"] >= job.max_attempts:
            excuses.add("flaky")
        case "chaos.leaf" if job.payload["fails"]:
            excuses.add("made_to_fail")
        case "chaos.parent":  # `wrong_parents` checks whether that is right
            excuses.add("children_failed")
    return excuses


def unpunished(history: History, ledger: Ledger) -> Iterator[Breach]:
    for id in ledger.poisons & history.jobs.keys():
        job = history.jobs[id]
        if job.code != "poison":
            yield id, f"is {job.status}: {job.code}"


def overlaps(history: History) -> Iterator[Breach]:
    """A job has its key from its first start to its end, also while it snoozes or is rescued.

    Ids of events are assigned before their commit, and the next job of a key starts only after it.
    """
    holders: dict[tuple[str, str], UUID] = {}
    for event in history.events:
        job = history.jobs.get(event.job_id)
        if job is None or job.exclusive_key is None or event.status is None:
            continue
        key = (job.tenant, job.exclusive_key)
        holder = holders.get(key)
        if event.event == "job.started" and holder not in (None, job.id):
            yield job.id, f"started while {holder} had the key {key}"
        if event.event == "job.started":
            holders[key] = job.id
        elif event.status in TERMINAL and holder == job.id:
            del holders[key]


def wrong_parents(history: History) -> Iterator[Breach]:
    for job in history.of_type("chaos.parent"):
        if not job.waits:
            continue
        children = [child for child in history.children[job.id] if child.round == job.waits]
        failed = sum(child.status != "SUCCEEDED" for child in children)
        counted = (job.children_open, job.children_failed, job.progress_total)
        joined_before = _runs_itself_again(history, job)
        if counted != (0, failed, len(children)) and not joined_before:
            yield job.id, f"counts (open, failed, all) = {counted}; the truth is (0, {failed}, {len(children)})"
        if problem := _wrong_ending(job, len(children), failed, joined_before=joined_before):
            yield job.id, problem


def _runs_itself_again(history: History, job: Any) -> bool:
    """It was rerun after it had joined, and has not waited since: its counters are reset when it waits again."""
    life = history.since_rerun(job)
    is_rerun = life[0].event == "job.rerun" and life[0].status == JobStatus.QUEUED
    return is_rerun and all(event.event != "job.waited" for event in life)


def _wrong_ending(job: Any, children: int, failed: int, *, joined_before: bool) -> str | None:
    """After a deadline a parent joins with any failures; a rerun removes the deadline, but not the join."""
    allowed = job.payload["allow_failures"]
    too_many = allowed is not True and failed > allowed
    if job.status == "SUCCEEDED" and job.deadline is None and too_many and not joined_before:
        return f"succeeded although {failed} children did not and {allowed} may fail"
    if job.code == "children_failed" and not too_many:
        return f"failed although only {failed} children did and {allowed} may"
    if job.status == "SUCCEEDED" and job.payload["on_join"] == "resume":
        expected = {"round": job.waits, "succeeded": children - failed, "total": children, "distinct": children}
        if job.result != expected:
            return f"was resumed with {job.result}; the truth is {expected}"
    return None


def wrong_children(history: History) -> Iterator[Breach]:
    for job in history.of_type("chaos.parent"):
        found: dict[int, Counter[int]] = defaultdict(Counter)
        for child in history.children[job.id]:
            found[child.round][child.payload["index"]] += 1
        expected = {round: Counter(range(job.payload["width"])) for round in range(1, job.waits + 1)}
        if found != expected:
            sizes = {round: sum(indexes.values()) for round, indexes in found.items()}
            yield job.id, f"waited {job.waits} times for {job.payload['width']} children; found by round: {sizes}"


def wrong_chains(history: History) -> Iterator[Breach]:
    """The first link and every link that a succeeded one has chained, each once, and no others."""
    expected: Counter[tuple[str, int]] = Counter()
    found: Counter[tuple[str, int]] = Counter()
    for job in history.of_type("chaos.chain"):
        name, step = job.payload["chain"], job.payload["step"]
        found[name, step] += 1
        expected[name, 1] = 1
        if job.status == "SUCCEEDED" and step < job.payload["steps"]:
            expected[name, step + 1] = 1
    for link in found.keys() | expected.keys():
        if found[link] != expected[link]:
            yield link[0], f"link {link[1]} is there {found[link]} times, not {expected[link]}"


def wrong_keys(history: History, ledger: Ledger) -> Iterator[Breach]:
    rows: dict[str, set[UUID]] = defaultdict(set)
    for job in history.jobs.values():
        if job.idempotency_key is not None:
            rows[job.idempotency_key].add(job.id)
    for key, answered in ledger.idempotent.items():
        if len(answered) != 1 or rows[key] != answered:
            yield key, f"was answered with {answered}; the table has {rows[key]}"


def cancelled_by_nobody(history: History, ledger: Ledger) -> Iterator[Breach]:
    """We cancelled it or one above it, another job of its key superseded it, or its parent's deadline passed.

    A rerun removes a deadline that has passed.
    """
    for job in history.jobs.values():
        if job.status != "CANCELLED":
            continue
        above = list(history.line(job))
        is_superseded = any((one.reason or "").startswith("superseded by job ") for one in above)
        is_overdue = any(one.deadline is not None or history.was_rerun(one) for one in above[1:])
        if not (is_superseded or is_overdue or any(one.id in ledger.cancelled for one in above)):
            yield job.id, f"{job.job_type}: {job.reason}"


def miscounted(history: History) -> Iterator[Breach]:
    """Each snooze and each retry is one accepted settle: their number is exact however often a worker died."""
    rules: list[tuple[str, str, Callable[[Any], int]]] = [
        ("chaos.snooze", "job.retry_later", lambda job: job.payload["times"]),
        ("chaos.flaky", "job.retried", lambda job: min(job.payload["failures"], job.max_attempts - 1)),
    ]
    for job_type, event, expected in rules:
        for job in history.of_type(job_type):
            if job.status != "CANCELLED" and history.count(job, event) != expected(job):
                yield job.id, f"{job_type} has {history.count(job, event)} of {event}, not {expected(job)}"
