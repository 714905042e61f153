"""The judge of the failover chaos: what a failover may lose, and what it must not.

A check yields one `(what, what is wrong)` for each breach; a good run has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from batchwright.batches.journal.journal import scan, valid_end
from batchwright.batches.tally import LineStatus
from batchwright.db.check import Finding, Level
from batchwright.states import BatchStatus
from tests.chaos import batch_verdict
from tests.chaos.batch_client import Found, Request
from tests.chaos.batch_verdict import doubled, lost, misplaced, mixed_up, out_of_order, read_lines
from tests.chaos.failover_stage import Ledger
from tests.chaos.history import TERMINAL, History
from tests.chaos.verdict import Breach, replay, wrong_effects

_CLAIMS = """
SELECT job_id, claim, worker, extract(epoch FROM ts)::float8, job_type
FROM batchwright.job_event JOIN batchwright.job ON job.id = job_id
WHERE event = 'job.started' ORDER BY job_event.id
"""
_SEGMENTS = """
SELECT shard, claim, host, start_byte, end_byte, lines, extract(epoch FROM registered_at)::float8
FROM batchwright.batch_segment
"""
_ENDED = "SELECT id, extract(epoch FROM finished_at)::float8 FROM batchwright.job WHERE finished_at IS NOT NULL"


class Start(NamedTuple):
    """A claim: who made it, and when."""

    worker: str
    at: float
    job_type: str


class Segment(NamedTuple):
    """A registered range of a journal."""

    shard: int
    claim: int
    host: str
    start: int
    end: int
    lines: int
    at: float
    """A range that was lost and registered again is another one."""


@dataclass(slots=True)
class Known:
    """What a database knows at one moment."""

    claims: dict[tuple[UUID, int], Start] = field(default_factory=dict)
    ended: dict[UUID, float] = field(default_factory=dict)
    segments: set[Segment] = field(default_factory=set)


def read_known(url: str) -> Known:
    with psycopg.connect(url) as connection:
        claims = {(id, claim): Start(*start) for id, claim, *start in connection.execute(_CLAIMS)}
        segments = {Segment(*row) for row in connection.execute(_SEGMENTS)}
        return Known(claims, dict(connection.execute(_ENDED).fetchall()), segments)


@dataclass(slots=True, kw_only=True)
class Evidence:
    """Everything that is known after a round."""

    requests: Sequence[Request]
    found: Found
    row: Mapping[str, Any]
    findings: Sequence[Finding]
    journaled: Mapping[int, str]
    """The offset of every line that has an answer in a journal of a machine, and where it is."""
    history: History
    ledger: Ledger
    before: Known
    """The state of the server just before it was killed."""
    after: Known
    """The state at the end."""


def read_journals(machines: Mapping[str, Path], batch_id: str) -> dict[int, str]:
    """Answers in the journals of these work folders, up to the last whole record of each."""
    found = {}
    for name, work in machines.items():
        for path in sorted((work / batch_id).glob("*.seg")):
            for record in scan(path, 0, valid_end(path)):
                if record.status is LineStatus.OK:
                    found[record.offset] = f"{name}: {path.name}"
    return found


def judge(evidence: Evidence, *, wanted: BatchStatus, is_lossless: bool) -> dict[str, list[Breach]]:
    """All breaches by the name of the promise; without loss, nothing that was answered may be gone."""
    output, errors = read_lines(evidence.found.output), read_lines(evidence.found.errors)
    batch = batch_verdict.Evidence(evidence.requests, evidence.found, evidence.row, [], evidence.history)
    is_whole = wanted is BatchStatus.COMPLETED
    replays = [replay(evidence.history.of_job[job.id], job) for job in evidence.history.jobs.values()]
    return {
        "batches that ended otherwise": list(ended_otherwise(evidence, wanted)),
        "answers lost from the files": list(answers_lost(evidence, output)),
        "lines in neither file": list(lost(batch, output, errors)),
        "lines doubled": list(doubled(output, errors)),
        "lines in the wrong file": list(misplaced(batch, output, errors if is_whole else ())),
        "lines out of the input's order": [*out_of_order(batch, output), *out_of_order(batch, errors)],
        "answers of another request": list(mixed_up(batch, [*output, *errors])),
        "files that do not fit their manifest": list(unverified(evidence)),
        "jobs lost": list(jobs_lost(evidence, is_lossless=is_lossless)),
        "jobs stuck, or failed": list(stuck(evidence)),
        "write= effects doubled, missing or of nobody": list(wrong_effects(evidence.history)),
        "zombie writes accepted": [breach for one in replays for breach in one.zombies],
        "histories that are no legal path to their row": [breach for one in replays for breach in one.illegal],
    }


# Promises ---------------------------------------------------------------------------------------------------------


def ended_otherwise(evidence: Evidence, wanted: BatchStatus) -> Iterator[Breach]:
    row = evidence.row
    if row.get("status") != wanted:
        yield row.get("id", "no batch"), f"is {row.get('status')}, not {wanted}: {row.get('errors')}"


def answers_lost(evidence: Evidence, output: Sequence[Mapping[str, Any]]) -> Iterator[Breach]:
    """Every answer in a machine's journal is in the output file, or a later answer to the same line is."""
    there = {line["custom_id"] for line in output}
    for request in evidence.requests:
        where = evidence.journaled.get(request.offset)
        if where is not None and request.custom_id not in there:
            yield request.custom_id, f"is not in the output file, but its answer is in {where}"


def unverified(evidence: Evidence) -> Iterator[Breach]:
    if not evidence.findings:
        yield "the batch", "has no manifest"
    for finding in evidence.findings:
        if finding.level is not Level.OK:
            yield finding.name, finding.text


def jobs_lost(evidence: Evidence, *, is_lossless: bool) -> Iterator[Breach]:
    """Jobs that were answered before the log was held back are safe in every mode."""
    ledger = evidence.ledger
    for id in (ledger.enqueued.keys() if is_lossless else ledger.safe) - evidence.history.jobs.keys():
        yield id, "was enqueued and is not there"


def stuck(evidence: Evidence) -> Iterator[Breach]:
    for job in evidence.history.jobs.values():
        if job.status not in TERMINAL or job.locked_by is not None:
            yield job.id, f"{job.job_type} is {job.status}, locked by {job.locked_by}, {job.children_open} open"
        elif job.status == "FAILED":
            yield job.id, f"{job.job_type} failed: {job.code}: {job.reason}"


# What was lost ----------------------------------------------------------------------------------------------------


def losses(evidence: Evidence, hosts: Mapping[str, str]) -> dict[str, int]:
    """What the failover lost, which is not a breach by itself. `hosts` are machines by the names of work folders."""
    before, after = evidence.before, evidence.after
    lost_segments = before.segments - after.segments
    lost_claims = {key: start for key, start in before.claims.items() if after.claims.get(key) != start}
    again = lost_claims.keys() & after.claims.keys()
    return {
        "segments lost": len(lost_segments),
        "answers in them": sum(segment.lines for segment in lost_segments),
        "claims lost": len(lost_claims),
        "of these of shards": sum(start.job_type == "batch.shard" for start in lost_claims.values()),
        "claim numbers given twice": len(again),
        "of these of shards, to another worker": sum(
            after.claims[key].worker != lost_claims[key].worker and lost_claims[key].job_type == "batch.shard"
            for key in again
        ),
        "settled by another than the holder": sum(1 for _ in settled_by_others(evidence.history)),
        "segments of another than the holder": sum(1 for _ in registered_by_others(evidence, hosts)),
        "lines registered twice": registered_twice(evidence),
        "jobs enqueued": len(evidence.ledger.enqueued),
        "jobs lost": len(evidence.ledger.enqueued.keys() - evidence.history.jobs.keys()),
        "jobs ended twice": sum(after.ended.get(id, at) != at for id, at in before.ended.items()),
    }


def settled_by_others(history: History) -> Iterator[tuple[UUID, int]]:
    """Claims that one worker made and another one settled, because both had the same number."""
    for id, events in history.of_job.items():
        holders = {event.claim: event.worker for event in events if event.event == "job.started"}
        for event in events:
            is_settle = event.event in ("job.succeeded", "job.retry_later", "job.released", "job.waited", "job.failed")
            if is_settle and event.worker != holders.get(event.claim, event.worker):
                yield id, event.claim


def registered_by_others(evidence: Evidence, hosts: Mapping[str, str]) -> Iterator[Segment]:
    """Segments of a machine where no worker had that claim."""
    holders: dict[tuple[int, int], set[str]] = {}
    for (id, claim), start in evidence.after.claims.items():
        job = evidence.history.jobs.get(id)
        if job is not None and job.job_type == "batch.shard":
            holders.setdefault((shard_number(job), claim), set()).add(start.worker.partition(":")[0])
    for segment in evidence.after.segments:
        if hosts.get(segment.host) not in holders.get((segment.shard, segment.claim), set()):
            yield segment


def shard_number(job: Any) -> int:
    return int(job.payload["number"])


def registered_twice(evidence: Evidence) -> int:
    """How many more lines are registered than the batch has, because two holders of a shard have sent them."""
    return max(0, sum(segment.lines for segment in evidence.after.segments) - len(evidence.requests))
